"""What `train` is given as objects and not by name: records, and an optimizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optax

from optimus_jax.config.in_python import IN_PYTHON
from optimus_jax.config.request import dotted
from optimus_jax.data.given import RandomAccess, check_records, is_paths
from optimus_jax.errors import ConfigError, explain
from optimus_jax.system.paths import UserPath
from optimus_jax.training.own_optimizer import (
    SETTINGS,
    check_elementwise,
    check_transformation,
    use_own_optimizer,
)

GivenData = UserPath | Sequence[UserPath] | RandomAccess
"""Paths, or records or token ids by number."""
NAME = "optimizer.name"


@dataclass(frozen=True, kw_only=True)
class PythonObjects:
    """The objects that a run is given."""

    records: RandomAccess | None
    """Its data; None: it is named by paths."""
    optimizer: optax.GradientTransformation | None
    """Its optimizer; None: it is one of OPTIMIZERS."""

    def install(self) -> None:
        """Let settings find the optimizer by its name."""
        use_own_optimizer(self.optimizer)

    def check(self) -> None:
        """Raise ConfigError if the optimizer cannot be used in every layout. Uses the devices."""
        if self.optimizer is not None:
            check_elementwise(self.optimizer)


def with_objects(
    overrides: Mapping[str, Any],
    data: GivenData | None,
    optimizer: str | optax.GradientTransformation | None,
) -> tuple[dict[str, Any], PythonObjects]:
    """All settings by dotted name, those that stand for objects among them; and these objects.

    Args:
      overrides: settings by any name.
      data, optimizer: arguments of `train`.
    Raises:
      OptimusError: an object cannot be used, or a setting has no use beside it.
    """
    given, records = dict(overrides), None
    if data is not None and is_paths(data):
        given["data"] = data
    elif data is not None:
        records = check_records(data)
        given["data"] = IN_PYTHON
    if isinstance(optimizer, str):
        if given.get(NAME) not in (None, optimizer):
            raise ConfigError(
                explain(
                    f"{NAME} is given two values",
                    given=f"{NAME}={given[NAME]} and optimizer={optimizer}",
                    do="give one of them",
                )
            )
        given[NAME] = optimizer
    settings = dotted(given)
    if optimizer is None or isinstance(optimizer, str):
        return settings, PythonObjects(records=records, optimizer=None)
    if twice := sorted(SETTINGS.keys() & settings):
        raise ConfigError(
            explain(
                "an optimizer that is given in Python has its own learning rate and weight decay",
                given=", ".join(f"{name}={settings[name]}" for name in twice),
                do="leave these settings out, or name an optimizer",
            )
        )
    own = check_transformation(optimizer)
    return {**settings, **SETTINGS}, PythonObjects(records=records, optimizer=own)
