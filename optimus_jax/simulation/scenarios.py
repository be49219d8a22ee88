"""What happens in a simulated run: a scenario, read from JSON.

A *scenario* says how long a run is, what happens to its cluster and when (events), how far the
truth lies from what the planner is told, and what a switch really costs. Every field has a default,
so that a scenario names only what it is about; `scenarios.json` holds those that come along. An
event is told by its `kind` (simulation/events.py):

    {"name": "link-quarter", "events": [{"kind": "link", "link": "between", "factor": 0.25,
    "start_s": 900, "for_s": 1440}]}
"""

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

from optimus_jax.config import Config, settings
from optimus_jax.config.checks import check_not_negative, check_positive
from optimus_jax.errors import ConfigError, explain, nearest
from optimus_jax.simulation.events import EVENTS, Event, PhaseEvent
from optimus_jax.store.local_copies import local_file
from optimus_jax.system.json_input import JSONInputError, parse_json

LIBRARY = "scenarios.json"


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """How far the truth lies from what the planner is told.

    Signs and amounts are drawn by the seed, and hidden.
    """

    links: float = 0.3
    """A link is this share faster or slower than it is called."""
    rates: float = 0.15
    """Matmuls and passes over memory, likewise."""
    terms: float = 0.1
    """Standard deviation of the logarithm of what each term of the time model is off by."""
    plans: float = 0.02
    """The same for each plan as a whole, which no term explains."""
    memory: float = 0.03
    """The same for the bytes of each plan."""
    noise: float = 0.02
    """The same for a step's time from one step to the next."""
    spikes: float = 0.002
    """Probability of a step that takes several times as long."""
    spike_factor: float = 4.0
    """How many times, about."""
    drift: float = 0.02
    """Standard deviation of the logarithm by which steps have become slower or faster at the end of
    the run."""
    probes: float = 0.05
    """Standard deviation of the logarithm of a probe from one to the next."""
    probe_bias: float = 0.08
    """The same of what probes of a link or of compute are off by all the time: a probe is not a
    step."""

    def __post_init__(self) -> None:
        check_not_negative(self, *(each.name for each in dataclasses.fields(self)))
        check_positive(self, "spike_factor")
        for name in ("links", "rates", "spikes"):
            if getattr(self, name) >= 1:
                raise ConfigError(
                    explain(
                        f"misfit.{name} is a share",
                        given=getattr(self, name),
                        do="choose 0 or more and less than 1",
                    )
                )


@dataclass(frozen=True, kw_only=True)
class Prior:
    """A wrong belief: what the planner is told, over what would be nominal."""

    inside: float = 1.0
    """Speed of the link inside hosts."""
    between: float = 1.0
    """Speed of the link between hosts."""
    compute: float = 1.0
    """Speed of matmuls."""

    def __post_init__(self) -> None:
        check_positive(self, "inside", "between", "compute")


@dataclass(frozen=True, kw_only=True)
class Switching:
    """What a switch, a restart and a probe really take, about: by `spread`, the seed draws what
    each phase takes in its run.
    """

    spread: float = 0.4
    """Standard deviation of the logarithm of each phase's time over what stands here."""
    compile_s: float = 60.0
    """Compiling in the background, while training goes on."""
    compile_slowdown: float = 1.04
    """Factor on steps in the meantime."""
    quiesce_s: float = 0.3
    """Until all processes stand at the same step."""
    move_share: float = 0.4
    """Of a link's speed that moving the state reaches."""
    move_s: float = 0.5
    """What moving takes besides."""
    verify_s: float = 1.0
    """Checksums and the loss probe."""
    first_steps_s: float = 1.5
    """What the first steps of an executable take beyond their time."""
    restart_s: float = 150.0
    """From the end of the processes to the first step, where the set of devices changes or there
    was a fault: start, restore, compile."""
    checkpoint_bytes_per_s: float = 2e9
    """To and from disk, each host."""
    checkpoint_every_s: float = 300.0
    """Between checkpoints."""
    detect_s: float = 20.0
    """Until a watchdog ends a run that hangs because devices are gone."""
    probe_s: float = 0.05
    """One round of probes, in which no step runs."""

    def __post_init__(self) -> None:
        check_not_negative(self, *(each.name for each in dataclasses.fields(self)))
        check_positive(
            self, "compile_slowdown", "move_share", "checkpoint_bytes_per_s", "checkpoint_every_s"
        )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run, and what happens to it."""

    name: str
    about: str = ""
    """One sentence for people."""
    duration_s: float = 3600.0
    """Of the run, were nothing to happen, as predicted under its first plan; says how many steps it
    has."""
    steps: int | None = None
    """Says so instead."""
    start: str = "best"
    """First plan: `best` (the fastest of the best as predicted, `parallel.trials` of which are
    tried before the run begins), `default` (fsdp over everything, one microbatch), or a mesh such
    as `data=8,tensor=8`."""
    events: tuple[Event, ...] = ()
    seq_len: int | None = None
    """Tokens of an example in the first phase; None: as asked for at the command line."""
    global_batch: int | None = None
    """Examples of a step in the first phase; None: likewise."""
    step_time_s: float | None = None
    """True usual step time of the first plan in the first phase; all plans are scaled by as much.
    None: as the misfit has it."""
    step_factors: tuple[float, ...] = ()
    """Of each step, what it took over the usual, as recorded (simulation/replay.py); begins again
    at its end. Empty: drawn by the seed."""
    misfit: Misfit = field(default_factory=Misfit)
    prior: Prior = field(default_factory=Prior)
    switching: Switching = field(default_factory=Switching)

    def __post_init__(self) -> None:
        check_positive(self, "seq_len", "global_batch")
        if self.duration_s <= 0 or (self.steps is not None and self.steps < 1):
            raise ConfigError(
                explain(
                    "a run has at least one step",
                    given=f"duration_s={self.duration_s}, steps={self.steps}",
                    do="choose more",
                )
            )
        if min(self.step_factors, default=1.0) <= 0 or (self.step_time_s or 1.0) <= 0:
            raise ConfigError(
                explain(
                    "steps take some time",
                    given=f"step_time_s={self.step_time_s} and step_factors",
                    do="give numbers above 0",
                )
            )
        shares = [phase.start_share for phase in self.phases]
        if shares != sorted(set(shares)):
            raise ConfigError(
                explain(
                    "phases come one after the other",
                    given=f"start_share={shares}",
                    do="list them in rising order",
                )
            )

    @property
    def phases(self) -> list[PhaseEvent]:
        """Changes of the data, in order."""
        return [event for event in self.events if isinstance(event, PhaseEvent)]

    def configs(self, config: Config) -> list[tuple[float, Config]]:
        """The run's config in each phase, with the share of steps at which that begins; positions
        suffice for the longest.
        """
        seq_len, global_batch = (
            self.seq_len or config.seq_len,
            self.global_batch or config.data.global_batch,
        )
        sizes = [(0.0, seq_len, global_batch)]
        for phase in self.phases:
            seq_len, global_batch = phase.seq_len or seq_len, phase.global_batch or global_batch
            sizes.append((phase.start_share, seq_len, global_batch))
        longest = max(config.model.max_length, *[length for _, length, _ in sizes])
        return [
            (
                share,
                config.with_values(
                    {
                        "model.max_length": longest,
                        "data.seq_len": length,
                        "data.global_batch": batch,
                    }
                ),
            )
            for share, length, batch in sizes
        ]

    def to_json(self) -> str:
        """The scenario, every field spelled out."""
        kinds = {cls: kind for kind, cls in EVENTS.items()}
        events = [
            {"kind": kinds[type(event)], **dataclasses.asdict(event)} for event in self.events
        ]
        return json.dumps({**dataclasses.asdict(self), "events": events}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "a scenario") -> "Scenario":
        """From what `to_json` writes, or a part of it. Raises ConfigError, naming the field."""
        try:
            return _scenario(parse_json(text))
        except JSONInputError as error:
            raise ConfigError(
                explain(f"{where} is not JSON", given=error, do="mend the file")
            ) from error


def read_scenario(path: str | Path) -> Scenario:
    """From a file. Raises ConfigError."""
    try:
        text = local_file(path, what="--scenario").read_bytes()
    except OSError as error:
        raise ConfigError(
            explain("a scenario cannot be read", given=f"{path}: {error}", do="name a JSON file")
        ) from error
    return Scenario.from_json(text, str(path))


@cache
def library() -> Mapping[str, Scenario]:
    """The scenarios that come along, by name."""
    values = json.loads(
        resources.files("optimus_jax.simulation").joinpath(LIBRARY).read_text(encoding="utf-8")
    )
    return {scenario.name: scenario for scenario in map(_scenario, values)}


def scenario_named(name: str) -> Scenario:
    """One of the library. Raises ConfigError."""
    known = library()
    if name not in known:
        raise ConfigError(
            explain(
                f"unknown scenario {name!r}",
                given=f"--scenario {name}",
                do=nearest(name, known) + " (or name a JSON file)",
            )
        )
    return known[name]


def _scenario(value: object) -> Scenario:
    if not isinstance(value, Mapping) or not isinstance(value.get("events", []), list):
        raise ConfigError(
            explain(
                "a scenario is a JSON object, and its events a list",
                given=str(value)[:80],
                do="see optimus_jax/simulation/scenarios.json",
            )
        )
    fields = {name: item for name, item in value.items() if name != "events"}
    events = tuple(
        _event(item, f"events[{place}]") for place, item in enumerate(value.get("events", []))
    )
    return dataclasses.replace(_build(Scenario, fields, "scenario"), events=events)


def _event(value: object, path: str) -> Event:
    kind = str(value.get("kind")) if isinstance(value, Mapping) else ""
    if not isinstance(value, Mapping) or kind not in EVENTS:
        raise ConfigError(
            explain(
                f"{path} is of no known kind", given=settings.shown(value), do=nearest(kind, EVENTS)
            )
        )
    return typing.cast(
        Event,
        _build(EVENTS[kind], {name: item for name, item in value.items() if name != "kind"}, path),
    )


Built = typing.TypeVar("Built")


def _build(cls: type[Built], value: Mapping[str, object], path: str) -> Built:
    missing = [
        each.name
        for each in dataclasses.fields(typing.cast(typing.Any, cls))
        if each.default is dataclasses.MISSING
        and each.default_factory is dataclasses.MISSING
        and each.name not in value
    ]
    if missing:
        raise ConfigError(
            explain(
                f"{path} is not complete",
                given=settings.shown(dict(value)),
                do="give " + ", ".join(missing),
            )
        )
    return settings.build(cls, value, f"{path}.")
