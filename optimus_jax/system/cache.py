"""Files that are kept for the next run: written whole or not at all."""

import os
import tempfile
import warnings
from pathlib import Path

from optimus_jax.store import local_copies


def cache_directory() -> Path:
    """Where they are: `optimus_jax/hardware` in XDG_CACHE_HOME, by default `~/.cache`."""
    return local_copies.cache_directory() / "hardware"


def write_whole(path: Path, text: str, what: str) -> None:
    """Another run may be reading. A warning that names `what` if it cannot be written, for no run depends on it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"{what} cannot be kept for the next run: {error}", stacklevel=3)
