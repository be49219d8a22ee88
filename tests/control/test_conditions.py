"""Conditions change the prices of the cost model, and only valid readings change the conditions."""

import math
from dataclasses import replace

import pytest
from fleet import CLUSTER, PRICING, plan_on

from optimus_jax.config.axes import AxisSizes
from optimus_jax.control.baselines import byte_part_s, messages_of
from optimus_jax.control.deciding.candidates import times
from optimus_jax.control.deciding.conditions import Conditions, claims, slowed
from optimus_jax.control.deciding.factors import on_grid
from optimus_jax.control.signals import UNKNOWN, Observation, SignalSummary
from optimus_jax.planning.cost.communication import CommunicationOp
from optimus_jax.planning.cost.communication_time import CommunicationTimes
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.links import Link

AXES = AxisSizes.parse("data=8,tensor=8")
"""Axis data crosses the inter-host link, axis tensor the intra-host link."""


def reading(value: float, quality="good") -> SignalSummary:
    return SignalSummary(value=value, spread=0.1, count=5, time_s=0.0, quality=quality)


def claimed(cluster: Cluster = CLUSTER, **readings: SignalSummary) -> dict[str, float | None]:
    named = {name.replace("link_", "link_slowdown/"): each for name, each in readings.items()}
    observation = Observation(
        step=1,
        time_s=1.0,
        step_times_s=(),
        readings=named,
        global_batch=8,
        seq_len=8,
        lost_devices=frozenset(),
    )
    return {name: each.value for name, each in claims(observation, cluster, AXES).items()}


@pytest.mark.parametrize(
    ("conditions", "terms"),
    [
        (Conditions(inter_host=3.0), {"data"}),
        (Conditions(intra_host=3.0), {"tensor", "vocabulary"}),
        (
            Conditions(compute=3.0),
            {"attention", "feed-forward", "head", "recompute", "optimizer", "memory"},
        ),
        (
            Conditions(slow=((2, 3.0),)),
            {"attention", "feed-forward", "head", "recompute", "optimizer", "memory"},
        ),
    ],
)
def test_a_slowdown_lengthens_its_terms_and_shortens_no_others(conditions, terms):
    plan = plan_on("data=8,tensor=8")
    before, after = times(plan, PRICING), times(plan, conditions.applied(PRICING))
    longer = {name for name in after if after[name] > 1.2 * before[name]}
    assert longer >= terms & before.keys()
    assert all(
        after[name] >= before[name] * (1 - 1e-9)
        for name in before
        if name != "data" or conditions.inter_host > 1
    )


def test_normal_conditions_leave_the_prices_unchanged():
    assert Conditions().applied(PRICING) == PRICING


def probed_s(link: Link, num_members: int, platform: str) -> float:
    """Time of the probe's large message by the cost model."""
    plan = AxisSizes.parse(f"data={num_members}")
    cluster = Cluster.parse(f"h100:{num_members}")
    communication_times = CommunicationTimes(
        plan,
        replace(cluster, intra_host=link),
        replace(PRICING.rates, collective_share=1.0, arrival_s=0.0),
    )
    return communication_times.time(
        CommunicationOp("all-reduce", ("data",), "step", messages_of(platform)[1], 1)
    )


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("bytes_per_s", "latency_s"), [(3.6e9, 1.1e-3), (450e9, 2e-6), (0.6e9, 0.3e-3)]
)
@pytest.mark.parametrize("later", [1.5, 20.0, 1000.0])
def test_a_slowed_link_predicts_the_measured_probe_time(platform, bytes_per_s, latency_s, later):
    link = Link(name="a link", bytes_per_s=bytes_per_s, latency_s=latency_s, source="a test")
    usual_s = probed_s(link, 4, platform)
    measured_s = later * usual_s
    unit_s = byte_part_s(usual_s, 6 * latency_s)
    factor = (measured_s - (usual_s - unit_s)) / unit_s
    assert probed_s(slowed(link, factor, 4, platform), 4, platform) == pytest.approx(measured_s)
    assert slowed(link, 0.5, 4, platform).bytes_per_s == 2 * bytes_per_s, (
        "what is faster is no more so than was read"
    )


def test_a_link_of_one_device_is_never_slow():
    assert slowed(CLUSTER.intra_host, 4.0, 1, "gpu") is CLUSTER.intra_host


def test_distance_is_the_largest_difference_of_a_factor():
    assert Conditions(inter_host=4.0).distance(Conditions(intra_host=2.0)) == pytest.approx(
        math.log(4)
    )
    slow = Conditions(slow=((2, 1.5), (4, 3.0)))
    assert slow.distance(Conditions(slow=((4, 3.0),))) == pytest.approx(math.log(1.5))
    assert slow.among({1, 2}) == Conditions(slow=((2, 1.5),))
    assert slow.as_json() == {"skew": 3.0}
    assert Conditions(inter_host=4.0).as_json() == {"inter_host": 4.0}


def test_the_grid_is_coarse_and_contains_one():
    assert on_grid(1.0) == on_grid(1.04) == on_grid(0.96) == 1.0
    assert on_grid(4.0) == on_grid(4.1) == pytest.approx(4.0, rel=0.05)
    assert on_grid(1e9) == on_grid(1e12) < 1e5


def test_a_reading_of_the_link_precedes_readings_of_axes_that_cross_it():
    assert claimed(link_inter_host=reading(3.0), link_data=reading(9.0)) == {"inter_host": 3.0}
    assert claimed(link_data=reading(9.0), link_tensor=reading(2.0)) == {
        "inter_host": 9.0,
        "intra_host": 2.0,
    }
    slow = {"process_time/12": reading(1.5), "process_time/3": reading(9.0, "stale")}
    assert claimed(compute_slowdown=reading(1.2), **slow) == {
        "compute": 1.2,
        "process_time/12": 1.5,
    }


@pytest.mark.parametrize(
    "invalid",
    [
        reading(3.0, "stale"),
        UNKNOWN,
        reading(math.nan),
        reading(-1.0),
        reading(0.0),
        reading(math.inf),
    ],
)
def test_stale_unknown_or_invalid_readings_are_ignored(invalid):
    assert claimed(link_inter_host=invalid, compute_slowdown=invalid) == {}
    assert claimed(link_inter_host=invalid, link_data=reading(2.0)) == {"inter_host": 2.0}


def test_on_a_cpu_a_link_is_as_slow_as_it_is_beside_compute():
    cpu = replace(CLUSTER, accelerator=replace(CLUSTER.accelerator, platform="cpu"))
    slow = {"link_intra_host": reading(3.0), "compute_slowdown": reading(1.5)}
    assert claimed(cpu, **slow) == {"intra_host": 2.0, "compute": 1.5}
    assert claimed(**slow) == {"intra_host": 3.0, "compute": 1.5}
    # what is faster than its baseline, or not known, says nothing of the link
    for compute in (reading(0.8), reading(1.5, "stale"), UNKNOWN):
        found = claimed(cpu, link_intra_host=reading(3.0), compute_slowdown=compute)
        assert found["intra_host"] == 3.0
    assert claimed(cpu, compute_slowdown=reading(1.5)) == {"compute": 1.5}


def test_one_host_has_no_inter_host_slowdown():
    one = replace(CLUSTER, num_hosts=1, inter_host=None)
    observation = Observation(
        step=1,
        time_s=1.0,
        step_times_s=(),
        readings={"link_slowdown/inter_host": reading(4.0)},
        global_batch=8,
        seq_len=8,
        lost_devices=frozenset(),
    )
    assert claims(observation, one, AxisSizes.parse("tensor=8")) == {}
