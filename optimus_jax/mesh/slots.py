"""The order of layers in a parameter stack that is split over pipeline stages.

Parameters of all layers are one array with a leading dimension, which mesh axis `pipe` cuts into
equal parts. A microbatch visits a device `repeats` times (interleaving), so a device's part is that
many pieces, one after the other. A piece has room for the longest virtual stage, and shorter ones
leave *slots* empty. Virtual stage k is visit k // pipe to device k % pipe.

With one visit and stages of equal length the slots are the layers in order: the *canonical* order,
in which layers are kept on disk.
"""

from collections.abc import Sequence

EMPTY = -1


def layer_slots(layers_per_stage: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """The layer in each slot of the whole stack, EMPTY where there is none.

    Args:
      layers_per_stage: layers of each virtual stage, in the order in which a microbatch visits
        them.
      num_stages: devices along `pipe`; divides the number of virtual stages.
    """
    room = max(layers_per_stage)
    pieces, first = [], 0
    for count in layers_per_stage:
        pieces.append((*range(first, first + count), *[EMPTY] * (room - count)))
        first += count
    return tuple(
        slot for stage in range(num_stages) for piece in pieces[stage::num_stages] for slot in piece
    )


def canonical_slots(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """All layers in order, then empty slots, so that every device has equally many slots."""
    return (*range(num_layers), *[EMPTY] * (-num_layers % num_stages))
