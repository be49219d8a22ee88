"""Slices of leaves that are read from a published model's files equal those of whole leaves."""

from functools import cache

import jax
import numpy as np
import pytest
from published_models import MODELS, libraries, model_of, read_bytes, state_dict_of, write

from optimus_jax.config import ModelConfig
from optimus_jax.models.huggingface import (
    config_from_huggingface,
    from_huggingface,
    to_huggingface,
)
from optimus_jax.models.huggingface_checks import model_tensors
from optimus_jax.models.huggingface_formats import HUGGING_FACE_FORMATS
from optimus_jax.models.huggingface_tensors import leaf_sources
from optimus_jax.models.shapes import ModelShapes, model_shapes
from optimus_jax.weights import stored_tensor
from optimus_jax.weights.directory import open_model, read_tensors

KINDS = [
    ("safetensors", "float32", stored_tensor.GAP_BYTES),
    ("sharded safetensors", "bfloat16", 0),
    ("bin", "bfloat16", stored_tensor.GAP_BYTES),
    ("sharded bin", "float32", 0),
    ("sharded legacy bin", "float16", stored_tensor.GAP_BYTES),
]
"""Files, dtype and GAP_BYTES. With 0, nothing but wanted bytes is read."""
PADDING = 5
"""Rows of the embedding after the vocabulary."""


@cache
def shapes_of(family: str) -> ModelShapes:
    """The shapes of a family's tiny model."""
    config = config_from_huggingface(model_of(family).config.to_dict())
    return model_shapes(config, config.vocab_size + PADDING)


@cache
def leaves_of(family: str, dtype: str) -> dict[str, np.ndarray]:
    """Its whole leaves, from arrays of a dtype."""
    shapes = shapes_of(family)
    params = from_huggingface(state_dict_of(family, dtype), shapes.config, shapes.vocab_rows)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(params)
    }


def random_index(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[slice, ...]:
    """Random slices, some whole and some empty."""
    ends = [np.sort(rng.integers(0, size + 1, 2)) for size in shape]
    return tuple(
        slice(None) if rng.random() < 0.3 else slice(int(start), int(stop)) for start, stop in ends
    )


def test_every_family_of_texts_is_among_the_models():
    texts = {name for name, each in HUGGING_FACE_FORMATS.items() if each.reads == "text"}
    assert MODELS.keys() == texts


@pytest.mark.parametrize(("kind", "dtype", "gap_bytes"), KINDS)
@pytest.mark.parametrize("family", MODELS)
def test_slices_of_leaves_equal_those_of_whole_leaves(
    family, kind, dtype, gap_bytes, tmp_path, monkeypatch
):
    monkeypatch.setattr(stored_tensor, "GAP_BYTES", gap_bytes)
    monkeypatch.setattr(stored_tensor, "BUFFER_BYTES", 256)
    model = open_model(write(family, kind, dtype, tmp_path))
    shapes, wanted = shapes_of(family), leaves_of(family, dtype)
    assert model.config == shapes.config
    sources, rng = leaf_sources(shapes), np.random.default_rng(0)
    assert sources.keys() == wanted.keys()
    for path, source in sources.items():
        for index in (None, *(random_index(source.array.shape, rng) for _ in range(3))):
            block = source.block(model.tensors, index)
            assert block.dtype == np.float32
            np.testing.assert_array_equal(block, wanted[path][index or ...], err_msg=path)


def test_layers_are_those_of_the_slots_of_a_stack():
    config = shapes_of("qwen2").config
    wanted = leaves_of("qwen2", "float32")["layers/attention/key_value"]
    source = leaf_sources(model_shapes(config, 37, (1, -1, 0)))["layers/attention/key_value"]
    block = source.block(model_tensors(state_dict_of("qwen2"), config))
    np.testing.assert_array_equal(block, np.stack([wanted[1], 0 * wanted[0], wanted[0]]))


LARGE = ModelConfig(
    family="llama",
    vocab_size=8,
    num_layers=1,
    embed_dim=2048,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    mlp_dim=512,
    tied=False,
)
"""Rows of its matrices have 8 KiB: more than what is read along with wanted bytes."""


@pytest.mark.parametrize(
    ("path", "index", "wanted_bytes", "calls"),
    [
        # rows of theirs: 2 of 4 heads, of which all rows are read at once
        ("layers/attention/query", np.s_[:, :, 1:3, :], 4 * 2048 * 128, 1),
        # 16 columns of theirs, of each of 256 rows; the rest is further away than a page
        ("layers/attention/query", np.s_[:, 8:24, :, :], 4 * 16 * 256, 256),
        # the values alone
        ("layers/attention/key_value", np.s_[:, :, 1:2, :, :], 4 * 2048 * 256, 1),
        ("layers/mlp/up", np.s_[:, :, 0:1, 100:110], 4 * 2048 * 10, 1),
        ("layers/mlp/down", np.s_[:, 5:9, :], 4 * 512 * 4, 1),
        ("embedding/table", np.s_[3:5, :], 4 * 2048 * 2, 1),
        ("embedding/table", np.s_[8:, :], 0, 0),
        # gaps are shorter than a page: whole rows are read, once
        ("layers/mlp/down", np.s_[:, 5:9, :256], 4 * (512 * 3 + 256), 1),
    ],
)
def test_only_the_bytes_of_a_slice_are_read(
    path, index, wanted_bytes, calls, tmp_path, monkeypatch
):
    libraries()
    from safetensors.numpy import save_file

    shapes = model_shapes(LARGE, 16)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes.params)
    rng = np.random.default_rng(0)
    leaf = params
    for name in path.split("/"):
        leaf = leaf[name]
    leaf[...] = rng.standard_normal(leaf.shape, np.float32)
    params["embedding"]["table"][8:] = 0
    save_file(to_huggingface(params, LARGE), tmp_path / "model.safetensors")
    tensors = model_tensors(read_tensors(tmp_path), LARGE)
    count = read_bytes(monkeypatch)
    block = leaf_sources(shapes)[path].block(tensors, index)
    np.testing.assert_array_equal(block, leaf[index])
    assert (count.bytes, count.calls) == (wanted_bytes, calls)
