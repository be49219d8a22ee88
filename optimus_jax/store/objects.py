"""The objects under a URL, read and written through fsspec.

An *object* has a name, which is its key without that of the URL. Listings are never cached: what
another machine has written is seen at once, as far as the store itself shows it. Credentials,
endpoints and regions are found by the libraries, from the variables and files of each store.
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
"""Schemes that fsspec knows by another name."""
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
"""What stores say of an object that changes with its content."""


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object, as its store describes it."""

    key: str
    """As fsspec has it: with bucket or host."""
    num_bytes: int | None
    """None: the store does not say."""
    stamp: str | None
    """Changes with the content; None: the store says nothing that does."""


class Objects:
    """The objects under `url`.

    Raises:
      StoreError: the library for such URLs is not installed, or a setting of its is wrong; so do
        all methods if the store cannot be reached, refuses, or lacks what they need.
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
        """The content of an object; None: there is none of that name."""
        with self._explained(f"read {name}"):
            try:
                return self._fs.cat_file(self._key(name))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Put an object in place, whole; one of that name is replaced."""
        with self._explained(f"write {name}"):
            self._fs.pipe_file(self._key(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """As `write` if there is no object of that name, and whether there was none.

        S3, GCS and Azure decide this themselves, so that of several writers one succeeds; where a
        store cannot, it is looked up first.
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
        """Upload a file, in parts where it is large."""
        with self._explained(f"write {name}"):
            self._fs.put_file(str(source), self._key(name))

    def get(self, name: str, target: Path) -> bool:
        """Download an object to a file; whether there is one of that name."""
        with self._explained(f"read {name}"):
            try:
                self._fs.get_file(self._key(name), str(target))
            except FileNotFoundError:
                return False
            return True

    def get_key(self, key: str, target: Path) -> None:
        """Download an object that `matches` has found."""
        with self._explained(f"read {key}"):
            self._fs.get_file(key, str(target))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are not there are no error."""
        for name in names:
            with self._explained(f"delete {name}"), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._key(name))

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Bytes of every object, by name, or of those whose names begin with `folder/`."""
        with self._explained("list what is there"):
            key = self._key(folder) if folder else self._root
            try:
                found = self._fs.find(key, detail=True)
            except FileNotFoundError:
                if "/" not in self._root.strip("/"):
                    raise  # the bucket itself
                self._fs.ls(self._root.strip("/").partition("/")[0])  # raises if there is none
                return {}
            skip = len(self._root) + 1
            return {name[skip:]: int(info["size"] or 0) for name, info in found.items()}

    def matches(self) -> list[StoredObject]:
        """The object that the URL names, or those that it matches as a glob, sorted as paths."""
        with self._explained("read"):
            if not self.is_pattern:
                infos = [self._fs.info(self._root)]
            elif self.url.scheme not in ("http", "https") and self._fs.isfile(self._root):
                infos = [self._fs.info(self._root)]  # its name has characters of a glob
            else:
                infos = list(self._fs.glob(self._root, detail=True).values())
        found = [_stored_object(info) for info in infos if info.get("type") != "directory"]
        return sorted(found, key=lambda each: PurePosixPath(each.key))

    def look_up(self, key: str) -> StoredObject | None:
        """The object of a key; None: there is none."""
        with self._explained("read"):
            try:
                return _stored_object(self._fs.info(key))
            except FileNotFoundError:
                return None

    @property
    def is_pattern(self) -> bool:
        """Whether it may be a glob; in a web address `?` begins what is asked for."""
        return self.url.scheme not in ("http", "https") and glob.has_magic(self.url.path)

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # each library has errors of its own, and some have no base
            raise self._failure(doing, error) from error

    def _failure(self, doing: str, error: Exception) -> StoreError:
        said = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, FileNotFoundError):
            do = "check the URL: the bucket and what the URL names must be there"
        elif isinstance(error, PermissionError) or "redential" in f"{type(error).__name__} {said}":
            do = (
                "give credentials that may do this, as docs/stores.md says, or mend its permissions"
            )
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            do = "make room on the disk of this machine"
        else:
            do = "see that the store can be reached from here, then try again (docs/stores.md)"
        return StoreError(explain(f"the store cannot {doing}: {said}", given=self.url, do=do))


def _stored_object(info: Mapping[str, Any]) -> StoredObject:
    stamps = [f"{name}={info[name]}" for name in _STAMPS if info.get(name) is not None]
    size = info.get("size")
    return StoredObject(
        key=info["name"],
        num_bytes=None if size is None else int(size),
        stamp=f"size={size} {' '.join(stamps)}" if stamps else None,
    )
