"""The present and past plans of a run, their devices, and the conditions in which it left them."""

from collections import OrderedDict
from dataclasses import replace

from optimus_jax.control.deciding.candidates import switch_method_of
from optimus_jax.control.deciding.options import PlanInUse
from optimus_jax.control.policy import SwitchMethod
from optimus_jax.plan import Plan

REMEMBERED = 8
"""Number of newest plans that are remembered. They are always candidates."""

Circumstances = tuple[str, int]
"""Name of the conditions and batch, and the number of the regime."""


class PlanHistory:
    """The present plan of one run and the plans before it.

    Args:
      plan: the first plan, on all devices.
      num_hosts: number of hosts of the cluster.
      num_executables: number of newest plans whose executables are kept.
    """

    def __init__(self, plan: Plan, *, num_hosts: int, num_executables: int) -> None:
        self.now, self.before = PlanInUse(plan=plan), PlanInUse(plan=plan)
        """The present plan and devices, and those before the last switch."""
        self._plans = OrderedDict({plan.digest: plan})
        self._num_hosts, self._num_executables = num_hosts, num_executables
        self._left: dict[str, Circumstances] = {}
        """Conditions and regime in which a plan was left, by the plan's digest."""
        self._left_involuntarily: set[str] = set()
        """Digests of plans that the run did not leave by choice."""

    @property
    def plans(self) -> list[Plan]:
        """The remembered plans of the run, the present one last."""
        return list(self._plans.values())

    def is_compiled(self, plan: Plan) -> bool:
        """Whether the plan's executable is still kept."""
        return plan.digest in list(self._plans)[-self._num_executables :]

    def moved(self, current: PlanInUse, circumstances: Circumstances, *, forced: bool) -> None:
        """Record a switch.

        Args:
          current: the new plan and devices.
          circumstances: the conditions and regime in which the run left the old plan.
          forced: whether the old plan could not be kept, or was left for an unknown reason.
        """
        old, self._left[self.now.plan.digest] = self.now, circumstances
        self._set_current(current)
        self.before = old
        self._left_involuntarily = self._left_involuntarily - {current.plan.digest} | (
            {old.plan.digest} if forced else set()
        )

    def taken_back(self, time_s: float) -> None:
        """Record a rollback of the last switch. If that switch tried a slow process again, the
        process is taken to be still slow.
        """
        excluded = self.before.excluded
        self._set_current(replace(self.before, excluded=excluded and excluded.still_slow(time_s)))

    def _set_current(self, current: PlanInUse) -> None:
        self.now = current
        self._plans[current.plan.digest] = current.plan
        self._plans.move_to_end(current.plan.digest)
        while len(self._plans) > REMEMBERED:
            self._plans.popitem(last=False)

    def switch_method(self, plan: Plan, without: frozenset[int]) -> SwitchMethod:
        """The method of a switch to `plan` without these devices."""
        same_devices = without == self.now.without and plan.num_devices == self.now.plan.num_devices
        return switch_method_of(
            self.now.plan, plan, same_devices=same_devices, same_hosts=self._num_hosts == 1
        )

    def has_left(self, plan: Plan) -> bool:
        """Whether the run was under the plan and left it by choice."""
        return plan.digest in self._left and plan.digest not in self._left_involuntarily

    def left_in(self, plan: Plan) -> Circumstances | None:
        """Conditions and regime in which the plan was last left; None: it was never left."""
        return self._left.get(plan.digest)

    def is_repair(self, without: frozenset[int], slow: frozenset[int]) -> bool:
        """Whether a plan without these devices excludes a slow process, or uses lost or excluded
        devices again. The fault causes such a switch, so the budget does not pay for it.
        """
        excluded = self.now.excluded
        takes_back = (
            excluded is not None
            and without < self.now.without
            and self.now.without - without <= excluded.devices
        )
        return bool(slow and slow <= without) or takes_back or self._undoes_loss(without)

    def _undoes_loss(self, without: frozenset[int]) -> bool:
        """Whether a plan without these devices uses lost devices that have come back."""
        excluded, used_again = self.now.excluded, self.now.without - without
        return without < self.now.without and not used_again <= (
            excluded.devices if excluded is not None else frozenset()
        )
