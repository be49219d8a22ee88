"""Draws scenarios at random: `random:17` is the one that seed 17 draws.

A controller that was tuned on the built-in scenarios has to do well on these too. They have up to
four events of any kind, which may overlap, and all that policies assume may be wrong. Sizes are for
clusters of 64 devices or more, in hosts of eight.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from optimus_jax.simulation.scenarios import Scenario

RANDOM = "random:"
"""Beginning of the names of drawn scenarios. The seed follows."""
MINUTES = (20.0, 90.0)
"""Durations of the shortest and the longest run."""
MOST_EVENTS = 4
CURRICULUM_SHARE = 0.15
"""Share of scenarios in which sequences become longer, beside what else happens."""
MOST_MISFIT = 0.15
"""Largest standard deviation of the log errors of terms, and of plans."""
MOST_COST_FACTOR = 10.0
"""Largest factor by which switches cost more, or less, than usual."""
NUM_HOSTS, DEVICES_PER_HOST = 8, 8
"""Events name hosts and devices of a cluster of this size."""
STARTS = ("best", "best", "default")
"""First plans (Scenario.start): two of three runs try plans first, as with `--mesh auto`."""
READINGS = (
    ["process_skew", "straggler"],
    ["link_slowdown/*"],
    ["process_skew", "straggler", "compute_slowdown", "link_slowdown/*"],
    ["memory_*"],
    ["utilisation", "mfu"],
    ["*"],
)
"""Readings that are faulty together."""
SWITCH_PHASES = ("prepare", "move", "verify", "canary")
CURRICULUM = ((2048, 1024), (8192, 256), (32768, 64))
"""Tokens per example and examples per step, phase by phase."""

T = TypeVar("T")
Value = dict[str, object]
"""An event, or a part of one, as in a scenario's JSON."""


def random_scenario(seed: int, *, num_hosts: int = NUM_HOSTS) -> Scenario:
    """The scenario that this seed draws.

    Args:
      seed: an integer of 0 or more; the same seed draws the same scenario.
      num_hosts: events name hosts below this number, and their devices.
    """
    draw = _Draw(seed, num_hosts)
    kinds = [draw.one(tuple(DRAWN)) for _ in range(draw.up_to(MOST_EVENTS))]
    events = [event for kind in kinds for event in DRAWN[kind](draw)]
    value: Value = {
        "name": f"{RANDOM}{seed}",
        "duration_s": draw.duration_s,
        "start": draw.one(STARTS),
        "misfit": {
            "terms": draw.uniform(0.0, MOST_MISFIT),
            "plans": draw.uniform(0.0, MOST_MISFIT),
        },
        "prior": {
            "intra_host": draw.sometimes(0.25, 2.0),
            "inter_host": draw.sometimes(0.25, 4.0),
            "compute": draw.sometimes(0.25, 1.4),
            "memory": draw.sometimes(0.25, 1.15),
        },
        "switching": {"cost_factor": draw.sometimes(0.5, MOST_COST_FACTOR)},
    }
    if draw.happens(CURRICULUM_SHARE):
        (seq_len, global_batch), kinds = CURRICULUM[0], [*kinds, "curriculum"]
        value |= {"seq_len": seq_len, "global_batch": global_batch}
        events += draw.longer_sequences()
    about = f"Drawn at random. Events: {', '.join(kinds) or 'none'}."
    return Scenario.from_json(json.dumps({**value, "about": about, "events": events}))


class _Draw:
    """Draws the parts of one scenario."""

    def __init__(self, seed: int, num_hosts: int):
        self._random, self._num_hosts = np.random.default_rng([seed, 7]), num_hosts
        self.duration_s = round(60 * self.uniform(*MINUTES))

    def uniform(self, low: float, high: float) -> float:
        """A number in this range, of three digits, so that the scenario can be read easily."""
        return float(f"{self._random.uniform(low, high):.3g}")

    def log_uniform(self, low: float, high: float) -> float:
        """The same, drawn evenly on a logarithmic scale."""
        return float(f"{math.exp(self._random.uniform(math.log(low), math.log(high))):.3g}")

    def up_to(self, most: int) -> int:
        """An integer from 0 to `most`."""
        return int(self._random.integers(most + 1))

    def one(self, values: Sequence[T]) -> T:
        """One of the values."""
        return values[self.up_to(len(values) - 1)]

    def happens(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return bool(self._random.random() < probability)

    def sometimes(self, probability: float, most: float) -> float:
        """With this probability a factor from 1 / most to most; else 1."""
        return self.log_uniform(1 / most, most) if self.happens(probability) else 1.0

    def hosts(self, count: int) -> list[int]:
        """So many different hosts, or all if there are fewer."""
        return self._random.permutation(self._num_hosts)[:count].tolist()

    def device(self) -> int:
        """A device."""
        return self.up_to(self._num_hosts * DEVICES_PER_HOST - 1)

    def when(self) -> Value:
        """When an event begins and how long it lasts: half of all, to the end of the run."""
        start_s = round(self.duration_s * self.uniform(0.0, 0.8))
        for_s = round(self.duration_s * self.log_uniform(0.03, 0.6))
        return {"start_s": start_s, **({"for_s": for_s} if self.happens(0.5) else {})}

    def growing_or_repeated(self) -> Value:
        """The same; some events grow for a while, and some come again and again."""
        when = self.when()
        ramp_s = round(self.duration_s * self.uniform(0.1, 0.7))
        for_s = when.get("for_s")
        if self.happens(0.25):
            lasts = {"for_s": for_s + ramp_s} if isinstance(for_s, int) else {}
            return {**when, "ramp_s": ramp_s, **lasts}
        if isinstance(for_s, int) and self.happens(0.2):
            every_s = for_s * self.uniform(1.3, 3.0)
            return {**when, "every_s": every_s, "jitter": self.uniform(0.0, 0.3)}
        return when

    def link(self) -> list[Value]:
        """A link becomes slower, or one time in five faster."""
        return [
            {
                "kind": "link",
                "link": "inter_host" if self.happens(0.75) else "intra_host",
                "factor": self.uniform(1.5, 4.0)
                if self.happens(0.2)
                else self.log_uniform(0.1, 0.8),
                **self.growing_or_repeated(),
            }
        ]

    def slow_devices(self) -> list[Value]:
        """A device, a host, two hosts or all devices compute more slowly."""
        when, kind = self.growing_or_repeated(), self.one(("device", "host", "two hosts", "all"))
        places: list[Value] = [{}]
        if kind == "device":
            places = [{"devices": [self.device()]}]
        elif kind != "all":
            places = [{"host": host} for host in self.hosts(1 if kind == "host" else 2)]
        return [
            {"kind": "compute", "factor": self.uniform(1.1, 2.0), **place, **when}
            for place in places
        ]

    def memory(self) -> list[Value]:
        """Something else takes memory on every device."""
        share = self.uniform(0.05, 0.6)
        return [{"kind": "memory", "share": share, **self.growing_or_repeated()}]

    def data(self) -> list[Value]:
        """Batches come late."""
        wait_s = self.log_uniform(0.02, 1.0)
        return [{"kind": "data", "wait_s": wait_s, **self.growing_or_repeated()}]

    def loss(self) -> list[Value]:
        """A device or a host is lost, perhaps with notice, perhaps in a switch."""
        place = {"devices": [self.device()]} if self.happens(0.5) else {"host": self.hosts(1)[0]}
        return [
            {
                "kind": "lost",
                **place,
                **self.when(),
                "notice_s": self.one((0, 0, 120)),
                # Rarely in a switch: that loses devices earlier than the run that stays loses them.
                "during": self.one((*["none"] * 20, *SWITCH_PHASES)),
            }
        ]

    def readings(self) -> list[Value]:
        """Readings are missing, frozen or wrong."""
        return [
            {
                "kind": "metrics",
                "names": self.one(READINGS),
                "fault": self.one(("missing", "stale", "lying")),
                "factor": self.log_uniform(0.1, 10.0),
                **self.when(),
            }
        ]

    def failing_switches(self) -> list[Value]:
        """The first switches fail."""
        return [{"kind": "switch", "phase": self.one(SWITCH_PHASES), "count": 1 + self.up_to(2)}]

    def longer_sequences(self) -> list[Value]:
        """Sequences become longer, once or twice, with as many tokens in each step."""
        shares = sorted({self.uniform(0.1, 0.9) for _ in range(1 + self.up_to(1))})
        return [
            {"kind": "phase", "start_share": share, "seq_len": seq_len, "global_batch": batch}
            for share, (seq_len, batch) in zip(shares, CURRICULUM[1:], strict=False)
        ]


DRAWN: Mapping[str, Callable[[_Draw], list[Value]]] = {
    "link": _Draw.link,
    "slow devices": _Draw.slow_devices,
    "memory": _Draw.memory,
    "late batches": _Draw.data,
    "lost devices": _Draw.loss,
    "faulty readings": _Draw.readings,
    "failing switches": _Draw.failing_switches,
}
"""Kinds of events that are drawn, each as often."""
