"""Choose the plan of a training phase, as close as possible to the previous phase's plan.

State has to be resharded only if the mesh or the sharding changes. So the plan is kept if it is
legal and fits. Otherwise other numbers of microbatches and more recomputation are tried on the same
layout. Only if that fails is another layout chosen, provided that the user did not fix the mesh.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from optimus_jax.config import REMAT_POLICIES, Config
from optimus_jax.config.phases import TrainingPhase, in_phase, phases_of
from optimus_jax.errors import PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.memory import memory_of_run
from optimus_jax.planning.search.assemble import fixed_microbatches
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.planning.search.divisors import divisors
from optimus_jax.planning.search.search import Pricing, fits

PricingOf = Callable[[Config], Pricing | None]
"""Maps a config to its cost model; None if the speed of the devices is unknown."""


def plans_ahead(
    config: Config, plan: Plan, step: int, topology: Topology, prices: PricingOf
) -> list[tuple[TrainingPhase, Plan]]:
    """The phases that begin after `step`, each with its plan.

    Args:
      config: the config of the whole run.
      plan: the plan of the run at `step`.
    Raises:
      PlanError: a phase has no plan; the message names it and suggests accepted settings.
    """
    found = []
    for phase in phases_of(config):
        if phase.steps_before > step:
            plan = plan_of(phase, config, plan, topology, prices)
            found.append((phase, plan))
    return found


def plan_of(
    phase: TrainingPhase, config: Config, plan: Plan, topology: Topology, prices: PricingOf
) -> Plan:
    """The plan of a phase that follows a phase under `plan`. Raises like `plans_ahead`."""
    own = in_phase(config, phase)
    for each in _on_same_layout(own, plan):
        if _is_possible(own, each, topology):
            return each
    try:
        if config.parallel.axes is None or config.control == "auto":
            freed = own if config.parallel.axes is None else own.with_open_layout()
            return choose_plan(freed, topology, prices(freed), fixed=("data.",)).plan
        return choose_plan(
            replace(own, parallel=replace(own.parallel, mesh=str(plan.axes))),
            topology,
            fixed=("data.",),
        ).plan
    except PlanError as error:
        raise PlanError(
            f"the batches after step {phase.steps_before} (data.phases: {phase}): {error}"
        ) from error


def _on_same_layout(config: Config, plan: Plan) -> Iterator[Plan]:
    """Yield the plan itself, then variants on the same layout.

    First with other numbers of microbatches, nearest first; then with more recomputation, if the
    user left that open.
    """
    yield plan
    rows, fixed = (
        config.data.global_batch // plan.batch_ways(),
        fixed_microbatches(config, plan.pipeline),
    )
    numbers = [fixed] if fixed else list(divisors(rows))
    numbers.sort(key=lambda number: (abs(math.log(number / plan.microbatches)), number))
    policies = (
        REMAT_POLICIES[REMAT_POLICIES.index(plan.remat) :]
        if config.parallel.remat == "auto"
        else (plan.remat,)
    )
    for remat in policies:
        for number in numbers:
            # With more recomputing the phase needs memory, which kept layers would take.
            kept = plan.kept_layers if remat == plan.remat else 0
            other = replace(plan, microbatches=number, remat=remat, kept_layers=kept)
            if not plan.offloads_activations or remat == "full":
                yield other


def _is_possible(config: Config, plan: Plan, topology: Topology) -> bool:
    """Whether the plan is legal and estimated to fit."""
    try:
        plan.validate(
            config.model, global_batch=config.data.global_batch, lengths=config.compiled_lengths
        )
    except PlanError:
        return False
    return fits(memory_of_run(config, plan), topology)
