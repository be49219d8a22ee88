"""The ranking of plans: equal to an exhaustive search, deterministic, with reasons."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from optimus_jax.config import Config, DataConfig
from optimus_jax.config.presets import model_preset
from optimus_jax.devices.accelerators import Accelerator
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.cost import COMMUNICATION, TERMS, StepTimes
from optimus_jax.planning.cost.mesh_costs import MeshCosts
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.learning.records import Record, calibration_of
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.assemble import memory_fallbacks, with_kept_layers
from optimus_jax.planning.search.layouts import LayoutGroup, layout_groups, layouts
from optimus_jax.planning.search.search import BOUND_MARGIN, Candidate, Pricing, fits, search

ALL = 10**6
CLUSTER = Cluster.parse("h100:8")
PRICING = Pricing(
    Config(
        model=model_preset("gpt2-xl"), data=DataConfig(global_batch=32, seq_len=1024)
    ).with_values({"precision.compute": "bf16"}),
    CLUSTER,
    Rates.of(CLUSTER.accelerator),
)


def with_memory(num_bytes: int) -> Pricing:
    """The same devices with less memory."""
    accelerator: Accelerator = replace(CLUSTER.accelerator, memory_bytes=num_bytes)
    return replace(PRICING, cluster=replace(CLUSTER, accelerator=accelerator))


def test_search_reports_how_many_layouts_are_priced(monkeypatch):
    monkeypatch.setattr("optimus_jax.planning.search.search.REPORT_EVERY_S", 0.0)
    messages = []
    found = search(PRICING, top=1, progress=messages.append)
    assert messages[0] == "reading the layers of gpt2-xl"
    assert len(messages) > 100
    assert messages[-1] == f"pricing layouts of gpt2-xl: {found.num_priced:,} so far"


@pytest.mark.parametrize("gib", [80, 12, 6])
def test_ranking_equals_that_of_an_exhaustive_search(gib):
    pricing = with_memory(gib * 2**30)
    times: dict[object, float] = {}
    for layout in layouts(pricing.config, pricing.cluster.topology()):
        if isinstance(layout, Plan):
            fitting = [
                with_kept_layers(
                    pricing.config, plan, lambda other: fits(pricing.memory(other), pricing.cluster)
                )
                for plan in memory_fallbacks(pricing.config, layout, "gpu")
                if fits(pricing.memory(plan), pricing.cluster)
            ]
            for plan in fitting:
                # the host's memory is used where nothing fits without it
                if plan.offload == fitting[0].offload:
                    kind = (plan.axes, plan.rules, plan.pipeline and plan.pipeline.repeats)
                    times[kind] = min(
                        times.get(kind, float("inf")), pricing.predicted(plan).step_time_s
                    )
    found = search(pricing, top=8).best
    assert [candidate.prediction.step_time_s for candidate in found] == pytest.approx(
        sorted(times.values())[:8], rel=1e-12
    )
    assert found[0].prediction.step_time_s == pytest.approx(min(times.values()))
    assert all(fits(candidate.memory, pricing.cluster) for candidate in found)


def test_scarce_memory_changes_the_ranking_and_rejects_with_bytes():
    plenty, scarce = search(PRICING, top=3), search(with_memory(6 * 2**30), top=3)
    assert not plenty.rejections or "needs about" not in plenty.rejections[-1].reason
    assert any(
        "needs about" in rejection.reason and "6.00 GiB" in rejection.reason
        for rejection in scarce.rejections
    )
    assert scarce.best[0].prediction.step_time_s > plenty.best[0].prediction.step_time_s


def test_offloaded_arrays_have_to_fit_in_host_memory():
    """Llama 8B on one H200 only fits with its moments, 60 GiB, on the host."""
    roomy, tight = (
        replace(Cluster.parse("h200:1"), host_bytes_per_device=gib * 2**30) for gib in (128, 40)
    )
    config = Config(
        model=model_preset("llama3-8b"), data=DataConfig(global_batch=1, seq_len=1024)
    ).with_values({"precision.compute": "bf16"})
    found, nothing = (
        search(Pricing(config, cluster, Rates.of(cluster.accelerator)))
        for cluster in (roomy, tight)
    )
    assert found.best[0].plan.offloads_moments
    assert 40 * 2**30 < found.best[0].memory.host <= 128 * 2**30
    assert nothing.best == ()
    assert (
        "would be in the host's memory, where 40.00 GiB may be used"
        in nothing.rejections[-1].reason
    )


def test_no_plan_fits_into_one_mebibyte():
    ranking = search(with_memory(2**20))
    assert ranking.best == ()
    assert ranking.num_priced > 100


def test_search_computes_what_layouts_share_once(monkeypatch):
    """Bounds on the work of a search, as numbers of parts that are computed."""
    counts: Counter[str] = Counter()

    def counted(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def counting(*args: object) -> object:
            counts[name] += 1
            return method(*args)

        monkeypatch.setattr(owner, name, counting)

    for name in ("_layer", "_microbatch", "_step_end"):
        counted(MeshCosts, name)
    counted(StepTimes, "times")
    cluster = Cluster.parse("h100:8x8")
    pricing = replace(PRICING, cluster=cluster, rates=Rates.of(cluster.accelerator))
    found = search(pricing, top=10)
    meshes = {(group.first.axes, group.first.rules) for group in groups_of(pricing)}
    assert found.num_priced == sum(len(group.zero_stages) for group in groups_of(pricing))
    assert counts["times"] < found.num_priced / 3, "most layouts are slower than a bound allows"
    assert counts["_layer"] < found.num_priced / 3, "meshes share layers"
    assert counts["_microbatch"] < len(meshes), "few are looked at so closely"
    assert counts["_step_end"] < found.num_priced / 6


def groups_of(pricing: Pricing) -> list[LayoutGroup]:
    found = layout_groups(pricing.config, pricing.cluster.topology())
    return [group for group in found if isinstance(group, LayoutGroup)]


@pytest.mark.parametrize("calibrated", [False, True])
def test_bounds_are_below_every_step_time_of_a_group(calibrated):
    terms = {"attention": 0.2, "feed-forward": 0.4, "fsdp": 0.1, "tensor": 0.05, "bubble": 0.1}
    record = Record(model="", plan="", measured_at="", measured_s=0.6, terms_s=terms)
    calibration = calibration_of([record] if calibrated else [])
    factor = BOUND_MARGIN * calibration.least_factor(TERMS)
    assert factor < (0.9 if calibrated else 1.0)
    for group in groups_of(PRICING):
        steps = StepTimes(PRICING.costs, group.first)
        least_s = min(calibration.step_time_s(steps.times(zero)) for zero in group.zero_stages)
        assert 0 < factor * steps.layers_s() < factor * steps.before_end_s() < least_s


def test_search_is_deterministic():
    assert search(PRICING, top=5) == search(PRICING, top=5)


def test_fewer_results_are_the_first_of_more():
    assert search(PRICING, top=12).best[:4] == search(PRICING, top=4).best


def test_measured_steps_change_the_ranking():
    """When communication takes five times as long as predicted in every plan, plans with less of it
    rank higher.
    """
    before = search(PRICING, top=10).best

    def record(candidate: Candidate) -> Record:
        terms = {term.name: term.time_s for term in candidate.prediction.terms}
        measured_s = sum(terms.values()) + 4 * sum(terms.get(name, 0.0) for name in COMMUNICATION)
        return Record(
            model="gpt2-xl",
            plan=candidate.plan.digest,
            measured_at="",
            measured_s=measured_s,
            terms_s=terms,
        )

    def communication_shares(ranked: Sequence[Candidate]) -> list[float]:
        return [PRICING.predicted(candidate.plan).communication for candidate in ranked]

    after = search(
        replace(PRICING, calibration=calibration_of([record(candidate) for candidate in before])),
        top=10,
    ).best
    assert max(communication_shares(after)) < max(communication_shares(before))
    assert sum(communication_shares(after)) < sum(communication_shares(before))


def test_measured_steps_correct_the_prediction():
    fixed = {"parallel.mesh": "tensor=8", "parallel.overlap": "none"}
    tensor = replace(PRICING, config=PRICING.config.with_values(fixed))
    prediction = search(tensor, top=1).best[0].prediction
    terms = {term.name: term.time_s for term in prediction.terms}
    measured = sum(terms.values()) + terms["tensor"]
    record = Record(model="gpt2-xl", plan="", measured_at="", measured_s=measured, terms_s=terms)
    calibrated = replace(tensor, calibration=calibration_of([record]))
    after = search(calibrated, top=1).best[0].prediction
    assert after.step_time_s == pytest.approx(measured, rel=0.05)
    assert after.step_time_s > 1.05 * prediction.step_time_s
    assert after.high_s / after.low_s < prediction.high_s / prediction.low_s
