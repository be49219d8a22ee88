"""What starts the processes of a run, and which environment variables each of these launchers sets: one table.

The order is from the innermost launcher to the outermost, as `torchrun` inside `srun` inside an allocation. Which of them a
process goes by is decided in engines.py. Adding a launcher is adding a row; docs/clusters.md shows the table.

Some launchers say things in lists or JSON. A row's `derive` turns these into plain values under names such as
`first host of SM_HOSTS`, and the row then names them as it names variables.
"""

import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimus_jax.errors import ConfigError, explain

COORDINATOR, NUM_PROCESSES, PROCESS_ID = VARIABLES = (
    "OPTIMUS_COORDINATOR", "OPTIMUS_NUM_PROCESSES", "OPTIMUS_PROCESS_ID")
"""What the three flags say, for whoever starts processes by other means."""
LOCAL_ID, NUM_LOCAL = "OPTIMUS_LOCAL_ID", "OPTIMUS_NUM_LOCAL"
"""Which process of its host this is, and of how many, so that they share its GPUs; may be left out."""
ENVIRONMENT, SLURM, OPEN_MPI, KUBERNETES = "environment", "SLURM", "Open MPI", "Kubernetes"
POD, POD_INDEX = "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"
WHERE = "where"
"""Name of a derived text that says which part of a job this is, for people."""

_FIRST_PORT, _NUM_PORTS = 61440, 4096
"""Ports that nobody is given by the system unasked, as JAX chooses them too."""

Environment = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """One launcher. Of several variables in a field, the first that is set counts; an empty one is not set."""

    name: str
    count: tuple[str, ...] = ()
    """Number of processes of the run."""
    index: tuple[str, ...] = ()
    """Which one this is, from 0."""
    address: tuple[str, ...] = ()
    """HOST or HOST:PORT of process 0; none: it does not say, and a run on one host meets at localhost."""
    port: tuple[str, ...] = ()
    """Where process 0 may listen; none: a port is derived from `job` or the address, the same in all processes."""
    local_count: tuple[str, ...] = ()
    """Processes of the run on this host."""
    local_index: tuple[str, ...] = ()
    """Which of these this is, from 0."""
    job: tuple[str, ...] = ()
    """What all processes of this start of the run have in common, and no others."""
    needs: tuple[str, ...] = ()
    """It is this launcher only where all of these are set."""
    num_said: int = 1
    """It is this launcher only where so many of count, index and address are set: 2 where the names are common words."""
    restarts: bool = False
    """Whether it starts jobs again after a fault, and not after a mistake."""
    is_explicit: bool = False
    """The user's own words to us: they win over all launchers, and have to be complete."""
    is_exported: bool = False
    """People export these variables themselves too: an index of 0 alone means nothing, and an outer launcher must not
    contradict."""
    has_one_parent: bool = False
    """One process of the launcher on each host starts the run's processes there."""
    num_agents: tuple[str, ...] = ()
    """Number of its agents, where an outer launcher starts these and has to start as many."""
    gives_gpus: Callable[[Environment], bool] = lambda environment: False
    """Whether each process sees only GPUs of its own."""
    derive: Callable[[Environment], Environment] = lambda environment: {}
    """What is said in lists or JSON, as plain values. Raises ValueError if that cannot be read."""

    def read(self, environment: Environment) -> "Claim | None":
        """What it says about this process; None: it has not started it.

        Raises:
          ConfigError: it says something that cannot be meant.
        """
        if any(not _said(environment, (name,)) for name in self.needs):
            return None
        try:
            values = {**environment, **self.derive(environment)}
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            told = {name: environment[name] for name in (*self.needs, *self.index) if name in environment}
            raise ConfigError(explain(
                f"{self.name} has started this process, and what it says cannot be read", given=f"{listed(told)}: {error}",
                do=f"mend or unset {' and '.join(told)}, or {OTHER_WAYS}")) from error
        fields = (self.count, self.index, self.address) if self.is_explicit or self.num_said > 1 else (self.count, self.index)
        if sum(_said(values, field) is not None for field in fields) < self.num_said:
            return None
        said = {name: value for field in (self.count, self.index, self.local_count, self.local_index)
                if (found := _said(values, field)) for name, value in [found]}
        claim = Claim(
            launcher=self, said=said,
            count=self._number(values, self.count), index=self._number(values, self.index),
            address=_value(values, self.address), port=_value(values, self.port),
            local_count=self._number(values, self.local_count), local_index=self._number(values, self.local_index),
            num_agents=self._number(values, self.num_agents), where=values.get(WHERE) or f" ({listed(said)})",
            job=_value(values, self.job) or "")
        claim.check()
        return claim

    def _number(self, values: Environment, names: Sequence[str]) -> int | None:
        if (found := _said(values, names)) is None:
            return None
        name, text = found
        if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
            raise ConfigError(explain(f"{self.name}: {name} is a number of processes, or of one of them", given=f"{name}={text}",
                                      do=f"set {name} to a number, such as 2, or unset it, or {OTHER_WAYS}"))
        return int(text)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one launcher says about this process; None: it does not say."""

    launcher: Launcher
    said: Environment
    """The variables that say it."""
    count: int | None
    index: int | None
    address: str | None
    port: str | None
    local_count: int | None
    local_index: int | None
    num_agents: int | None
    where: str
    job: str

    @property
    def is_whole(self) -> bool:
        """Whether it says that there are several and which one this is."""
        return self.count is not None and self.count > 1 and self.index is not None

    @property
    def is_alone(self) -> bool:
        """Whether it says that there are no others."""
        return self.count == 1

    @property
    def is_partial(self) -> bool:
        """Whether it says that there are several, and not how many or which one this is."""
        if self.is_whole or self.is_alone:
            return False
        return self.count is not None or bool(self.index) or not self.launcher.is_exported

    @property
    def is_on_one_host(self) -> bool:
        """Whether all processes of the run are known to be on this host."""
        return self.count is not None and self.local_count == self.count

    def agrees(self, other: "Claim") -> bool:
        """Whether both say the same, as far as `other` says anything: of two launchers, or one seen in two ways."""
        return other.count in (self.count, None) and other.index in (self.index, None) and (other.count, other.index) != (None, None)

    def check(self) -> None:
        """Raises ConfigError if its numbers contradict one another."""
        row = self.launcher
        for index, count, names in ((self.index, self.count, (row.index, row.count)),
                                    (self.local_index, self.local_count, (row.local_index, row.local_count))):
            if count == 0 or (index is not None and count is not None and index >= count):
                told = [name for field in names for name in field if name in self.said]
                raise ConfigError(explain(
                    f"{row.name}: processes are counted from 0, and there are fewer than that", given=listed(self.said),
                    do=f"set {' to a number below '.join(told)}, or unset {'both' if len(told) > 1 else 'it'}, or {OTHER_WAYS}"))


OTHER_WAYS = ("give --coordinator HOST:PORT --num-processes N --process-id I in each process (or set "
              f"{', '.join(VARIABLES)}), or start it alone whatever the environment says: --set distributed.engine=none")
"""What always helps."""
_MOST_DIGITS = 6


def listed(values: Environment) -> str:
    """`A=1 B=2`."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def documented(launcher: Launcher) -> str:
    """Its row in docs/clusters.md."""
    def cell(names: Sequence[str]) -> str:
        return " or ".join(name if " " in name else f"`{name}`" for name in names)

    where = cell(launcher.address) + (f", port {cell(launcher.port)}" if launcher.port else "")
    local = ", ".join(filter(None, (cell(launcher.local_index), cell(launcher.local_count))))
    cells = (launcher.name, cell(launcher.needs), cell(launcher.count), cell(launcher.index), where, local, "yes" if launcher.restarts else "")
    return "| " + " | ".join(text or "-" for text in cells) + " |"


def derived_port(text: str) -> int:
    """A port that is the same for the same text, and seldom for another one."""
    return _FIRST_PORT + zlib.crc32(text.encode(errors="replace")) % _NUM_PORTS


def common_parent(variable: str) -> int | None:
    """The nearest process above this one without a variable that is set for each process of a run: the launcher's own, which has
    started all of the run's processes on this host. None: the system does not say."""
    process = os.getppid()
    try:
        while process > 1:
            if not any(entry.startswith(f"{variable}=".encode()) for entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")):
                return process
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _said(values: Environment, names: Sequence[str]) -> tuple[str, str] | None:
    """The first of these variables that is set, and its value."""
    return next(((name, values[name].strip()) for name in names if values.get(name, "").strip()), None)


def _value(values: Environment, names: Sequence[str]) -> str | None:
    found = _said(values, names)
    return None if found is None else found[1]


def _torchrun(environment: Environment) -> Environment:
    port = environment.get("MASTER_PORT", "")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        # The agent listens there itself.
        return {"a port beside MASTER_PORT": str(derived_port(f"{port} {environment['TORCHELASTIC_RUN_ID']}"))}
    return {"a port beside MASTER_PORT": port}


def _open_mpi(environment: Environment) -> Environment:
    """Version 4 has the address of `mpirun` in a variable, as in `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911`."""
    if not (uri := environment.get("OMPI_MCA_orte_hnp_uri")):
        return {}
    found = re.search(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]", uri)
    if found is None:
        raise ValueError("there is no address in OMPI_MCA_orte_hnp_uri")
    job = int(uri.partition(".")[0])
    return {"host of OMPI_MCA_orte_hnp_uri": found[1] or found[2],
            "port from OMPI_MCA_orte_hnp_uri": str(_FIRST_PORT + job // 4096 % _NUM_PORTS)}  # a multiple of 4096


def _slurm(environment: Environment) -> Environment:
    nodes = environment["SLURM_STEP_NODELIST"]
    first = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    if first is None:
        raise ValueError("there is no node in SLURM_STEP_NODELIST")
    job = environment["SLURM_JOB_ID"]
    step = f"{job}.{environment.get('SLURM_STEP_ID', '?')}"
    each = [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
            for _ in range(min(int(times or 1), 10**_MOST_DIGITS))]  # `2(x3),1`: 2, 2, 2, 1
    node = int(environment.get("SLURM_NODEID") or 0)
    return {"first node of SLURM_STEP_NODELIST": "".join(part or "" for part in first.groups()),
            "port from SLURM_JOB_ID": str(_FIRST_PORT + int(job) % _NUM_PORTS),
            "this node's part of SLURM_STEP_TASKS_PER_NODE": str(each[min(node, len(each) - 1)]),
            # A job that is started again keeps its number.
            "SLURM_JOB_ID, SLURM_STEP_ID and SLURM_RESTART_COUNT": f"{step}, start {environment.get('SLURM_RESTART_COUNT', '0')}",
            WHERE: f" of step {step} on {nodes}"}


def _is_bound_by_slurm(environment: Environment) -> bool:
    """With `--gpu-bind=none` tasks see all GPUs of their node though each was given its own."""
    if environment.get("SLURM_GPU_BIND", "").removeprefix("verbose,") == "none":
        return False
    return any(environment.get(name) for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND"))


def _flux(environment: Environment) -> Environment:
    return {"FLUX_JOB_SIZE on one node": environment.get("FLUX_JOB_SIZE", "")} if environment.get("FLUX_JOB_NNODES") == "1" else {}


def _torch_nodes(environment: Environment) -> Environment:
    least, _, most = environment.get("PET_NNODES", "").partition(":")
    if most and least != most:
        raise ValueError(f"PET_NNODES={least}:{most} is a range, and a process that torchrun has not started cannot know how many came")
    return {"nodes of PET_NNODES": least}


def _sagemaker(environment: Environment) -> Environment:
    hosts = json.loads(environment["SM_HOSTS"])
    return {"length of SM_HOSTS": str(len(hosts)), "first host of SM_HOSTS": str(hosts[0]),
            "place of SM_CURRENT_HOST in SM_HOSTS": str(hosts.index(environment["SM_CURRENT_HOST"]))}


def _aws_batch(environment: Environment) -> Environment:
    """The main node is not told its own address."""
    if (main := environment.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0")) != "0":
        raise ValueError(f"AWS_BATCH_JOB_MAIN_NODE_INDEX={main}, and process 0 has to be on the main node")
    address = environment.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
    is_main = environment.get("AWS_BATCH_JOB_NODE_INDEX") == "0"
    return {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": address or ("localhost" if is_main else ""),
            "job of AWS_BATCH_JOB_ID": environment.get("AWS_BATCH_JOB_ID", "").partition("#")[0]}


def _first_of_sky(environment: Environment) -> Environment:
    return {"first of SKYPILOT_NODE_IPS": (environment.get("SKYPILOT_NODE_IPS", "").split() or [""])[0]}


def _tasks(variable: str, roles: Sequence[str]) -> Callable[[Environment], Environment]:
    """Of a variable that lists hosts by what they do, in the order of `roles`: those that train."""
    def derive(environment: Environment) -> Environment:
        said: dict[str, Any] = json.loads(environment[variable])
        cluster, task = said.get("cluster") or {}, said.get("task") or {}
        hosts = [(role, place, host) for role in roles for place, host in enumerate(cluster.get(role, []))]
        if not hosts:
            return {}
        own = (task.get("type"), int(task.get("index", 0)))
        place = next((number for number, (*task_of, _) in enumerate(hosts) if tuple(task_of) == own), None)
        if place is None:
            raise ValueError(f"there is no {own[0]} {own[1]} among those that train: {', '.join(roles)}")
        return {f"hosts of {variable}": str(len(hosts)), f"task of {variable}": str(place), f"first host of {variable}": str(hosts[0][2])}

    return derive


LAUNCHERS = (
    Launcher(name=ENVIRONMENT, count=(NUM_PROCESSES,), index=(PROCESS_ID,), address=(COORDINATOR,), local_count=(NUM_LOCAL,),
             local_index=(LOCAL_ID,), restarts=True, is_explicit=True),
    # JAX's own, which Kubeflow Trainer sets too (its runtime for JAX).
    Launcher(name="JAX's variables", count=("JAX_NUM_PROCESSES",), index=("JAX_PROCESS_ID",), address=("JAX_COORDINATOR_ADDRESS",),
             port=("JAX_COORDINATOR_PORT",), restarts=True),
    Launcher(name="torchrun", needs=("TORCHELASTIC_RUN_ID",), count=("WORLD_SIZE",), index=("RANK",), address=("MASTER_ADDR",),
             port=("a port beside MASTER_PORT",), local_count=("LOCAL_WORLD_SIZE",), local_index=("LOCAL_RANK",),
             job=("TORCHELASTIC_RUN_ID",), num_agents=("GROUP_WORLD_SIZE",), derive=_torchrun, restarts=True),
    Launcher(name="horovodrun", count=("HOROVOD_SIZE",), index=("HOROVOD_RANK",), local_count=("HOROVOD_LOCAL_SIZE",),
             local_index=("HOROVOD_LOCAL_RANK",), has_one_parent=True),
    Launcher(name=OPEN_MPI, count=("OMPI_COMM_WORLD_SIZE",), index=("OMPI_COMM_WORLD_RANK",), derive=_open_mpi,
             address=("host of OMPI_MCA_orte_hnp_uri",), port=("port from OMPI_MCA_orte_hnp_uri",), has_one_parent=True, restarts=True,
             local_count=("OMPI_COMM_WORLD_LOCAL_SIZE",), local_index=("OMPI_COMM_WORLD_LOCAL_RANK",), job=("PMIX_NAMESPACE",)),
    Launcher(name="MVAPICH", count=("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"), index=("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),
             local_count=("MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"),
             local_index=("MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"), has_one_parent=True),
    Launcher(name="jsrun", count=("JSM_NAMESPACE_SIZE",), index=("JSM_NAMESPACE_RANK",), local_count=("JSM_NAMESPACE_LOCAL_SIZE",),
             local_index=("JSM_NAMESPACE_LOCAL_RANK",), has_one_parent=True),
    Launcher(name="Flux", count=("FLUX_JOB_SIZE",), index=("FLUX_TASK_RANK",), local_count=("FLUX_JOB_SIZE on one node",),
             local_index=("FLUX_TASK_LOCAL_ID",), job=("FLUX_JOB_ID",), derive=_flux),
    Launcher(name="PALS", needs=("PALS_RANKID",), count=("PMI_SIZE",), index=("PALS_RANKID",), local_count=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
             local_index=("PALS_LOCAL_RANKID",), job=("PALS_APID",)),
    Launcher(name="MPICH or Intel MPI", count=("PMI_SIZE",), index=("PMI_RANK",), local_count=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
             local_index=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), has_one_parent=True),
    Launcher(name="ALPS", index=("ALPS_APP_PE",)),
    Launcher(name="PMIx", needs=("PMIX_NAMESPACE",), index=("PMIX_RANK",)),
    Launcher(name="PyTorchJob", needs=("PET_NNODES",), count=("nodes of PET_NNODES",), index=("PET_NODE_RANK",), restarts=True,
             address=("PET_MASTER_ADDR", "MASTER_ADDR"), port=("PET_MASTER_PORT", "MASTER_PORT"), derive=_torch_nodes),
    # PyTorchJob without torchrun, DeepSpeed's launcher (LOCAL_SIZE), Azure ML, and whoever exports them.
    Launcher(name="torch.distributed's variables", count=("WORLD_SIZE",), index=("RANK",), address=("MASTER_ADDR",), port=("MASTER_PORT",),
             local_count=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), local_index=("LOCAL_RANK",), is_exported=True, restarts=True),
    Launcher(name=SLURM, needs=("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"), count=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
             index=("SLURM_PROCID",), address=("first node of SLURM_STEP_NODELIST",), port=("port from SLURM_JOB_ID",),
             local_count=("this node's part of SLURM_STEP_TASKS_PER_NODE",), local_index=("SLURM_LOCALID",),
             job=("SLURM_JOB_ID, SLURM_STEP_ID and SLURM_RESTART_COUNT",), gives_gpus=_is_bound_by_slurm, derive=_slurm, restarts=True),
    Launcher(name="JAXJob", num_said=2, count=("NUM_PROCESSES",), index=("PROCESS_ID",), address=("COORDINATOR_ADDRESS",),
             port=("COORDINATOR_PORT",), restarts=True),
    Launcher(name="MaxText's variables", num_said=2, count=("NNODES",), index=("NODE_RANK",), address=("JAX_COORDINATOR_IP", "MASTER_ADDR"),
             port=("JAX_COORDINATOR_PORT", "MASTER_PORT"), is_exported=True),
    Launcher(name="TFJob", needs=("TF_CONFIG",), count=("hosts of TF_CONFIG",), index=("task of TF_CONFIG",),
             address=("first host of TF_CONFIG",), derive=_tasks("TF_CONFIG", ("chief", "master", "worker")), restarts=True),
    Launcher(name="Vertex AI", needs=("CLUSTER_SPEC",), count=("hosts of CLUSTER_SPEC",), index=("task of CLUSTER_SPEC",),
             address=("first host of CLUSTER_SPEC",), derive=_tasks("CLUSTER_SPEC", tuple(f"workerpool{n}" for n in range(4)))),
    Launcher(name="SageMaker", needs=("SM_HOSTS", "SM_CURRENT_HOST"), count=("length of SM_HOSTS",), address=("first host of SM_HOSTS",),
             index=("place of SM_CURRENT_HOST in SM_HOSTS",), derive=_sagemaker),
    Launcher(name="SkyPilot", count=("SKYPILOT_NUM_NODES",), index=("SKYPILOT_NODE_RANK",), address=("first of SKYPILOT_NODE_IPS",),
             job=("SKYPILOT_TASK_ID",), derive=_first_of_sky),
    Launcher(name="AWS Batch", needs=("AWS_BATCH_JOB_NUM_NODES",), count=("AWS_BATCH_JOB_NUM_NODES",), index=("AWS_BATCH_JOB_NODE_INDEX",),
             address=("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",), job=("job of AWS_BATCH_JOB_ID",), derive=_aws_batch),
    # What says that there are others, and no more.
    Launcher(name="Volcano", index=("VC_TASK_INDEX", "VK_TASK_INDEX"), is_exported=True),
    Launcher(name="pbsdsh", index=("PBS_NODENUM",), is_exported=True),
    Launcher(name="local ranks", index=("LOCAL_RANK", "MPT_LRANK"), is_exported=True),
)
"""All of them but two: TPU pods and the indexed Jobs of Kubernetes, whose count only the API server has, are found by JAX."""
