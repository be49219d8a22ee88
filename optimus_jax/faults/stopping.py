"""Signal handling: how a run stops on request, and its exit codes.

Before training, a signal ends the program: SIGINT (Ctrl-C) with exit code 130, and SIGTERM, by
which clusters preempt a machine, with 75, as the run is worth restarting. SIGUSR1, with which job
scripts announce that time is running out, means the same as SIGTERM, and so does SIGHUP (a closed
terminal), as the connection may have been lost. SIGHUP stays ignored under nohup. During training,
a signal is a request that the trainer reads between two steps; it then saves and ends with exit
code 0 for Ctrl-C, 75 for SIGTERM. A second Ctrl-C ends without saving: 130.

The reply to a signal says which steps will still be finished. A single process calls `begins`
before each step, which either registers the step or says that the run should stop. Several
processes agree on the step after which they stop, at most two steps after the one during which the
signal came.

`jax.distributed.initialize` starts a preemption service that puts its own SIGTERM handler
underneath Python's, which then never runs although `signal.getsignal` still shows it. So whoever
calls it does this first, on every process:

    jax.config.update("jax_enable_preemption_service", False)

Orbax takes that to mean "no preemption".

A signal must not hide the error that ends a run: when one of several processes fails, the launcher
sends SIGTERM while that process may still be printing its error. So signals are ignored once an
error is being raised, and during cleanup after the run; after that (`exit_with_code_on_signal`)
they end the program with the exit code that it would have had.
"""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Literal, NoReturn, Self

from optimus_jax.errors import LearningError, OptimusError

EXIT_RESTART = 75
"""Exit code (EX_TEMPFAIL) of a run that was stopped and is worth starting again with --resume."""
EXIT_USER_ERROR = 2
"""Exit code after a user error; a restart would only repeat it."""
EXIT_BROKEN = 1
"""Python's exit code after an unexpected exception."""
EXIT_NOT_LEARNING = 76
"""Exit code of a run that no longer learns (faults/divergence.py); an unchanged restart would end
the same way."""
EXIT_INTERRUPT = 130
"""Exit code of a program that Ctrl-C has ended at once (128 + SIGINT, as in a shell)."""
EXIT_NO_READER = 141
"""Exit code if the reader of standard output is gone (128 + SIGPIPE, as in a shell)."""
EXIT_CODES: dict[int, tuple[str, bool]] = {
    0: ("The run is done, or Ctrl-C stopped it and its state is saved.", False),
    EXIT_BROKEN: ("An unexpected exception; standard error has its traceback.", True),
    EXIT_USER_ERROR: ("User error; the message says what to do.", False),
    EXIT_RESTART: ("Stopped by the cluster or ended by a fault.", True),
    EXIT_NOT_LEARNING: ("The run no longer learns (faults/divergence.py).", False),
    126: ("The shell cannot start Python, which is not executable.", False),
    127: ("The shell cannot find Python.", False),
    EXIT_INTERRUPT: ("Ctrl-C before the first step, or a second one: not saved.", False),
    128 + signal.SIGABRT: ("JAX lost the other processes.", True),
    128 + signal.SIGKILL: ("Killed, such as by the system when memory runs out.", True),
    128 + signal.SIGSEGV: ("Crashed in C code.", True),
    EXIT_NO_READER: (
        "The reader of the output has gone, as with `| head`. Training runs continue instead.",
        False,
    ),
}
"""Exit codes of a command -> what happened, and whether a restart with --resume may help."""
NOT_BEGUN = "stopped before training had begun"
TERMINATING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that mean that the machine or the terminal goes away."""


STEPS_TO_AGREE = 2
"""Steps that several processes may still begin after the one in which a signal came."""


def exit_code_of(error: BaseException | None) -> int:
    """Exit code for an error: a user error, a run that no longer learns, or a fault worth a
    restart.
    """
    if isinstance(error, LearningError):
        return EXIT_NOT_LEARNING
    return EXIT_USER_ERROR if isinstance(error, OptimusError) else EXIT_RESTART


def exit_code_after(reason: str | None) -> int:
    """Exit code of a run that ended without an error: EXIT_RESTART if the cluster stopped it, 0 if
    a person did or it is done.
    """
    return EXIT_RESTART if reason == "terminate" else 0


_is_ending = threading.Event()
"""Whether the program is already ending: an error is being raised, or the run is done."""


class Terminated(BaseException):
    """One of TERMINATING came before training had begun."""


class ImmediateStop(KeyboardInterrupt):
    """Ctrl-C came while a stop was already requested."""


def exit_on_signal() -> None:
    """From now on SIGINT and TERMINATING end the program with a one-line message; used during
    imports, where an exception may get lost.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        _say(f"\n{NOT_BEGUN}\n")
        os._exit(EXIT_INTERRUPT if number == signal.SIGINT else EXIT_RESTART)

    for number in _handled_signals():
        signal.signal(number, end)


def raise_on_signal() -> None:
    """From now on SIGINT raises KeyboardInterrupt and TERMINATING raise Terminated, so that cleanup
    runs; until `keep_reason`.
    """

    def raise_it(number: int, frame: FrameType | None) -> None:
        if not _is_ending.is_set():
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    _is_ending.clear()
    for number in _handled_signals():
        signal.signal(number, raise_it)


def keep_reason(error: BaseException) -> None:
    """Call it with the exception that ends a program which has called `raise_on_signal`: from now
    on no signal replaces it, if it is an Exception.
    """
    if isinstance(error, Exception):
        _is_ending.set()


def exit_with_code_on_signal(code: int) -> None:
    """From now on TERMINATING end the program with exit code `code`, and SIGINT has its default
    action: no cleanup is left.
    """
    for number in _handled_signals():
        signal.signal(
            number, signal.SIG_DFL if number == signal.SIGINT else lambda *_: os._exit(code)
        )


def _handled_signals() -> list[signal.Signals]:
    """Signals to handle: all, but SIGHUP only if it is not ignored (nohup)."""
    return [
        number
        for number in (signal.SIGINT, *TERMINATING)
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


def _say(text: str) -> None:
    """Write to standard error. Not by print: a handler may run in the middle of one.

    The reader may be gone, as Ctrl-C also ends `tee`.
    """
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


class StopRequest:
    """Context in which the first SIGINT (Ctrl-C) or TERMINATING signal becomes a stop request, with
    a message on stderr.

    Ctrl-C after a stop request raises ImmediateStop. Leaving the context ends the run. Python runs
    handlers in its main thread only: entered from another thread, this does nothing and `reason`
    stays None.

    Args:
      num_processes: number of processes of the run.
      last_step: last step of the run; None: unknown.
    """

    def __init__(self, *, num_processes: int = 1, last_step: int | None = None) -> None:
        self.reason: Literal["interrupt", "terminate"] | None = None
        self._previous = {}
        self._num_processes, self._last_step = num_processes, last_step
        self._begun: int | None = None
        self._ended: int | None = None
        self._is_deciding = self._has_announced = False

    @property
    def exit_code(self) -> int:
        """The program's exit code."""
        return exit_code_after(self.reason)

    def begins(self, step: int) -> bool:
        """Whether `step` may be dispatched; if so, it is registered as begun.

        With several processes the answer is always True.

        The reply to a signal that comes meanwhile is printed after the decision, so that it names
        the right steps.
        """
        self._is_deciding = True
        may_begin = self.reason is None or self._num_processes > 1
        if may_begin:
            self._begun = step
        self._is_deciding = False
        self._announce()
        return may_begin

    def request(self) -> None:
        """Request a stop, as Ctrl-C does; may be called in any thread."""
        if self.reason is None:
            self.reason = "interrupt"
            self._announce()

    def ended(self, step: int) -> None:
        """The devices have finished `step`."""
        self._ended = step

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _handled_signals():
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            _is_ending.set()
        else:
            keep_reason(error)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.reason is None:
            self.reason = "interrupt" if number == signal.SIGINT else "terminate"
            self._announce()
        elif number == signal.SIGINT:
            raise ImmediateStop

    def _announce(self) -> None:
        """Print once what a requested stop will still do."""
        if self.reason is None or self._is_deciding or self._has_announced:
            return
        self._has_announced = True
        _say(
            f"\nstopping: {self._what_is_finished()} saved first; Ctrl-C (again) ends at once,"
            " without saving\n"
        )

    def _what_is_finished(self) -> str:
        begun, ended = self._begun, self._ended
        if begun is None:
            return (
                "the step under way is finished and"
                if ended is None
                else f"the state after step {ended} is"
            )
        if self._num_processes > 1:
            last = (
                begun + STEPS_TO_AGREE
                if self._last_step is None
                else min(begun + STEPS_TO_AGREE, self._last_step)
            )
            return (
                f"the steps under way are finished, by all processes, up to step {last} at"
                " most, and"
            )
        first = begun if ended is None else ended + 1
        if first > begun:
            return f"the state after step {begun} is"
        return (
            f"step {begun} is finished and"
            if first == begun
            else f"steps {first} to {begun} are finished and"
        )
