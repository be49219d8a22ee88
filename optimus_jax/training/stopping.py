"""Stopping when asked.

What a signal does depends on what there is to lose. While a program starts, nothing: SIGINT (Ctrl-C) ends it with exit
code 130, and SIGTERM, which is how clusters take a machine away, with 75, as it is worth starting again. SIGUSR1, with which
job scripts pass on that time is running out, means the same as SIGTERM, and so does SIGHUP, a terminal that is closed: whoever had it
may have lost a connection. A SIGHUP that is ignored, as nohup has it, stays so. Once steps are
run, signals become a request that the trainer reads between two steps, after which it saves: exit code 0 for Ctrl-C, 75
for SIGTERM. Ctrl-C while a stop is asked for ends without saving: 130.

`jax.distributed.initialize` starts a preemption service that puts its own SIGTERM handler underneath Python's, which
then never runs although `signal.getsignal` still shows it. So whoever calls it does this first, on every process:

    jax.config.update("jax_enable_preemption_service", False)

Orbax takes that to mean "no preemption". An error that ends the run is not to be lost to a signal: of several processes the others end too, whoever
launched them sends SIGTERM then, and the one that knows the reason is still telling it. So once an error is on its way, signals mean nothing.
Nor do they once the run is done, or saved, while the rest is put in order; and then (`end_when_asked`) they end it as it would have ended.

A request is known only to the process that got the signal; processes that
train together have to agree on the step that they stop after.
"""

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Literal, NoReturn, Self

EXIT_RESTART = 75
"""Exit code (EX_TEMPFAIL) of a run that was stopped and is worth starting again with --resume."""
EXIT_MISTAKE = 2
"""Exit code of a program that was asked for what cannot be: starting it again would only repeat that."""
EXIT_BROKEN = 1
"""Exit code that Python gives a program with an error which nobody has foreseen."""
EXIT_INTERRUPT = 130
"""Exit code of a program that Ctrl-C has ended at once, as a shell has it (128 + SIGINT)."""
NOT_BEGUN = "stopped before training had begun"
TERMINATING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals of who takes the machine away, or the terminal."""


_is_ending = threading.Event()
"""Whether the program ends by itself: an error is on its way, or the run has come to its end."""


class Terminated(BaseException):
    """One of TERMINATING came before training had begun."""


class StoppedAtOnce(KeyboardInterrupt):
    """Ctrl-C came while a stop was already asked for."""


def exit_when_asked() -> None:
    """From now on SIGINT and TERMINATING end the program with one line: for imports, in which an exception may get lost."""
    def end(number: int, frame: FrameType | None) -> NoReturn:
        _say(f"\n{NOT_BEGUN}\n")
        os._exit(EXIT_INTERRUPT if number == signal.SIGINT else EXIT_RESTART)

    for number in _heard():
        signal.signal(number, end)


def raise_when_asked() -> None:
    """From now on SIGINT raises KeyboardInterrupt, TERMINATING raise Terminated, so that what was begun is put in order; until `keep_reason`."""
    def raise_it(number: int, frame: FrameType | None) -> None:
        if not _is_ending.is_set():
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    _is_ending.clear()
    for number in _heard():
        signal.signal(number, raise_it)


def keep_reason(error: BaseException) -> None:
    """Call it with whatever ends a program that has called `raise_when_asked`: from now on no signal takes the place of an Exception."""
    if isinstance(error, Exception):
        _is_ending.set()


def end_when_asked(code: int) -> None:
    """From now on TERMINATING end the program with the exit code that it has come to, and SIGINT ends it as it ends any: nothing is left to be put in order."""
    for number in _heard():
        signal.signal(number, signal.SIG_DFL if number == signal.SIGINT else lambda *_: os._exit(code))


def _heard() -> list[signal.Signals]:
    """Signals that mean something: under nohup a terminal that closes is nothing."""
    return [number for number in (signal.SIGINT, *TERMINATING) if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def _say(text: str) -> None:
    """On standard error. Not by print: a handler may run in the middle of one. Nobody may be left to read it, for Ctrl-C ends `tee` too."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


class StopRequest:
    """While entered, remembers the first SIGINT (Ctrl-C) or of TERMINATING instead of dying of it, and says so on stderr.

    Ctrl-C while a stop is already asked for raises StoppedAtOnce. Once it is left a run has come to its end. Python hands signals to its main thread
    alone: entered from another one, this changes nothing and never has a reason.
    """

    def __init__(self) -> None:
        self.reason: Literal["interrupt", "terminate"] | None = None
        self._previous = {}

    @property
    def exit_code(self) -> int:
        """What the program should end with: a person who stops a run is done, a cluster that ends it wants it back."""
        return EXIT_RESTART if self.reason == "terminate" else 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _heard():
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if error is None:
            _is_ending.set()
        else:
            keep_reason(error)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.reason is None:
            self.reason = "interrupt" if number == signal.SIGINT else "terminate"
            _say("\nstopping: this step is finished and saved first; Ctrl-C (again) ends at once, without saving\n")
        elif number == signal.SIGINT:
            raise StoppedAtOnce
