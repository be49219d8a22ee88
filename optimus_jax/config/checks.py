"""Checks that several settings share."""

import ipaddress
from typing import Any

from optimus_jax.errors import ConfigError, explain


def check_positive(value: Any, *names: str) -> None:
    """Raise ConfigError if one of these fields is zero or negative; None is allowed."""
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
    """Raise ConfigError if one of these fields is negative; None is allowed."""
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
"""Steps, batch rows and array sizes are int32 in computations."""


def check_counts(value: Any, *names: str) -> None:
    """Raise ConfigError if one of these fields does not fit an int32; None is allowed."""
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
    """Whether a text is an IP address rather than a host name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_host_and_port(text: str) -> bool:
    """Whether a text is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16
