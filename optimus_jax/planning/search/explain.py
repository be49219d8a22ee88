"""Explain a ranking in sentences and tables."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from optimus_jax.config.request import typed
from optimus_jax.mesh.axes import LENGTH
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.cost import Prediction
from optimus_jax.planning.cost.memory import MemoryEstimate

WORTH_REPORTING = 0.01
"""Minimum difference between terms to mention, as a share of the step."""


def gib(num_bytes: float) -> str:
    """Bytes as text, in GiB with two decimals."""
    return f"{num_bytes / 2**30:.2f} GiB"


def mib(num_bytes: float) -> str:
    """Bytes as text, in MiB with one decimal, where models may be small."""
    return f"{num_bytes / 2**20:,.1f} MiB"


def seconds(time_s: float) -> str:
    """A time as text with three digits and a suitable unit."""
    if not time_s:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if time_s * scale >= 1 or unit == "us":
            return f"{time_s * scale:.3g} {unit}"
    raise AssertionError(time_s)


def why_best(best: Prediction, num_priced: int) -> str:
    """Why `best` is the best plan, with the three largest terms of its step."""
    parts = sorted(best.terms, key=lambda term: -term.time_s)[:3]
    shares = ", ".join(f"{term.name} {term.time_s / best.step_time_s:.0%}" for term in parts)
    return f"the fastest that fits of {num_priced} legal layouts: {shares} of the step"


def why_not(other: Prediction, best: Prediction) -> str:
    """Which terms make `other` slower than `best`, and which one it improves."""
    before, after = (_by_name(prediction) for prediction in (best, other))
    changes = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {*before, *after}}
    ordered = sorted(changes.items(), key=lambda change: (-change[1], change[0]))
    losses = [
        f"{name} +{seconds(change)}"
        for name, change in ordered[:2]
        if change > WORTH_REPORTING * best.step_time_s
    ]
    gains = [
        f"{name} -{seconds(-change)}"
        for name, change in ordered[-1:]
        if -change > WORTH_REPORTING * best.step_time_s
    ]
    if not losses:
        return f"as fast within {max(0.0, other.step_time_s / best.step_time_s - 1):.1%}"
    return f"{other.step_time_s / best.step_time_s - 1:.1%} slower: {', '.join(losses)}" + (
        f"; though {gains[0]}" if gains else ""
    )


def term_rows(prediction: Prediction) -> list[list[str]]:
    """A row per term: name, time, share of the step, derivation."""
    return [
        [term.name, seconds(term.time_s), f"{term.time_s / prediction.step_time_s:.1%}", term.how]
        for term in prediction.terms
    ]


def memory_rows(memory: MemoryEstimate) -> list[list[str]]:
    """A row per part of a device's memory: name, size."""
    parts = dataclasses.asdict(memory).items()
    return [*([name, gib(size)] for name, size in parts), ["total", gib(memory.total)]]


def explained(plan: Plan, prediction: Prediction, memory: MemoryEstimate, why: str) -> str:
    """Where the predicted time and memory of a plan go: lines of text, one for each term.

    Args:
      why: what the plan is among others, in a sentence.
    """
    return "\n".join(
        [
            f"{plan.describe()}: {seconds(prediction.step_time_s)} a step; {why}",
            *as_lines(term_rows(prediction)),
            "memory of a device:",
            *as_lines(memory_rows(memory)),
        ]
    )


def as_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def layout_settings(plan: Plan) -> dict[str, Any]:
    """The settings of a run that select this plan, by dotted name."""
    settings: dict[str, Any] = {
        "parallel.mesh": plan.axes,
        "parallel.microbatches": plan.microbatches,
        "parallel.remat": plan.remat,
    }
    if plan.axes.fsdp > 1:
        settings["parallel.zero"] = plan.zero
    if plan.offload != "none":
        settings["parallel.offload"] = plan.offload
    if plan.overlap != "none":
        settings["parallel.overlap"] = plan.overlap
    if plan.kept_layers:
        settings["parallel.kept_layers"] = plan.kept_layers
    if plan.scatter != "sum":
        settings["parallel.scatter"] = plan.scatter
    if pipeline := plan.pipeline:
        settings["parallel.schedule"] = pipeline.schedule
        if pipeline.repeats > 1:
            settings["parallel.repeats"] = pipeline.repeats
        residuals = "keep" if pipeline.keep_residuals else "recompute"
        settings["parallel.stage_residuals"] = residuals
        if pipeline.send_slack:
            settings["parallel.send_slack"] = True
    if plan.axes.tensor > 1 and LENGTH in dict(plan.rules):
        settings["parallel.sequence_parallel"] = True
    if whole := whole_over_tensor(plan):
        settings["parallel.rules"] = tuple(f"{name}=none" for name in whole)
    return settings


def flags(plan: Plan) -> str:
    """The flags of `train` that select this plan."""
    return typed(layout_settings(plan))


def whole_over_tensor(plan: Plan) -> Sequence[str]:
    """Names of the halves of a layer (heads, mlp) that the mesh's tensor axis does not split."""
    split = dict(plan.rules)
    return [name for name in ("heads", "mlp") if plan.axes.tensor > 1 and name not in split]


def _by_name(prediction: Prediction) -> dict[str, float]:
    return {term.name: term.time_s for term in prediction.terms}
