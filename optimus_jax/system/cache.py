"""The cache directory for files that later runs reuse, written atomically."""

import os
import tempfile
import warnings
from pathlib import Path

from optimus_jax.system.paths import directory_of_environment


def cache_directory() -> Path:
    """`optimus_jax` in XDG_CACHE_HOME, by default `~/.cache`.

    If the user has no home directory, as in a container with an arbitrary user id, it is in the
    temporary directory.

    Raises:
      PathError: the variable does not hold a valid directory path.
    """
    home = directory_of_environment("XDG_CACHE_HOME")
    if home is None:
        try:
            home = Path("~/.cache").expanduser()
        except RuntimeError:
            home = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return home.absolute() / "optimus_jax"


def measurements_directory() -> Path:
    """Directory of measurements of this machine's devices and of what was learned from them."""
    return cache_directory() / "hardware"


def write_atomically(path: Path, text: str, what: str) -> None:
    """Replace a file atomically, since another run may be reading it.

    If it cannot be written, warns and names `what`; no run depends on the file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False
        ) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"{what} cannot be kept for the next run: {error}", stacklevel=3)
