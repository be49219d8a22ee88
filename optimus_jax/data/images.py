"""Images, with or without labels, and the examples that are made of them.

A source is a folder with a folder of images for each label, a Parquet or Arrow file with a column
of images (bytes, or Hugging Face's objects with `bytes`) and one of labels, a tar file with
WebDataset's names (`0001.jpg`, `0001.cls`), or a folder of such files. An example is an image: a
token for the class, at which the label counts, and one for each patch, row by row. An image is
scaled to the model's size whatever its own shape is, unless the model says how it is cropped.
Transparent pixels are those of a white page behind them. Without labels any folder will do; which
tokens count then, those that are hidden say (training/patch_masking.py).
"""

import struct
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from optimus_jax.config import ModelConfig
from optimus_jax.config.model import CLASS_TOKEN, PATCH_TOKEN
from optimus_jax.data.batch import HostBatch
from optimus_jax.data.encoded_files import EncodedFile, opened
from optimus_jax.data.labelled import check_known, names_of_labels
from optimus_jax.data.named_files import (
    SHARDS,
    TABLES,
    FileExamples,
    NamedFile,
    files_of,
    in_threads,
    is_shard,
    rows_of_table,
    samples_in_shard,
)
from optimus_jax.errors import DataError, counted, explain

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
"""Of images in folders."""
LABEL_PART = "cls"
"""Part of a sample in a tar file that has its label."""
SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test"})
"""Names of folders that divide data into parts, and are not labels."""
MOST_PIXELS = 1 << 26
"""Largest image that is decoded: a small file can hold a very large one."""


class StoredImage(NamedTuple):
    """An encoded image."""

    name: str
    """Where it is, for messages and for its hash: a path within its folder, or a row of a file."""
    place: EncodedFile
    label: str | None
    """None: it has none, or none is wanted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Images(FileExamples[StoredImage]):
    """Images to cut examples from."""

    what = "images"
    labels: tuple[str, ...]
    """Names of the labels, in order; empty: images have none."""

    @staticmethod
    def file_of(item: StoredImage) -> NamedFile:
        return NamedFile(item.name, item.label or "", item.place)

    def cut_examples(
        self, examples: np.ndarray, *, seq_len: int, respect_documents: bool
    ) -> HostBatch:
        """The images numbered `examples`; patches are uint8, those of the class 0. The token of the
        class counts, also if it has no label.
        """
        shape = (len(examples), seq_len)
        tokens = np.full(shape, PATCH_TOKEN, np.int32)
        targets, loss_mask = np.full(shape, -1, np.int32), np.zeros(shape, bool)
        patches = np.zeros((*shape, self.model.patch_values), np.uint8)
        for row, example in enumerate(examples.tolist()):
            label, loss_mask[row, 0] = self.items[example].label, True
            if label is not None:
                targets[row, 0] = self.labels.index(label)
        patches[:, 1:] = in_threads(self._patches, examples.tolist())
        tokens[:, 0] = CLASS_TOKEN
        return {
            "tokens": tokens,
            "targets": targets,
            "positions": np.broadcast_to(np.arange(seq_len, dtype=np.int32), shape).copy(),
            "segments": np.zeros(shape, np.int32),
            "loss_mask": loss_mask,
            "patches": patches,
        }

    def _patches(self, example: int) -> np.ndarray:
        return patches_of(decoded(self.items[example], self.model), self.model.patch_size)


def decoded(image: StoredImage, model: ModelConfig) -> np.ndarray:
    """The pixels of an image, scaled to the model's size and cropped: uint8 [C, H, W].

    Raises:
      DataError: it is damaged or too large.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(opened(image.place)) as found:
            if found.width * found.height > MOST_PIXELS:
                raise ValueError(f"{found.width} x {found.height} pixels, {MOST_PIXELS:,} at most")
            upright = ImageOps.exif_transpose(found)
            if upright.mode.startswith("I"):  # greys of 16 bits, which Pillow would cut off
                upright = Image.fromarray(
                    np.clip(np.asarray(upright) >> 8, 0, 255).astype(np.uint8)
                )
            mode = {1: "L", 3: "RGB", 4: "RGBA"}[model.num_channels]
            if mode != "RGBA" and ("A" in upright.getbands() or "transparency" in upright.info):
                layer = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
            size = (model.image_size, model.image_size)
            how, box = Image.Resampling[model.resample.upper()], _box(*upright.size, model)
            pixels = np.asarray(upright.convert(mode).resize(size, how, box))
    except (
        OSError,
        ValueError,
        SyntaxError,  # of broken PNGs
        struct.error,  # of cut Exif data
        Image.DecompressionBombError,  # of still larger images
    ) as error:
        raise DataError(
            explain(
                f"an image cannot be read: {image.name}",
                given=f"{type(error).__name__}: {error}",
                do=f"replace it by a whole one of at most {MOST_PIXELS:,} pixels, or remove it; a"
                " run that was begun with it goes on with --set data.allow_change=true",
            )
        ) from error
    return np.moveaxis(pixels.reshape(*size, model.num_channels), -1, 0)


def _box(width: int, height: int, model: ModelConfig) -> tuple[float, float, float, float]:
    """The part of an image that is scaled to the model's size, in its own pixels: left, top, right
    and bottom. What is outside of it is not scaled, since a long image would need much memory.
    """
    short = min(width, height)
    edges = []
    for side in (width, height):
        scaled = model.resized * side // short if model.keep_aspect else model.resized
        first = (scaled - model.image_size) // 2
        edges.append((first * side / scaled, (first + model.image_size) * side / scaled))
    (left, right), (top, bottom) = edges
    return left, top, right, bottom


def scaling_text(model: ModelConfig) -> str:
    """How images become what a model reads."""
    size, both = model.image_size, f"{model.resized} x {model.resized} pixels"
    to = f"{model.resized} pixels of the shorter side" if model.keep_aspect else both
    is_cropped = model.keep_aspect or model.resized > size
    middle = f", of which the middle {size} x {size} are read" if is_cropped else ""
    return f"scaled to {to} ({model.resample}){middle}"


def patches_of(pixels: np.ndarray, patch_size: int) -> np.ndarray:
    """[C, H, W] -> [patches, C * patch_size^2], patches row by row, each channel by channel."""
    channels, height, width = pixels.shape
    rows, columns = height // patch_size, width // patch_size
    grid = pixels.reshape(channels, rows, patch_size, columns, patch_size)
    return grid.transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)


def read_images(
    sources: Sequence[str],
    model: ModelConfig,
    *,
    image_field: str,
    label_field: str | None,
    labels: tuple[str, ...] = (),
) -> tuple[Images, list[str]]:
    """The images of folders and tables, and sentences about those left out.

    Args:
      image_field, label_field: columns of tables; no label_field: labels are not wanted.
      labels: names of the labels, in order; empty: those that are found.
    Raises:
      DataError: Pillow is missing, a source has no images, or labels that are not among `labels`,
        or that are names of splits.
    """
    check_reads_images(sources, model)
    name = " ".join(sources)
    present, notes = [], []
    for source in sources:
        images, left_out = _checked_images(source, image_field, label_field)
        present += images
        notes += left_out
    if label_field is None:
        return Images(name=name, items=present, labels=(), model=model), notes
    found = [image for image in present if image.label is not None]
    if num_without := len(present) - len(found):
        notes.append(f"{counted(num_without, 'image')} left out: without a label")
    used = {image.label for image in found if image.label is not None}
    if len(labels or used) < 2:
        raise DataError(
            explain(
                "all images have the same label, so there is nothing to learn",
                given=f"{name}: label {', '.join(labels or used)}",
                do="give a folder with a folder for each label",
            )
        )
    labels = labels or names_of_labels(used)
    check_known("images have", used, labels)
    return Images(name=name, items=found, labels=labels, model=model), notes


def check_reads_images(sources: Sequence[str], model: ModelConfig) -> None:
    """Raise DataError if Pillow is missing, or no image has the model's channels."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise DataError(
            explain(
                "images need Pillow, which is not installed",
                given=" ".join(sources),
                do="pip install 'optimus-jax[images]'",
            )
        ) from error
    if model.num_channels not in (1, 3, 4):
        raise DataError(
            explain(
                "images have 1, 3 or 4 channels",
                given=f"model.num_channels={model.num_channels}",
                do="set model.num_channels=3",
            )
        )


def _images_in(
    source: str, files: Sequence[Path], image_field: str, label_field: str | None
) -> Iterator[StoredImage]:
    """The images of the files of a source."""
    for file in files:
        inside = file.relative_to(source).parent
        if file.suffix in TABLES:
            columns = [image_field, *([] if label_field is None else [label_field])]
            for name, data, labels in rows_of_table(file, columns, "images"):
                yield StoredImage(str(inside / name), data, _label_in(*labels))
        elif is_shard(file):
            texts = () if label_field is None else (LABEL_PART,)
            for name, parts, said in samples_in_shard(file, "images", texts=texts):
                data = next((parts[each[1:]] for each in SUFFIXES if each[1:] in parts), None)
                if data is not None:
                    label = said.get(LABEL_PART, b"").decode(errors="replace").strip()
                    yield StoredImage(str(inside / name), data, label or None)
        elif file != Path(source):
            label = None if label_field is None else next(iter(inside.parts), None)
            yield StoredImage(str(inside / file.name), file, label)


def _label_in(value: object = None) -> str | None:
    """The label that a table has; None: it has none, an empty one, or a negative number, which
    stands for none. Integers of a column with missing ones may be floats."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and value < 0:
        return None
    return str(value) or None if isinstance(value, int | str) else None


def _checked_images(
    source: str, image_field: str, label_field: str | None
) -> tuple[list[StoredImage], list[str]]:
    """The images of a source, and sentences about files that are left out.

    Raises DataError if there are none, none with labels if these are wanted, or only labels that
    are names of splits.
    """
    if not Path(source).exists():
        raise DataError(
            explain(
                f"there is no {source}",
                given=source,
                do="give a folder of images, a table or a tar file; patterns are not read",
            )
        )
    of_source, notes = files_of(Path(source), SUFFIXES)
    images = list(_images_in(source, of_source, image_field, label_field))
    labels = {image.label for image in images if image.label is not None}
    if images and (labels or label_field is None):
        _check_no_splits(source, images, labels)
        return images, notes
    files, shards = f"files with {', '.join(SUFFIXES)}", f"{', '.join(SHARDS)} files"
    wanted, given = "images", f"{files}, tables with a column {image_field}, and {shards}"
    do = "a folder of images, or name the column: --set data.image_field=NAME"
    if label_field is not None:
        wanted, do = "images with labels", "a folder with a folder of images for each label"
        given = (
            f"{files} in a folder for each label, tables with columns {image_field} and"
            f" {label_field}, and {shards}"
        )
        do += ", or name the columns: --set data.image_field=NAME --set data.label_field=NAME"
    raise DataError(
        explain(f"{source} holds no {wanted}", given=f"{given}, are read", do=f"give {do}")
    )


def _check_no_splits(source: str, images: Sequence[StoredImage], labels: Set[str]) -> None:
    """Raise DataError if the folders of a source are splits, whose own folders have the labels."""
    is_nested = any(
        isinstance(image.place, Path) and len(Path(image.name).parts) > 2 for image in images
    )
    if is_nested and labels and {label.lower() for label in labels} <= SPLITS:
        training = max(labels, key=lambda label: label.lower().startswith("train"))
        raise DataError(
            explain(
                "the folders of images are named like splits, not like labels",
                given=f"{source} with {', '.join(sorted(labels))}, which have folders of their own",
                do=f"give {Path(source) / training}; data.eval_fraction holds a part of it out",
            )
        )
