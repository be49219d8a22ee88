"""Settings of exports: directories of a run's model that transformers loads."""

import re
from dataclasses import dataclass
from typing import Literal

from optimus_jax.config.checks import check_not_negative
from optimus_jax.errors import ConfigError, explain
from optimus_jax.system.paths import local_path

UNITS = {
    "": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate(("k", "m", "g", "t"), 1)},
}
"""Bytes of each unit of a size."""
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[a-z]*)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """When a run exports its model, and how (docs/howto/export.md)."""

    every: int = 0
    """Steps between exports: the first checkpoint at or after each multiple is exported in the
    background. 0: none."""
    dir: str | None = None
    """Directory in which they become step-N; None: exports/ in the run directory."""
    dtype: Literal["f32", "bf16", "f16"] | None = None
    """Number format of the weights; None: that of the checkpoint."""
    max_shard_size: str = "5GB"
    """Largest file of weights."""

    def __post_init__(self) -> None:
        check_not_negative(self, "every")
        _ = self.max_shard_bytes  # an invalid size is an error when the config is made
        if self.dir is not None:
            local_path(self.dir, what="export.dir")

    @property
    def max_shard_bytes(self) -> int:
        """Most bytes of the tensors in a file. Raises ConfigError."""
        match = _SIZE.fullmatch(self.max_shard_size.strip())
        unit = UNITS.get(match["unit"].lower()) if match is not None else None
        if match is None or unit is None or not (size := int(float(match["number"]) * unit)):
            raise ConfigError(
                explain(
                    "the largest size of a file is a number of bytes",
                    given=f"export.max_shard_size={self.max_shard_size}",
                    do="write 5GB, 500MB, 2GiB or the like",
                )
            )
        return size
