"""What training on a number of tokens takes: time, device-hours, money and energy."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from optimus_jax.devices.accelerators import accelerator_named
from optimus_jax.errors import ConfigError, explain
from optimus_jax.planning.cost.cost import Prediction
from optimus_jax.planning.profiles.cluster import Cluster

_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([kmbt]?)", re.IGNORECASE)
_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_HOUR_S, _DAY_S = 3600.0, 86400.0
_KWH_J = 3.6e6


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """What it takes to train on some tokens without interruptions, evaluations and checkpoints;
    predicted.
    """

    num_tokens: float
    time_s: float
    device_hours: float
    """Hours of all devices together."""
    price: float | None
    """In the currency of the price of a device-hour; None: that is not known."""
    energy_kwh: float | None
    """Most that the devices draw, by their rated power, without hosts and cooling; None: it is not
    published."""

    @classmethod
    def of(
        cls,
        num_tokens: float,
        prediction: Prediction,
        cluster: Cluster,
        price_per_hour: float | None = None,
        later: Sequence[tuple[float, float]] = (),
    ) -> "TrainingCost":
        """That of training under a plan.

        Args:
          prediction: of the plan's step.
          cluster: whose devices are all paid for.
          price_per_hour: of a device.
          later: of each later phase, the tokens before it and its tokens per second. The last one
            has all tokens that are left.
        """
        phases = [(0.0, prediction.tokens_per_s), *later]
        ends = [*(min(begin, num_tokens) for begin, _ in later), num_tokens]
        time_s = sum(
            max(0.0, end - begin) / tokens_per_s
            for (begin, tokens_per_s), end in zip(phases, ends, strict=True)
        )
        device_hours = time_s / _HOUR_S * cluster.num_devices
        watts = cluster.accelerator.rated_power_w
        return cls(
            num_tokens=num_tokens,
            time_s=time_s,
            device_hours=device_hours,
            price=None if price_per_hour is None else price_per_hour * device_hours,
            energy_kwh=None if watts is None else watts * device_hours * _HOUR_S / _KWH_J,
        )

    @property
    def days(self) -> float:
        """`time_s` in days."""
        return self.time_s / _DAY_S

    def as_json(self) -> dict[str, Any]:
        """What `optimus plan --json` prints."""
        return asdict(self)

    def cells(self) -> list[str]:
        """Time, device-hours, price and energy as texts; empty: not known."""
        return [
            f"{_plain(self.days)} d" if self.days >= 1 else f"{_plain(self.time_s / _HOUR_S)} h",
            _plain(self.device_hours),
            "" if self.price is None else _plain(self.price),
            "" if self.energy_kwh is None else _plain(self.energy_kwh / 1e3),
        ]

    def describe(self) -> str:
        """One line for people."""
        time, hours, price, energy = self.cells()
        text = f"{compact(self.num_tokens)} tokens: {time}, {hours} device-hours"
        text += f", {price} to pay" if price else ""
        return text + (f", at most {energy} MWh of the devices" if energy else "")


def _plain(number: float) -> str:
    """A number as text, with at least two digits."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2g}"


def compact(number: float) -> str:
    """A large number as text, with k, M, B or T and up to three digits."""
    for unit, power in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * power:  # which is rounded to it
            return f"{number / power:.3g}{unit}"
    return f"{number:.3g}"


def parse_tokens(text: str) -> float:
    """A number of tokens, such as `15T`, `300B` or `1e12`. Raises ConfigError if it is none."""
    match = _NUMBER.fullmatch(text.strip())
    number = 0.0 if match is None else float(match[1]) * _POWERS[match[2].lower()]
    if not 0 < number < math.inf:
        raise ConfigError(
            explain(
                "--tokens is a number of tokens to train on",
                given=text,
                do="write it as 15T, 300B or 1e12",
            )
        )
    return number


def parse_prices(texts: Iterable[str]) -> Mapping[str, float]:
    """Prices of a device-hour by the accelerator's name; "" for all others.

    Args:
      texts: `2.50`, or `h100=2.50` for one kind of device.
    Raises:
      ConfigError: a price is not a number, or given twice, or there is no such device.
    """
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        name = name.strip().lower()
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if name:
            name = accelerator_named(name).name
        if not 0 <= price < math.inf or name in found:
            raise ConfigError(
                explain(
                    "--price is what a device costs in an hour, once for each kind of device",
                    given=text,
                    do="write 2.50, or h100=2.50 h200=3.20",
                )
            )
        found[name] = price
    return found


def check_planned_for(prices: Mapping[str, float], clusters: Iterable[Cluster]) -> None:
    """Raise ConfigError if a price is of a kind of device that none of the clusters has."""
    planned = dict.fromkeys(cluster.accelerator.name for cluster in clusters)
    unused = [name for name in prices if name and name not in planned]
    if unused:
        raise ConfigError(
            explain(
                "a price is of devices that are not planned for",
                given=f"--price {unused[0]}={prices[unused[0]]:g}, planned for"
                f" {', '.join(planned)}",
                do=f"name one of these, such as {next(iter(planned))}=2.50",
            )
        )


def price_of(prices: Mapping[str, float], cluster: Cluster) -> float | None:
    """What a device of this cluster costs in an hour; None: it has no price."""
    return prices.get(cluster.accelerator.name, prices.get(""))
