"""Predictions add up, follow the closed forms, and rank plans as physics says."""

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from pricing import GPT, HOST, HOSTS, LLAMA, RATES, communication_ops, plan_of

from optimus_jax.config import Tuning
from optimus_jax.models.flops import step_flops
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.communication import VOCABULARY
from optimus_jax.planning.cost.communication_time import CommunicationTimes
from optimus_jax.planning.cost.cost import COMMUNICATION, Prediction, predict, term_times
from optimus_jax.planning.cost.implementation_profile import MEGATRON, OURS
from optimus_jax.planning.cost.layer_shape import layer_shape, shape_point
from optimus_jax.planning.cost.rates import Correction
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.profiles.cluster import Cluster

SEQ_LEN, BATCH = 1024, 64
MESHES = [
    "data=1",
    "data=8",
    "fsdp=8",
    "tensor=8",
    "data=2,fsdp=2,tensor=2",
    "pipe=4,data=2",
    "pipe=2,fsdp=2,tensor=2",
]


def priced(plan: Plan, model=GPT, cluster=HOST, rates=RATES, **options) -> Prediction:
    return predict(workload_of(model), plan, cluster, rates, **options)


def workload_of(model=GPT) -> Workload:
    return Workload(model=model, seq_len=SEQ_LEN, global_batch=BATCH)


def terms(prediction: Prediction) -> dict[str, float]:
    return {term.name: term.time_s for term in prediction.terms}


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
def test_terms_add_up_to_the_step_and_give_its_shares(model, mesh, remat):
    prediction = priced(plan_of(mesh, model, remat=remat, microbatches=8), model)
    times = terms(prediction)
    assert sum(times.values()) == pytest.approx(prediction.step_time_s)
    assert all(time_s > 0 for time_s in times.values())
    assert prediction.bubble == pytest.approx(times.get("bubble", 0) / prediction.step_time_s)
    assert prediction.communication == pytest.approx(
        sum(times.get(name, 0) for name in COMMUNICATION) / prediction.step_time_s
    )
    assert prediction.low_s < prediction.step_time_s < prediction.high_s
    assert prediction.tokens_per_s == pytest.approx(BATCH * SEQ_LEN / prediction.step_time_s)


def test_term_times_equal_the_terms_of_the_prediction():
    plan = plan_of("pipe=2,fsdp=2,tensor=2", microbatches=8)
    times = term_times(workload_of(), plan, HOST, RATES)
    assert {name: time_s for name, time_s in times.items() if time_s} == terms(priced(plan))


def test_every_tick_repeats_embeddings_and_broadcasts():
    """Four repeats need forward in 16 * 4 + 1 ticks: each embeds, and each backward broadcasts."""
    plan = plan_of("pipe=2,data=4", schedule="interleaved", repeats=4, microbatches=16)
    layer = layer_shape(workload_of(), plan)
    runs = {"head": 16, "embed": 65, "broadcast": 65 + 58}
    time_of = CommunicationTimes(plan.axes, HOST, RATES).time
    by_hand = sum(
        runs[op.part] * op.count * time_of(op)
        for op in communication_ops(workload_of(), plan, layer, OURS)
        if op.part in runs
    )
    assert terms(priced(plan))[VOCABULARY] == pytest.approx(by_hand)


def test_one_device_has_no_communication_and_no_bubble():
    prediction = priced(plan_of("data=1", microbatches=8))
    assert (prediction.communication, prediction.bubble) == (0, 0)


def test_mfu_by_hand_and_unknown_in_float32():
    prediction = priced(plan_of("data=8"))
    assert prediction.mfu == pytest.approx(
        step_flops(GPT, num_sequences=BATCH, seq_len=SEQ_LEN)
        / (prediction.step_time_s * 8 * 989e12)
    )
    assert prediction.mfu is not None
    assert 0.2 < prediction.mfu < 0.75
    assert priced(plan_of("data=8", precision="f32", attention="xla")).mfu is None


def test_frozen_layers_below_all_that_is_trained_have_no_backward():
    def time_s(mesh: str, **tuning: Any) -> float:
        model = replace(LLAMA, tuning=Tuning(**tuning))
        return priced(plan_of(mesh, model, remat="none", microbatches=8), model).step_time_s

    saved = time_s("data=8", freeze=("embedding",)) - time_s(
        "data=8", freeze=("embedding",), freeze_layers=3
    )
    times = terms(priced(plan_of("data=8", LLAMA, remat="none", microbatches=8), LLAMA))
    layers = sum(times[name] for name in ("attention", "feed-forward", "memory"))
    # Two thirds of the products, and more of the passes over memory.
    assert 2 / 3 < saved / (3 / LLAMA.num_layers * layers) < 0.85
    assert time_s("data=8", freeze_layers=3) == time_s("data=8"), "the embedding is trained"
    assert time_s("pipe=4,data=2", freeze=("embedding",), freeze_layers=3) == time_s(
        "pipe=4,data=2", freeze=("embedding",)
    )


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("microbatches", [4, 8, 16])
@pytest.mark.parametrize("repeats", [1, 2])
def test_bubble_time_equals_the_formula(stages, microbatches, repeats):
    """(p - 1) / (m v) of the time in layers and sends, the head not counted: all stages share its
    work.
    """
    plan = plan_of(
        f"pipe={stages}",
        repeats=repeats,
        schedule="interleaved" if repeats > 1 else "1f1b",
        microbatches=microbatches,
    )
    times = terms(priced(plan))
    working = sum(
        times.get(name, 0.0)
        for name in ("attention", "feed-forward", "memory", "launching", "pipe")
    )
    assert times["bubble"] == pytest.approx((stages - 1) / (microbatches * repeats) * working)


def test_stages_that_share_a_processor_have_no_bubble():
    """As virtual devices do; on two hosts the stages of one wait for those of the other."""
    shared = replace(RATES, shares_processor=True)
    plan = plan_of("pipe=8", microbatches=4)
    two_hosts = Cluster.parse("h100:2x4")
    bubbles = [
        priced(plan, cluster=cluster, rates=rates).bubble
        for cluster, rates in ((HOST, shared), (two_hosts, shared), (two_hosts, RATES))
    ]
    assert bubbles[0] == pytest.approx(0, abs=1e-9)
    assert 0 < bubbles[1] < bubbles[2]


def test_stages_without_lockstep_have_the_bubble_and_the_sends_that_they_wait_for():
    beside = replace(MEGATRON, waits_for_sends=False)
    hidden, waited = (
        terms(priced(plan_of("pipe=4", microbatches=8), implementation=implementation))
        for implementation in (beside, MEGATRON)
    )
    layers = sum(hidden[name] for name in ("attention", "feed-forward", "memory", "launching"))
    assert "pipe" not in hidden
    assert 3 / 8 * layers < hidden["bubble"] < 1.01 * 3 / 8 * layers
    # Eight microbatches in two directions, and three stages to fill.
    send_s = waited["pipe"] / 16
    assert send_s > 0
    free_s = waited["bubble"] - 3 * 2 * send_s
    assert free_s == pytest.approx(3 / 8 * layers, rel=0.01)


def test_unequal_stages_take_as_long_as_the_longest():
    even = terms(priced(plan_of("pipe=2", microbatches=8, stages=(24, 24))))
    uneven = terms(priced(plan_of("pipe=2", microbatches=8, stages=(16, 32))))
    assert uneven["bubble"] > even["bubble"] + 0.3 * (even["attention"] + even["feed-forward"])


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("attention", ["xla", "cudnn"])
def test_more_recomputing_takes_longer(mesh, attention):
    """The search relies on it: no other policy undercuts the one that recomputes least."""
    times = [
        priced(plan_of(mesh, remat=remat, attention=attention)).step_time_s
        for remat in ("none", "selective", "dots", "full")
    ]
    assert times == sorted(times)
    assert times[0] < times[3]


def test_recomputed_stage_costs_one_more_forward():
    kept, again = (
        terms(priced(plan_of("pipe=4", microbatches=8, keep=keep))) for keep in (True, False)
    )
    assert again["recompute"] == pytest.approx(
        (kept["attention"] + kept["feed-forward"] + kept["memory"]) / 3, rel=0.15
    )


def test_tensor_across_hosts_is_slower_than_inside():
    slow = HOSTS.with_links(["between=5GB/s"])
    intra_host, across = (
        priced(plan_of(mesh), cluster=slow) for mesh in ("data=8,tensor=8", "data=4,tensor=16")
    )
    assert terms(across)["tensor"] > 5 * terms(intra_host)["tensor"]


def test_overlap_slowdown_limits_how_far_fsdp_is_hidden():
    free, halved, none = (
        terms(priced(plan_of("fsdp=8"), rates=replace(RATES, overlap_slowdown=slowdown)))["fsdp"]
        for slowdown in (1.0, 1.5, 2.0)
    )
    assert free < halved < none
    assert halved == pytest.approx((free + none) / 2), "half of what free overlap hides"
    worse = terms(priced(plan_of("fsdp=8"), rates=replace(RATES, overlap_slowdown=3.0)))["fsdp"]
    assert worse == pytest.approx(none), "what does not pay is not done"


def test_hidden_sends_cost_less_than_exposed_ones():
    exposed, hidden = (
        terms(priced(plan_of("pipe=8", microbatches=32, slack=slack)))["pipe"]
        for slack in (False, True)
    )
    assert hidden < exposed


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=8", "data=2,fsdp=4", "pipe=2,fsdp=4"])
def test_exchanges_beside_layers_are_cheaper(mesh):
    alone, beside = (
        priced(plan_of(mesh, overlap=overlap, microbatches=4 if "pipe" in mesh else 1))
        for overlap in ("none", "layers")
    )
    assert beside.step_time_s < alone.step_time_s
    assert beside.communication < (0.65 if mesh == "data=8" else 0.95) * alone.communication


def test_no_more_is_hidden_beside_backward_than_it_computes():
    slow = HOSTS.with_links(["between=100MB/s"])
    alone, beside = (
        terms(priced(plan_of("data=64", overlap=overlap), cluster=slow))
        for overlap in ("none", "layers")
    )
    compute = sum(beside[name] for name in ("attention", "feed-forward", "memory"))
    assert alone["data"] - compute < beside["data"] < alone["data"]


def test_halves_hide_exchanges_over_tensor_and_compute_longer():
    alone, halves = (
        terms(priced(plan_of("data=2,tensor=4", overlap=overlap))) for overlap in ("none", "halves")
    )
    assert halves["tensor"] < 0.75 * alone["tensor"]
    assert halves["feed-forward"] > alone["feed-forward"]


def test_an_exchange_halves_bytes_in_a_host_and_multiplies_those_between_hosts():
    inside, across = (
        [
            sum(
                CommunicationTimes(plan.axes, cluster, RATES).time(op) * op.count
                for op in communication_ops(
                    workload_of(), plan, layer_shape(workload_of(), plan), OURS
                )
                if op.kind in ("reduce-scatter", "all-to-all")
            )
            for scatter in ("sum", "exchange")
            for plan in [plan_of(mesh, scatter=scatter)]
        ]
        for mesh, cluster in (("fsdp=8", HOST), ("fsdp=64", HOSTS))
    )
    assert 0.5 < inside[1] / inside[0] < 0.6, "half, and the same latency"
    # A ring leaves a host once, through the links of all its devices: 3.6 times without latency.
    assert 2.5 < across[1] / across[0] < 3.6


def test_terms_say_how_much_of_an_exchange_runs_beside_compute():
    explained = {
        term.name: term.how
        for term in priced(plan_of("data=2,fsdp=2,tensor=2", overlap="layers")).terms
    }
    hidden = r"; \d+% of \S+ ms is beside compute"
    for name, what in {
        "fsdp": r"zero \d, all-gathers, all-reduces, reduce-scatters over fsdp=2",
        "tensor": "all-reduces over tensor=2",
        "data": "gradients, all-reduces over data=2",
    }.items():
        assert re.fullmatch(what + hidden, explained[name]), explained[name]


def test_each_kept_layer_saves_its_recomputation():
    times = [
        priced(plan_of("fsdp=8", overlap="layers", remat="full", kept_layers=kept)).step_time_s
        for kept in (0, 12, 24, 48)
    ]
    assert times[0] - times[1] == pytest.approx(times[1] - times[2])
    assert times[0] - times[3] == pytest.approx(4 * (times[0] - times[1]))
    assert times[3] == pytest.approx(priced(plan_of("fsdp=8", overlap="layers")).step_time_s)


def test_data_parallel_speedup_is_less_than_linear():
    times = [priced(plan_of(f"data={devices}")).step_time_s for devices in (1, 2, 4, 8)]
    for before, after in itertools.pairwise(times):
        assert before / 2 < after < before


def test_corrections_scale_a_layer_and_narrow_its_interval():
    plan = plan_of("data=8")
    place = shape_point(layer_shape(workload_of(), plan), 1)
    measured = replace(
        RATES, corrections=(Correction(operator="layer", place=place, weight=math.log(2)),)
    )
    before, after = priced(plan), priced(plan, rates=measured)
    assert terms(after)["attention"] == pytest.approx(2 * terms(before)["attention"])
    assert terms(after)["head"] == pytest.approx(terms(before)["head"])
    assert after.high_s / after.low_s == pytest.approx(
        math.exp(2 * 1.645 * RATES.spread_nearby), rel=1e-3
    )
    far = priced(plan_of("data=1", LLAMA), LLAMA, rates=measured)
    assert far.high_s / far.low_s > 0.9 * before.high_s / before.low_s
