"""Plans and rates that tests of the time model share."""

from dataclasses import replace
from typing import Any

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.mesh.rules import make_rules
from optimus_jax.pipeline.partition import layers_per_stage
from optimus_jax.plan import Pipelining, Plan
from optimus_jax.planning.cost.communication import (
    CommunicationOp,
    head_ops,
    layer_ops,
    step_ops,
    tick_ops,
)
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.planning.cost.layer_shape import LayerShape
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.profiles.cluster import Cluster

LLAMA = model_preset("llama3-8b")
GPT = replace(model_preset("gpt2-xl"), num_heads=16, num_kv_heads=16, head_dim=100)
"""With heads that tensor=8 divides."""
HOST = Cluster.parse("h100:8")
HOSTS = Cluster.parse("h100:8x8")
RATES = Rates.of(HOST.accelerator)


def plan_of(
    mesh: str,
    model: ModelConfig = GPT,
    *,
    repeats: int = 1,
    schedule: str = "1f1b",
    keep: bool = True,
    slack: bool = False,
    stages: tuple[int, ...] | None = None,
    overrides: tuple[str, ...] = (),
    **fields: Any,
) -> Plan:
    """A plan on `mesh`; `fields` are the Plan's own."""
    axes = AxisSizes.parse(mesh)
    pipeline = (
        None
        if axes.pipe == 1
        else Pipelining(
            schedule=schedule,
            layers_per_stage=stages or layers_per_stage(model.num_layers, axes.pipe * repeats),
            repeats=repeats,
            send_slack=slack,
            keep_residuals=keep,
        )
    )
    plan = Plan(
        axes=axes,
        rules=make_rules(model, overrides),
        zero=3 if axes.fsdp > 1 else 0,
        microbatches=1,
        pipeline=pipeline,
        remat="none",
        precision="bf16",
        attention="cudnn",
        loss_chunk_tokens=2048,
    )
    return replace(plan, **fields)


def communication_ops(
    workload: Workload, plan: Plan, layer: LayerShape, implementation: ImplementationProfile
) -> list[CommunicationOp]:
    """All communication of a step."""
    return [
        *layer_ops(workload.model, plan, layer, implementation),
        *head_ops(workload, plan, layer, implementation),
        *tick_ops(plan, layer, implementation),
        *step_ops(workload.model, plan, layer.width, implementation),
    ]
