"""Links between devices: speed, latency, and parsing of user input."""

import re
from dataclasses import dataclass, replace

from optimus_jax.errors import ConfigError, explain

_BYTES = {"B": 1.0, "b": 1 / 8}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_PER_SECOND = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_SPEED = re.compile(_NUMBER + r"\s*([kMGT]?)(B|b)(?:/s|ps)")
_LATENCY = re.compile(_NUMBER + r"\s*(ns|us|µs|ms|s)")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between devices of one host, between hosts, or from a device to its host."""

    name: str
    """Name of the link, such as "NVLink 4"."""
    bytes_per_s: float | None
    """Bytes per second per device in one direction; None: unknown."""
    latency_s: float | None
    """Seconds for the smallest message; None: unknown."""
    source: str
    """Where the figures come from."""
    peers: int | None = None
    """Other devices of the host, if a device has a link of its own to each of them, so that only
    all of them together reach the speed; None: a switch, or unknown."""

    def among(self, num_devices: float) -> "Link":
        """The link as a group of devices of one host has it; two of them are a sender and its
        receiver."""
        return self if self.peers is None else self.scaled((num_devices - 1) / self.peers)

    def __str__(self) -> str:
        speed = "unknown speed" if self.bytes_per_s is None else f"{self.bytes_per_s / 1e9:g} GB/s"
        return (
            f"{self.name} ({speed})"
            if self.latency_s is None
            else f"{self.name} ({speed}, {self.latency_s * 1e6:g} us)"
        )

    def scaled(self, factor: float) -> "Link":
        """The link with `factor` times its speed; unchanged if that is unknown."""
        return (
            self
            if self.bytes_per_s is None or factor == 1
            else replace(self, bytes_per_s=self.bytes_per_s * factor)
        )

    @classmethod
    def unknown(cls, name: str) -> "Link":
        """A link without published or measured speed."""
        return cls(name=name, bytes_per_s=None, latency_s=None, source="unknown")


def with_speed(link: Link, text: str) -> Link:
    """`link` with a given speed, latency or both, such as `50GB/s`, `400Gb/s,5us` or `2us`.

    B is bytes and b bits, in one direction and for each device; k, M, G and T are powers of ten.

    Raises:
      ConfigError: the text cannot be parsed.
    """
    changes: dict[str, float] = {}
    for part in text.split(","):
        speed, latency = _SPEED.fullmatch(part.strip()), _LATENCY.fullmatch(part.strip())
        if speed:
            field, value = "bytes_per_s", float(speed[1]) * _PREFIXES[speed[2]] * _BYTES[speed[3]]
        elif latency:
            field, value = (
                "latency_s",
                float(latency[1]) / _PER_SECOND[latency[2].replace("µ", "u")],
            )
        else:
            field, value = "", 0.0
        if not field or field in changes or value == 0:
            raise ConfigError(
                explain(
                    f"cannot read the link's speed {part.strip()!r}",
                    given=text,
                    do=(
                        "give bytes or bits per second of one device in one direction, such as"
                        " 50GB/s or 400Gb/s, and if known a latency, such as 50GB/s,5us"
                    ),
                )
            )
        changes[field] = value
    # A link with another speed no longer has the usual name.
    name = "given link" if "bytes_per_s" in changes else link.name
    peers = None if "bytes_per_s" in changes else link.peers
    return replace(link, name=name, source=f"given as {text}", peers=peers, **changes)
