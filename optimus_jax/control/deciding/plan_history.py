"""The present and past plans of a run, and their devices."""

from collections import OrderedDict

from optimus_jax.control import constants
from optimus_jax.control.deciding.candidates import switch_method_of
from optimus_jax.control.deciding.options import PlanInUse
from optimus_jax.control.policy import SwitchMethod
from optimus_jax.plan import Plan


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

    @property
    def plans(self) -> list[Plan]:
        """The remembered plans of the run, the present one last."""
        return list(self._plans.values())

    def is_compiled(self, plan: Plan) -> bool:
        """Whether the plan's executable is still kept."""
        return plan.digest in list(self._plans)[-self._num_executables :]

    def moved(self, current: PlanInUse) -> None:
        """Record a switch to another plan."""
        old = self.now
        self._set_current(current)
        self.before = old

    def taken_back(self) -> None:
        """Record a rollback of the last switch."""
        self._set_current(self.before)

    def _set_current(self, current: PlanInUse) -> None:
        self.now = current
        self._plans[current.plan.digest] = current.plan
        self._plans.move_to_end(current.plan.digest)
        while len(self._plans) > constants.MAX_PLANS_IN_HISTORY:
            self._plans.popitem(last=False)

    def switch_method(self, plan: Plan, without: frozenset[int]) -> SwitchMethod:
        """The method of a switch to `plan` without these devices."""
        same_devices = without == self.now.without and plan.num_devices == self.now.plan.num_devices
        return switch_method_of(
            self.now.plan, plan, same_devices=same_devices, same_hosts=self._num_hosts == 1
        )
