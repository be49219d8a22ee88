"""The number of consecutive layers that each virtual stage gets."""

from optimus_jax.errors import PlanError, explain


def layers_per_stage(num_layers: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Layers of each virtual stage, at least one, as even as possible.

    Later stages get the odd ones, because they have fewer microbatches in flight.

    Raises:
      PlanError: there are fewer layers than virtual stages, or no virtual stage.
    """
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
    fewest, odd = divmod(num_layers, num_virtual_stages)
    return (fewest,) * (num_virtual_stages - odd) + (fewest + 1,) * odd
