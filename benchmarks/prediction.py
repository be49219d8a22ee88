"""Accuracy of the controller's predictor: it learns the step times of a few plans and predicts
those of others. Measured on this machine, or SIMULATED.

    python benchmarks/regret.py measure --out plans.jsonl       # run all plans
    python benchmarks/regret.py contend --out plans.jsonl
    python benchmarks/prediction.py --plans plans.jsonl         # learn some, predict the others
    python benchmarks/prediction.py --simulated

The first two commands run the plans of two small models on 8 virtual devices; called again,
`measure` runs the missing ones. A plan's step time is its CPU-seconds, scaled to wall time by the
ratio of the two while the machine was idle: other processes make wall time longer, and CPU time
hardly. Simulated step times are those of simulation/world.py, for the best plans of a search.

For each number of plans, the following is repeated many times: draw that many plans at random, let
the predictor learn their step times, and predict those of all others. The columns are:

* error: mean absolute logarithm of measured over predicted;
* model, factor: the error of the cost model alone, and times one common factor;
* inside: share of the other plans whose time lies within its 90% interval, and half the width of
  that interval, as a logarithm;
* ratio: the same for the ratio of their time to that of a learnt plan, which is what the
  controller decides switches by;
* P 0.75, P 0.9: of the plans called faster than the learnt plan with at least this probability,
  the share that is faster, and their number for each draw;
* best of 20: 20 others are drawn, and the one predicted to be fastest is compared with the learnt
  plan: the share of ratios within their 90% interval, the mean logarithm of the true over the
  predicted ratio, and for plans with a probability of at least 0.5 the mean probability claimed and
  the share that is faster.

The last rows of a measured model are of a run that has read what a run of the other model, with 16
plans, has learnt on this machine.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import regret
from prediction_cases import Case, measured_cases, simulated_cases

from optimus_jax.control.learnt_file import LearntFile
from optimus_jax.control.predictor import Predictor
from optimus_jax.planning.cost.cost import NINE_IN_TEN
from optimus_jax.system.paths import path_argument

TAUGHT = (1, 2, 4, 8, 16)
"""Numbers of plans that are learnt before the others are predicted."""
DRAWS = 120
CLAIMS = (0.75, 0.9)
"""Probabilities of being faster whose claims are counted."""
CANDIDATES = 20
"""Number of plans of which the one predicted to be fastest is looked at."""


Random = np.random.Generator


class Tally:
    """Means of values that are added one at a time, by name."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)

    def mean(self, name: str) -> float:
        return statistics.fmean(self._values.get(name, [math.nan]))

    def count(self, name: str) -> int:
        return len(self._values.get(name, []))


def learn(
    predictor: Predictor, case: Case, log_times: np.ndarray, places: Sequence[int], random: Random
) -> None:
    """Teach these plans."""
    for place in places:
        noise = case.is_exact * case.noise / math.sqrt(case.count) * random.standard_normal()
        predictor.learn(
            case.queries[place],
            log_time=float(log_times[place] + noise),
            noise=case.noise,
            count=case.count,
            step=1,
        )


def after(case: Case, draw: int) -> Predictor:
    """The predictor of a run that reads what an earlier run has learnt of this case."""
    random, earlier, later = np.random.default_rng([draw, 0]), Predictor(), Predictor()
    log_times = case.log_times[0]
    learn(
        earlier, case, log_times, random.permutation(len(log_times))[: max(TAUGHT)].tolist(), random
    )
    with tempfile.TemporaryDirectory() as folder:
        LearntFile(Path(folder, "learnt.json"), {"evidence": earlier}).write()
        LearntFile(Path(folder, "learnt.json"), {"evidence": later}).read()
    return later


def scored(case: Case, taught: int, earlier: Case | None = None) -> Tally:
    """Let the predictor learn `taught` of the plans many times, and score it on the others.

    Args:
      case: the plans.
      taught: number of plans to learn.
      earlier: what another run has learnt before; None: there was none.
    """
    cost_model, tally = np.array([math.log(each.predicted_s) for each in case.queries]), Tally()
    for draw in range(DRAWS):
        random = np.random.default_rng([draw, taught])
        log_times = case.log_times[draw % len(case.log_times)]
        order = random.permutation(np.flatnonzero(np.isfinite(log_times)))
        seen, others = order[:taught], order[taught:]
        predictor = Predictor() if earlier is None else after(earlier, draw)
        learn(predictor, case, log_times, seen.tolist(), random)
        forecast = predictor.predict(case.queries)
        factor = np.mean(log_times[seen] - cost_model[seen])
        for column, guess in (
            ("error", forecast.mean),
            ("model", cost_model),
            ("factor", cost_model + factor),
        ):
            tally.add(**{column: float(np.abs(log_times - guess)[others].mean())})
        here, ratios = int(seen[-1]), {}
        for other in others.tolist():
            width = NINE_IN_TEN * math.sqrt(forecast.covariance[other, other])
            mean, deviation = ratios[other] = forecast.ratio(other, here)
            true = log_times[other] - log_times[here]
            tally.add(
                inside=abs(log_times[other] - forecast.mean[other]) < width,
                width=width,
                ratio_inside=abs(true - mean) < NINE_IN_TEN * deviation,
                ratio_width=NINE_IN_TEN * deviation,
            )
            for claim in CLAIMS:
                if _faster(mean, deviation) >= claim:
                    tally.add(**{f"held {claim}": true < 0})
        _look_at_best(tally, ratios, others[:CANDIDATES].tolist(), log_times - log_times[here])
    return tally


def _look_at_best(
    tally: Tally,
    ratios: dict[int, tuple[float, float]],
    candidates: Sequence[int],
    true: np.ndarray,
) -> None:
    """Score the candidate that is predicted to be fastest."""
    best = min(candidates, key=lambda each: ratios[each][0])
    mean, deviation = ratios[best]
    tally.add(
        best_inside=abs(true[best] - mean) < NINE_IN_TEN * deviation,
        best_excess=float(true[best] - mean),
    )
    if (claimed := _faster(mean, deviation)) >= 0.5:
        tally.add(best_claimed=claimed, best_held=float(true[best] < 0))


def _faster(mean: float, deviation: float) -> float:
    return statistics.NormalDist(mean, max(1e-9, deviation)).cdf(0.0)


def show(case: Case, other: Case | None = None) -> None:
    """Print the scores of a case, `other` as in `scored`."""
    times = np.exp(case.log_times[np.isfinite(case.log_times)])
    print(
        f"\n{case.name}: {len(case.queries)} plans, {times.min():.3f} to {times.max():.3f} s per"
        f" step; {DRAWS} draws each"
    )
    print(
        "                               inside         ratio       "
        + "       ".join(f"P {claim:g}" for claim in CLAIMS)
        + f"        best of {CANDIDATES}"
    )
    print(
        "  taught  error  model factor  share    +-  share    +-"
        + "   held number" * len(CLAIMS)
        + "  inside  excess claimed  faster"
    )
    for taught, before in [(taught, None) for taught in TAUGHT] + [
        (taught, other) for taught in TAUGHT[:3] if other is not None
    ]:
        found = scored(case, taught, before)
        claims = "".join(
            f"{found.mean(f'held {claim}'):7.1%}{found.count(f'held {claim}') / DRAWS:7.1f}"
            for claim in CLAIMS
        )
        shares = "".join(
            f"{found.mean(name):{7 if name in ('error', 'model', 'factor') else 6}.1%}"
            for name in (
                "error",
                "model",
                "factor",
                "inside",
                "width",
                "ratio_inside",
                "ratio_width",
            )
        )
        best = "".join(
            f"{found.mean(name):8.1%}"
            for name in ("best_inside", "best_excess", "best_claimed", "best_held")
        )
        print(
            f"  {taught:6} {shares}{claims}{best}" + ("  (read)" if before is not None else ""),
            flush=True,
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
    parser.add_argument(
        "--simulated", action="store_true", help="score simulated plans, and no measured ones"
    )
    args = parser.parse_args()
    if not args.simulated and not args.plans.exists():
        print(
            f"error: {args.plans} does not exist; measure it: python benchmarks/regret.py measure"
            f" --out {args.plans}",
            file=sys.stderr,
        )
        return 2
    from optimus_jax.devices.cpu import use_cpu_devices

    use_cpu_devices(regret.NUM_DEVICES)
    if args.simulated:
        for case in simulated_cases():
            show(case)
        return 0
    cases = [case for case in measured_cases(args.plans) if len(case.queries) > max(TAUGHT)]
    for case in cases:
        show(case, next((each for each in cases if each is not case), None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
