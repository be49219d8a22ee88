"""The watchdog: ends a process that hangs, or whose run has lost a process, so that its launcher
can restart it.

A process that survives a fault usually waits in a collective, in C++, where its main thread runs no
Python and handles no signal. So a thread checks once a second, using memory alone (another thread
reads and writes files), and ends the process without the main thread: it logs the fault, the
processes that are late and the stack of every thread, for at most REPORT_S, and exits with
EXIT_RESTART.

These are faults:
* the main thread exceeds the *limit* of its activity, which is derived from earlier durations;
* another process sends no heartbeat, or reports that it has failed;
* this process itself was suspended for so long that the others consider it lost;
* a signal to stop (SIGTERM, SIGUSR1, SIGHUP) was received and the step under way does not end. The
thread receives signals through a file descriptor that Python's C handler writes to.

If this thread cannot run either, because C code holds the GIL, a timer of `faulthandler`, which
needs no Python, ends the process (exit code 1).
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
from optimus_jax.errors import first_line
from optimus_jax.faults.fault_log import write_fault
from optimus_jax.faults.heartbeat import HEARTBEAT_S, Heartbeats, Peer
from optimus_jax.faults.progress import Activity, Progress
from optimus_jax.faults.stopping import EXIT_RESTART, TERMINATING, exit_code_of
from optimus_jax.robust import deviation_from
from optimus_jax.system.resilient_io import flush_with_timeout, nonblocking_stderr

MIN_DURATIONS = 5
"""Least number of durations that a limit is derived from."""
FACTOR = 10.0
"""Limit divided by the longest usual duration."""
DEVIATIONS = 5.0
"""The longest usual duration is the median plus this many robust deviations."""
PEER_FAILURE_WAIT_S = 3 * HEARTBEAT_S
"""How long this process continues after another reported a failure: if all have the same error,
each reports it itself."""
LINGER_S = 2 * PEER_FAILURE_WAIT_S
"""How long process 0 stays after a failure so that the others can read of it: without its
coordination service JAX aborts them at once, without a message."""
REPORT_S = 5.0
"""Most time for writing the report, as the disk may be what hangs."""
BLOCKED_FACTOR = 10
"""A process whose watchdog thread cannot run is ended after this many times `silence_s`."""
_STARTING: tuple[Activity, ...] = ("connect", "start", "compile", "end")
_SAVING: tuple[Activity, ...] = ("save", "write")
"""Copying the state to the host, and waiting until it is on disk."""


class Limits:
    """Time limits of activities.

    Args:
      settings: fault limits of the run.
      progress: holds the durations measured so far.
    """

    def __init__(self, settings: FaultConfig, progress: Progress) -> None:
        self._settings, self._progress = settings, progress

    def of(self, activity: Activity) -> float:
        """Limit in seconds, counted from the start of the activity or the end of the last step."""
        if activity in _STARTING:
            return self._settings.start_s
        known_s = self._progress.durations_s(activity)
        # waits for a write are mostly zero, which says nothing about the longest one
        if len(known_s) < MIN_DURATIONS or activity == "write":
            return self._settings.ceiling_s
        return min(
            self._settings.ceiling_s, max(self._settings.floor_s, FACTOR * _usual_s(known_s))
        )

    def after_signal(self, activity: Activity) -> float:
        """Limit in seconds after a stop signal, counted from the signal or the start of the
        activity, whichever is later."""
        if activity in _SAVING:  # the grace time is meant for saving
            return self.of(activity)
        known_s = self._progress.durations_s(activity)
        return (
            self._settings.stop_s + _usual_s(known_s)
            if known_s
            else max(self._settings.stop_s, self._settings.grace_s)
        )


def _usual_s(known_s: Sequence[float]) -> float:
    """The longest usual duration: median plus robust deviations, insensitive to an outlier."""
    median = statistics.median(known_s)
    return median + DEVIATIONS * deviation_from(median, known_s)


class Watchdog:
    """Watches one process from `start` to `close`; its threads are daemons.

    Args:
      run_directory: for the fault log; None: not known yet, so that faults go to standard error
        only.
      progress: progress of this process.
      settings: fault limits of the run.
      process: index of this process.
      heartbeats: heartbeats of the other processes; None: there are none, or no directory yet.
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
        """When a stop signal came."""
        self._failed_s: dict[int, float] = {}
        """When the failure of each process was first seen."""
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
        """A started watchdog with these settings; None: the settings switch it off."""
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
        """Heartbeats of the other processes; None: there are none."""
        return self._heartbeats

    def start(self) -> None:
        """Start to watch: from now on the process may be ended.

        Raises RunDirectoryError if no heartbeat can be written.
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
            faulthandler.enable(nonblocking_stderr())
        self._thread.start()

    def close(self, failure: BaseException | None = None) -> None:
        """Stop watching, and tell the other processes that this one has failed, or is done.

        A second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._heartbeats is not None:
            self._heartbeats.end(
                "done" if failure is None else "failed",
                "" if failure is None else first_line(failure) or type(failure).__name__,
                exit_code_of(failure),
            )
        if threading.current_thread() is threading.main_thread() and self._before == -1:
            signal.set_wakeup_fd(-1)
        self._wakeup_write.setblocking(True)
        self._wakeup_write.send(b"\0")
        # first of all: a failure of another process must not end this one, which has its own error
        # to report
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._wakeup_read.close()
        self._wakeup_write.close()
        if failure is not None and self._process == 0 and self._has_others:
            self._linger()
        if self._heartbeats is not None:
            self._heartbeats.close()

    def trouble(self, now_s: float) -> str | None:
        """The fault, in one sentence; None: there is none."""
        paused_s, self._checked_s = now_s - (self._checked_s or now_s), now_s
        if paused_s > self._settings.silence_s:
            if self._heartbeats is not None:
                return (
                    f"this process was suspended for {paused_s:.0f} s; the others consider it lost"
                )
            self._progress.begin(
                self._progress.at.doing
            )  # resumed after Ctrl-Z: no other process has waited
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
                # end like the failed process: after a user's error there must be no restart
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
                    file=nonblocking_stderr(),
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
        """Report the fault and end the process, with EXIT_RESTART or the exit code of the process
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
        """Log the fault, the processes that are late and all stacks, and tell the other processes;
        later calls do nothing, as their faults are consequences of the first.
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
                late=late_processes(self._process, at.entered, at.doing, peers),
                peers=[asdict(peer) for peer in peers],
                stacks=stacks(),
            )

    def _linger(self) -> None:
        """Wait until the others have ended, for at most LINGER_S."""
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
        threading.Event().wait(HEARTBEAT_S)  # for processes that have announced their end


def late_processes(process: int, entered: int, doing: str, peers: Sequence[Peer]) -> list[str]:
    """Sentences about processes that are behind the others; empty: all are in the same step, or
    none is known.

    Args:
      process: index of this process.
      entered: its newest step.
      doing: its activity.
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
        f"process {peer.process} has never sent a heartbeat" for peer in peers if not peer.is_known
    ]


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
