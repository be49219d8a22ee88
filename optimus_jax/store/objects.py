"""The objects under a URL, read and written through fsspec.

An object's *name* is its key relative to the URL. Listings are never cached: what another machine
writes is visible at once, as far as the store allows. The client libraries find credentials,
endpoints and regions in each store's own variables and files.
"""

import contextlib
import errno
import glob
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import url_to_fs

from optimus_jax.errors import StoreError, explain
from optimus_jax.system.paths import SCHEMES, Url

_SAME_AS = {"abfss": "abfs"}
"""Schemes that have another name in fsspec."""
_STAMPS = (
    "ETag",
    "etag",
    "md5Hash",
    "crc32c",
    "generation",
    "Content-MD5",
    "content_settings",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "mtime",
    "updated",
    "created",
)
"""Keys of fsspec's object info that change with the object's content."""


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object as listed by its store."""

    key: str
    """fsspec's key, including bucket or host."""
    num_bytes: int | None
    """Size; None: the store does not report it."""
    stamp: str | None
    """Text that changes with the content; None: the store reports nothing suitable."""


class Objects:
    """The objects under `url`.

    Raises:
      StoreError: the client library is not installed or misconfigured. All methods raise it too if
        the store cannot be reached or refuses the operation.
    """

    def __init__(self, url: Url) -> None:
        self.url = url
        scheme = SCHEMES[url.scheme]
        try:
            self._fs, self._root = url_to_fs(
                str(Url(_SAME_AS.get(url.scheme, url.scheme), url.path)),
                use_listings_cache=False,
                skip_instance_cache=url.scheme != "memory",
            )
        except ImportError as error:
            raise StoreError(
                explain(
                    f"{url.scheme}:// URLs need {scheme.package}, which is not installed",
                    given=f"{url} ({error})",
                    do=f"pip install 'optimus-jax[{scheme.extra}]'",
                )
            ) from error
        except Exception as error:
            raise self._failure("be used", error) from error

    def read(self, name: str) -> bytes | None:
        """The content of an object; None: it does not exist."""
        with self._explained(f"read {name}"):
            try:
                return self._fs.cat_file(self._key(name))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object atomically, replacing an existing one."""
        with self._explained(f"write {name}"):
            self._fs.pipe_file(self._key(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Write an object only if it does not exist; returns whether it was written.

        Atomic on S3, GCS and Azure: of several writers one succeeds. On other stores existence is
        checked first, with a race.
        """
        with self._explained(f"write {name}"):
            key = self._key(name)
            try:
                self._fs.pipe_file(key, content, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                if self._fs.exists(key):
                    return False
                self._fs.pipe_file(key, content)
            return True

    def put(self, source: Path, name: str) -> None:
        """Upload a file, in several parts if it is large."""
        with self._explained(f"write {name}"):
            self._fs.put_file(str(source), self._key(name))

    def get(self, name: str, target: Path) -> bool:
        """Download an object to a file; returns whether the object exists."""
        with self._explained(f"read {name}"):
            try:
                self._fs.get_file(self._key(name), str(target))
            except FileNotFoundError:
                return False
            return True

    def get_key(self, key: str, target: Path) -> None:
        """Download an object by its key, as returned by `matches`."""
        with self._explained(f"read {key}"):
            self._fs.get_file(key, str(target))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; missing ones are ignored."""
        for name in names:
            with self._explained(f"delete {name}"), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._key(name))

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Size in bytes of every object (or of those under `folder/`), by name."""
        with self._explained("list its objects"):
            key = self._key(folder) if folder else self._root
            try:
                found = self._fs.find(key, detail=True)
            except FileNotFoundError:
                if "/" not in self._root.strip("/"):
                    raise  # the bucket itself
                # raises if the bucket does not exist
                self._fs.ls(self._root.strip("/").partition("/")[0])
                return {}
            skip = len(self._root) + 1
            return {name[skip:]: int(info["size"] or 0) for name, info in found.items()}

    def matches(self) -> list[StoredObject]:
        """The object at the URL, or all objects that a glob URL matches, sorted by path."""
        with self._explained("read"):
            if not self.is_pattern:
                infos = [self._fs.info(self._root)]
            elif self.url.scheme not in ("http", "https") and self._fs.isfile(self._root):
                infos = [self._fs.info(self._root)]  # a file whose name contains glob characters
            else:
                infos = list(self._fs.glob(self._root, detail=True).values())
        found = [_stored_object(info) for info in infos if info.get("type") != "directory"]
        return sorted(found, key=lambda each: PurePosixPath(each.key))

    def look_up(self, key: str) -> StoredObject | None:
        """The object with this key; None: it does not exist."""
        with self._explained("read"):
            try:
                return _stored_object(self._fs.info(key))
            except FileNotFoundError:
                return None

    @property
    def is_pattern(self) -> bool:
        """Whether the URL may be a glob; in a web address `?` starts the query."""
        return self.url.scheme not in ("http", "https") and glob.has_magic(self.url.path)

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        # each library has its own exceptions, some without a common base class
        except Exception as error:
            raise self._failure(doing, error) from error

    def _failure(self, doing: str, error: Exception) -> StoreError:
        said = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, FileNotFoundError):
            do = "check the URL: the bucket and what the URL names must be there"
        elif isinstance(error, PermissionError) or "redential" in f"{type(error).__name__} {said}":
            do = "give credentials that allow this, or fix the permissions"
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            do = "free disk space on this machine"
        else:
            do = "check that this machine can reach the store, then try again"
        return StoreError(explain(f"the store cannot {doing}: {said}", given=self.url, do=do))


def _stored_object(info: Mapping[str, Any]) -> StoredObject:
    stamps = [f"{name}={info[name]}" for name in _STAMPS if info.get(name) is not None]
    size = info.get("size")
    return StoredObject(
        key=info["name"],
        num_bytes=None if size is None else int(size),
        stamp=f"size={size} {' '.join(stamps)}" if stamps else None,
    )
