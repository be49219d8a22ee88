"""Layers are assigned to stages as evenly as possible."""

import itertools
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.errors import PlanError
from optimus_jax.pipeline.partition import balanced_layers, layers_per_stage, stage_costs


def all_partitions(num_layers, num_stages):
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_layers)))


@given(num_layers=st.integers(1, 10), data=st.data())
def test_no_partition_is_cheaper_or_more_even(num_layers, data):
    """Of the best partitions, the one whose earlier stages have fewer layers."""
    num_stages = data.draw(st.integers(1, num_layers))

    def badness(layers):
        return max(layers), sum(count**2 for count in layers), layers

    assert layers_per_stage(num_layers, num_stages) == min(
        all_partitions(num_layers, num_stages), key=badness
    )


@given(
    costs=st.lists(st.sampled_from([1.0, 2.0, 3.5, 9.0]), min_size=1, max_size=9), data=st.data()
)
def test_the_costliest_stage_costs_least(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    some = st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=num_stages, max_size=num_stages)
    factors = data.draw(st.one_of(st.just([]), some))

    def costliest(layers):
        each = stage_costs(layers, costs)
        return max(map(operator.mul, each, factors or itertools.repeat(1.0)))

    found = balanced_layers(tuple(costs), num_stages, tuple(factors))
    assert len(found) == num_stages
    assert min(found) >= 1
    assert sum(found) == len(costs)
    assert costliest(found) == min(map(costliest, all_partitions(len(costs), num_stages)))


def test_a_stage_costs_what_its_layers_cost():
    assert stage_costs((1, 3, 2), (5.0, 1.0, 2.0, 3.0, 0.5, 0.25)) == [5.0, 6.0, 0.75]


@given(num_layers=st.integers(1, 512), data=st.data())
def test_equal_stages_differ_by_at_most_one_layer(num_layers, data):
    layers = layers_per_stage(num_layers, data.draw(st.integers(1, min(256, num_layers))))
    assert sum(layers) == num_layers
    assert max(layers) - min(layers) <= 1
    assert list(layers) == sorted(layers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (4, 6),
            (
                r"fewer layers than virtual stages(.|\n)*num_layers=4,"
                r" pipe\*repeats=6(.|\n)*pipe\*repeats is 4 or less"
            ),
        ),
        ((0, 1), r"num_layers=0, pipe\*repeats=1(.|\n)*num_layers=1 or more"),
        ((4, 0), r"needs stages(.|\n)*pipe\*repeats=0"),
    ],
)
def test_impossible_partitions_are_refused(arguments, message):
    with pytest.raises(PlanError, match=message):
        layers_per_stage(*arguments)
