"""Our arithmetic equals that of Hugging Face's GPT-2 and Llama, on one device and on a mesh.

Their models are made in memory from a config, with random weights; nothing is downloaded.
Our gradients are those of the real training step.
"""

import dataclasses
import os
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from optimus_jax.config import (
    Config,
    DataConfig,
    Features,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.errors import CheckpointError, ConfigError
from optimus_jax.mesh.axes import BATCH, VOCAB
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.sharding import put_batch
from optimus_jax.mesh.topology import Topology
from optimus_jax.models import blockwise_attention
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.families import FAMILIES, features_of, has_window
from optimus_jax.models.huggingface import (
    config_from_huggingface,
    from_huggingface,
    to_huggingface,
)
from optimus_jax.models.huggingface_formats import HEAD, HUGGING_FACE_FORMATS
from optimus_jax.models.shapes import ModelShapes, Params, model_shapes
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.training.state import TrainState
from optimus_jax.training.step import Program, build_program
from optimus_jax.training.task import embedded
from optimus_jax.training.tasks import TASKS

GLOBAL_BATCH, SEQ_LEN = 4, 24
LOGITS_ATOL = 2e-5
"""Absolute. Logits are up to 6 large, and each rounding on the way to them is 6e-8 of what it
rounds."""
GRADIENT_RTOL = 1e-4
"""Of the largest entry of a leaf. The key biases' gradient, zero but for rounding, is in one leaf
with the value biases'."""

GPT2 = {
    "model_type": "gpt2",
    "n_positions": 32,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
LLAMA = {"model_type": "llama", "max_position_embeddings": 64, "num_hidden_layers": 2}
ROPE_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""With heads 16 wide, some frequencies are left alone, some blended and some stretched."""

CASES = {
    "gpt2": GPT2 | {"vocab_size": 128, "n_layer": 2, "n_embd": 32, "n_head": 4},
    "gpt2, own mlp_dim, odd vocabulary": GPT2
    | {"vocab_size": 101, "n_layer": 3, "n_embd": 48, "n_head": 6, "n_inner": 80},
    "gpt2, untied, one layer": GPT2
    | {"vocab_size": 97, "n_layer": 1, "n_embd": 64, "n_head": 2, "tie_word_embeddings": False},
    "llama, a kv head per head": LLAMA
    | {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "llama, 4 heads per kv head, tied": LLAMA
    | {
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "llama, one kv head, own head_dim, llama3 rope": LLAMA
    | {
        "vocab_size": 99,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rope_scaling": ROPE_SCALING,
    },
}
SMALL = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
LLAMA_LIKE = SMALL | {"intermediate_size": 64, "max_position_embeddings": 64}
CASES |= {
    "llama, biases": LLAMA
    | LLAMA_LIKE
    | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    "gpt_neo": {
        "model_type": "gpt_neo",
        "vocab_size": 101,
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 5,
        "max_position_embeddings": 32,
    },
    "gptj": {
        "model_type": "gptj",
        "vocab_size": 101,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "rotary_dim": 8,
        "tie_word_embeddings": False,
    },
    "opt": SMALL
    | {
        "model_type": "opt",
        "ffn_dim": 64,
        "max_position_embeddings": 32,
        "word_embed_proj_dim": 48,
    },
    "opt, post-norm, narrow table": SMALL
    | {
        "model_type": "opt",
        "ffn_dim": 64,
        "max_position_embeddings": 32,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
    },
    "mistral, window": LLAMA_LIKE
    | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 7, "head_dim": 16},
    "phi3": LLAMA_LIKE | {"model_type": "phi3", "num_key_value_heads": 2},
    "qwen2, window": LLAMA_LIKE
    | {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 2,
    },
    "qwen3": LLAMA_LIKE
    | {
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "olmo2": LLAMA_LIKE | {"model_type": "olmo2", "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    "gemma2": LLAMA_LIKE
    | {
        "model_type": "gemma2",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 7,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": LLAMA_LIKE
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 7,
    },
}
CASES |= {
    "bert": SMALL | {"model_type": "bert", "intermediate_size": 64, "max_position_embeddings": 32}
}
CASES |= {"megatron-bert": CASES["bert"] | {"model_type": "megatron-bert"}}
CASES |= {"electra": CASES["bert"] | {"model_type": "electra", "embedding_size": 32}}
ENCODERS = ("bert", "megatron-bert", "electra")
FIRST_OF_FAMILY = tuple(CASES)
"""Cases whose exported weights are compared; the others differ from them in sizes and ratios."""
CASES |= {
    "gpt_neo, window of two, one layer type": CASES["gpt_neo"]
    | {"attention_types": [[["local"], 4]], "window_size": 2, "vocab_size": 128},
    "gpt_neo, own mlp": CASES["gpt_neo"]
    | {"intermediate_size": 80, "num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gptj, all of a head turned": CASES["gptj"] | {"rotary_dim": 12, "vocab_size": 128},
    "gptj, one pair turned, own mlp": CASES["gptj"] | {"rotary_dim": 2, "n_inner": 64},
    "opt, two heads": CASES["opt"] | {"num_attention_heads": 2, "vocab_size": 128, "ffn_dim": 96},
    "mistral, no window, no groups": CASES["mistral, window"]
    | {"sliding_window": None, "num_key_value_heads": 4, "head_dim": 12},
    "mistral, one kv head, tied": CASES["mistral, window"]
    | {"num_key_value_heads": 1, "tie_word_embeddings": True, "sliding_window": 3},
    "phi3, no groups": CASES["phi3"] | {"num_key_value_heads": 4, "vocab_size": 128},
    "phi3, one kv head": CASES["phi3"] | {"num_key_value_heads": 1, "intermediate_size": 96},
    "qwen2, no window, tied": CASES["qwen2, window"]
    | {"use_sliding_window": False, "tie_word_embeddings": True, "vocab_size": 128},
    "qwen2, one kv head": CASES["qwen2, window"]
    | {"num_key_value_heads": 1, "max_window_layers": 0, "sliding_window": 2},
    "qwen3, untied, no groups": CASES["qwen3"]
    | {"num_key_value_heads": 4, "tie_word_embeddings": False, "head_dim": 8},
    "qwen3, one kv head": CASES["qwen3"] | {"num_key_value_heads": 1, "vocab_size": 128},
    "olmo2, no groups": CASES["olmo2"] | {"num_key_value_heads": 4, "vocab_size": 128},
    "olmo2, one kv head, tied": CASES["olmo2"]
    | {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "gemma2, no caps, no groups": CASES["gemma2"]
    | {
        "num_key_value_heads": 4,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 8,
    },
    "gemma2, one kv head": CASES["gemma2"] | {"num_key_value_heads": 1, "vocab_size": 128},
    "gemma3, global layers stretched": CASES["gemma3"]
    | {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
        }
    },
    "llama, linear rope": LLAMA
    | LLAMA_LIKE
    | {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "bert, own activation, three token types": CASES["bert"]
    | {"hidden_act": "gelu_new", "type_vocab_size": 3, "vocab_size": 128},
    "bert, two heads, wide mlp": CASES["bert"]
    | {"num_attention_heads": 2, "intermediate_size": 100, "layer_norm_eps": 1e-5},
    "electra, as wide as its table": CASES["electra"] | {"embedding_size": 48, "vocab_size": 128},
    "electra, wide table, three token types": CASES["electra"]
    | {"embedding_size": 64, "type_vocab_size": 3, "num_attention_heads": 2},
    "gemma3, no groups": CASES["gemma3"] | {"num_key_value_heads": 4, "head_dim": 8},
    "gemma3, one kv head": CASES["gemma3"]
    | {"num_key_value_heads": 1, "sliding_window": 2, "vocab_size": 128},
}
WITH_LOGITS = tuple({each["model_type"]: case for case, each in reversed(CASES.items())}.values())
"""The first case of each family, whose logits are compared too; a loss and gradients that are equal
imply those of the others."""
OTHER_SIZES = (
    "phi3, no groups",
    "phi3, one kv head",
    "qwen3, one kv head",
    "olmo2, no groups",
    "gemma2, one kv head",
    "gemma3, no groups",
    "gemma3, one kv head",
)
"""Cases that differ from the first of their family in heads per key/value head and in sizes alone;
`make test` compares neither on one device nor on a mesh."""
ONE_DEVICE, SHARDED = AxisSizes(), AxisSizes(data=2, fsdp=2, tensor=2)
ON_A_MESH = (
    "gpt2, own mlp_dim, odd vocabulary",
    "llama, one kv head, own head_dim, llama3 rope",
    "llama, biases",
    "gptj",
    "opt, post-norm, narrow table",
    "qwen3",
    "olmo2",
    "gemma3",
    "electra",
)
"""Cases that `make test` compares on a mesh: one for each kind of attention, norm, feed-forward and
embedding. Mistral, Gemma 2 and GPT-Neo are split below, with windows that save work."""
STAGES = AxisSizes(pipe=2, fsdp=2, tensor=2)
IN_STAGES = ("gptj", "opt, post-norm, narrow table", "gemma3")
"""Cases that `make test` compares with stages too: the blocks and heads that differ most."""
SHARED_KV_HEADS = ("llama, 4 heads per kv head, tied", AxisSizes(fsdp=2, tensor=4))
"""Two devices share a key/value head, of which there is more than one."""

RELEASED_GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
RELEASED_LLAMA = {
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
"""config.json of openai-community/gpt2 and meta-llama/Llama-3.2-1B, as far as it is about the
model."""

# 0.11 has no such option
QUICK = {"xla_backend_optimization_level": 0} | (
    {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
)
"""Compiles in a tenth of the time; a step of these models takes milliseconds either way."""


@pytest.fixture(autouse=True)
def unmasked(monkeypatch: pytest.MonkeyPatch):
    """Encoders see the tokens of the batch, and restore those that count."""
    monkeypatch.setitem(TASKS, "mlm", dataclasses.replace(TASKS["mlm"], corrupt=None))


@cache
def reference(case: str) -> SimpleNamespace:
    """The case's model in PyTorch: weights, and of `batch()` the logits, the loss and its
    gradients.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch, transformers = (
        pytest.importorskip(
            name, reason=f"the reference needs {name}: pip install optimus-jax[huggingface]"
        )
        for name in ("torch", "transformers")
    )
    torch.manual_seed(0)
    values = {key: value for key, value in CASES[case].items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(
        CASES[case]["model_type"],
        bos_token_id=0,
        eos_token_id=0,
        **({"pad_token_id": None} | values),  # a padding token's row would have no gradient
    )
    is_encoder = config.model_type in ENCODERS
    auto = transformers.AutoModelForMaskedLM if is_encoder else transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    # so large that scores reach 1 and no bias is 0, so that any mistake shows
    for weight in model.parameters():
        weight.data = 0.2 * torch.randn_like(weight) + (weight.data if weight.ndim == 1 else 0)
    rows = batch(config.vocab_size)
    logits = model(torch.tensor(rows["tokens"], dtype=torch.long)).logits
    targets = torch.tensor(np.where(rows["loss_mask"], rows["targets"], -100), dtype=torch.long)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return SimpleNamespace(
        config=config.to_dict(),
        state_dict={name: tensor.numpy() for name, tensor in model.state_dict().items()},
        logits=logits.detach().numpy(),
        loss=loss.item(),
        gradients={name: weight.grad.numpy() for name, weight in model.named_parameters()},
    )


@cache
def batch(vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (GLOBAL_BATCH, SEQ_LEN)
    ids = rng.integers(0, vocab_size, (GLOBAL_BATCH, SEQ_LEN + 1), dtype=np.int32)
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "loss_mask": rng.random(shape) < 0.9,
        "positions": np.tile(np.arange(SEQ_LEN, dtype=np.int32), (GLOBAL_BATCH, 1)),
        "segments": np.zeros(shape, np.int32),
        "examples": np.arange(GLOBAL_BATCH, dtype=np.int32),
    }


def program_for(
    model: ModelConfig,
    axes: AxisSizes,
    *,
    splits_tokens: bool = False,
    task: str | None = None,
    seq_len: int = SEQ_LEN,
    **parallel: Any,
) -> Program:
    """The program of a real run, whose first moment is the gradient: no clipping, no decay of the
    moment.
    """
    config = Config(
        model=model,
        data=DataConfig(global_batch=GLOBAL_BATCH, seq_len=seq_len),
        parallel=ParallelConfig(
            loss_chunk_tokens=10,
            sequence_parallel=True if splits_tokens else None,
            **parallel,
        ),
        optimizer=OptimizerConfig(beta1=0.0, clip_norm=0.0),
        task=task,
    )
    topology = Topology(
        num_devices=axes.num_devices,
        num_processes=1,
        platform="cpu",
        device_kind="cpu",
        bytes_per_device=None,
    )
    plan = plan_for(config, axes, topology)
    plan.validate(model, global_batch=GLOBAL_BATCH)
    return build_program(config, plan, jax.devices()[: axes.num_devices])


def state_of(program: Program, params: Params) -> TrainState:
    """The state before step 1, with these parameters."""
    empty = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(program.init, jnp.int32(0))
    )
    unscaled = dataclasses.replace(empty.loss_scale, scale=np.ones_like(empty.loss_scale.scale))
    return jax.device_put(
        dataclasses.replace(empty, params=params, loss_scale=unscaled), program.state_shardings
    )


def logits(program: Program, params: Params, rows: dict[str, jax.Array]) -> jax.Array:
    """float32 [B, L, V] under the program's shardings; a function to be jitted."""
    rules = program.plan.active_rules(program.config.model)
    comm = Collectives(jnp.dtype(jnp.float32), rules, program.plan.zero)

    def local(params: Params, rows: dict[str, jax.Array]) -> jax.Array:
        model, one_pass = program.shapes.module(params, comm), ForwardContext(comm=comm)
        stream = embedded(model, rows, one_pass)
        stream = model.run_layers(stream, rows["positions"], one_pass).x_BLD
        return model.logits(model.head_input(stream, comm), one_pass)

    specs = jax.tree.map(
        lambda sharding: sharding.spec, (program.state_shardings.params, program.batch_sharding)
    )
    whole_rows = P(rules.get(BATCH), None, rules.get(VOCAB))
    return jax.shard_map(local, mesh=program.mesh, in_specs=specs, out_specs=whole_rows)(
        params, rows
    )


def run(function: Any, *args: Any) -> Any:
    """A jitted function's result, compiled as quickly as can be."""
    return function.lower(*args).compile(compiler_options=QUICK)(*args)


def differences(ours: Params, theirs: Params) -> dict[str, float]:
    """Of every leaf, the largest difference over the largest entry."""
    relative = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - b).max() / np.abs(b).max()), ours, theirs
    )
    return {
        jax.tree_util.keystr(path): value for path, value in jax.tree.leaves_with_path(relative)
    }


def num_layers(case: str) -> int:
    """Decoder layers of a case."""
    keys = ("n_layer", "num_layers", "num_hidden_layers")
    return next(CASES[case][key] for key in keys if key in CASES[case])


def is_daily(case: str, axes: AxisSizes, *, splits_tokens: bool) -> bool:
    """Whether `make test` compares a case under a plan; `make nightly` compares the others."""
    if axes is STAGES or splits_tokens:
        return case in IN_STAGES and axes is (SHARDED if splits_tokens else STAGES)
    return case in ON_A_MESH if axes is SHARDED else case not in OTHER_SIZES


@pytest.mark.parametrize(
    ("case", "axes", "splits_tokens"),
    [
        *(
            pytest.param(
                case,
                axes,
                splits_tokens,
                id=f"{case} on {axes}{', tokens split' if splits_tokens else ''}",
                marks=()
                if is_daily(case, axes, splits_tokens=splits_tokens)
                else pytest.mark.nightly,
            )
            for case in CASES
            for axes in (ONE_DEVICE, SHARDED, STAGES)
            for splits_tokens in ((False, True) if axes.tensor > 1 else (False,))
            if axes.pipe == 1 or num_layers(case) % axes.pipe == 0
        ),
        pytest.param(*SHARED_KV_HEADS, False, id="{} on {}".format(*SHARED_KV_HEADS)),
    ],
)
def test_logits_loss_and_gradients_equal_huggingface(
    case: str, axes: AxisSizes, splits_tokens: bool
):
    theirs = reference(case)
    model = config_from_huggingface(theirs.config)
    if axes.tensor > 1 and axes.tensor % model.num_kv_heads and model.num_kv_heads % axes.tensor:
        pytest.skip("key/value heads can be neither split nor shared")
    program = program_for(model, axes, splits_tokens=splits_tokens)
    vocab_rows = program.shapes.vocab_rows
    state = state_of(program, from_huggingface(theirs.state_dict, model, vocab_rows))
    for matrix in (
        state.params["embedding"]["table"],
        state.params["layers"]["attention"]["query"],
    ):
        shard = matrix.addressable_shards[0].data.size
        assert shard * axes.fsdp * axes.tensor * axes.pipe == matrix.size
    rows = put_batch(batch(model.vocab_size), program.batch_sharding, GLOBAL_BATCH)

    if axes.pipe == 1 and case in WITH_LOGITS:
        our_logits = np.asarray(run(jax.jit(partial(logits, program)), state.params, rows))
        assert np.abs(our_logits[..., : model.vocab_size] - theirs.logits).max() < LOGITS_ATOL
    state, metrics = run(program.train_step, state, rows)
    off = differences(state.opt_state[0].mu, from_huggingface(theirs.gradients, model, vocab_rows))
    assert float(metrics["loss"]) == pytest.approx(theirs.loss, rel=1e-6)
    assert {leaf: value for leaf, value in off.items() if not value < GRADIENT_RTOL} == {}


@pytest.mark.parametrize(
    ("case", "axes"),
    [
        ("mistral, window", SHARDED),
        ("qwen2, window", ONE_DEVICE),
        ("gpt_neo", STAGES),
        ("gemma2", SHARDED),
        ("gemma3", STAGES),
    ],
    ids=str,
)
def test_windows_that_save_work_equal_huggingface(case: str, axes: AxisSizes, monkeypatch):
    """With blocks so short that most do not see the first keys."""
    monkeypatch.setattr(blockwise_attention, "MIN_BLOCK", 2)
    model = config_from_huggingface(reference(case).config)
    window = features_of(model).window
    windowed, full = (
        blockwise_attention.blocks_of(SEQ_LEN, SEQ_LEN, each) for each in (window, None)
    )
    assert any(has_window(model))
    assert windowed != full
    test_logits_loss_and_gradients_equal_huggingface(case, axes, splits_tokens=False)


@pytest.mark.parametrize("case", FIRST_OF_FAMILY)
def test_exported_weights_equal_those_of_huggingface(case: str):
    theirs = reference(case)
    model = config_from_huggingface(theirs.config)
    ours = to_huggingface(from_huggingface(theirs.state_dict, model, model.vocab_size + 3), model)
    assert ours.keys() == theirs.gradients.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs.state_dict[name])


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    texts = [name for name, each in HUGGING_FACE_FORMATS.items() if each.reads == "text"]
    family, sizes = draw(st.sampled_from(sorted(texts))), st.integers(1, 4)
    is_gpt = FAMILIES[family].norm == "layer"
    kv_heads, head_dim = draw(sizes), 2 * draw(sizes)
    heads = kv_heads * (1 if is_gpt else draw(sizes))
    return ModelConfig(
        family=family,
        vocab_size=draw(st.integers(1, 20)),
        num_layers=draw(sizes),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        embed_dim=heads * head_dim if is_gpt else draw(sizes),
        mlp_dim=draw(sizes),
        max_length=draw(sizes),
        tied=draw(st.booleans()) and family != "gptj",
        features=Features(rope_dims=2) if family == "gptj" else Features(),
    )


def random_params(shapes: ModelShapes) -> Params:
    """Parameters that are all different; rows of padding are zero."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, leaf.dtype), shapes.params)
    for part in {"embedding", "head"} & params.keys():
        params[part]["table"][shapes.config.vocab_size :] = 0
    if "head_bias" in params:
        params["head_bias"][shapes.config.vocab_size :] = 0
    return params


@settings(deadline=None, max_examples=20)
@given(model=models(), padding=st.integers(0, 5))
def test_export_and_import_is_the_identity(model: ModelConfig, padding: int):
    shapes = model_shapes(model, model.vocab_size + padding)
    params = random_params(shapes)
    state_dict = to_huggingface(params, model)
    assert sum(tensor.size for tensor in state_dict.values()) == shapes.num_params
    assert all(tensor.ndim <= 2 and tensor.flags.c_contiguous for tensor in state_dict.values())
    jax.tree.map(
        np.testing.assert_array_equal,
        from_huggingface(state_dict, model, shapes.vocab_rows),
        params,
    )


TINY = {
    family: ModelConfig(
        family=family,
        vocab_size=5,
        num_layers=2,
        embed_dim=4,
        num_heads=2,
        num_kv_heads=2,
        head_dim=2,
        mlp_dim=6,
        max_length=8,
        tied=family == "gpt2",
    )
    for family in ("gpt2", "llama")
}


@pytest.mark.parametrize(
    ("family", "prefix", "constants"),
    [
        ("gpt2", "transformer.", ("h.0.attn.bias", "transformer.h.1.attn.masked_bias")),
        (
            "llama",
            "model.",
            ("model.layers.1.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"),
        ),
    ],
)
def test_released_files_differ_in_prefix_constants_and_tied_heads(
    family: str, prefix: str, constants: tuple[str, ...]
):
    model = TINY[family]
    params = random_params(model_shapes(model, 8))
    released = {
        name.removeprefix(prefix): tensor for name, tensor in to_huggingface(params, model).items()
    }
    released |= dict.fromkeys(constants, np.ones(3)) | {
        HEAD: params["head" if "head" in params else "embedding"]["table"][:5]
    }
    jax.tree.map(np.testing.assert_array_equal, from_huggingface(released, model, 8), params)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "gpt2",
            {"transformer.wpe.weight": None, "transformer.h.1.ln_1.bias": None},
            "missing: h.1.ln_1.bias, wpe.weight; unknown: none",
        ),
        ("gpt2", {"score.weight": np.zeros(1)}, "missing: none; unknown: score.weight"),
        (
            "gpt2",
            {f"transformer.h.{layer}.ln_1.bias": np.zeros(4) for layer in range(2, 9)},
            "h.6.ln_1.bias and 2 more",
        ),
        (
            "gpt2",
            {"transformer.h.0.attn.c_attn.weight": np.zeros((12, 4))},
            r"'h.0.attn.c_attn.weight'.*\n.*\(12, 4\), wanted \(4, 12\)",
        ),
        ("gpt2", {HEAD: np.zeros((5, 4))}, "tied, but lm_head.weight is not the embedding"),
        ("llama", {HEAD: None}, "missing: lm_head.weight"),
        (
            "llama",
            {"model.layers.1.self_attn.v_proj.weight": np.zeros((2, 4))},
            r"v_proj.*\n.*\(2, 4\), wanted \(4, 4\)",
        ),
    ],
)
def test_weights_that_do_not_match_the_model_are_refused(family: str, change: dict, message: str):
    model = TINY[family]
    state_dict = to_huggingface(random_params(model_shapes(model, 8)), model) | change
    with pytest.raises(CheckpointError, match=message):
        from_huggingface(
            {name: tensor for name, tensor in state_dict.items() if tensor is not None}, model, 8
        )


def test_released_configs_are_our_presets():
    assert config_from_huggingface(RELEASED_GPT2) == dataclasses.replace(
        model_preset("gpt2"), name="custom"
    )
    assert config_from_huggingface(RELEASED_LLAMA) == dataclasses.replace(
        model_preset("llama3.2-1b"), name="custom"
    )


@pytest.mark.parametrize(
    ("released", "change", "message"),
    [
        (RELEASED_GPT2, {"model_type": "gpt_neox"}, "'gpt_neox'"),
        (RELEASED_GPT2, {"activation_function": "relu"}, "activation_function='relu'"),
        (
            RELEASED_GPT2,
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx=True",
        ),
        (RELEASED_GPT2, {"n_layer": None, "n_embd": None}, "no n_layer, n_embd"),
        (RELEASED_LLAMA, {"is_causal": False}, "is_causal=False"),
        (RELEASED_LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (RELEASED_LLAMA, {"attention_multiplier": 0.5}, "attention_multiplier=0.5"),
        (RELEASED_LLAMA, {"head_dim": None, "hidden_size": 200}, "have no whole width"),
        (RELEASED_LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (RELEASED_LLAMA, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        (RELEASED_LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks numbers"),
        (RELEASED_LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_type=linear lacks numbers"),
        (
            RELEASED_LLAMA,
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        (
            CASES["gemma3"] | {"rms_norm_eps": 1e-6, "initializer_range": 0.02},
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor=0.5",
        ),
        (
            CASES["gemma3"] | {"rms_norm_eps": 1e-6, "initializer_range": 0.02},
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention.rope_type='linear'",
        ),
    ],
)
def test_unsupported_models_are_refused(released: dict, change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        config_from_huggingface(released | change)
