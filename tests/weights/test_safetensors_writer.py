"""Files that are written slice by slice equal those of safetensors' own library."""

import itertools
import json
import os
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_models import MODELS, libraries
from test_leaf_blocks import leaves_of, shapes_of

from optimus_jax.errors import CheckpointError
from optimus_jax.models.huggingface import to_huggingface
from optimus_jax.models.huggingface_formats import family_format
from optimus_jax.models.huggingface_tensors import leaf_sources, tensor_shapes
from optimus_jax.weights import safetensors_writer as writer
from optimus_jax.weights.directory import read_tensors
from optimus_jax.weights.new_tensor import NewTensor

DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(jnp.bfloat16)}
SHAPES = {
    "layers.10.b": (3, 5),
    "layers.9.weight": (4,),
    "a": (),
    "é": (2, 1, 3),
    "layers.9.a": (7,),
}


def values_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_equal_those_of_the_library(dtype: str, tmp_path: Path):
    safetensors = pytest.importorskip("safetensors.numpy", reason="the test needs safetensors")
    tensors = writer.create_file(tmp_path / "ours", SHAPES, DTYPES[dtype])
    for name, tensor in tensors.items():
        tensor[...] = values_of(SHAPES[name])
    expected = safetensors.save(
        {name: values_of(shape).astype(DTYPES[dtype]) for name, shape in SHAPES.items()},
        {"format": "pt"},
    )
    assert (tmp_path / "ours").read_bytes() == expected
    with pytest.raises(FileExistsError):
        writer.create_file(tmp_path / "ours", SHAPES, DTYPES[dtype])


@pytest.mark.parametrize(
    ("family", "dtype"), list(zip(MODELS, itertools.cycle(DTYPES), strict=False)), ids=str
)
def test_leaves_that_are_written_in_boxes_equal_whole_tensors(
    family: str, dtype: str, tmp_path: Path
):
    """In a random sequence, from boxes that cut every dimension."""
    shapes, leaves = shapes_of(family), leaves_of(family, "float32")
    sources, rng = leaf_sources(shapes), np.random.default_rng(0)
    tensors = writer.create_weights(
        tmp_path, tensor_shapes(shapes.config), DTYPES[dtype], max_shard_bytes=3000
    )
    boxes = [
        (path, box) for path, source in sources.items() for box in cut(source.array.shape, rng)
    ]
    for place in rng.permutation(len(boxes)):
        path, box = boxes[place]
        sources[path].write(leaves[path][box], tensors, box)
    params = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        here = params
        for folder in folders:
            here = here.setdefault(folder, {})
        here[name] = leaf
    wanted = {
        name.removeprefix(family_format(family).prefix): tensor.astype(DTYPES[dtype])
        for name, tensor in to_huggingface(params, shapes.config).items()
    }
    found = read_tensors(tmp_path)
    assert found.keys() == wanted.keys()
    assert len({tensor.path for tensor in found.values()}) > 3
    for name, tensor in found.items():
        np.testing.assert_array_equal(np.asarray(tensor), wanted[name], err_msg=name)


def cut(shape: tuple[int, ...], rng: np.random.Generator) -> list[tuple[slice, ...]]:
    """Boxes that together are a whole array."""
    boxes = [()]
    for size in shape:
        ends = [0, *sorted({int(each) for each in rng.integers(0, size + 1, 2)} - {0, size}), size]
        parts = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
        boxes = [(*box, part) for box in boxes for part in parts]
    return boxes


@given(
    st.lists(st.integers(1, 5), max_size=4),
    st.sampled_from(list(DTYPES)),
    st.permutations(range(4)),
    st.data(),
)
def test_any_view_is_written_as_an_array_would_be(
    tmp_path_factory, shape: list[int], dtype: str, memory: list[int], data: st.DataObject
):
    path = tmp_path_factory.mktemp("files") / "file"
    (tensor,) = writer.create_file(path, {"a": tuple(shape)}, DTYPES[dtype]).values()
    expected = np.zeros(shape, DTYPES[dtype])
    for _ in range(2):
        index = tuple(
            slice(*sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))))
            for size in shape
        )
        values = values_of(expected[index].shape)
        expected[index] = values
        own = [dim for dim in memory if dim < len(shape)]
        in_memory = np.array(values.transpose(own), order="C").transpose(np.argsort(own))
        tensor[index].T[...] = in_memory.T
    np.testing.assert_array_equal(np.asarray(tensor), expected)


@pytest.mark.parametrize(
    ("max_bytes", "shards"),
    [
        (10**9, [["a", "layers.9.a", "layers.9.weight", "layers.10.b", "é"]]),
        (48, [["a", "layers.9.a", "layers.9.weight"], ["layers.10.b"], ["é"]]),
        (1, [["a"], ["layers.9.a"], ["layers.9.weight"], ["layers.10.b"], ["é"]]),
    ],
)
def test_shards_hold_layers_in_order(max_bytes: int, shards: list[list[str]], tmp_path: Path):
    tensors = writer.create_weights(tmp_path, SHAPES, DTYPES["f32"], max_bytes)
    if len(shards) == 1:
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
        return
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = [f"model-0000{at}-of-0000{len(shards)}.safetensors" for at in range(1, len(shards) + 1)]
    assert index["weight_map"] == {
        name: file for file, shard in zip(names, shards, strict=True) for name in shard
    }
    assert index["metadata"] == {"total_size": 4 * 33, "total_parameters": 33}
    assert {name: tensor.path.name for name, tensor in tensors.items()} == index["weight_map"]


def test_transformers_splits_alike(tmp_path: Path):
    """Its own index names the same files for the same tensors."""
    torch, _ = libraries()
    hub = pytest.importorskip("huggingface_hub")
    shapes = {f"model.layers.{layer}.{name}": (8, 8) for layer in range(12) for name in "ab"}
    split = hub.split_torch_state_dict_into_shards(
        {name: torch.zeros(shape) for name, shape in shapes.items()}, max_shard_size=1000
    )
    writer.create_weights(tmp_path, shapes, DTYPES["f32"], 1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == split.tensor_to_filename
    assert index["metadata"]["total_size"] == split.metadata["total_size"]


@pytest.mark.parametrize(
    ("dtype", "largest", "given"), [("f16", 65504.0, 70000.0), ("bf16", 3.38e38, 3.4e38)]
)
def test_a_number_that_does_not_fit_is_an_error(
    dtype: str, largest: float, given: float, tmp_path: Path
):
    tensor = writer.create_file(tmp_path / "file", {"a": (2,)}, DTYPES[dtype])["a"]
    tensor[...] = np.array([1, largest], np.float32)
    with pytest.raises(
        CheckpointError, match=r"too large for b?float16\n  given: (70000|3.4e\+38)"
    ):
        tensor[...] = np.array([1, given], np.float32)
    if dtype == "f16":
        with pytest.raises(CheckpointError, match="too large for float16"):
            tensor[...] = np.array([1, given], ml_dtypes.bfloat16)


def test_only_the_bytes_of_a_slice_are_written(tmp_path: Path):
    tensor = writer.create_file(tmp_path / "file", {"a": (4, 6)}, DTYPES["f32"])["a"]
    (tmp_path / "file").write_bytes(b"\xff" * (tmp_path / "file").stat().st_size)
    tensor[1:3, 2:4][...] = np.zeros((2, 2), np.float32)
    assert isinstance(tensor[1:3,].T, NewTensor)
    wanted = np.full((4, 6), -1, np.int32)
    wanted[1:3, 2:4] = 0
    np.testing.assert_array_equal(np.asarray(tensor).view(np.int32), wanted)


@pytest.mark.parametrize(
    ("index", "calls"),
    [((slice(None), slice(None)), 1), ((slice(1, 3),), 1), ((slice(None), slice(0, 2)), 4)],
)
def test_what_is_together_in_the_file_is_written_at_once(
    index: tuple[slice, ...], calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also if its dimensions are in another sequence in memory."""
    tensor = writer.create_file(tmp_path / "file", {"a": (4, 6)}, DTYPES["f32"])["a"][index]
    sizes, pwrite = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: sizes.append(len(given[1])) or pwrite(*given))
    tensor.T[...] = values_of(tensor.T.shape)
    assert len(sizes) == calls
    assert sum(sizes) == values_of(tensor.shape).nbytes
