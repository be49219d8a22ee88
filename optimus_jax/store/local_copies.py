"""Cached local copies of objects: data, tokenizers, configs.

A copy is cached under its URL and the checksum or time that the store reports, so it is fetched
once, and again when the object changes. It is written to a temporary file and renamed, so partial
copies never appear. A file lock serialises the processes of a host.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from optimus_jax.errors import StoreError, explain
from optimus_jax.store.objects import Objects, StoredObject
from optimus_jax.system.cache import cache_directory
from optimus_jax.system.paths import Url, UserPath, user_path
from optimus_jax.system.resilient_io import print_to_stderr

NUM_TRANSFERS = 8
"""Concurrent transfers."""


def local_file(text: UserPath, *, what: str) -> Path:
    """A local file to read: the path itself, or the cached copy of a URL.

    Args:
      what: name of the flag or setting, for errors.
    Raises:
      PathError: the text is not a valid path.
      StoreError: the object does not exist or cannot be fetched.
    """
    path = user_path(text, what=what)
    return path if isinstance(path, Path) else local_copies(path)[0]


def local_copies(
    url: Url,
    *,
    sidecars: Mapping[str, str] = MappingProxyType({}),
    say: Callable[[str], object] | None = None,
) -> list[Path]:
    """Local copies of the object at a URL, or of all objects that a glob URL matches, in order.

    Args:
      sidecars: suffix of an object's name -> what is appended to the name of an accompanying
        object, which is fetched into the same directory if it exists.
      say: called with a message about what is fetched; None: print it to standard error.
    Raises:
      StoreError: there is no such object, or it cannot be fetched.
    """
    objects = Objects(url)
    groups = [_with_sidecars(objects, each, sidecars) for each in objects.matches()]
    if not groups:
        raise StoreError(
            explain(
                "there is no object of that name, and none matches it",
                given=url,
                do="check it"
                if objects.is_pattern
                else f"check it; for all objects of a folder give a glob such as '{url}/*.jsonl'",
            )
        )
    root = cache_directory() / "data"
    targets = [_targets(root, url, group) for group in groups]
    pairs = [
        pair for group in zip(groups, targets, strict=True) for pair in zip(*group, strict=True)
    ]
    try:
        with _host_lock(root / f"{_digest(str(url))}.lock"):
            wanted = [pair for pair in pairs if pair[0].stamp is None or not pair[1].exists()]
            if wanted:
                num_bytes = sum(each.num_bytes or 0 for each, _ in wanted)
                (say or print_to_stderr)(
                    f"fetching {len(wanted)} of {len(pairs)} object(s), {num_bytes:,} bytes, "
                    f"of {url} into {root}"
                )
                _fetch(objects, wanted, num_bytes)
    except OSError as error:
        raise StoreError(
            explain(
                f"the copy of an object cannot be written: {error.strerror or error}",
                given=f"{url}, into {root}",
                do="free disk space, or set XDG_CACHE_HOME to another directory",
            )
        ) from error
    return [target[0] for target in targets]


def _with_sidecars(
    objects: Objects, each: StoredObject, sidecars: Mapping[str, str]
) -> list[StoredObject]:
    added = [end for suffix, end in sidecars.items() if each.key.endswith(suffix)]
    return [each, *filter(None, (objects.look_up(each.key + end) for end in added))]


def _fetch(objects: Objects, wanted: Sequence[tuple[StoredObject, Path]], num_bytes: int) -> None:
    console = Console(file=sys.stderr)
    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("fetching", total=num_bytes)

        def fetch(each: StoredObject, target: Path) -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f".{secrets.token_hex(8)}.part")
            try:
                objects.get_key(each.key, part)
                size = part.stat().st_size
                if each.num_bytes is not None and size != each.num_bytes:
                    raise StoreError(
                        explain(
                            "an object changed, or its transfer was cut off, while it was fetched",
                            given=f"{each.key}: {size:,} of {each.num_bytes:,} bytes",
                            do="try again",
                        )
                    )
                os.replace(part, target)
                bar.advance(task, size)
            finally:
                part.unlink(missing_ok=True)

        with ThreadPoolExecutor(NUM_TRANSFERS, thread_name_prefix="fetch") as pool:
            pending = [pool.submit(fetch, each, target) for each, target in wanted]
            try:
                for future in pending:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _targets(root: Path, url: Url, group: Sequence[StoredObject]) -> list[Path]:
    """Paths of the copies, in one directory. File names are preserved, as suffixes give formats."""
    is_web = url.scheme in ("http", "https")
    keys = [each.key.partition("?")[0] if is_web else each.key for each in group]
    folder = keys[0].rstrip("/").rpartition("/")[0].rpartition("://")[2]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", folder)[-60:].strip("-.")
    digest = _digest(f"{url.scheme} " + " ".join(f"{each.key} {each.stamp}" for each in group))
    return [root / f"{readable}-{digest}" / key.rstrip("/").rpartition("/")[2] for key in keys]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def _host_lock(lock: Path) -> Iterator[None]:
    """Lock out other processes of this host. On a file system without locks all fetch, which is
    harmless.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
