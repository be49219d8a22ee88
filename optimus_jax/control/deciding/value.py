"""What a switch is worth: one number, in seconds of the run.

With R the ratio of step times (new over present), a switch that takes q seconds to prepare is worth

    S(q) { L E[1 - R] - c - P(back) b + what is saved after present conditions }

S(q) is the probability that present conditions outlast the preparation, L the time that they are
then expected to last within the run, c the cost of the switch, b that of the way back. The way back
is needed if the plan proves slower, or if conditions end before the run and the plan that the run
would have then is the better one. Log R is normally distributed.

Waiting is an action like the others. A switch made later is worth its value then, times the
probability that conditions last until then; conditions that have lasted longer are expected to last
longer. If that is more than the value now, the run waits.

A plan that proves slower is taken back after its first steps, so a switch is also an option: only
those steps can lose. Where that counts, L E[1 - R] is t E[1 - R] + (L - t) E[(1 - R)+], with t the
time of those steps. It counts where conditions last. In conditions that may end, it rewards plans
of which little is known when time is short (measured: docs/decisions/0024-one-value.md).
"""

import math
import statistics
from dataclasses import dataclass, replace

from optimus_jax.control import constants
from optimus_jax.control.deciding.changes import Durations

QUANTILES = tuple((index + 0.5) / 20 for index in range(20))
"""Quantiles of the time that conditions last, and shares of the largest loss, to average over."""
_NORMAL = statistics.NormalDist()


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
        """The regime `time_s` later, if it still holds then."""
        return replace(self, elapsed_s=self.elapsed_s + time_s)

    def over_s(self, probability: float) -> float:
        """Time from now until the regime is over with this probability; infinite: it never is."""
        return (
            math.inf
            if self.durations is None
            else self.durations.over_s(self.elapsed_s, probability)
        )


@dataclass(frozen=True, kw_only=True)
class Bet:
    """A switch, as far as its value depends on it; times in seconds."""

    log_ratio: float
    """Expected logarithm of (step time under the new plan / under the present one)."""
    deviation: float
    """Standard deviation of `log_ratio`."""
    log_ratio_after: float | None
    """The same beside the fastest other plan that the run has had, once present conditions have
    ended; None: present conditions are the normal ones."""
    usual: float = 1.0
    """Step time under that plan then, over the present one."""
    cost_s: float
    """Delay of the run by the switch."""
    return_s: float
    """Delay by the way back."""
    prepare_s: float
    """Time until the switch can be made, while the run goes on."""
    trial_s: float
    """Time of the steps that show whether the plan is slower."""
    usable: float
    """Probability that the devices of the plan are as assumed. If they are not, the run goes
    back."""
    counts_return: bool
    """Whether a slower plan, in conditions that last, is expected to cost its trial only."""

    @property
    def is_always_better(self) -> bool:
        """Whether the plan is expected to be the better one now and after present conditions.

        A plan that is better only then can be switched to then.
        """
        return (
            self.log_ratio_after is not None
            and max(self.log_ratio, self.log_ratio_after) < -(self.deviation**2) / 2
        )


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What a switch is worth; times in seconds."""

    net_s: float
    """Its value: expected saving less expected costs."""
    saved_s: float
    """Expected saving before costs: none where conditions end before, or devices are not as
    assumed."""
    cost_s: float
    """Expected costs if it is made, ways back included."""
    probability: float
    """Probability that it saves more than it costs."""
    risk_s: float
    """Expected loss, where a saving counts as none."""
    wait_s: float
    """Seconds after which it is worth more than now; 0: there are none."""


def worth(bet: Bet, regime: Regime, horizon_s: float) -> Worth:
    """The worth of a switch that is decided now, in a run that goes on for `horizon_s`."""
    ready = regime.later(bet.prepare_s)
    left_s = max(0.0, horizon_s - bet.prepare_s - bet.cost_s)
    lasts = ready.durations is None
    lasting_s = [left_s] if lasts else [min(left_s, ready.over_s(each)) for each in QUANTILES]

    def below(net_s: float) -> float:
        """Probability that the switch saves less than `net_s`."""
        found = statistics.fmean(_below(bet, net_s, time_s, left_s) for time_s in lasting_s)
        return 1.0 - bet.usable * (1.0 - found)

    # Without a trial nothing ends a loss before the run does; here at most twice the time is taken.
    most_s = bet.cost_s + (bet.return_s + bet.trial_s if bet.counts_return else left_s)
    return Worth(
        net_s=_net_s(bet, regime, horizon_s),
        saved_s=regime.survival(bet.prepare_s) * bet.usable * _saved_s(bet, regime, left_s),
        cost_s=_cost_s(bet, ready, left_s),
        probability=1.0 - below(0.0),
        risk_s=most_s * statistics.fmean(below(-most_s * share) for share in QUANTILES),
        wait_s=_wait_s(bet, regime, horizon_s),
    )


def gain(log_ratio: float, deviation: float) -> float:
    """E[1 - R], the expected saving as a share of a step."""
    return 1.0 - math.exp(min(50.0, log_ratio + deviation**2 / 2))


def gain_if_kept(log_ratio: float, deviation: float) -> float:
    """E[(1 - R)+], the same under a plan that is taken back if it is slower."""
    if deviation <= 0:
        return max(0.0, gain(log_ratio, 0.0))
    below = -log_ratio / deviation
    mean_ratio = math.exp(min(50.0, log_ratio + deviation**2 / 2))
    return _NORMAL.cdf(below) - mean_ratio * _NORMAL.cdf(below - deviation)


def _wait_s(bet: Bet, regime: Regime, horizon_s: float) -> float:
    """The wait after which the switch is worth most; 0: it is worth nothing then either."""
    if regime.durations is None:
        return 0.0
    unit_s = regime.elapsed_s + regime.durations.prior_s

    def value_s(wait_s: float) -> float:
        later_s = _net_s(bet, regime.later(wait_s), horizon_s - wait_s)
        return regime.survival(wait_s) * max(0.0, later_s)

    return max((0.0, *[share * unit_s for share in constants.WAIT_MULTIPLES]), key=value_s)


def _net_s(bet: Bet, regime: Regime, horizon_s: float) -> float:
    ready = regime.later(bet.prepare_s)
    left_s = max(0.0, horizon_s - bet.prepare_s - bet.cost_s)
    saved_s = _saved_s(bet, regime, left_s)
    in_vain_s = bet.cost_s + bet.return_s + bet.trial_s
    return regime.survival(bet.prepare_s) * (
        bet.usable * (saved_s - _cost_s(bet, ready, left_s)) - (1.0 - bet.usable) * in_vain_s
    )


def _saved_s(bet: Bet, regime: Regime, left_s: float) -> float:
    """Expected saving in the `left_s` after the switch, if present conditions outlast the
    preparation.
    """
    lasting_s = regime.later(bet.prepare_s).expected_s(left_s)
    saved_s = _saved_meanwhile_s(bet, regime, lasting_s)
    if bet.is_always_better and bet.log_ratio_after is not None:
        after_s = (left_s - lasting_s) * bet.usual
        saved_s += after_s * gain(bet.log_ratio_after, bet.deviation)
    return saved_s


def _saved_meanwhile_s(bet: Bet, regime: Regime, lasting_s: float) -> float:
    """Expected saving while present conditions last."""
    is_option = bet.counts_return and regime.durations is None
    trial_s = min(bet.trial_s, lasting_s) if is_option else lasting_s
    return trial_s * gain(bet.log_ratio, bet.deviation) + (lasting_s - trial_s) * gain_if_kept(
        bet.log_ratio, bet.deviation
    )


def _cost_s(bet: Bet, ready: Regime, left_s: float) -> float:
    """Expected cost of the switch and of the way back."""
    stays = 1.0 if bet.is_always_better else ready.survival(left_s)
    return bet.cost_s + (1.0 - stays * _faster(bet, 0.0)) * bet.return_s


def _below(bet: Bet, net_s: float, lasting_s: float, left_s: float) -> float:
    """Probability that the switch saves less than `net_s` if conditions last `lasting_s`.

    Steps take `time_s` without the switch, and R x `new_s` with it. Once conditions have ended the
    run goes back, or keeps a plan that is then expected to be better, as pays: R is known by then.
    """
    needed_s = net_s + bet.cost_s
    goes_back_s = bet.return_s if lasting_s < left_s else 0.0
    ways = [_largest_ratio(needed_s + goes_back_s, time_s=lasting_s, new_s=lasting_s)]
    if bet.is_always_better and bet.log_ratio_after is not None:
        after_s = (left_s - lasting_s) * bet.usual
        change = math.exp(min(50.0, bet.log_ratio_after - bet.log_ratio))
        time_s, new_s = lasting_s + after_s, lasting_s + after_s * change
        ways.append(_largest_ratio(needed_s, time_s=time_s, new_s=new_s))
    largest = max(ways)
    return 1.0 - _faster(bet, math.log(largest)) if 0 < largest < math.inf else float(largest <= 0)


def _largest_ratio(needed_s: float, *, time_s: float, new_s: float) -> float:
    """The largest R with which `needed_s` are saved; 0 or less: there is none."""
    if new_s <= 0:
        return math.inf if needed_s <= 0 else 0.0
    return (time_s - needed_s) / new_s


def _faster(bet: Bet, log_ratio: float) -> float:
    """Probability that the logarithm of R is below `log_ratio`."""
    if bet.deviation <= 0:
        return float(bet.log_ratio < log_ratio)
    return _NORMAL.cdf((log_ratio - bet.log_ratio) / bet.deviation)
