"""Scenarios of simulated runs, read from JSON.

A *scenario* says how long a run is, what happens to its cluster and when (events), how far the
truth differs from what the planner assumes, and what a switch really costs. Fields have defaults,
so a scenario names only what matters to it. simulation/named_scenarios.py finds the
built-in ones. The `kind` of an event names its class (simulation/events.py):

    {"name": "link-quarter", "events": [{"kind": "link", "link": "inter_host", "factor": 0.25,
    "start_s": 900, "for_s": 1440}]}
"""

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field

from optimus_jax.config import Config, settings
from optimus_jax.config.checks import check_not_negative, check_positive
from optimus_jax.control.signals import OLD_SIGNAL_NAMES, REPLACED_SIGNALS
from optimus_jax.errors import ConfigError, explain, nearest
from optimus_jax.planning.profiles.cluster import OLD_LINK_NAMES
from optimus_jax.simulation.events import EVENTS, PhaseEvent, ScenarioEvent
from optimus_jax.system.json_input import JSONInputError, parse_json


@dataclass(frozen=True, kw_only=True)
class ModelDiscrepancy:
    """How far the truth differs from the planner's model of it.

    The seed draws signs and amounts. Policies do not see them.
    """

    links: float = 0.3
    """Share by which a link is faster or slower than its nominal speed."""
    rates: float = 0.15
    """The same for the speeds of matmuls and of memory."""
    terms: float = 0.1
    """Standard deviation of the log error of each term of the time model."""
    plans: float = 0.02
    """The same for the time of each plan as a whole, which no term explains."""
    memory: float = 0.03
    """The same for the bytes of each plan."""
    noise: float = 0.02
    """Standard deviation of the noise of log step time."""
    spikes: float = 0.002
    """Probability of a step that takes several times as long."""
    spike_factor: float = 4.0
    """Typical factor on the time of such a step."""
    drift: float = 0.02
    """Standard deviation of the drift of log step time by the end of the run."""
    probes: float = 0.05
    """Standard deviation of the noise of a probe's logarithm."""
    probe_bias: float = 0.08
    """Standard deviation of the constant log error of the probes of a link or of compute, since a
    probe is not a step."""

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
    """A wrong hardware profile: what the planner assumes over what is nominal."""

    intra_host: float = 1.0
    """Factor on the speed of the link inside hosts."""
    inter_host: float = 1.0
    """Factor on the speed of the link between hosts."""
    compute: float = 1.0
    """Factor on the speed of matmuls."""
    memory: float = 1.0
    """Factor on the memory of devices. With 1.15 every plan seems to need so much less of it: its
    true need is 1.15 times the estimate."""

    def __post_init__(self) -> None:
        check_positive(self, *(each.name for each in dataclasses.fields(self)))


@dataclass(frozen=True, kw_only=True)
class Switching:
    """Typical real times of a switch, a restart and a probe. For each run, the seed draws the time
    of each phase around them, by `spread`.
    """

    cost_factor: float = 1.0
    """Factor on the time of every phase of a switch and of a restart. What the controller expects
    of them (control/deciding/switch_costs.py) stays as it is."""
    spread: float = 0.4
    """Standard deviation of the logarithm of each phase's time over its typical time."""
    compile_s: float = 60.0
    """Time of compiling in the background, while training continues."""
    compile_slowdown: float = 1.04
    """Factor on step times meanwhile."""
    quiesce_s: float = 0.3
    """Time until all processes have stopped at the same step."""
    move_share: float = 0.4
    """Share of a link's speed that moving the state reaches."""
    move_s: float = 0.5
    """Fixed time of a move."""
    verify_s: float = 1.0
    """Time of checksums and the loss probe."""
    first_steps_s: float = 1.5
    """Extra time of an executable's first steps."""
    restart_s: float = 150.0
    """Time of a restart, from the end of the processes to the first step: start, restore, compile.
    It is needed if the set of devices changes and after a fault."""
    checkpoint_bytes_per_s: float = 2e9
    """Speed of each host to and from disk."""
    checkpoint_every_s: float = 300.0
    """Time between checkpoints."""
    detect_s: float = 20.0
    """Time until a watchdog ends a run that hangs because devices are lost."""
    probe_s: float = 0.05
    """Time of one round of probes, in which no step runs."""

    def __post_init__(self) -> None:
        check_not_negative(self, *(each.name for each in dataclasses.fields(self)))
        check_positive(
            self,
            "cost_factor",
            "compile_slowdown",
            "move_share",
            "checkpoint_bytes_per_s",
            "checkpoint_every_s",
        )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A simulated run and what happens to it."""

    name: str
    about: str = ""
    """Description in one sentence."""
    duration_s: float = 3600.0
    """Predicted duration of the undisturbed run under its first plan; sets the number of steps."""
    steps: int | None = None
    """Number of steps; None: set by `duration_s`."""
    start: str = "best"
    """First plan: `best` (the fastest in trials of the `parallel.trials` plans with the best
    predictions), `default` (fsdp over everything, one microbatch), or a mesh such as
    `data=8,tensor=8`."""
    events: tuple[ScenarioEvent, ...] = ()
    seq_len: int | None = None
    """Tokens per example in the first phase; None: as in the config."""
    global_batch: int | None = None
    """Examples per step in the first phase; None: as in the config."""
    step_time_s: float | None = None
    """True usual step time of the first plan in the first phase. All plans are scaled by the same
    factor. None: `misfit` decides."""
    step_factors: tuple[float, ...] = ()
    """Recorded time of each step over the usual (simulation/replay.py), repeated if the run is
    longer. Empty: drawn by the seed."""
    misfit: ModelDiscrepancy = field(default_factory=ModelDiscrepancy)
    prior: Prior = field(default_factory=Prior)
    switching: Switching = field(default_factory=Switching)

    def __post_init__(self) -> None:
        check_positive(self, "seq_len", "global_batch")
        if self.duration_s <= 0 or (self.steps is not None and self.steps < 1):
            raise ConfigError(
                explain(
                    "a run must have at least one step",
                    given=f"duration_s={self.duration_s}, steps={self.steps}",
                    do="choose more",
                )
            )
        if min(self.step_factors, default=1.0) <= 0 or (self.step_time_s or 1.0) <= 0:
            raise ConfigError(
                explain(
                    "the time of a step must be positive",
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
        """Changes of the batch shape, in order."""
        return [event for event in self.events if isinstance(event, PhaseEvent)]

    def configs(self, config: Config) -> list[tuple[float, Config]]:
        """The config of each phase, with the share of steps at which the phase begins. In all of
        them, `model.max_length` suffices for the longest sequences.
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
        """The scenario as JSON, with every field."""
        kinds = {cls: kind for kind, cls in EVENTS.items()}
        events = [
            {"kind": kinds[type(event)], **dataclasses.asdict(event)} for event in self.events
        ]
        return json.dumps({**dataclasses.asdict(self), "events": events}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "a scenario") -> "Scenario":
        """Read what `to_json` writes, or a part of it. Raises ConfigError that names the field."""
        try:
            return _scenario(parse_json(text))
        except JSONInputError as error:
            raise ConfigError(
                explain(f"{where} is not JSON", given=error, do="fix the file")
            ) from error


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
    if isinstance(prior := fields.get("prior"), Mapping):
        fields["prior"] = _with_new_link_names(prior)
    events = tuple(
        _event(item, f"events[{place}]") for place, item in enumerate(value.get("events", []))
    )
    return dataclasses.replace(_build(Scenario, fields, "scenario"), events=events)


def _event(value: object, path: str) -> ScenarioEvent:
    kind = str(value.get("kind")) if isinstance(value, Mapping) else ""
    if not isinstance(value, Mapping) or kind not in EVENTS:
        raise ConfigError(
            explain(
                f"{path} is of no known kind", given=settings.shown(value), do=nearest(kind, EVENTS)
            )
        )
    fields = {name: item for name, item in value.items() if name != "kind"}
    # Other types are refused with the field's name below.
    if isinstance(link := fields.get("link"), str):
        fields["link"] = OLD_LINK_NAMES.get(link, link)
    names = fields.get("names")
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        renamed = OLD_SIGNAL_NAMES | REPLACED_SIGNALS
        fields["names"] = list(dict.fromkeys(renamed.get(name, name) for name in names))
    return typing.cast(ScenarioEvent, _build(EVENTS[kind], fields, path))


def _with_new_link_names(prior: Mapping[str, object]) -> dict[str, object]:
    """The factors of a prior, with links that have their earlier names renamed."""
    new = {name: OLD_LINK_NAMES.get(name, name) for name in prior}
    return {name if new[name] in prior else new[name]: item for name, item in prior.items()}


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
