"""Read the compiler's warnings about involuntary full rematerialization, and name rules to change.

XLA prints such a warning when it replicates an array on every device.

The training step does not cause these warnings, since it places every collective itself
(docs/decisions/0001). Programs that leave shardings to the partitioner may.
"""

import math
import re
from collections.abc import Sequence

from optimus_jax.config import Config, ModelConfig
from optimus_jax.mesh.axes import BATCH, EMBED, HEADS, KV_HEADS, MLP, VOCAB
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compile_report import Rematerialised
from optimus_jax.planning.ahead_of_time.hlo_groups import mesh_sizes, parts_of_axes

_BY_AXES = r"mesh\[[^\]]*\](?:, device_ids=\(.*?\))?, (?:\[.*?\](?:, \w+=\{[^}]*\})*|replicated)"
"""The format of shardings since jax 0.11: the mesh axes that split each dimension."""
_SHARDING = rf"\{{(?:devices=\[[\d,]+\][^}}]*|replicated|maximal[^}}]*|manual|{_BY_AXES})\}}"
_REMATERIALISED = re.compile(
    rf"Involuntary full rematerialization.*?from sharding ({_SHARDING}) to ({_SHARDING}).*?HLO"
    r" operation:? %?\S+ = (\w+\[[\d,]*\])(?:.*?op_name=\"([^\"]*)\")?"
)


def rematerialised(said: str, config: Config, plan: Plan) -> tuple[Rematerialised, ...]:
    """The arrays that the compiler's messages report as replicated, each once."""
    found = {
        Rematerialised(
            array=array,
            source=source or "",
            change=_rules_to_change(array, before, after, config, plan),
        )
        for before, after, array, source in _REMATERIALISED.findall(said)
    }
    return tuple(sorted(found, key=lambda each: (each.source, each.array)))


def _rules_to_change(
    array: str, before: str, after: str, config: Config, plan: Plan
) -> tuple[str, ...]:
    """The logical axes whose size equals that of a dimension that is split differently before and
    after.
    """
    ways, others, dims = (
        _ways(before),
        _ways(after),
        [int(dim) for dim in re.findall(r"\d+", array.partition("[")[2])],
    )
    rank = len(dims)
    ways, others = ([*each, *[1] * rank][:rank] for each in (ways, others))
    split_otherwise = {
        dim * way for dim, way, other in zip(dims, ways, others, strict=True) if way != other
    }
    named = _sizes(config.model, plan, config.data.global_batch)
    return tuple(
        name for name in plan.active_rules(config.model) if split_otherwise & named.get(name, set())
    )


def _sizes(model: ModelConfig, plan: Plan, global_batch: int) -> dict[str, set[int]]:
    """Sizes of the dimensions that belong to each logical axis.

    Includes dimensions that matmuls merge with others.
    """
    return {
        BATCH: {global_batch, global_batch // plan.microbatches},
        EMBED: {model.embed_dim},
        VOCAB: {plan.padded_vocab(model)},
        HEADS: {model.num_heads, model.num_heads * model.head_dim},
        MLP: {model.mlp_dim, 2 * model.mlp_dim},
        KV_HEADS: {model.num_kv_heads, model.num_kv_heads * model.head_dim},
    }


def _ways(sharding: str) -> Sequence[int]:
    """Number of parts of each dimension in a sharding; empty if the array is replicated.

    Such as `{devices=[2,1,4]<=[8]}` or `{mesh['data'=2,'tensor'=4], [{'data'}, {}, {'tensor'}]}`.
    """
    if by_axes := re.match(r"\{mesh\[([^\]]*)\].*?, \[(.*?)\]", sharding):
        sizes = mesh_sizes(by_axes[1])
        return [
            math.prod(size for _, _, size in parts_of_axes(dim, sizes))
            for dim in re.findall(r"\{([^}]*)\}", by_axes[2])
        ]
    found = re.search(r"devices=\[([\d,]+)\]", sharding)
    return [int(ways) for ways in found[1].split(",")] if found else []
