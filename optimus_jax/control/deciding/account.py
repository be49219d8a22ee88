"""What switches have cost a run so far, less what they have measurably saved.

A switch is charged with the time for which it delayed the run. Every step then pays the difference
to the level of step times of the first plan that the run left in the present circumstances, or, if
it left none there, to what the first plan that it left is expected to take. What is owed never
falls below zero, so that old savings do not pay for new gambles.

The account limits regret, not cost: a switch is allowed if what is owed and the loss that it risks
stay below a share of the run. One that saves for sure risks nothing, whatever it costs. Whatever is
owed, a switch is also allowed once conditions have cost as much as it would (policy.py). One that
keeps losing stops itself.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from optimus_jax.control import constants
from optimus_jax.planning.search.explain import seconds

Used = TypeVar("Used", bound=Hashable)
"""A plan, and its devices."""


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What the next switch of a run may risk."""

    share: float
    """Share of the run that switches may lose in all (`controller.budget_share`)."""
    owed_s: float = 0.0
    """Costs of earlier switches that no saving has paid for yet, in seconds."""

    def allows_s(self, whole_s: float) -> float:
        """The largest risk in a run of `whole_s` seconds. If more is owed than the share allows,
        only switches without a risk are allowed.
        """
        return max(
            self.share * whole_s - self.owed_s,
            min(self.share, constants.NEGLIGIBLE_RISK_SHARE) * whole_s,
        )

    def refused(self, risk_s: float, whole_s: float) -> str:
        """Why this risk is too large, and which setting would allow it."""
        needed = (self.owed_s + risk_s) / whole_s if whole_s > 0 else math.inf
        allowed = f"the account allows {seconds(self.allows_s(whole_s))} of them"
        told = f"may lose {seconds(risk_s)} on average; {allowed}"
        if needed >= 1:
            return told
        digits = 10 ** (2 - math.floor(math.log10(needed)) - 1)
        share = math.ceil(needed * digits) / digits
        return f"{told}; --set controller.budget_share={share:g} allows it"


class Account(Generic[Used]):
    """The costs and savings of one run's switches.

    Args:
      share: share of the run that switches may lose in all.
    """

    def __init__(self, share: float) -> None:
        self._share, self._owed_s = share, 0.0
        self.spent_s = 0.0
        """All costs so far, in seconds."""
        self._seen: dict[Hashable, float] = {}
        """Level of step times of the plan that was left in these circumstances, as a logarithm."""
        self._first: Used | None = None
        """The first plan that the run left by choice since it last had to leave one."""
        self._expected: dict[Hashable, float] = {}
        """Level that is expected of it, in circumstances in which no plan was left."""

    @property
    def allowance(self) -> Allowance:
        """What the next switch may risk."""
        return Allowance(share=self._share, owed_s=self._owed_s)

    @property
    def first_left(self) -> Used | None:
        """The plan with which steps are compared in circumstances in which none was left."""
        return self._first

    def charge(self, time_s: float) -> None:
        """Add a cost; one that is negative or not finite is ignored."""
        if 0 <= time_s < math.inf:
            self._owed_s = max(0.0, self._owed_s + time_s)
            self.spent_s += time_s

    def left(self, used: Used, circumstances: Hashable, level: float | None) -> None:
        """Record that the run has left a plan by choice.

        Args:
          used: the plan, and its devices.
          circumstances: the conditions and the batch.
          level: logarithm of its step time in seconds; None: unknown. The first level in the same
            circumstances stays.
        """
        self._first = self._first or used
        if level is not None:
            self._seen.setdefault(circumstances, level)

    def forget(self) -> None:
        """Record that the run had to leave a plan: that plan is no measure for later ones."""
        self._seen.clear()
        self.forget_first()

    def forget_first(self) -> None:
        """Record that the first plan that was left cannot be used any more."""
        self._first = None
        self._expected.clear()

    def stepped(
        self,
        circumstances: Hashable,
        level: float | None,
        num_steps: int,
        *,
        used: Used,
        expected: Callable[[Used], float] | None,
    ) -> None:
        """Record steps.

        Args:
          circumstances: the conditions and the batch.
          level: logarithm of their time in seconds; None: it is not known yet.
          num_steps: how many.
          used: the plan of these steps.
          expected: the same as it is expected of another plan now; None: nobody knows.
        """
        before = self._seen.get(circumstances)
        if before is None and expected and self._first and self._first != used:
            if circumstances not in self._expected:
                self._expected[circumstances] = expected(self._first)
            before = self._expected[circumstances]
        if before is not None and level is not None:
            saved_s = num_steps * (math.exp(before) - math.exp(level))
            self._owed_s = max(0.0, self._owed_s - saved_s)
