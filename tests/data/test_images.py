"""Images of folders and tables, and the examples that are made of them."""

import gzip
import io
import json
import shutil
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from optimus_jax.config import DataConfig
from optimus_jax.config.model import CLASS_TOKEN, PATCH_TOKEN
from optimus_jax.config.presets import model_preset
from optimus_jax.data import encoded_files
from optimus_jax.data.dataset import load_data
from optimus_jax.data.encoded_files import FileRange, ParquetCell
from optimus_jax.data.images import StoredImage, decoded, patches_of, scaling_text
from optimus_jax.errors import DataError

MODEL = model_preset("vit-nano")
pillow = pytest.importorskip("PIL.Image")


def pixels_of(number):
    """An image of one channel, different for each number."""
    return np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)


def encoded(number, kind="PNG"):
    data = io.BytesIO()
    pillow.fromarray(pixels_of(number)).save(data, kind)
    return data.getvalue()


@pytest.fixture
def folder(tmp_path):
    for label, numbers in (("cat", (0, 1, 2)), ("dog", (3, 4))):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in numbers:
            (tmp_path / "images" / label / f"{number}.png").write_bytes(encoded(number))
    (tmp_path / "images" / "README.txt").write_text("not an image")
    return tmp_path / "images"


def load(*sources, **more):
    arguments = {name: more.pop(name) for name in ("labels", "kind") if name in more}
    return load_data(
        DataConfig(**{"sources": tuple(map(str, sources)), "eval_fraction": 0.0, **more}),
        seq_len=MODEL.max_length,
        vocab_size=MODEL.vocab_size,
        model_name=MODEL.name,
        values_for=MODEL,
        **{"kind": "images", **arguments},
    )


def cut(data, *examples):
    return data.train.cut_examples(
        np.array(examples), seq_len=MODEL.max_length, respect_documents=True
    )


def test_an_example_is_the_class_and_the_patches_of_an_image(folder):
    data = load(folder)
    assert data.labels == ("cat", "dog")
    assert data.train.count_examples(MODEL.max_length) == 5
    batch = cut(data, 0, 4)
    assert batch["tokens"][0].tolist() == [CLASS_TOKEN, *[PATCH_TOKEN] * 16]
    assert batch["targets"][:, 0].tolist() == [0, 1]
    assert batch["loss_mask"].sum(1).tolist() == [1, 1]
    for row, number in enumerate((0, 4)):
        pixels = pixels_of(number)
        assert not batch["patches"][row, 0].any()
        for patch in range(16):
            top, left = 2 * (patch // 4), 2 * (patch % 4)
            expected = pixels[top : top + 2, left : left + 2].reshape(-1)
            np.testing.assert_array_equal(batch["patches"][row, 1 + patch], expected)


def test_patches_hold_one_channel_after_another():
    pixels = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4)
    assert patches_of(pixels, 2)[1].tolist() == [2, 3, 6, 7, 18, 19, 22, 23]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", " stream.arrow"])
@pytest.mark.parametrize("is_object", [False, True])
def test_tables_have_a_column_of_images(tmp_path, suffix, is_object):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    values = [encoded(number) for number in range(3)]
    images = [{"bytes": value, "path": None} for value in values] if is_object else values
    table = arrow.table({"image": images, "label": [2, 0, 1]})
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        parquet.write_table(table, path)
    elif suffix == ".arrow":
        feather.write_feather(table, path, compression="uncompressed")
    else:
        with arrow.OSFile(str(path), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as to:
            to.write_table(table)
    data = load(path)
    assert data.labels == ("0", "1", "2")
    assert cut(data, 0, 1, 2)["targets"][:, 0].tolist() == [2, 0, 1]


def test_rows_without_a_label_are_left_out_and_counted(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for labels, kept in (
        ([1.0, None, 0.0], ["1", "0"]),
        (["b", "a", None], ["b", "a"]),
        (["", "b", "a"], ["b", "a"]),
    ):
        table = arrow.table({"image": [encoded(number) for number in range(3)], "label": labels})
        parquet.write_table(table, tmp_path / "a.parquet")
        data = load(tmp_path / "a.parquet")
        assert [image.label for image in data.train.items] == kept
        assert data.notes == ("1 image left out: without a label",)
        assert not load(tmp_path / "a.parquet", kind="unlabelled_images").notes


def test_splits_are_no_labels(folder):
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            shutil.copytree(folder / label, folder.parent / "whole" / split / label)
    with pytest.raises(DataError, match=r"named like splits(.|\n)*give .*whole/train;"):
        load(folder.parent / "whole")
    assert load(folder.parent / "whole" / "train").labels == ("cat", "dog")
    assert len(load(folder.parent / "whole", kind="unlabelled_images").train.items) == 10
    for label, split in (("cat", "train"), ("dog", "test")):
        shutil.copytree(folder / label, folder.parent / "flat" / split)
    assert load(folder.parent / "flat").labels == ("test", "train")


def test_tables_and_tar_files_in_a_folder_are_read(folder, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = arrow.table({"image": [encoded(number) for number in range(2)], "label": ["b", "a"]})
    (tmp_path / "whole" / "more").mkdir(parents=True)
    parquet.write_table(table, tmp_path / "whole" / "0.parquet")
    parquet.write_table(table, tmp_path / "whole" / "more" / "0.parquet")
    with tarfile.open(tmp_path / "whole" / "1.tar", "w") as shard:
        for name, content in {"2.png": encoded(2), "2.cls": b"a"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    data = load(tmp_path / "whole")
    assert [(image.name, image.label) for image in data.train.items] == [
        ("0.parquet, row 1", "b"),
        ("0.parquet, row 2", "a"),
        ("1.tar, 2", "a"),
        ("more/0.parquet, row 1", "b"),
        ("more/0.parquet, row 2", "a"),
    ]
    before = load(folder).train.digest
    shutil.copytree(tmp_path / "whole", folder / "cat" / "whole")
    assert load(folder).train.digest == before, "what a folder has as files is all that is read"


def test_tar_files_have_images_and_their_labels(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as shard:
        for name, content in {
            "train/0.png": encoded(0),
            "train/0.cls": b"dog\n",
            "train/1.cls": b"cat",
            "train/1.png": encoded(1),
            "train/2.png": encoded(2),
            "README": b"no image",
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    data = load(tmp_path / "a.tar")
    assert data.labels == ("cat", "dog")
    assert cut(data, 0, 1)["targets"][:, 0].tolist() == [1, 0]
    assert len(load(tmp_path / "a.tar", kind="unlabelled_images").train.items) == 3
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "c.tar.gz").write_bytes(gzip.compress(whole))
    assert len(load(tmp_path / "c.tar.gz").train.items) == 2
    for damaged in (b"no tar", whole[:600], gzip.compress(whole)[:-100]):
        (tmp_path / "b.tar").write_bytes(damaged)
        with pytest.raises(DataError, match="a tar file of images cannot be read"):
            load(tmp_path / "b.tar")


def test_labels_are_read_while_a_tar_file_is_open(tmp_path, monkeypatch):
    tables_of(tmp_path)
    monkeypatch.setattr(encoded_files, "read", lambda place: pytest.fail("opened once more"))
    monkeypatch.setattr("pathlib.Path.open", lambda *_: pytest.fail("opened once more"))
    items = load(tmp_path / "a.tar").train.items
    assert [image.label for image in items] == list("0123456")


def test_images_of_other_sizes_are_scaled(folder):
    pillow.new("RGB", (30, 11), (200, 200, 200)).save(folder / "cat" / "wide.jpg")
    data = load(folder)
    number = next(n for n, image in enumerate(data.train.items) if "wide" in image.name)
    assert np.abs(cut(data, number)["patches"][0, 1:].astype(int) - 200).max() < 4


@pytest.mark.parametrize("kind", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_those_of_a_white_page(folder, kind):
    if kind == "P":
        image = pillow.new("P", (8, 8), 1)
        image.putpalette([0] * 6)
        image.save(folder / "cat" / "0.png", transparency=1)
    else:
        clear = (255, 0, 0, 0) if kind == "RGBA" else (0, 0)
        pillow.new(kind, (8, 8), clear).save(folder / "cat" / "0.png")
    assert (cut(load(folder), 0)["patches"][0, 1:] == 255).all()


def test_a_long_image_is_cropped_before_it_is_scaled(tmp_path):
    """All of it would have 8 x 8,000,000 pixels at the model's size."""
    model = replace(MODEL, resize=8, keep_aspect=True)
    pillow.new("L", (1_000_000, 1), 7).save(tmp_path / "long.png")
    assert (decoded(StoredImage("long.png", tmp_path / "long.png", None), model) == 7).all()
    assert "8 pixels of the shorter side (bilinear), of which the middle 8 x 8" in scaling_text(
        model
    )


def test_files_of_other_kinds_are_counted(folder, tmp_path):
    for name in ("a.gif", "b.gif", "more.parquet", "c"):
        (folder / "cat" / name).write_bytes(b"")
    [note] = load(folder).notes
    assert note.startswith(f"5 files in {folder} left out, where .png, ")
    assert note.endswith(": 1 without a suffix, 2 .gif, 1 .parquet, 1 .txt")
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "tables").mkdir()
    table = arrow.table({"image": [encoded(number) for number in range(2)], "label": ["b", "a"]})
    parquet.write_table(table, tmp_path / "tables" / "0.parquet")
    assert not load(tmp_path / "tables").notes
    (tmp_path / "tables" / "README.md").write_text("no table")
    [note] = load(tmp_path / "tables").notes
    assert note.endswith("where .parquet, .arrow, .feather, .tar, .tar.gz, .tgz are read: 1 .md")


def test_of_a_saved_data_set_its_shards_are_read_and_one_split(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"image": [encoded(number) for number in range(2)], "label": [-1, 1]})
    more = arrow.table({"image": [encoded(2)], "label": [0]})
    for split in ("test", "train"):
        (tmp_path / split).mkdir()
        for name in ("0.arrow", "1.arrow", "cache-1.arrow"):
            rows = more if name == "1.arrow" else table
            with (
                arrow.OSFile(str(tmp_path / split / name), "wb") as sink,
                arrow.ipc.new_stream(sink, rows.schema) as stream,
            ):
                stream.write_table(rows)
        files = [{"filename": "0.arrow"}, {"filename": "1.arrow"}]
        (tmp_path / split / "state.json").write_text(json.dumps({"_data_files": files}))
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match=r"(?s)several splits.*name one to train on: .*/train"):
        load(tmp_path)
    data = load(tmp_path / "train")
    assert [image.label for image in data.train.items] == ["1", "0"]
    assert "1 image left out: without a label" in data.notes


def tables_of(path):
    """Tables of the same images, in files of each kind."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    images = [{"bytes": encoded(number), "path": None} for number in range(7)]
    table = arrow.table({"image": images, "label": [0, 1, 2, 3, 4, 5, 6]})
    parquet.write_table(table, path / "a.parquet", row_group_size=3)
    feather.write_feather(table, path / "plain.arrow", compression="uncompressed")
    feather.write_feather(table, path / "packed.feather", compression="lz4")
    with (
        arrow.OSFile(str(path / "stream.arrow"), "wb") as sink,
        arrow.ipc.new_stream(sink, table.schema) as to,
    ):
        to.write_table(table, max_chunksize=2)
    with tarfile.open(path / "a.tar", "w") as shard:
        for number in range(7):
            for part, content in (("png", encoded(number)), ("cls", b"%d" % number)):
                member = tarfile.TarInfo(f"{number}.{part}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    (path / "packed.tar").write_bytes(gzip.compress((path / "a.tar").read_bytes()))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.parquet", ParquetCell),
        ("plain.arrow", FileRange),
        ("stream.arrow", FileRange),
        ("packed.feather", bytes),
        ("a.tar", FileRange),
        ("packed.tar", bytes),
    ],
)
def test_bytes_stay_in_files_until_they_are_asked_for(tmp_path, name, kind, monkeypatch):
    monkeypatch.setattr("optimus_jax.data.encoded_files.CACHE_BYTES", 1)
    tables_of(tmp_path)
    items = load(tmp_path / name).train.items
    assert {type(image.place) for image in items} == {kind}
    assert [image.label for image in items] == list("0123456")
    numbers = [6, 0, 3, 5, 1, 4, 2] * 3  # of several row groups, and in several threads
    batch = cut(load(tmp_path / name), *numbers)
    for row, number in enumerate(numbers):
        expected = patches_of(pixels_of(number)[None], 2)
        np.testing.assert_array_equal(batch["patches"][row, 1:], expected)


def test_row_groups_are_cached_until_there_are_too_many(tmp_path, monkeypatch):
    tables_of(tmp_path)
    asked = []
    monkeypatch.setattr(encoded_files, "_ROW_GROUPS", encoded_files._RowGroups())
    read_group = encoded_files._read_row_group
    monkeypatch.setattr(
        encoded_files,
        "_read_row_group",
        lambda wanted: (asked.append(wanted.number), read_group(wanted))[1],
    )
    places = [image.place for image in load(tmp_path / "a.parquet").train.items]
    for number in (0, 3, 1, 4, 6):
        assert encoded_files.read(places[number]) == encoded(number)
    assert asked == [0, 1, 2]
    # Two of the three fit.
    cached = encoded_files._ROW_GROUPS._cached.values()
    two = sum(sorted(values.nbytes for values in cached)[-2:])
    monkeypatch.setattr(encoded_files, "CACHE_BYTES", two)
    monkeypatch.setattr(encoded_files, "_ROW_GROUPS", encoded_files._RowGroups())
    asked.clear()
    for number in (0, 3, 1, 6, 0, 3):
        encoded_files.read(places[number])
    assert asked == [0, 1, 2, 1], "the one that was used longest ago is read again"


def test_row_groups_are_decoded_while_there_is_room(tmp_path, monkeypatch):
    tables_of(tmp_path)
    places = [image.place for image in load(tmp_path / "a.parquet").train.items]
    taken = []

    class Budget(encoded_files.ByteBudget):
        def taken(self, num_bytes):
            taken.append(num_bytes)
            return super().taken(num_bytes)

    monkeypatch.setattr(encoded_files, "_DECODED", Budget(1))
    monkeypatch.setattr(encoded_files, "_ROW_GROUPS", encoded_files._RowGroups())
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(encoded_files.read, places)] == [encoded(number) for number in range(7)]
    assert len(taken) == 3
    assert min(taken) > len(encoded(6))


@pytest.mark.parametrize(("size", "at_once"), [(4, 2), (9, 1)])
def test_a_budget_bounds_what_threads_use_at_once(size, at_once):
    budget, under_way, found = encoded_files.ByteBudget(8), [], []
    with ExitStack() as stack:  # so many have room
        for _ in range(at_once):
            stack.enter_context(budget.taken(size))
    begin = threading.Barrier(6)

    def use(size):
        begin.wait()
        with budget.taken(size):
            under_way.append(size)
            found.append(len(under_way))
            time.sleep(0.01)
            under_way.pop()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(use, [size] * 6))
    assert len(found) == 6
    assert max(found) <= at_once


def test_large_row_groups_that_cannot_be_cached_are_told(tmp_path, monkeypatch):
    tables_of(tmp_path)
    assert not load(tmp_path / "a.parquet").notes
    monkeypatch.setattr(encoded_files, "CACHE_BYTES", 1)
    assert not load(tmp_path / "a.parquet").notes, "they are small"
    monkeypatch.setattr(encoded_files, "LARGE_BYTES", 1)
    [note] = load(tmp_path / "a.parquet").notes
    assert "3 row groups" in note
    assert "row_group_size=100" in note
    assert not load(tmp_path / "a.tar").notes


@pytest.mark.parametrize("name", ["a.parquet", "a.tar"])
def test_a_file_that_has_changed_is_named(tmp_path, name):
    tables_of(tmp_path)
    data = load(tmp_path / name)
    cut(data, 0)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot be read: a\.(parquet, row 7|tar, 6)\n"):
        cut(data, 6)


def test_pixels_of_16_bits_are_scaled_to_8(folder):
    deep = pixels_of(0).astype(np.uint16) << 8
    pillow.fromarray(deep).save(folder / "cat" / "0.png")
    np.testing.assert_array_equal(
        cut(load(folder), 0)["patches"][0, 1:], patches_of(pixels_of(0)[None], 2)
    )


def test_held_out_images_are_of_all_folders(folder):
    for number in range(10, 40):
        (folder / "dog" / f"{number}.png").write_bytes(encoded(number))
        (folder / "cat" / f"{number}.png").write_bytes(encoded(number))
    for images in (load(folder, eval_fraction=0.5).held_out, load(folder).train.mixed()):
        assert {image.label for image in images.items[:8]} == {"cat", "dog"}


def test_a_damaged_image_is_named(folder):
    (folder / "cat" / "0.png").write_bytes(encoded(0)[:40])
    data = load(folder)
    with pytest.raises(DataError, match=r"cannot be read: cat/0\.png"):
        cut(data, 0)


def test_too_large_an_image_is_refused(folder, monkeypatch):
    data = load(folder)
    monkeypatch.setattr("optimus_jax.data.images.MOST_PIXELS", 63)
    with pytest.raises(DataError, match=r"8 x 8 pixels, 63 at most"):
        cut(data, 0)
    monkeypatch.setattr(pillow, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(DataError, match="DecompressionBombError"):
        cut(data, 0)


def test_held_out_images_depend_on_their_names_alone(folder):
    for number in range(10, 40):
        (folder / "dog" / f"{number}.png").write_bytes(encoded(number))
    data = load(folder, eval_fraction=0.4)
    held_out = {image.name for image in data.held_out.items}
    assert 5 < len(held_out) < 25
    assert held_out.isdisjoint(image.name for image in data.train.items)
    for number in range(40, 50):
        (folder / "cat" / f"{number}.png").write_bytes(encoded(number))
    again = {image.name for image in load(folder, eval_fraction=0.4).held_out.items}
    assert {name for name in again if int(name[4:-4]) < 40} == held_out


def test_images_without_labels_are_read_from_any_folder(folder, tmp_path):
    (tmp_path / "images" / "5.png").write_bytes(encoded(5))
    data = load(folder, kind="unlabelled_images")
    assert (data.labels, len(data.train.items)) == ((), 6)
    assert "6 images, scaled to 8 x 8 pixels (bilinear);" in data.description
    batch = cut(data, 0)
    assert batch["loss_mask"].sum() == 1, "of the class: which patches are hidden is drawn later"
    assert (batch["targets"] == -1).all()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no images\n"):
        load(tmp_path / "empty", kind="unlabelled_images")
    with pytest.raises(DataError, match=r"there is no .*/nowhere.*\n"):
        load(tmp_path / "nowhere" / "*.tar", kind="unlabelled_images")


def test_folders_without_labels_are_refused(tmp_path):
    (tmp_path / "0.png").write_bytes(encoded(0))
    with pytest.raises(DataError, match="no images with labels"):
        load(tmp_path)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(encoded(1))
    with pytest.raises(DataError, match="the same label"):
        load(tmp_path)


def test_labels_that_the_model_does_not_have_are_refused(folder):
    with pytest.raises(DataError, match="labels that the model does not know"):
        load(folder, labels=("cat", "fish"))
    assert load(folder, labels=("dog", "cat", "fish")).labels == ("dog", "cat", "fish")
