"""Files that are kept for the next run: written whole or not at all."""

import os
import tempfile
import warnings
from pathlib import Path


def cache_directory() -> Path:
    """Where they are: `optimus_jax/hardware` in XDG_CACHE_HOME, by default `~/.cache`; for a user without a home, in the folder for temporary files."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:  # a user without a home, as in a container that runs under any number
        home = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return home / "optimus_jax" / "hardware"


def write_whole(path: Path, text: str, what: str) -> None:
    """Another run may be reading. A warning that names `what` if it cannot be written, for no run depends on it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"{what} cannot be kept for the next run: {error}", stacklevel=3)
