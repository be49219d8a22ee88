"""A small simulated cluster for tests: two hosts of eight devices, minutes instead of hours."""

import json
from functools import cache

from optimus_jax.config.request import make_config
from optimus_jax.control.runtime import Policy
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.search import Pricing
from optimus_jax.simulation.candidate_plans import PooledSearch
from optimus_jax.simulation.outcome import SimulationOptions
from optimus_jax.simulation.scenarios import Scenario
from optimus_jax.simulation.setup import Setup, Truth
from optimus_jax.simulation.simulator import Simulation

CLUSTER = Cluster.parse("h100:2x8", ("inter_host=6.25GB/s",))
PRICING = Pricing(
    make_config("gpt2-xl", {"precision": "bf16", "global_batch": 128, "seq_len": 1024}),
    CLUSTER,
    Rates.of(CLUSTER.accelerator),
)
SEARCHER = PooledSearch()
EXACT = {
    "links": 0,
    "rates": 0,
    "terms": 0,
    "plans": 0,
    "memory": 0,
    "noise": 0,
    "spikes": 0,
    "drift": 0,
    "probes": 0,
    "probe_bias": 0,
}
"""A true cluster equal to what the planner assumes, except for how much of exchanges is hidden."""
QUICK = {
    "spread": 0,
    "compile_s": 8,
    "restart_s": 20,
    "checkpoint_every_s": 20,
    "detect_s": 5,
    "probe_s": 0.01,
    "move_s": 0.1,
    "verify_s": 0.1,
    "first_steps_s": 0.2,
}
"""Switch costs that fit into runs of minutes."""
QUARTER = {"kind": "link", "link": "inter_host", "factor": 0.25, "start_s": 30, "for_s": 60}


def scenario(*events, **fields):
    """A scenario with short times, from the JSON that users write."""
    value = {"name": "test", "steps": 400, "switching": QUICK, "events": list(events), **fields}
    return Scenario.from_json(json.dumps(value))


@cache
def setup_of(made):
    return Setup.of(made, PRICING)


def truth(*events, seed=0, **fields):
    return Truth(setup_of(scenario(*events, **fields)), seed)


class FollowsScript(Policy):
    """A policy that follows `decisions`, by the step after which they are made, and records what it
    is told.
    """

    def __init__(self, decisions=()):
        self.decisions, self.calls, self.observations = dict(decisions), [], []

    def decide(self, observation):
        self.observations.append(observation)
        return self.decisions.pop(observation.step, None)

    def switched(self, plan, costs_s, made):
        self.calls.append(("switched", plan, dict(costs_s)))

    def failed(self, plan, why, *, trial_s=None):
        self.calls.append(("failed", plan, why))

    def charge(self, time_s):
        self.calls.append(("charged", time_s))


def run(made, policy, **options):
    return Simulation(made, policy, SimulationOptions(**{"probes": False, **options})).run()
