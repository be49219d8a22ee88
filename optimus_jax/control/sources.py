"""Collects the signals of a running job, from the trainer and from sources, into observations.

Nothing here waits for devices, drivers or files, and nothing raises into training. Only a round of
probes takes time: it runs when `is_probe_due` says so and the devices have finished their step.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping

import jax

from optimus_jax.config import ControlConfig
from optimus_jax.config.axes import MESH_AXES
from optimus_jax.control.batches import BatchStatistics
from optimus_jax.control.guard import POLL_S, Guard, Polled, Source
from optimus_jax.control.loss_slope import LossSlope
from optimus_jax.control.probe_rounds import ProbeRounds
from optimus_jax.control.signals import (
    COMPUTE_SLOWDOWN,
    DATA_WAIT_S,
    DISPATCH_S,
    ECC_ERRORS,
    FEW,
    HEARTBEAT_AGE_S,
    LINK_SLOWDOWN,
    LOSS_SLOPE,
    MEMORY_PEAK_SHARE,
    MEMORY_SHARE,
    MFU,
    PROCESS_TIME,
    STEP_TIME_S,
    TOKENS_PER_S,
    UNKNOWN,
    Observation,
    SignalSummary,
    Window,
)
from optimus_jax.data.batch import HostBatch
from optimus_jax.run_directory.step_record import StepRecord

_LOG = logging.getLogger(__name__)
OF_STEPS = (STEP_TIME_S, DATA_WAIT_S, DISPATCH_S, TOKENS_PER_S, MFU)
"""Signals that belong to a plan and a phase: they are forgotten when either changes."""
_OF_ROUNDS = (COMPUTE_SLOWDOWN, PROCESS_TIME, LINK_SLOWDOWN)
OF_MEMORY = (MEMORY_SHARE, MEMORY_PEAK_SHARE)
"""Signals of memory, which can run short soon: their windows are short, and they are forgotten when
plan or phase changes."""
_NEWEST_ONLY = (HEARTBEAT_AGE_S, ECC_ERRORS)
"""Signals for which a median makes no sense: an age, a count."""
BATCHES_S = 10.0
"""Seconds between two polls of the batches: data change slowly, and a poll takes a fifth of a
millisecond."""
STALE_POLLS, STALE_STEPS, STALE_ROUNDS = 10, 3, 2
"""A sample is stale once it is older than STALE_POLLS poll intervals of its source and STALE_STEPS
steps; a sample of probes, older than STALE_POLLS poll intervals and STALE_ROUNDS intervals between
rounds."""


class Signals:
    """The signals of a running job, in one of its processes.

    All processes make the same calls at the same steps.

    Args:
      settings: window and budget.
      global_batch: examples of a step in the present phase.
      seq_len: tokens of an example in the present phase.
      sources: the sources to poll.
      rounds: probe rounds on the present mesh; None: no probes.
      clock: the run's clock: monotonic, in seconds.
      warn: called once when a source breaks.
    """

    def __init__(
        self,
        settings: ControlConfig,
        *,
        global_batch: int,
        seq_len: int,
        sources: Iterable[Source] = (),
        rounds: ProbeRounds | None = None,
        clock: Callable[[], float] = time.perf_counter,
        warn: Callable[[str], object] = _LOG.warning,
    ) -> None:
        self.batches = BatchStatistics()
        """The source for the newest batch; it holds the histogram of document lengths."""
        self._settings, self._global_batch, self._seq_len = settings, global_batch, seq_len
        self._sources = [
            Polled(self.batches, warn, BATCHES_S),
            *(Polled(source, warn) for source in sources),
        ]
        self._rounds, self._round_guard = rounds, Guard("probes", _OF_ROUNDS, warn)
        self._clock = clock
        self._windows: dict[str, Window] = {}
        self._loss_slope = LossSlope(settings.window_steps)
        self._step_times_s: list[float] = []
        self._data_waits_s: list[float] = []
        self._is_probed_anew = False
        self._settled()

    def dispatched(self, *, dispatch_s: float, batch: HostBatch) -> None:
        """Record that a step was dispatched to the devices.

        Args:
          dispatch_s: duration of the call of the compiled step. CPU devices often run the step in
            this call, and then it takes about as long as the step.
          batch: this process's rows of the batch.
        """
        self._add(DISPATCH_S, dispatch_s, self._clock())
        self.batches.offer(batch)

    def step(self, record: StepRecord) -> None:
        """Record a finished step."""
        now_s = self._clock()
        self._step_times_s.append(record.step_time_s)
        self._data_waits_s.append(record.data_wait_s or 0.0)
        self._add(STEP_TIME_S, record.step_time_s, now_s)
        if record.data_wait_s is not None:
            self._add(DATA_WAIT_S, record.data_wait_s, now_s)
        self._add(TOKENS_PER_S, record.tokens_per_s, now_s)
        if record.mfu is not None:
            self._add(MFU, record.mfu, now_s)
        if not record.skipped:
            self._loss_slope.add(record.step, record.loss, now_s)

    def observe(self, step: int, lost_devices: frozenset[int] = frozenset()) -> Observation:
        """Make an observation at the boundary after `step`; polls the sources that are due.

        Args:
          step: the last step done.
          lost_devices: ids of devices that were reported bad.
        """
        now_s = self._clock()
        self._poll(step, now_s)
        readings = {name: window.reading(now_s) for name, window in self._windows.items()}
        readings[LOSS_SLOPE] = self._loss_slope.reading()
        step_times_s, self._step_times_s = tuple(self._step_times_s), []
        data_waits_s, self._data_waits_s = tuple(self._data_waits_s), []
        return Observation(
            step=step,
            time_s=now_s,
            step_times_s=step_times_s,
            data_waits_s=data_waits_s,
            readings=readings,
            global_batch=self._global_batch,
            seq_len=self._seq_len,
            lost_devices=lost_devices,
        )

    def is_probe_due(self, step: int) -> bool:
        """Whether to wait until the devices have finished `step`, then call `probe`; the same
        answer in every process.
        """
        return (
            self._rounds is not None
            and self._step_time().count >= FEW
            and self._rounds.budget.is_due(step)
        )

    def ask_probe(self, step: int, *, anew: bool = False, worth_s: float = 0.0) -> None:
        """Request a round of probes after `step`, or as soon as the budget allows.

        Every process has to make the same request.

        Args:
          step: the earliest step for the round.
          anew: conditions have changed: the results of earlier probes are discarded, and the round
            may overdraw the budget by more.
          worth_s: seconds that the round may take beyond the budget.
        """
        if self._rounds is not None:
            self._is_probed_anew |= anew
            self._rounds.budget.ask(step, urgent=anew, worth_s=worth_s)

    def probe(self, step: int) -> None:
        """Run a round of probes, after the devices have finished `step`; every process has to call
        it.

        If it fails, there are no more probes on this mesh. With several processes the exception
        ends the run, since one process cannot leave out the collectives alone.
        """
        rounds, step_time_s = self._rounds, self._step_time().value
        if rounds is None or step_time_s is None:
            return

        def measured() -> dict[str, float]:
            return rounds.run(step, step_time_s=step_time_s)

        samples = measured() if jax.process_count() > 1 else self._round_guard.samples(measured)
        if self._round_guard.missing is not None:
            self._rounds = None
        if self._is_probed_anew:
            self._forget(_OF_ROUNDS)
            self._is_probed_anew = False
        self._take_round(samples or {}, rounds)

    def enter(self, *, global_batch: int, seq_len: int, rounds: ProbeRounds | None) -> None:
        """Record that the run has entered another plan or phase, and forget the old samples.

        Args:
          global_batch: examples of a step.
          seq_len: tokens of an example.
          rounds: probe rounds on the new mesh; None: no probes.
        """
        if (global_batch, seq_len) != (self._global_batch, self._seq_len):
            self._loss_slope.clear()
            self._forget(self.batches.signals)
        self._global_batch, self._seq_len, self._rounds = global_batch, seq_len, rounds
        self._step_times_s.clear()
        self._data_waits_s.clear()
        self._forget(OF_MEMORY)
        # The samples of mesh axes belong to the old mesh. Those of links (`intra_host`,
        # `inter_host`) stay valid, unless the links were measured several times on the new mesh.
        is_news = rounds is not None and len(rounds.at_first) > 1
        self._forget(
            (*OF_STEPS, LINK_SLOWDOWN)
            if is_news
            else (*OF_STEPS, *(LINK_SLOWDOWN + axis for axis in MESH_AXES))
        )
        self._settled()

    @property
    def missing(self) -> dict[str, str]:
        """Reasons why sources could not be measured at the last try, by name of the source."""
        guards = (*(source.guard for source in self._sources), self._round_guard)
        return {guard.name: guard.missing for guard in guards if guard.missing is not None}

    def remarks(self) -> dict[str, dict]:
        """What is recorded with a decision besides readings: lengths of documents, sources of the
        probes' baselines, and why signals are unknown.
        """
        found = {
            "document_lengths": self.batches.histogram,
            "compared_with": self._rounds.sources() if self._rounds else {},
            "not_measured": self.missing,
        }
        return {name: values for name, values in found.items() if values}

    def close(self) -> None:
        """Release what the sources hold."""
        for source in self._sources:
            source.close()

    def _step_time(self) -> SignalSummary:
        window = self._windows.get(STEP_TIME_S)
        return UNKNOWN if window is None else window.reading(self._clock())

    def _settled(self) -> None:
        """Add the samples that probes measured before the first step on this mesh."""
        if (rounds := self._rounds) is not None:
            for samples in rounds.at_first:
                self._take_round(samples, rounds)

    def _take_round(self, samples: Mapping[str, float], rounds: ProbeRounds) -> None:
        self._take(
            samples,
            self._round_guard,
            max(STALE_POLLS * POLL_S, STALE_ROUNDS * rounds.budget.interval_s),
        )

    def _poll(self, step: int, now_s: float) -> None:
        for source in self._sources:
            samples = source.poll(step, now_s)
            if samples is not None:
                self._take(
                    samples,
                    source.guard,
                    max(
                        STALE_POLLS * source.every_s, STALE_STEPS * (self._step_time().value or 0.0)
                    ),
                )

    def _take(self, samples: Mapping[str, float], guard: Guard, stale_s: float) -> None:
        now_s = self._clock()
        for name, value in samples.items():
            self._add(name, value, now_s, stale_s)
        if guard.missing is not None:
            self._forget(guard.signals)

    def _add(self, name: str, value: float, now_s: float, stale_s: float | None = None) -> None:
        if not math.isfinite(value):  # a measurement that went wrong
            return
        window = self._windows.get(name)
        if window is None:
            size = (
                1
                if name in _NEWEST_ONLY
                else FEW
                if name.startswith(_OF_ROUNDS) or name in OF_MEMORY
                else self._settings.window_steps
            )
            window = self._windows[name] = Window(size)
        window.add(value, now_s, stale_s)

    def _forget(self, names: tuple[str, ...]) -> None:
        for name, window in self._windows.items():
            if any(
                name == each or (each.endswith("/") and name.startswith(each)) for each in names
            ):
                window.clear()
