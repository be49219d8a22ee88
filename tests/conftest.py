"""The ground that every test stands on: eight CPU devices, strict promotion of dtypes and ranks, no
profile of this machine.
"""

import importlib.metadata
import os
import tempfile

import pytest
from hypothesis import settings
from markers import marks_of

# Read when jax is imported, which no test has done yet.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling costs far more than running what tests compile, here and in the programs that they
# start.
_quick = ["--xla_backend_optimization_level=0"]
if importlib.metadata.version("jax") < "0.11":  # which refuses what it does not know
    _quick.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", *_quick]
)
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# A profile that somebody measured here would decide what `--mesh auto` means. Programs that tests
# start see this too.
_cache = tempfile.TemporaryDirectory(prefix="optimus_jax-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name

# What an example costs is mostly tracing and compiling, whose time says nothing about the code.
settings.register_profile(
    "optimus_jax", deadline=None, max_examples=40, derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("optimus_jax")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start processes or compile steps: `make quick` leaves them out."""
    for item in items:
        for mark in marks_of(item.path, getattr(item, "originalname", item.name)):
            item.add_marker(mark)
