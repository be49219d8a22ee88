"""The sources of a real run, put together: what this process's devices, its mesh and its run
directory offer.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from optimus_jax.config import ControlConfig
from optimus_jax.config.axes import MESH_AXES, AxisSizes
from optimus_jax.control.baselines import Baselines
from optimus_jax.control.deciding.conditions import BETWEEN, INSIDE
from optimus_jax.control.guard import Source
from optimus_jax.control.health import DeviceMemory, GpuHealth, visible_gpus
from optimus_jax.control.heartbeats import HeartbeatAges
from optimus_jax.control.mesh_probes import MeshProbes
from optimus_jax.control.probe_rounds import Budget, ProbeRounds
from optimus_jax.control.sources import Signals
from optimus_jax.faults.heartbeat import Heartbeats
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.hardware import HardwareProfile


class Probes:
    """Rounds on each mesh of a run, under one budget; programs are kept, so that going back to a
    mesh compiles nothing.

    Args:
      share: of wall time; 0: no probes.
      cluster: of the run: which axis crosses hosts.
      profile: of the devices, if they were measured.
      num_meshes: whose programs are kept, which hold some memory of devices.
      warn: told if there can be no probes on a mesh.
    """

    def __init__(
        self,
        share: float,
        cluster: Cluster,
        profile: HardwareProfile | None,
        *,
        num_meshes: int,
        warn: Callable[[str], object],
    ) -> None:
        self._share, self._cluster = share, cluster
        self._baselines, self._budget = Baselines(profile), Budget(share)
        self._programs: OrderedDict[Mesh, MeshProbes] = OrderedDict()
        self._num_meshes, self._warn = num_meshes, warn

    def prepare(self, mesh: Mesh) -> None:
        """Compile what is timed on a mesh; may run in the background before the run moves there."""
        if self._share and mesh not in self._programs:
            programs = MeshProbes(mesh)
            programs.compile()
            self._programs.setdefault(mesh, programs)

    def on(self, mesh: Mesh) -> ProbeRounds | None:
        """Rounds on a mesh, compiled and settled: call it in all processes, between two steps.

        None: there are no probes.

        What goes wrong is told, and no reason to end a run; only where processes have to agree is
        it raised.
        """
        if not self._share:
            return None
        try:
            self.prepare(mesh)
            self._programs.move_to_end(mesh)
            while len(self._programs) > self._num_meshes:
                self._programs.popitem(last=False)
            sizes = AxisSizes(**mesh.shape)
            rounds = ProbeRounds(
                self._programs[mesh],
                {axis: self._link(sizes, axis) for axis in MESH_AXES},
                self._baselines,
                self._budget,
            )
            rounds.settle()
        except Exception as error:
            if jax.process_count() > 1:
                raise
            self._warn(
                f"links and compute cannot be probed on this mesh ({type(error).__name__}: {error})"
            )
            return None
        return rounds

    def _link(self, sizes: AxisSizes, axis: str) -> str:
        return BETWEEN if self._cluster.hosts_crossed(sizes, (axis,)) > 1 else INSIDE


def live_signals(
    settings: ControlConfig,
    *,
    global_batch: int,
    seq_len: int,
    rounds: ProbeRounds | None,
    heartbeats: Heartbeats | None,
    warn: Callable[[str], object],
) -> Signals:
    """The signals of this process.

    Args:
      settings: window and budget.
      global_batch: examples of a step at first.
      seq_len: tokens of an example at first.
      rounds: on the first mesh.
      signs: of life of the run's processes; None: nobody watches.
      warn: told when a source breaks.
    """
    devices = jax.local_devices()
    sources: list[Source] = [DeviceMemory(devices), HeartbeatAges(heartbeats)]
    if devices[0].platform == "gpu":
        sources.append(GpuHealth(visible_gpus([device.local_hardware_id for device in devices])))
    return Signals(
        settings,
        global_batch=global_batch,
        seq_len=seq_len,
        sources=sources,
        rounds=rounds,
        clock=time.perf_counter,
        warn=warn,
    )
