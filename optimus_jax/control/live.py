"""Assembles the signals of a real run: from this process's devices, its mesh and heartbeats."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from optimus_jax.config import ControlConfig
from optimus_jax.config.axes import MESH_AXES, AxisSizes
from optimus_jax.control.baselines import Baselines
from optimus_jax.control.guard import Source
from optimus_jax.control.health import DeviceMemory, GpuHealth, visible_gpus
from optimus_jax.control.heartbeats import HeartbeatAges
from optimus_jax.control.mesh_probes import MeshProbes
from optimus_jax.control.probe_rounds import Budget, ProbeRounds
from optimus_jax.control.sources import Signals
from optimus_jax.faults.heartbeat import Heartbeats
from optimus_jax.planning.profiles.cluster import INTER_HOST, INTRA_HOST, Cluster
from optimus_jax.planning.profiles.hardware import HardwareProfile
from optimus_jax.reshard.exchange import Device


class Probes:
    """Makes the probe rounds of each mesh of a run, under one budget.

    Programs are cached, so that going back to a mesh compiles nothing.

    Args:
      share: share of wall time that probes may take; 0: no probes.
      cluster: the run's cluster, which tells the mesh axes that cross hosts.
      profile: the hardware profile of the devices; None: they were not measured.
      num_meshes: number of meshes whose programs are cached; these hold some device memory.
      devices: devices of the run: those outside a mesh are probed too, in a run of one process.
      lost: returns the ids of devices that must not be used.
      warn: called if a mesh cannot be probed.
    """

    def __init__(
        self,
        share: float,
        cluster: Cluster,
        profile: HardwareProfile | None,
        *,
        num_meshes: int,
        devices: Sequence[Device] = (),
        lost: Callable[[], frozenset[int]] = frozenset,
        warn: Callable[[str], object],
    ) -> None:
        self._share, self._cluster = share, cluster
        self._devices, self._lost = (devices if jax.process_count() == 1 else ()), lost
        self._baselines, self._budget = Baselines(profile), Budget(share)
        self._programs: OrderedDict[Mesh, MeshProbes] = OrderedDict()
        self._num_meshes, self._warn = num_meshes, warn

    def prepare(self, mesh: Mesh) -> None:
        """Compile the probes of a mesh; may run in the background before the run moves there."""
        if self._share and mesh not in self._programs:
            used = set(mesh.devices.flat)
            programs = MeshProbes(mesh, [each for each in self._devices if each not in used])
            programs.compile()
            self._programs.setdefault(mesh, programs)

    def on(self, mesh: Mesh) -> ProbeRounds | None:
        """The probe rounds of a mesh, compiled and settled; None: there are no probes.

        Call it in all processes, between two steps. A failure is only a warning and does not end
        the run, except with several processes: they have to agree, so it is raised there.
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
                lost=self._lost,
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
        return INTER_HOST if self._cluster.hosts_crossed(sizes, (axis,)) > 1 else INTRA_HOST


def live_signals(
    settings: ControlConfig,
    *,
    global_batch: int,
    seq_len: int,
    rounds: ProbeRounds | None,
    heartbeats: Heartbeats | None,
    warn: Callable[[str], object],
) -> Signals:
    """Make the signals of this process.

    Args:
      settings: window and budget.
      global_batch: examples of a step in the first phase.
      seq_len: tokens of an example in the first phase.
      rounds: probe rounds on the first mesh; None: no probes.
      heartbeats: heartbeats of the run's processes; None: the watchdog is off.
      warn: called when a source breaks.
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
