"""Layers are assigned to stages as evenly as their costs allow."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.errors import PlanError
from optimus_jax.pipeline.partition import layers_per_stage


def costs_of(layers, *, layer_cost, first_cost, last_cost):
    costs = [layer_cost * count for count in layers]
    costs[0] += first_cost
    costs[-1] += last_cost
    return costs


def all_partitions(num_layers, num_stages):
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_layers)))


@given(
    num_layers=st.integers(1, 10),
    data=st.data(),
    layer_cost=st.integers(1, 4),
    first_cost=st.integers(0, 12),
    last_cost=st.integers(0, 12),
)
def test_no_partition_is_cheaper_or_more_even(num_layers, data, layer_cost, first_cost, last_cost):
    """Among equally good partitions, the one whose earlier stages have fewer layers.

    Costs are whole numbers, so that ties are exact.
    """
    num_stages = data.draw(st.integers(1, num_layers))
    costs = {"layer_cost": layer_cost, "first_cost": first_cost, "last_cost": last_cost}

    def badness(layers):
        stages = costs_of(layers, **costs)
        return max(stages), sum(cost**2 for cost in stages), layers

    assert layers_per_stage(num_layers, num_stages, **costs) == min(
        all_partitions(num_layers, num_stages), key=badness
    )


@given(num_layers=st.integers(1, 512), data=st.data())
def test_equal_stages_differ_by_at_most_one_layer(num_layers, data):
    layers = layers_per_stage(num_layers, data.draw(st.integers(1, min(256, num_layers))))
    assert sum(layers) == num_layers
    assert max(layers) - min(layers) <= 1
    assert list(layers) == sorted(layers)


@pytest.mark.parametrize(
    ("arguments", "costs", "layers"),
    [
        ((10, 4), {}, (2, 2, 3, 3)),
        ((10, 4), {"last_cost": 2.0}, (3, 3, 3, 1)),
        ((10, 4), {"first_cost": 0.1, "last_cost": 0.1}, (2, 3, 3, 2)),
        ((14, 4), {"first_cost": 1.0, "last_cost": 1.0}, (3, 4, 4, 3)),
        ((5, 4), {"last_cost": 100.0}, (1, 1, 2, 1)),
        ((7, 1), {"first_cost": 3.0, "last_cost": 2.0}, (7,)),
    ],
)
def test_layers_go_where_they_cost_least(arguments, costs, layers):
    assert layers_per_stage(*arguments, **costs) == layers


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
