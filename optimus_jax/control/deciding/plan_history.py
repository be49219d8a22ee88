"""The plans that a run is and was under, on which devices, and why it left them."""

from collections import OrderedDict
from dataclasses import replace

from optimus_jax.control.deciding.candidates import switch_method_of
from optimus_jax.control.deciding.options import Standing
from optimus_jax.control.policy import SwitchMethod
from optimus_jax.plan import Plan

REMEMBERED = 8
"""Plans that the run was under, which are always candidates."""

Setting = tuple[str, int]
"""Conditions by name, and the number of the regime."""


class PlanHistory:
    """Where one run is, where it came from, and where it has been.

    Args:
      plan: that it begins under, on all devices.
      num_hosts: of the cluster.
      num_executables: how many of the newest plans' are kept.
    """

    def __init__(self, plan: Plan, *, num_hosts: int, num_executables: int) -> None:
        self.now, self.before = Standing(plan=plan), Standing(plan=plan)
        """What the run is under, and what it was under before the last switch."""
        self._plans = OrderedDict({plan.digest: plan})
        self._num_hosts, self._num_executables = num_hosts, num_executables
        self._left: dict[str, Setting] = {}
        """By digest of a plan that was left: conditions and regime at the time."""
        self._fled: set[str] = set()
        """Digests of plans that it could not keep."""

    @property
    def plans(self) -> list[Plan]:
        """That the run was under, the present one last."""
        return list(self._plans.values())

    def is_compiled(self, plan: Plan) -> bool:
        """Whether its executable is still there."""
        return plan.digest in list(self._plans)[-self._num_executables :]

    def moved(self, standing: Standing, setting: Setting, *, fled: bool) -> None:
        """The run is now under `standing`; it left what it was under in these conditions.

        Args:
          fled: since it could not be kept, or for a reason that is not known.
        """
        old, self._left[self.now.plan.digest] = self.now, setting
        self._stand(standing)
        self.before = old
        self._fled = self._fled - {standing.plan.digest} | ({old.plan.digest} if fled else set())

    def taken_back(self, time_s: float) -> None:
        """It is again what it was before the last switch; a slow process that was tried again is as
        slow as it was.
        """
        excluded = self.before.excluded
        self._stand(replace(self.before, excluded=excluded and excluded.still_slow(time_s)))

    def _stand(self, standing: Standing) -> None:
        self.now = standing
        self._plans[standing.plan.digest] = standing.plan
        self._plans.move_to_end(standing.plan.digest)
        while len(self._plans) > REMEMBERED:
            self._plans.popitem(last=False)

    def switch_method(self, plan: Plan, without: frozenset[int]) -> SwitchMethod:
        """What a switch to `plan` without these devices touches."""
        same_devices = without == self.now.without and plan.num_devices == self.now.plan.num_devices
        return switch_method_of(
            self.now.plan, plan, same_devices=same_devices, same_hosts=self._num_hosts == 1
        )

    def has_left(self, plan: Plan) -> bool:
        """Whether the run was under it and left it by choice."""
        return plan.digest in self._left and plan.digest not in self._fled

    def left_in(self, plan: Plan) -> Setting | None:
        """Conditions in which it was left last; None: it was not."""
        return self._left.get(plan.digest)

    def is_repair(self, without: frozenset[int], slow: frozenset[int]) -> bool:
        """Whether a plan without these devices leaves out those of a slow process, or uses again
        what was lost or left out: a fault's costs, not the budget's.
        """
        excluded = self.now.excluded
        takes_back = (
            excluded is not None
            and without < self.now.without
            and self.now.without - without <= excluded.devices
        )
        return bool(slow and slow <= without) or takes_back or self._undoes_loss(without)

    def _undoes_loss(self, without: frozenset[int]) -> bool:
        """Whether a plan without these devices uses some that were lost and have come back."""
        excluded, used_again = self.now.excluded, self.now.without - without
        return without < self.now.without and not used_again <= (
            excluded.devices if excluded is not None else frozenset()
        )
