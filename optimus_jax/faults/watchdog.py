"""A process that gets no further, or whose run has lost a process, ends itself, so that what
launched it can start it again.

A survivor of a fault mostly waits inside a collective, in C++, where no Python of its main thread
runs and no signal is heard. So a thread judges, once a second, from memory alone (who writes and
reads files is another thread), and ends the process without asking the main thread: it writes down
what is wrong, who is late and every thread's stack, for at most REPORT_S, and exits with
EXIT_RESTART.

What is a fault:
* the main thread takes longer than the *limit* of what it does, which is made from how long that
  took before;
* another process is silent, or says that it has failed;
* this process itself was stopped for so long that the others have given it up;
* a signal to stop (SIGTERM, SIGUSR1, SIGHUP) was received and the step under way does not end. The
  signal is heard through a file descriptor that Python's C handler writes to in any thread.
If not even this thread can run, because C code keeps Python's lock, a timer of `faulthandler`,
which needs no Python, ends the process (exit code 1).
"""

import contextlib
import faulthandler
import os
import select
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from optimus_jax.config import FaultConfig
from optimus_jax.faults.fault_log import write_fault
from optimus_jax.faults.heartbeat import HEARTBEAT_S, Heartbeats, Peer
from optimus_jax.faults.progress import Activity, Progress
from optimus_jax.faults.stopping import EXIT_RESTART, TERMINATING, exit_code_of
from optimus_jax.robust import deviation_from
from optimus_jax.system.resilient_io import flush_with_timeout, stderr_that_never_waits

MIN_DURATIONS = 5
"""Durations from which a limit is made."""
FACTOR = 10.0
"""From the longest that is usual to the limit."""
DEVIATIONS = 5.0
"""From the median to the longest that is usual, in robust deviations."""
PEER_FAILURE_WAIT_S = 3 * HEARTBEAT_S
"""From another's word that it has failed to the end of this process: if all have the same error,
each says so itself."""
LINGER_S = 2 * PEER_FAILURE_WAIT_S
"""Process 0 stays so long for others to hear that it has failed: without its coordination service
JAX aborts them on the spot, without a word."""
REPORT_S = 5.0
"""At most, for writing down what is wrong: the disk may be what does not answer."""
BLOCKED_FACTOR = 10
"""Times `silence_s` until a process is ended whose watchdog cannot run."""
_STARTING: tuple[Activity, ...] = ("connect", "start", "compile", "end")
_SAVING: tuple[Activity, ...] = ("save", "write")
"""Copying the state to the host, and waiting until what was copied is on the disk."""


class Limits:
    """How long activities may take.

    Args:
      settings: of the run.
      progress: knows how long they have taken.
    """

    def __init__(self, settings: FaultConfig, progress: Progress) -> None:
        self._settings, self._progress = settings, progress

    def of(self, activity: Activity) -> float:
        """In seconds, since it began or the last step ended."""
        if activity in _STARTING:
            return self._settings.start_s
        known_s = self._progress.durations_s(activity)
        # mostly nobody has to wait, which tells nothing of how long a save is written
        if len(known_s) < MIN_DURATIONS or activity == "write":
            return self._settings.ceiling_s
        return min(
            self._settings.ceiling_s, max(self._settings.floor_s, FACTOR * _usual_s(known_s))
        )

    def after_signal(self, activity: Activity) -> float:
        """In seconds, from the signal to stop, or what was begun after it, to the end of it."""
        if activity in _SAVING:  # it is what the time was given for
            return self.of(activity)
        known_s = self._progress.durations_s(activity)
        return (
            self._settings.stop_s + _usual_s(known_s)
            if known_s
            else max(self._settings.stop_s, self._settings.grace_s)
        )


def _usual_s(known_s: Sequence[float]) -> float:
    """The longest that is usual: median and robust deviations, which one outlier does not move."""
    median = statistics.median(known_s)
    return median + DEVIATIONS * deviation_from(median, known_s)


class Watchdog:
    """Watches one process from `start` to `close`. Threads that it ends with are daemons.

    Args:
      run_directory: for what it has to say; None: there is none yet, and standard error has to do.
      progress: of this process.
      settings: of the run.
      process: number of this one.
      signs: of the other processes; None: there are none, or no directory for them yet.
      has_others: whether there are other processes.
      clock: seconds that only grow.
      exit: ends the process.
    """

    def __init__(
        self,
        run_directory: Path | None,
        progress: Progress,
        settings: FaultConfig,
        *,
        process: int = 0,
        heartbeats: Heartbeats | None = None,
        has_others: bool = False,
        clock: Callable[[], float] = time.monotonic,
        exit: Callable[[int], object] = os._exit,
    ) -> None:
        self._run_directory, self._progress, self._settings = run_directory, progress, settings
        self._process, self._heartbeats, self._has_others, self._clock, self._exit = (
            process,
            heartbeats,
            has_others or heartbeats is not None,
            clock,
            exit,
        )
        self._is_closed = False
        self._limits = Limits(settings, progress)
        self._checked_s: float | None = None
        self._signalled_s: float | None = None
        """When a signal to stop came."""
        self._failed_s: dict[int, float] = {}
        """When others were first seen to have failed."""
        self._exit_code, self._is_reported, self._report_lock = (
            EXIT_RESTART,
            False,
            threading.Lock(),
        )
        self._wakeup_read, self._wakeup_write = socket.socketpair()
        self._before = -1
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @classmethod
    def of(
        cls,
        run_directory: Path | None,
        progress: Progress,
        settings: FaultConfig,
        *,
        process: int,
        num_processes: int,
    ) -> "Watchdog | None":
        """As the settings say, and started; None: they say that nobody is to watch."""
        if settings.watch == "off" or (settings.watch == "auto" and num_processes == 1):
            return None
        heartbeats = (
            Heartbeats(run_directory, process, num_processes, progress)
            if num_processes > 1 and run_directory is not None
            else None
        )
        watchdog = cls(
            run_directory,
            progress,
            settings,
            process=process,
            heartbeats=heartbeats,
            has_others=num_processes > 1,
        )
        watchdog.start()
        return watchdog

    @property
    def heartbeats(self) -> Heartbeats | None:
        """Of the other processes; None: there are none."""
        return self._heartbeats

    def start(self) -> None:
        """From now on, this process may be ended.

        Raises RunDirectoryError if no heartbeat can be given.
        """
        if self._heartbeats is not None:
            self._heartbeats.start()
        if threading.current_thread() is threading.main_thread():
            self._wakeup_write.setblocking(False)
            self._before = signal.set_wakeup_fd(
                self._wakeup_write.fileno(), warn_on_full_buffer=False
            )
            if self._before != -1:  # a notebook's event loop listens
                signal.set_wakeup_fd(self._before)
        if self._heartbeats is not None and not faulthandler.is_enabled():
            # JAX aborts when its own heartbeats fail: then the stacks are on standard error
            faulthandler.enable(stderr_that_never_waits())
        self._thread.start()

    def close(self, failure: BaseException | None = None) -> None:
        """It may not any more.

        With a failure the others are told of it; without, that this process has come to its end. A
        second close is none.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._heartbeats is not None:
            self._heartbeats.end(
                "done" if failure is None else "failed",
                "" if failure is None else _first_line(failure),
                exit_code_of(failure),
            )
        if threading.current_thread() is threading.main_thread() and self._before == -1:
            signal.set_wakeup_fd(-1)
        self._wakeup_write.setblocking(True)
        self._wakeup_write.send(b"\0")
        # before anything else is waited for: what another process has had is not to end this one,
        # which has an error of its own to tell
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._wakeup_read.close()
        self._wakeup_write.close()
        if failure is not None and self._process == 0 and self._has_others:
            self._linger()
        if self._heartbeats is not None:
            self._heartbeats.close()

    def trouble(self, now_s: float) -> str | None:
        """What is wrong, in one sentence; None: nothing."""
        paused_s, self._checked_s = now_s - (self._checked_s or now_s), now_s
        if paused_s > self._settings.silence_s:
            if self._heartbeats is not None:
                return (
                    f"this process was stopped for {paused_s:.0f} s, and the others have gone on"
                    " without it"
                )
            self._progress.begin(self._progress.at.doing)  # Ctrl-Z and fg: nobody has waited
        for peer in self._heartbeats.peers if self._heartbeats is not None else ():
            if (why := self._trouble_with(peer, now_s)) is not None:
                return why
        at = self._progress.at
        took_s = now_s - at.since_s
        if self._signalled_s is not None and now_s - max(self._signalled_s, at.since_s) > (
            limit_s := self._limits.after_signal(at.doing)
        ):
            return (
                f"told to stop {now_s - self._signalled_s:.0f} s ago, and {self._activity_text()}"
                f" does not end (limit {limit_s:.0f} s)"
            )
        if took_s > (limit_s := self._limits.of(at.doing)):
            return f"{self._activity_text()} takes {took_s:.0f} s (limit {limit_s:.0f} s)"
        return None

    def _trouble_with(self, peer: Peer, now_s: float) -> str | None:
        if not peer.is_known or peer.state == "done":
            return None
        if peer.state == "failed":
            if now_s - self._failed_s.setdefault(peer.process, now_s) > PEER_FAILURE_WAIT_S:
                # a mistake is not to be repeated because this process waited for who made it
                self._exit_code = peer.exit_code
                return f"process {peer.process} has failed: {peer.why}"
        elif peer.silent_s > self._settings.silence_s:
            return (
                f"process {peer.process} on {peer.host} has given no heartbeat for"
                f" {peer.silent_s:.0f} s"
            )
        return None

    def _activity_text(self) -> str:
        at = self._progress.at
        return (
            f"step {max(at.entered, at.done + 1)}"
            if at.doing == "step"
            else f"'{at.doing}' after step {at.done}"
        )

    def _watch(self) -> None:
        while True:
            if self._heartbeats is not None:
                faulthandler.dump_traceback_later(
                    BLOCKED_FACTOR * self._settings.silence_s,
                    exit=True,
                    file=stderr_that_never_waits(),
                )
            if select.select([self._wakeup_read], [], [], HEARTBEAT_S)[0]:
                received = self._wakeup_read.recv(64)
                if 0 in received:
                    return
                if any(number in received for number in TERMINATING) and self._signalled_s is None:
                    self._signalled_s = self._clock()
            if (why := self.trouble(self._clock())) is not None:
                self.end(why)
                return

    def end(self, why: str) -> None:
        """Write down what is wrong, and end the process: with EXIT_RESTART, or as the process ended
        that failed. Any thread may call it.
        """
        reporter = threading.Thread(target=self.report, args=(why,), name="reporter", daemon=True)
        reporter.start()
        reporter.join(REPORT_S)
        next_step = (
            "start it again with --resume"
            if self._exit_code == EXIT_RESTART
            else "see what that process has printed"
        )
        flush_with_timeout(
            f"\nfault: {why}; this process ends with exit code {self._exit_code}: {next_step}\n"
        )
        if self._process == 0 and self._has_others:
            self._linger()
        self._exit(self._exit_code)

    def report(self, why: str) -> None:
        """Write down what is wrong, who is late, and what every thread is at; and tell the other
        processes. What follows from it is not told again.
        """
        with self._report_lock:
            if self._is_reported:
                return
            self._is_reported = True
        at = self._progress.at
        peers = self._heartbeats.peers if self._heartbeats is not None else ()
        if self._heartbeats is not None:
            self._heartbeats.end("failed", why, self._exit_code)
        if self._run_directory is None:
            return
        with contextlib.suppress(OSError):
            write_fault(
                self._run_directory,
                self._process,
                at.done,
                what=why,
                doing=at.doing,
                doing_s=self._clock() - at.since_s,
                entered=at.entered,
                late_processes=late_processes(self._process, at.entered, at.doing, peers),
                peers=[asdict(peer) for peer in peers],
                stacks=stacks(),
            )

    def _linger(self) -> None:
        """Until the others have ended too, or have had the time to."""
        until_s = self._clock() + LINGER_S
        while (
            self._heartbeats is not None
            and self._clock() < until_s
            and any(
                peer.is_known and peer.state == "running" and peer.silent_s < PEER_FAILURE_WAIT_S
                for peer in self._heartbeats.peers
            )
        ):
            threading.Event().wait(HEARTBEAT_S / 4)
        threading.Event().wait(HEARTBEAT_S)  # for who has said that it ends to do so


def late_processes(process: int, entered: int, doing: str, peers: Sequence[Peer]) -> list[str]:
    """Which processes have not come as far as the others, in words; empty: all are in the same
    step, or none is known.

    Args:
      process: number of this one.
      entered: its newest step.
      doing: what it is at.
      peers: the others.
    """
    known = [peer for peer in peers if peer.is_known]
    newest = max([entered, *(peer.entered for peer in known)])
    words = (
        [f"process {process} has not begun step {newest}: it is at step {entered}, '{doing}'"]
        if entered < newest
        else []
    )
    for peer in known:
        if peer.entered < newest or peer.state == "failed":
            words.append(
                f"process {peer.process} has not begun step {newest}: it was at step"
                f" {peer.entered}, '{peer.doing}', {peer.silent_s:.0f} s ago"
                if peer.entered < newest
                else f"process {peer.process} has failed: {peer.why}"
            )
        elif peer.doing != doing:
            words.append(
                f"process {peer.process} is at '{peer.doing}' for {peer.doing_s:.0f} s, and this"
                f" one at '{doing}'"
            )
        elif peer.state == "running" and peer.silent_s > PEER_FAILURE_WAIT_S:
            words.append(
                f"process {peer.process} has been silent for {peer.silent_s:.0f} s in step"
                f" {peer.entered}"
            )
    return words + [
        f"process {peer.process} was never heard of" for peer in peers if not peer.is_known
    ]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def stacks() -> str:
    """Python's stack of every thread, newest call first, without reading source files."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    known = "".join(
        f"{ident:#x}: {name}\n" for ident, name in names.items() if ident in sys._current_frames()
    )
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return known + file.read().decode(errors="replace")
