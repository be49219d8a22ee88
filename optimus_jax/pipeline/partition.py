"""How many consecutive layers each virtual stage gets."""

import heapq

from optimus_jax.errors import PlanError, explain


def layers_per_stage(
    num_layers: int,
    num_virtual_stages: int,
    *,
    layer_cost: float = 1.0,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
) -> tuple[int, ...]:
    """Layers of each virtual stage, at least one, such that the most expensive stage is as cheap as
    can be.

    All layers cost the same, so only their numbers matter. Beginning with one layer each, the next
    layer goes to the stage that it leaves cheapest. Since a stage's cost rises by the same amount
    with every layer, that is exact, not a heuristic: moving a layer elsewhere never lowers the
    larger of the two stages' costs, so the costs found are the most even that there are. They have
    the least maximum, and the least sum of squares as well. Among stages of equal cost the later
    one gets the layer: it has fewer microbatches in flight.

    Args:
      layer_cost: of one layer, in any unit.
      first_cost: what the first virtual stage has to do besides its layers, in the same unit.
      last_cost: the same for the last one.
    Raises:
      PlanError: fewer layers than virtual stages.
    """
    assert layer_cost > 0, layer_cost
    assert min(first_cost, last_cost) >= 0, (first_cost, last_cost)
    if num_virtual_stages < 1:
        raise PlanError(
            explain(
                "a pipeline needs stages",
                given=f"pipe*repeats={num_virtual_stages}",
                do="set pipe=1 or more",
            )
        )
    if num_layers < num_virtual_stages:
        raise PlanError(
            explain(
                "there are fewer layers than virtual stages",
                given=f"num_layers={num_layers}, pipe*repeats={num_virtual_stages}",
                do=f"choose pipe and repeats such that pipe*repeats is {num_layers} or less"
                if num_layers > 0
                else "set num_layers=1 or more",
            )
        )
    fixed = [0.0] * num_virtual_stages
    fixed[0] += first_cost
    fixed[-1] += last_cost
    layers = [1] * num_virtual_stages
    # (cost with one more layer, -stage)
    queue = [(fixed[stage] + 2 * layer_cost, -stage) for stage in range(num_virtual_stages)]
    heapq.heapify(queue)
    for _ in range(num_layers - num_virtual_stages):
        stage = -queue[0][1]
        layers[stage] += 1
        heapq.heapreplace(queue, (fixed[stage] + (layers[stage] + 1) * layer_cost, -stage))
    return tuple(layers)
