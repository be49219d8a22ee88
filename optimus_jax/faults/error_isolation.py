"""Isolates errors of displays and trackers, so that they cannot end a run."""

from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

from optimus_jax.faults.stopping import ImmediateStop
from optimus_jax.system.resilient_io import flush_with_timeout

T = TypeVar("T")


def isolate_errors(
    target: T, name: str, *, leaves: Callable[[SystemExit | KeyboardInterrupt], None] | None = None
) -> T:
    """A proxy of `target` whose methods never raise an Exception: a method that fails is reported
    on standard error once, and not called again.

    Failed and skipped calls return None, so use it for objects whose return values are not needed.

    Args:
      name: name of the object, for messages.
      leaves: is called when a method calls sys.exit or raises KeyboardInterrupt, in place of ending
        the program there; None: it does end there. A second Ctrl-C always does.
    """
    return cast(T, _ErrorIsolation(target, name, leaves))


def report_disabled(name: str, what: str, error: Exception) -> None:
    """Say on standard error that something has failed, and that the run goes on without it."""
    flush_with_timeout(
        f"\n{name} has failed ({what}: {type(error).__name__}: {error}); it is disabled; the run"
        " continues\n"
    )


class _ErrorIsolation:
    def __init__(
        self,
        target: Any,
        name: str,
        leaves: Callable[[SystemExit | KeyboardInterrupt], None] | None,
    ) -> None:
        self._target, self._name, self._leaves = target, name, leaves
        self._disabled: set[str] = set()

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._target, attribute)
        return self._isolated(attribute, value) if callable(value) else value

    def _isolated(self, attribute: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **named: Any) -> Any:
            if attribute in self._disabled:
                return None
            try:
                return call(*arguments, **named)
            except Exception as error:
                self._disabled.add(attribute)
                report_disabled(self._name, attribute, error)
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
