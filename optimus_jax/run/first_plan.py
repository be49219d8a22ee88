"""The plan that a run begins with, beyond what can be said before it: the one it had, or the
fastest of those tried.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from optimus_jax.checkpoint.checkpoints import Saved
from optimus_jax.cluster.distributed import broadcast_from_0
from optimus_jax.config import Config
from optimus_jax.config.phases import in_phase, phase_after
from optimus_jax.config.request import SHORT_NAMES
from optimus_jax.control.journal import plan_to_resume
from optimus_jax.errors import PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compiled_step import CompiledStep
from optimus_jax.planning.cost.memory import estimate_memory
from optimus_jax.planning.local_cluster import LocalCluster
from optimus_jax.planning.search.choice import Choice
from optimus_jax.planning.search.phase_plans import Prices, plan_of
from optimus_jax.planning.trials.measure import TRIAL_STEPS, measure
from optimus_jax.planning.trials.trial import PlanTrial, run_trial
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.training.watchers import Display

LAYOUT_SETTINGS = ("parallel.", "precision.")
"""A resumed run keeps its plan unless one of these is given."""


def on_what_is_there(config: Config, topology: Topology) -> Config:
    """The config of a run that goes on, its layout left to the planner if the mesh that it names is
    for another number of devices.
    """
    axes = config.parallel.axes
    is_for_them = axes is None or axes.num_devices == topology.num_devices
    return config if is_for_them else config.with_open_layout()


def is_same_layout(asked: Config, run_dir: str | Path) -> bool:
    """Whether a config, with what was left open left open, asks for the layout that the run in a
    directory was asked to have.
    """
    old = Config.from_json(RunDirectory(run_dir, writer=False).config_text())
    return (asked.parallel, asked.precision) == (old.parallel, old.precision)


def own_plan(
    config: Config,
    topology: Topology,
    run_dir: str | Path,
    overrides: dict[str, Any],
    saved: Saved | None,
    prices: Prices,
) -> Choice | None:
    """The plan that the run had, unless its layout was asked to change or the devices have changed.

    Args:
      config: of the whole run.
      saved: in a run with phases, the checkpoint that it goes on from, if there is one.
      prices: for a phase that needs another plan than the one before.
    """
    run = RunDirectory.resume(run_dir, writer=False)
    text = plan_to_resume(run.path)
    layout = {name for name, dotted in SHORT_NAMES.items() if dotted.startswith(LAYOUT_SETTINGS)}
    if text is None or any(
        name in layout or name.startswith(LAYOUT_SETTINGS) for name in overrides
    ):
        return None
    plan = Plan.from_json(text, run.path / "plan.json")
    # as good as given: somebody has edited config.json
    if config.precision.compute not in ("auto", plan.precision):
        return None
    if plan.num_devices != topology.num_devices:
        return None
    if config.data.phases:
        now, last_step = (
            phase_after(config, saved.step if saved else 0),
            max((record.step for record in run.metrics()), default=0),
        )
        # steps are done again in an earlier phase, whose plan the checkpoint knows
        if phase_after(config, last_step) != now:
            if saved is None:
                return None
            plan = Plan.from_json(saved.metadata["plan"])
        plan, config = plan_of(now, config, plan, topology, prices), in_phase(config, now)
    plan.validate(config.model, global_batch=config.data.global_batch)
    return Choice(
        plan=plan,
        why="the run's own plan",
        memory=estimate_memory(
            config.model, plan, seq_len=config.seq_len, global_batch=config.data.global_batch
        ),
    )


def fastest_tried(
    config: Config,
    topology: Topology,
    choice: Choice,
    here: LocalCluster | None,
    run: RunDirectory,
    display: Display,
) -> tuple[Choice, CompiledStep | None]:
    """The fastest of the planner's best, measured where that pays, with its compiled step if it was
    tried.

    Every process has to call it. The first decides, for clocks and predictions differ; the others
    try what it says.

    Args:
      choice: the same plan in every process.
      here: how fast the devices are; None: that is not known, and nothing is tried.
    Raises:
      PlanError: plans were tried, and none of them could run.
    """

    steps: dict[Plan, CompiledStep | None] = {}  # those of slower plans are freed on return

    def run_one(plan: Plan) -> PlanTrial:
        display.message(f"trying {plan.describe()}")
        trial = run_trial(
            config, plan, num_steps=TRIAL_STEPS, bytes_per_device=topology.bytes_per_device
        )
        steps[plan] = trial.step
        return trial

    if jax.process_index() > 0:
        followed = _followed(choice, run_one)
        return followed, steps.get(followed.plan)

    def told_to_all(plan: Plan) -> PlanTrial:
        _tell(_TRY, plan.to_json())
        trial = run_one(plan)
        if here is not None:
            here.remember(config, plan, trial.step_time_s)
        return trial

    try:
        fastest = _measured(config, choice, here, run, told_to_all)
    except PlanError as error:
        _tell(_FAIL, str(error))
        raise
    _tell(_KEEP, json.dumps([fastest.plan.to_json(), fastest.why]))
    return fastest, steps.get(fastest.plan)


_TRY, _KEEP, _FAIL = "try", "keep", "fail"
"""What the first process tells: a plan, a plan and why, or an error."""


def _tell(what: str, content: str) -> None:
    broadcast_from_0(json.dumps([what, content]))


def _followed(choice: Choice, run_one: Callable[[Plan], PlanTrial]) -> Choice:
    """What the first process tells to try is tried, until it tells what was chosen."""
    while True:
        what, content = json.loads(broadcast_from_0(""))
        if what == _FAIL:
            raise PlanError(content)
        if what == _KEEP:
            plan, why = json.loads(content)
            return replace(choice, plan=Plan.from_json(plan), why=why)
        with suppress(PlanError):  # the first process has had it too
            run_one(Plan.from_json(content))


def _measured(
    config: Config,
    choice: Choice,
    here: LocalCluster | None,
    run: RunDirectory,
    run_one: Callable[[Plan], PlanTrial],
) -> Choice:
    if here is None or not choice.ranked:
        return choice
    measured = measure(
        choice.ranked,
        run_one,
        num_steps=config.steps,
        most=config.parallel.trials,
        spread=here.rates.spread,
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
