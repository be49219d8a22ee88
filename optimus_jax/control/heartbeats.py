"""How long ago the other processes of the run have given a sign of life, as a signal."""

from collections.abc import Mapping

from optimus_jax.control.signals import HEARTBEAT_AGE_S
from optimus_jax.faults.heartbeat import SignsOfLife


class Heartbeats:
    """A source; asks nobody, and reads what the watchdog's thread has seen.

    Args:
      signs: of the run's processes; None: there is one, or nobody watches.
    """

    name = "heartbeats"
    signals = (HEARTBEAT_AGE_S,)

    def __init__(self, signs: SignsOfLife | None) -> None:
        self._signs = signs

    def poll(self, step: int, now_s: float) -> Mapping[str, float] | None:
        """Age of the oldest sign of those who were heard; empty: nobody was."""
        ages_s = [peer.silent_s for peer in self._signs.peers if peer.is_known and peer.state == "running"] if self._signs is not None else []
        return {HEARTBEAT_AGE_S: max(ages_s)} if ages_s else {}

    def close(self) -> None:
        """It holds nothing."""
