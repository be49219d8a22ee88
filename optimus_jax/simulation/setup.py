"""Setup of a simulated run: its phases, its first plan, what its policy assumes, and the truth."""

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from optimus_jax.config import Config, ControlConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.phases import TrainingPhase
from optimus_jax.errors import ConfigError, PlanError, explain
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.planning.search.search import Pricing, fits, search
from optimus_jax.planning.trials.measure import TRIAL_STEPS
from optimus_jax.simulation.events import ComputeEvent, LostEvent
from optimus_jax.simulation.scenarios import Prior, Scenario
from optimus_jax.simulation.timeline import HORIZON, NORMAL, ClusterConditions, Timeline
from optimus_jax.simulation.world import PlacedPlan, World

DEFAULT, BEST = "default", "best"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A scenario on a cluster, without the values that the seed draws."""

    scenario: Scenario
    nominal: tuple[Pricing, ...]
    """Pricing of each phase with nominal links and devices."""
    assumed: tuple[Pricing, ...]
    """Pricing of each phase that policies assume: the nominal one, changed by a wrong prior."""
    start: Plan
    """First plan, by predictions."""
    tried: tuple[Plan, ...]
    """Plans with the best predictions, `start` first. As with `--mesh auto`, the run tries some
    steps of each and begins with the fastest."""
    num_steps: int
    settings: ControlConfig
    tried_s: Mapping[Plan, float] = field(default_factory=dict)
    """Measured step times of tried plans, in seconds; empty before the trials."""

    @classmethod
    def of(cls, scenario: Scenario, pricing: Pricing, *, start: Plan | None = None) -> "Setup":
        """Set up the scenario for a run of `pricing.config` on its cluster.

        Args:
          scenario: the scenario.
          pricing: the run's config, the cluster, and its nominal speeds.
          start: first plan; None: as the scenario says.

        Raises:
          OptimusError: the scenario does not work there, for example if its first plan is illegal.
        """
        _check_devices(scenario, pricing.cluster)
        configs = [config for _, config in scenario.configs(pricing.config)]
        nominal = tuple([replace(pricing, config=config) for config in configs])
        assumed = tuple([with_prior(each, scenario.prior) for each in nominal])
        if start is not None:
            _check_count(start.axes, pricing.cluster)
            start.validate(
                assumed[0].config.model, global_batch=assumed[0].config.data.global_batch
            )
        # A run compiles its first plan, so one that only seems to fit is never the first.
        fitting = _with_memory(assumed[0], pricing.cluster.bytes_per_device)
        tried = first_plans(scenario.start, fitting) if start is None else (start,)
        num_steps = scenario.steps or max(
            1, round(scenario.duration_s / nominal[0].step_time_s(tried[0]))
        )
        return cls(
            scenario=scenario,
            nominal=nominal,
            assumed=assumed,
            start=tried[0],
            tried=tried,
            num_steps=num_steps,
            settings=pricing.config.controller,
        )

    @cached_property
    def first_steps(self) -> tuple[int, ...]:
        """Number of steps done when each phase begins."""
        shares = [0.0, *[phase.start_share for phase in self.scenario.phases]]
        return tuple([round(share * self.num_steps) for share in shares])

    @property
    def phases(self) -> tuple[TrainingPhase, ...]:
        """The phases, which a policy knows; empty if there is only one."""
        if len(self.nominal) == 1:
            return ()
        return tuple(
            [
                TrainingPhase(
                    steps_before=step,
                    global_batch=pricing.config.data.global_batch,
                    seq_len=pricing.config.seq_len,
                )
                for step, pricing in zip(self.first_steps, self.nominal, strict=True)
            ]
        )

    def phase_at(self, step: int) -> int:
        """Index of the phase that the step after `step` belongs to."""
        return bisect.bisect_right(self.first_steps, step) - 1

    @property
    def checkpoint_steps(self) -> int:
        """Steps between checkpoints."""
        return max(
            1,
            round(
                self.scenario.switching.checkpoint_every_s / self.nominal[0].step_time_s(self.start)
            ),
        )

    def timeline(self, seed: int, began_s: dict[LostEvent, float] | None = None) -> Timeline:
        """The timeline of conditions. `began_s` as in `Timeline`."""
        cluster = self.nominal[0].cluster
        return Timeline(
            self.scenario,
            num_devices=cluster.num_devices,
            devices_per_host=cluster.devices_per_host,
            horizon_s=HORIZON * self.num_steps * self.nominal[0].step_time_s(self.start),
            seed=seed,
            began_s=began_s,
        )


class Truth:
    """The values that the seed draws: the world, and the noise of each step.

    Args:
      setup: setup of the run.
      seed: the same seed gives the same truth, whatever is decided.
    """

    def __init__(self, setup: Setup, seed: int):
        self.seed, self.world = seed, World(setup.scenario, setup.nominal, seed)
        self.setup = setup = self._tried(setup) if len(setup.tried) > 1 else setup
        """The setup, which begins with the plan that is fastest in the trials."""
        self.timeline = setup.timeline(seed)
        first = setup.start
        self.world.first = PlacedPlan(first, tuple(range(first.num_devices)))
        if setup.scenario.step_time_s is not None and (
            devices := self.world.devices_for(setup.start, NORMAL)
        ):
            self.world.scale(PlacedPlan(setup.start, devices), setup.scenario.step_time_s)
        self.noise = _noise(setup, seed)
        """[num_steps]: factor on the time of each step."""
        self.noise_sums = np.concatenate([[0.0], np.cumsum(self.noise)])
        """[num_steps + 1]: sum of these factors over all earlier steps."""

    def _tried(self, setup: Setup) -> Setup:
        """The setup after the trials: with their step times, and the fastest plan as the first.

        Links and devices are as when the run begins; trials have their data.
        """
        random, noise = (
            np.random.default_rng([self.seed, 5]),
            setup.scenario.misfit.noise / math.sqrt(TRIAL_STEPS),
        )
        conditions = setup.timeline(self.seed).at(0.0)
        conditions = replace(conditions, lost=frozenset(), taken=0.0, wait_s=0.0)
        times_s = {
            plan: (
                self.world.step_time_s(
                    PlacedPlan(plan, tuple(range(plan.num_devices))), conditions, 0
                )
                * math.exp(noise * random.standard_normal())
            )
            for plan in setup.tried
        }
        return replace(setup, start=min(times_s, key=lambda plan: times_s[plan]), tried_s=times_s)

    def fallback(self, conditions: ClusterConditions, phase: int) -> PlacedPlan | None:
        """The plan to restart with if the policy names none: the default layout on the remaining
        devices; None: nothing fits.
        """
        world, cluster = self.world, self.world.cluster
        alive = cluster.num_devices - len(conditions.reported)
        whole = [count for count in range(alive, 0, -1) if count % cluster.devices_per_host == 0]
        for count in [*whole, *range(min(alive, cluster.devices_per_host - 1), 0, -1)]:
            for plan in default_plans(world.pricings[phase], count):
                devices = world.devices_for(plan, conditions)
                if devices is not None and world.fits(plan, conditions, phase):
                    return PlacedPlan(plan, devices)
        return None


def with_prior(pricing: Pricing, prior: Prior) -> Pricing:
    """The pricing that policies assume, given the nominal one and a wrong prior."""
    cluster, rates = pricing.cluster, pricing.rates
    memory_bytes = cluster.bytes_per_device
    changed = replace(
        pricing,
        cluster=replace(
            cluster,
            intra_host=cluster.intra_host.scaled(prior.intra_host),
            inter_host=cluster.inter_host and cluster.inter_host.scaled(prior.inter_host),
        ),
        rates=replace(
            rates,
            matmul_flops_per_s=rates.matmul_flops_per_s * prior.compute,
            f32_matmul_flops_per_s=rates.f32_matmul_flops_per_s * prior.compute,
        ),
    )
    return _with_memory(changed, memory_bytes and round(memory_bytes * prior.memory))


def _with_memory(pricing: Pricing, memory_bytes: int | None) -> Pricing:
    """The pricing on devices with so much memory."""
    cluster = pricing.cluster
    accelerator = replace(cluster.accelerator, memory_bytes=memory_bytes)
    return replace(pricing, cluster=replace(cluster, accelerator=accelerator))


def first_plans(start: str, pricing: Pricing) -> tuple[Plan, ...]:
    """The plan that `start` names (Scenario.start); with `best`, also the other plans to try.

    Raises PlanError if there is none.
    """
    if start == DEFAULT:
        for plan in default_plans(pricing, pricing.cluster.num_devices):
            if fits(pricing.memory(plan), pricing.cluster):
                return (plan,)
        raise PlanError(
            explain(
                "the default layout does not fit",
                given=f"start={start}",
                do="use another cluster or a smaller batch",
            )
        )
    if start != BEST:
        _check_count(AxisSizes.parse(start), pricing.cluster)
        pricing = replace(pricing, config=pricing.config.with_values({"parallel.mesh": start}))
    found = search(pricing, top=max(1, pricing.config.parallel.trials) if start == BEST else 1).best
    if not found:
        raise PlanError(
            explain(
                "no plan is legal and fits",
                given=f"start={start} on {pricing.cluster}",
                do="use another mesh, more devices, or a smaller batch",
            )
        )
    return tuple([candidate.plan for candidate in found])


def _check_count(axes: AxisSizes, cluster: Cluster) -> None:
    """Raise PlanError unless the first plan uses all devices."""
    if (needed := axes.num_devices) != cluster.num_devices:
        raise PlanError(
            explain(
                f"the run starts on {needed} devices, and the cluster has {cluster.num_devices}",
                given=f"{axes} on {cluster}",
                do=(
                    f"name a cluster of {needed}: --cluster NAME:1x{needed}, or --cluster here"
                    f" --cpu-devices {needed} for a run on a CPU"
                ),
            )
        )


def default_plans(pricing: Pricing, num_devices: int) -> list[Plan]:
    """The usual default on so many devices: fsdp over all of them with full remat, with one
    microbatch, then with more.

    If parameters do not divide over all devices, fsdp has the largest size over which they do, and
    data has the rest.
    """
    if pricing.config.data.global_batch % num_devices:
        return []  # each replica needs as many examples; a thousand devices have many divisors
    topology = replace(pricing.cluster.topology(), num_devices=num_devices)
    for fsdp in [size for size in range(num_devices, 0, -1) if num_devices % size == 0]:
        plans = _default_on(
            pricing.config, AxisSizes(data=num_devices // fsdp, fsdp=fsdp), topology
        )
        if plans:
            return plans
    return []


def _default_on(config: Config, axes: AxisSizes, topology: Topology) -> list[Plan]:
    asked = config.with_values(
        {
            "parallel.mesh": "auto",
            "parallel.remat": "full",
            "parallel.zero": None,
            "parallel.microbatches": None,
        }
    )
    plan, plans = plan_for(asked, axes, topology), []
    rows = config.data.global_batch // axes.num_devices
    for microbatches in [number for number in range(1, rows + 1) if rows % number == 0]:
        divided = replace(plan, microbatches=microbatches)
        try:
            divided.validate(
                config.model, global_batch=config.data.global_batch, lengths=config.compiled_lengths
            )
        except PlanError:
            return plans
        plans.append(divided)
    return plans


def _noise(setup: Setup, seed: int) -> np.ndarray:
    """[num_steps]: random walk (drift) times noise times rare spikes, or the recorded factors."""
    misfit, random, count = setup.scenario.misfit, np.random.default_rng([seed, 4]), setup.num_steps
    if setup.scenario.step_factors:
        return np.resize(setup.scenario.step_factors, count)
    drift = np.cumsum(random.standard_normal(count)) * misfit.drift / math.sqrt(count)
    spikes = np.where(
        random.random(count) < misfit.spikes,
        misfit.spike_factor * np.exp(0.3 * random.standard_normal(count)),
        1.0,
    )
    return np.exp(drift + misfit.noise * random.standard_normal(count)) * np.maximum(1.0, spikes)


def _check_devices(scenario: Scenario, cluster: Cluster) -> None:
    """Raise ConfigError for events on devices or hosts that do not exist."""
    hosts = cluster.num_devices // cluster.devices_per_host
    for event in scenario.events:
        if isinstance(event, ComputeEvent | LostEvent):
            wrong = [device for device in event.devices if not 0 <= device < cluster.num_devices]
            if wrong or (event.host is not None and not 0 <= event.host < hosts):
                raise ConfigError(
                    explain(
                        f"{scenario.name}: a {type(event).__name__} names a device or host that the"
                        " cluster lacks",
                        given=f"host={event.host}" if not wrong else f"devices={wrong}",
                        do=(
                            f"name devices 0 to {cluster.num_devices - 1}, or hosts 0 to"
                            f" {hosts - 1}"
                        ),
                    )
                )


def check_seeds(seeds: int) -> None:
    """Raise ConfigError unless there is at least one seed."""
    if seeds < 1:
        raise ConfigError(
            explain(
                "there must be at least one seed", given=f"--seeds {seeds}", do="give 1 or more"
            )
        )
