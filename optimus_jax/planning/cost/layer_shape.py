"""A layer of one microbatch on one device under a plan: its program and its sizes."""

import math
from functools import lru_cache
from typing import NamedTuple

from optimus_jax.config import AttentionKernel, ModelConfig, Precision
from optimus_jax.config.axes import AxisSizes
from optimus_jax.mesh.axes import HEADS, KV_HEADS, LENGTH, MLP
from optimus_jax.mesh.rules import Rules, active_rules
from optimus_jax.models.layer_program import (
    LayerPrograms,
    LayerSizes,
    layer_programs,
    sizes_on_device,
)
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.rates import ShapePoint
from optimus_jax.planning.cost.workload import Workload


class LayerShape(NamedTuple):
    """A layer of one microbatch on one device: its program and its sizes."""

    programs: LayerPrograms
    sizes: LayerSizes

    @property
    def tokens(self) -> float:
        """Tokens in a microbatch, this device's part."""
        return self.sizes.rows * self.programs.seq_len

    @property
    def splits_length(self) -> bool:
        """Whether devices share the tokens of the residual stream."""
        return self.programs.length_ways > 1

    @property
    def stream_tokens(self) -> float:
        """Tokens of the residual stream: a part of `tokens` if devices share them."""
        return self.tokens / self.programs.length_ways

    @property
    def width(self) -> int:
        """Bytes per element of an activation."""
        return 4 if self.programs.precision == "f32" else 2

    @property
    def stream_bytes(self) -> float:
        """Bytes of the residual stream of a microbatch."""
        return self.stream_tokens * self.sizes.embed * self.width

    def with_rows(self, rows: float) -> "LayerShape":
        """The same layer for so many sequences."""
        return LayerShape(self.programs, self.sizes._replace(rows=rows))


def layer_shape(workload: Workload, plan: Plan) -> LayerShape:
    """One layer for one microbatch on one device under `plan`."""
    rows = rows_of(workload, plan.batch_ways(), plan.microbatches)
    return row_shape(workload, plan).with_rows(rows)


def row_shape(workload: Workload, plan: Plan) -> LayerShape:
    """One layer for one sequence on one device under `plan`."""
    return _of_one_row(
        workload.model, plan.rules, plan.axes, plan.precision, plan.attention, workload.seq_len
    )


def rows_of(workload: Workload, batch_ways: int, microbatches: int) -> float:
    """Sequences of one microbatch on one device."""
    return workload.global_batch / (batch_ways * microbatches)


@lru_cache(maxsize=1 << 12)
def _of_one_row(
    model: ModelConfig,
    rules: Rules,
    axes: AxisSizes,
    precision: Precision,
    kernel: AttentionKernel,
    seq_len: int,
) -> LayerShape:
    active = active_rules(rules, axes, model)
    heads_ways, kv_ways, mlp_ways, length_ways = (
        math.prod([axes[axis] for axis in active.get(logical, ())])
        for logical in (HEADS, KV_HEADS, MLP, LENGTH)
    )
    assert model.num_heads % heads_ways == 0, f"an illegal split of {model.name}: {axes}"
    heads = model.num_heads // heads_ways
    # If key and value heads are not split, each device computes those that its query heads need.
    kv_heads = (
        model.num_kv_heads // kv_ways
        if kv_ways > 1
        else max(1, heads * model.num_kv_heads // model.num_heads)
    )
    programs = layer_programs(
        model,
        seq_len=seq_len,
        precision=precision,
        kernel=kernel,
        shares_kv_heads=heads_ways > kv_ways,
        length_ways=length_ways,
        splits_alike=active.get(HEADS, ()) == active.get(MLP, ()),
    )
    sizes = sizes_on_device(
        model, rows=1, heads=heads, kv_heads=kv_heads, mlp=model.mlp_dim // mlp_ways
    )
    return LayerShape(programs, sizes)


def shape_point(shape: LayerShape, tensor_ways: int) -> ShapePoint:
    """The place of a layer and of the head: logarithms of tokens, width and devices along
    tensor.
    """
    return math.log2(shape.tokens), math.log2(shape.sizes.embed), math.log2(tensor_ways)
