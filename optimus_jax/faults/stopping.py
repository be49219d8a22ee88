"""Stopping when asked.

What a signal does depends on what there is to lose. While a program starts, nothing: SIGINT
(Ctrl-C) ends it with exit code 130, and SIGTERM, which is how clusters take a machine away, with
75, as it is worth starting again. SIGUSR1, with which job scripts pass on that time is running out,
means the same as SIGTERM, and so does SIGHUP, a terminal that is closed: whoever had it may have
lost a connection. A SIGHUP that is ignored, as nohup has it, stays so. Once steps are run, signals
become a request that the trainer reads between two steps, after which it saves: exit code 0 for
Ctrl-C, 75 for SIGTERM. Ctrl-C while a stop is asked for ends without saving: 130.

The answer to a signal says which steps are still finished, and the trainer does that: a process on
its own asks `begins` before each step, which either announces the step or says that the run is to
stop. Processes that train together agree on the step that they stop after, which is at most two
steps after the one that the signal came in.

`jax.distributed.initialize` starts a preemption service that puts its own SIGTERM handler
underneath Python's, which then never runs although `signal.getsignal` still shows it. So whoever
calls it does this first, on every process:

    jax.config.update("jax_enable_preemption_service", False)

Orbax takes that to mean "no preemption". An error that ends the run is not to be lost to a signal:
of several processes the others end too, whoever launched them sends SIGTERM then, and the one that
knows the reason is still telling it. So once an error is on its way, signals mean nothing. Nor do
they once the run is done, or saved, while the rest is put in order; and then
(`exit_with_code_on_signal`) they end it as it would have ended.
"""

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Literal, NoReturn, Self

from optimus_jax.errors import LearningError, OptimusError

EXIT_RESTART = 75
"""Exit code (EX_TEMPFAIL) of a run that was stopped and is worth starting again with --resume."""
EXIT_USER_ERROR = 2
"""Exit code of a program that was asked for what cannot be: starting it again would only repeat
that."""
EXIT_BROKEN = 1
"""Exit code that Python gives a program with an error which nobody has foreseen."""
EXIT_NOT_LEARNING = 76
"""Exit code of a run that no longer learns (faults/divergence.py): started again as it was, it
would come to the same end."""
EXIT_INTERRUPT = 130
"""Exit code of a program that Ctrl-C has ended at once, as a shell has it (128 + SIGINT)."""
NOT_BEGUN = "stopped before training had begun"
TERMINATING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals of who takes the machine away, or the terminal."""


STEPS_TO_AGREE = 2
"""Steps that several processes may still begin after the one in which a signal came."""


def exit_code_of(error: BaseException | None) -> int:
    """Of a process that ends with an error: what the user can mend, a run that no longer learns, or
    what is worth another start.
    """
    if isinstance(error, LearningError):
        return EXIT_NOT_LEARNING
    return EXIT_USER_ERROR if isinstance(error, OptimusError) else EXIT_RESTART


_is_ending = threading.Event()
"""Whether the program ends by itself: an error is on its way, or the run has come to its end."""


class Terminated(BaseException):
    """One of TERMINATING came before training had begun."""


class ImmediateStop(KeyboardInterrupt):
    """Ctrl-C came while a stop was already asked for."""


def exit_on_signal() -> None:
    """From now on SIGINT and TERMINATING end the program with one line: for imports, in which an
    exception may get lost.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        _say(f"\n{NOT_BEGUN}\n")
        os._exit(EXIT_INTERRUPT if number == signal.SIGINT else EXIT_RESTART)

    for number in _handled_signals():
        signal.signal(number, end)


def raise_on_signal() -> None:
    """From now on SIGINT raises KeyboardInterrupt, TERMINATING raise Terminated, so that what was
    begun is put in order; until `keep_reason`.
    """

    def raise_it(number: int, frame: FrameType | None) -> None:
        if not _is_ending.is_set():
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    _is_ending.clear()
    for number in _handled_signals():
        signal.signal(number, raise_it)


def keep_reason(error: BaseException) -> None:
    """Call it with whatever ends a program that has called `raise_on_signal`: from now on no
    signal takes the place of an Exception.
    """
    if isinstance(error, Exception):
        _is_ending.set()


def exit_with_code_on_signal(code: int) -> None:
    """From now on TERMINATING end the program with the exit code that it has come to, and SIGINT
    ends it as it ends any: nothing is left to be put in order.
    """
    for number in _handled_signals():
        signal.signal(
            number, signal.SIG_DFL if number == signal.SIGINT else lambda *_: os._exit(code)
        )


def _handled_signals() -> list[signal.Signals]:
    """Signals that mean something: under nohup a terminal that closes is nothing."""
    return [
        number
        for number in (signal.SIGINT, *TERMINATING)
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


def _say(text: str) -> None:
    """On standard error. Not by print: a handler may run in the middle of one.

    Nobody may be left to read it, for Ctrl-C ends `tee` too.
    """
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


class StopRequest:
    """While entered, remembers the first SIGINT (Ctrl-C) or of TERMINATING instead of dying of it,
    and says so on stderr.

    Ctrl-C while a stop is already asked for raises ImmediateStop. Once it is left a run has come to
    its end. Python hands signals to its main thread alone: entered from another one, this changes
    nothing and never has a reason.

    Args:
      num_processes: that train together.
      last_step: of the run; None: unknown.
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
        """What the program should end with: a person who stops a run is done, a cluster that ends
        it wants it back.
        """
        return EXIT_RESTART if self.reason == "terminate" else 0

    def begins(self, step: int) -> bool:
        """Whether `step` may be handed to the devices; if so, it is announced.

        Among several processes it always may.

        A signal that comes meanwhile is answered when that is decided, so that the answer names the
        steps that are finished.
        """
        self._is_deciding = True
        may_begin = self.reason is None or self._num_processes > 1
        if may_begin:
            self._begun = step
        self._is_deciding = False
        self._announce()
        return may_begin

    def ended(self, step: int) -> None:
        """The devices have finished `step`: nothing before the next is under way."""
        self._ended = step

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _handled_signals():
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        """Say once what a stop that was asked for will still do."""
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
