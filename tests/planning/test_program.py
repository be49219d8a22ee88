"""What the planner reads from parts of a step adds up to what the whole step's traced program
holds.
"""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from plans import FAMILY_MODELS
from pricing import communication_ops

from optimus_jax.config import Config, ModelConfig, Tuning
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.mesh.build import discover
from optimus_jax.models.families import features_of, has_window
from optimus_jax.models.program_reader import ProgramReader, collectives_of, needed
from optimus_jax.planning.cost.communication import LAYER_SUMS, OUTER, STEP
from optimus_jax.planning.cost.head_program import head_program, head_sizes
from optimus_jax.planning.cost.implementation_profile import OURS
from optimus_jax.planning.cost.layer_shape import layer_shape
from optimus_jax.planning.cost.pipeline_time import count_ticks
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.training.step import build_program

SCALARS = 4
"""Bytes of the largest message that is not counted: sums of the loss, tokens and the norm."""
PLANS = {
    "data=2,fsdp=2,tensor=2": {},
    "fsdp=4,tensor=2": {"remat": "full", "microbatches": 2, "precision": "bf16"},
    "data=4,tensor=2": {"remat": "dots", "zero": 0, "rules": ("mlp=none",)},
    "data=2,fsdp=4": {"zero": 2, "microbatches": 2, "precision": "f16"},
    "pipe=2,fsdp=2,tensor=2": {"remat": "selective", "microbatches": 4, "zero": 1},
    "pipe=2,tensor=4": {"remat": "full", "microbatches": 2, "keep_residuals": False},
    "data=2,tensor=4": {"sequence_parallel": True, "microbatches": 2},
    "pipe=2,data=2,tensor=2": {"sequence_parallel": True, "microbatches": 2, "remat": "full"},
    "fsdp=8": {"overlap": "layers", "remat": "full"},
    "fsdp=4,tensor=2,data=1": {"zero": 3, "scatter": "exchange", "precision": "bf16"},
    "data=4,fsdp=2,pipe=1": {"overlap": "layers", "scatter": "exchange", "microbatches": 2},
    "pipe=2,fsdp=4,data=1": {"scatter": "exchange", "zero": 2, "microbatches": 2},
    "data=4,fsdp=2": {"overlap": "layers", "zero": 2},
    "data=2,fsdp=4,tensor=1": {"overlap": "layers", "zero": 3, "microbatches": 2},
    "fsdp=2,tensor=4": {"overlap": "halves", "remat": "selective"},
    "pipe=2,fsdp=4": {"overlap": "layers", "zero": 3, "microbatches": 2},
}
LAYER_TYPES = {
    "gemma2, windows": ("window", "full"),
    "gemma3_text, windows": ("window", "window", "window", "full"),
    "gpt_neo, windows": ("full", "full", "full", "window"),
    "mistral, windows": ("window",),
}
"""Types of layers of families whose examples are so long that windows save work."""
TUNINGS = {
    "llama-nano, lora": Tuning(method="lora", rank=4, base_precision="bf16"),
    "llama-nano, nf4": Tuning(method="lora", rank=4, base_precision="nf4"),
    "gptj, lora": Tuning(method="lora", targets=("query", "value", "down"), freeze=("attention",)),
    "gpt2-nano, ia3": Tuning(method="ia3"),
    "gpt2-nano, frozen": Tuning(freeze=("embedding", "mlp")),
    "llama-nano, lowest layers": Tuning(freeze=("embedding",), freeze_layers=3),
}
"""Models of which only a part is trained."""
MODELS = ("gpt2-nano", "llama-nano", *FAMILY_MODELS, *LAYER_TYPES, *TUNINGS)


def model_called(name: str) -> tuple[ModelConfig, int]:
    """A preset or a small model of a family, with four layers, and the tokens of its examples."""
    family, windows = name.partition(", ")[0], name in LAYER_TYPES
    model = FAMILY_MODELS[family] if family in FAMILY_MODELS else model_preset(family)
    model = replace(model, tuning=TUNINGS.get(name, model.tuning))
    length = 256 if windows else 64
    if windows:
        features = replace(model.features, window=20, layer_types=LAYER_TYPES[name])
        model = replace(model, features=features)
    return replace(model, num_layers=4, max_length=length, dropout=0.0), length


def traced_and_folded(name: str, mesh: str):
    """The traced step of a small model under a plan, its plan, and the parts that are added up."""
    model, length = model_called(name)
    settings = dict(PLANS[mesh])
    keeps = settings.pop("keep_residuals", True)
    values = {f"parallel.{key}": value for key, value in settings.items()}
    precision = values.pop("parallel.precision", "f32")
    config = Config(model=model).with_values(
        {**values, "precision.compute": precision, "data.global_batch": 16, "data.seq_len": length}
    )
    plan = plan_for(config, AxisSizes.parse(mesh), discover())
    if plan.pipeline is not None:
        plan = replace(plan, pipeline=replace(plan.pipeline, keep_residuals=keeps))
    program = build_program(config, plan)
    traced = program.train_step.trace(program.abstract_state(), program.abstract_batch())
    return config, plan, needed(traced.jaxpr.jaxpr)


DAILY = ("fsdp=4,tensor=2", "pipe=2,data=2,tensor=2")
"""Plans of which `make test` traces one for each family, in turn."""
BOTH = "llama-nano, lowest layers"
"""The model that `make test` traces under both: backward ends above frozen layers in one alone."""


def is_daily(name: str, mesh: str) -> bool:
    """Whether `make test` traces a model under a plan; `make nightly` traces the others. Every plan
    has one of the two presets.
    """
    number = MODELS.index(name)
    if number < 2:
        return list(PLANS).index(mesh) % 2 == number
    return mesh == DAILY[number % 2] or (name == BOTH and mesh in DAILY)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if is_daily(name, mesh) else pytest.mark.nightly)
        for name in MODELS
        for mesh in PLANS
    ],
)
def test_collectives_of_the_parts_are_those_of_the_step(name, mesh):
    config, plan, jaxpr = traced_and_folded(name, mesh)
    traced = Counter()
    for (kind, axes), messages in collectives_of(jaxpr).items():
        traced[kind, axes] += sum(size * n for size, n in messages if size > SCALARS)
    workload = Workload.of(config)
    layer = layer_shape(workload, plan)
    layers = config.model.num_layers // plan.axes.pipe
    microbatches = plan.microbatches
    trains_embed = config.model.tuning.trains("embedding")
    # Backward ends above frozen layers, but in stages it goes through all.
    backward_layers = layers - (0 if plan.pipeline else config.model.tuning.freeze_layers)
    times = {
        "layer forward": microbatches * layers,
        "layer backward": microbatches * backward_layers,
        "embed": microbatches,
        "head": microbatches,
        **dict.fromkeys((OUTER, LAYER_SUMS, STEP), 1),
    }
    gathered = {"tick": 2 * microbatches, "broadcast": microbatches * (1 + trains_embed)}
    if plan.pipeline is not None:
        ticks = count_ticks(plan.pipeline, plan.axes.pipe, plan.microbatches)
        times["embed"] = ticks.embed
        times["broadcast"] = ticks.head + ticks.embed_backward * trains_embed
        features = features_of(config.model)
        if features.table_dim or features.embedding_norm:
            # The gradient of their norm or projection needs the embeddings again.
            times["embed"] += microbatches
    folded: dict[tuple, float] = defaultdict(float)
    for op in communication_ops(workload, plan, layer, OURS):
        if op.kind != "send":
            # Parts are sent and summed in every tick, and gathered where they are used.
            of_part = gathered if op.kind == "all-gather" and op.part in gathered else times
            folded[op.kind, op.axes] += of_part[op.part] * op.count * op.num_bytes
    assert {key: value for key, value in traced.items() if value} == pytest.approx(folded)
    if plan.pipeline is None:
        # Heads and embeddings of stages that wait are in the program, but seldom run.
        program = layer.programs.under(plan.remat)
        head = head_program(workload, plan.precision, splits_length=layer.splits_length)
        sizes = head_sizes(config.model, plan, layer, OURS)
        once = layers * sum(each.flops(layer.sizes) for each in program.forward.products)
        once += backward_layers * sum(each.flops(layer.sizes) for each in program.backward.products)
        outside = (*head.embed.products, *head.rest.products)
        once += sum(product.flops(sizes) for product in outside)
        # Only layers that differ in their window have conditions.
        windowed = has_window(config.model)
        whole = ProgramReader(share=sum(windowed) / len(windowed)).part(jaxpr)
        computed = sum(product.flops(()) for product in whole.products)
        assert microbatches * once == pytest.approx(computed)
