"""optimus_jax: dynamic parallelism for JAX.

`train(model="gpt2-nano", mesh="data=2,fsdp=4", steps=100)` is the whole main job. Names are loaded
when first used, so that importing a small module does not import JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optimus_jax.api import RunResult, train
    from optimus_jax.config import Config
    from optimus_jax.plan import Plan

_HOMES = {"train": "api", "RunResult": "api", "Config": "config", "Plan": "plan"}

__all__ = ["Config", "Plan", "RunResult", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"optimus_jax.{_HOMES[name]}"), name)
