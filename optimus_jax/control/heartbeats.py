"""The age of the other processes' heartbeats, as a signal."""

from collections.abc import Mapping

from optimus_jax.control.signals import HEARTBEAT_AGE_S
from optimus_jax.faults.heartbeat import Heartbeats


class HeartbeatAges:
    """A source that reads what the watchdog's thread has seen, without any communication.

    Args:
      heartbeats: heartbeats of the run's processes; None: there is only one process, or the
        watchdog is off.
    """

    name = "heartbeats"
    signals = (HEARTBEAT_AGE_S,)

    def __init__(self, heartbeats: Heartbeats | None) -> None:
        self._heartbeats = heartbeats

    def poll(self, step: int, now_s: float) -> Mapping[str, float] | None:
        """Age of the oldest heartbeat among running peers; empty: no peer has sent one."""
        ages_s = (
            [
                peer.silent_s
                for peer in self._heartbeats.peers
                if peer.is_known and peer.state == "running"
            ]
            if self._heartbeats is not None
            else []
        )
        return {HEARTBEAT_AGE_S: max(ages_s)} if ages_s else {}

    def close(self) -> None:
        """Do nothing: it holds no resources."""
