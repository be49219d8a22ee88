"""The objects that a run consists of in a store.

    config.json plan.json *.jsonl ...   as in the run's directory, each replaced as a whole
    checkpoints/STEP/...                the files of a checkpoint
    checkpoints/STEP.json               its manifest, written last: it marks the checkpoint complete
    writer.json                         who writes the run (lease.py)

State of live processes stays local: the lock, heartbeats, unfinished files. So do damaged
checkpoints, exports and profiles.
"""

import contextlib
import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from optimus_jax.store.lease import LEASE

CHECKPOINTS = "checkpoints"
CONFIG = "config.json"
EVENTS = "events.jsonl"
_LOCAL = frozenset({"lock", "progress", "damaged", "exports", "profiles", "wandb", CHECKPOINTS})
"""Entries of a run directory that are not mirrored as plain files."""
_UNFINISHED = (".tmp", ".part")
_MANIFEST = re.compile(rf"{CHECKPOINTS}/(\d+)\.json")
_BLOCK_BYTES = 1 << 24

FileIdentity = tuple[int, int]
"""Inode and modification time of a directory: distinguishes it from another of the same name."""


@dataclass(frozen=True, kw_only=True)
class FileChecksum:
    """Size and checksum of a file of a checkpoint."""

    size: int
    """Bytes."""
    crc32: int

    @classmethod
    def of(cls, path: Path) -> "FileChecksum":
        """Read a file and compute its size and checksum."""
        size = crc = 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                size, crc = size + len(block), zlib.crc32(block, crc)
        return cls(size=size, crc32=crc)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a complete checkpoint, by path relative to it."""

    step: int
    files: dict[str, FileChecksum]

    def to_json(self) -> bytes:
        # The key of the JSON is older than the field's name, and stores hold it.
        pieces = {name: asdict(file) for name, file in self.files.items()}
        return json.dumps({"step": self.step, "pieces": pieces}, indent=1).encode()

    @classmethod
    def from_json(cls, content: bytes) -> "Manifest":
        """The inverse of `to_json`. Raises ValueError if `content` is not a manifest."""
        try:
            value = json.loads(content)
            files = {str(name): FileChecksum(**file) for name, file in value["pieces"].items()}
            if not all(map(is_inside, files)):
                raise ValueError("a name leaves the checkpoint")
            return cls(step=int(value["step"]), files=files)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no manifest: {error}") from error


def manifest_name(step: int) -> str:
    """Name of the manifest object, which marks a checkpoint as complete."""
    return f"{CHECKPOINTS}/{step}.json"


def complete_steps(names: Iterable[str]) -> list[int]:
    """Steps of complete checkpoints among a run's objects, oldest first."""
    return sorted(int(match[1]) for name in names if (match := _MANIFEST.fullmatch(name)))


def local_checkpoints(directory: Path) -> dict[int, FileIdentity]:
    """Complete checkpoints of a run directory by step, oldest first.

    A step that was saved again, as after a rollback, has another identity.
    """
    found = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in (directory / CHECKPOINTS).iterdir():
            if path.name.isdecimal():  # Orbax renames a checkpoint when it is complete
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    found[int(path.name)] = status.st_ino, status.st_mtime_ns
    return dict(sorted(found.items()))


def local_steps(directory: Path) -> list[int]:
    """Steps of complete checkpoints in a run directory, oldest first."""
    return list(local_checkpoints(directory))


def files_below(directory: Path) -> dict[str, Path]:
    """Every file under a directory, by relative path."""
    return {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def plain_files(directory: Path) -> dict[str, Path]:
    """The files of a run directory that are mirrored as they are: all but checkpoints."""
    files: dict[str, Path] = {}
    for path in sorted(directory.iterdir()):
        if path.name in _LOCAL or path.name.endswith(_UNFINISHED):
            continue
        if path.is_dir():
            files |= {f"{path.name}/{name}": inner for name, inner in files_below(path).items()}
        elif path.is_file():
            files[path.name] = path
    return {name: path for name, path in files.items() if not name.endswith(_UNFINISHED)}


def is_inside(name: str) -> bool:
    """Whether a path that others have written stays below the directory that it is relative to."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def is_plain(name: str) -> bool:
    """Whether an object is a plain file of a run, which is downloaded with it."""
    return name.partition("/")[0] not in (*_LOCAL, LEASE)


@dataclass(frozen=True, kw_only=True)
class Start:
    """A fresh or resumed start of a run, from events.jsonl."""

    time_s: float
    step: int
    """Steps completed before it."""


def starts(events: bytes) -> list[Start]:
    """All starts of a run, in order, from the content of its events.jsonl."""
    found = []
    for line in events.split(b"\n"):
        try:
            event = json.loads(line)
            if event["event"] in ("start", "resume"):
                found.append(Start(time_s=float(event["time_s"]), step=int(event["step"])))
        except (ValueError, KeyError, TypeError):
            continue
    return found
