"""Suggests settings in place of an unknown one."""

import functools
from collections.abc import Iterable

from optimus_jax.config.settings import setting_names
from optimus_jax.config.whole import Config
from optimus_jax.errors import closest


def of_inner_section(name: str) -> str | None:
    """Suggests settings of the inner section in `name`, such as optimizer.lr_factors, whose own
    section may be left out. None: there is no such section, or another has a setting of the name.
    """
    section, _, leaf = name.rpartition(".")
    names = {each: each.rpartition(".")[0] for each in known_settings()}
    inner = {own for own in names.values() if "." in own}
    for wanted, last in ((section, leaf), (name, "")):
        found = [own for own in inner if wanted and f".{own}".endswith(f".{wanted}")]
        if len(found) != 1:
            continue
        if last and last in (each.rpartition(".")[2] for each in names):
            return None
        leaves = [each.rpartition(".")[2] for each, own in names.items() if own in found]
        if last and (close := closest(last, leaves)) is not None:
            return f"did you mean {f'{found[0]}.{close}'!r}?"
        return "choose one of: " + ", ".join(f"{found[0]}.{each}" for each in leaves)
    return None


def of_section(name: str, short_names: Iterable[str]) -> str:
    """The settings of the section in `name`; if there is none, all short names and sections."""
    own = [each for each in known_settings() if each.startswith(f"{name.partition('.')[0]}.")]
    sections = dict.fromkeys(
        f"{each.partition('.')[0]}.*" for each in known_settings() if "." in each
    )
    return "choose one of: " + ", ".join(own or [*short_names, *sections])


@functools.cache
def known_settings() -> dict[str, None]:
    """The dotted names of all settings, in order."""
    return dict.fromkeys(setting_names(Config))
