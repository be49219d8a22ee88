"""Read and verify one checkpoint, the directory that `checkpoints.py` describes."""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from optimus_jax.checkpoint.errors import (
    DamagedError,
    event_loops_that_finish,
    in_one_line,
    on_every_process,
)
from optimus_jax.errors import CheckpointError, explain
from optimus_jax.reshard.checksum import checksums, named_leaves
from optimus_jax.system.json_input import JSONInputError, parse_json

STATE = "state"
MANIFEST = "manifest"
STEP_METADATA = "_CHECKPOINT_METADATA"
ORBAX_JSON = (STEP_METADATA, f"{STATE}/_METADATA", f"{STATE}/_sharding")
"""Orbax's metadata files of a checkpoint; each is a JSON object."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint's step and metadata."""

    step: int
    metadata: dict[str, Any]
    """The JSON values given to `save`."""


@dataclass(frozen=True, kw_only=True)
class Restored(Saved):
    """A checkpoint with its state on devices."""

    state: Any
    damaged: tuple[int, ...] = ()
    """Steps of newer, damaged checkpoints that were skipped."""


def read_checkpoint(
    path: Path,
    abstract_state: Any,
    paddable: Callable[[str], bool],
    partial: bool,
    check_metadata: Callable[[Mapping[str, Any]], object],
) -> Restored:
    """Restore the checkpoint in the directory `path`, which is named after its step.

    Every process must call this. Other arguments are those of `Checkpoints.restore`.

    Raises:
      DamagedError, UnreachableError: on every process, if on one.
      CheckpointError: it is of another model.
    """
    manifest = read_manifest(path)
    check_metadata(manifest["metadata"])
    asked = named_leaves(abstract_state)
    saved = {
        name: leaf for name, leaf in manifest["leaves"].items() if name in asked or not partial
    }
    check_same_model(int(path.name), saved, asked, paddable)
    restore_args = {
        name: ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, strict=not paddable(name)
        )
        for name, leaf in asked.items()
    }
    with event_loops_that_finish():
        state = on_every_process(
            lambda: ocp.PyTreeCheckpointHandler().restore(
                epath.Path(path) / STATE,
                args=ocp.args.PyTreeRestore(
                    asked, restore_args=restore_args, partial_restore=partial
                ),
            ),
            path,
        )

    def check() -> None:
        wrong = [
            name for name, value in checksums(state).items() if value != saved[name]["checksum"]
        ]
        if wrong:
            raise DamagedError(f"the checksum of {listed(wrong)} is not what was saved")

    on_every_process(check, path)
    leaves = [state[name] for name in asked]
    return Restored(
        step=int(path.name),
        metadata=manifest["metadata"],
        state=jax.tree.unflatten(jax.tree.structure(abstract_state), leaves),
    )


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint in the directory `path`. Raises as `read_checkpoint` does."""
    return on_every_process(lambda: own_manifest(path), path)


def own_manifest(path: Path) -> dict[str, Any]:
    """`read_manifest` for one process alone; raises various errors."""
    stored = ocp.JsonCheckpointHandler().restore(epath.Path(path) / MANIFEST)
    if stored["crc32"] != checksum_of(stored["content"]):
        raise ValueError("the manifest is not what was saved")
    check_descriptions(path)
    return stored["content"]


def check_descriptions(path: Path) -> None:
    """Raise DamagedError or OSError unless Orbax's metadata files are valid.

    Orbax ignores some damage there when it restores, but then cannot save in the same
    directory.
    """
    for name in ORBAX_JSON:
        file = path / name
        if not os.path.lexists(file):
            continue  # other versions of Orbax write other files
        try:
            is_object = isinstance(parse_json(file.read_bytes(), finite=False), dict)
        except JSONInputError as error:
            raise DamagedError(f"{name} is not JSON: {error}") from error
        if not is_object:
            raise DamagedError(f"{name} is not a JSON object")
        if name == STEP_METADATA:
            try:
                ocp.metadata.get_step_metadata(epath.Path(path))
            except (ValueError, TypeError) as error:
                raise DamagedError(
                    f"{name} does not describe a checkpoint: {in_one_line(error)}"
                ) from error


def check_same_model(
    step: int, saved: Mapping[str, Any], asked: Mapping[str, Any], paddable: Callable[[str], bool]
) -> None:
    """Raise CheckpointError if the leaves of a checkpoint are not the requested ones.

    Names the first leaf that is missing on either side or differs in shape or dtype.
    """
    for name in [*asked, *saved]:
        have = (saved[name]["dtype"], tuple(saved[name]["shape"])) if name in saved else None
        want = (asked[name].dtype.name, tuple(asked[name].shape)) if name in asked else None
        padded = (
            have and want and paddable(name) and have[0] == want[0] and have[1][1:] == want[1][1:]
        )
        if have != want and not padded:
            saved_as, asked_as = (
                f"{leaf[0]}{list(leaf[1])}" if leaf else "no such leaf" for leaf in (have, want)
            )
            raise CheckpointError(
                explain(
                    f"the checkpoint of step {step} is of another model: leaf {name!r} differs",
                    given=f"saved {saved_as}, requested {asked_as}",
                    do=(
                        "use the model, optimizer and precision.moments of the run that saved it,"
                        " or start a new run"
                    ),
                )
            )


def checksum_of(content: Any) -> int:
    """CRC-32 of a JSON value."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def listed(items: Iterable[object]) -> str:
    """Items for an error message."""
    return ", ".join(map(str, items)) or "none"
