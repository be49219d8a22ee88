"""Headers of safetensors files: those that are read, and those that are refused."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from published_models import libraries

from optimus_jax.errors import CheckpointError
from optimus_jax.weights.file_bytes import MAX_HEADER_BYTES
from optimus_jax.weights.safetensors_file import DTYPES, read_safetensors

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
DATA = bytes(range(32))


def write_file(path: Path, header: Any, data: bytes = DATA, size: int | None = None) -> Path:
    """Write a file with a header, which says that it has `size` bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)
    return path


def test_tensors_are_where_the_library_puts_them(tmp_path):
    libraries()
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(0, 2, (3, 1, 2)).astype(dtype)
        for name, dtype in DTYPES.items()
        if not name.startswith(("F8", "BF"))
    }
    arrays |= {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 3), np.int32)}
    save_file(arrays, tmp_path / "a.safetensors", {"format": "np"})
    found = read_safetensors(tmp_path / "a.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(np.asarray(found[name]), array)


def test_bfloat16_is_read(tmp_path):
    found = read_safetensors(write_file(tmp_path / "a", {"a": A, "b": B, "__metadata__": {}}))
    np.testing.assert_array_equal(
        np.asarray(found["b"]), np.frombuffer(DATA[24:], np.dtype(jnp.bfloat16))
    )


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "not a JSON object"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b' {"a": {}}', "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": NaN}', "not JSON"),
        (b"\xff{}", "not JSON"),
        (json.dumps({"a": A})[:-1].encode() + b', "a": ' + json.dumps(B).encode() + b"}", "twice"),
        ({"a": A, "b": B, "__metadata__": {"x": 1}}, "__metadata__"),
        ({"a": 5}, "not described by"),
        ({"a": A | {"more": 1}}, "not described by"),
        ({"a": {"dtype": "F32", "shape": [6]}}, "not described by"),
        ({"a": A | {"dtype": "F4"}}, "dtype 'F4'"),
        ({"a": A | {"dtype": ["F32"]}}, "dtype"),
        ({"a": A | {"shape": [-2, -3]}}, "no sizes"),
        ({"a": A | {"shape": [2, 3.0]}}, "no sizes"),
        ({"a": A | {"shape": [True, 6]}}, "no sizes"),
        ({"a": A | {"shape": "23"}}, "no sizes"),
        ({"a": A | {"shape": [2, 3] + [1] * 100}}, "no sizes"),
        ({"a": A | {"shape": [1 << 62, 1 << 62]}}, "is said to be at"),
        ({"a": A | {"shape": [10**40]}}, "no sizes"),
        ({"a": A | {"data_offsets": [0, 24, 24]}}, "is said to be at"),
        ({"a": A | {"data_offsets": [24, 0]}}, "is said to be at"),
        ({"a": A | {"data_offsets": [-24, 0]}}, "no sizes"),
        ({"a": A | {"data_offsets": [0, None]}}, "no sizes"),
        ({"a": A | {"data_offsets": [16, 40]}, "b": B | {"data_offsets": [0, 8]}}, "follows a gap"),
        ({"a": A, "b": B | {"data_offsets": [20, 28]}}, "overlaps another"),
        ({"a": A, "b": A}, "overlaps another"),
        ({"a": A, "b": B | {"data_offsets": [32, 40]}}, "follows a gap"),
        ({"a": A}, "its tensors end at byte"),
        ({"a": A, "b": B, "c": B | {"data_offsets": [32, 40]}}, "its tensors end at byte"),
    ],
)
def test_a_header_that_contradicts_the_format_or_the_file_is_refused(header, message, tmp_path):
    with pytest.raises(CheckpointError, match=message) as caught:
        read_safetensors(write_file(tmp_path / "a.safetensors", header))
    assert "given:" in str(caught.value)
    assert "do:" in str(caught.value)


@pytest.mark.parametrize("size", [10**6, 1 << 62, (1 << 64) - 1])
def test_a_header_longer_than_the_file_is_not_read(size, tmp_path):
    with pytest.raises(CheckpointError, match=f"a header of {size:,} bytes"):
        read_safetensors(write_file(tmp_path / "a", {"a": A, "b": B}, size=size))


def test_a_header_of_the_size_of_weights_is_not_read(tmp_path):
    path = write_file(tmp_path / "a", b"{}", b"", size=MAX_HEADER_BYTES + 1)
    with path.open("r+b") as file:
        file.truncate(2 * MAX_HEADER_BYTES)  # a hole
    with pytest.raises(CheckpointError, match="at most"):
        read_safetensors(path)


def test_a_file_that_became_shorter_is_an_error_and_not_a_signal(tmp_path):
    path = write_file(tmp_path / "a", {"a": A, "b": B})
    tensor = read_safetensors(path)["b"]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="before a tensor does"):
        np.asarray(tensor)
