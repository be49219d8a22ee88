"""The number of consecutive layers that each virtual stage gets."""

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
    possible.

    All layers cost the same, so only their numbers matter. Every stage gets one layer; each further
    layer goes to the stage whose cost with it is the lowest. A stage's cost rises by the same
    amount with every layer, so this is exact, not a heuristic: moving a layer to another stage
    never lowers the larger of the two stages' costs. The costs therefore have the lowest maximum,
    and also the lowest sum of squares. Among stages of equal cost, the later one gets the layer,
    because it has fewer microbatches in flight.

    Args:
      layer_cost: cost of one layer, in any unit.
      first_cost: cost of the first virtual stage's work besides its layers, in the same unit.
      last_cost: the same for the last virtual stage.
    Raises:
      PlanError: there are fewer layers than virtual stages, or no virtual stage.
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
