"""Parses user-supplied paths: a file-system path, or the URL of an object store.

Every user-supplied path goes through this module before anything is opened or created: flags,
settings, arguments of the Python API, and environment variables. A path that no shell has expanded,
as in `--run-dir=~/x` or in a job's YAML, is expanded as a shell would do:

* `~` and `~name` at the beginning are home directories; `./~` is a file called `~`.
* `file://` URLs are local paths.
* Other URLs name an object store by their scheme (`SCHEMES`). Settings that accept no store refuse
  them with an error, so that no directory called `gs:` is ever created.
* `$NAME` is not expanded: that is the shell's job, and a `$` may be part of a name.
* Text that cannot be a path (empty, with a NUL, too long), and text that is probably a mistake
  (`C:\\x`, `gs:/x`, leading or trailing blanks), is an error.
"""

import argparse
import glob
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote

from optimus_jax.errors import ConfigError, explain

UserPath = str | os.PathLike[str]
"""A path as callers pass it."""

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\[^\\]")
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095
"""NAME_MAX and PATH_MAX of Linux."""


@dataclass(frozen=True, kw_only=True)
class UrlScheme:
    """Properties of a URL scheme."""

    package: str
    """Python package that these URLs need; empty: none."""
    extra: str = ""
    """This project's extra that installs it."""
    is_writable: bool = True
    """Whether runs can be stored there."""


_S3, _GCS, _AZURE = (
    UrlScheme(package=package, extra=extra)
    for package, extra in (("s3fs", "s3"), ("gcsfs", "gcs"), ("adlfs", "azure"))
)
_HTTP = UrlScheme(package="aiohttp", extra="http", is_writable=False)
SCHEMES: Mapping[str, UrlScheme] = MappingProxyType(
    {
        "s3": _S3,
        "s3a": _S3,
        "gs": _GCS,
        "gcs": _GCS,
        "az": _AZURE,
        "abfs": _AZURE,
        "abfss": _AZURE,
        "http": _HTTP,
        "https": _HTTP,
        "memory": UrlScheme(package="", is_writable=False),
    }
)
"""Supported schemes. `memory` is fsspec's store in this process, for tests."""
REFUSED = (
    "hdfs",
    "viewfs",
    "webhdfs",
    "hf",
    "ftp",
    "sftp",
    "ssh",
    "scp",
    "smb",
    "dbfs",
    "oci",
    "oss",
    "r2",
    "b2",
    "wasb",
    "wasbs",
    "adl",
    "git",
    "github",
    "nfs",
    "alluxio",
    "simplecache",
    "filecache",
    "blockcache",
)
"""Schemes that people use and that are not supported."""


class PathError(ConfigError):
    """Text that is not a valid path, or a kind of path that the setting does not accept."""


@dataclass(frozen=True)
class Url:
    """The URL of an object or prefix in a store."""

    scheme: str
    """A key of SCHEMES."""
    path: str
    """Bucket or host and the rest of the path, without a trailing slash."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    def __truediv__(self, name: str) -> "Url":
        return Url(self.scheme, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.path.rpartition("/")[2]

    @property
    def is_writable(self) -> bool:
        """Whether runs can be stored there."""
        return SCHEMES[self.scheme].is_writable


def user_path(text: UserPath, *, what: str) -> Path | Url:
    """A path or URL from user input; does not access the file system.

    Args:
      text: as typed; a relative path stays one.
      what: name of the flag or setting, for errors.
    Raises:
      PathError: not a valid path, or an unsupported URL.
    """
    text = _checked(text, what)
    if (match := _URL.fullmatch(text)) is not None:
        return _url(text, match["scheme"].lower(), match["rest"], what)
    return Path(_expanded(text, what))


def local_path(
    text: UserPath,
    *,
    what: str,
    do: str = "give a path of this machine: mount the store, or copy from it and to it",
) -> Path:
    """As `user_path`, where only a local path is accepted.

    Args:
      do: advice in the error for a URL.
    Raises:
      PathError: as `user_path`, or it is the URL of a store.
    """
    path = user_path(text, what=what)
    if isinstance(path, Url):
        raise PathError(explain(f"{what} cannot be a URL", given=text, do=do))
    return path


def local_pattern(text: UserPath, *, what: str) -> str:
    """Like `local_path`, for a glob: the expansion of `~` is escaped."""
    path = local_path(text, what=what)
    text = os.fspath(text)
    if not text.startswith("~"):
        return str(path)
    user, slash, rest = text.partition("/")
    return glob.escape(_expanded(user, what)) + slash + rest


def directory_of_environment(variable: str) -> Path | None:
    """The directory in an environment variable; None: not set, or empty.

    Raises:
      PathError: not a valid local path.
    """
    text = os.environ.get(variable)
    return local_path(text, what=variable) if text else None


def path_argument(text: str) -> Path:
    """`local_path` as a `type` for argparse, which adds the flag's name to errors."""
    try:
        return local_path(text, what="this path")
    except PathError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _checked(text: UserPath, what: str) -> str:
    """The path as text. Raises PathError if it cannot be a path."""
    try:
        text = os.fspath(text)
    except TypeError:
        raise PathError(
            explain(
                f"{what} is not a path",
                given=f"{text!r} ({type(text).__name__})",
                do="give it as text, or as a pathlib.Path",
            )
        ) from None
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    wrong = None
    if not text.strip():
        wrong = "is empty", "name a file or directory; . is the current directory"
    elif "\0" in text:
        wrong = "holds a NUL character, which no path can", "leave it out"
    elif text != text.strip():
        wrong = (
            "begins or ends with a blank",
            "leave the blank out; a name that begins with one is written './ NAME'",
        )
    elif _WINDOWS.match(text):
        wrong = (
            "is a path of Windows",
            "give a path of this machine, such as /mnt/c/data; for a file of that name, ./NAME",
        )
    elif not _is_utf8(text):
        wrong = "is not UTF-8", "rename it"
    elif (match := re.match(r"([A-Za-z][A-Za-z0-9+.-]*):(?!//)", text)) and (
        scheme := match[1].lower()
    ) in (*SCHEMES, *REFUSED, "file"):
        # pathlib.Path("gs://bucket/x") has become gs:/bucket/x; file:/x is legal, but rare
        wrong = (
            f"begins with {scheme}: and without ://",
            f"write {scheme}://... as text, not as a pathlib.Path; for a file of that name, ./NAME",
        )
    elif _URL.search(text) is not None and _URL.fullmatch(text) is None:
        wrong = "holds a URL in its middle", "give the URL alone"
    elif (
        len(os.fsencode(text)) > _MAX_PATH_BYTES
        or max(len(os.fsencode(name)) for name in text.split("/")) > _MAX_NAME_BYTES
    ):
        wrong = (
            "is too long for a path",
            f"keep names below {_MAX_NAME_BYTES + 1} bytes and paths below {_MAX_PATH_BYTES + 1}",
        )
    if wrong is not None:
        raise PathError(
            explain(
                f"{what} {wrong[0]}",
                given=repr(text if len(text) < 200 else text[:200] + "..."),
                do=wrong[1],
            )
        )
    return text


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _expanded(text: str, what: str) -> str:
    """The text with `~` or `~name` replaced by the home directory."""
    if not text.startswith("~"):
        return text
    expanded = os.path.expanduser(text)
    user = text.partition("/")[0]
    if user == "~" and not os.environ.get("HOME", "unset").startswith("/") and "HOME" in os.environ:
        raise PathError(
            explain(
                f"{what} begins with ~, and HOME is not an absolute path",
                given=f"{text}, HOME={os.environ['HOME']!r}",
                do="set HOME, or give the path in full",
            )
        )
    if expanded == text:
        whose = (
            "this user has no home directory" if user == "~" else f"there is no user {user[1:]!r}"
        )
        raise PathError(
            explain(
                f"{what} begins with {user}, and {whose}",
                given=text,
                do=f"give the path in full; for a file of that name, ./{text}",
            )
        )
    return expanded


def _url(text: str, scheme: str, rest: str, what: str) -> Path | Url:
    if scheme == "file":
        return _file_url(text, rest, what)
    if scheme not in SCHEMES:
        raise PathError(
            explain(
                f"{what} is a {scheme}:// URL, which is not supported",
                given=text,
                do="mount or copy it and give a path of this machine, or use a URL of "
                + ", ".join(name for name, each in SCHEMES.items() if each.package),
            )
        )
    path = rest.rstrip("/")
    host = path.partition("/")[0]
    wrong = None
    if not host:
        wrong = "names no bucket or host", f"write {scheme}://NAME/..."
    elif "@" in host and ":" in host.partition("@")[0]:
        wrong = (
            "holds a password, which would be kept in config.json and shown",
            "leave it out: credentials come from the environment",
        )
    elif not SCHEMES[scheme].is_writable:
        pass  # any path is valid in a web address
    elif any(part in ("", ".", "..") for part in path.split("/")):
        wrong = (
            "has an empty part, . or .. in it",
            "write the names of the store, one slash between two",
        )
    elif "::" in path:
        wrong = "is a chain of URLs", "give the URL of the store alone"
    if wrong is not None:
        raise PathError(
            explain(
                f"{what} is a URL that {wrong[0]}",
                given=re.sub(r"//[^/@]*@", "//...@", text) if "password" in wrong[0] else text,
                do=wrong[1],
            )
        )
    return Url(scheme, path)


def _file_url(text: str, rest: str, what: str) -> Path:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash or not path:
        raise PathError(
            explain(
                f"{what} is a file:// URL that names no file of this machine",
                given=text,
                do="write file:///PATH with three slashes, or the path alone",
            )
        )
    return Path(_checked("/" + unquote(path), what))
