"""The record of one step, and its line of JSON in metrics.jsonl; the record of an evaluation."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optimus_jax.config.settings import with_right_types
from optimus_jax.run_directory.files import json_object


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Measurements of one optimizer step."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over what counts of the global batch, in the unit of the task (`Task.unit`): nats, of
    `mim` mean absolute difference. A float32 widened to Python's float, which JSON keeps
    exactly."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Learning rate of the update."""
    tokens: int
    """What counts in the loss of this step, over all processes: tokens, or masked tokens, labels or
    pairs, as the task has them."""
    step_time_s: float
    """Wall time of the step."""
    tokens_per_s: float
    """Over all devices: tokens that count, or all of the batch if the task counts others."""
    mfu: float | None
    """Model FLOP/s utilization: the model's FLOP/s divided by the devices' peak; None: the peak is
    unknown."""
    plan: str
    """Digest of the step's Plan."""
    peak_bytes: int | None
    """Peak memory in use on one device so far; None: the backend does not report it."""
    skipped: bool = False
    """Loss or gradients were not finite, so there was no update."""
    loss_scale: float | None = None
    """f16 only: factor on the loss."""
    data_wait_s: float | None = None
    """For how long devices may have had nothing to do in the step because its batch, or the next
    one, was not loaded yet; 0 if they still worked when it was. Of several processes the longest;
    None: unknown."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """By name: metrics of the task and auxiliary sums of the layers, divided by the tokens."""


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """Measurements of an evaluation on held-out data."""

    step: int
    """Last step before it."""
    loss: float
    """Mean over what counts of the held-out data, in the same unit as that of a step."""
    perplexity: float | None
    """Exponential of the loss; None: the loss is not that of tokens."""
    bits_per_byte: float | None
    """None: tokens are not bytes, or the task is not `next_token`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """As those of a step; and rates, such as that of word errors."""


NUMBERS = [one.name for one in dataclasses.fields(StepRecord) if one.type in (float, "float")]
"""Fields that are null in a log if they were not finite."""


def values_of(record: StepRecord) -> dict[str, Any]:
    """The fields of a line; `skipped` appears only if true, `loss_scale` only with f16, `metrics`
    and `data_wait_s` only if there are some."""
    values = dataclasses.asdict(record)
    if math.isfinite(record.loss) and math.isfinite(record.grad_norm):
        if not record.skipped:
            del values["skipped"]
    else:
        values["skipped"] = True
    if record.loss_scale is None:
        del values["loss_scale"]
    if not record.metrics:
        del values["metrics"]
    if record.data_wait_s is None:
        del values["data_wait_s"]
    return values


def record_of(line: bytes) -> StepRecord | None:
    """The inverse of `values_of`, with NaN for null; None: the line is not a step's record."""
    values = json_object(line)
    if values is None:
        return None
    for name in NUMBERS:
        if name in values and values[name] is None:
            values[name] = math.nan
    if isinstance(metrics := values.get("metrics"), dict):
        values["metrics"] = {
            name: math.nan if value is None else value for name, value in metrics.items()
        }
    # Ignore fields that another version has added.
    known = {
        one.name: values[one.name] for one in dataclasses.fields(StepRecord) if one.name in values
    }
    try:
        return with_right_types(StepRecord(**known))
    except TypeError:
        return None
