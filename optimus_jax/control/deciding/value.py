"""What a switch is worth: one number, in seconds of the run.

With R the ratio of step times (new over present), a switch that is prepared in q seconds is worth

    S(q) { L_k E[1 - R] + (L - L_k) E[(1 - R)+] - c - P(R > 1) b } + what is left after a change.

S(q) is the probability that present conditions outlast the preparation, L the time for which they
are then expected to last within the run, L_k the time of the trial steps, after which a plan that
is slower is taken back, c the cost of the switch and b that of the way back. Log R is normally
distributed. After a change of conditions the new plan stays, if it is the better one there too, or
the run goes back.

Waiting is an action like others: a switch that is made later is worth S(wait) times its value then,
because conditions that have lasted longer are expected to last longer. So a run waits if that is
worth more than to switch now, and needs no rule about it.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from optimus_jax.control.deciding.changes import Durations

_NORMAL = statistics.NormalDist()
WAITS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Waits that are compared with a switch now, as multiples of the time that conditions have lasted
or were expected to last."""
QUANTILES = tuple((index + 0.5) / 20 for index in range(20))
"""Quantiles of the remaining time of conditions over which a distribution is averaged."""
import os
OPTION = int(os.environ.get("OPTION", "0"))
CONFIDENCE = float(os.environ.get("CONF", "0.95"))
"""Probability with which the loss of a switch stays below its `worst_s`."""


@dataclass(frozen=True, kw_only=True)
class Regime:
    """How long present conditions have lasted, and how long they are expected to last."""

    elapsed_s: float
    """Seconds since they began."""
    durations: Durations | None
    """Durations of regimes of this kind; None: these conditions are permanent."""

    def expected_s(self, horizon_s: float) -> float:
        """Expected remaining time of the regime within the horizon, in seconds."""
        return (
            max(0.0, horizon_s)
            if self.durations is None
            else self.durations.expected_s(self.elapsed_s, horizon_s)
        )

    def survival(self, further_s: float) -> float:
        """Probability that the regime lasts `further_s` longer."""
        return 1.0 if self.durations is None else self.durations.survival(self.elapsed_s, further_s)

    def later(self, time_s: float) -> "Regime":
        """The same regime if it still holds `time_s` later."""
        return replace(self, elapsed_s=self.elapsed_s + time_s)

    def lasting_s(self, probability: float) -> float:
        """Time from now until the regime is over with this probability; infinite: it is
        permanent.
        """
        return (
            math.inf
            if self.durations is None
            else self.durations.over_s(self.elapsed_s, probability)
        )


@dataclass(frozen=True, kw_only=True)
class Bet:
    """A switch as the value sees it; all times in seconds."""

    log_ratio: float
    """Expected logarithm of (step time under the new plan / under the present one)."""
    deviation: float
    """Standard deviation of `log_ratio`."""
    log_ratio_after: float | None
    """Expected `log_ratio` once present conditions have ended; None: the run goes back then."""
    cost_s: float
    """Delay by the switch."""
    return_s: float
    """Delay by switching back."""
    prepare_s: float
    """Time until the switch can be made."""
    trial_s: float
    """Time of the trial steps under the present plan."""
    usable: float = 1.0
    """Probability that the devices of the plan are as assumed. If not, the run goes back."""

    @property
    def is_better_after(self) -> bool:
        """Whether it is also the better plan once present conditions have ended."""
        return self.log_ratio_after is not None and _gain(self.log_ratio_after, self.deviation) > 0


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What a switch is worth."""

    net_s: float
    """Expected saving less all costs."""
    gain_s: float
    """Expected saving before costs."""
    probability: float
    """Probability that it saves more than it costs."""
    worst_s: float
    """Loss that is not exceeded with a probability of CONFIDENCE; negative: it is a gain."""
    wait_s: float
    """Seconds after which the switch is worth more than now; 0: it is not."""


def worth(bet: Bet, regime: Regime, horizon_s: float) -> Worth:
    """The value of a switch decided now, in a run that goes on for `horizon_s`."""
    net_s = _net_s(bet, regime, horizon_s)
    waits = [0.0] + [each * _scale_s(regime) for each in WAITS if regime.durations is not None]
    best_s = max(
        waits,
        key=lambda wait_s: regime.survival(wait_s)
        * (_net_s(bet, regime.later(wait_s), horizon_s - wait_s) if wait_s else net_s),
    )
    later = regime.later(bet.prepare_s)
    left_s = max(0.0, horizon_s - bet.prepare_s - bet.cost_s)
    lasting = [
        min(left_s, later.lasting_s(each))
        for each in (QUANTILES if later.durations is not None else (0.5,))
    ]
    if bet.is_better_after:
        lasting = [left_s]

    def below(net_s: float) -> float:
        """Probability that the switch saves less than `net_s`."""
        return statistics.fmean(_below(bet, net_s, time_s, left_s) for time_s in lasting)

    return Worth(
        net_s=net_s,
        gain_s=net_s + _cost_s(bet, later, left_s),
        probability=bet.usable * (1.0 - below(0.0)),
        worst_s=_shortfall_s(
            lambda value: 1 - bet.usable * (1 - below(value)),
            bet.cost_s + bet.return_s + bet.trial_s,
        ),
        wait_s=best_s,
    )


def _scale_s(regime: Regime) -> float:
    assert regime.durations is not None
    return regime.elapsed_s + regime.durations.prior_s


def _cost_s(bet: Bet, regime: Regime, left_s: float) -> float:
    """Expected cost of the switch and of ways back."""
    ends = 0.0 if bet.is_better_after else 1.0 - regime.survival(left_s)
    slower = _slower(bet.log_ratio, bet.deviation)
    return bet.cost_s + (1.0 - (1.0 - slower) * (1.0 - ends)) * bet.return_s


def _net_s(bet: Bet, regime: Regime, horizon_s: float) -> float:
    """The value of a switch that is decided now."""
    ready = regime.later(bet.prepare_s)
    left_s = max(0.0, horizon_s - bet.prepare_s - bet.cost_s)
    lasting_s = ready.expected_s(left_s)
    trial_s = min(lasting_s, bet.trial_s)
    if not OPTION:
        trial_s = lasting_s
    now_s = trial_s * _gain(bet.log_ratio, bet.deviation) + (lasting_s - trial_s) * _gain_if_kept(
        bet.log_ratio, bet.deviation
    )
    after_s = (
        (left_s - lasting_s) * _gain(bet.log_ratio_after or 0.0, bet.deviation)
        if bet.is_better_after
        else 0.0
    )
    value_s = now_s + after_s - _cost_s(bet, ready, left_s)
    lost_s = bet.cost_s + bet.return_s
    return regime.survival(bet.prepare_s) * (bet.usable * value_s - (1.0 - bet.usable) * lost_s)


def _below(bet: Bet, net_s: float, lasting_s: float, left_s: float) -> float:
    """Probability that the switch saves less than `net_s` if conditions last `lasting_s`."""
    goes_back = lasting_s < left_s
    needed_s = net_s + bet.cost_s + (bet.return_s if goes_back else 0.0)
    if lasting_s <= 0 or needed_s >= lasting_s:
        return 1.0
    enough = math.log1p(-needed_s / lasting_s)
    if bet.deviation <= 0:
        return float(bet.log_ratio > enough)
    return 1.0 - _NORMAL.cdf((enough - bet.log_ratio) / bet.deviation)


def _shortfall_s(below: Callable[[float], float], most_s: float) -> float:
    """Expected loss, where a saving counts as none: the integral of the probability of a loss
    beyond each size up to `most_s`.
    """
    return most_s * statistics.fmean(below(-most_s * share) for share in QUANTILES)


def _gain(log_ratio: float, deviation: float) -> float:
    """E[1 - R]."""
    return 1.0 - math.exp(min(50.0, log_ratio + deviation**2 / 2))


def _gain_if_kept(log_ratio: float, deviation: float) -> float:
    """E[(1 - R)+]: a plan that is slower is taken back."""
    if deviation <= 0:
        return max(0.0, _gain(log_ratio, 0.0))
    faster = -log_ratio / deviation
    return _NORMAL.cdf(faster) - math.exp(
        min(50.0, log_ratio + deviation**2 / 2)
    ) * _NORMAL.cdf(faster - deviation)


def _slower(log_ratio: float, deviation: float) -> float:
    """P(R > 1)."""
    return float(log_ratio > 0) if deviation <= 0 else _NORMAL.cdf(log_ratio / deviation)
