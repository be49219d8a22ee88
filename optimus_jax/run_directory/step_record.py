"""What is known of a step, and how it is written as a line of JSON."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from optimus_jax.config.settings import with_right_types
from optimus_jax.run_directory.files import json_object


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What is known of one optimizer step."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the tokens of the global batch: a float32 widened to Python's float, which JSON
    keeps exactly."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Learning rate of the update."""
    tokens: int
    """Tokens of this step that count in the loss, over all processes."""
    step_time_s: float
    """Wall time."""
    tokens_per_s: float
    """Over all devices."""
    mfu: float | None
    """Share of the devices' peak FLOP/s that the model's own arithmetic used; None: the peak is
    unknown."""
    plan: str
    """Digest of the Plan that ran it."""
    peak_bytes: int | None
    """Most memory in use on one device so far; None: the backend does not say."""
    skipped: bool = False
    """Loss or gradients were not finite, so there was no update."""
    loss_scale: float | None = None
    """f16 only: factor on the loss."""


NUMBERS = [field.name for field in dataclasses.fields(StepRecord) if field.type in (float, "float")]
"""Fields that are null in a log where they were not finite."""


def values_of(record: StepRecord) -> dict[str, Any]:
    """The fields of a line; `skipped` and `loss_scale` appear only where they say something."""
    values = dataclasses.asdict(record)
    if math.isfinite(record.loss) and math.isfinite(record.grad_norm):
        if not record.skipped:
            del values["skipped"]
    else:
        values["skipped"] = True
    if record.loss_scale is None:
        del values["loss_scale"]
    return values


def record_of(line: bytes) -> StepRecord | None:
    """The inverse of `values_of`, as far as null allows; None for what is not a step's record."""
    values = json_object(line)
    if values is None:
        return None
    for name in NUMBERS:
        if name in values and values[name] is None:
            values[name] = math.nan
    # Another version's further fields are none of ours.
    known = {
        field.name: values[field.name]
        for field in dataclasses.fields(StepRecord)
        if field.name in values
    }
    try:
        return with_right_types(StepRecord(**known))
    except TypeError:
        return None
