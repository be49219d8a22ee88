"""`explain_plan`: what a Plan of the user's own is predicted to take, and what is faster."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import check_devices
from optimus_jax.config.request import dotted
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.errors import ConfigError, explain
from optimus_jax.plan import Plan
from optimus_jax.planning.api import RankedPlan, config_for, described, measured_here, priced
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.explain import explained, gib, why_not
from optimus_jax.planning.search.search import USABLE_SHARE, Pricing, fits, search
from optimus_jax.system.paths import UserPath


def explain_plan(
    plan: Plan | RankedPlan | UserPath,
    model: UserPath | ModelConfig,
    cluster: str | Cluster | None = None,
    *,
    links: Iterable[str] = (),
    rates: Rates | None = None,
    **overrides: Any,
) -> str:
    """Where the predicted time and memory of a plan go: lines of text, one for each term. The first
    says what makes it slower than the best plan for the same model, cluster and batch, and whether
    it fits.

    Args:
      plan: a Plan, such as `dataclasses.replace(best.plan, remat="full")`; or the path of the
        `plan.json` of a run.
      model, cluster, links, rates: as for `find_plans`.
      overrides: settings as for `train`, but those of the layout, which is the plan's. Precision
        and moments are those of the plan, too.
    Raises:
      OptimusError: the model cannot be trained under this plan, on this cluster or with this batch;
        the text says why.
    """
    check_jax_settings()
    own = _plan_of(plan)
    settings = {"precision": own.precision, "precision.moments": own.moments, **overrides}
    where = measured_here(model, links, settings) if cluster is None else cluster
    there = described(where, links)
    check_devices(own.axes, there.num_devices)
    config = config_for(model, there, dotted(settings))
    own.validate(
        config.model, global_batch=config.data.global_batch, lengths=config.compiled_lengths
    )
    pricing = priced(config, there, where, rates)
    prediction, memory = pricing.predicted(own), pricing.memory(own)
    told = []
    if not fits(memory, there):
        usable = f"{USABLE_SHARE:.0%} of {gib(there.bytes_per_device or 0)}"
        told.append(f"it does not fit: {gib(memory.total)}, and {usable} may be used")
    return explained(own, prediction, memory, "; ".join([*told, _beside_best(pricing, own)]))


def _plan_of(given: Plan | RankedPlan | UserPath) -> Plan:
    """The plan that the user means. Raises ConfigError or PlanError if it is none."""
    if isinstance(given, Plan | RankedPlan):
        return given if isinstance(given, Plan) else given.plan
    try:
        path = Path(given)
        return Plan.from_json(path.read_text(encoding="utf-8"), path)
    except (TypeError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            explain(
                "a plan is a Plan, or the path of a plan.json",
                given=f"plan={given!r}: {error}",
                do="give the plan of a ranking, find_plans(...)[0].plan, or runs/NAME/plan.json",
            )
        ) from error


def _beside_best(pricing: Pricing, own: Plan) -> str:
    """How the plan compares with the best for the same run."""
    best = search(pricing, top=1).best
    if not best:
        return "no plan fits"
    if pricing.step_time_s(own) <= pricing.step_time_s(best[0].plan):
        return "as fast as the best plan that fits, or faster"
    slower = why_not(pricing.predicted(own), best[0].prediction)
    return f"beside the best, {best[0].plan.describe()}: {slower}"
