"""Our arithmetic is that of Hugging Face's GPT-2 and Llama, on one device and on a sharded mesh.

The models there are made in memory from a config, their weights drawn anew; nothing is downloaded.
Here the gradients are those of the real training step.
"""

import dataclasses
import os
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from optimus_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig
from optimus_jax.errors import CheckpointError, ConfigError
from optimus_jax.mesh.axes import VOCAB, AxisSizes
from optimus_jax.mesh.build import build_mesh
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.sharding import put_batch
from optimus_jax.mesh.topology import Topology
from optimus_jax.models.huggingface import HEAD, config_from_huggingface, from_huggingface, to_huggingface
from optimus_jax.models.shapes import Params, model_shapes
from optimus_jax.models.transformer import Pass
from optimus_jax.planning.search import plan_for
from optimus_jax.presets import gpt2, llama3_2_1b
from optimus_jax.training.state import LossScale, TrainState
from optimus_jax.training.step import Program, build_program

GLOBAL_BATCH, SEQ_LEN = 4, 24
LOGITS_ATOL = 2e-5
"""Logits are of size 1 and are sums of some hundred products, each rounded to 6e-8."""
GRADIENT_RTOL = 1e-4
"""Of the largest entry of a leaf. The key biases' gradient is zero but for rounding; they share a leaf with the value biases'."""

GPT2 = {"model_type": "gpt2", "n_positions": 32, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
LLAMA = {"model_type": "llama", "max_position_embeddings": 64, "num_hidden_layers": 2}
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}

CASES = {
    "gpt2": GPT2 | {"vocab_size": 128, "n_layer": 2, "n_embd": 32, "n_head": 4},
    "gpt2, own mlp_dim, odd vocabulary": GPT2 | {"vocab_size": 101, "n_layer": 3, "n_embd": 48, "n_head": 6, "n_inner": 80},
    "gpt2, untied, one layer": GPT2 | {"vocab_size": 97, "n_layer": 1, "n_embd": 64, "n_head": 2, "tie_word_embeddings": False},
    "llama, a kv head per head": LLAMA | {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4},
    "llama, 4 heads per kv head, tied": LLAMA | {
        "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2,
        "tie_word_embeddings": True},
    "llama, one kv head, own head_dim, llama3 rope": LLAMA | {
        "vocab_size": 99, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 16, "rope_parameters": ROPE},
}
MESHES = {"one device": AxisSizes(), "sharded": AxisSizes(data=2, fsdp=2, tensor=2)}
FEW_KV_HEADS = ("llama, 4 heads per kv head, tied", AxisSizes(fsdp=2, tensor=4))
"""Two devices share a key/value head, and there is more than one."""


@cache
def reference(case: str) -> SimpleNamespace:
    """The case's model in PyTorch: weights, and of `batch()` the logits, the loss and its gradients."""
    torch = pytest.importorskip("torch", reason="the reference is PyTorch's: pip install optimus-jax[huggingface]")
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = pytest.importorskip("transformers", reason="the reference is Hugging Face's: pip install optimus-jax[huggingface]")
    torch.manual_seed(0)
    values = {key: value for key, value in CASES[case].items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(CASES[case]["model_type"], bos_token_id=0, eos_token_id=0, **values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():  # not 0.02: scores of size 1 let attention and positions matter, and biases and norms too
        weight.data = torch.randn_like(weight) * (0.2 if weight.ndim == 2 else 0.1) + (weight.data if weight.ndim == 1 else 0)
    rows = batch(config.vocab_size)
    logits = model(torch.tensor(rows["tokens"], dtype=torch.long)).logits
    targets = torch.tensor(np.where(rows["loss_mask"], rows["targets"], -100), dtype=torch.long)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return SimpleNamespace(
        config=config.to_dict(), state_dict={name: tensor.numpy() for name, tensor in model.state_dict().items()},
        logits=logits.detach().numpy(), loss=loss.item(),
        gradients={name: weight.grad.numpy() for name, weight in model.named_parameters()})


@cache
def batch(vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (GLOBAL_BATCH, SEQ_LEN)
    ids = rng.integers(0, vocab_size, (GLOBAL_BATCH, SEQ_LEN + 1), dtype=np.int32)
    return {
        "tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_mask": rng.random(shape) < 0.9,
        "positions": np.tile(np.arange(SEQ_LEN, dtype=np.int32), (GLOBAL_BATCH, 1)),
        "segments": np.zeros(shape, np.int32), "examples": np.arange(GLOBAL_BATCH, dtype=np.int32)}


def program_for(model: ModelConfig, axes: AxisSizes) -> Program:
    """The program of a real run, whose first moment is the gradient: no clipping, no decay of the moment."""
    config = Config(model=model, data=DataConfig(global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN), parallel=ParallelConfig(loss_chunk_tokens=10),
                    optimizer=OptimizerConfig(beta1=0.0, clip_norm=0.0))
    topology = Topology(num_devices=axes.num_devices, num_processes=1, platform="cpu", device_kind="cpu", bytes_per_device=None)
    plan = plan_for(config, axes, topology)
    plan.validate(model, global_batch=GLOBAL_BATCH)
    mesh = build_mesh(plan, jax.devices()[: axes.num_devices])
    return build_program(config, model_shapes(model, plan.padded_vocab(model)), plan, mesh)


def state_of(program: Program, params: Params) -> TrainState:
    zero = np.zeros((), np.int32)
    state = TrainState(step=zero, params=params, opt_state=program.optimizer.init(params),
                       loss_scale=LossScale(scale=np.ones((), np.float32), clean_steps=zero, overflows=zero))
    return jax.device_put(state, program.state_shardings)


def logits_of(program: Program, params: Params, rows: dict[str, jax.Array]) -> np.ndarray:
    """[B, L, V] under the program's shardings, padding cut off."""
    rules = program.plan.active_rules(program.config.model)
    comm = Collectives(jnp.dtype(jnp.float32), rules, program.plan.zero)

    def local(params: Params, rows: dict[str, jax.Array]) -> jax.Array:
        model, run = program.shapes.module(params, comm), Pass(comm=comm)
        return model.logits(model.hidden(rows["tokens"], rows["positions"], run), run)

    specs = jax.tree.map(lambda sharding: sharding.spec, (program.state_shardings.params, program.batch_sharding))
    out = P(*program.batch_sharding.spec or (None,), None, rules.get(VOCAB))
    sharded = jax.jit(jax.shard_map(local, mesh=program.mesh, in_specs=specs, out_specs=out))
    return np.asarray(sharded(params, rows))[..., : program.config.model.vocab_size]


def relative(ours: Params, theirs: Params) -> dict[str, float]:
    """Largest difference over the largest entry, leaf by leaf."""
    differences = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()), ours, theirs)
    return {jax.tree_util.keystr(path): value for path, value in jax.tree.leaves_with_path(differences)}


@pytest.mark.parametrize(("case", "axes"), [
    *(pytest.param(case, axes, id=f"{case} on {mesh}") for case in CASES for mesh, axes in MESHES.items()),
    pytest.param(*FEW_KV_HEADS, id=f"{FEW_KV_HEADS[0]} on more devices than kv heads")])
def test_logits_loss_and_gradients_are_theirs(case, axes):
    theirs = reference(case)
    model = config_from_huggingface(theirs.config)
    program = program_for(model, axes)
    state = state_of(program, from_huggingface(theirs.state_dict, model, program.shapes.vocab_rows))
    query = state.params["layers"]["attention"]["query"]
    assert query.addressable_shards[0].data.size * axes.fsdp * axes.tensor == query.size
    rows = put_batch(batch(model.vocab_size), program.batch_sharding, GLOBAL_BATCH)

    logits = logits_of(program, state.params, rows)
    state, metrics = program.train_step(state, rows)
    gradients = jax.tree.map(np.asarray, state.opt_state[0].mu)
    differences = relative(gradients, from_huggingface(theirs.gradients, model, program.shapes.vocab_rows))
    print("MAX", case, axes, np.abs(logits - theirs.logits).max(), np.abs(theirs.logits).max(), abs(float(metrics["loss"]) - theirs.loss), max(differences.items(), key=lambda x: x[1]))
    assert np.abs(logits - theirs.logits).max() < LOGITS_ATOL
    assert float(metrics["loss"]) == pytest.approx(theirs.loss, rel=1e-6)
    assert {leaf: value for leaf, value in differences.items() if not value < GRADIENT_RTOL} == {}
