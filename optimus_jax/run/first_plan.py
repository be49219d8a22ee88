"""The plan that a run starts with: the plan of the resumed run, or the fastest plan in trials."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from optimus_jax.checkpoint.reading import Saved
from optimus_jax.cluster.distributed import broadcast_from_0
from optimus_jax.cluster.launch_detection import Launch
from optimus_jax.config import Config
from optimus_jax.config.phases import in_phase, phase_after
from optimus_jax.config.request import SHORT_NAMES
from optimus_jax.control.journal import plan_to_resume
from optimus_jax.errors import PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compiled_step import CompiledStep
from optimus_jax.planning.cost.memory import memory_of_run
from optimus_jax.planning.local_cluster import LocalCluster
from optimus_jax.planning.search.choice import Choice
from optimus_jax.planning.search.phase_plans import PricingOf, plan_of
from optimus_jax.planning.search.search import Pricing
from optimus_jax.planning.trials.measure import TRIAL_STEPS, measure
from optimus_jax.planning.trials.trial import PlanTrial, run_trial
from optimus_jax.run_directory.contents import PLAN_FILE
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.training.watchers import Display

LAYOUT_SETTINGS = ("parallel.", "precision.")
"""Prefixes of the settings that affect the plan: a resumed run keeps its plan unless one is
given."""


@dataclass(frozen=True, kw_only=True)
class RunDevices:
    """The devices of a run."""

    launch: Launch
    topology: Topology
    local_cluster: LocalCluster | None
    """Measured speed of the devices; None if unknown or not needed."""

    def pricing(self, config: Config) -> Pricing | None:
        """Cost estimates of plans on these devices; None if their speed is unknown."""
        return None if self.local_cluster is None else self.local_cluster.pricing(config)


def for_available_devices(config: Config, topology: Topology) -> Config:
    """The config of a resumed run, with the layout left to the planner if its mesh is for another
    number of devices.
    """
    axes = config.parallel.axes
    fits = axes is None or axes.num_devices == topology.num_devices
    return config if fits else config.with_open_layout()


def is_same_layout(requested: Config, run_dir: str | Path) -> bool:
    """Whether a config, with unset settings unset, requests the same layout as the config.json in
    `run_dir`.
    """
    old = Config.from_json(RunDirectory(run_dir, writer=False).config_text())
    return (requested.parallel, requested.precision) == (old.parallel, old.precision)


def plan_of_run(
    config: Config,
    topology: Topology,
    run_dir: str | Path,
    overrides: dict[str, Any],
    saved: Saved | None,
    prices: PricingOf,
) -> Choice | None:
    """The plan of a resumed run; None if a layout setting is given or the devices have changed.

    Args:
      config: config of the whole run.
      overrides: settings given on resume.
      saved: in a run with phases, the checkpoint to resume from, if there is one.
      prices: cost estimates, used if a phase needs another plan than the one before.
    """
    run = RunDirectory.resume(run_dir, writer=False)
    text = plan_to_resume(run.path)
    layout = {name for name, dotted in SHORT_NAMES.items() if dotted.startswith(LAYOUT_SETTINGS)}
    if text is None or any(
        name in layout or name.startswith(LAYOUT_SETTINGS) for name in overrides
    ):
        return None
    plan = Plan.from_json(text, run.path / PLAN_FILE)
    # somebody edited config.json, which counts as giving the setting
    if config.precision.compute not in ("auto", plan.precision):
        return None
    if plan.num_devices != topology.num_devices:
        return None
    if config.data.phases:
        now, last_step = (
            phase_after(config, saved.step if saved else 0),
            max((record.step for record in run.metrics()), default=0),
        )
        # steps of an earlier phase are repeated; the checkpoint holds that phase's plan
        if phase_after(config, last_step) != now:
            if saved is None:
                return None
            plan = Plan.from_json(saved.metadata["plan"])
        plan, config = plan_of(now, config, plan, topology, prices), in_phase(config, now)
    plan.validate(
        config.model, global_batch=config.data.global_batch, lengths=config.compiled_lengths
    )
    return Choice(
        plan=plan,
        why="the run's own plan",
        memory=memory_of_run(config, plan),
    )


def fastest_in_trials(
    config: Config,
    topology: Topology,
    choice: Choice,
    local_cluster: LocalCluster | None,
    run: RunDirectory,
    display: Display,
) -> tuple[Choice, CompiledStep | None]:
    """Try the planner's best plans if that pays, and return the fastest with its compiled step; the
    step is None if the plan was not tried.

    Every process must call this. Process 0 decides, because clocks and predictions differ between
    processes; the others try the plans that it broadcasts.

    Args:
      choice: the planner's choice, equal in every process.
      local_cluster: measured speed of the devices; None if unknown, then nothing is tried.
    Raises:
      PlanError: plans were tried, and none could run.
    """
    steps: dict[Plan, CompiledStep | None] = {}  # of the newest trial and the fastest before it
    times_s: dict[Plan, float] = {}

    def run_one(plan: Plan, fastest: Plan | None) -> PlanTrial:
        for slower in steps.keys() - {fastest}:
            del steps[slower]  # frees its memory
        display.message(f"trying {plan.describe()}")
        trial = run_trial(
            config, plan, num_steps=TRIAL_STEPS, bytes_per_device=topology.bytes_per_device
        )
        steps[plan] = trial.step
        return replace(trial, step=None)

    if jax.process_index() > 0:
        followed = _follow_process_0(choice, run_one)
        return followed, steps.get(followed.plan)

    def run_on_all(plan: Plan) -> PlanTrial:
        fastest = min(times_s, key=times_s.__getitem__, default=None)
        _broadcast(_TRY, json.dumps([plan.to_json(), fastest and fastest.to_json()]))
        trial = run_one(plan, fastest)
        times_s[plan] = trial.step_time_s
        if local_cluster is not None:
            local_cluster.remember(config, plan, trial.step_time_s)
        return trial

    try:
        fastest = _try_plans(config, choice, local_cluster, run, run_on_all)
    except PlanError as error:
        _broadcast(_FAIL, str(error))
        raise
    _broadcast(_KEEP, json.dumps([fastest.plan.to_json(), fastest.why]))
    return fastest, steps.get(fastest.plan)


_TRY, _KEEP, _FAIL = "try", "keep", "fail"
"""Kinds of messages that process 0 broadcasts: a plan to try with the fastest before it, the chosen
plan with its reason, or an error."""


def _broadcast(kind: str, content: str) -> None:
    broadcast_from_0(json.dumps([kind, content]))


def _follow_process_0(choice: Choice, run_one: Callable[[Plan, Plan | None], PlanTrial]) -> Choice:
    """Try the plans that process 0 broadcasts, and return the choice that it broadcasts last."""
    while True:
        kind, content = json.loads(broadcast_from_0(""))
        if kind == _FAIL:
            raise PlanError(content)
        if kind == _KEEP:
            plan, why = json.loads(content)
            return replace(choice, plan=Plan.from_json(plan), why=why)
        plan, fastest = json.loads(content)
        with suppress(PlanError):  # process 0 has the same error
            run_one(Plan.from_json(plan), fastest and Plan.from_json(fastest))


def _try_plans(
    config: Config,
    choice: Choice,
    local_cluster: LocalCluster | None,
    run: RunDirectory,
    run_one: Callable[[Plan], PlanTrial],
) -> Choice:
    if local_cluster is None or not choice.ranked:
        return choice
    measured = measure(
        choice.ranked,
        run_one,
        num_steps=config.steps,
        most=config.parallel.trials,
        spread=local_cluster.rates.spread,
    )
    for trial in measured.trials:
        predicted = next(
            candidate.prediction for candidate in choice.ranked if candidate.plan == trial.plan
        )
        run.log_event(
            "decision",
            0,
            plan=trial.plan.digest,
            layout=trial.plan.describe(),
            predicted_step_time_s=predicted.step_time_s,
            measured_step_time_s=trial.step_time_s,
            compile_time_s=trial.compile_s,
            step_bytes_per_device=trial.step_bytes,
        )
    if not measured.trials:
        return replace(choice, why=f"{choice.why}; {measured.why}")
    return replace(
        choice,
        plan=measured.plan,
        tried_s={trial.plan: trial.step_time_s for trial in measured.trials},
        why=(
            f"auto: {measured.why}, {min(trial.step_time_s for trial in measured.trials):.3g} s per"
            " step"
        ),
    )
