"""What several settings are checked for."""

import ipaddress
from typing import Any

from optimus_jax.errors import ConfigError, explain


def check_positive(value: Any, *names: str) -> None:
    """Raise ConfigError if one of these fields of a config is zero or less; None may be."""
    for name in names:
        number = getattr(value, name)
        if number is not None and number <= 0:
            raise ConfigError(
                explain(
                    f"{name} must be positive",
                    given=f"{type(value).__name__}.{name}={number}",
                    do="choose a value above 0",
                )
            )


def check_not_negative(value: Any, *names: str) -> None:
    """Raise ConfigError if one of these fields of a config is below zero; None may be."""
    for name in names:
        if (getattr(value, name) or 0) < 0:
            raise ConfigError(
                explain(
                    f"{name} cannot be negative",
                    given=f"{type(value).__name__}.{name}={getattr(value, name)}",
                    do="choose 0 or more",
                )
            )


LARGEST_COUNT = 2**31 - 1
"""Steps, rows of a batch and sizes of arrays are int32 where they are computed with."""


def check_counts(value: Any, *names: str) -> None:
    """Raise ConfigError if one of these fields of a config is more than an int32 holds; None may
    be.
    """
    for name in names:
        if (getattr(value, name) or 0) > LARGEST_COUNT:
            raise ConfigError(
                explain(
                    f"{name} is too large",
                    given=f"{type(value).__name__}.{name}={getattr(value, name)}",
                    do=f"choose {LARGEST_COUNT:,} or less",
                )
            )


def is_address(text: str) -> bool:
    """Whether a text is an IP address, and no name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_host_and_port(text: str) -> bool:
    """Whether a text is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16
