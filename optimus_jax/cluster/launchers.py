"""The table of launchers, and the environment variables that each of them sets.

Rows are ordered from the innermost launcher to the outermost, as in `torchrun` inside `srun` inside
an allocation. launch_detection.py chooses the one that a process uses. To add a launcher, add a
row; docs/clusters.md shows the table.

Some launchers set variables to lists or JSON. A row's `derive` turns these into plain values with
names such as `first host of SM_HOSTS`, which the row's fields can use like variables.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from optimus_jax.cluster.process_info import (
    COORDINATOR,
    DESCRIPTION,
    FIRST_PORT,
    MAX_DIGITS,
    NUM_PORTS,
    NUM_PROCESSES,
    PROCESS_ID,
    Environment,
    Launcher,
    derived_port,
    settable,
)

LOCAL_ID, NUM_LOCAL = "OPTIMUS_LOCAL_ID", "OPTIMUS_NUM_LOCAL"
"""Index of the process on its host, and number of processes there, so that they share the GPUs;
optional."""
ENVIRONMENT, SLURM, OPEN_MPI, KUBERNETES = "environment", "SLURM", "Open MPI", "Kubernetes"
POD, POD_INDEX = "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"


def _torchrun(environment: Environment) -> Environment:
    port = environment.get("MASTER_PORT", "")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        # The agent listens there itself.
        return {
            "a port beside MASTER_PORT": str(
                derived_port(f"{port} {environment['TORCHELASTIC_RUN_ID']}")
            )
        }
    return {"a port beside MASTER_PORT": port}


def _open_mpi(environment: Environment) -> Environment:
    """Open MPI 4 has the address of `mpirun` in a variable, such as
    `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911`.
    """
    if not (uri := environment.get("OMPI_MCA_orte_hnp_uri")):
        return {}
    found = re.search(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]", uri)
    if found is None:
        raise ValueError("there is no address in OMPI_MCA_orte_hnp_uri")
    job = int(uri.partition(".")[0])
    return {
        "host of OMPI_MCA_orte_hnp_uri": found[1] or found[2],
        # a multiple of 4096
        "port from OMPI_MCA_orte_hnp_uri": str(FIRST_PORT + job // 4096 % NUM_PORTS),
    }


def _slurm(environment: Environment) -> Environment:
    nodes = environment["SLURM_STEP_NODELIST"]
    first = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    if first is None:
        raise ValueError("there is no node in SLURM_STEP_NODELIST")
    job = environment["SLURM_JOB_ID"]
    step = f"{job}.{environment.get('SLURM_STEP_ID', '?')}"
    each = [
        int(count)
        for count, times in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
        )
        for _ in range(min(int(times or 1), 10**MAX_DIGITS))
    ]  # `2(x3),1`: 2, 2, 2, 1
    node = int(environment.get("SLURM_NODEID") or 0)
    return {
        "first node of SLURM_STEP_NODELIST": "".join(part or "" for part in first.groups()),
        "port from SLURM_JOB_ID": str(FIRST_PORT + int(job) % NUM_PORTS),
        "this node's part of SLURM_STEP_TASKS_PER_NODE": str(each[min(node, len(each) - 1)]),
        # A job that is started again keeps its number.
        "SLURM_JOB_ID, SLURM_STEP_ID and SLURM_RESTART_COUNT": (
            f"{step}, start {environment.get('SLURM_RESTART_COUNT', '0')}"
        ),
        DESCRIPTION: f" of step {step} on {nodes}",
    }


def _is_bound_by_slurm(environment: Environment) -> bool:
    """Whether SLURM binds each task to its own GPUs; with `--gpu-bind=none` tasks see all GPUs of
    their node."""
    if environment.get("SLURM_GPU_BIND", "").removeprefix("verbose,") == "none":
        return False
    return any(
        environment.get(name)
        for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")
    )


def _flux(environment: Environment) -> Environment:
    return (
        {"FLUX_JOB_SIZE on one node": environment.get("FLUX_JOB_SIZE", "")}
        if environment.get("FLUX_JOB_NNODES") == "1"
        else {}
    )


def _torch_nodes(environment: Environment) -> Environment:
    least, _, most = environment.get("PET_NNODES", "").partition(":")
    if most and least != most:
        raise ValueError(
            f"PET_NNODES={least}:{most} is a range, and a process that torchrun has not started"
            " cannot know how many came"
        )
    return {"nodes of PET_NNODES": least}


def _sagemaker(environment: Environment) -> Environment:
    hosts = json.loads(environment["SM_HOSTS"])
    return {
        "length of SM_HOSTS": str(len(hosts)),
        "first host of SM_HOSTS": str(hosts[0]),
        "place of SM_CURRENT_HOST in SM_HOSTS": str(hosts.index(environment["SM_CURRENT_HOST"])),
    }


def _aws_batch(environment: Environment) -> Environment:
    """AWS Batch does not give the main node its own address, so that it uses localhost."""
    if (main := environment.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0")) != "0":
        raise ValueError(
            f"AWS_BATCH_JOB_MAIN_NODE_INDEX={main}, and process 0 has to be on the main node"
        )
    address = environment.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
    is_main = environment.get("AWS_BATCH_JOB_NODE_INDEX") == "0"
    return {
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": address or ("localhost" if is_main else ""),
        "job of AWS_BATCH_JOB_ID": environment.get("AWS_BATCH_JOB_ID", "").partition("#")[0],
    }


def _first_of_sky(environment: Environment) -> Environment:
    return {
        "first of SKYPILOT_NODE_IPS": (environment.get("SKYPILOT_NODE_IPS", "").split() or [""])[0]
    }


def _tasks(variable: str, roles: Sequence[str]) -> Callable[[Environment], Environment]:
    """Parser of a JSON variable that lists hosts by role (TF_CONFIG): count, index and first host,
    counting the hosts with these roles in this order."""

    def derive(environment: Environment) -> Environment:
        said: dict[str, Any] = json.loads(environment[variable])
        cluster, task = said.get("cluster") or {}, said.get("task") or {}
        hosts = [
            (role, place, host)
            for role in roles
            for place, host in enumerate(cluster.get(role, []))
        ]
        if not hosts:
            return {}
        own = (task.get("type"), int(task.get("index", 0)))
        place = next(
            (number for number, (*task_of, _) in enumerate(hosts) if tuple(task_of) == own), None
        )
        if place is None:
            raise ValueError(
                f"there is no {own[0]} {own[1]} among those that train: {', '.join(roles)}"
            )
        return {
            f"hosts of {variable}": str(len(hosts)),
            f"task of {variable}": str(place),
            f"first host of {variable}": str(hosts[0][2]),
        }

    return derive


def _byteps(environment: Environment) -> Environment:
    """Raises if `bpslaunch` starts several processes on a host: DMLC_NUM_WORKER counts hosts."""
    if environment.get("BYTEPS_LOCAL_SIZE", "1").strip() not in ("", "1"):
        raise ValueError(
            f"BYTEPS_LOCAL_SIZE={environment['BYTEPS_LOCAL_SIZE']} processes on a host, which share"
            " DMLC_WORKER_ID"
        )
    return {}


_LAUNCHERS = (
    Launcher(
        name=ENVIRONMENT,
        count=(NUM_PROCESSES,),
        index=(PROCESS_ID,),
        address=(COORDINATOR,),
        local_count=(NUM_LOCAL,),
        local_index=(LOCAL_ID,),
        restarts=True,
        is_explicit=True,
    ),
    # JAX's own, which Kubeflow Trainer sets too (its runtime for JAX).
    Launcher(
        name="JAX's environment",
        count=("JAX_NUM_PROCESSES",),
        index=("JAX_PROCESS_ID",),
        address=("JAX_COORDINATOR_ADDRESS",),
        port=("JAX_COORDINATOR_PORT",),
        restarts=True,
    ),
    Launcher(
        name="torchrun",
        needs=("TORCHELASTIC_RUN_ID",),
        count=("WORLD_SIZE",),
        index=("RANK",),
        address=("MASTER_ADDR",),
        port=("a port beside MASTER_PORT",),
        local_count=("LOCAL_WORLD_SIZE",),
        local_index=("LOCAL_RANK",),
        job=("TORCHELASTIC_RUN_ID",),
        num_agents=("GROUP_WORLD_SIZE",),
        derive=_torchrun,
        restarts=True,
    ),
    Launcher(
        name="horovodrun",
        count=("HOROVOD_SIZE",),
        index=("HOROVOD_RANK",),
        local_count=("HOROVOD_LOCAL_SIZE",),
        local_index=("HOROVOD_LOCAL_RANK",),
        has_one_parent=True,
    ),
    Launcher(
        name=OPEN_MPI,
        count=("OMPI_COMM_WORLD_SIZE",),
        index=("OMPI_COMM_WORLD_RANK",),
        derive=_open_mpi,
        address=("host of OMPI_MCA_orte_hnp_uri",),
        port=("port from OMPI_MCA_orte_hnp_uri",),
        has_one_parent=True,
        restarts=True,
        local_count=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        local_index=("OMPI_COMM_WORLD_LOCAL_RANK",),
        job=("PMIX_NAMESPACE",),
    ),
    Launcher(
        name="MVAPICH",
        count=("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"),
        index=("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),
        local_count=("MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"),
        local_index=("MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"),
        has_one_parent=True,
    ),
    Launcher(
        name="jsrun",
        count=("JSM_NAMESPACE_SIZE",),
        index=("JSM_NAMESPACE_RANK",),
        local_count=("JSM_NAMESPACE_LOCAL_SIZE",),
        local_index=("JSM_NAMESPACE_LOCAL_RANK",),
        has_one_parent=True,
    ),
    Launcher(
        name="Flux",
        count=("FLUX_JOB_SIZE",),
        index=("FLUX_TASK_RANK",),
        local_count=("FLUX_JOB_SIZE on one node",),
        local_index=("FLUX_TASK_LOCAL_ID",),
        job=("FLUX_JOB_ID",),
        derive=_flux,
    ),
    Launcher(
        name="PALS",
        needs=("PALS_RANKID",),
        count=("PMI_SIZE",),
        index=("PALS_RANKID",),
        local_count=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        local_index=("PALS_LOCAL_RANKID",),
        job=("PALS_APID",),
    ),
    Launcher(
        name="MPICH or Intel MPI",
        count=("PMI_SIZE",),
        index=("PMI_RANK",),
        local_count=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        local_index=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        has_one_parent=True,
    ),
    Launcher(name="ALPS", index=("ALPS_APP_PE",)),
    Launcher(name="PMIx", needs=("PMIX_NAMESPACE",), index=("PMIX_RANK",)),
    Launcher(
        name="PyTorchJob",
        needs=("PET_NNODES",),
        count=("nodes of PET_NNODES",),
        index=("PET_NODE_RANK",),
        restarts=True,
        address=("PET_MASTER_ADDR", "MASTER_ADDR"),
        port=("PET_MASTER_PORT", "MASTER_PORT"),
        derive=_torch_nodes,
    ),
    # PyTorchJob without torchrun, DeepSpeed's launcher (LOCAL_SIZE), Azure ML, and whoever exports
    # them.
    Launcher(
        name="torch.distributed's environment",
        count=("WORLD_SIZE",),
        index=("RANK",),
        address=("MASTER_ADDR",),
        port=("MASTER_PORT",),
        local_count=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        local_index=("LOCAL_RANK",),
        is_exported=True,
        restarts=True,
    ),
    Launcher(
        name=SLURM,
        needs=("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"),
        count=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        index=("SLURM_PROCID",),
        address=("first node of SLURM_STEP_NODELIST",),
        port=("port from SLURM_JOB_ID",),
        local_count=("this node's part of SLURM_STEP_TASKS_PER_NODE",),
        local_index=("SLURM_LOCALID",),
        job=("SLURM_JOB_ID, SLURM_STEP_ID and SLURM_RESTART_COUNT",),
        gives_gpus=_is_bound_by_slurm,
        derive=_slurm,
        restarts=True,
    ),
    Launcher(
        name="JAXJob",
        min_fields=2,
        count=("NUM_PROCESSES",),
        index=("PROCESS_ID",),
        address=("COORDINATOR_ADDRESS",),
        port=("COORDINATOR_PORT",),
        restarts=True,
    ),
    Launcher(
        name="MaxText's environment",
        min_fields=2,
        count=("NNODES",),
        index=("NODE_RANK",),
        address=("JAX_COORDINATOR_IP", "MASTER_ADDR"),
        port=("JAX_COORDINATOR_PORT", "MASTER_PORT"),
        is_exported=True,
    ),
    Launcher(
        name="TFJob",
        needs=("TF_CONFIG",),
        count=("hosts of TF_CONFIG",),
        index=("task of TF_CONFIG",),
        address=("first host of TF_CONFIG",),
        derive=_tasks("TF_CONFIG", ("chief", "master", "worker")),
        restarts=True,
    ),
    Launcher(
        name="Vertex AI",
        needs=("CLUSTER_SPEC",),
        count=("hosts of CLUSTER_SPEC",),
        index=("task of CLUSTER_SPEC",),
        address=("first host of CLUSTER_SPEC",),
        derive=_tasks("CLUSTER_SPEC", tuple(f"workerpool{n}" for n in range(4))),
    ),
    Launcher(
        name="SageMaker",
        needs=("SM_HOSTS", "SM_CURRENT_HOST"),
        count=("length of SM_HOSTS",),
        address=("first host of SM_HOSTS",),
        index=("place of SM_CURRENT_HOST in SM_HOSTS",),
        derive=_sagemaker,
    ),
    Launcher(
        name="SkyPilot",
        count=("SKYPILOT_NUM_NODES",),
        index=("SKYPILOT_NODE_RANK",),
        address=("first of SKYPILOT_NODE_IPS",),
        job=("SKYPILOT_TASK_ID",),
        derive=_first_of_sky,
    ),
    Launcher(
        name="AWS Batch",
        needs=("AWS_BATCH_JOB_NUM_NODES",),
        count=("AWS_BATCH_JOB_NUM_NODES",),
        index=("AWS_BATCH_JOB_NODE_INDEX",),
        address=("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",),
        job=("job of AWS_BATCH_JOB_ID",),
        derive=_aws_batch,
    ),
    Launcher(
        name="Volcengine",
        count=("MLP_WORKER_NUM",),
        index=("MLP_ROLE_INDEX",),
        address=("MLP_WORKER_0_HOST",),
        port=("MLP_WORKER_0_PORT",),
        is_exported=True,
    ),
    Launcher(
        name="BytePS",
        needs=("DMLC_NUM_WORKER",),
        count=("DMLC_NUM_WORKER",),
        index=("DMLC_WORKER_ID",),
        derive=_byteps,
        is_exported=True,
        local_index=("BYTEPS_LOCAL_RANK",),
        local_count=("BYTEPS_LOCAL_SIZE",),
    ),
)
_COMMON_WORDS = {"LOCAL_SIZE"}
"""Variables that prove nothing on their own, as other programs use these names."""


def _local(names_of: Callable[[Launcher], Sequence[str]]) -> tuple[str, ...]:
    """The variables of all launchers for the processes of a host."""
    names = dict.fromkeys(name for launcher in _LAUNCHERS for name in settable(names_of(launcher)))
    return tuple(name for name in names if name not in _COMMON_WORDS)


LAUNCHERS = (
    *_LAUNCHERS,
    # Hints: variables which only show that other processes exist.
    Launcher(
        name="Volcano", index=("VC_TASK_INDEX", "VK_TASK_INDEX"), is_exported=True, is_hint=True
    ),
    Launcher(name="pbsdsh", index=("PBS_NODENUM",), is_exported=True),
    # JAX takes it in a pod, where the API server has the count.
    Launcher(name="indexed Job", index=(POD_INDEX,), unless=(POD,), is_exported=True),
    Launcher(
        name="a local rank",
        local_index=(*_local(lambda launcher: launcher.local_index), "MPT_LRANK"),
        local_count=_local(lambda launcher: launcher.local_count),
        is_exported=True,
        is_hint=True,
    ),
    # Of a host: accelerate's, torchrun's, whose own variables say more where it is there, and
    # Horovod's.
    Launcher(
        name="a node's rank",
        index=("NODE_RANK", "MACHINE_RANK", "GROUP_RANK", "CROSS_RANK", "HOROVOD_CROSS_RANK"),
        unless=("TORCHELASTIC_RUN_ID",),
        is_exported=True,
        is_hint=True,
    ),
    Launcher(
        name="a task's rank",
        index=("PMIX_RANK", "SLURM_PROCID", "DMLC_RANK", "DMLC_WORKER_ID", "RANK_ID"),
        is_exported=True,
        is_hint=True,
    ),
)
"""All launchers except TPU pods and indexed Jobs of Kubernetes, which JAX detects: only the API
server has the number of pods."""
