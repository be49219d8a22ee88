"""Published figures and tables that compare settings, beside the time model.

The rows are those of the section `comparisons` in published.json. Where a source prints no numbers,
they were read from its figure, and its note says so. Throughputs are counted as the source counts
them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from published import Row

COMPARED: Mapping[str, tuple[str, ...]] = {
    "repeats": (),
    "sends_parts": ("source",),
    "microbatch": (),
    "pipe": ("devices", "model", "repeats", "sends_parts"),
}
"""Settings whose effect is compared, and the other fields of a row that may differ with them: rows
that send whole are in a figure of their own, and a deeper pipeline has a larger model."""


def comparison_report(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The throughput of every row; what each setting changes, in shares of the throughput with its
    least value; and the step times of each series of batches, as a time per microbatch and one per
    step.
    """
    return {
        "throughputs": {name_of(row): _throughput(row) for row in rows},
        "changes": {
            f"{name_of(row)}, against {setting} {getattr(base, setting)}": _change(base, row)
            for setting in COMPARED
            for base, row in pairs(rows, setting)
        },
        "times": {
            f"{name_of(last)}, against {first.global_batch}": _split(first, last)
            for first, *_, last in _groups(rows, ("global_batch",))
        },
    }


def name_of(row: Row) -> str:
    """The row with the settings that are compared."""
    repeats = f", repeats {row.repeats}" if row.repeats else ""
    sends = "" if row.sends_parts is None else f", sends {'parts' if row.sends_parts else 'whole'}"
    return f"{row}, batch {row.global_batch}{repeats}{sends}"


def pairs(rows: Iterable[Row], setting: str) -> list[tuple[Row, Row]]:
    """Rows that differ in this setting, each behind the one with the least value."""
    return [
        (base, row)
        for base, *others in _groups(rows, (setting, *COMPARED[setting]))
        for row in others
        if getattr(row, setting) != getattr(base, setting)
    ]


def _groups(rows: Iterable[Row], fields: tuple[str, ...]) -> list[list[Row]]:
    """The rows that agree but for these fields, sorted by the first of them."""
    groups: dict[Row, list[Row]] = {}
    unset: dict[str, Any] = dict.fromkeys((*fields, "hardware_tflops"))
    for row in rows:
        groups.setdefault(replace(row, **unset), []).append(row)
    return [
        sorted(group, key=lambda row: getattr(row, fields[0]) or 0)
        for group in groups.values()
        if len(group) > 1
    ]


def _tflops(row: Row) -> tuple[float, float]:
    """Published and predicted TFLOP/s of a device, counted as the source counts them."""
    published = row.hardware_tflops or math.nan
    return published, published * math.exp(row.log_error())


def _throughput(row: Row) -> dict[str, Any]:
    published, predicted = _tflops(row)
    return {
        "url": row.source.url,
        "published_tflops": published,
        "predicted_tflops": predicted,
        "error": predicted / published - 1.0,
    }


def _change(base: Row, row: Row) -> dict[str, Any]:
    published, predicted = (
        new / old - 1.0 for new, old in zip(_tflops(row), _tflops(base), strict=True)
    )
    return {
        "url": row.source.url,
        "published": published,
        "predicted": predicted,
        "error": predicted - published,
    }


def _split(first: Row, last: Row) -> dict[str, Any]:
    """Both step times as microbatches x a time each + a time per step."""
    few, many = (
        row.global_batch // (row.replicas * (row.microbatch or 1)) for row in (first, last)
    )
    found: dict[str, Any] = {"url": first.source.url}
    for name, time_of in (("published", Row.published_s), ("predicted", Row.predicted_s)):
        each_s = (time_of(last) - time_of(first)) / (many - few)
        found[f"{name}_microbatch_ms"] = 1e3 * each_s
        found[f"{name}_step_s"] = time_of(first) - few * each_s
    found["error"] = found["predicted_microbatch_ms"] / found["published_microbatch_ms"] - 1.0
    return found
