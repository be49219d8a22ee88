"""Settings of all tests: eight CPU devices, strict promotion of dtypes and ranks, no measured
profile of this machine.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from markers import marks_of
from quick_flags import QUICK_FLAGS
from worker_groups import Groups, by_length

# Read when jax is imported, which no test has done yet.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", QUICK_FLAGS]
)
os.environ["HF_HUB_OFFLINE"] = "1"  # a test never asks the network
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# A measured profile of this machine would decide what `--mesh auto` means. Programs that tests
# start see this directory too.
_cache = tempfile.TemporaryDirectory(prefix="optimus_jax-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name

# Most time of an example is tracing and compiling, so a deadline would say nothing about the code.
settings.register_profile(
    "optimus_jax", deadline=None, max_examples=40, derandomize=bool(os.environ.get("CI"))
)
settings.register_profile(  # make quick
    "quick", settings.get_profile("optimus_jax"), max_examples=10
)
settings.load_profile("optimus_jax")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of `make parity`."""
    parser.addoption("--plan", help="compare this plan alone with one device, as its test's id")
    parser.addoption("--model", help="with this model of tests/plans.py alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that start processes or compile steps: `make quick` leaves them out."""
    for item in items:
        for mark in marks_of(item.path, getattr(item, "originalname", item.name)):
            item.add_marker(mark)
    if config.getoption("plan") is not None:
        others = [item for item in items if "runs" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    items[:] = by_length(items)


MOST_MAPPINGS = 20_000
"""Memory mappings of a worker after which it forgets compiled programs. Each program has some, and
Linux gives a process 65,530: at the limit LLVM crashes."""


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between two files, free compiled programs if there are many."""
    if nextitem is not None and nextitem.path == item.path:
        return
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPPINGS:
        import jax

        jax.clear_caches()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups | None:
    """Schedule by `Groups` for `--dist loadfile`; other modes are unchanged."""
    if config.option.dist != "loadfile":
        return None
    config.option.loadscopereorder = False
    return Groups(config, log)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of the family llama in several files, and its tokenizer."""
    from published_models import with_tokenizer, write

    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    return with_tokenizer(write("llama", "sharded safetensors", "bfloat16", directory))


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text of words that this model's tokenizer has."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("the cat sat on the mat and the dog ran\n" * 100)
    return str(path)
