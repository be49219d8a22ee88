"""Profiles of a run's steps: `--profile 10:15` traces them, and says where their time went.

A profile is a folder of the run:

    trace/            what JAX's profiler writes, for XProf and for https://ui.perfetto.dev
    step.hlo.txt.gz   the compiled step, whose instructions the trace names
    memory.pprof      the arrays left on the devices after the last step, for `pprof`
    profile.json      where the time went (planning/traces/step_profile.py), and what is in memory
                      when the step needs most (planning/traces/peak_memory.py)
"""

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from optimus_jax.cluster.distributed import all_or_none
from optimus_jax.config import Config
from optimus_jax.config.axes import MESH_AXES
from optimus_jax.errors import ConfigError, PlanError, explain
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compile_report import check_executable
from optimus_jax.planning.ahead_of_time.hlo import HloProgram
from optimus_jax.planning.cost.memory import memory_of_run
from optimus_jax.planning.search.search import Pricing
from optimus_jax.planning.traces.peak_memory import PeakMemory
from optimus_jax.planning.traces.step_profile import StepProfile
from optimus_jax.planning.traces.trace_events import read_trace
from optimus_jax.run_directory.contents import PROFILES
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.system.command import typed_command
from optimus_jax.training.step import Program
from optimus_jax.training.watchers import Display

TRACE, PROGRAM, MEMORY, SUMMARY = "trace", "step.hlo.txt.gz", "memory.pprof", "profile.json"


class StepProfiler:
    """Traces some steps on the devices of process 0. Every process must call it alike.

    Args:
      steps: the first and the last one.
      run: where the profile goes.
      display: shows it.
      pricing: predicts the time of steps of a config; None: the speed of the devices is unknown.
    """

    def __init__(
        self,
        steps: tuple[int, int],
        run: RunDirectory,
        display: Display,
        pricing: Callable[[Config], Pricing] | None,
    ) -> None:
        self._first, self._last = steps
        self._run, self._display, self._pricing = run, display, pricing
        self._begun: int | None = None
        """The step that was traced first; None: none yet."""
        self._is_tracing = False
        self._has_begun = False
        """Whether the profiler of this process traces for this run."""

    @property
    def is_tracing(self) -> bool:
        """Whether a trace is under way."""
        return self._is_tracing

    def begins_after(self, step: int) -> bool:
        """Whether `start` is due after a step."""
        return self._begun is None and self._first - 1 <= step < self._last

    def ends_after(self, step: int) -> bool:
        """Whether `stop` is due after a step."""
        return self._is_tracing and step == self._last

    def start(self, step: int) -> None:
        """Trace from the step after `step` on. The devices must be idle."""
        self._begun, self._is_tracing = step + 1, True
        if self._run.writer:
            shutil.rmtree(self._folder, ignore_errors=True)  # the same steps, done again
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # it would slow the host down
            jax.profiler.start_trace(str(self._folder / TRACE), profiler_options=options)
            self._has_begun = True

    def stop(self, step: int, program: Program, train_step: Any) -> None:
        """End after `step`, if the trace is under way, and say where the time went.

        Args:
          train_step: the compiled step that ran.
        """
        if not self._is_tracing:
            return
        self._is_tracing = False
        with all_or_none():  # the others would take process 0 for lost
            if self._end_trace():
                self._finish(step, program, train_step)

    def abandon(self) -> None:
        """End the trace after an error, if it is under way."""
        self._is_tracing = False
        self._end_trace()

    def _end_trace(self) -> bool:
        """Stop the profiler if it traces for this run; returns whether it did. What the user traces
        goes on.
        """
        has_begun, self._has_begun = self._has_begun, False
        if has_begun:
            jax.profiler.stop_trace()
        return has_begun

    @property
    def _folder(self) -> Path:
        return self._run.path / PROFILES / f"step-{self._begun}"

    def _finish(self, step: int, program: Program, train_step: Any) -> None:
        assert self._begun is not None
        text = train_step.as_text()
        (self._folder / PROGRAM).write_bytes(gzip.compress(text.encode()))
        jax.profiler.save_device_memory_profile(str(self._folder / MEMORY))
        hlo = HloProgram(text)
        traced = read_trace(self._folder / TRACE, hlo.name)
        if not traced:
            self._display.message(
                f"the trace in {self._folder} names no operation of the step, so that its parts are"
                " unknown"
            )
            return
        profile = StepProfile.of(
            traced,
            hlo,
            {axis: program.plan.axes[axis] for axis in MESH_AXES},
            remat=program.plan.remat,
            first_step=self._begun,
            last_step=step,
            plan=program.plan.digest,
            layout=program.plan.describe(),
            terms=self._terms(program.config, program.plan),
            memory=(memory := self._memory(hlo, program, train_step)),
        )
        (self._folder / SUMMARY).write_text(profile.to_json(), encoding="utf-8")
        self._run.log_event(
            "profile",
            step,
            first_step=profile.first_step,
            plan=profile.plan,
            step_time_s=profile.step_time_s,
            parts_s={part.name: part.time_s for part in profile.parts},
            beside_s={part.name: part.beside_s for part in profile.parts if part.beside_s},
            predicted_s=dict(profile.predicted_s),
            memory_bytes={} if memory is None else dict(memory.parts),
            predicted_bytes={} if memory is None else dict(memory.predicted),
            allocated_bytes=None if memory is None else memory.allocated_bytes,
            folder=str(self._folder.relative_to(self._run.path)),
        )
        self._display.table(profile.title, profile.table())
        if memory is not None:
            self._display.table(memory.title, memory.table())
        self._display.message(
            f"the trace is in {self._folder / TRACE}: open its .trace.json.gz in"
            " https://ui.perfetto.dev, or the folder in XProf"
        )

    def _memory(self, hlo: HloProgram, program: Program, train_step: Any) -> PeakMemory | None:
        """What a device holds when the step needs most; None if the program's text has a form that
        is not known, with a message.
        """
        try:
            return PeakMemory.of(
                hlo,
                allocated_bytes=check_executable(train_step.memory_analysis(), None).total_bytes,
                ways=program.plan.axes.fsdp,
                estimate=memory_of_run(program.config, program.plan),
            )
        except Exception as error:
            self._display.message(
                "what is in memory is not known: the compiled step has a form that cannot be read"
                f" ({type(error).__name__}: {error})"
            )
            return None

    def _terms(self, config: Config, plan: Plan) -> dict[str, float] | None:
        """Predicted seconds of the terms of a step; None: unknown."""
        if self._pricing is None:
            return None
        try:
            terms = self._pricing(config).predicted(plan).terms
            return {term.name: term.time_s for term in terms}
        except PlanError:  # a link of unknown speed
            return None


def read_profile(run_dir: Path, step: int | None = None) -> tuple[Path, StepProfile]:
    """A profile of a run, and its folder.

    Args:
      step: its first step; None: that of the newest profile.
    Raises:
      ConfigError: there is none, or it cannot be read.
    """
    found = {
        int(first): path
        for path in (run_dir / PROFILES).glob(f"step-*/{SUMMARY}")
        if (first := path.parent.name.removeprefix("step-")).isdecimal()
    }
    if not found or (step is not None and step not in found):
        raise ConfigError(
            explain(
                "the run has no such profile" if found else "the run has no profile",
                given=run_dir if step is None else f"{run_dir}, step {step}",
                do=f"choose one that begins at step {', '.join(map(str, sorted(found)))}"
                if found
                else f"make one: {typed_command('train')} --profile FIRST:LAST",
            )
        )
    path = found[max(found, key=lambda each: found[each].stat().st_mtime) if step is None else step]
    try:
        return path.parent, StepProfile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            explain(
                "a profile cannot be read",
                given=f"{path}: {error}",
                do=f"make it again: {typed_command('train')} --profile FIRST:LAST",
            )
        ) from error
