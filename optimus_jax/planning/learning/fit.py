"""Fit rates to measured step times.

First, a few of the rates are fitted: a damped least-squares fit (Levenberg-Marquardt) of their
logarithms to the logarithms of step times. A prior keeps them near their initial values, and
Huber's loss limits the weight of outliers. Then the residuals are turned into corrections by shape
(planning/cost/corrections.py).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimus_jax.plan import Plan
from optimus_jax.planning.cost.corrections import likeness
from optimus_jax.planning.cost.cost import Prediction, predict
from optimus_jax.planning.cost.implementation_profile import OURS, ImplementationProfile
from optimus_jax.planning.cost.layer_shape import layer_shape, shape_point
from optimus_jax.planning.cost.rates import OPERATORS, Correction, Rates, ShapePoint
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.learning.calibrate import Matrix, Vector
from optimus_jax.planning.profiles.cluster import Cluster

FITTED: Mapping[str, float] = {
    "matmul_flops_per_s": 0.15,
    "memory_bytes_per_s": 0.15,
    "wave": 0.5,
    "inner": 0.5,
    "unaligned_share": 0.5,
    "interpreter_launch_s": 0.5,
    "launch_overlap": 0.25,
    "collective_share": 0.3,
    "latency_s": 0.7,
    "inter_host_share": 0.3,
    "inter_host_latency_s": 0.7,
    "send_share": 1.5,
    "step_s": 0.7,
}
"""The rates that are fitted, each with the expected deviation from its initial value, as a standard
deviation of the logarithm."""
FITTED_TO_STEPS: Mapping[str, float] = {
    "matmul_flops_per_s": 0.2,
    "f32_matmul_flops_per_s": 0.2,
    "memory_bytes_per_s": 0.2,
    "pass_share": 0.5,
    "saved_copies": 0.7,
    "again_share": 0.5,
    "launch_s": 1.5,
    "arrival_s": 1.5,
    "step_s": 1.5,
}
"""The same if matmuls, memory and links were measured by probes."""
MODEL_ERROR = 0.08
"""Expected error of the time model for a shape, as a standard deviation of the logarithm."""
MEASURING_ERROR = 0.1
"""Expected error of one measurement, likewise. The value is for a shared cluster, where the speed
of links and devices varies from day to day."""
STEP_ERROR = 0.04
"""The same of a reference step: undisturbed times of one machine repeat to a few percent."""
ITERATIONS = 12
"""Steps of the least-squares fit."""
HUBER = 1.0
"""Standard deviations beyond which a residual counts linearly, not squared."""
MAX_ROWS = 360
"""Maximum number of samples that rates are fitted to. More of the same shapes add little and take
time."""
CORRECTION_SIZE = 0.2
"""Expected standard deviation of corrections."""
LEAST_NOISE = 0.02
"""Lower bound of the relative measurement noise."""
WIDTH_OCTAVES = 1.5
"""`Rates.width_octaves` of a fit to reference steps, which have two widths."""
UNSEEN_ERROR = 0.1
"""Additional error for shapes far from all samples, as a standard deviation of the logarithm: the
error for vTrain's samples of one width when that width is left out of the fit."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured step."""

    workload: Workload
    plan: Plan
    cluster: Cluster
    step_time_s: float
    """Measured seconds per step."""
    implementation: ImplementationProfile = OURS
    """Profile of the implementation that ran the step."""

    def predicted(self, rates: Rates) -> Prediction:
        """The prediction for this step."""
        return predict(self.workload, self.plan, self.cluster, rates, self.implementation)

    def place(self) -> ShapePoint:
        """The point at which its layers and its head are corrected (`shape_point`)."""
        return shape_point(layer_shape(self.workload, self.plan), self.plan.axes.tensor)


def fit_rates(
    samples: Sequence[Sample],
    start: Rates,
    *,
    fitted: Mapping[str, float] = FITTED,
) -> Rates:
    """Fit the rates in `fitted`, the corrections and the spread to the samples, starting from
    `start`.
    """
    thinned = _thinned(samples)
    rates = _fit_physics(thinned, replace(start, corrections=()), fitted, _scaling(thinned))
    rates = replace(rates, source=f"{start.source}; fitted to {len(samples)} measured steps")
    return _with_corrections(rates, samples)


def fit_to_steps(samples: Sequence[Sample], start: Rates) -> Rates:
    """Refine `start`, which has measured matmuls, memory and links, with a few training steps.

    The steps also give corrections and the spread.
    """
    rates = _fit_physics(samples, start, FITTED_TO_STEPS, _differences(samples))
    rates = replace(
        rates,
        source=f"{start.source}, and {len(samples)} training steps",
        width_octaves=WIDTH_OCTAVES,
    )
    return _with_corrections(rates, samples)


def _thinned(samples: Sequence[Sample]) -> Sequence[Sample]:
    """At most MAX_ROWS samples, drawn evenly over the shapes with a fixed seed."""
    seen: Counter[ShapePoint] = Counter()
    ranked = []
    for number in np.random.default_rng(0).permutation(len(samples)):
        place = samples[number].place()
        ranked.append((seen[place], int(number)))
        seen[place] += 1
    return [samples[number] for _, number in sorted(ranked)[:MAX_ROWS]]


def _scaling(samples: Sequence[Sample]) -> Matrix:
    """What makes residuals of many samples [samples] independent and of size 1, about: those of the
    same shape share the model's error, but not the measurement's, and the more there are, the less
    each counts.
    """
    shapes = Counter(sample.place() for sample in samples)
    return np.diag(
        [
            (shapes[sample.place()] * MODEL_ERROR**2 + MEASURING_ERROR**2) ** -0.5
            for sample in samples
        ]
    )


def _differences(samples: Sequence[Sample]) -> Matrix:
    """The same of a few steps of one machine, exactly: steps of the same shape are measured to say
    how they differ, so that their differences count as precisely as they were measured.
    """
    places = [sample.place() for sample in samples]
    same = np.array([[one == other for other in places] for one in places], float)
    covariance = MODEL_ERROR**2 * same + STEP_ERROR**2 * np.eye(len(samples))
    return np.asarray(np.linalg.inv(np.linalg.cholesky(covariance)), dtype=np.float64)


def _fit_physics(
    samples: Sequence[Sample], start: Rates, fitted: Mapping[str, float], scaling: Matrix
) -> Rates:
    """The rates with those in `fitted` fitted.

    Args:
      scaling: [samples, samples], by which residuals are multiplied.
    """
    names, widths = list(fitted), np.array(list(fitted.values()))
    measured = np.log([sample.step_time_s for sample in samples])

    def rates_at(steps: Vector) -> Rates:
        return replace(
            start,
            **{
                name: getattr(start, name) * float(np.exp(step))
                for name, step in zip(names, steps, strict=True)
            },
        )

    def residuals(steps: Vector) -> Vector:
        rates = rates_at(steps)
        predicted = [sample.predicted(rates).step_time_s for sample in samples]
        return scaling @ (np.log(predicted) - measured)

    return rates_at(_least_squares(residuals, widths))


def _least_squares(residuals: Callable[[Vector], Vector], widths: Vector) -> Vector:
    """Steps from zero that minimise Huber's loss of residuals, plus the squares of
    steps / widths."""

    def cost(left: Vector, steps: Vector) -> float:
        size = np.abs(left)
        return float(
            np.where(size < HUBER, size**2, HUBER * (2 * size - HUBER)).sum()
            + ((steps / widths) ** 2).sum()
        )

    steps, damping = np.zeros_like(widths), 1e-2
    left = residuals(steps)
    for _ in range(ITERATIONS):
        slopes = np.stack(
            [(residuals(steps + nudge) - left) / NUDGE for nudge in NUDGE * np.eye(len(steps))],
            axis=1,
        )
        weights = np.minimum(1.0, HUBER / np.maximum(np.abs(left), 1e-9))
        normal = slopes.T @ (slopes * weights[:, None]) + np.diag(widths**-2.0)
        downhill = slopes.T @ (weights * left) + steps / widths**2
        before = cost(left, steps)
        while damping < 1e6:
            tried = steps - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
            left_there = residuals(tried)
            if cost(left_there, tried) < before:
                steps, left, damping = tried, left_there, damping / 5
                break
            damping *= 5
        if before - cost(left, steps) < 1e-3 * before:
            break
    return steps


NUDGE = 1e-3
"""Step size of numerical derivatives, in logarithms."""


def _with_corrections(rates: Rates, samples: Sequence[Sample]) -> Rates:
    """The rates with corrections by shape, computed from the residuals, and with the residuals'
    spread.
    """
    predictions = [sample.predicted(rates) for sample in samples]
    left = np.log(
        [
            sample.step_time_s / each.step_time_s
            for sample, each in zip(samples, predictions, strict=True)
        ]
    )
    known = [
        (operator, place)
        for operator in OPERATORS
        for place in sorted({sample.place() for sample in samples})
    ]
    column = {each: number for number, each in enumerate(known)}
    shares = np.zeros((len(samples), len(known)))
    for row, (sample, prediction) in enumerate(zip(samples, predictions, strict=True)):
        for operator, share in zip(OPERATORS, prediction.operator_shares(), strict=True):
            shares[row, column[operator, sample.place()]] = share
    kernel = np.array(
        [
            [
                CORRECTION_SIZE**2 * likeness(a, b, rates.width_octaves) * (one == other)
                for other, b in known
            ]
            for one, a in known
        ]
    )
    weights, noise = _regression(shares, kernel, left)
    corrections = tuple(
        Correction(operator=operator, place=place, weight=float(CORRECTION_SIZE**2 * weight))
        for (operator, place), weight in zip(known, weights, strict=True)
    )
    return replace(
        rates,
        corrections=corrections,
        spread=float(np.hypot(_spread(left), UNSEEN_ERROR)),
        spread_nearby=noise,
    )


def _regression(shares: Vector, kernel: Vector, left: Vector) -> tuple[Vector, float]:
    """Weights of a Gaussian process fitted to the residuals `left`, and its noise. Outliers count
    less.

    Each residual is a sum of the process's values at the known points, weighted by the sample's row
    of `shares`. The noise is the leave-one-out error, that of predicting each sample from the
    others.
    """
    noise, weights = 0.1, np.zeros(len(kernel))
    certainty = np.ones_like(left)
    for _ in range(6):
        weighted = shares * (certainty / noise**2)[:, None]
        inverse = np.linalg.inv(weighted.T @ shares @ kernel + np.eye(len(kernel)))
        weights = inverse @ (weighted.T @ left)
        own = np.einsum("ij,ij->i", shares @ kernel @ inverse, weighted)
        rest = (left - shares @ (kernel @ weights)) / np.maximum(1e-3, 1 - own)
        noise = max(LEAST_NOISE, _spread(rest))
        certainty = np.minimum(1.0, HUBER / np.maximum(np.abs(rest) / noise, 1e-9))
    return weights, noise


def _spread(values: Vector) -> float:
    """Standard deviation around zero, estimated robustly from the median."""
    return float(1.4826 * np.median(np.abs(values)))
