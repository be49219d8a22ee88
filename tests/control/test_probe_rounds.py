"""Probe rounds run in all processes at the same steps and within their budget, and measure the
slowdowns that were injected.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from signal_fakes import COMPUTE, FakeClock, FakePrograms, with_others

from optimus_jax.control.baselines import FIRST_ROUNDS, PROFILE, AllReduce, Baselines, messages_of
from optimus_jax.control.probe_rounds import Budget, ProbeRounds
from optimus_jax.planning.profiles.measurements import CollectiveFit, MatmulTime

SMALL_BYTES, LARGE_BYTES = messages_of("cpu")
FLOAT32 = 1e-5
"""Relative tolerance: processes exchange float32."""
LINKS = {"pipe": "inter_host", "data": "inter_host", "tensor": "intra_host"}


def rounds_on(programs, clock, *, baselines=None, budget=None, exchange=None):
    return ProbeRounds(
        programs,
        LINKS,
        baselines or Baselines(None),
        budget or Budget(0.01),
        clock=clock,
        exchange=exchange,
    )


def settled(axes=("data", "tensor"), exchange=None, **speeds):
    clock = FakeClock()
    programs = FakePrograms(clock, axes, **speeds)
    rounds = rounds_on(programs, clock, exchange=exchange)
    rounds.settle()
    programs.ran.clear()
    return programs, rounds


def run(rounds, *, step_time_s=0.5):
    return rounds.run(10, step_time_s=step_time_s)


def test_unchanged_hardware_gives_slowdowns_of_one():
    _, rounds = settled()
    samples = run(rounds)
    names = {
        "link_slowdown/data",
        "link_slowdown/tensor",
        "link_slowdown/inter_host",
        "link_slowdown/intra_host",
        "compute_slowdown",
    }
    assert samples == pytest.approx(dict.fromkeys(names, 1.0), rel=FLOAT32)


def test_a_link_crossed_by_two_axes_is_slow_only_if_both_are():
    programs, rounds = settled(("pipe", "data"), latency_s=0.0)
    programs.s_per_byte["pipe"] *= 5
    assert run(rounds)["link_slowdown/inter_host"] == pytest.approx(1.0, rel=FLOAT32)
    programs.s_per_byte["data"] *= 3
    assert run(rounds)["link_slowdown/inter_host"] == pytest.approx(3.0, rel=FLOAT32)


@pytest.mark.parametrize("slower", [0.8, 1.5, 4.0])
def test_a_slow_link_is_reported_by_its_axis_and_its_kind(slower):
    programs, rounds = settled(latency_s=0.0)
    programs.s_per_byte["data"] *= slower
    samples = run(rounds)
    assert (
        samples["link_slowdown/data"]
        == samples["link_slowdown/inter_host"]
        == pytest.approx(slower, rel=FLOAT32)
    )
    assert (
        samples["link_slowdown/tensor"]
        == samples["link_slowdown/intra_host"]
        == pytest.approx(1.0, rel=FLOAT32)
    )


def test_on_a_very_slow_link_the_large_message_is_left_out():
    programs, rounds = settled(latency_s=3e-4, s_per_byte=2e-9)
    programs.s_per_byte["data"] = 600e-9  # 13 Mbit/s: the large message would take 0.6 s
    samples = run(rounds)
    assert ("data", LARGE_BYTES) not in programs.ran
    assert ("tensor", LARGE_BYTES) in programs.ran
    assert samples["link_slowdown/data"] == pytest.approx(300, rel=1e-3), "latency is no part of it"


def test_a_delayed_small_message_does_not_make_a_link_slow():
    programs, rounds = settled(("data",), latency_s=1e-3)
    programs.latency_s["data"] = 4e-3
    assert run(rounds)["link_slowdown/data"] < 4
    assert ("data", LARGE_BYTES) in programs.ran


def test_a_link_slow_from_the_first_round_is_probed_by_small_messages():
    programs, rounds = settled(("data",), s_per_byte=600e-9, latency_s=0.0)
    assert run(rounds)["link_slowdown/data"] == pytest.approx(1.0, rel=FLOAT32)
    programs.s_per_byte["data"] *= 2
    assert run(rounds)["link_slowdown/data"] == pytest.approx(2.0, rel=FLOAT32)


def test_slow_compute_is_measured():
    programs, rounds = settled()
    programs.compute_s *= 1.7
    assert run(rounds)["compute_slowdown"] == pytest.approx(1.7, rel=FLOAT32)


def test_devices_that_are_left_out_are_probed_unless_they_are_lost():
    clock, lost = FakeClock(), set()
    programs = FakePrograms(clock)
    rounds = ProbeRounds(
        programs, LINKS, Baselines(None), Budget(0.01), clock=clock, lost=lambda: lost
    )
    rounds.settle()
    programs.outside = {5: 1.0, 6: 2.5}
    samples = run(rounds)
    assert (samples["process_time/5"], samples["process_time/6"]) == (1.0, 2.5)
    lost.add(6)
    assert "process_time/6" not in run(rounds)


def compute_of(own, factor):
    """Slow down the compute time in the exchanged numbers, which end with: compute, step time,
    cost.
    """
    if len(own) > 2:
        own[-3] *= factor


def test_a_straggler_is_named_and_is_not_slow_compute_everywhere():
    slow = False
    exchange = with_others(lambda own: None, lambda own: compute_of(own, 1.5 if slow else 1.0))
    _, rounds = settled(exchange=exchange)
    slow = True
    samples = run(rounds)
    assert [samples[f"process_time/{process}"] for process in range(3)] == pytest.approx(
        [1.0, 1.0, 1.5], rel=FLOAT32
    )
    assert samples["compute_slowdown"] == pytest.approx(1.0, rel=FLOAT32), "the median process's"


def test_collective_time_is_that_of_the_last_process_to_arrive():
    """The times of the others include waiting for that process."""

    def late(own):
        if len(own) == 1:
            own[:] /= 50  # the small message
        else:
            own[0] /= 50

    _, rounds = settled(("data",), latency_s=0.0)
    rounds._exchange = with_others(late)
    assert run(rounds)["link_slowdown/data"] == pytest.approx(1 / 50, rel=FLOAT32)


class ThreadedGroup:
    """Processes as threads that exchange arrays; fails if one exchanges a different number of times
    or of values than the others.
    """

    def __init__(self, num_processes):
        self._barrier, self._rows = (
            threading.Barrier(num_processes, timeout=20),
            [None] * num_processes,
        )

    def exchange(self, process):
        def exchanged(own):
            self._rows[process] = own
            self._barrier.wait()
            rows = np.stack(self._rows)
            self._barrier.wait()
            return rows

        return exchanged

    def run(self, work):
        with ThreadPoolExecutor(len(self._rows)) as pool:
            return list(pool.map(work, range(len(self._rows))))


def test_all_processes_run_the_same_probes_at_the_same_steps():
    """Although each measures other times of links, devices, steps and rounds."""
    together = ThreadedGroup(3)

    def process(number):
        clock = FakeClock()
        programs = FakePrograms(
            clock,
            ("data", "tensor"),
            s_per_byte=(1e-9, 40e-9, 900e-9)[number],
            compute_s=(0.01, 0.02, 0.03)[number],
        )
        rounds = rounds_on(programs, clock, budget=Budget(0.5), exchange=together.exchange(number))
        rounds.settle()
        # From here on the link is slow for all, also for the process that measures the shortest
        # time.
        programs.s_per_byte["data"] = (60e-9, 70e-9, 900e-9)[number]
        samples = {
            step: rounds.run(step, step_time_s=0.1 + 0.01 * number)
            for step in range(1, 2000)
            if rounds.budget.is_due(step)
        }
        steps = [step for step, found in samples.items() if found]
        newest = samples[steps[-1]]
        return steps, programs.ran, [newest[f"process_time/{each}"] for each in range(3)]

    first, *others = together.run(process)
    assert others == [first, first]
    steps, ran, ratios = first
    assert len(steps) > 3
    assert ran[-1] == (
        "tensor",
        LARGE_BYTES,
    ), "the large message along the other axis was left out by all"
    assert ratios[0] < ratios[1] == 1.0 < ratios[2]


def test_over_a_long_run_probes_stay_within_their_share():
    clock = FakeClock()
    programs = FakePrograms(clock)
    budget = Budget(0.002)
    rounds = rounds_on(programs, clock, budget=budget)
    rounds.settle()
    began_s, spent_s, num_rounds = clock(), 0.0, 0
    for step in range(1, 20_000):
        clock.pass_s(0.1)
        if step % 500 == 0:
            budget.ask(step)
        if budget.is_due(step):
            before_s = clock()
            rounds.run(step, step_time_s=0.1)
            spent_s, num_rounds = spent_s + clock() - before_s, num_rounds + 1
    assert 0.0015 < spent_s / (clock() - began_s) <= 0.00205, "the first round is a loan"
    assert num_rounds > 100


def test_a_probe_share_of_zero_is_never_due():
    assert not any(Budget(0.0).is_due(step) for step in range(100))


def test_a_requested_round_waits_for_its_step_and_the_budget():
    budget = Budget(1 / 64)
    budget.spent(1, 1 / 16, 0.5)  # which 8 steps pay back
    assert next(step for step in range(2, 1000) if budget.is_due(step)) == 25
    assert budget.interval_s == (25 - 1) * 0.5
    budget.ask(20)
    assert [budget.is_due(step) for step in (19, 20)] == [False, True]
    budget.ask(2)
    assert budget.is_due(2), "the first is still owed for"
    budget.spent(2, 1 / 16, 0.5)
    budget.ask(3)
    assert next(step for step in range(3, 1000) if budget.is_due(step)) == 9, (
        "when no more than one is owed for"
    )
    budget.ask(3, urgent=True)
    assert budget.is_due(3), "whatever is owed"
    budget.spent(3, 1 / 16, 0.5)
    budget.ask(4)
    assert next(step for step in range(4, 1000) if budget.is_due(step)) == 17


def test_what_a_request_is_worth_ends_with_the_next_round_that_nobody_asks_for():
    free, budget = Budget(0.01), Budget(0.01)
    for each in (free, budget):
        each.spent(1, 0.1, 0.5)
        each.ask(2, worth_s=10.0)
        each.spent(2, 0.1, 0.5)
    free.ask(3)
    for each in (free, budget):
        each.spent(3, 0.1, 0.5)
    assert free.interval_s < budget.interval_s, "it was charged"


def test_a_round_worth_its_time_is_not_charged_to_the_budget():
    budget = Budget(1 / 64)
    for step in range(1, 8):
        budget.spent(step, 5.0, 0.5)  # more than may be overdrawn
    budget.ask(8, urgent=True, worth_s=4.0)
    assert not budget.is_due(8), "it is worth less than it takes"
    budget.ask(8, urgent=True, worth_s=6.0)
    assert budget.is_due(8)
    owed_s = budget.interval_s
    budget.spent(8, 5.0, 0.5)
    assert budget.interval_s <= owed_s, "it was not charged"
    budget.ask(9)
    assert not budget.is_due(9), "one second is left of what it was worth"


PROBED = SimpleNamespace(
    launch_s=1e-3, matmuls=(MatmulTime(m=512, k=256, n=256, dtype="f32", time_s=4e-3),)
)


def profile(latency_s=2e-3, bytes_per_s=1e9):
    fit = CollectiveFit(
        kind="all-reduce", axis_size=2, stride=1, latency_s=latency_s, bytes_per_s=bytes_per_s
    )
    return SimpleNamespace(
        probed=PROBED,
        fit=lambda kind, axis_size, stride: (
            fit if (kind, axis_size, stride) == ("all-reduce", 2, 1) else None
        ),
    )


def test_a_slow_link_measured_earlier_is_recognised_on_other_messages():
    baselines = Baselines(None)
    same, other = (
        AllReduce(axis_size=size, stride=4, num_bytes=LARGE_BYTES, repeats=1) for size in (2, 4)
    )
    assert baselines.gauged(same, 28.0) == pytest.approx(28.0)
    baselines.gauge(same, 200.0, 28.0)
    baselines.gauge(other, 40.0, 28.0)
    assert baselines.gauged(same, 200.0) == pytest.approx(200.0), (
        "the same work: the link became slower"
    )
    assert baselines.gauged(other, 40.0) == pytest.approx(28.0), "other work over the same link"


def test_a_profile_is_the_baseline_and_is_named_as_source():
    clock = FakeClock()
    programs = FakePrograms(
        clock, ("data", "tensor"), latency_s=0.0, s_per_byte=4e-3 / LARGE_BYTES, compute_s=0.01
    )
    rounds = rounds_on(programs, clock, baselines=Baselines(profile()))
    rounds.settle()
    samples = run(rounds)
    half_s = 0.5 * (1e-3 + 2e-3 + LARGE_BYTES / 1e9)
    assert samples["link_slowdown/data"] == pytest.approx((4e-3 - half_s) / half_s, rel=FLOAT32), (
        "no more than half of a large message's time counts as latency"
    )
    assert samples["compute_slowdown"] == pytest.approx(0.01 / 5e-3, rel=FLOAT32)
    assert rounds.sources() == {
        "link_slowdown/data": PROFILE,
        "link_slowdown/tensor": FIRST_ROUNDS,
        "compute_slowdown": PROFILE,
    }


def test_a_repeated_collective_is_launched_once():
    work = AllReduce(axis_size=2, stride=1, num_bytes=LARGE_BYTES, repeats=8)
    assert Baselines(profile()).of(work).time_s == pytest.approx(
        1e-3 + 8 * (2e-3 + LARGE_BYTES / 1e9)
    )


def test_without_a_baseline_there_is_no_reading():
    clock = FakeClock()
    rounds = rounds_on(FakePrograms(clock, ("data",)), clock)
    found = [run(rounds) for _ in range(4)]
    assert found[0] == found[1] == {}
    assert found[2] == pytest.approx(
        {"link_slowdown/data": 1.0, "link_slowdown/inter_host": 1.0, "compute_slowdown": 1.0},
        rel=FLOAT32,
    )
    assert rounds.sources()["compute_slowdown"] == FIRST_ROUNDS


def test_a_slow_link_stays_slow_on_another_mesh():
    """After a re-mesh another axis crosses the link, for which no normal reading exists."""
    clock = FakeClock()
    baselines = Baselines(None)
    before = FakePrograms(clock, ("data",), latency_s=0.0)
    rounds = rounds_on(before, clock, baselines=baselines)
    rounds.settle()
    before.s_per_byte["data"] *= 4
    assert run(rounds)["link_slowdown/inter_host"] == pytest.approx(4, rel=FLOAT32)
    after = FakePrograms(clock, ("data",), latency_s=0.0, s_per_byte=4e-9)
    after.work = lambda axis, num_bytes: AllReduce(
        axis_size=4, stride=1, num_bytes=num_bytes, repeats=1
    )
    rounds = rounds_on(after, clock, baselines=baselines)
    rounds.settle()
    assert run(rounds)["link_slowdown/inter_host"] == pytest.approx(4, rel=FLOAT32)
    after.s_per_byte["data"] /= 4
    assert run(rounds)["link_slowdown/inter_host"] == pytest.approx(1, rel=FLOAT32), (
        "until it is repaired"
    )


def test_settling_repeats_probes_only_if_a_link_has_changed():
    clock, baselines = FakeClock(), Baselines(profile())
    # as in the profile, including the launch
    programs = FakePrograms(clock, ("data",), latency_s=3e-3)
    rounds = rounds_on(programs, clock, baselines=baselines)
    rounds.settle()
    assert programs.ran == [("data", SMALL_BYTES), ("data", LARGE_BYTES)]
    assert rounds.at_first == [
        pytest.approx({"link_slowdown/data": 1.0, "link_slowdown/inter_host": 1.0}, rel=FLOAT32)
    ]
    assert rounds.budget.is_due(1), "settling is no round"
    programs.s_per_byte["data"] *= 8
    for count in (3, 1):
        rounds.settle()
        assert [sample["link_slowdown/inter_host"] for sample in rounds.at_first] == pytest.approx(
            [rounds.at_first[0]["link_slowdown/inter_host"]] * count
        )
        assert rounds.at_first[0]["link_slowdown/inter_host"] > 4


def test_a_known_link_slowdown_holds_on_a_mesh_that_uses_it_less():
    """Devices of a host share the link to others: on the second mesh fewer of them use it
    at once.
    """
    clock, baselines = FakeClock(), Baselines(profile(latency_s=0.0, bytes_per_s=1e9))
    before = FakePrograms(clock, ("data",), latency_s=1e-3, s_per_byte=81e-9)
    rounds = rounds_on(before, clock, baselines=baselines)
    rounds.settle()
    known = run(rounds)["link_slowdown/inter_host"]
    assert known > 20
    after = FakePrograms(clock, ("pipe",), latency_s=1e-3, s_per_byte=40e-9)
    after.work = lambda axis, num_bytes: AllReduce(
        axis_size=2, stride=1, num_bytes=num_bytes, repeats=2
    )
    rounds = rounds_on(after, clock, baselines=baselines)
    rounds.settle()
    assert rounds.at_first == [
        pytest.approx({"link_slowdown/pipe": known, "link_slowdown/inter_host": known}, rel=FLOAT32)
    ]
    after.s_per_byte["pipe"] = 120e-9
    assert run(rounds)["link_slowdown/inter_host"] > 2 * known
    after.s_per_byte["pipe"], after.latency_s["pipe"] = 2e-9, 1e-3  # two repeats
    assert run(rounds)["link_slowdown/inter_host"] == pytest.approx(1, rel=0.05), (
        "a sound link is sound"
    )


def test_one_device_has_only_a_compute_probe():
    clock = FakeClock()
    rounds = rounds_on(FakePrograms(clock, ()), clock)
    rounds.settle()
    assert run(rounds) == pytest.approx({"compute_slowdown": 1.0}, rel=FLOAT32)
    assert COMPUTE.repeats == 1


def test_the_budget_counts_the_dearest_process_and_the_shortest_steps():
    _, alone = settled()
    _, together = settled(
        exchange=with_others(
            lambda own: own.put([-2, -1], [own[-2] / 2, own[-1] * 3]) if len(own) > 3 else None
        )
    )
    for rounds in (alone, together):
        run(rounds)
    assert together.budget.interval_s == pytest.approx(3 * alone.budget.interval_s, rel=FLOAT32)
    due = [
        next(step for step in range(11, 10_000) if rounds.budget.is_due(step)) - 10
        for rounds in (alone, together)
    ]
    assert due[1] == pytest.approx(6 * due[0], abs=6)
