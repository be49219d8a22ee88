"""True times of a switch or a restart in a simulated run, phase by phase.

A policy learns them only by switching.
"""

import math

import numpy as np

from optimus_jax.control.deciding.candidates import switch_method_of
from optimus_jax.control.deciding.switch_costs import from_other_hosts
from optimus_jax.plan import Plan
from optimus_jax.planning.profiles.cluster import INTER_HOST, INTRA_HOST
from optimus_jax.simulation.timeline import ClusterConditions
from optimus_jax.simulation.world import PlacedPlan, World

PHASES = ("compile", "quiesce", "move", "verify", "first_steps", "restart", "checkpoint")


class TrueSwitchCosts:
    """True switch costs of one run. The seed draws each phase's factor on the scenario's time.

    Args:
      world: the true cluster.
    """

    def __init__(self, world: World):
        self._world, self._switching = world, world.scenario.switching
        random = np.random.default_rng([world.seed, 2])
        self._off = {
            phase: self._switching.cost_factor
            * math.exp(self._switching.spread * random.standard_normal())
            for phase in PHASES
        }

    @property
    def compile_s(self) -> float:
        """Time of compiling a plan's programs in the background."""
        return self._switching.compile_s * self._off["compile"]

    def switch_s(
        self, old: PlacedPlan, new: PlacedPlan, conditions: ClusterConditions, phase: int
    ) -> dict[str, float]:
        """Seconds that training stops, by phase of a switch whose programs are compiled."""
        switching, off = self._switching, self._off
        if set(old.devices) != set(new.devices):
            return {
                "quiesce": switching.quiesce_s * off["quiesce"],
                **self.restart_s(new.plan, phase, saves=True),
            }
        costs = {"quiesce": switching.quiesce_s, "first_steps": switching.first_steps_s}
        # Only what shares a state shares a layout of it.
        if switch_method_of(new.plan, old.plan, same_devices=True) != "executable":
            costs |= {
                "move": switching.move_s + self._move_s(old, new, conditions, phase),
                "verify": switching.verify_s,
            }
        return {name: time_s * off[name] for name, time_s in costs.items()}

    def restart_s(self, plan: Plan, phase: int, *, saves: bool) -> dict[str, float]:
        """Seconds of a restart by phase. `saves`: whether a checkpoint has to be written first."""
        # State of one host.
        state_bytes = (
            self._world.estimate(plan, phase).states * self._world.cluster.devices_per_host
        )
        passes = 2 if saves else 1
        return {
            "restart": self._switching.restart_s * self._off["restart"],
            "checkpoint": passes
            * state_bytes
            / self._switching.checkpoint_bytes_per_s
            * self._off["checkpoint"],
        }

    def _move_s(
        self, old: PlacedPlan, new: PlacedPlan, conditions: ClusterConditions, phase: int
    ) -> float:
        """Seconds to move the state. Bytes from other hosts cross the link between hosts; with one
        host, all bytes cross the link inside it.
        """
        world, cluster = self._world, self._world.cluster
        link, name = (
            (cluster.inter_host, INTER_HOST)
            if cluster.inter_host
            else (cluster.intra_host, INTRA_HOST)
        )
        nominal = link.bytes_per_s or 1e9
        share = from_other_hosts(old.plan, cluster) if cluster.inter_host else 1.0
        return (
            share
            * world.estimate(new.plan, phase).states
            * world.link_slowdown(name, conditions)
            / (nominal * self._switching.move_share)
        )
