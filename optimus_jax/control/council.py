"""What the first process decides, heard by all of them at the same step boundaries.

Only the first process decides: clocks differ, and every process has to move at the same boundary. Alone it acts
at once; several processes hold a council every few steps, since it costs them a small collective.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

import jax

from optimus_jax.plan import Plan
from optimus_jax.planning.kept import of_first_process

EVERY = 8
"""Steps between two councils of several processes."""
Kind = Literal["nothing", "prepare", "withdraw", "keep", "take back", "probe"]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be done."""

    kind: Kind = "nothing"
    plan: Plan | None = None
    """To prepare."""
    without: frozenset[int] = frozenset()
    """Ids of devices that it must not use."""
    at_step: int | None = None
    """The boundary at which the run enters the plan; None: the first one after it is ready."""
    why: str = ""

    def to_json(self) -> str:
        """For the other processes."""
        return json.dumps({"kind": self.kind, "plan": self.plan and self.plan.to_json(), "without": sorted(self.without), "at_step": self.at_step, "why": self.why})

    @classmethod
    def from_json(cls, text: str) -> "Order":
        """The inverse of `to_json`."""
        value: dict[str, Any] = json.loads(text)
        return cls(kind=value["kind"], plan=value["plan"] and Plan.from_json(value["plan"]), without=frozenset(value["without"]),
                   at_step=value["at_step"], why=value["why"])


class Council:
    """Orders of the first process that have not been heard yet."""

    def __init__(self) -> None:
        self._orders: list[Order] = []

    def give(self, order: Order) -> None:
        """To be heard at the next council. Only the first process's orders count."""
        self._orders.append(order)

    def is_held(self, step: int) -> bool:
        """Whether processes speak at the boundary after this step."""
        return jax.process_count() == 1 or step % EVERY == 0

    def hear(self) -> Order:
        """The oldest order that is left, the same in every process; all have to call it, when a council is held."""
        order = self._orders.pop(0) if self._orders else Order()
        return order if jax.process_count() == 1 else Order.from_json(of_first_process(order.to_json()))
