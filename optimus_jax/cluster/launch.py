"""Which launcher has started this process, and what it says about the others of the run.

The first of these that says that there are several counts: the program, if it has connected its
processes itself (as Ray does); flags; the launchers of the table (launchers.py), our own OPTIMUS_
variables first, then the innermost launcher before the one that it runs in; what JAX finds by
itself: TPU pods and indexed Jobs of Kubernetes. Who is one of several and cannot be placed is told
so: to start alone would begin as many runs as there are processes. What a shell has been left with
is no such sign:
* a shell that `salloc` opens has every variable of a step of many tasks, and is alone in it;
* modules export PMI_SIZE=1, people MASTER_ADDR or WORLD_SIZE=1;
* every pod has Kubernetes' variables, and only those of an indexed Job belong together.
Where JAX gives a task of SLURM or Open MPI one GPU, here the processes of a host share all that
they see (gpu_sharing.py).
"""

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec

import jax
from jax._src.clusters import ClusterEnv
from jax._src.distributed import global_state

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
    OTHER_WAYS,
    VARIABLES,
    Claim,
    Launcher,
    common_parent,
    derived_port,
    listed,
    settable,
)
from optimus_jax.config import DistributedConfig
from optimus_jax.config.checks import is_host_and_port
from optimus_jax.devices.gpu_sharing import is_said, share
from optimus_jax.errors import ConfigError, explain

__all__ = [
    "ENVIRONMENT",
    "FLAGS",
    "KUBERNETES",
    "NOBODY",
    "OPEN_MPI",
    "PROGRAM",
    "SLURM",
    "VARIABLES",
    "Launch",
    "find_launch",
]

FLAGS, PROGRAM, NOBODY = "flags", "program", "nobody"
_NAMES = {"K8sCluster": KUBERNETES, "GkeTpuCluster": "GKE TPU", "GceTpuCluster": "GCE TPU"}
"""Of JAX's classes, in JAX's order."""
_IN_THE_TABLE = {"OmpiCluster", "SlurmCluster"}
_ADDRESS, _PORT = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT"
"""What JAX reads too, to move the meeting point."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How this process was started."""

    engine: str
    """Who did: `program`, `flags`, a launcher's name, or `nobody`."""
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
    """The launcher's name for this start of the run, the same in all of its processes and in no
    other's; empty: it has none."""
    restarts: bool = False
    """Whether what has started it starts jobs again after a fault, and not after a mistake."""

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
      ConfigError: the environment says that there are other processes and not where they are, or
        contradicts itself.
    """
    if jax.distributed.is_initialized():
        return Launch(
            engine=PROGRAM,
            why="it has called jax.distributed.initialize",
            coordinator=global_state.coordinator_address,
            num_processes=global_state.num_processes,
            process_id=global_state.process_id,
        )
    is_said()  # JAX reads that variable, and its own error would say little
    if config.num_processes is not None:
        assert config.process_id is not None
        return Launch(
            engine=FLAGS,
            why="--coordinator, --num-processes and --process-id",
            coordinator=config.coordinator,
            num_processes=config.num_processes,
            process_id=config.process_id,
            bind=config.listens_on,
        )
    if config.engine == "none":
        return Launch(engine=NOBODY, why="distributed.engine=none")
    on_cpu = on_cpu or os.environ.get("JAX_PLATFORMS") == "cpu"
    claims = _claims()
    if (claim := _first_that_counts(claims)) is not None:
        return _placed(claim, [other for other in claims if other is not claim], config, on_cpu)
    if (launch := _from_jax(config, on_cpu)) is not None:
        return launch
    _check_ray()
    if (
        alone := next(
            (claim for claim in claims if claim.is_alone and not claim.launcher.is_exported), None
        )
    ) is not None:
        return Launch(
            engine=alone.launcher.name,
            why=f"the only process{alone.where}",
            restarts=alone.launcher.restarts,
        )
    return Launch(engine=NOBODY, why=_why_alone())


def _claims() -> list[Claim]:
    """What each launcher says, from the innermost outwards.

    What an outer one says counts for less: whether it can be read does not matter where an inner
    one says all.
    """
    claims: list[Claim] = []
    for launcher in LAUNCHERS:
        try:
            claim = launcher.read(os.environ)
        except ConfigError:
            if any(claim.is_whole for claim in claims):
                continue
            raise
        # Rows share variables: those of torchrun are torch.distributed's. Whoever is alone has no
        # peers on its host.
        if claim is not None and not (
            claim.said
            and any(
                claim.said.keys() <= inner.said.keys()
                and not (inner.is_alone and claim.has_local_peers)
                for inner in claims
            )
        ):
            claims.append(claim)
    return claims


def _first_that_counts(claims: list[Claim]) -> Claim | None:
    """The innermost launcher that says that there are several; None: nobody does.

    Raises:
      ConfigError: one says so and not all that it takes, or an outer one contradicts it.
    """
    for claim in claims:
        if claim.launcher.is_explicit:
            if claim.is_partial or claim.address is None:
                raise _partial(claim)
            return claim
    whole = [claim for claim in claims if claim.is_whole]
    if whole:
        first = whole[0]
        for outer in whole[1:]:
            _check_outer(first, outer)
        return first
    is_alone = any(claim.is_alone for claim in claims)
    for claim in claims:
        # In the shell of an interactive step, which is alone, srun leaves the number 0 without a
        # count.
        if claim.is_partial and not (
            is_alone and claim.count is None and claim.index == 0 and not claim.has_local_peers
        ):
            raise _partial(claim)
    return None


def _check_outer(inner: Claim, outer: Claim) -> None:
    """Raises ConfigError if both cannot be meant: an inner launcher starts at least one process for
    each of the outer one's.
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
                given=f"{listed(outer.said)} {listed(inner.said)}",
                do=(
                    f"let {inner.launcher.name} know of all of them (torchrun: --nnodes), or unset"
                    f" {' and '.join(inner.said)}, or {OTHER_WAYS}"
                ),
            )
        )
    if inner.launcher.is_exported and outer.count == inner.count and outer.index != inner.index:
        raise ConfigError(
            explain(
                f"{inner.launcher.name} and {outer.launcher.name} do not agree on which process"
                " this is",
                given=f"{listed(inner.said)} {listed(outer.said)}",
                do=f"unset {' and '.join(inner.said)}, or {OTHER_WAYS}",
            )
        )


def _partial(claim: Claim) -> ConfigError:
    launcher = claim.launcher
    fields = [
        (launcher.count, claim.count is None, "how many processes there are"),
        (launcher.index, claim.index is None, "which one this is"),
    ]
    if launcher.is_explicit:
        fields.append((launcher.address, claim.address is None, "where process 0 is"))
    lacks = [(settable(names), meaning) for names, is_missing, meaning in fields if is_missing]
    missing = [" or ".join(names) for names, _ in lacks if names]
    does = ([f"set {' and '.join(missing)} too"] if missing else []) + (
        [f"unset {' and '.join(claim.said)}"] if claim.said else []
    )
    return ConfigError(
        explain(
            f"{launcher.name} says that this process is"
            f" {'the only one' if claim.is_alone else 'one of several'}, but not"
            f" {' or '.join(meaning for _, meaning in lacks)}",
            given=listed({**claim.said, **claim.said_address}),
            do=", or ".join([*does, OTHER_WAYS]),
        )
    )


def _placed(claim: Claim, others: list[Claim], config: DistributedConfig, on_cpu: bool) -> Launch:
    """The launch that a launcher stands for; `others`: what further launchers say, from which comes
    what it does not.
    """
    launcher = claim.launcher
    if claim.is_alone:
        return Launch(
            engine=launcher.name, why=f"the only process{claim.where}", restarts=launcher.restarts
        )
    assert claim.count is not None
    assert claim.index is not None
    sources = [claim, *(other for other in others if claim.agrees(other))]
    local = next((source for source in sources if source.local_index is not None), claim)
    coordinator, is_here = _coordinator(claim, sources)
    if launcher.is_explicit:
        bind = DistributedConfig(
            coordinator=coordinator,
            bind=config.bind,
            num_processes=claim.count,
            process_id=claim.index,
        ).listens_on
    else:
        bind = config.bind or ("127.0.0.1" if is_here else None)
    job = next((source.job for source in sources if source.job), "")
    return Launch(
        engine=launcher.name,
        why=f"process {claim.index} of {claim.count}{claim.where}",
        coordinator=coordinator,
        bind=bind,
        job=job,
        num_processes=claim.count,
        process_id=claim.index,
        restarts=any(source.launcher.restarts for source in sources),
        local_devices=share(
            local.local_index,
            local.local_count,
            on_cpu=on_cpu or any(source.launcher.gives_gpus(os.environ) for source in sources),
        ),
    )


def _coordinator(claim: Claim, sources: list[Claim]) -> tuple[str, bool]:
    """Where process 0 listens, and whether that is known to be within this host: what JAX's
    variables say, else a launcher.
    """
    moved_to, moved_port = os.environ.get(_ADDRESS, "").strip(), os.environ.get(_PORT, "").strip()
    if claim.launcher.is_explicit:
        moved_to = moved_port = ""
    if moved_port and not is_host_and_port(f"host:{moved_port}"):
        raise ConfigError(
            explain(
                f"{_PORT} names a port",
                given=moved_port,
                do="give a number from 1 to 65535, such as 1234, or unset it",
            )
        )
    if moved_to:
        address = (
            moved_to if is_host_and_port(moved_to) or not moved_port else f"{moved_to}:{moved_port}"
        )
        if not is_host_and_port(address):
            raise ConfigError(
                explain(
                    f"{_ADDRESS} names a host and a port",
                    given=moved_to,
                    do="give HOST:PORT, such as 10.0.0.1:1234, or unset it",
                )
            )
        return address, False
    is_here = any(source.is_on_one_host for source in sources)
    source = next((source for source in sources if source.address is not None), None)
    if source is None:
        if not is_here:
            raise _nowhere(claim)
        return f"localhost:{moved_port or claim.port or _port_on_this_host(claim, sources)}", True
    assert source.address is not None
    host, _, port = source.address.rpartition(":")
    if not (
        host and is_host_and_port(source.address) and (":" not in host or host.startswith("["))
    ):
        # Our own variable names both.
        host, port = (
            source.address,
            source.port
            or (
                ""
                if source.launcher.is_explicit
                else str(derived_port(source.job or source.address))
            ),
        )
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    address = f"{host}:{moved_port or port}"
    if not is_host_and_port(address) or any(
        character.isspace() or character == "/" for character in address
    ):
        names = " and ".join(source.said_address)
        does = f"set {names} to a HOST and a PORT (such as 10.0.0.1 and 1234)"
        if not settable(source.launcher.address):
            does = f"set {_ADDRESS}=HOST:PORT to the host of process 0 in each"
        raise ConfigError(
            explain(
                f"{source.launcher.name} does not name a host and a port for process 0 to"
                " listen on",
                given=f"{names}: {address}".removeprefix(": "),
                do=f"{does}, or {OTHER_WAYS}",
            )
        )
    is_loopback = host in ("localhost", "127.0.0.1", "[::1]")
    if (
        source.launcher.is_exported
        and is_loopback
        and claim.index
        and not is_here
        and source.local_count is not None
    ):
        named = [name for name in source.said_address if name in source.launcher.address]
        raise ConfigError(
            explain(
                f"{source.launcher.name} names this host itself for process 0, which is on"
                " another one",
                given=f"{address}, {listed(claim.said)}",
                do=f"set {' or '.join(named)} to the host of process 0, or {OTHER_WAYS}",
            )
        )
    return address, is_loopback and is_here and host != "[::1]"


def _port_on_this_host(claim: Claim, sources: list[Claim]) -> int:
    """The same in all processes of a run, and seldom in those of another one on this host."""
    if job := next((source.job for source in sources if source.job), ""):
        return derived_port(job)
    for source in sources:
        if (
            source.launcher.has_one_parent
            and (parent := common_parent(source.launcher.index[0])) is not None
        ):
            return derived_port(str(parent))
    raise _nowhere(claim)


def _nowhere(claim: Claim) -> ConfigError:
    launcher = claim.launcher
    names = settable(launcher.address)
    does = f"set {' or '.join(names)} too, or " if names else ""
    return ConfigError(
        explain(
            f"{launcher.name} says that there are several processes, and does not say where the"
            " first one is",
            given=listed(claim.said),
            do=f"{does}set {_ADDRESS}=HOST:PORT to the host of process 0 in each, or {OTHER_WAYS}",
        )
    )


def _from_jax(config: DistributedConfig, on_cpu: bool) -> Launch | None:
    # The classes and their order are JAX's; there is no public way to ask which would be used.
    for cluster in ClusterEnv._cluster_types:
        name = _NAMES.get(cluster.__name__, cluster.__name__)
        if (
            cluster.opt_in_only_method
            or cluster.__name__ in _IN_THE_TABLE
            or (name == KUBERNETES and not _is_indexed_pod())
        ):
            continue
        try:
            if not cluster.is_env_present():
                continue
            restarts = name == KUBERNETES
            if (count := cluster.get_process_count()) == 1:
                return Launch(engine=name, why="the only process", restarts=restarts)
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
                    do=f"mend that, or {OTHER_WAYS}",
                )
            ) from error
        host, _, port = address.rpartition(":")
        claim = Claim(
            launcher=Launcher(name=name, restarts=restarts),
            said={},
            said_address={},
            count=count,
            index=index,
            address=host,
            port=port,
            local_count=None,
            local_index=None,
            num_agents=None,
            where="",
            job="",
        )
        claim.check()
        return _placed(claim, [], config, on_cpu)
    return None


def _is_indexed_pod() -> bool:
    """Whether this is a pod of those that JAX could find together.

    Raises ConfigError if JAX lacks what it needs for that.
    """
    if not os.environ.get(POD) or not os.environ.get(POD_INDEX):
        return False
    if find_spec("kubernetes") is None:
        raise ConfigError(
            explain(
                "this is a pod of an indexed Job, and without the package `kubernetes` there is no"
                " telling how many belong to it",
                given=f"{POD_INDEX}={os.environ[POD_INDEX]}",
                do=f"pip install 'optimus-jax[k8s]', or {OTHER_WAYS}",
            )
        )
    return True


def _check_ray() -> None:
    """Raises ConfigError in a worker of Ray Train that has others, which Ray has not connected:
    without use_gpu or use_tpu its JaxTrainer connects nothing, and reports success.
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
                do=f"give ScalingConfig use_gpu=True or use_tpu=True, or {OTHER_WAYS}",
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
    if address := os.environ.get(_ADDRESS):
        return f"{_ADDRESS}={address}, but JAX_NUM_PROCESSES and JAX_PROCESS_ID are not set"
    return "nothing says that there are others"
