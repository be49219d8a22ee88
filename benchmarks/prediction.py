"""Accuracy of the controller's predictor on this machine: it learns the step times of a few plans
and predicts those of all others.

    python benchmarks/regret.py measure --out plans.jsonl       # run all plans
    python benchmarks/prediction.py --plans plans.jsonl         # learn some, predict the others

The first command runs all plans of two small models on 8 virtual devices; called again, it runs the
missing ones.

For each number of plans, the following is repeated many times: draw that many plans at random, let
the predictor learn their step times, and predict those of all others. The columns are:

* error: mean absolute logarithm of measured over predicted;
* cost model, x factor: the error of the cost model alone, and times one common factor;
* coverage: share of the other plans whose time lies within its 90% interval;
* of ratios: the same for the ratio of their time to that of a learnt plan, which is what the
  controller decides switches by;
* hold: of the plans called faster than the learnt plan with a probability of at least 0.9, the
  share that is faster;
* claims: the number of such plans.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import regret

from optimus_jax.system.paths import path_argument

TAUGHT = (1, 2, 4, 8, 16)
"""Numbers of plans that are learnt before the others are predicted."""
DRAWS = 100
NOISE = 0.05
"""Standard deviation of the logarithm of a step time on these shared cores."""
SURE = 0.9
"""Probability that the controller's policy requires."""


@dataclass(frozen=True)
class Score:
    """Scores for one number of learnt plans, over all draws."""

    taught: int
    error: float
    """Error of the predictor."""
    cost_model: float
    """Error of the cost model alone."""
    scaled: float
    """Error of the cost model times one factor, the mean ratio of the learnt plans."""
    coverage: float
    """Share of plans within their intervals."""
    ratio_coverage: float
    """Share of ratios within their intervals."""
    claims_held: float
    """Share of true claims among those with a probability of at least SURE; NaN: no claims."""
    claims: int


def scored(queries: Sequence, log_times: np.ndarray, taught: int) -> Score:
    """Let the predictor learn `taught` of the plans, and score it on the others.

    Args:
      queries: control.predictor.Query of each plan.
      log_times: [plans], logarithms of measured step times.
    """
    from statistics import NormalDist

    from optimus_jax.control.predictor import Predictor
    from optimus_jax.planning.cost.cost import NINE_IN_TEN

    cost_model = np.array([math.log(query.predicted_s) for query in queries])
    errors, inside, compared, claims = [], [], [], []
    for draw in range(DRAWS):
        order = np.random.default_rng([draw, taught]).permutation(len(queries))
        seen, others = order[:taught], order[taught:]
        predictor = Predictor()
        for place in seen:
            predictor.learn(
                queries[place],
                log_time=float(log_times[place]),
                noise=NOISE,
                count=regret.NUM_STEPS,
                step=1,
            )
        forecast = predictor.predict(queries)
        factor = np.mean(log_times[seen] - cost_model[seen])
        errors.append(
            [
                np.abs(log_times - guess)[others].mean()
                for guess in (forecast.mean, cost_model, cost_model + factor)
            ]
        )
        inside += (
            np.abs(log_times - forecast.mean) < NINE_IN_TEN * np.sqrt(np.diag(forecast.covariance))
        )[others].tolist()
        here = int(seen[-1])
        for other in others.tolist():
            mean, deviation = forecast.ratio(other, here)
            true = log_times[other] - log_times[here]
            compared.append(abs(true - mean) < NINE_IN_TEN * deviation)
            if NormalDist(mean, deviation).cdf(0.0) >= SURE:
                claims.append(true < 0)
    error, alone, scaled = np.mean(errors, axis=0).tolist()
    return Score(
        taught=taught,
        error=error,
        cost_model=alone,
        scaled=scaled,
        coverage=float(np.mean(inside)),
        ratio_coverage=float(np.mean(compared)),
        claims_held=float(np.mean(claims)) if claims else math.nan,
        claims=len(claims),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plans",
        type=path_argument,
        default=Path("plans.jsonl"),
        help="JSON Lines from regret.py (default: plans.jsonl)",
    )
    args = parser.parse_args()
    if not args.plans.exists():
        print(
            f"error: {args.plans} does not exist; measure it: python benchmarks/regret.py measure"
            f" --out {args.plans}",
            file=sys.stderr,
        )
        return 2
    from optimus_jax.devices.cpu import use_cpu_devices

    use_cpu_devices(regret.NUM_DEVICES)
    from optimus_jax.control.deciding.prices import query

    here, rows = (
        regret.measured_devices(),
        [json.loads(line) for line in args.plans.read_text().splitlines()],
    )
    for name in regret.MODELS:
        measured = {
            row["plan"]: row["step_time_s"]
            for row in rows
            if row["model"] == name and row.get("round", 0) == 0
        }
        pricing = here.pricing(regret.config_of(name))
        plans = [plan for plan in regret.plans_of(name) if plan.digest in measured]
        queries, log_times = (
            [query(plan, pricing, "now") for plan in plans],
            np.log([measured[plan.digest] for plan in plans]),
        )
        print(
            f"\n{name}: {len(plans)} plans measured, {math.exp(log_times.min()):.3f} to"
            f" {math.exp(log_times.max()):.3f} s per step; {DRAWS} draws each"
        )
        print(
            f"  {'taught':>6} {'error':>8} {'cost model':>11} {'x factor':>9} {'coverage':>8}"
            f" {'of ratios':>9} {'hold':>7} {'claims':>8}"
        )
        for taught in TAUGHT:
            score = scored(queries, log_times, taught)
            print(
                f"  {score.taught:>6} {score.error:>8.1%} {score.cost_model:>11.1%}"
                f" {score.scaled:>9.1%} {score.coverage:>8.1%} {score.ratio_coverage:>9.1%}"
                f" {score.claims_held:>7.1%} {score.claims:>8}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
