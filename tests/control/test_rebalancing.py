"""Stages of a slow process get fewer layers, and the remaining skew is that of the slowest
stage.
"""

from dataclasses import replace

import pytest
from fleet import CONFIG, plan_on
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.control.deciding.candidates import is_legal
from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.control.deciding.rebalancing import effective_skew, rebalanced, stage_factors

FIRST_EIGHTH = (0.0, 0.125)
STAGED = plan_on("pipe=4,fsdp=16")
"""Four stages of 8 layers."""


def layers(plan) -> tuple[int, ...]:
    assert plan is not None
    assert plan.pipeline is not None
    return plan.pipeline.layers_per_stage


def test_the_slow_stage_gets_fewer_layers():
    other = rebalanced(STAGED, FIRST_EIGHTH, 1.5)
    assert layers(other) == (5, 9, 9, 9)
    assert is_legal(other, CONFIG)
    # 9 layers on normal devices, 5 that count 1.5 times: the step takes as long as 9 layers, not
    # 12.
    assert effective_skew(other, FIRST_EIGHTH, 1.5) == 1.0
    assert effective_skew(STAGED, FIRST_EIGHTH, 1.5) == 1.5


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
        stage for stage, factor in enumerate(stage_factors(STAGED, part, 2.0)) if factor > 1
    } == slow


def test_plans_that_rebalancing_cannot_improve_are_left_unchanged():
    assert rebalanced(plan_on("fsdp=64"), FIRST_EIGHTH, 1.5) is None
    assert rebalanced(STAGED, (0.0, 1.0), 1.5) is None  # everything is slow, or it is unknown where
    assert rebalanced(STAGED, FIRST_EIGHTH, 1.01) is None
    best = rebalanced(STAGED, FIRST_EIGHTH, 1.5)
    assert best is not None
    assert rebalanced(best, FIRST_EIGHTH, 1.5) is None


def test_with_repeats_all_stages_of_a_slow_device_get_fewer_layers():
    assert STAGED.pipeline is not None
    twice = replace(
        STAGED,
        pipeline=replace(
            STAGED.pipeline, layers_per_stage=(4,) * 8, repeats=2, schedule="interleaved"
        ),
    )
    other = rebalanced(twice, FIRST_EIGHTH, 2.0)
    assert layers(other)[0] < 4
    assert layers(other)[4] < 4
    assert sum(layers(other)) == 32


@given(pipe=st.sampled_from([2, 4, 8]), stage=st.integers(0, 7), skew=st.floats(1.0, 20.0))
def test_moving_any_layer_would_not_make_the_slowest_stage_faster(pipe, stage, skew):
    plan, part = plan_on(f"pipe={pipe},fsdp={64 // pipe}"), (stage / 8, (stage + 1) / 8)
    other = rebalanced(plan, part, skew)
    factors = stage_factors(plan, part, skew)
    layer_counts = layers(other or plan)
    slowest = max(number * factor for number, factor in zip(layer_counts, factors, strict=True))
    assert min(layer_counts) >= 1
    assert sum(layer_counts) == 32
    assert slowest == pytest.approx(max(layer_counts) * effective_skew(other or plan, part, skew))
    for source in range(pipe):
        for target in range(pipe):
            moved = [
                number + (place == target) - (place == source)
                for place, number in enumerate(layer_counts)
            ]
            if min(moved) >= 1 and source != target:
                assert max(
                    number * factor for number, factor in zip(moved, factors, strict=True)
                ) >= slowest * (1 - 1e-9)


def test_a_rebalanced_plan_feels_less_skew():
    slow = Conditions(skew=1.5, slow_part=FIRST_EIGHTH)
    other = rebalanced(STAGED, FIRST_EIGHTH, 1.5)
    assert other is not None
    assert slow.as_seen_by(STAGED) == slow
    assert slow.as_seen_by(other).skew == 1.0
    assert Conditions().as_seen_by(other) == Conditions()
