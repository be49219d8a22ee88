"""Finds scenarios by name: built-in ones, drawn ones (`random:SEED`), and JSON files."""

import json
import os
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

from optimus_jax.errors import ConfigError, explain, nearest
from optimus_jax.simulation.random_scenarios import RANDOM, random_scenario
from optimus_jax.simulation.scenarios import Scenario
from optimus_jax.store.local_copies import local_file

BUILT_IN = "scenarios.json"


def find_scenario(name: str) -> Scenario:
    """The scenario in the JSON file `name`, or of this name.

    Raises ConfigError if the file cannot be read, or there is no such scenario.
    """
    if name.endswith(".json") or os.path.isfile(name):
        return read_scenario(name)
    return scenario_named(name)


def scenario_named(name: str) -> Scenario:
    """The built-in scenario of this name, or with `random:SEED` the one that the seed draws.

    Raises ConfigError if there is none.
    """
    if name.startswith(RANDOM):
        return random_scenario(_seed(name))
    known = library()
    if name not in known:
        raise ConfigError(
            explain(
                f"unknown scenario {name!r}",
                given=f"--scenario {name}",
                do=nearest(name, known) + f" (or name a JSON file, or {RANDOM}SEED)",
            )
        )
    return known[name]


def read_scenario(path: str | Path) -> Scenario:
    """Read a scenario from a file. Raises ConfigError if it cannot be read."""
    try:
        text = local_file(path, what="--scenario").read_bytes()
    except OSError as error:
        raise ConfigError(
            explain("a scenario cannot be read", given=f"{path}: {error}", do="name a JSON file")
        ) from error
    return Scenario.from_json(text, str(path))


@cache
def library() -> Mapping[str, Scenario]:
    """The built-in scenarios by name."""
    values = json.loads(
        resources.files("optimus_jax.simulation").joinpath(BUILT_IN).read_text(encoding="utf-8")
    )
    scenarios = [Scenario.from_json(json.dumps(value)) for value in values]
    return {scenario.name: scenario for scenario in scenarios}


def _seed(name: str) -> int:
    seed = name.removeprefix(RANDOM)
    if not (seed.isascii() and seed.isdigit()):
        raise ConfigError(
            explain(
                "a random scenario is named by its seed, an integer of 0 or more",
                given=f"--scenario {name}",
                do=f"write for example {RANDOM}17",
            )
        )
    return int(seed)
