"""A test for each signal: a known delay or value is injected at its source, and the reading shows
it.
"""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from signal_fakes import FakeClock, FakePrograms, at_once, nvml

from optimus_jax.config import ControlConfig
from optimus_jax.control.baselines import Baselines
from optimus_jax.control.guard import Absent
from optimus_jax.control.health import DeviceMemory, GpuHealth
from optimus_jax.control.probe_rounds import Budget, ProbeRounds
from optimus_jax.control.signals import UNKNOWN
from optimus_jax.control.sources import STALE_POLLS, Signals
from optimus_jax.run_directory.step_record import StepRecord

BATCH = {"segments": np.zeros((4, 16), np.int32), "loss_mask": np.ones((4, 16), bool)}


class Source:
    """A source with given samples or a given error."""

    name, signals = "the fake", ("power_w", "link_slowdown/")

    def __init__(self, samples=None, error=None):
        self.samples, self.error, self.polls = samples, error, []

    def poll(self, step, now_s):
        self.polls.append(now_s)
        if self.error is not None:
            raise self.error
        return self.samples

    def close(self):
        self.polls.append("closed")


def signals(clock, sources=(), warnings=None, rounds=None):
    return Signals(
        ControlConfig(window_steps=10),
        global_batch=4,
        seq_len=16,
        sources=sources,
        rounds=rounds,
        clock=clock,
        warn=(lambda text: pytest.fail(text)) if warnings is None else warnings.append,
    )


def record(step, *, step_time_s=0.5, loss=3.0, mfu=None, skipped=False, data_wait_s=None):
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        tokens=1000,
        step_time_s=step_time_s,
        tokens_per_s=1000 / step_time_s,
        mfu=mfu,
        plan="a plan",
        peak_bytes=None,
        skipped=skipped,
        data_wait_s=data_wait_s,
    )


def observe_steps(
    found, clock, num_steps, *, load_s=0.0, dispatch_s=0.0, rest_s=0.01, batch=BATCH, first=1
):
    """Do what the trainer does, on the fake clock; returns the last observation."""
    observation = None
    for step in range(first, first + num_steps):
        began_s = clock()
        clock.pass_s(load_s)
        loaded_s = clock()
        clock.pass_s(dispatch_s)
        found.dispatched(dispatch_s=clock() - loaded_s, batch=batch)
        clock.pass_s(rest_s)
        found.step(
            record(step, step_time_s=clock() - began_s, mfu=0.4, data_wait_s=loaded_s - began_s)
        )
        observation = found.observe(step)
    return observation


def test_data_wait_and_dispatch_time_are_measured():
    clock = FakeClock()
    observation = observe_steps(signals(clock), clock, 12, load_s=0.3, dispatch_s=0.1, rest_s=0.6)
    values = {
        name: observation.reading(name).value
        for name in ("data_wait_s", "dispatch_s", "step_time_s", "tokens_per_s", "mfu")
    }
    assert values == pytest.approx(
        {
            "data_wait_s": 0.3,
            "dispatch_s": 0.1,
            "step_time_s": 1.0,
            "tokens_per_s": 1000.0,
            "mfu": 0.4,
        }
    )
    reading = observation.reading("data_wait_s")
    assert (reading.count, reading.quality) == (10, "good")
    assert reading.time_s == pytest.approx(clock.now_s)
    assert reading.spread == pytest.approx(0.0)


def test_a_change_shows_within_half_a_window():
    clock = FakeClock()
    found = signals(clock)
    observe_steps(found, clock, 10, load_s=0.1)
    assert observe_steps(found, clock, 6, load_s=0.4, first=11).reading(
        "data_wait_s"
    ).value == pytest.approx(0.4)


def test_each_step_time_is_observed_once():
    clock = FakeClock()
    found = signals(clock)
    for step in (1, 2, 3):
        found.step(record(step, step_time_s=step / 10))
    assert found.observe(3).step_times_s == (0.1, 0.2, 0.3)
    assert found.observe(3).step_times_s == ()


def test_without_a_known_peak_mfu_is_unknown():
    clock = FakeClock()
    found = signals(clock)
    found.step(record(1))
    assert found.observe(1).reading("mfu") is UNKNOWN


def test_the_loss_slope_is_robust_to_spikes():
    clock = FakeClock()
    found = signals(clock)
    for step in range(1, 21):
        found.step(
            record(
                step,
                loss=5.0 - 0.02 * step + (4.0 if step in (13, 16) else 0.0),
                skipped=step == 17,
            )
        )
    reading = found.observe(20).reading("loss_slope")
    assert reading.value == pytest.approx(-0.02)
    assert reading.count == 5


def test_the_loss_slope_starts_anew_when_the_run_goes_back():
    clock = FakeClock()
    found = signals(clock)
    for step in [*range(1, 21), *range(11, 18)]:
        found.step(record(step, loss=-0.5 * step if step > 17 else 0.1 * step))
    assert found.observe(17).reading("loss_slope").value == pytest.approx(0.1)


def test_memory_share_is_that_of_the_fullest_device():
    full = SimpleNamespace(
        memory_stats=lambda: {"bytes_in_use": 60, "peak_bytes_in_use": 90, "bytes_limit": 100}
    )
    other = SimpleNamespace(
        memory_stats=lambda: {"bytes_in_use": 20, "peak_bytes_in_use": 30, "bytes_limit": 100}
    )
    clock = FakeClock()
    observation = observe_steps(signals(clock, [DeviceMemory([other, full])]), clock, 1)
    assert (
        observation.reading("memory_share").value,
        observation.reading("memory_peak_share").value,
    ) == (0.6, 0.9)


def test_on_cpus_device_memory_is_unknown_without_a_warning():
    clock, warnings = FakeClock(), []
    found = signals(clock, [DeviceMemory([SimpleNamespace(memory_stats=lambda: None)])], warnings)
    assert observe_steps(found, clock, 3, rest_s=100.0).reading("memory_share") is UNKNOWN
    assert "device memory" in found.missing
    assert "device memory" in found.remarks()["not_measured"]
    assert not warnings, "that is no fault"


def test_readings_of_the_gpu_driver_are_observed():
    gpus = [{"busy": 93, "clock": 1200, "max_clock": 1500, "power": 650_000, "temperature": 84}]
    clock = FakeClock()
    observation = observe_steps(
        signals(clock, [GpuHealth([0], library=nvml(gpus), start=at_once)]), clock, 3, rest_s=1.0
    )
    values = [
        observation.reading(name).value
        for name in ("utilisation", "clock_share", "power_w", "temperature_c")
    ]
    assert values == [0.93, 0.8, 650.0, 84.0]
    assert observation.reading("ecc_errors") is UNKNOWN
    assert observation.reading("throttled_share") is UNKNOWN


def test_padding_and_document_lengths_of_batches_are_observed():
    segments, counts = np.zeros((4, 16), np.int32), np.ones((4, 16), bool)
    segments[:, 8:], counts[:, 12:] = 1, False
    clock = FakeClock()
    found = signals(clock)
    observation = observe_steps(found, clock, 1, batch={"segments": segments, "loss_mask": counts})
    # The first position that does not count ends the document only if the next one belongs to
    # another document.
    assert observation.reading("padding_share").value == 4 / 16
    assert observation.reading("length_median").value == 8
    assert found.batches.histogram == {8: 8}
    assert found.remarks() == {"document_lengths": {8: 8}}


def test_sources_are_polled_once_a_second_at_most():
    clock, source = FakeClock(), Source({"power_w": 1.0})
    observe_steps(signals(clock, [source]), clock, 50, rest_s=0.1)
    assert len(source.polls) == 5
    assert min(np.diff(source.polls)) >= 1.0 - 1e-9


def test_a_source_without_new_samples_is_polled_again_and_goes_stale():
    clock, source = FakeClock(), Source({"power_w": 7.0})
    found = signals(clock, [source])
    assert observe_steps(found, clock, 1).reading("power_w").value == 7.0
    source.samples = None
    observation = observe_steps(found, clock, 30, rest_s=0.5)
    assert observation.time_s - observation.reading("power_w").time_s > STALE_POLLS
    assert (observation.reading("power_w").quality, observation.reading("power_w").value) == (
        "stale",
        7.0,
    )


def test_samples_stay_valid_for_longer_in_slow_steps():
    clock, source = FakeClock(), Source({"power_w": 7.0})
    found = signals(clock, [source])
    observe_steps(found, clock, 3, rest_s=30.0)
    source.samples = None
    assert observe_steps(found, clock, 1, rest_s=30.0).reading("power_w").quality == "good"


def test_a_broken_source_is_unknown_warned_once_and_never_raises():
    clock, warnings, source = FakeClock(), [], Source({"power_w": 7.0, "link_slowdown/data": 2.0})
    found = signals(clock, [source], warnings)
    assert observe_steps(found, clock, 3, rest_s=1.0).reading("link_slowdown/data").value == 2.0
    source.error = OSError("the cable is out")
    observe_steps(found, clock, 2, rest_s=1.0)
    source.error = OSError("the cable is out, said at 12:03")
    observation = observe_steps(found, clock, 5, rest_s=1.0)
    assert observation.reading("power_w") is observation.reading("link_slowdown/data") is UNKNOWN
    assert observation.reading("step_time_s").quality == "good", "others are not affected"
    assert warnings == [
        "the fake cannot be measured (OSError: the cable is out); power_w, link_slowdown/ stay"
        " unknown until it can"
    ]
    assert found.missing == {"the fake": "OSError: the cable is out, said at 12:03"}
    source.error = None
    assert observe_steps(found, clock, 1, rest_s=1.0).reading("power_w").value == 7.0
    assert not found.missing


def test_an_absent_source_is_polled_once_a_minute_without_a_warning():
    clock, source = FakeClock(), Source(error=Absent("no driver"))
    observe_steps(signals(clock, [source]), clock, 100, rest_s=1.0)
    assert len(source.polls) == 2


def test_a_batch_without_a_needed_array_breaks_only_that_signal():
    clock, warnings = FakeClock(), []
    observation = observe_steps(signals(clock, warnings=warnings), clock, 3, rest_s=1.0, batch={})
    assert observation.reading("padding_share") is UNKNOWN
    assert len(warnings) == 1


def test_by_default_a_broken_source_is_logged(caplog):
    clock = FakeClock()
    found = Signals(
        ControlConfig(),
        global_batch=4,
        seq_len=16,
        sources=[Source(error=ValueError("nonsense"))],
        clock=clock,
    )
    with caplog.at_level(logging.WARNING):
        observe_steps(found, clock, 3, rest_s=1.0)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("not_finite", [float("nan"), float("inf")])
def test_samples_that_are_not_finite_are_ignored(not_finite):
    clock = FakeClock()
    found = signals(clock)
    observe_steps(found, clock, 3, load_s=0.2)
    found.dispatched(dispatch_s=not_finite, batch=BATCH)
    found.step(record(4, data_wait_s=not_finite))
    observation = found.observe(4)
    assert observation.reading("data_wait_s").count == 3
    assert observation.reading("dispatch_s").count == 3


def test_a_new_plan_forgets_readings_of_steps_and_axes_only():
    clock = FakeClock()
    source = Source({"power_w": 7.0, "link_slowdown/data": 2.0, "link_slowdown/inter_host": 2.0})
    found = signals(clock, [source])
    for step in range(1, 11):
        found.step(record(step, loss=5.0 - step))
    observe_steps(found, clock, 1, first=11)
    source.samples = None
    found.enter(global_batch=4, seq_len=16, rounds=None)
    observation = found.observe(10)
    known = {name for name, reading in observation.readings.items() if reading is not UNKNOWN}
    assert known == {
        "power_w",
        "link_slowdown/inter_host",
        "loss_slope",
        "padding_share",
        "length_median",
    }
    assert observation.step_times_s == ()


def test_a_new_phase_is_observed_and_has_its_own_losses():
    clock = FakeClock()
    found = signals(clock)
    for step in range(1, 11):
        found.step(record(step, loss=5.0 - step))
    observe_steps(found, clock, 1, first=11)
    found.enter(global_batch=8, seq_len=32, rounds=None)
    observation = found.observe(10, frozenset({3}))
    assert (observation.global_batch, observation.seq_len, observation.lost_devices) == (8, 32, {3})
    assert {
        name for name, reading in observation.readings.items() if reading is not UNKNOWN
    } == set()


def probed(clock, warnings=None, *, share=0.01):
    programs = FakePrograms(clock)
    rounds = ProbeRounds(
        programs, {"data": "inter_host"}, Baselines(None), Budget(share), clock=clock
    )
    return programs, signals(clock, warnings=warnings, rounds=rounds)


def test_a_slow_link_and_slow_compute_are_observed_after_settling():
    clock = FakeClock()
    programs, found = probed(clock)
    found._rounds.settle()
    assert not found.is_probe_due(1), "steps have to be known first"
    observe_steps(found, clock, 5, rest_s=0.5)
    assert found.is_probe_due(5)
    programs.s_per_byte["data"] *= 3
    programs.compute_s *= 1.5
    found.probe(5)
    observation = found.observe(5)
    assert observation.reading("link_slowdown/data").value == pytest.approx(3, rel=1e-6)
    assert observation.reading("link_slowdown/inter_host").value == pytest.approx(3, rel=1e-6)
    assert observation.reading("link_slowdown/intra_host") is UNKNOWN
    assert observation.reading("compute_slowdown").value == pytest.approx(1.5, rel=1e-6)
    assert observation.reading("process_time/0") is UNKNOWN, "there is one process"
    assert not found.is_probe_due(6), "the budget is spent"


def test_a_requested_probe_runs_at_once_and_may_discard_earlier_ones():
    clock = FakeClock()
    programs, found = probed(clock)
    found._rounds.settle()
    observe_steps(found, clock, 5, rest_s=0.5)
    found.probe(5)
    assert not found.is_probe_due(6)
    found.ask_probe(6, anew=True)
    assert found.is_probe_due(6)
    assert found.observe(6).reading("link_slowdown/data").value == pytest.approx(1)
    programs.s_per_byte["data"] *= 3
    found.probe(6)
    reading = found.observe(6).reading("link_slowdown/data")
    assert (reading.value, reading.count) == (pytest.approx(3, rel=1e-6), 1)


def test_probes_before_the_first_step_on_a_mesh_count():
    clock = FakeClock()
    programs, found = probed(clock)
    rounds = found._rounds
    rounds.settle()
    programs.s_per_byte["data"] *= 3
    rounds.settle()
    assert found.observe(1).reading("link_slowdown/data") is UNKNOWN
    found.enter(global_batch=8, seq_len=32, rounds=rounds)
    reading = found.observe(1).reading("link_slowdown/inter_host")
    assert (reading.value, reading.count, reading.quality) == (
        pytest.approx(3, rel=1e-6),
        3,
        "good",
    ), "it is news"
    rounds.settle()
    found.enter(global_batch=8, seq_len=32, rounds=rounds)
    assert found.observe(1).reading("link_slowdown/inter_host").quality == "good", (
        "what was known stays known"
    )


def test_failing_probes_are_given_up_with_one_warning():
    clock, warnings = FakeClock(), []
    programs, found = probed(clock, warnings)
    programs.time_s = None
    observe_steps(found, clock, 5, rest_s=0.5)
    found.probe(5)
    found.probe(6)
    assert not found.is_probe_due(7)
    assert len(warnings) == 1
    assert "probes" in found.missing


def test_closing_closes_all_sources_even_if_one_fails():
    class Stuck(Source):
        def close(self):
            raise OSError("stuck")

    clock, warnings, source = FakeClock(), [], Source()
    signals(clock, [Stuck(), source], warnings).close()
    assert source.polls == ["closed"]
    assert len(warnings) == 1
