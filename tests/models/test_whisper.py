"""Whisper equals Hugging Face's, on one device, on a mesh and in stages."""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from published_models import libraries
from test_huggingface import (
    GLOBAL_BATCH,
    GRADIENT_RTOL,
    LOGITS_ATOL,
    ONE_DEVICE,
    SHARDED,
    STAGES,
    logits,
    program_for,
    run,
    state_of,
)

from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.model import PATCH_TOKEN
from optimus_jax.errors import ConfigError, PlanError
from optimus_jax.mesh.sharding import put_batch
from optimus_jax.models.families import check_family
from optimus_jax.models.huggingface import config_from_huggingface, from_huggingface, to_huggingface
from optimus_jax.models.huggingface_checks import model_tensors
from optimus_jax.models.huggingface_config import config_to_huggingface
from optimus_jax.models.huggingface_tensors import leaf_sources

SMALL = {
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": 12,
    "max_target_positions": 20,
    "num_mel_bins": 8,
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
CASES = {
    "two and two layers": SMALL,
    "one and three layers, own head": SMALL
    | {"encoder_layers": 1, "decoder_layers": 3, "tie_word_embeddings": False},
    "three and one layers, wide": SMALL
    | {"encoder_layers": 3, "decoder_layers": 1, "d_model": 64, "max_source_positions": 8},
}
FOUR_STAGES = AxisSizes(pipe=4, tensor=2)
TEXT = 16


@cache
def reference(case: str) -> SimpleNamespace:
    """The model in PyTorch: weights, and of `rows_for` the logits, the loss and its gradients."""
    torch, transformers = libraries()
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**CASES[case], attn_implementation="eager")
    model = transformers.WhisperForConditionalGeneration(config).eval()
    config.architectures = ["WhisperForConditionalGeneration"]
    for name, weight in model.named_parameters():
        if "encoder.embed_positions" not in name:  # sinusoids, which are not trained
            weight.data = 0.2 * torch.randn_like(weight) + (weight.data if weight.ndim == 1 else 0)
    rows, frames = rows_for(case), config.max_source_positions
    columns = rows["patches"][:, :frames].reshape(GLOBAL_BATCH, 2 * frames, config.num_mel_bins)
    logits = model(
        input_features=torch.tensor(np.swapaxes(columns, 1, 2).copy()),
        decoder_input_ids=torch.tensor(rows["tokens"][:, frames:], dtype=torch.long),
    ).logits
    targets = torch.tensor(rows["targets"][:, frames:], dtype=torch.long)
    counts = torch.tensor(rows["loss_mask"][:, frames:])
    loss = torch.nn.functional.cross_entropy(logits[counts], targets[counts])
    loss.backward()
    tied = {"proj_out.weight"} if model.config.tie_word_embeddings else set()
    return SimpleNamespace(
        config=config.to_dict(),
        state_dict={
            name: tensor.numpy() for name, tensor in model.state_dict().items() if name not in tied
        },
        logits=logits.detach().numpy(),
        loss=loss.item(),
        gradients={
            name: weight.grad.numpy()
            for name, weight in model.named_parameters()
            if weight.grad is not None
        },
    )


def rows_for(case: str) -> dict[str, np.ndarray]:
    rng, sizes = np.random.default_rng(0), CASES[case]
    frames = sizes["max_source_positions"]
    shape = (GLOBAL_BATCH, frames + TEXT)
    ids = rng.integers(2, sizes["vocab_size"], (GLOBAL_BATCH, shape[1] + 1), dtype=np.int32)
    is_frame = np.broadcast_to(np.arange(shape[1]) < frames, shape)
    places = np.concatenate([np.arange(frames), np.arange(TEXT)]).astype(np.int32)
    values = rng.standard_normal((*shape, 2 * sizes["num_mel_bins"])).astype(np.float32)
    lengths = rng.integers(4, TEXT + 1, GLOBAL_BATCH)
    return {
        "tokens": np.where(is_frame, PATCH_TOKEN, ids[:, :-1]).astype(np.int32),
        "targets": np.where(is_frame, -1, ids[:, 1:]).astype(np.int32),
        "positions": np.tile(places, (GLOBAL_BATCH, 1)),
        "segments": np.zeros(shape, np.int32),
        "loss_mask": ~is_frame & (places < lengths[:, None]),
        "examples": np.arange(GLOBAL_BATCH, dtype=np.int32),
        "patches": values,
    }


def params_of(program, tensors):
    """Parameters as a program has them, in the slots of its stages."""
    shapes, found = program.shapes, model_tensors(tensors, program.config.model)
    sources = leaf_sources(shapes)
    return jax.tree.map_with_path(
        lambda path, _: sources[jax.tree_util.keystr(path, simple=True, separator="/")].block(
            found
        ),
        shapes.params,
    )


def differences(ours, theirs) -> dict[str, float]:
    """Of every leaf, the largest difference over the largest entry; zeros must be zeros."""

    def relative(a, b) -> float:
        largest = float(np.abs(b).max()) or 1.0
        return float(np.abs(np.asarray(a) - b).max()) / largest

    found = jax.tree.map(relative, ours, theirs)
    return {jax.tree_util.keystr(path): each for path, each in jax.tree.leaves_with_path(found)}


@pytest.mark.parametrize(
    ("case", "axes", "splits_tokens"),
    [
        pytest.param(
            case,
            axes,
            splits_tokens,
            id=f"{case} on {axes}" + ", tokens split" * splits_tokens,
            marks=() if axes is ONE_DEVICE or case == "two and two layers" else pytest.mark.nightly,
        )
        for case in CASES
        for axes, splits_tokens in (
            (ONE_DEVICE, False),
            (SHARDED, False),
            (SHARDED, True),
            (STAGES, False),
            (FOUR_STAGES, True),
        )
    ],
)
def test_logits_loss_and_gradients_equal_huggingface(case, axes, splits_tokens):
    theirs = reference(case)
    model = config_from_huggingface(theirs.config)
    seq_len = model.frames + TEXT
    program = program_for(model, axes, seq_len=seq_len, splits_tokens=splits_tokens)
    state = state_of(program, params_of(program, theirs.state_dict))
    rows = put_batch(rows_for(case), program.batch_sharding, GLOBAL_BATCH)
    if axes is ONE_DEVICE:
        found = np.asarray(run(jax.jit(partial(logits, program)), state.params, rows))
        assert np.abs(found[..., : model.vocab_size] - theirs.logits).max() < LOGITS_ATOL
    state, metrics = run(program.train_step, state, rows)
    off = differences(state.opt_state[0].mu, params_of(program, theirs.gradients))
    assert float(metrics["loss"]) == pytest.approx(theirs.loss, rel=1e-6)
    assert {leaf: value for leaf, value in off.items() if not value < GRADIENT_RTOL} == {}


@pytest.mark.parametrize("case", CASES)
def test_exported_weights_and_config_are_theirs(case):
    theirs = reference(case)
    model = config_from_huggingface(theirs.config)
    assert config_from_huggingface(config_to_huggingface(model)) == model
    ours = to_huggingface(from_huggingface(theirs.state_dict, model, model.vocab_size + 3), model)
    assert ours.keys() == theirs.state_dict.keys()
    positions = "model.encoder.embed_positions.weight"
    for key, tensor in ours.items():
        if key != positions:
            np.testing.assert_array_equal(tensor, theirs.state_dict[key])
    np.testing.assert_allclose(ours[positions], theirs.state_dict[positions], atol=1e-6)


def test_what_two_sides_in_one_stack_cannot_have_is_refused():
    model = config_from_huggingface(reference("two and two layers").config)
    for changed in ({"positions": "rotary"}, {"causal": False}, {"norm_place": "post"}):
        wrong = replace(model, features=replace(model.features, **changed))
        with pytest.raises(ConfigError, match=next(iter(changed))):
            check_family(wrong)
    with pytest.raises(ConfigError, match="encoder"):
        replace(model, encoder_layers=0)
    with pytest.raises(ConfigError, match="encoder_layers"):
        replace(model, num_layers=2)
    with pytest.raises(PlanError, match="overlap"):
        program_for(model, SHARDED, seq_len=model.frames + TEXT, overlap="layers")
