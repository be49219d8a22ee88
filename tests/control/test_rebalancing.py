"""Stages of a slow process get fewer layers, and the remaining skew is that of the slowest
stage.
"""

from dataclasses import replace

import pytest
from fleet import CONFIG, PRICING, plan_on
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.config.request import make_config
from optimus_jax.control.deciding.candidates import is_legal
from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.control.deciding.prices import Prices
from optimus_jax.control.deciding.rebalancing import effective_skew, rebalanced, stage_factors
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.workload import Workload

STAGED = plan_on("pipe=4,fsdp=16")
"""Four stages of 8 layers."""
EQUAL = PRICING.workload.layer_shares
"""Compute time of each layer: all are equal."""
WHISPER = Workload.of(make_config("whisper-small", {})).layer_shares
"""That of whisper-small's 24 layers."""
ENCODER, DECODER = WHISPER[0], WHISPER[-1]


def factors(part: tuple[float, float], factor: float) -> list[float]:
    """Factors of 64 devices, of which those from `part[0]` to `part[1]` of all are slow."""
    return [factor if part[0] <= device / 64 < part[1] else 1.0 for device in range(64)]


FIRST_EIGHTH = factors((0.0, 0.125), 1.5)


def layers(plan) -> tuple[int, ...]:
    assert plan is not None
    assert plan.pipeline is not None
    return plan.pipeline.layers_per_stage


def test_the_slow_stage_gets_fewer_layers():
    other = rebalanced(STAGED, FIRST_EIGHTH, EQUAL)
    assert layers(other) == (5, 9, 9, 9)
    assert is_legal(other, CONFIG)
    # 9 layers on normal devices, 5 that count 1.5 times: the step takes as long as 9 layers, not
    # 12.
    assert effective_skew(other, FIRST_EIGHTH, EQUAL) == 1.0
    assert effective_skew(STAGED, FIRST_EIGHTH, EQUAL) == 1.5


@pytest.mark.parametrize(
    ("part", "slow"),
    [
        ((0.0, 0.125), {0}),
        ((0.125, 0.25), {0}),
        ((0.25, 0.375), {1}),
        ((0.875, 1.0), {3}),
        ((0.2, 0.3), {0, 1}),
        ((0.0, 1.0), {0, 1, 2, 3}),
    ],
)
def test_stages_with_some_slow_devices_are_slow(part, slow):
    assert {
        stage
        for stage, factor in enumerate(stage_factors(STAGED, factors(part, 2.0)))
        if factor > 1
    } == slow


def test_plans_that_rebalancing_cannot_improve_are_left_unchanged():
    assert rebalanced(plan_on("fsdp=64"), FIRST_EIGHTH, EQUAL) is None
    assert rebalanced(STAGED, [1.5] * 64, EQUAL) is None  # everything is slow
    assert rebalanced(STAGED, factors((0.0, 0.125), 1.01), EQUAL) is None
    best = rebalanced(STAGED, FIRST_EIGHTH, EQUAL)
    assert best is not None
    assert rebalanced(best, FIRST_EIGHTH, EQUAL) is None


def test_with_repeats_all_stages_of_a_slow_device_get_fewer_layers():
    assert STAGED.pipeline is not None
    twice = replace(
        STAGED,
        pipeline=replace(
            STAGED.pipeline, layers_per_stage=(4,) * 8, repeats=2, schedule="interleaved"
        ),
    )
    other = rebalanced(twice, factors((0.0, 0.125), 2.0), EQUAL)
    assert layers(other)[0] < 4
    assert layers(other)[4] < 4
    assert sum(layers(other)) == 32


@given(pipe=st.sampled_from([2, 4, 8]), stage=st.integers(0, 7), skew=st.floats(1.0, 20.0))
def test_moving_any_layer_would_not_make_the_slowest_stage_faster(pipe, stage, skew):
    plan, slow = (
        plan_on(f"pipe={pipe},fsdp={64 // pipe}"),
        factors((stage / 8, (stage + 1) / 8), skew),
    )
    other = rebalanced(plan, slow, EQUAL)
    of_stages = stage_factors(plan, slow)
    layer_counts = layers(other or plan)
    slowest = max(number * factor for number, factor in zip(layer_counts, of_stages, strict=True))
    assert min(layer_counts) >= 1
    assert sum(layer_counts) == 32
    assert slowest == pytest.approx(max(layer_counts) * effective_skew(other or plan, slow, EQUAL))
    for source in range(pipe):
        for target in range(pipe):
            moved = [
                number + (place == target) - (place == source)
                for place, number in enumerate(layer_counts)
            ]
            if min(moved) >= 1 and source != target:
                assert max(
                    number * factor for number, factor in zip(moved, of_stages, strict=True)
                ) >= slowest * (1 - 1e-9)


def whisper_stages(*layers_per_stage: int) -> Plan:
    """A plan for whisper-small, on as many devices as stages."""
    return plan_on(
        f"pipe={len(layers_per_stage)}",
        pipeline=replace(STAGED.pipeline, layers_per_stage=layers_per_stage),
    )


@pytest.mark.parametrize(
    ("before", "slow", "skew", "after"),
    [
        ((9, 15), [1.5, 1.0], 1.5, (7, 17)),
        ((9, 15), [1.0, 1.01], 1.0, None),
        ((12, 12), [1.0, 1.01], 1.0, (9, 15)),
        ((9, 15), [1.0, 1.5], 1.5 * (3 * ENCODER + 12 * DECODER) / (9 * ENCODER), (11, 13)),
    ],
)
def test_layers_of_an_encoder_and_a_decoder_count_by_their_compute_time(before, slow, skew, after):
    """Nine of whisper-small's layers in the encoder take about as long as its other three and the
    twelve of the decoder, so the stages of a balanced plan have unequal numbers of layers.
    """
    plan = whisper_stages(*before)
    assert effective_skew(plan, slow, WHISPER) == pytest.approx(skew)
    other = rebalanced(plan, slow, WHISPER)
    assert (other and layers(other)) == after


def test_slow_processes_in_several_stages_are_all_relieved():
    two = factors((0.0, 0.125), 1.5)
    two[32:40] = [2.0] * 8
    assert layers(rebalanced(STAGED, two, EQUAL)) == (7, 10, 5, 10)


def test_a_rebalanced_plan_feels_less_skew():
    slow, processes = Conditions(slow=((0, 1.5),)), [device // 8 for device in range(64)]
    other = rebalanced(STAGED, FIRST_EIGHTH, EQUAL)
    assert other is not None
    assert slow.as_seen_by(STAGED, processes, EQUAL) == Conditions(compute=1.5)
    assert slow.as_seen_by(other, processes, EQUAL) == Conditions()
    assert Conditions().as_seen_by(other, processes, EQUAL) == Conditions()


def test_the_stage_of_a_process_is_that_of_its_devices_in_use():
    """Tasks are assigned to nodes round-robin: the first host has processes 0 and 2, the second 1
    and 3, each other one process of its own.
    """
    process_of = [0] * 4 + [2] * 4 + [1] * 4 + [3] * 4 + [4 + place // 8 for place in range(48)]
    prices, plan = Prices(PRICING, process_of), plan_on("pipe=2,fsdp=16")
    assert prices.processes(8, frozenset(range(4))) == (2, 2, 2, 2, 1, 1, 1, 1)
    assert plan.pipeline is not None
    fewer = replace(plan, pipeline=replace(plan.pipeline, layers_per_stage=(10, 22)))
    slow = Conditions(slow=((2, 2.0),))
    assert prices.seen_by(fewer, prices.first_batch, slow).compute == 1.0
    assert prices.seen_by(plan, prices.first_batch, slow).compute == 2.0
    assert prices.seen_by(plan, prices.first_batch, slow, frozenset(range(4, 8))) == Conditions()
