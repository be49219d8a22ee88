"""Collectives follow the closed forms, and their time is that of a ring over the slowest link."""

import math
from dataclasses import replace

import jax
import pytest
from pricing import GPT, HOST, HOSTS, LLAMA, RATES, communication_ops, plan_of

from optimus_jax.errors import PlanError
from optimus_jax.models.shapes import model_shapes
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.communication import CommunicationOp
from optimus_jax.planning.cost.communication_time import CommunicationTimes, speed_of
from optimus_jax.planning.cost.implementation_profile import MEGATRON, OURS, ImplementationProfile
from optimus_jax.planning.cost.layer_shape import LayerShape, layer_shape
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.links import Link

SEQ_LEN, BATCH = 1024, 64


def ops_and_shape(
    plan: Plan, model=GPT, implementation: ImplementationProfile = OURS
) -> tuple[list[CommunicationOp], LayerShape]:
    workload = Workload(model=model, seq_len=SEQ_LEN, global_batch=BATCH)
    shape = layer_shape(workload, plan)
    return communication_ops(workload, plan, shape, implementation), shape


def op_time(op: CommunicationOp, plan: Plan, cluster: Cluster, rates: Rates) -> float:
    return CommunicationTimes(plan.axes, cluster, rates).time(op)


def bytes_and_counts(
    plan: Plan,
    kind: str,
    part: str,
    axes: tuple[str, ...],
    model=GPT,
    implementation: ImplementationProfile = OURS,
) -> list[tuple[float, float]]:
    return [
        (each.num_bytes, each.count)
        for each in ops_and_shape(plan, model, implementation)[0]
        if (each.kind, each.part, each.axes) == (kind, part, axes)
    ]


def test_one_device_has_no_collectives():
    assert ops_and_shape(plan_of("data=1"))[0] == []


def test_tensor_all_reduces_activations_twice_per_pass():
    """Source: FORMULAS of Megatron, 4 all-reduces of 2 s b h bytes for each layer and
    microbatch."""
    plan = plan_of("data=2,tensor=4", microbatches=4)
    stream = 2 * SEQ_LEN * (BATCH // 2 // 4) * GPT.embed_dim
    for part in ("layer forward", "layer backward"):
        assert bytes_and_counts(plan, "all-reduce", part, ("tensor",)) == [(stream, 2)]


def test_f16_all_reduces_activations_in_float32():
    in_bf16 = plan_of("tensor=4")
    in_f16 = replace(in_bf16, precision="f16")
    for part in ("layer forward", "layer backward"):
        ((num_bytes, count),) = bytes_and_counts(in_bf16, "all-reduce", part, ("tensor",))
        assert bytes_and_counts(in_f16, "all-reduce", part, ("tensor",)) == [(2 * num_bytes, count)]
    ((in_16_bits, count),) = bytes_and_counts(in_bf16, "all-reduce", "head", ("tensor",))
    gradient = 2 * SEQ_LEN * BATCH * GPT.embed_dim
    assert bytes_and_counts(in_f16, "all-reduce", "head", ("tensor",)) == [
        (pytest.approx(in_16_bits + gradient / count), count)
    ]


@pytest.mark.parametrize(
    ("implementation", "again"), [(OURS, 1), (MEGATRON, 2)], ids=["ours", "megatron"]
)
def test_recomputed_layers_repeat_all_reduces_that_backward_needs(implementation, again):
    plan = plan_of("tensor=4", remat="full")
    assert [
        count
        for _, count in bytes_and_counts(
            plan, "all-reduce", "layer backward", ("tensor",), implementation=implementation
        )
    ] == [2 + again]


def test_unsharded_mlp_has_no_all_reduce():
    assert [
        count
        for _, count in bytes_and_counts(
            plan_of("tensor=4", overrides=("mlp=none",)), "all-reduce", "layer forward", ("tensor",)
        )
    ] == [1]


def matrices(model) -> int:
    attention = model.embed_dim * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    return attention + (3 if model.family == "llama" else 2) * model.embed_dim * model.mlp_dim


def test_zero_3_gathers_each_layer_twice_and_scatters_it_once():
    plan, weights = plan_of("fsdp=8", LLAMA), matrices(LLAMA)
    assert bytes_and_counts(plan, "all-gather", "layer forward", ("fsdp",), LLAMA) == [
        (2 * weights / 5, 5)
    ], "five matrices: of queries, of keys and values, of outputs, and two of the feed-forward"
    assert bytes_and_counts(plan, "all-gather", "layer backward", ("fsdp",), LLAMA) == [
        (2 * weights / 5, 5)
    ]
    assert bytes_and_counts(plan, "reduce-scatter", "layer backward", ("fsdp",), LLAMA) == [
        (4 * weights / 5, 5)
    ]


def test_recomputed_stages_gather_weights_once_more():
    plan = plan_of("pipe=2,fsdp=4", keep=False, microbatches=8)
    assert [
        count for _, count in bytes_and_counts(plan, "all-gather", "layer backward", ("fsdp",))
    ] == [2 * 5]


def test_replicas_reduce_float32_gradients_once():
    """Norms and biases stay whole along fsdp at every stage."""
    leaves = {
        zero: {
            (each.kind, each.axes): each.num_bytes * each.count
            for each in ops_and_shape(plan_of("data=2,fsdp=4", zero=zero))[0]
            if each.part == "step"
        }
        for zero in (0, 1)
    }
    shapes = model_shapes(GPT, plan_of("data=2,fsdp=4").padded_vocab(GPT))
    whole = 4 * sum(leaf.size for leaf in jax.tree.leaves(shapes.params))
    split = 4 * (GPT.num_layers * matrices(GPT) + GPT.max_length * GPT.embed_dim)
    split += 4 * shapes.vocab_rows * GPT.embed_dim
    assert leaves[0] == {("all-reduce", ("data", "fsdp")): whole}
    assert leaves[1] == {
        ("all-reduce", ("data",)): split / 4,
        ("all-reduce", ("data", "fsdp")): whole - split,
        ("reduce-scatter", ("fsdp",)): split,
        ("all-gather", ("fsdp",)): split / 2,
    }, "parameters are gathered in bf16"


def test_stages_send_activations_and_share_the_head():
    plan = plan_of("pipe=4,data=2", microbatches=8)
    stream = 2 * SEQ_LEN * (BATCH // 2 // 8) * GPT.embed_dim
    assert bytes_and_counts(plan, "send", "tick", ("pipe",)) == [(stream, 1)]
    statistics = 3 * 4 * SEQ_LEN * (BATCH // 2 // 8)
    moved = bytes_and_counts(plan, "all-reduce", "head", ("pipe",))
    assert sum(num_bytes * count for num_bytes, count in moved) == stream + statistics
    for part in ("embed", "broadcast"):
        assert bytes_and_counts(plan, "all-reduce", part, ("pipe",)) == [(stream, 1)]
    assert bytes_and_counts(plan, "all-reduce", "head", ("pipe",), implementation=MEGATRON) == []


def test_intra_host_all_reduce_time_by_hand():
    plan = plan_of("tensor=8")
    speed = speed_of(HOST.intra_host) * RATES.collective_share
    by_hand = 2 * (7 / 8 * 1e9 / speed + 7 * RATES.latency_s)
    assert op_time(
        CommunicationOp("all-reduce", ("tensor",), "step", 1e9, 1), plan, HOST, RATES
    ) == pytest.approx(by_hand)


def test_inter_host_rings_use_the_links_of_all_their_devices():
    """data=8 x tensor=8: one member a host, one link. data=64: eight members a host, eight
    links."""
    message = {"kind": "all-gather", "part": "step", "num_bytes": 1e9, "count": 1}
    assert HOSTS.inter_host is not None
    link = speed_of(HOSTS.inter_host) * RATES.inter_host_share
    latency = 7 * RATES.inter_host_latency_s
    one_member = op_time(
        CommunicationOp(axes=("data",), **message), plan_of("data=8,tensor=8"), HOSTS, RATES
    )
    assert one_member == pytest.approx(7 / 8 * 1e9 / link + latency)
    eight_members = op_time(
        CommunicationOp(axes=("data",), **message), plan_of("data=64"), HOSTS, RATES
    )
    intra_host = speed_of(HOSTS.intra_host) * RATES.collective_share
    assert eight_members == pytest.approx(
        63 / 64 * 1e9 / min(8 * link, intra_host) + latency + 7 * RATES.latency_s
    )


def test_small_inter_host_all_reduces_use_trees_but_gathers_rings():
    cluster, axes = Cluster.parse("h100:64x8"), plan_of("data=64,tensor=8")
    reduce_s, gather_s = (
        op_time(CommunicationOp(kind, ("data",), "step", 8, 1), axes, cluster, RATES)
        for kind in ("all-reduce", "all-gather")
    )
    assert reduce_s == pytest.approx(2 * 2 * math.log2(64) * RATES.inter_host_latency_s, rel=1e-3)
    assert gather_s == pytest.approx(63 * RATES.inter_host_latency_s, rel=1e-3)


def test_latency_of_the_link_counts():
    plan, link = plan_of("tensor=8"), replace(HOST.intra_host, latency_s=1e-3)
    times = [
        op_time(
            CommunicationOp("all-gather", ("tensor",), "step", 8, 1),
            plan,
            replace(HOST, intra_host=each),
            RATES,
        )
        for each in (HOST.intra_host, link)
    ]
    assert times[1] - times[0] == pytest.approx(7 * (1e-3 - RATES.latency_s))


def test_error_about_unknown_speed_names_the_link():
    cluster = replace(HOST, intra_host=Link.unknown("somebody's cables"))
    with pytest.raises(PlanError, match="somebody's cables"):
        op_time(
            CommunicationOp("all-reduce", ("tensor",), "step", 8, 1),
            plan_of("tensor=8"),
            cluster,
            RATES,
        )


def test_an_axis_of_one_device_takes_no_time_even_over_unknown_links():
    cluster = Cluster.parse("rtx4090:2x4")
    assert cluster.inter_host is not None
    assert cluster.inter_host.bytes_per_s is None
    assert (
        op_time(
            CommunicationOp("all-reduce", ("fsdp",), "step", 8, 1),
            plan_of("data=8"),
            cluster,
            RATES,
        )
        == 0
    )
