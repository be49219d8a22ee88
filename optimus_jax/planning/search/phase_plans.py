"""The plan of a phase: that of the phase before, as far as the phase's batches allow it.

State has to move only if the mesh, or what is sharded over it, changes. So the plan stays if it is
legal and fits; else other microbatches and recomputing on the same layout; only where there are
none, another layout, if the mesh was not asked for.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from optimus_jax.config import REMAT_POLICIES, Config
from optimus_jax.config.phases import TrainingPhase, in_phase, phases_of
from optimus_jax.errors import PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.memory import estimate_memory
from optimus_jax.planning.search.assemble import fixed_microbatches
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.planning.search.divisors import divisors
from optimus_jax.planning.search.search import Pricing, fits

Prices = Callable[[Config], Pricing | None]
"""What plans cost for a run of a config; None: that is not known."""


def plans_ahead(
    config: Config, plan: Plan, step: int, topology: Topology, prices: Prices
) -> list[tuple[TrainingPhase, Plan]]:
    """The phases that begin after `step`, each with the plan that it would have.

    Args:
      config: of the whole run.
      plan: that the run is under after `step`.
    Raises:
      PlanError: a phase has none; the text says which and what would be accepted.
    """
    found = []
    for phase in phases_of(config):
        if phase.steps_before > step:
            plan = plan_of(phase, config, plan, topology, prices)
            found.append((phase, plan))
    return found


def plan_of(
    phase: TrainingPhase, config: Config, plan: Plan, topology: Topology, prices: Prices
) -> Plan:
    """What a run under `plan` goes on with in a phase; as `plans_ahead`."""
    own = in_phase(config, phase)
    for each in _on_same_layout(own, plan):
        if _is_possible(own, each, topology):
            return each
    try:
        if config.parallel.axes is None or config.control == "auto":
            freed = own if config.parallel.axes is None else own.with_open_layout()
            return choose_plan(freed, topology, prices(freed), kept=("data.",)).plan
        return choose_plan(
            replace(own, parallel=replace(own.parallel, mesh=str(plan.axes))),
            topology,
            kept=("data.",),
        ).plan
    except PlanError as error:
        raise PlanError(
            f"the batches after step {phase.steps_before} (data.phases: {phase}): {error}"
        ) from error


def _on_same_layout(config: Config, plan: Plan) -> Iterator[Plan]:
    """The plan itself, then with the nearest numbers of microbatches, then with more recomputing
    where that was left open.
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
            other = replace(plan, microbatches=number, remat=remat)
            if not plan.offloads_activations or remat == "full":
                yield other


def _is_possible(config: Config, plan: Plan, topology: Topology) -> bool:
    """Whether the plan is legal and estimated to fit."""
    try:
        plan.validate(config.model, global_batch=config.data.global_batch)
    except PlanError:
        return False
    memory = estimate_memory(
        config.model, plan, seq_len=config.seq_len, global_batch=config.data.global_batch
    )
    return fits(memory, topology)
