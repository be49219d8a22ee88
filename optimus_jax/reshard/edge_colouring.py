"""Schedule point-to-point sends in rounds.

In each round a member sends at most one message and receives at most one, as `jax.lax.ppermute`
requires.

Senders and receivers are the two sides of a bipartite graph and routes are its edges, so a schedule
with the fewest rounds is an edge colouring with the fewest colours.
"""

import itertools
from collections.abc import Sequence

Route = tuple[int, int]
"""(sender, receiver): positions along the mesh axis on which messages travel."""


def route_rounds(routes: Sequence[Route]) -> list[list[int]]:
    """Distribute routes over rounds so that no member sends, or receives, twice in a round.

    The number of rounds is minimal: the number of routes of the busiest sender or receiver.
    Source: Kőnig 1916, edge colouring of bipartite graphs, by swapping two colours along a path.

    Returns:
      For each round, the indices of its routes.
    """
    at: dict[tuple[int, int], dict[int, int]] = {}  # (0, sender) or (1, receiver) -> round -> route

    def first_free(node: tuple[int, int]) -> int:
        taken = at.setdefault(node, {})
        return next(colour for colour in itertools.count() if colour not in taken)

    def other_end(route: int, side: int) -> tuple[int, int]:
        return 1 - side, routes[route][1 - side]

    for number, (start, end) in enumerate(routes):
        first, spare = first_free((0, start)), first_free((1, end))
        path, node, colour = [], (1, end), first
        while colour in at[node]:  # never reaches `start`, where `first` is free
            route = at[node][colour]
            path.append((route, colour))
            node, colour = other_end(route, node[0]), spare if colour == first else first
        for route, colour in path:
            for side in (0, 1):
                del at[side, routes[route][side]][colour]
        for route, colour in path:
            for side in (0, 1):
                at[side, routes[route][side]][spare if colour == first else first] = route
        at[0, start][first] = at[1, end][first] = number
    rounds: dict[int, list[int]] = {}
    for (side, _), by_round in at.items():
        for colour, route in by_round.items():
            if side == 0:
                rounds.setdefault(colour, []).append(route)
    return [rounds[colour] for colour in sorted(rounds)]
