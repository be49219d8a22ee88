"""Finds which launcher started this process, and what it says about the other processes of the run.

These sources are tried in order, and the first that reports several processes is used: the program,
if it has connected its processes itself (as Ray does); flags; the launchers of the table
(launchers.py), our own OPTIMUS_ variables first, then from the innermost launcher outwards; JAX's
own detection of TPU pods and indexed Jobs of Kubernetes. If a process is one of several but its
index or coordinator is unknown, that is an error: starting it alone would begin as many runs as
there are processes. Variables left over in a shell are not taken for a launcher:
* a shell opened by `salloc` has every variable of a step of many tasks, but is a single process;
* environment modules export PMI_SIZE=1, and people export MASTER_ADDR or WORLD_SIZE=1;
* every pod has Kubernetes' variables, but only the pods of an indexed Job form a run.

JAX gives each task of SLURM or Open MPI one GPU; we divide all visible GPUs among the processes of
a host (gpu_sharing.py).
"""

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec

import jax
from jax._src.clusters import ClusterEnv
from jax._src.distributed import global_state

from optimus_jax.cluster.coordinator_address import ADDRESS_VARIABLE, coordinator_address
from optimus_jax.cluster.launchers import (
    ENVIRONMENT,
    KUBERNETES,
    LAUNCHERS,
    OPEN_MPI,
    POD,
    POD_INDEX,
    SLURM,
)
from optimus_jax.cluster.process_info import (
    EXPLICIT_SETUP_HINT,
    VARIABLES,
    Launcher,
    ProcessInfo,
    assignments,
    settable,
)
from optimus_jax.config import DistributedConfig
from optimus_jax.devices.gpu_sharing import gpus_of_process, has_device_list
from optimus_jax.errors import ConfigError, explain

__all__ = [
    "ENVIRONMENT",
    "FLAGS",
    "KUBERNETES",
    "NO_LAUNCHER",
    "OPEN_MPI",
    "PROGRAM",
    "SLURM",
    "VARIABLES",
    "Launch",
    "find_launch",
]

FLAGS, PROGRAM, NO_LAUNCHER = "flags", "program", "none"
_NAMES = {"K8sCluster": KUBERNETES, "GkeTpuCluster": "GKE TPU", "GceTpuCluster": "GCE TPU"}
"""Our names for JAX's cluster classes."""
_IN_TABLE = {"OmpiCluster", "SlurmCluster"}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How this process was started."""

    launcher: str
    """What started it: `program`, `flags`, a launcher's name, or `none`."""
    why: str
    """How that was detected, for messages."""
    coordinator: str | None = None
    """HOST:PORT that process 0 listens on; None: this process is alone."""
    num_processes: int = 1
    """Number of processes of the run."""
    process_id: int = 0
    """Index of this process, from 0."""
    bind: str | None = None
    """Address on which process 0 listens; None: all addresses of its machine."""
    local_devices: tuple[int, ...] | None = None
    """Indices of the visible GPUs that this process uses; None: all."""
    job: str = ""
    """The launcher's identifier of this start of the run, shared by all of its processes and by no
    others; empty: it has none."""
    restarts: bool = False
    """Whether the launcher restarts jobs after a fault (exit code 75) but not after a user's
    error."""

    @property
    def is_alone(self) -> bool:
        """Whether this process is the whole run."""
        return self.num_processes == 1

    def __str__(self) -> str:
        return self.why if self.launcher == NO_LAUNCHER else f"{self.launcher}: {self.why}"


def find_launch(config: DistributedConfig, *, on_cpu: bool = False) -> Launch:
    """Find how this process was started. Touches no device; under Kubernetes it asks the API
    server.

    Args:
      config: the user's settings, which override the environment.
      on_cpu: the run uses the CPU, however many GPUs there are.
    Raises:
      ConfigError: the environment implies other processes but not how to reach them, or contradicts
        itself.
    """
    if jax.distributed.is_initialized():
        return Launch(
            launcher=PROGRAM,
            why="it has called jax.distributed.initialize",
            coordinator=global_state.coordinator_address,
            num_processes=global_state.num_processes,
            process_id=global_state.process_id,
        )
    has_device_list()  # JAX reads that variable, and its own error would say little
    if config.num_processes is not None:
        assert config.process_id is not None
        return Launch(
            launcher=FLAGS,
            why="--coordinator, --num-processes and --process-id",
            coordinator=config.coordinator,
            num_processes=config.num_processes,
            process_id=config.process_id,
            bind=config.listens_on,
        )
    if config.launcher == "none":
        return Launch(launcher=NO_LAUNCHER, why="distributed.launcher=none")
    on_cpu = on_cpu or os.environ.get("JAX_PLATFORMS") == "cpu"
    infos = _read_launchers()
    if (info := _innermost(infos)) is not None:
        return _launch_from(info, [other for other in infos if other is not info], config, on_cpu)
    if (launch := _from_jax(config, on_cpu)) is not None:
        return launch
    _check_ray()
    if (
        alone := next(
            (info for info in infos if info.is_alone and not info.launcher.is_exported), None
        )
    ) is not None:
        return Launch(
            launcher=alone.launcher.name,
            why=f"the only process{alone.description}",
            restarts=alone.launcher.restarts,
        )
    return Launch(launcher=NO_LAUNCHER, why=_why_alone())


def _read_launchers() -> list[ProcessInfo]:
    """What each launcher says, from the innermost outwards.

    An outer launcher that cannot be read is ignored if an inner one is complete.
    """
    infos: list[ProcessInfo] = []
    for launcher in LAUNCHERS:
        try:
            info = launcher.read(os.environ)
        except ConfigError:
            if any(info.is_complete for info in infos):
                continue
            raise
        # Rows share variables: those of torchrun are torch.distributed's. Whoever is alone has no
        # peers on its host.
        if info is not None and not (
            info.variables
            and any(
                info.variables.keys() <= inner.variables.keys()
                and not (inner.is_alone and info.has_local_peers)
                for inner in infos
            )
        ):
            infos.append(info)
    return infos


def _innermost(infos: list[ProcessInfo]) -> ProcessInfo | None:
    """The innermost launcher that reports several processes; None: none does.

    Raises:
      ConfigError: a launcher's information is incomplete, or an outer launcher contradicts it.
    """
    for info in infos:
        if info.launcher.is_explicit:
            if info.is_partial or info.address is None:
                raise _incomplete_error(info)
            return info
    whole = [info for info in infos if info.is_complete]
    if whole:
        first = whole[0]
        for outer in whole[1:]:
            _check_outer(first, outer)
        return first
    is_alone = any(info.is_alone for info in infos)
    for info in infos:
        # In the shell of an interactive step, which is alone, srun leaves the number 0 without a
        # count.
        if info.is_partial and not (
            is_alone and info.count is None and info.index == 0 and not info.has_local_peers
        ):
            raise _incomplete_error(info)
    return None


def _check_outer(inner: ProcessInfo, outer: ProcessInfo) -> None:
    """Raise ConfigError if the two launchers contradict each other: an inner launcher starts at
    least one process for each process of the outer one.
    """
    assert inner.count is not None
    assert outer.count is not None
    num_agents = inner.num_agents or (inner.count if inner.launcher.is_exported else None)
    if num_agents is not None and outer.count > num_agents:
        raise ConfigError(
            explain(
                f"{outer.launcher.name} has started {outer.count} processes, and for"
                f" {inner.launcher.name} {'its agents are' if inner.num_agents else 'they are'}"
                f" {num_agents}: each would train a run of its own",
                given=f"{assignments(outer.variables)} {assignments(inner.variables)}",
                do=(
                    f"let {inner.launcher.name} know of all of them (torchrun: --nnodes), or unset"
                    f" {' and '.join(inner.variables)}, or {EXPLICIT_SETUP_HINT}"
                ),
            )
        )
    if inner.launcher.is_exported and outer.count == inner.count and outer.index != inner.index:
        raise ConfigError(
            explain(
                f"{inner.launcher.name} and {outer.launcher.name} do not agree on which process"
                " this is",
                given=f"{assignments(inner.variables)} {assignments(outer.variables)}",
                do=f"unset {' and '.join(inner.variables)}, or {EXPLICIT_SETUP_HINT}",
            )
        )


def _incomplete_error(info: ProcessInfo) -> ConfigError:
    launcher = info.launcher
    fields = [
        (launcher.count, info.count is None, "how many processes there are"),
        (launcher.index, info.index is None, "which one this is"),
    ]
    if launcher.is_explicit:
        fields.append((launcher.address, info.address is None, "where process 0 is"))
    missing_fields = [
        (settable(names), meaning) for names, is_missing, meaning in fields if is_missing
    ]
    missing = [" or ".join(names) for names, _ in missing_fields if names]
    remedy = ([f"set {' and '.join(missing)} too"] if missing else []) + (
        [f"unset {' and '.join(info.variables)}"] if info.variables else []
    )
    return ConfigError(
        explain(
            f"{launcher.name} says that this process is"
            f" {'the only one' if info.is_alone else 'one of several'}, but not"
            f" {' or '.join(meaning for _, meaning in missing_fields)}",
            given=assignments({**info.variables, **info.address_variables}),
            do=", or ".join([*remedy, EXPLICIT_SETUP_HINT]),
        )
    )


def _launch_from(
    info: ProcessInfo, others: list[ProcessInfo], config: DistributedConfig, on_cpu: bool
) -> Launch:
    """The launch that a launcher describes; what it does not say is taken from `others`."""
    launcher = info.launcher
    if info.is_alone:
        return Launch(
            launcher=launcher.name,
            why=f"the only process{info.description}",
            restarts=launcher.restarts,
        )
    assert info.count is not None
    assert info.index is not None
    sources = [info, *(other for other in others if info.agrees(other))]
    local = next((source for source in sources if source.local_index is not None), info)
    coordinator, is_local = coordinator_address(info, sources)
    if launcher.is_explicit:
        bind = DistributedConfig(
            coordinator=coordinator,
            bind=config.bind,
            num_processes=info.count,
            process_id=info.index,
        ).listens_on
    else:
        bind = config.bind or ("127.0.0.1" if is_local else None)
    job = next((source.job for source in sources if source.job), "")
    return Launch(
        launcher=launcher.name,
        why=f"process {info.index} of {info.count}{info.description}",
        coordinator=coordinator,
        bind=bind,
        job=job,
        num_processes=info.count,
        process_id=info.index,
        restarts=any(source.launcher.restarts for source in sources),
        local_devices=gpus_of_process(
            local.local_index,
            local.local_count,
            on_cpu=on_cpu or any(source.launcher.gives_gpus(os.environ) for source in sources),
        ),
    )


def _from_jax(config: DistributedConfig, on_cpu: bool) -> Launch | None:
    # The classes and their order are JAX's; there is no public way to ask which would be used.
    for cluster in ClusterEnv._cluster_types:
        name = _NAMES.get(cluster.__name__, cluster.__name__)
        if (
            cluster.opt_in_only_method
            or cluster.__name__ in _IN_TABLE
            or (name == KUBERNETES and not _is_indexed_pod())
        ):
            continue
        try:
            if not cluster.is_env_present():
                continue
            restarts = name == KUBERNETES
            if (count := cluster.get_process_count()) == 1:
                return Launch(launcher=name, why="the only process", restarts=restarts)
            index = cluster.get_process_id()
            address = cluster.get_coordinator_address(
                timeout_secs=None, override_coordinator_port=None
            )
        except ConfigError:
            raise
        except Exception as error:  # of parsers and network clients that are not ours
            raise ConfigError(
                explain(
                    f"{name} has started this process, and does not say where the others are",
                    given=f"{type(error).__name__}: {' '.join(str(error).split())}",
                    do=f"fix that, or {EXPLICIT_SETUP_HINT}",
                )
            ) from error
        host, _, port = address.rpartition(":")
        info = ProcessInfo(
            launcher=Launcher(name=name, restarts=restarts),
            variables={},
            address_variables={},
            count=count,
            index=index,
            address=host,
            port=port,
            local_count=None,
            local_index=None,
            num_agents=None,
            description="",
            job="",
        )
        info.check()
        return _launch_from(info, [], config, on_cpu)
    return None


def _is_indexed_pod() -> bool:
    """Whether this is a pod of an indexed Job, whose processes JAX can find.

    Raises ConfigError if the package that JAX needs for that is missing.
    """
    if not os.environ.get(POD) or not os.environ.get(POD_INDEX):
        return False
    if find_spec("kubernetes") is None:
        raise ConfigError(
            explain(
                "this is a pod of an indexed Job, and without the package `kubernetes` there is no"
                " telling how many belong to it",
                given=f"{POD_INDEX}={os.environ[POD_INDEX]}",
                do=f"pip install 'optimus-jax[k8s]', or {EXPLICIT_SETUP_HINT}",
            )
        )
    return True


def _check_ray() -> None:
    """Raise ConfigError in one of several workers of Ray Train that are not connected: without
    use_gpu or use_tpu Ray's JaxTrainer connects nothing, and reports success.
    """
    if (ray_train := sys.modules.get("ray.train")) is None:
        return
    try:
        context = ray_train.get_context()
        count, index = int(context.get_world_size()), int(context.get_world_rank())
    except Exception:  # outside a worker
        return
    if count > 1:
        raise ConfigError(
            explain(
                "Ray Train has started several workers, and has not connected them",
                given=f"worker {index} of {count}",
                do=f"give ScalingConfig use_gpu=True or use_tpu=True, or {EXPLICIT_SETUP_HINT}",
            )
        )


def _why_alone() -> str:
    if (job := os.environ.get("SLURM_JOB_ID")) is not None:
        tasks = os.environ.get("SLURM_NTASKS", "1")
        return f"in SLURM job {job}, and not started by srun" + (
            f", which would start its {tasks} tasks" if tasks != "1" else ""
        )
    if os.environ.get(POD):
        return "in a pod that is not one of an indexed Job"
    if address := os.environ.get(ADDRESS_VARIABLE):
        return f"{ADDRESS_VARIABLE}={address}, but JAX_NUM_PROCESSES and JAX_PROCESS_ID are not set"
    return "nothing says that there are others"
