"""What a run writes before its first step: config, tokenizer, plan and the start event.

Afterwards the run can be resumed.
"""

from typing import Any

from optimus_jax.config import Config
from optimus_jax.control.journal import Journal
from optimus_jax.errors import ConfigError, explain
from optimus_jax.faults.fault_log import take_over
from optimus_jax.plan import Plan
from optimus_jax.planning.search.assemble import compute_precision
from optimus_jax.planning.search.choice import Choice
from optimus_jax.run.first_plan import RunDevices
from optimus_jax.run.inputs import Inputs
from optimus_jax.run.learning_rate_change import RateChange
from optimus_jax.run.resumed_config import ResumedConfig, derived_values
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.training.step import Program
from optimus_jax.training.watchers import Display


def log_start(
    config: Config,
    devices: RunDevices,
    choice: Choice,
    program: Program,
    inputs: Inputs,
    run: RunDirectory,
    display: Display,
    first_step: int,
    resumed: ResumedConfig | None,
    checkpoints: tuple[int, ...],
    weights: str | None,
) -> None:
    """Write config, tokenizer, plan and the start event; afterwards the run can be resumed.

    Args:
      weights: where the parameters came from; None: the run's own checkpoint.
    """
    if first_step > config.steps:
        raise ConfigError(
            explain(
                f"the run has already finished step {first_step}",
                given=f"--steps {config.steps}",
                do=f"leave --steps out, or give more than {first_step}",
            )
        )
    take_over(run)
    if abandoned := run.go_back_to(first_step):
        display.message(
            f"metrics of {abandoned} step(s) after step {first_step} were moved to"
            " metrics.abandoned.jsonl; these steps are repeated"
        )
    requested = config if resumed is None else resumed.as_requested(config)
    run.write_config(requested.to_json(derived=derived_settings(config, choice.plan, program)))
    run.write_tokenizer(inputs.data.tokenizer.files)
    if (interrupted := Journal(run).recover(first_step)) is not None:
        display.message(
            f"the run ended during a switch to {interrupted.target.describe()}: it continues under"
            " its previous plan"
        )
    run.write_plan(choice.plan.to_json())
    changed = (
        {}
        if resumed is None
        else _report_changes(
            config, devices, choice.plan, program, inputs, resumed, display, first_step, checkpoints
        )
    )
    run.log_event(
        "start" if resumed is None else "resume",
        first_step,
        **changed,
        devices=str(devices.topology),
        data=inputs.data.description,
        identity=inputs.data.identity,
        notes=inputs.data.notes,
        end_of_document=inputs.data.tokenizer.end,
        weights=weights,
        launcher=devices.launch.launcher,
        launch=devices.launch.why,
    )
    for note in inputs.data.notes:
        display.message(f"data: {note}")
    run.log_event(
        "plan",
        first_step,
        digest=choice.plan.digest,
        layout=choice.plan.describe(),
        why=choice.why,
        crosses=devices.topology.crossed(choice.plan.axes),
    )
    run.check()


def _report_changes(
    config: Config,
    devices: RunDevices,
    plan: Plan,
    program: Program,
    inputs: Inputs,
    resumed: ResumedConfig,
    display: Display,
    first_step: int,
    checkpoints: tuple[int, ...],
) -> dict[str, Any]:
    """Show how learning rate, evaluations and precision of a resumed run differ from before, or
    from those of a new run; return fields for the resume event, with all settings that differ.

    Args:
      checkpoints: steps of the available checkpoints.
    """
    usual = compute_precision(config.with_values({"precision.compute": "auto"}), devices.topology)
    if (
        resumed.requested.precision.compute == "auto"
        and usual != plan.precision == resumed.before.precision.compute
    ):
        display.message(
            f"precision {plan.precision}, as at the start of the run; a new run on these devices"
            f" would use {usual}: to change it, --precision {usual}"
        )
    if (told := inputs.evaluation_change(resumed.before)) is not None:
        display.message(told)
    change = RateChange(
        before=resumed.before,
        now=config,
        num_params=program.shapes.num_params,
        step=first_step,
        checkpoints=checkpoints,
    )
    said = {"settings": resumed.changes(config)} | ({} if told is None else {"evaluation": told})
    if not change.is_changed:
        return said
    display.message(change.describe())
    return said | change.rates


def derived_settings(config: Config, plan: Plan, program: Program) -> dict[str, Any]:
    """The derived values of settings, by name."""
    return {
        **derived_values(config, num_params=program.shapes.num_params, precision=plan.precision),
        "parallel.mesh": str(plan.axes),
        "parallel.zero": plan.zero,
        "parallel.microbatches": plan.microbatches,
        "parallel.attention": plan.attention,
        "parallel.loss_chunk_tokens": plan.loss_chunk_tokens,
    }
