"""Work follows the closed forms, and takes longer where a device is less efficient."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pricing import GPT, HOST, LLAMA, RATES, plan_of

from optimus_jax.config import Config, ModelConfig, Tuning
from optimus_jax.config.presets import model_preset
from optimus_jax.models.flops import layer_flops, outer_flops, step_flops
from optimus_jax.models.layer_program import layer_programs
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.communication import head_ops
from optimus_jax.planning.cost.cost import term_times
from optimus_jax.planning.cost.head_program import head_program, head_sizes
from optimus_jax.planning.cost.implementation_profile import MEGATRON, OURS
from optimus_jax.planning.cost.layer_shape import LayerShape, layer_shape, shape_point
from optimus_jax.planning.cost.operators import (
    DeviceTime,
    device_time,
    head_work,
    layer_work,
    with_launches,
)
from optimus_jax.planning.cost.rates import HEAD
from optimus_jax.planning.cost.stage_time import BUFFER_COPIES, layer_time
from optimus_jax.planning.cost.work import Work, matmul
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.training.task import LossInputs, TaskSums
from optimus_jax.training.tasks import NEXT_TOKEN, TASKS, task_named


def shape_of(model: ModelConfig, plan: Plan, *, seq_len: int, global_batch: int) -> LayerShape:
    return layer_shape(Workload(model=model, seq_len=seq_len, global_batch=global_batch), plan)


@pytest.mark.parametrize(
    "model",
    [
        GPT,
        LLAMA,
        replace(GPT, tuning=Tuning(freeze=("embedding", "mlp"))),
        replace(LLAMA, tuning=Tuning(freeze=("attention", "head"))),
    ],
    ids=lambda model: " ".join((model.name, *model.tuning.frozen)),
)
def test_step_flops_without_remat_equal_the_models_flops(model):
    """All but the fused kernel's backward, which computes the scores again: 3.5 times forward,
    where the model's FLOPs count 3.
    """
    plan = plan_of("data=1", model)
    shape = shape_of(model, plan, seq_len=1024, global_batch=2)
    layer = layer_work(shape, "none", OURS)
    works = [*layer.attention, *layer.feed_forward]
    fused = sum(work.fused_flops for work in works)
    sizes = head_sizes(model, plan, shape, OURS)._replace(vocab=model.vocab_size)
    workload = Workload(model=model, seq_len=1024, global_batch=2)
    program = head_program(workload, "bf16", splits_length=False)
    head = head_work(program, sizes, shape.width, OURS)
    counted = model.num_layers * (sum(work.flops for work in works) + fused * 3 / 3.5) + head.flops
    assert counted == pytest.approx(step_flops(model, num_sequences=2, seq_len=1024), rel=1e-12)


def test_flops_that_count_leave_out_gradients_of_frozen_matrices():
    """Of LoRA: 2 for forward, 2 for the gradient of the input, and 2 more for what is trained."""
    tuned = replace(LLAMA, tuning=Tuning(method="lora", rank=64))
    sequence = {"num_sequences": 1, "seq_len": 1024}
    (base, core), (matrices, _) = (layer_flops(model, 1024) for model in (LLAMA, tuned))
    assert matrices > base
    layers = LLAMA.num_layers * (3 * matrices - base + 3 * core)
    assert step_flops(tuned, **sequence) == layers + 2 * outer_flops(LLAMA, 1024).forward


def test_flops_of_a_reference_are_those_of_forward_without_adapters():
    tuned = replace(LLAMA, tuning=Tuning(method="lora"))
    plain, compared = (
        Workload(model=tuned, seq_len=1024, global_batch=2, task=TASKS[task])
        for task in ("next_token", "dpo")
    )
    assert plain.step_flops == step_flops(tuned, num_sequences=2, seq_len=1024)
    forward = step_flops(LLAMA, num_sequences=2, seq_len=1024) / 3
    assert compared.step_flops - plain.step_flops == pytest.approx(forward, rel=1e-12)


def test_head_of_any_task_is_priced(monkeypatch):
    """A task that computes its loss twice has twice the products, and a head that takes longer."""
    once = task_named(NEXT_TOKEN)

    def twice(inputs: LossInputs) -> TaskSums:
        return TaskSums(once.loss(inputs).loss + once.loss(inputs).loss, {})

    monkeypatch.setitem(TASKS, "twice", replace(once, loss=twice))
    config = Config(model=GPT).with_values({"data.global_batch": 16, "data.seq_len": 64})
    plan = plan_of("data=2,tensor=4", overrides=("length=tensor",))
    layer = layer_shape(Workload.of(config), plan)
    flops, head_s, message_bytes = [], [], []
    for asked in (config, config.with_values({"task": "twice"})):
        workload = Workload.of(asked)
        program = head_program(workload, "bf16", splits_length=True)
        sizes = head_sizes(GPT, plan, layer, OURS)
        flops.append(head_work(program, sizes, layer.width, OURS).flops)
        head_s.append(term_times(workload, plan, HOST, RATES)[HEAD])
        ops = head_ops(workload, plan, layer, OURS)
        message_bytes.append(sum(op.num_bytes * op.count for op in ops))
    assert flops[1] == 2 * flops[0]
    assert head_s[1] > head_s[0]
    assert message_bytes[1] > message_bytes[0]


@pytest.mark.parametrize("attention", ["xla", "cudnn"])
def test_tensor_splits_all_matmuls_evenly(attention):
    whole, split = (
        layer_work(
            shape_of(
                LLAMA, plan_of(mesh, LLAMA, attention=attention), seq_len=2048, global_batch=4
            ),
            "none",
            OURS,
        )
        for mesh in ("data=1", "tensor=4")
    )
    for before, after in zip(
        (*whole.attention, *whole.feed_forward),
        (*split.attention, *split.feed_forward),
        strict=True,
    ):
        assert (before.flops, before.fused_flops) == pytest.approx(
            (4 * after.flops, 4 * after.fused_flops)
        )


def test_kv_heads_fewer_than_devices_are_computed_on_several():
    shape = shape_of(LLAMA, plan_of("tensor=16", LLAMA), seq_len=128, global_batch=1)
    assert (LLAMA.num_kv_heads, shape.sizes.heads, shape.sizes.kv_heads) == (8, 2, 1)


def test_unfused_attention_moves_scores_and_computes_more_pairs():
    fused, unfused = (
        layer_work(
            shape_of(GPT, plan_of("data=1", attention=kernel), seq_len=1024, global_batch=1),
            "selective",
            OURS,
        )
        for kernel in ("cudnn", "xla")
    )
    scores = GPT.num_heads * 1024**2 * 9 / 16  # eight blocks of queries
    moved = unfused.attention[0].num_bytes - fused.attention[0].num_bytes
    assert moved == pytest.approx(scores * OURS.score_bytes[0])
    assert fused.again.fused_flops < unfused.again.flops < 2 * fused.again.fused_flops


@pytest.mark.parametrize(
    ("implementation", "whole"), [(OURS, False), (MEGATRON, True)], ids=["ours", "megatron"]
)
def test_full_remat_repeats_the_last_matmul_only_in_megatron_style(implementation, whole):
    shape = shape_of(LLAMA, plan_of("data=1", LLAMA), seq_len=1024, global_batch=8)
    quick = replace(RATES, memory_bytes_per_s=1e30, launch_s=0.0, interpreter_launch_s=0.0)
    times = layer_time(
        shape, shape_point(shape, 1), "full", False, False, (0, 0), quick, implementation
    )
    last = device_time(matmul(shape.tokens, LLAMA.mlp_dim, LLAMA.embed_dim), quick, f32=False).total
    assert times.again == pytest.approx(times.forward - (0 if whole else last))


def test_a_pipeline_copies_what_it_keeps_where_copies_count():
    shape = shape_of(LLAMA, plan_of("data=1", LLAMA), seq_len=1024, global_batch=8)
    place = shape_point(shape, 1)

    def memory(copies: float, *, buffered: bool) -> float:
        rates = replace(RATES, saved_copies=copies)
        return layer_time(shape, place, "none", False, buffered, (0, 0), rates, OURS).memory

    copied_once = memory(2.0, buffered=False) - memory(1.0, buffered=False)
    more = memory(1.0, buffered=True) - memory(1.0, buffered=False)
    assert more == pytest.approx(BUFFER_COPIES * copied_once)
    assert memory(0.0, buffered=True) == memory(0.0, buffered=False), "written in place"


def test_softmax_that_cannot_be_fused_costs_more_kernels():
    """Megatron's fused softmax needs sequences times heads to be a multiple of four."""
    odd = replace(GPT, num_heads=25, num_kv_heads=25, head_dim=64)
    two, four = (
        layer_work(
            shape_of(odd, plan_of("data=1", attention="xla"), seq_len=64, global_batch=batch),
            "selective",
            MEGATRON,
        )
        for batch in (2, 4)
    )
    assert two.again.kernels == MEGATRON.plain_softmax_kernels
    assert four.again.kernels == 0


def test_matmul_of_few_tiles_or_short_inner_dim_is_less_efficient():
    def rate(*sizes: int) -> float:
        return matmul(*sizes).flops / device_time(matmul(*sizes), RATES, f32=False).total

    large = rate(16384, 16384, 16384)
    assert 0.95 * RATES.matmul_flops_per_s < large < RATES.matmul_flops_per_s
    assert rate(256, 16384, 256) < large / 4
    assert rate(16384, 64, 16384) < large / 2


def test_matmul_time_by_hand():
    rates = replace(RATES, matmul_flops_per_s=1e12, num_cores=10.0, wave=0.5, inner=100.0)
    by_hand = 2 * 256 * 400 * 384 / 1e12 * (1 + 0.5 * 10 / (2 * 3)) * (1 + 100 / 400)
    assert device_time(matmul(256, 400, 384), rates, f32=False) == pytest.approx(
        DeviceTime(by_hand, 0.0)
    )


def test_unaligned_rows_and_float32_are_slower():
    work = matmul(1024, 1024, 50257)
    assert device_time(work, RATES, f32=False, aligned=False).total == pytest.approx(
        device_time(work, RATES, f32=False).total / RATES.unaligned_share
    )
    in_16_bits, in_f32 = (device_time(work, RATES, f32=f32).total for f32 in (False, True))
    assert in_f32 / in_16_bits == pytest.approx(
        RATES.matmul_flops_per_s / RATES.f32_matmul_flops_per_s
    )
    assert in_f32 > 1.8 * in_16_bits


@given(device_s=st.floats(1e-9, 10), kernels=st.floats(0, 1e6))
def test_launches_cost_at_least_the_longer_and_at_most_both(device_s, kernels):
    host_s = kernels * RATES.launch_s
    together = with_launches(device_s, kernels, RATES, OURS)
    assert max(device_s, host_s) * (1 - 1e-9) <= together <= (device_s + host_s) * (1 + 1e-9)


def test_work_adds_and_multiplies():
    assert Work(1, 2, 3, 4, 5, 6, 7) + Work(1, 1, 1, 1, 1, 1, 1).times(2) == Work(
        3, 4, 5, 6, 7, 8, 9
    )


@pytest.mark.parametrize(
    ("tuning", "code_bytes"),
    [
        (Tuning(), 1),
        (Tuning(method="lora", base_precision="int8"), 1),
        (Tuning(freeze=("norm",), base_precision="nf4"), 1),
        (Tuning(freeze=("embedding", "head"), base_precision="nf4"), 1),
        (Tuning(method="lora", base_precision="nf4"), 0.5 + 1 / 64),
    ],
)
def test_bytes_of_an_element_of_a_frozen_matrix(tuning: Tuning, code_bytes: float):
    """Also where nothing that is frozen is stored in codes."""
    model = replace(model_preset("llama3-8b"), tuning=tuning)
    programs = layer_programs(model, seq_len=4096, precision="bf16", kernel="cudnn")
    assert programs.code_bytes == code_bytes
