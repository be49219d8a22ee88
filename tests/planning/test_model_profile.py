"""Closed forms against three other counts: published formulas, what autodiff saves, and matmuls in
the compiled step.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from plans import FAMILY_MODELS

from optimus_jax.config import (
    AttentionKernel,
    Config,
    ModelConfig,
    Precision,
    RematPolicy,
    Tuning,
)
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import PRESETS, model_preset
from optimus_jax.mesh.build import discover
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.formats import COMPUTE_DTYPES
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.families import has_window
from optimus_jax.models.flops import step_flops
from optimus_jax.models.kernels import Visibility
from optimus_jax.models.layer_program import layer_programs, scores, sizes_on_device, whole_sizes
from optimus_jax.models.shapes import model_shapes
from optimus_jax.planning.ahead_of_time.hlo import dot_flops
from optimus_jax.planning.profiles.model_profile import (
    REMAT_POLICIES,
    LayerKind,
    profile_model,
)
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.training.step import build_program

NANOS = ("gpt2-nano", "llama-nano")
TUNED = {
    "llama-nano, lora": Tuning(method="lora", rank=4),
    "llama-nano, frozen": Tuning(freeze=("embedding", "mlp", "head")),
}
"""Models of which some matrices are frozen."""
CLOSED_FORM = 0.01
"""Relative tolerance. Measured: 0.11% at most, since the program pads the vocabulary of 257 to 264
rows."""


def model_called(name: str) -> ModelConfig:
    """A preset, also with frozen matrices, or a small model of a family."""
    if name in TUNED:
        return replace(model_preset(name.partition(",")[0]), tuning=TUNED[name])
    return FAMILY_MODELS[name] if name in FAMILY_MODELS else model_preset(name)


def published_params(model: ModelConfig) -> float:
    """GPT: Narayanan et al. 2021, equation 2, to which the last norm is added.

    Llama: by its matrices.
    """
    h, layers, vocab = model.embed_dim, model.num_layers, model.vocab_size
    if model.family == "gpt2":
        return (
            12
            * layers
            * h**2
            * (1 + 13 / (12 * h) + (vocab + model.max_length) / (12 * layers * h))
            + 2 * h
        )
    attention = h * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    return (
        vocab * h * (1 if model.tied else 2)
        + layers * (attention + 3 * h * model.mlp_dim + 2 * h)
        + h
    )


@pytest.mark.parametrize(
    "name", [name for name in PRESETS if model_preset(name).family in ("gpt2", "llama")]
)
def test_num_params_equals_the_published_formula(name):
    model = model_preset(name)
    profile = profile_model(model, seq_len=128, precision="bf16", kernel="cudnn")
    assert profile.num_params == pytest.approx(published_params(model), rel=1e-12), (
        "rounding of the formula's quotients alone"
    )
    assert profile[LayerKind.HEAD].num_params == (
        0 if model.tied else model.vocab_size * model.embed_dim
    )
    assert profile[LayerKind.NORMS].num_params == (2 * model.num_layers + 1) * model.embed_dim * (
        2 if model.family == "gpt2" else 1
    )


BILLIONS = {
    "gpt-neo-1.3b": 1.32,
    "gpt-neo-2.7b": 2.65,
    "gpt-j-6b": 6.05,
    "opt-125m": 0.125,
    "opt-350m": 0.331,
    "opt-6.7b": 6.66,
    "opt-66b": 65.7,
    "mistral-7b": 7.25,
    "phi3-mini": 3.82,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-7b": 7.62,
    "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.596,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.8,
    "gemma2-2b": 2.61,
    "gemma2-27b": 27.2,
    "gemma3-270m": 0.268,
    "gemma3-1b": 1.0,
    "gemma3-27b": 27.0,
    "olmo2-1b": 1.48,
    "olmo2-32b": 32.2,
    "whisper-tiny": 0.0372,
    "whisper-small": 0.2405,
    "whisper-large-v3": 1.541,
}
"""Parameters of text models, as their pages on huggingface.co count them."""


@pytest.mark.parametrize("name", BILLIONS)
def test_num_params_equals_that_of_the_model_card(name):
    model = model_preset(name)
    assert model_shapes(model, model.vocab_size).num_params == pytest.approx(
        BILLIONS[name] * 1e9, rel=5e-3
    )


@pytest.mark.parametrize(
    "name", ["bert-nano", "electra-base-generator", "electra-nano", "vit-nano", "whisper-nano"]
)
def test_every_parameter_of_an_encoder_has_a_kind(name):
    model = model_preset(name)
    length = model.frames + 16
    profile = profile_model(model, seq_len=length, precision="f32", kernel="xla")
    assert profile.num_params == model_shapes(model, model.vocab_size).num_params


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl"])
def test_model_flops_are_the_published_ones_with_half_the_attention(name):
    """72 B s l h^2 (1 + s/6h + V/12lh), Narayanan et al. 2021: its middle term has no mask."""
    model, s = model_preset(name), 1024
    h, layers = model.embed_dim, model.num_layers
    profile = profile_model(model, seq_len=s, precision="bf16", kernel="xla")
    published = 72 * layers * h**2 * (1 + s / (6 * h) + model.vocab_size / (12 * layers * h))
    assert profile.model_flops + profile[LayerKind.ATTENTION_CORE].model_flops == pytest.approx(
        published
    )
    assert profile.model_flops == pytest.approx(
        step_flops(model, num_sequences=3, seq_len=s) / (3 * s)
    )
    matrices = 12 * layers * h**2 + model.vocab_size * h
    core = profile[LayerKind.ATTENTION_CORE].model_flops
    assert profile.model_flops - core == pytest.approx(6 * matrices, rel=1e-12)


@pytest.mark.parametrize(
    ("seq_len", "pairs"),
    [
        (256, 256 * 64 + 192 * 64 + 128 * 64 + 64 * 64),  # blocks, with all keys up to their last
        (100, 100**2),  # too short for blocks
    ],
)
def test_blockwise_attention_computes_more_than_the_causal_pairs(seq_len, pairs):
    model = model_preset("llama-nano")
    programs = layer_programs(model, seq_len=seq_len, precision="f32", kernel="xla")
    computed = scores(programs.under("none").forward, whole_sizes(model))
    assert computed == model.num_heads * pairs


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        (name, remat)
        for name in NANOS
        for remat in REMAT_POLICIES
        if name == "gpt2-nano" or remat == "full"
    ]
    + [("llama-nano, lora", "none"), ("llama-nano, frozen", "full")]
    + [("vit-nano", "full"), ("whisper-nano", "full"), ("electra-nano", "full")]
    + [
        pytest.param(
            family,
            remat,
            marks=pytest.mark.nightly if (number + (remat == "full")) % 2 else (),
        )
        for number, family in enumerate(FAMILY_MODELS)
        for remat in ("none", "full")
    ],
)
def test_computed_flops_equal_those_of_the_compiled_step(name, remat):
    """Loss, gradient and update, as a run compiles them for one device."""
    model = model_called(name)
    if model.reads == "text":
        model = replace(model, num_layers=2, max_length=256)
    config = Config(model=model).with_values({"parallel.remat": remat, "data.global_batch": 4})
    plan = plan_for(config, AxisSizes(), replace(discover(), num_devices=1))
    program = build_program(config, plan, jax.devices()[:1])
    batch, length = config.data.global_batch, config.seq_len
    arguments = program.abstract_state(), program.abstract_batch()
    compiled = program.train_step.lower(*arguments).compile({"xla_backend_optimization_level": 0})
    profile = profile_model(config.model, seq_len=length, precision="f32", kernel="xla")
    computed_flops = sum(
        (kind.forward_flops + kind.backward_flops + kind.recomputed_flops[remat])
        # One of two layers takes each side of a condition, and the compiled program has both.
        * (2 if kind.kind is LayerKind.ATTENTION_CORE and sum(has_window(model)) == 1 else 1)
        for kind in profile.kinds
    )
    assert batch * length * computed_flops == pytest.approx(
        dot_flops(compiled.as_text()), rel=CLOSED_FORM
    )


def saved_by_autodiff(
    model: ModelConfig,
    remat: RematPolicy,
    precision: Precision,
    kernel: AttentionKernel,
    documents: bool,
) -> tuple[float, float]:
    """Bytes per token that the vjp of a stack of one layer closes over: of the layer, and of what
    all layers share.
    """
    batch, length, dtype = 7, 256, jnp.dtype(COMPUTE_DTYPES[precision])
    shapes = model_shapes(model, model.vocab_size, slots=(0,))

    def vjp(params, x, positions, segments):
        run = ForwardContext(
            comm=Collectives(dtype, {}, 0),
            remat=remat,
            kernel=kernel,
            visibility=Visibility(segments if documents else None),
        )
        return jax.vjp(
            lambda params, x: shapes.merged(params).run_some_layers(
                x, positions, run, jnp.zeros(1, jnp.int32), all_full=True
            ),
            params,
            x,
        )[1]

    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    leaves = jax.tree.leaves(
        jax.eval_shape(
            vjp,
            shapes.params,
            jax.ShapeDtypeStruct((batch, length, model.embed_dim), dtype),
            ids,
            ids,
        )
    )
    weights = {leaf.shape for leaf in jax.tree.leaves(shapes.params)}
    layer, shared = 0, 0
    for leaf in leaves:
        if leaf.size % batch:  # weights, and whether a layer has a window
            continue
        num_bytes = leaf.size * leaf.dtype.itemsize / (batch * length)
        if leaf.shape[0] == 1:
            layer += num_bytes if leaf.shape not in weights else 0
        else:
            shared += num_bytes
    return layer, shared


def is_daily(name: str, remat: RematPolicy, documents: bool) -> bool:
    """Whether `make test` traces a layer; `make nightly` traces the others. Families have two
    policies, one of them with documents.
    """
    if name in NANOS:
        return True
    number = list(FAMILY_MODELS).index(name) + (remat == "full")
    return remat in ("none", "full") and documents == bool(number % 2)


@pytest.mark.parametrize(
    ("name", "precision", "kernel", "remat", "documents"),
    [
        pytest.param(
            *layer,
            remat,
            documents,
            marks=() if is_daily(layer[0], remat, documents) else pytest.mark.nightly,
        )
        for layer in (
            ("gpt2-nano", "f32", "xla"),
            ("gpt2-nano", "bf16", "xla"),
            ("llama-nano", "f32", "xla"),
            ("llama-nano", "bf16", "cudnn"),
            ("gpt2-nano", "bf16", "cudnn"),
            *((family, "f32", "xla") for family in FAMILY_MODELS),
            ("gptj", "bf16", "cudnn"),
            ("qwen3", "bf16", "cudnn"),
            ("olmo2", "bf16", "cudnn"),
        )
        for remat in REMAT_POLICIES
        for documents in (False, True)
    ],
)
def test_activation_bytes_equal_what_autodiff_saves(
    name, precision, kernel, remat, documents, monkeypatch
):
    # No cuDNN is needed to trace, only to compile; JAX asks for its version anyway.
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000
    )
    model = model_called(name)
    layer, shared = saved_by_autodiff(model, remat, precision, kernel, documents)
    program = layer_programs(
        model, seq_len=256, precision=precision, kernel=kernel, respect_documents=documents
    ).under(remat)
    sizes = whole_sizes(model)
    assert program.saved_bytes(sizes) == 256 * layer
    assert program.saved_once_bytes(model, sizes) == 256 * shared


@pytest.mark.parametrize("shares", [False, True])
def test_one_trace_serves_any_number_of_devices_that_share_tokens(shares):
    """What is saved of the stream is in inverse proportion to the devices, and nothing else depends
    on them. Two and three devices (for each key/value head) are traced, and others derived.
    """
    model = model_preset("llama3-8b")
    sizes, unit = whole_sizes(model), model.num_kv_heads if shares else 1
    two, three, four, six = (
        layer_programs(
            model,
            seq_len=4608,
            precision="bf16",
            kernel="cudnn",
            shares_kv_heads=shares,
            length_ways=unit * number,
        )
        for number in (2, 3, 4, 6)
    )
    assert (two.traced, three.traced, four.traced, six.traced) == (None, None, two, two)
    for remat in ("none", "full"):
        own, derived = three.under(remat), four.under(remat)
        assert (derived.forward, derived.backward) == (own.forward, own.backward)
        of_two, of_three, of_four, of_six = (
            programs.under(remat).saved_bytes(sizes) for programs in (two, three, four, six)
        )
        of_stream = 6 * (of_two - of_three)
        assert of_stream > 0
        assert of_four == of_two - of_stream / 4
        assert of_six == of_two - of_stream / 3


@pytest.mark.parametrize("seq_len", [1009, 1010, 515 * 107, 101 * 103 * 107])
def test_saved_bytes_do_not_depend_on_the_factors_of_the_length(seq_len):
    """Primes stand for sizes, and a length may be divisible by the same ones."""
    model = model_preset("llama-nano")
    of_length, of_1024 = (
        layer_programs(model, seq_len=length, precision="bf16", kernel="cudnn")
        .under("none")
        .saved_bytes(whole_sizes(model))
        / length
        for length in (seq_len, 1024)
    )
    assert of_length == of_1024


def test_tensor_devices_save_their_share_of_activations():
    model = model_preset("llama-nano")
    one, four = (
        layer_programs(
            model, seq_len=256, precision="bf16", kernel="xla", shares_kv_heads=ways == 4
        )
        .under("selective")
        .saved_bytes(
            sizes_on_device(
                model,
                rows=1,
                heads=model.num_heads // ways,
                kv_heads=max(1, model.num_kv_heads // ways),
                mlp=model.mlp_dim // ways,
            )
        )
        / 256
        for ways in (1, 4)
    )
    heads, stream = model.num_heads * model.head_dim, 2 * model.embed_dim
    kv_heads = model.num_kv_heads * model.head_dim
    assert one == 2 * (2 * heads + 2 * kv_heads + 2 * model.mlp_dim) + 2 * stream
    assert four == 2 * (2 * heads / 4 + 2 * model.head_dim + 2 * model.mlp_dim / 4) + 2 * stream, (
        "a key/value head each, of which there are two for four; the stream is whole on each"
    )


ALL_BUT_GENERATOR = [kind for kind in LayerKind if kind is not LayerKind.GENERATOR]


def test_a_profile_is_readable_and_survives_json():
    profile = profile_model(model_preset("llama-nano"), seq_len=256, precision="f32", kernel="xla")
    lines = profile.describe().splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == [*ALL_BUT_GENERATOR, "all"]
    assert "not measured" in lines[0]
    value = json.loads(profile.to_json())
    assert [kind["kind"] for kind in value["kinds"]] == ALL_BUT_GENERATOR
    assert sum(kind["activation_bytes"]["full"] for kind in value["kinds"]) + value[
        "saved_once_bytes"
    ]["full"] == profile.activation_bytes("full")
