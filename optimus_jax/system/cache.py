"""The cache: files that a run leaves for the next one, written whole or not at all."""

import os
import tempfile
import warnings
from pathlib import Path

from optimus_jax.system.paths import directory_of_environment


def cache_directory() -> Path:
    """`optimus_jax` in XDG_CACHE_HOME, by default `~/.cache`.

    A user without a home, as in a container that runs under any number, has it in the folder for
    temporary files.

    Raises:
      PathError: the variable can name no directory.
    """
    home = directory_of_environment("XDG_CACHE_HOME")
    if home is None:
        try:
            home = Path("~/.cache").expanduser()
        except RuntimeError:
            home = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return home.absolute() / "optimus_jax"


def measurements_directory() -> Path:
    """What was measured and learnt on the devices of this machine."""
    return cache_directory() / "hardware"


def write_atomically(path: Path, text: str, what: str) -> None:
    """Another run may be reading.

    A warning that names `what` if it cannot be written, for no run depends on it.
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
