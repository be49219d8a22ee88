"""Files that were cut, or of which bytes were changed: read or refused, in little memory.

What is read is then within the file: every tensor of it is.
"""

import json
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from published_models import write
from test_safetensors_file import DATA, A, B, write_file
from test_torch_file import HOSTILE, archive, legacy, mapping, tensor

from optimus_jax.errors import CheckpointError, ConfigError
from optimus_jax.weights.directory import open_model
from optimus_jax.weights.safetensors_file import read_safetensors
from optimus_jax.weights.torch_file import read_torch_file
from optimus_jax.weights.torch_pickle import RefusedPickleError, evaluate

MOST_BYTES = 8 << 20
"""Memory for a file of kilobytes. Its largest part is that of Python's zip reader."""
FILES = {
    "safetensors": (
        read_safetensors,
        len(text := json.dumps({"a": A, "b": B}).encode()).to_bytes(8, "little") + text + DATA,
    ),
    "zip": (read_torch_file, archive()),
    "legacy": (read_torch_file, legacy()),
}
"""How a small file is read, and its bytes."""


def outcome(kind: str, data: bytes, path: Path) -> bool:
    """Whether a file of some bytes is read, with all its tensors, and not refused."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        for found in FILES[kind][0](path).values():
            np.asarray(found)
    except CheckpointError as caught:
        error = str(caught)
    else:
        error = None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MOST_BYTES
    assert error is None or ("given:" in error and "do:" in error)
    return error is None


def mutations(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Random changes: bytes replaced, removed, repeated or swapped, and numbers made large."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            start, size = int(rng.integers(0, len(changed))), int(rng.integers(1, 9))
            part = bytes(changed[start : start + size])
            changed[start : start + size] = {
                0: lambda part=part: rng.bytes(len(part)),
                1: lambda part=part: bytes([part[0] ^ (1 << int(rng.integers(0, 8)))]) + part[1:],
                2: lambda: b"",
                3: lambda part=part: part * int(rng.integers(2, 5)),
                4: lambda part=part: part[::-1],
                5: lambda part=part: b"\xff" * len(part),
                6: lambda part=part: bytes(len(part)),
                7: lambda: b"9" * 8,
            }[int(rng.integers(0, 8))]()
            if not changed:
                changed = bytearray(b"\0")
        yield bytes(changed)


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_cut_anywhere_is_refused(kind, tmp_path):
    data = FILES[kind][1]
    assert outcome(kind, data, tmp_path / "a")
    for size in range(len(data)):
        assert not outcome(kind, data[:size], tmp_path / "a"), size


@pytest.mark.parametrize(
    "count", [300, pytest.param(30_000, marks=pytest.mark.nightly)], ids=["few", "many"]
)
@pytest.mark.parametrize("kind", FILES)
def test_a_file_with_changed_bytes_is_read_or_refused(kind, count, tmp_path):
    read = [outcome(kind, data, tmp_path / "a") for data in mutations(FILES[kind][1], count, 0)]
    assert 0 < sum(read) < count


@pytest.mark.parametrize(
    "count", [1000, pytest.param(200_000, marks=pytest.mark.nightly)], ids=["few", "many"]
)
def test_changed_pickles_are_evaluated_or_refused(count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickles = [mapping(tensor()), *HOSTILE.values()]
    for place, pickled in enumerate(each for each in pickles if 0 < len(each) < 2000):
        for data in mutations(pickled, count // len(pickles), place):
            try:
                evaluate(data)
            except RefusedPickleError:
                continue
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02" + b"}" * 100_000,
        b"\x80\x02" + b"]r\xff\xff\xff\x7f" * 10_000 + b".",
        b"\x80\x02)" + b"q\x00h\x00\x86" * 20_000 + b".",
    ],
    ids=["many dicts", "large numbers in the memo", "tuples of themselves"],
)
def test_memory_is_that_of_the_pickle(pickled):
    tracemalloc.start()
    try:
        evaluate(pickled)
    except RefusedPickleError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 150 * len(pickled)


def test_a_huge_hole_is_not_read(tmp_path):
    path = write_file(tmp_path / "a", {"a": A, "b": B})
    with path.open("r+b") as file:
        file.truncate(1 << 42)
    with pytest.raises(CheckpointError, match="its tensors end at byte"):
        read_safetensors(path)


@pytest.mark.parametrize("kind", ["sharded safetensors", "sharded bin"])
def test_a_directory_with_changed_files_is_opened_or_refused(kind, tmp_path):
    whole = write("qwen2", kind, "bfloat16", tmp_path / "whole")
    assert open_model(whole)
    names, rng = sorted(path.name for path in whole.iterdir()), np.random.default_rng(0)
    refused = 0
    for place in range(60):
        directory = shutil.copytree(whole, tmp_path / str(place))
        path = directory / names[place % len(names)]
        data = path.read_bytes()
        changes = list(mutations(data[:3000], 1, place))
        path.write_bytes(changes[0] + data[3000:] if place % 3 else data[: rng.integers(len(data))])
        try:
            open_model(directory)
        except (CheckpointError, ConfigError):
            refused += 1
    assert refused > 30
