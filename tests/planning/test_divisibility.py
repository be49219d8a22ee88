"""Batches and clusters that divide better: which are near, and that the predicted gains are those
that a search finds.
"""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.config import Config
from optimus_jax.config.presets import model_preset
from optimus_jax.errors import ConfigError, PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.planning.api import find_plans, search_plans
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.planning.search.divisibility import (
    MOST_BATCHES,
    NEAR,
    WORTH_REPORTING,
    near_batches,
    no_better,
    smaller_clusters,
)
from optimus_jax.planning.search.divisors import divisors, prime_factors
from optimus_jax.planning.search.search import Pricing


@given(number=st.integers(1, 5000))
def test_divisors_and_prime_factors_by_definition(number):
    assert list(divisors(number)) == [each for each in range(1, number + 1) if number % each == 0]
    assert math.prod(prime**power for prime, power in prime_factors(number).items()) == number


def test_divisors_of_a_mistyped_huge_batch_do_not_hang():
    assert len(divisors(2 * 3 * 1_000_000_007)) == 8


@given(batch=st.integers(1, 5000), num_devices=st.integers(1, 2048))
def test_near_batches_are_near_and_divide_better(batch, num_devices):
    found = near_batches(batch, num_devices)
    ways = [math.gcd(each, num_devices) for each in (batch, *found)]
    assert ways == sorted(set(ways)), "each is worth more than any that is nearer"
    assert len(found) <= MOST_BATCHES
    assert all(1 / NEAR <= each / batch <= NEAR for each in found)
    if math.gcd(batch, num_devices) == num_devices:
        assert not found


def test_advice_names_the_batch_factor_and_the_gain_a_search_finds():
    found = search_plans(
        "llama3-8b", "h100:5x8", top=2, overrides={"global_batch": 64, "seq_len": 1024}
    )
    best = found.plans[0]
    assert 80 in near_batches(64, 40)
    assert (
        [other.global_batch for other in best.batch_advice]
        == [other.global_batch for other in found.divisibility.batches]
        != []
    )
    for other in best.batch_advice:
        [searched] = find_plans(
            "llama3-8b", "h100:5x8", top=1, global_batch=other.global_batch, seq_len=1024
        )
        assert searched.plan == other.plan
        assert other.gain == pytest.approx(
            searched.prediction.tokens_per_s / best.prediction.tokens_per_s - 1
        )
        assert other.gain >= WORTH_REPORTING
    assert all(
        ranked.as_json()["batch_advice"] == [other.as_json() for other in best.batch_advice]
        for ranked in found.plans
    )
    assert "64 can be split over 8 of 40 (2^3 x 5) devices" in found.divisibility.reasons[0]
    assert (
        "the factor 5 divides neither the batch nor the 32 heads" in found.divisibility.reasons[1]
    )


@pytest.mark.parametrize(("model", "is_said"), [("gpt2", True), ("whisper-small", False)])
def test_stages_of_unequal_numbers_of_equal_layers_are_reported(model, is_said):
    overrides = {"global_batch": 40, "parallel.mesh": "pipe=5"}
    reasons = search_plans(model, "h100:5", top=1, overrides=overrides).divisibility.reasons
    assert any("leave stages uneven" in each for each in reasons) == is_said


def test_batch_that_divides_starts_no_second_search(monkeypatch):
    monkeypatch.setattr("optimus_jax.planning.search.search.REPORT_EVERY_S", math.inf)
    messages = []
    found = search_plans(
        "gpt2", "h100:2x8", top=1, progress=messages.append, overrides={"global_batch": 64}
    )
    assert messages == ["reading the layers of gpt2"]
    assert not found.divisibility.is_worth_reporting


@pytest.mark.parametrize(
    ("cluster", "batch", "whole"),
    [("h100:8", 1, 8), ("h100:16x8", 2, 128), ("h100:7", 1, 7), ("h100:5", 24, None)],
)
def test_report_says_when_no_near_batch_is_better(cluster, batch, whole):
    """It then names the nearest batch that uses every device."""
    found = search_plans("gpt2", cluster, top=1, overrides={"global_batch": batch, "seq_len": 64})
    report = found.divisibility
    assert report.is_worth_reporting
    assert (report.no_batch is None) == bool(report.batches)
    if whole is not None:
        assert report.no_batch is not None
        assert f"--global-batch {whole}, {whole // batch} times larger" in report.no_batch
        assert math.gcd(whole, found.cluster.num_devices) == found.cluster.num_devices


@given(batch=st.integers(1, 5000), num_devices=st.integers(2, 2048))
def test_batch_that_uses_every_device_is_the_nearest(batch, num_devices):
    text = no_better(batch, num_devices, tried=near_batches(batch, num_devices))
    if "--global-batch" in text and "devices divide is" in text:
        whole = int(text.rpartition("--global-batch ")[2].partition(",")[0])
        assert whole % num_devices == 0
        assert whole < num_devices + batch
    else:
        assert batch % num_devices == 0 or any(
            each % num_devices == 0 for each in near_batches(batch, num_devices)
        )


def test_later_phases_are_planned_too():
    """By either name of the setting; a phase without a plan is refused and named."""
    settings = {"global_batch": 8, "seq_len": 64}
    [first] = find_plans("gpt2-nano", "h100:8", top=1, **settings)
    for name in ("phases", "data.phases"):
        found = search_plans(
            "gpt2-nano", "h100:8", top=2, overrides=settings | {name: "5:16x32,9:4"}
        )
        best = found.plans[0]
        assert best.plan == first.plan
        assert [
            (each.phase.steps_before, each.phase.global_batch, each.phase.seq_len)
            for each in found.later
        ] == [(5, 16, 32), (9, 4, 32)]
        assert found.later[0].tokens_per_s == pytest.approx(16 * 32 / found.later[0].step_time_s)
        assert "4 of 8 (2^3) devices" in found.later[1].describe()
        assert best.as_json()["later_phases"] == [each.as_json() for each in found.later]
        assert not found.plans[1].as_json()["later_phases"]
    with pytest.raises(PlanError, match=r"the batches after step 5 \(data.phases: "):
        find_plans("gpt2-nano", "h100:8", top=1, mesh="data=8", phases="5:9", **settings)


def test_search_without_some_hosts_reports_lost_throughput():
    [whole] = find_plans("llama3-8b", "h100:8x8", top=1, global_batch=64, seq_len=1024)
    found = search_plans(
        "llama3-8b", "h100:8x8", top=1, without=1, overrides={"global_batch": 64, "seq_len": 1024}
    )
    assert (found.cluster.num_hosts, found.cluster.num_devices, found.config.data.global_batch) == (
        7,
        56,
        64,
    )
    assert found.lost is not None
    assert found.lost.tokens_per_s_before == pytest.approx(whole.prediction.tokens_per_s)
    assert found.plans[0].as_json()["lost"]["num_devices"] == 8
    assert "without 8 of 64 devices (12.5%)" in found.lost.describe()
    assert found.divisibility.batches, "7 divides 63 and 70"
    assert (
        search_plans(
            "gpt2", "h100:8", top=1, without=1, overrides={"global_batch": 7}
        ).cluster.devices_per_host
        == 7
    )


def test_without_counts_hosts_or_devices_of_the_only_host():
    assert Cluster.parse("h100:2x8").without(1).inter_host is None
    for shape, number in (
        ("h100:4x8", 4),
        ("h100:4x8", 0),
        ("h100:8", 8),
        ("h100:1", 1),
        ("h100:8", -1),
    ):
        with pytest.raises(ConfigError, match="--without"):
            Cluster.parse(shape).without(number)


def test_without_legal_plans_legal_alternatives_are_named():
    assert [
        each.num_hosts
        for each in smaller_clusters(
            Cluster.parse("h100:127x8"),
            Config(model=model_preset("llama3.3-70b")).with_values({"data.global_batch": 8192}),
        )
    ] == [120, 112]
    with pytest.raises(PlanError, match=r"do:    give what does have a plan: --global-batch 13"):
        find_plans("gpt2-nano", "h100:13", global_batch=12, **{"model.num_heads": 8})


def test_run_gets_batch_advice_unless_its_batch_is_fixed():
    config = Config(model=model_preset("llama3-8b")).with_values(
        {"data.global_batch": 64, "data.seq_len": 1024}
    )
    cluster = Cluster.parse("h100:5x8")
    topology = replace(cluster.topology(), host_bytes_per_device=None)
    pricing = Pricing(config, cluster, Rates.of(cluster.accelerator))
    assert "--global-batch 80 is predicted to give" in choose_plan(config, topology, pricing).why
    assert (
        "--global-batch"
        not in choose_plan(config, topology, pricing, fixed=("model.", "data.", "seed")).why
    )
    few = Pricing(
        config.with_values({"data.global_batch": 3}), cluster, Rates.of(cluster.accelerator)
    )
    assert (
        "no batch near it can be split over more; the nearest that all 40 devices divide is"
        " --global-batch 40, 13.3 times larger" in choose_plan(few.config, topology, few).why
    )
    small = Topology(
        num_devices=6, num_processes=1, platform="cpu", device_kind="cpu", bytes_per_device=None
    )
    nano = Config(model=model_preset("gpt2-nano")).with_values({"data.global_batch": 16})
    assert "--global-batch 18 over 6 of them" in choose_plan(nano, small).why
    alone = nano.with_values({"data.global_batch": 1})
    assert (
        "no batch near it can be split over more; the nearest that all 6 devices divide is"
        " --global-batch 6, 6 times larger" in choose_plan(alone, small).why
    )
    assert "batch near" not in choose_plan(alone, small, fixed=("data.",)).why
