"""What `train` is given as objects and not by name: records, an optimizer, and a task."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import optax

from optimus_jax.config.aliases import alias_of
from optimus_jax.config.in_python import IN_PYTHON
from optimus_jax.config.request import dotted
from optimus_jax.data.given import RandomAccess, check_ends, check_paths, check_records, is_paths
from optimus_jax.errors import ConfigError, explain
from optimus_jax.system.paths import UserPath
from optimus_jax.training.own_optimizer import (
    SETTINGS,
    UNUSED,
    check_elementwise,
    check_transformation,
    use_own_optimizer,
)
from optimus_jax.training.task import Task
from optimus_jax.training.tasks import use_own_task

GivenData = UserPath | Sequence[UserPath] | RandomAccess | Iterable[Any]
"""Paths, or records or token ids by number; or an iterator of these with a state
(data/iterated.py)."""
NAME, TASK, HELD_OUT = "optimizer.name", "task", "evaluation.data"
DATA_WORDS = frozenset({"train_dataset", "train_data", "dataset"})
"""Names that other trainers have for `data`, where it is an object."""


_under_way: dict[int, "PythonObjects"] = {}
"""Those of the runs of this program that have not ended, by `id`."""


@dataclass(frozen=True, kw_only=True)
class PythonObjects:
    """The objects that a run is given."""

    records: RandomAccess | Iterable[Any] | None
    """Its data; None: it is named by paths."""
    held_out: RandomAccess | None
    """Its held-out data; None: it is named by paths, or a share of the data."""
    optimizer: optax.GradientTransformation | None
    """Its optimizer; None: it is one of OPTIMIZERS."""
    task: Task | None
    """Its task; None: it is one of TASKS."""

    @property
    def has_own(self) -> bool:
        """Whether a setting stands for one of these objects: a name that each program has once."""
        return self.optimizer is not None or self.task is not None

    def install(self) -> None:
        """Let settings find the optimizer and the task by their names.

        Raises ConfigError if a run is under way in this program, and it or this one has its own.
        """
        if _under_way and (self.has_own or any(each.has_own for each in _under_way.values())):
            raise ConfigError(
                explain(
                    "two runs at a time, of which one has a task or an optimizer that is given in"
                    " Python",
                    given=f"{len(_under_way)} under way in this program, and another one",
                    do="end the other run first, or start this one in a process of its own",
                )
            )
        use_own_optimizer(self.optimizer)
        use_own_task(self.task)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The run that has them is under way meanwhile."""
        _under_way[id(self)] = self
        try:
            yield
        finally:
            del _under_way[id(self)]

    def check(self) -> None:
        """Raise ConfigError if the optimizer cannot be used in every layout. Uses the devices."""
        if self.optimizer is not None:
            check_elementwise(self.optimizer)


def with_objects(
    overrides: Mapping[str, Any],
    data: GivenData | None,
    optimizer: str | optax.GradientTransformation | None,
    task: str | Task | None = None,
    eval_data: GivenData | None = None,
) -> tuple[dict[str, Any], PythonObjects]:
    """All settings by dotted name, those that stand for objects among them; and these objects.

    Args:
      overrides: settings by any name.
      data, optimizer, task, eval_data: arguments of `train`.
    Raises:
      OptimusError: an object cannot be used, or a setting has no use beside it.
    """
    given = dict(overrides)
    for name in DATA_WORDS & given.keys():
        if data is None and not is_paths(given[name]):
            data = given.pop(name)
    for name in [each for each in given if alias_of(each) == HELD_OUT]:
        if eval_data is None and not is_paths(given[name]):
            eval_data = given.pop(name)
    records, held_out = _named(given, "data", data), _named(given, "eval_data", eval_data)
    if held_out is not None:
        check_ends(held_out, "eval_data=")
    own_task = task if isinstance(task, Task) else None
    if not isinstance(task, str | Task | None):
        raise ConfigError(
            explain(
                "a task is a name, or a Task",
                given=repr(task),
                do="give a name, such as classification, or dataclasses.replace(a task, loss=...)",
            )
        )
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
    if task is not None:
        settings[TASK] = IN_PYTHON if own_task else task
    if optimizer is None or isinstance(optimizer, str):
        return settings, PythonObjects(
            records=records, held_out=held_out, optimizer=None, task=own_task
        )
    if twice := sorted((SETTINGS.keys() | UNUSED) & settings.keys()):
        raise ConfigError(
            explain(
                "an optimizer that is given in Python has its own learning rate, moments and"
                " weight decay",
                given=", ".join(f"{name}={settings[name]}" for name in twice),
                do="leave these settings out, or name an optimizer",
            )
        )
    own = check_transformation(optimizer)
    return {**settings, **SETTINGS}, PythonObjects(
        records=records, held_out=held_out, optimizer=own, task=own_task
    )


def _named(given: dict[str, Any], name: str, data: GivenData | None) -> Any:
    """Put data into settings by its name: its paths, or what stands for objects of the program,
    which are returned. Raises DataError if it is neither.
    """
    if data is None:
        return None
    if is_paths(data):
        check_paths(cast(UserPath | Sequence[UserPath], data), name)
        given[name] = data
        return None
    given[name] = IN_PYTHON
    return check_records(data, name)
