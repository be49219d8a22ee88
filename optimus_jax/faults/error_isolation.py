"""Isolates errors of displays and trackers, so that they cannot end a run."""

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, TypeVar, cast

from optimus_jax.faults.stopping import ImmediateStop
from optimus_jax.system.resilient_io import flush_with_timeout

T = TypeVar("T")


def isolate_errors(
    target: T,
    name: str,
    *,
    leaves: Callable[[SystemExit | KeyboardInterrupt], None] | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> T:
    """A proxy of `target` whose methods never raise an Exception: a method that fails is reported
    on standard error once, and not called again.

    Failed and skipped calls return None, so use it for objects whose return values are not needed.

    Args:
      name: name of the object, for messages.
      leaves: is called when a method calls sys.exit or raises KeyboardInterrupt, in place of ending
        the program there; None: it does end there. A second Ctrl-C always does.
      around: makes a context for each call.
    """
    return cast(T, _ErrorIsolation(target, name, leaves, around))


def report_failed(name: str, what: str, error: Exception, then: str) -> None:
    """Say on standard error, with the traceback, that a call has failed, and what follows."""
    told = "".join(traceback.format_exception(error))
    flush_with_timeout(
        f"\n{name} has failed ({what}: {type(error).__name__}: {error}); {then}; the run"
        f" continues\n{told}"
    )


class _ErrorIsolation:
    def __init__(
        self,
        target: Any,
        name: str,
        leaves: Callable[[SystemExit | KeyboardInterrupt], None] | None,
        around: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._target, self._name, self._leaves, self._around = target, name, leaves, around
        self._disabled: set[str] = set()

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._target, attribute)
        return self._isolated(attribute, value) if callable(value) else value

    def _isolated(self, attribute: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **named: Any) -> Any:
            if attribute in self._disabled:
                return None
            try:
                with self._around():
                    return call(*arguments, **named)
            except Exception as error:
                self._disabled.add(attribute)
                then = f"{attribute} is not called again"
                report_failed(self._name, attribute, error, then)
                return None
            except (SystemExit, KeyboardInterrupt) as error:
                if self._leaves is None or isinstance(error, ImmediateStop):
                    raise
                self._leaves(error)
                return None

        return guarded

    def __enter__(self) -> Self:
        self._isolated("__enter__", self._target.__enter__)()
        return self

    def __exit__(self, *error: Any) -> None:
        self._isolated("__exit__", self._target.__exit__)(*error)
