"""Which engine has started this process, and what it says about the others of the run.

The first of these that says something counts: the program, if it has connected its processes itself (as Ray does); flags; our own
variables (OPTIMUS_COORDINATOR and two more), for whatever else starts processes; what JAX finds by itself: Open MPI, SLURM, TPU
pods, Kubernetes. JAX's own findings are read with more care where they would make a process wait for others that never come, or
leave GPUs idle:
* a shell that `salloc` opens has every variable of a step of many tasks, and is alone in it;
* every pod has Kubernetes' variables, and only those of an indexed Job belong together;
* one task per node would get one GPU of it (`local_device_ids=[SLURM_LOCALID]`); here the processes of a node share all
  that they see.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import jax
import pynvml
from jax._src.clusters import ClusterEnv
from jax._src.distributed import global_state

from optimus_jax import settings
from optimus_jax.config import DistributedConfig
from optimus_jax.config.checks import is_host_and_port
from optimus_jax.errors import ConfigError, explain

COORDINATOR, NUM_PROCESSES, PROCESS_ID = VARIABLES = ("OPTIMUS_COORDINATOR", "OPTIMUS_NUM_PROCESSES", "OPTIMUS_PROCESS_ID")
"""What the three flags say, for whoever starts processes by other means."""
LOCAL_ID, NUM_LOCAL = "OPTIMUS_LOCAL_ID", "OPTIMUS_NUM_LOCAL"
"""Which process of its host this is, and of how many, so that they share its GPUs; may be left out."""

FLAGS, ENVIRONMENT, PROGRAM, NOBODY, SLURM, OPEN_MPI, KUBERNETES = "flags", "environment", "program", "nobody", "SLURM", "Open MPI", "Kubernetes"
_NAMES = {"OmpiCluster": OPEN_MPI, "SlurmCluster": SLURM, "K8sCluster": KUBERNETES, "GkeTpuCluster": "GKE TPU", "GceTpuCluster": "GCE TPU"}
"""Of JAX's classes, in JAX's order."""
RESTARTING = (SLURM, OPEN_MPI, KUBERNETES, ENVIRONMENT)
"""Those whose jobs are started again after a fault (deploy/), and not after a mistake; with ENVIRONMENT it may be any."""
_NO_ENGINE = "start it alone whatever the environment says: --set distributed.engine=none"
_POD, _INDEX = "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"
_ADDRESS, _PORT = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT"
"""What JAX reads too, to move the meeting point."""
_BOUND_BY_SLURM = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")
_SIZES_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""What launchers say that JAX does not know, such as Open MPI from version 5 on."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How this process was started."""

    engine: str
    """Who did: `program`, `flags`, `environment`, an engine's name, or `nobody`."""
    why: str
    """What says so, for people."""
    coordinator: str | None = None
    """HOST:PORT that process 0 listens on; None: this process is alone."""
    num_processes: int = 1
    """Processes of the run."""
    process_id: int = 0
    """This one, from 0."""
    bind: str | None = None
    """Address on which process 0 listens; None: on all of its machine."""
    local_devices: tuple[int, ...] | None = None
    """Which of the GPUs that it sees are this process's; None: all."""
    job: str = ""
    """The engine's name for this start of the run, the same in all of its processes and in no other's; empty: it has none."""

    @property
    def is_alone(self) -> bool:
        """Whether the run is this process."""
        return self.num_processes == 1

    def __str__(self) -> str:
        return self.why if self.engine == NOBODY else f"{self.engine}: {self.why}"


def find_launch(config: DistributedConfig, *, on_cpu: bool = False) -> Launch:
    """How this process was started. Touches no device; under Kubernetes it asks the API server.

    Args:
      config: what the user says about it, which wins.
      on_cpu: the run uses the CPU, however many GPUs there are.
    Raises:
      ConfigError: the environment says that there are other processes and not where they are.
    """
    if jax.distributed.is_initialized():
        return Launch(engine=PROGRAM, why="it has called jax.distributed.initialize", coordinator=global_state.coordinator_address,
                      num_processes=global_state.num_processes, process_id=global_state.process_id)
    if config.num_processes is not None:
        return _asked(config, FLAGS, "--coordinator, --num-processes and --process-id")
    if config.engine == "none":
        return Launch(engine=NOBODY, why="distributed.engine=none")
    on_cpu = on_cpu or os.environ.get("JAX_PLATFORMS") == "cpu"
    return _from_variables(config.bind, on_cpu) or replace(_from_jax(on_cpu), bind=config.listens_on)


def _asked(config: DistributedConfig, engine: str, why: str, **more: Any) -> Launch:
    assert config.num_processes is not None
    assert config.process_id is not None
    return Launch(engine=engine, why=why, coordinator=config.coordinator, num_processes=config.num_processes, process_id=config.process_id,
                  bind=config.listens_on, **more)


def _from_variables(bind: str | None, on_cpu: bool) -> Launch | None:
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if not given:
        return None
    if missing := [name for name in VARIABLES if name not in given]:
        raise ConfigError(explain("a run of several processes needs all three variables", given=_listed(given), do=f"set {' and '.join(missing)} too, or none"))
    try:
        config = settings.changed(DistributedConfig(), {
            "coordinator": given[COORDINATOR], "bind": bind, "num_processes": given[NUM_PROCESSES], "process_id": given[PROCESS_ID]})
        local_id, num_local = int(os.environ.get(LOCAL_ID, 0)), int(os.environ.get(NUM_LOCAL, 1))
    except (ConfigError, ValueError) as error:
        raise ConfigError(explain("the variables for several processes cannot be used", given=f"{_listed(given)}: {str(error).splitlines()[0]}",
                                  do=f"set {COORDINATOR} to HOST:PORT, {PROCESS_ID} to a number below {NUM_PROCESSES}")) from error
    return _asked(config, ENVIRONMENT, _listed(given), local_devices=_share(local_id, num_local, on_cpu=on_cpu))


def _from_jax(on_cpu: bool) -> Launch:
    # The classes and their order are JAX's; there is no public way to ask which would be used.
    for cluster in ClusterEnv._cluster_types:
        name = _NAMES.get(cluster.__name__, cluster.__name__)
        if cluster.opt_in_only_method or (name == KUBERNETES and not _is_indexed_pod()):
            continue
        try:
            if cluster.is_env_present():
                return _read(cluster, name, on_cpu)
        except ConfigError:
            raise
        except Exception as error:  # of parsers and network clients that are not ours
            raise ConfigError(explain(
                f"{name} has started this process, and does not say where the others are", given=f"{type(error).__name__}: {' '.join(str(error).split())}",
                do=f"mend that, or set {', '.join(VARIABLES)}, or {_NO_ENGINE}")) from error
    if others := {name: os.environ[name] for name in _SIZES_OF_MPI if os.environ.get(name, "1") != "1"}:
        raise ConfigError(explain(
            "an MPI launcher has started several processes, and does not say where the first one is", given=_listed(others),
            do=f"use Open MPI 4, or set {', '.join(VARIABLES)} in each, or {_NO_ENGINE}"))
    return Launch(engine=NOBODY, why=_why_alone())


def _is_indexed_pod() -> bool:
    """Whether this is a pod of those that JAX could find together. Raises ConfigError if JAX lacks what it needs for that."""
    if _POD not in os.environ or _INDEX not in os.environ:
        return False
    if find_spec("kubernetes") is None:
        raise ConfigError(explain(
            "this is a pod of an indexed Job, and without the package `kubernetes` there is no telling how many belong to it",
            given=f"{_INDEX}={os.environ[_INDEX]}", do=f"pip install 'optimus-jax[k8s]', or set {', '.join(VARIABLES)}, or {_NO_ENGINE}"))
    return True


def _read(cluster: type[ClusterEnv], name: str, on_cpu: bool) -> Launch:
    """What an engine says that is there."""
    count, start, why = cluster.get_process_count(), "", ""
    if name == SLURM:
        # SLURM_NTASKS is the job's number where the shell of an allocation is the only task of its step.
        count = int(os.environ.get("SLURM_STEP_NUM_TASKS") or count)
        step = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_STEP_ID', '?')}"
        why = f" of step {step} on {os.environ.get('SLURM_STEP_NODELIST', '?')}"
        start = f"{step}, start {os.environ.get('SLURM_RESTART_COUNT', '0')}"  # a job that is started again keeps its number
    if count == 1:
        return Launch(engine=name, why=f"the only process{why}")
    local_id, num_local, is_bound = _place_on_host(cluster, name)
    process_id = cluster.get_process_id()
    return Launch(
        engine=name, why=f"process {process_id} of {count}{why}", num_processes=count, process_id=process_id, job=start,
        coordinator=_coordinator(cluster),
        local_devices=_share(local_id, num_local, on_cpu=on_cpu or is_bound))


def _coordinator(cluster: type[ClusterEnv]) -> str:
    """Where process 0 listens: what JAX's variables say, else the engine."""
    address, port = os.environ.get(_ADDRESS), os.environ.get(_PORT)
    if address:
        if not is_host_and_port(address):
            raise ConfigError(explain(f"{_ADDRESS} names a host and a port", given=address, do="give HOST:PORT, such as 10.0.0.1:1234, or unset it"))
        return address
    if port and not is_host_and_port(f"host:{port}"):
        raise ConfigError(explain(f"{_PORT} names a port", given=port, do="give a number from 1 to 65535, such as 1234, or unset it"))
    return cluster.get_coordinator_address(timeout_secs=None, override_coordinator_port=port)


def _place_on_host(cluster: type[ClusterEnv], name: str) -> tuple[int, int, bool]:
    """Which process of its host this is, of how many there, and whether each sees only its own GPUs."""
    local_id = cluster.get_local_process_id()
    if local_id is None:
        return 0, 1, False
    if name == SLURM:
        each = _tasks_per_node(os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
        node = int(os.environ.get("SLURM_NODEID", 0))
        is_bound = not _is_unbound() and any(os.environ.get(variable) for variable in _BOUND_BY_SLURM)
        return local_id, each[min(node, len(each) - 1)], is_bound
    return local_id, int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1)), False


def _is_unbound() -> bool:
    """Whether tasks see all GPUs of their node though each was given its own: `--gpu-bind=none`."""
    return (os.environ.get("SLURM_GPU_BIND") or "").removeprefix("verbose,") == "none"


def _tasks_per_node(text: str) -> list[int]:
    """From SLURM's `2(x3),1`: 2, 2, 2, 1."""
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def _share(local_id: int, num_local: int, *, on_cpu: bool) -> tuple[int, ...] | None:
    """The GPUs of a process, of those that it sees; None: all of them.

    Raises:
      ConfigError: the processes of this host cannot share them evenly.
    """
    if on_cpu or num_local == 1 or os.environ.get("JAX_LOCAL_DEVICE_IDS"):  # the last is read by JAX
        return None
    if (num_gpus := _num_visible_gpus()) is None:
        return (local_id,)  # other makers' GPUs are not counted here; JAX gives one to each process
    if num_gpus < num_local:
        return None  # each sees its own, or there is nothing to share
    if num_gpus % num_local:
        raise ConfigError(explain(
            "the processes of this host cannot share its GPUs evenly", given=f"{num_local} processes, {num_gpus} GPUs",
            do="start one process per host or as many as divide its GPUs, or set JAX_LOCAL_DEVICE_IDS in each"))
    each = num_gpus // num_local
    return tuple(range(local_id * each, (local_id + 1) * each))


def _num_visible_gpus() -> int | None:
    """NVIDIA's; None: no driver says."""
    if (listed := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return sum(bool(entry.strip()) and not entry.strip().startswith(("-", "NoDevFiles")) for entry in listed.split(","))
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return None


def _why_alone() -> str:
    if (job := os.environ.get("SLURM_JOB_ID")) is not None:
        tasks = os.environ.get("SLURM_NTASKS", "1")
        return f"in SLURM job {job}, and not started by srun" + (f", which would start its {tasks} tasks" if tasks != "1" else "")
    if _POD in os.environ:
        return "in a pod that is not one of an indexed Job"
    if (address := os.environ.get(_ADDRESS)) is not None:
        return f"{_ADDRESS}={address}, but nothing says how many processes there are"
    return "nothing says that there are others"


def _listed(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
