"""Numbers, times and other values as text for a reader. A missing value is "unknown", never a
number.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime

UNKNOWN = "unknown"
MINUTE_S, HOUR_S = 60, 3600


def format_duration(seconds: float | None) -> str:
    """Three significant digits and a fitting unit: `41.2 ms`, `3.07 s`, `2 min 5 s`, `3 h 20
    min`."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    size = abs(seconds)
    if size >= HOUR_S:
        hours, minutes = divmod(round(seconds / MINUTE_S), 60)
        return f"{hours:,} h {minutes} min"
    if size >= 2 * MINUTE_S:
        minutes, rest = divmod(round(seconds), MINUTE_S)
        return f"{minutes} min {rest} s"
    if size >= 1 or size == 0:
        return f"{_three_digits(seconds)} s"
    return (
        f"{_three_digits(seconds * 1e3)} ms"
        if size >= 1e-3
        else f"{_three_digits(seconds * 1e6)} µs"
    )


def format_bytes(num_bytes: float | None) -> str:
    """Three significant digits and a binary unit: `1.25 GiB`."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return UNKNOWN
    size, unit = float(num_bytes), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1000 or unit == "TiB":
            break
        size /= 1024
    return f"{_three_digits(size)} {unit}"


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"  # not 1e+03


def format_count(number: float | None) -> str:
    """A whole number with thousands separators."""
    return UNKNOWN if number is None or not math.isfinite(number) else f"{number:,.0f}"


def format_number(number: float | None, digits: int = 4) -> str:
    """A number with `digits` significant digits and thousands separators."""
    return UNKNOWN if number is None or not math.isfinite(number) else f"{number:,.{digits}g}"


def format_percent(fraction: float | None) -> str:
    """A fraction as a percentage."""
    return UNKNOWN if fraction is None or not math.isfinite(fraction) else f"{fraction:.1%}"


def format_time(time_s: float | None) -> str:
    """A Unix time as date and time in UTC."""
    try:
        return (
            UNKNOWN
            if time_s is None
            else datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
        )
    except (OverflowError, OSError, ValueError):
        return UNKNOWN


def format_value(value: object) -> str:
    """Any value of an event's field, on one line."""
    match value:
        case None:
            return UNKNOWN
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return format_number(value)
        case Mapping():
            return (
                ", ".join(f"{name} {format_value(item)}" for name, item in value.items())
                or "nothing"
            )
        case list() | tuple():
            return "; ".join(map(format_value, value)) or "nothing"
    return str(value)


def shown_setting(value: object) -> str:
    """The value of a setting for a reader."""
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return format_value(value)
