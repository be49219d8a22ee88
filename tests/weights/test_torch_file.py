"""Files of torch.save: tensors as torch has them, and pickles that do anything else are refused."""

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_models import libraries

from optimus_jax.errors import CheckpointError
from optimus_jax.weights.torch_file import read_torch_file
from optimus_jax.weights.torch_pickle import RefusedPickleError, evaluate

FLOATS = b"\x00\x00\x80\x3f" * 6
"""The bytes of storage 0: six ones."""


def text(value: str) -> bytes:
    """The instruction for a text."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def integer(value: int) -> bytes:
    """The instruction for an integer."""
    data = value.to_bytes(16, "little", signed=True)
    return b"\x8a\x10" + data


def storage(key: str = "0", size: int = 6, name: str = "torch\nFloatStorage") -> bytes:
    """The instructions for a storage."""
    return (
        b"("
        + text("storage")
        + b"c"
        + name.encode()
        + b"\n"
        + text(key)
        + text("cpu")
        + (integer(size) + b"tQ")
    )


def tensor(
    offset: int = 0,
    shape: tuple[int, ...] = (2, 3),
    strides: tuple[int, ...] = (3, 1),
    of: bytes | None = None,
) -> bytes:
    """The instructions for a tensor."""
    sizes, steps = (b"(" + b"".join(map(integer, each)) + b"t" for each in (shape, strides))
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + (storage() if of is None else of)
        + (integer(offset) + sizes + steps + b"\x89}tR")
    )


def mapping(value: bytes, key: bytes | None = None) -> bytes:
    """The pickle of a dict with one value."""
    return b"\x80\x02}" + (text("a") if key is None else key) + value + b"s."


def write_zip(path: Path, pickled: bytes, **members: bytes) -> Path:
    """Write the archive of a pickle, with one storage."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {"data.pkl": pickled, "data/0": FLOATS, **members}.items():
            archive.writestr(f"archive/{name}", data)
    return path


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_tensors_are_those_of_torch(is_zip, tmp_path):
    torch, _ = libraries()
    whole = torch.arange(60.0).reshape(5, 12)
    tensors = {
        "whole": whole,
        "rows": whole[1:3],
        "columns": whole[:, 2:5],
        "steps": whole[::2, ::3],
        "transposed": whole.T,
        "permuted": whole.reshape(5, 3, 4).permute(2, 0, 1),
        "one row": whole[:1].T,
        "scalar": torch.tensor(-10000.0),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        **{
            str(dtype): torch.ones(3, 2).to(dtype)
            for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32)
        },
        **{
            str(dtype): torch.ones(3, 2).to(dtype)
            for dtype in (torch.int16, torch.int8, torch.uint8, torch.bool)
        },
    }
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=is_zip)
    found = read_torch_file(path)
    assert found.keys() == tensors.keys()
    for name, wanted in tensors.items():
        assert found[name].dtype.name == str(wanted.dtype).removeprefix("torch.")
        np.testing.assert_array_equal(
            np.asarray(found[name], np.float64), wanted.detach().to(torch.float64).numpy()
        )


def test_attributes_of_a_state_dict_are_dropped(tmp_path):
    torch, _ = libraries()
    module = torch.nn.Linear(2, 3)
    torch.save(module.state_dict(), tmp_path / "a.bin")
    assert b"_metadata" in (tmp_path / "a.bin").read_bytes()
    assert read_torch_file(tmp_path / "a.bin").keys() == {"weight", "bias"}


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def pickled_call(function: Any, *arguments: Any, protocol: int) -> bytes:
    return pickle.dumps({"a": Call(function, *arguments)}, protocol)


def bomb(times: int) -> bytes:
    """A tuple that holds itself twice over, many times."""
    return b")" + b"q\x00h\x00\x86" * times


HOSTILE = {
    **{
        f"{function.__name__} in protocol {protocol}": pickled_call(
            function, "__import__('pathlib').Path('executed').touch()", protocol=protocol
        )
        for function in (eval, exec, __import__("os").system, __import__)
        for protocol in range(6)
    },
    "getattr": pickled_call(getattr, dict, "__subclasses__", protocol=2),
    "a dotted name": mapping(b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n"),
    "another name of torch": mapping(b"ctorch\nload\n"),
    "another name of collections": mapping(b"ccollections\ndefaultdict\n)R"),
    "os.system by STACK_GLOBAL": mapping(
        text("os") + text("system") + b"\x93" + text("x") + b"\x85R"
    ),
    "a name without an end": b"\x80\x02cos" + b"x" * 1000,
    "a name that is not UTF-8": mapping(b"c\xff\n\xff\n"),
    "INST": mapping(b"(" + text("touch executed") + b"ios\nsystem\n"),
    "OBJ": mapping(b"(ccollections\nOrderedDict\no"),
    "NEWOBJ": mapping(b"ccollections\nOrderedDict\n)\x81"),
    "NEWOBJ_EX": mapping(b"ccollections\nOrderedDict\n)}\x92"),
    "EXT1": mapping(b"\x82\x01"),
    "PERSID": mapping(b"P0\n"),
    "DUP": mapping(b")2\x86"),
    "POP": mapping(b")0"),
    "LONG4 of a gigabyte": mapping(b"\x8b\x00\x00\x00\x40"),
    "LONG1 of 255 bytes": mapping(b"\x8a\xff" + b"\xff" * 255),
    "a text of four gigabytes": mapping(b"X\xff\xff\xff\xff"),
    "a text of 2**63 bytes": mapping(b"\x8d" + b"\xff" * 7 + b"\x7f"),
    "bytes": mapping(b"B\x01\x00\x00\x00x"),
    "decimal text": mapping(b"I" + b"9" * 100_000 + b"\n"),
    "BUILD of a class": mapping(b"ccollections\nOrderedDict\n}" + text("fromkeys") + b"Nsb"),
    "BUILD of a tensor": mapping(tensor() + b"}" + text("offset") + integer(9) + b"sb"),
    "BUILD with a tuple": mapping(b"}N}\x86b"),
    "a call of a tensor": mapping(tensor() + b")R"),
    "a call of a call's result": mapping(b"ccollections\nOrderedDict\n)R)R"),
    "OrderedDict of pairs": mapping(b"ccollections\nOrderedDict\n]" + text("x") + b"N\x86a\x85R"),
    "a tensor of nothing": mapping(b"ctorch._utils\n_rebuild_tensor_v2\n)R"),
    "a tensor of texts": mapping(b"ctorch._utils\n_rebuild_tensor_v2\n(" + text("a") * 6 + b"tR"),
    "a tensor with metadata": mapping(
        tensor().removesuffix(b"tR") + b"}" + text("conj") + b"\x88stR"
    ),
    "a call with many arguments": mapping(
        b"(" + b"N" * 50_000 + b"tq\x00ccollections\nOrderedDict\nq\x01" + b"h\x01h\x00R" * 10_000
    ),
    "a tensor with many dimensions": mapping(tensor(0, (1,) * 50, (1,) * 50)),
    "a storage with a negative size": mapping(tensor(of=storage(size=-1))),
    "a quantised storage": mapping(tensor(of=storage(name="torch\nQInt8Storage"))),
    "a complex storage": mapping(tensor(of=storage(name="torch\nComplexFloatStorage"))),
    "a storage of a function": mapping(tensor(of=storage(name="collections\nOrderedDict"))),
    "a reference to something else": mapping(text("module") + b"\x85Q"),
    "a key that is a bomb": mapping(b"N", bomb(60)),
    "a key that is a dict": mapping(b"N", b"}"),
    "a key without a value": b"\x80\x02}(" + text("a") + b"u.",
    "nothing": b"",
    "a stop without a value": b"\x80\x02.",
    "no stop": mapping(tensor())[:-1],
    "values left over": b"\x80\x02}}.",
    "a mark as a value": b"\x80\x02(.",
    "a group that has not begun": b"\x80\x02}u.",
    "a value that was not stored": b"\x80\x02h\x07.",
    "append to a dict": b"\x80\x02}Na.",
    "item of a list": b"\x80\x02]" + text("a") + b"Ns.",
}
"""Pickles that are refused, and what they do."""


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_pickles_are_refused_and_nothing_is_executed(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RefusedPickleError, match=r"at byte \d+ of a pickle"):
        evaluate(HOSTILE[what])
    path = write_zip(tmp_path / "a.bin", HOSTILE[what])
    with pytest.raises(CheckpointError) as caught:
        read_torch_file(path)
    assert "given:" in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert list(tmp_path.iterdir()) == [path]


def test_these_pickles_would_execute_something(tmp_path, monkeypatch):
    """What the test above sees does not happen would happen."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(HOSTILE["exec in protocol 2"])
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "pickled",
    [
        mapping(bomb(60)),
        mapping(b")" + b"\x85" * 100_000),
        mapping(b"]" * 100_000 + b"a" * 99_999),
        mapping(b"(" * 1000 + b"t" * 1000),
        mapping(b"}r\xff\xff\xff\xff"),
        mapping(b"\x95" + b"\xff" * 8 + b"N"),
        mapping(b"N"),
        mapping(b"ctorch\nFloatStorage\n"),
        mapping(storage()),
        b"\x80\x02].",
        tensor() + b".",
    ],
)
def test_values_that_are_no_tensors_are_refused(pickled, tmp_path):
    with pytest.raises(CheckpointError, match=r"not a (tensor|mapping)"):
        read_torch_file(write_zip(tmp_path / "a.bin", pickled))


@pytest.mark.parametrize(
    "made",
    [
        tensor(offset=1),
        tensor(offset=-1),
        tensor(offset=1 << 100),
        tensor(shape=(3, 3)),
        tensor(shape=(1 << 62, 1 << 62)),
        tensor(shape=(-2, -3)),
        tensor(shape=(2,)),
        tensor(strides=(1 << 62, 1)),
        tensor(strides=(-3, 1)),
        tensor(strides=(0, 1)),
        tensor(strides=(0, 0), shape=(1 << 40, 1 << 40)),
        tensor(strides=(1, 1), shape=(3, 3)),
        tensor(of=storage("1")),
        tensor(of=storage("../data.pkl")),
        tensor(of=storage(size=7)),
        tensor(of=storage(size=5)),
        tensor(of=storage(size=1 << 62)),
        tensor(of=storage(name="torch\nDoubleStorage")),
    ],
)
def test_tensors_beyond_their_storage_are_refused(made, tmp_path):
    good = read_torch_file(write_zip(tmp_path / "a.bin", mapping(tensor())))
    np.testing.assert_array_equal(np.asarray(good["a"]), np.ones((2, 3), np.float32))
    with pytest.raises(CheckpointError, match=r"tensor 'a'"):
        read_torch_file(write_zip(tmp_path / "a.bin", mapping(made)))


def archive(**changes: Any) -> bytes:
    """A zip archive, whose entries in the directory are changed after it was written."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, data in (("data.pkl", mapping(tensor())), ("data/0", FLOATS)):
            made.writestr(f"archive/{name}", data)
        for attribute, value in changes.items():
            setattr(made.infolist()[1], attribute, value)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "begins with b''"),
        (b"<html>", "like no file of torch.save"),
        (b"PK\x03\x04", "no whole zip archive"),
        (archive()[:-1], "no whole zip archive"),
        (archive() + b"x" * 70_000, "no whole zip archive"),
        (archive(header_offset=1 << 40), "not where the archive's directory says"),
        (archive(header_offset=0), "not where the archive's directory says"),
        (archive(header_offset=60), "not where the archive's directory says"),
        (archive(file_size=1 << 50, compress_size=1 << 50), "not where the archive's directory"),
        (archive(file_size=1 << 50), "not where the archive's directory says"),
        (archive(file_size=5), "two sizes"),
        (archive(compress_type=zipfile.ZIP_DEFLATED), "compressed or encrypted"),
        (archive(flag_bits=1), "compressed or encrypted"),
        (archive(filename="archive/data.pkl"), "two members are called"),
        (archive(filename="other/data.pkl"), r"2 members \*/data.pkl"),
        (archive(filename="../data/0"), "for which the file has no bytes"),
        (archive(filename="/data/0"), "for which the file has no bytes"),
    ],
)
def test_archives_that_contradict_themselves_are_refused(data, message, tmp_path):
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_torch_file(tmp_path / "a.bin")


def test_a_zip_bomb_is_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.bin", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", bytes(1 << 24))
    with pytest.raises(CheckpointError, match="compressed"):
        read_torch_file(tmp_path / "a.bin")


def test_big_endian_files_are_refused(tmp_path):
    path = write_zip(tmp_path / "a.bin", mapping(tensor()), byteorder=b"big")
    with pytest.raises(CheckpointError, match="not little-endian"):
        read_torch_file(path)


def test_a_pickle_of_many_megabytes_is_not_read(tmp_path):
    path = write_zip(tmp_path / "a.bin", mapping(text("x" * (3 << 20))))
    with pytest.raises(CheckpointError, match="at most 2,097,152 are read"):
        read_torch_file(path)


def legacy(*pickles: bytes, count: int = 6) -> bytes:
    """A file from before PyTorch 1.6, with some of its five pickles replaced."""
    parts = [
        pickle.dumps(0x1950A86A20F9469CFC6C, 2),
        pickle.dumps(1001, 2),
        pickle.dumps({"little_endian": True}, 2),
        mapping(tensor()),
        pickle.dumps(["0"], 2),
    ]
    return b"".join((*parts[: 5 - len(pickles)], *pickles)) + struct.pack("<q", count) + FLOATS


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (legacy()[:-1], "is beyond its end"),
        (legacy()[:-25], "it ends before storage"),
        (legacy(count=7), "is beyond its end"),
        (legacy(count=-1), "is beyond its end"),
        (legacy(count=1 << 61), "is beyond its end"),
        (legacy(count=5), "in a storage of 6 elements"),
        (legacy(pickle.dumps([], 2)), "for which the file has no bytes"),
        (legacy(pickle.dumps(["0", "0"], 2)), "is listed twice"),
        (legacy(pickle.dumps(["1"], 2)), "belongs to no tensor"),
        (legacy(pickle.dumps([1], 2)), "not one of texts"),
        (legacy(b"\x80\x02].", pickle.dumps([], 2)), "it holds a list"),
        (legacy(pickle.dumps({}, 2), mapping(tensor()), pickle.dumps(["0"], 2)), "little-endian"),
        (legacy(HOSTILE["exec in protocol 2"], pickle.dumps(["0"], 2)), "exec, which is not"),
        (b"\x80\x02\x8a\x0a", "10 bytes are wanted"),
        (legacy().replace(b"\x6c\xfc", b"\x6d\xfc", 1), "magic number"),
    ],
)
def test_damaged_legacy_files_are_refused(data, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.bin").write_bytes(legacy())
    np.testing.assert_array_equal(np.asarray(read_torch_file(tmp_path / "a.bin")["a"]), 1)
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_torch_file(tmp_path / "a.bin")
    assert not (tmp_path / "executed").exists()
