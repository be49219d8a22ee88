"""Advice for names and values of other frameworks that are not accepted (advice.toml).

A name there means something else than our settings, counts differently, or has no counterpart. The
error says what to write instead, computed from the given value where possible. A test checks that
every flag and setting named in the advice exists.
"""

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from optimus_jax.config.aliases import (
    ALIASES,
    AXIS_OF,
    MESH_WORDS,
    OUR_SECTIONS,
    WORDS_OF,
    meant_by_last_part,
    word,
)
from optimus_jax.errors import closest, similarity
from optimus_jax.system.command import typed_command

_TABLE = tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))
_GROUPS: Mapping[str, list[str]] = {
    entry["group"]: entry["names"] for entry in _TABLE["entry"] if "group" in entry
}
"""Names that mean the same, by the group that the functions below ask for."""
VALUES: Mapping[str, Mapping[str, str]] = {
    target: {other: ours for ours, others in values.items() for other in others}
    for target, values in _TABLE["values"].items()
}
"""Setting -> another framework's value -> our value, which the error suggests."""
VALUE_ADVICE: Mapping[str, Mapping[str, str]] = _TABLE["value_advice"]
"""Setting -> another framework's value -> what to write instead."""

Others = Mapping[str, Any]
"""Other arguments: names, as `word` writes them, to values."""
Advice = str | Callable[[str, Others], str]
"""Advice text with the placeholders `{value}` and `{optimus COMMAND}`, or a function (value, other
arguments) -> text."""


def advice_for(name: str, value: object = None, others: Others | None = None) -> str | None:
    """What to write instead of a word of another framework; None: it is not in the table.

    Args:
      name: as typed; a dotted name matches as a whole, by its last or by its first part.
      value: as typed; None: given without a value.
      others: other arguments that the advice may use.
    """
    whole = word(name)
    section, dot, _ = whole.partition(".")
    is_foreign = not (dot and section in OUR_SECTIONS) and not meant_by_last_part(name)
    parts = [
        whole,
        ".".join(whole.split(".")[-2:]),
        whole.rpartition(".")[2],
        *([section] if is_foreign else []),
    ]
    advice = next((ADVICE[each] for each in parts if each in ADVICE), None)
    others = {each.rpartition(".")[2]: given for each, given in (others or {}).items()} | dict(
        others or {}
    )
    text = "N" if value is None else str(value)[:100]
    if advice is None or not isinstance(advice, str):
        return advice and advice(text, others)
    return _COMMAND.sub(lambda found: typed_command(found[1]), advice).replace("{value}", text)


def advice_for_value(setting: str, value: object) -> str | None:
    """What to write instead of another framework's value; None: it is not in the table.

    Args:
      setting: its dotted name.
      value: as given; of a list of values, all are answered.
    """
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(each, str) for each in texts):
        return None
    words = [each.strip().lower() for each in texts]
    for each in words:
        if (advice := VALUE_ADVICE.get(setting, {}).get(each)) is not None:
            return advice
    ours = VALUES.get(setting, {})
    if not any(each in ours for each in words):
        return None
    return f"did you mean {','.join(dict.fromkeys(ours.get(each, each) for each in words))!r}?"


_COMMAND = re.compile(r"\{optimus (\w+)\}")


MISSPELLED = 0.8
"""Minimum similarity at which a name counts as a typo of a known name."""


def spelled_like(
    name: str, known: Iterable[str], value: object = None, others: Others | None = None
) -> str | None:
    """Suggests a known name, or one of the tables, that is spelled like `name`; None: there is
    none.
    """
    known = list(known)
    close, foreign = closest(name, known), closest(name, [*ALIASES, *ADVICE])
    if (
        foreign is not None
        and similarity(name, foreign) >= MISSPELLED
        and (close is None or similarity(name, close) < similarity(name, foreign))
    ):
        return (
            f"did you mean {foreign!r}, which is {ALIASES[foreign]} here?"
            if foreign in ALIASES
            else f"did you mean {foreign!r}? {advice_for(foreign, value, others)}"
        )
    return None if close is None else f"did you mean {close!r}?"


def _number(others: Others, *names: str) -> int | None:
    """The first of these arguments that is a whole number; None: none is."""
    return next(
        (
            int(text)
            for name in names
            if re.fullmatch(r"\d{1,9}", text := str(others.get(name, "")).strip())
        ),
        None,
    )


def _global_batch(others: Others) -> int | None:
    return _number(others, "global_batch", "data.global_batch", "global_batch_size")


def _steps(others: Others) -> int | None:
    return _number(others, "steps", *WORDS_OF["steps"])


def _num_devices(others: Others) -> int | None:
    cluster = re.search(r":(?:(\d{1,6})x)?(\d{1,6})$", str(others.get("cluster", "")))
    return _number(others, "cpu_devices", *_GROUPS["devices"], "world_size") or (
        int(cluster[1] or 1) * int(cluster[2]) if cluster else None
    )


def _mesh(value: str, others: Others) -> str:
    """All axes that were given, in one mesh."""
    sizes = {
        axis: size
        for axis, words in MESH_WORDS.items()
        if (size := _number(others, *words.split())) is not None and size > 1
    }
    axes = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    if not axes:
        return (
            "leave it out: an axis of size 1 is not written; --mesh auto, the default, chooses all"
            " of them"
            if value == "1"
            else (
                "write --mesh with sizes whose product is the number of devices, such as --mesh"
                " tensor=2,fsdp=4"
            )
        )
    return (
        f"write --mesh {axes},... with sizes of data, fsdp, tensor and pipe whose product is the"
        " number of devices, or leave all to --mesh auto"
    )


def _no_axis(value: str, _: Others) -> str:
    return (
        "leave it out, 1 means none"
        if value in ("1", "false", "False")
        else "not supported: the mesh has the axes data, fsdp, tensor and pipe; leave it out"
    )


def _per_device(value: str, others: Others) -> str:
    each, devices = _number({"each": value}, "each"), _num_devices(others)
    parts = _number(others, *_GROUPS["accumulation"]) or 1
    if each and devices and (batch := _global_batch(others)):
        return (
            f"leave it out: --global-batch {batch} is of a whole step; {each} at a time on"
            f" {devices} devices that all hold different examples is --microbatches"
            f" {max(1, batch // (each * devices))}"
        )
    if each and devices:
        return (
            f"batches are counted over all devices: {each} on each of {devices} data-parallel"
            f" devices{f' x {parts} accumulated' if parts > 1 else ''} is --global-batch"
            f" {each * devices * parts}" + (f" --microbatches {parts}" if parts > 1 else "")
        )
    return (
        f"batches are counted over all devices: --global-batch is {value} x the devices of data and"
        " fsdp x the microbatches (--microbatches, gradients of which are added)"
    )


def _accumulation(value: str, others: Others) -> str:
    return (
        f"write --microbatches {value}: parts of a step's batch, gradients of which are added;"
        " --global-batch counts the examples of all of them"
        + (
            f", {_per_device(str(each), others)}"
            if (each := _number(others, *_GROUPS["per_device"]))
            else ""
        )
    )


def _share_of_steps(value: str, others: Others) -> str:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    steps = _steps(others)
    number = (
        f"{round(share * steps)} ({share:g} of {steps} steps)"
        if steps and 0 <= share <= 1
        else "N, a number of steps"
    )
    return (
        f"write --set optimizer.warmup_steps={number}; left open, it is 5% of all steps, at most"
        " 2000"
    )


def _least_lr(value: str, others: Others) -> str:
    try:
        share = float(value) / float(
            next(
                others[name]
                for name in ("lr", "optimizer.lr", *WORDS_OF["optimizer.lr"])
                if name in others
            )
        )
        if not math.isfinite(share):
            raise ValueError
    except (ValueError, ZeroDivisionError, StopIteration, TypeError):
        return (
            f"write --set optimizer.min_lr_ratio=X, the last learning rate over the peak: {value} /"
            " the value of --lr"
        )
    return f"write --set optimizer.min_lr_ratio={share:g}, the last learning rate over the peak"


def _samples(value: str, others: Others) -> str:
    number, batch = _number({"number": value}, "number"), _global_batch(others)
    return (
        f"write --steps {-(-number // batch)}: {number:,} examples in steps of {batch}"
        if number and batch
        else "write --steps N: examples / --global-batch"
    )


def _percent(value: str, _: Others) -> str:
    try:
        if not math.isfinite(share := float(value) / 100):
            raise ValueError
        return f"write --set data.eval_fraction={share:g}, a share of the documents"
    except ValueError:
        return "write --set data.eval_fraction=0.01, a share of the documents"


def _precision(value: str, _: Others) -> str:
    name = VALUES["precision.compute"].get(
        value.lower(), value.lower() if value.lower() in ("bf16", "f16", "f32") else None
    )
    return (
        f"write --precision {name}"
        if name
        else "write --precision bf16, f16 or f32 (default: bf16 on GPUs that have it)"
    )


def _coordinator(value: str, _: Others) -> str:
    return (
        f"write --coordinator {value if value.rpartition(':')[2].isdecimal() else f'{value}:PORT'}"
        " --num-processes N --process-id I, or let a launcher say so"
    )


def _rank(value: str, _: Others) -> str:
    return (
        "leave it out: -1 means that nothing is distributed"
        if value == "-1"
        else (
            f"write --process-id {value} with --coordinator HOST:PORT --num-processes N, or let a"
            " launcher say so"
        )
    )


def _switch(advice: str) -> Callable[[str, Others], str]:
    """Advice for a boolean option: `advice` if it is on, else "leave it out"."""
    return lambda value, _: (
        "leave it out: it is off"
        if value.lower() in ("false", "0", "no", "off", "none")
        else advice
    )


def _recomputing(value: str, _: Others) -> str:
    name = {
        "selective": "selective",
        "full": "full",
        "block": "full",
        "uniform": "full",
        "none": "none",
        "false": "none",
        "0": "none",
        "off": "none",
        "dots": "dots",
    }.get(value.lower(), "full")
    return f"write --remat {name} (none, selective, dots, full; default: the least that fits)"


def _tracker(value: str, _: Others) -> str:
    if value.lower() in ("none", "false", "0", "off", "disabled"):
        return (
            "leave it out: nothing is reported by default; metrics.jsonl in the run directory has"
            " every step"
        )
    if value.lower() in ("tensorboard", "wandb", "mlflow"):
        return f"write --log {value.lower()}"
    return (
        "not supported; every step is in metrics.jsonl of the run directory, and --log writes for"
        " tensorboard, wandb and mlflow"
    )


_COMPUTED: Mapping[str, Callable[[str, Others], str]] = {
    function.__name__.lstrip("_"): function
    for function in (
        _mesh,
        _no_axis,
        _per_device,
        _accumulation,
        _samples,
        _share_of_steps,
        _least_lr,
        _percent,
        _precision,
        _coordinator,
        _rank,
        _recomputing,
        _tracker,
    )
}


def _advice_of(entry: Mapping[str, Any]) -> Advice:
    if "computed" in entry:
        return _COMPUTED[entry["computed"]]
    return _switch(entry["if_on"]) if "if_on" in entry else entry["text"]


ADVICE: Mapping[str, Advice] = {
    name: _advice_of(entry) for entry in _TABLE["entry"] for name in entry.get("names", AXIS_OF)
}
"""Name -> what to write instead."""
