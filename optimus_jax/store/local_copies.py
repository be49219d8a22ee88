"""Local copies of objects that are read: data, tokenizers, configs.

A copy lies in the cache directory under its URL and the checksum or time that the store gives, so
that it is fetched once and again when the object has changed. It is whole or not there: it is
written beside its place and renamed. Processes of a host take turns, by a lock.
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

NUM_TRANSFERS = 8
"""Objects on their way at the same time."""


def local_file(text: UserPath, *, what: str) -> Path:
    """A file to read: a path of this machine, or the copy of what a URL names.

    Args:
      what: what to call it in errors: the flag or setting.
    Raises:
      PathError: the text can name nothing.
      StoreError: the URL names no object, or it cannot be fetched.
    """
    path = user_path(text, what=what)
    return path if isinstance(path, Path) else local_copies(path)[0]


def local_copies(
    url: Url,
    *,
    sidecars: Mapping[str, str] = MappingProxyType({}),
    say: Callable[[str], object] | None = None,
) -> list[Path]:
    """Copies of the object that a URL names, or of those that it matches as a glob, in order.

    Args:
      beside: suffixes of names to what is added to such a name for an object that belongs to it,
        and that is fetched with it into the same directory if it is there.
      say: told what is fetched; None: that is said on standard error.
    Raises:
      StoreError: nothing is there, or it cannot be fetched.
    """
    objects = Objects(url)
    groups = [_with_sidecars(objects, each, sidecars) for each in objects.matches()]
    if not groups:
        raise StoreError(
            explain(
                "there is no object of that name, and none that it matches",
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
                (say or _print_to_stderr)(
                    f"fetching {len(wanted)} of {len(pairs)} object(s), {num_bytes:,} bytes, "
                    f"of {url} into {root}"
                )
                _fetch(objects, wanted, num_bytes)
    except OSError as error:
        raise StoreError(
            explain(
                f"the copy of an object cannot be written: {error.strerror or error}",
                given=f"{url}, into {root}",
                do="make room, or name another directory by XDG_CACHE_HOME",
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
                            "an object changed, or broke off, while it was fetched",
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
    """Where the copies lie, in one directory; names are kept: a suffix says what a file is."""
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
    """One process of a host at a time. Where a file system has no locks, all fetch, to no harm."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
