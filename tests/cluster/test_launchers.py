"""Detection of the launcher of this process from environment variables as launchers set them."""

import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from jax._src.clusters.ompi_cluster import OmpiCluster
from jax._src.clusters.slurm_cluster import SlurmCluster

from optimus_jax.cluster import coordinator_address, launch_detection
from optimus_jax.cluster.launch_detection import Launch, find_launch
from optimus_jax.cluster.launchers import LAUNCHERS, Launcher
from optimus_jax.cluster.process_info import derived_port, variables_of
from optimus_jax.config import DistributedConfig
from optimus_jax.devices import gpu_sharing
from optimus_jax.errors import ConfigError

AUTO = DistributedConfig()
STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-09,11]",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}
"""Environment of task 2 of four, one per node."""
MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
EIGHT_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.fixture(autouse=True)
def without_launcher_variables(monkeypatch):
    """Remove the variables of whatever has started the tests."""
    for name in list(os.environ):
        if name.startswith(
            (
                "SLURM_",
                "OMPI_",
                "PMI",
                "MPI_",
                "OPTIMUS_",
                "KUBERNETES_",
                "JOB_COMPLETION",
                "JAX_",
                "CUDA_VISIBLE",
                "TORCHELASTIC_",
                "MASTER_",
                "MV2_",
                "MVP_",
                "HOROVOD_",
                "FLUX_",
                "PALS_",
                "JSM_",
                "DMLC_",
                "BYTEPS_",
                "MLP_",
            )
        ) or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "NODE_RANK",
            "NNODES",
            "MACHINE_RANK",
            "GROUP_RANK",
            "CROSS_RANK",
        ):
            monkeypatch.delenv(name)


@pytest.fixture
def found(monkeypatch):
    """A function that finds the launch of an environment."""

    def find(*environments, config=AUTO, without=(), on_cpu=False):
        for environment in environments:
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
        for name in without:
            monkeypatch.delenv(name)
        return find_launch(config, on_cpu=on_cpu)

    return find


def place(launch: Launch):
    return launch.launcher, launch.coordinator, launch.num_processes, launch.process_id


def test_without_a_launcher_there_is_one_process(found):
    assert place(found()) == ("none", None, 1, 0)


def test_flags_take_precedence_over_launchers(found):
    config = DistributedConfig(coordinator="h:1", num_processes=3, process_id=2)
    assert place(found(STEP, MPI, config=config)) == ("flags", "h:1", 3, 2)


@pytest.mark.parametrize(
    ("coordinator", "bind", "listens_on"),
    [
        ("10.0.0.1:1", None, "10.0.0.1"),
        ("[fd00::1]:1", None, "fd00::1"),
        ("localhost:1", None, "127.0.0.1"),
        ("node7:1", None, None),
        ("node7:1", "10.0.0.1", "10.0.0.1"),
        ("10.0.0.1:1", "0.0.0.0", "0.0.0.0"),
    ],
)
def test_process_0_listens_on_the_given_address(found, coordinator, bind, listens_on):
    config = DistributedConfig(coordinator=coordinator, num_processes=3, process_id=2, bind=bind)
    assert found(config=config).bind == listens_on
    variables = dict(zip(launch_detection.VARIABLES, (coordinator, "3", "2"), strict=True))
    assert found(variables, config=DistributedConfig(bind=bind)).bind == listens_on


def test_under_a_launcher_process_0_listens_on_all_addresses_by_default(found):
    assert found(MPI).bind is None
    assert found(MPI, config=DistributedConfig(bind="10.0.0.1")).bind == "10.0.0.1"


def test_launcher_none_ignores_all_launchers(found):
    launch = found(STEP, config=DistributedConfig(launcher="none"))
    assert launch.is_alone
    assert "distributed.launcher=none" in launch.why


def test_plain_variables_form_a_run(found):
    launch = found(
        STEP,
        {"OPTIMUS_COORDINATOR": "h:1", "OPTIMUS_NUM_PROCESSES": "2", "OPTIMUS_PROCESS_ID": "1"},
    )
    assert place(launch) == ("environment", "h:1", 2, 1)
    assert launch.local_devices is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OPTIMUS_COORDINATOR": "h:1"}, "set OPTIMUS_NUM_PROCESSES and OPTIMUS_PROCESS_ID too"),
        (
            {"OPTIMUS_COORDINATOR": "h", "OPTIMUS_NUM_PROCESSES": "2", "OPTIMUS_PROCESS_ID": "0"},
            "HOST:PORT",
        ),
        (
            {
                "OPTIMUS_COORDINATOR": "h:1",
                "OPTIMUS_NUM_PROCESSES": "two",
                "OPTIMUS_PROCESS_ID": "0",
            },
            "OPTIMUS_NUM_PROCESSES=two",
        ),
        (
            {"OPTIMUS_COORDINATOR": "h:1", "OPTIMUS_NUM_PROCESSES": "2", "OPTIMUS_PROCESS_ID": "2"},
            "OPTIMUS_PROCESS_ID to a number below",
        ),
    ],
)
def test_invalid_plain_variables_are_refused(found, variables, message):
    with pytest.raises(ConfigError, match=message):
        found(variables)


def test_a_task_of_srun_gets_its_place_from_slurm(found):
    launch = found(STEP)
    assert place(launch) == ("SLURM", f"gpu07:{61440 + 12}", 4, 2)
    assert launch.job == "12.0, start 0"
    assert found({"SLURM_RESTART_COUNT": "3"}).job == "12.0, start 3", (
        "who is late from the start before is told apart"
    )
    assert launch.local_devices is None
    assert str(launch) == "SLURM: process 2 of 4 of step 12.0 on gpu[07-09,11]"


def test_the_coordinator_address_can_be_overridden(found):
    assert found(STEP, {"JAX_COORDINATOR_PORT": "77"}).coordinator == "gpu07:77"
    assert found({"JAX_COORDINATOR_ADDRESS": "other:78"}).coordinator == "other:78"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("JAX_COORDINATOR_ADDRESS", "myhost"),
        ("JAX_COORDINATOR_ADDRESS", "myhost:abc"),
        ("JAX_COORDINATOR_ADDRESS", ":78"),
        ("JAX_COORDINATOR_PORT", "abc"),
        ("JAX_COORDINATOR_PORT", "0"),
        ("JAX_COORDINATOR_PORT", "99999"),
    ],
)
@pytest.mark.parametrize("launcher", [STEP, MPI], ids=["SLURM", "Open MPI"])
def test_an_invalid_coordinator_address_is_refused(found, launcher, variable, value):
    with pytest.raises(
        ConfigError, match=rf"{variable} names .*\n  given: {value}\n  do:    give .* such as"
    ):
        found(launcher, {variable: value})


def test_a_single_task_waits_for_no_others(found):
    launch = found(
        STEP,
        {
            "SLURM_NTASKS": "1",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_PROCID": "0",
            "SLURM_STEP_NODELIST": "gpu07",
        },
    )
    assert (launch.launcher, launch.is_alone, launch.coordinator) == ("SLURM", True, None)
    assert "the only process of step 12.0" in launch.why


def test_the_shell_of_a_slurm_allocation_is_a_single_process(found):
    """The shell of salloc is a step of one task, with the job's SLURM_NTASKS. JAX would wait for
    three more.
    """
    launch = found(
        STEP, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}
    )
    assert launch.is_alone


def test_a_batch_script_without_srun_is_a_single_process_with_a_reason(found):
    launch = found(
        STEP,
        {"SLURM_PROCID": "0"},
        without=["SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"],
    )
    assert launch.is_alone
    assert launch.why == "in SLURM job 12, and not started by srun, which would start its 4 tasks"


def test_mpirun_precedes_the_slurm_job_around_it(found):
    assert place(found(STEP, MPI)) == (
        "Open MPI",
        f"10.96.0.1:{1531576320 // 4096 % 4096 + 61440}",
        8,
        5,
    )


@pytest.mark.parametrize(
    ("environments", "devices"),
    [
        ((STEP,), None),  # one task on its node: all eight, where JAX would take the first
        (
            (
                STEP,
                {
                    "SLURM_NTASKS": "8",
                    "SLURM_STEP_NUM_TASKS": "8",
                    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
                    "SLURM_LOCALID": "1",
                },
            ),
            (4, 5, 6, 7),
        ),
        (
            (
                STEP,
                {
                    "SLURM_NTASKS": "32",
                    "SLURM_STEP_NUM_TASKS": "32",
                    "SLURM_STEP_TASKS_PER_NODE": "8(x4)",
                    "SLURM_LOCALID": "3",
                },
            ),
            (3,),
        ),
        (
            (
                STEP,
                {
                    "SLURM_NTASKS": "5",
                    "SLURM_STEP_NUM_TASKS": "5",
                    "SLURM_STEP_TASKS_PER_NODE": "2,1(x3)",
                    "SLURM_NODEID": "1",
                },
            ),
            None,
        ),
        (
            (
                STEP,
                {
                    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
                    "SLURM_NODEID": "1",
                    "SLURM_LOCALID": "1",
                    "SLURM_GPUS_PER_TASK": "8",
                },
            ),
            None,
        ),
        (
            (
                STEP,
                {
                    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
                    "SLURM_NODEID": "1",
                    "SLURM_LOCALID": "1",
                    "SLURM_GPUS_PER_TASK": "4",
                    "SLURM_GPU_BIND": "none",
                },
            ),
            (4, 5, 6, 7),
        ),
        (
            (
                STEP,
                {
                    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
                    "SLURM_NODEID": "1",
                    "SLURM_LOCALID": "1",
                    "JAX_LOCAL_DEVICE_IDS": "0",
                },
            ),
            None,
        ),
        ((MPI,), (2, 3)),
        (
            (
                {
                    "OPTIMUS_COORDINATOR": "h:1",
                    "OPTIMUS_NUM_PROCESSES": "2",
                    "OPTIMUS_PROCESS_ID": "1",
                    "OPTIMUS_LOCAL_ID": "1",
                    "OPTIMUS_NUM_LOCAL": "2",
                },
            ),
            (4, 5, 6, 7),
        ),
    ],
    ids=[
        "one per node",
        "two per node",
        "one per GPU",
        "uneven nodes",
        "bound by SLURM",
        "given by SLURM and not bound",
        "said by JAX's variable",
        "Open MPI",
        "plain",
    ],
)
def test_processes_of_a_node_share_its_gpus(found, environments, devices):
    assert found(EIGHT_GPUS, *environments).local_devices == devices


def test_with_one_visible_gpu_nothing_is_shared(found):
    assert found(MPI, {"CUDA_VISIBLE_DEVICES": "5"}).local_devices is None


def test_gpus_are_not_shared_in_a_run_on_cpus(found):
    assert found(MPI, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"}, on_cpu=True).local_devices is None


def test_gpus_that_do_not_divide_over_processes_are_refused(found):
    with pytest.raises(ConfigError, match="4 processes, 6 GPUs"):
        found(MPI, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"})


def test_without_a_gpu_driver_each_process_gets_one_gpu(found, monkeypatch):
    def fail():
        raise gpu_sharing.pynvml.NVMLError(gpu_sharing.pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(gpu_sharing.pynvml, "nvmlInit", fail)
    assert found(MPI).local_devices == (1,)


def test_a_pod_outside_an_indexed_job_is_a_single_process(found):
    launch = found({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "notebook-0"})
    assert launch.is_alone
    assert "not one of an indexed Job" in launch.why


def test_a_pod_of_an_indexed_job_needs_the_kubernetes_package(found, monkeypatch):
    monkeypatch.setattr(launch_detection, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"without the package `kubernetes`(.|\n)*optimus-jax\[k8s\]"
    ):
        found({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"})


def test_an_invalid_value_of_a_launcher_is_named(found):
    with pytest.raises(
        ConfigError,
        match=r"SLURM: (.|\n)*SLURM_STEP_NUM_TASKS=four(.|\n)*distributed.launcher=none",
    ):
        found(STEP, {"SLURM_STEP_NUM_TASKS": "four"})


def test_a_connection_made_by_the_program_is_used(found, monkeypatch):
    monkeypatch.setattr(launch_detection.jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(
        launch_detection,
        "global_state",
        SimpleNamespace(coordinator_address="h:1", num_processes=2, process_id=1),
    )
    assert place(found(STEP)) == ("program", "h:1", 2, 1)


def test_launches_compare_by_value():
    launch = Launch(launcher="SLURM", why="")
    assert launch == replace(launch)


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
"""Environment of process 3 of four on two hosts, as torchrun 2.13 and accelerate set them."""
TORCH = {"MASTER_ADDR": "h", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TF = (
    '{"cluster": {"chief": ["c:1"], "worker": ["w0:2", "w1:3"], "ps": ["p:4"]}, "task": {"type":'
    ' "%s", "index": %s}}'
)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            ("JAX's environment", "h:1", 2, 1),
        ),
        (
            {
                "JAX_COORDINATOR_ADDRESS": "h",
                "JAX_COORDINATOR_PORT": "6",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": "1",
            },
            ("JAX's environment", "h:6", 2, 1),
        ),
        (TORCHRUN, ("torchrun", f"h:{derived_port('29500 none')}", 4, 3)),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, ("torchrun", "h:29500", 4, 3)),
        (TORCHRUN | {"JAX_COORDINATOR_PORT": "77"}, ("torchrun", "h:77", 4, 3)),
        (TORCHRUN | {"PET_NNODES": "1:4"}, ("torchrun", f"h:{derived_port('29500 none')}", 4, 3)),
        (TORCH, ("torch.distributed's environment", "h:29500", 4, 3)),
        (
            TORCH | {"MASTER_ADDR": "fd00::1"},
            ("torch.distributed's environment", "[fd00::1]:29500", 4, 3),
        ),
        (
            TORCH | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "localhost"},
            ("torch.distributed's environment", "localhost:29500", 4, 3),
        ),
        (
            TORCH | {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "2"},
            ("PyTorchJob", "h:29500", 2, 1),
        ),
        (
            {
                "COORDINATOR_ADDRESS": "j-worker-0",
                "COORDINATOR_PORT": "6666",
                "NUM_PROCESSES": "2",
                "PROCESS_ID": "0",
            },
            ("JAXJob", "j-worker-0:6666", 2, 0),
        ),
        (
            {
                "JAX_COORDINATOR_IP": "10.0.0.1",
                "JAX_COORDINATOR_PORT": "6",
                "NNODES": "2",
                "NODE_RANK": "1",
            },
            ("MaxText's environment", "10.0.0.1:6", 2, 1),
        ),
        ({"TF_CONFIG": TF % ("worker", 1)}, ("TFJob", "c:1", 3, 2)),
        (
            {
                "CLUSTER_SPEC": (
                    '{"cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]}, "task":'
                    ' {"type": "workerpool1", "index": 0}}'
                )
            },
            ("Vertex AI", "a:2222", 2, 1),
        ),
        (
            {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"},
            ("SageMaker", f"algo-1:{derived_port('algo-1')}", 2, 1),
        ),
        (
            {
                "SKYPILOT_NUM_NODES": "2",
                "SKYPILOT_NODE_RANK": "1",
                "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
                "SKYPILOT_TASK_ID": "t",
            },
            ("SkyPilot", f"10.0.0.1:{derived_port('t')}", 2, 1),
        ),
        (
            {
                "AWS_BATCH_JOB_NUM_NODES": "2",
                "AWS_BATCH_JOB_NODE_INDEX": "0",
                "AWS_BATCH_JOB_ID": "j#0",
            },
            ("AWS Batch", f"localhost:{derived_port('j')}", 2, 0),
        ),
        (
            {
                "AWS_BATCH_JOB_NUM_NODES": "2",
                "AWS_BATCH_JOB_NODE_INDEX": "1",
                "AWS_BATCH_JOB_ID": "j#1",
                "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.1",
            },
            ("AWS Batch", f"10.0.0.1:{derived_port('j')}", 2, 1),
        ),
        # No MPI launcher except Open MPI 4 tells where process 0 is; on one host it can only be
        # there.
        (HYDRA, ("MPICH or Intel MPI", f"localhost:{derived_port('4711')}", 2, 1)),
        (
            {name.replace("OMPI_", "MV2_"): value for name, value in MPI.items()}
            | {"MV2_COMM_WORLD_LOCAL_SIZE": "8"},
            ("MVAPICH", f"localhost:{derived_port('4711')}", 8, 5),
        ),
        (
            {
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "PMIX_RANK": "1",
                "PMIX_NAMESPACE": "prterun-n1-12@1",
            },
            ("Open MPI", f"localhost:{derived_port('prterun-n1-12@1')}", 2, 1),
        ),
        (
            {
                "FLUX_TASK_RANK": "1",
                "FLUX_JOB_SIZE": "2",
                "FLUX_JOB_NNODES": "1",
                "FLUX_TASK_LOCAL_ID": "1",
                "FLUX_JOB_ID": "f1",
                "PMI_RANK": "1",
                "PMI_SIZE": "2",
            },
            ("Flux", f"localhost:{derived_port('f1')}", 2, 1),
        ),
        (
            {
                "PALS_RANKID": "1",
                "PMI_RANK": "1",
                "PMI_SIZE": "2",
                "PALS_LOCAL_RANKID": "1",
                "PALS_LOCAL_SIZE": "2",
                "PALS_APID": "a",
            },
            ("PALS", f"localhost:{derived_port('a')}", 2, 1),
        ),
        (
            {
                "HOROVOD_RANK": "1",
                "HOROVOD_SIZE": "2",
                "HOROVOD_LOCAL_RANK": "1",
                "HOROVOD_LOCAL_SIZE": "2",
            },
            ("horovodrun", f"localhost:{derived_port('4711')}", 2, 1),
        ),
        # With two launchers the inner one counts, and what it does not set comes from an outer one
        # that agrees.
        (
            STEP | TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
            ("torchrun", f"h:{derived_port('29500 none')}", 4, 3),
        ),
        (
            STEP
            | HYDRA
            | {
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "1",
                "MPI_LOCALNRANKS": "",
            },
            ("MPICH or Intel MPI", f"gpu07:{61440 + 12}", 2, 1),
        ),
        (STEP | {"WORLD_SIZE": "4", "MASTER_ADDR": "h"}, ("SLURM", f"gpu07:{61440 + 12}", 4, 2)),
        (
            STEP | {"WORLD_SIZE": "1", "RANK": "0", "PMI_SIZE": "1", "PMI_RANK": "0"},
            ("SLURM", f"gpu07:{61440 + 12}", 4, 2),
        ),
        (
            MPI | {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "8"},
            ("Open MPI", f"10.96.0.1:{1531576320 // 4096 % 4096 + 61440}", 8, 5),
        ),
        (
            {
                "MLP_WORKER_NUM": "2",
                "MLP_ROLE_INDEX": "1",
                "MLP_WORKER_0_HOST": "h",
                "MLP_WORKER_0_PORT": "9",
            },
            ("Volcengine", "h:9", 2, 1),
        ),
        (
            {"DMLC_NUM_WORKER": "2", "DMLC_WORKER_ID": "1", "JAX_COORDINATOR_ADDRESS": "h:9"},
            ("BytePS", "h:9", 2, 1),
        ),
        # several SLURM nodes on one machine
        (
            STEP | {"SLURM_STEP_NODELIST": "127.0.0.[1-3]"},
            ("SLURM", f"127.0.0.1:{61440 + 12}", 4, 2),
        ),
        (
            STEP | {"SLURM_STEP_NODELIST": "rack1-[2-3]-ib,x"},
            ("SLURM", f"rack1-2-ib:{61440 + 12}", 4, 2),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_each_launcher_forms_the_run(found, monkeypatch, environment, expected):
    monkeypatch.setattr(coordinator_address, "common_parent", lambda variable: 4711)
    launch = found(environment, {"JAX_PLATFORMS": "cpu"})
    assert place(launch) == expected
    assert launch.bind == (
        "127.0.0.1"
        if launch.coordinator.startswith("localhost") and expected[0] != "AWS Batch"
        else None
    )
    assert (
        launch.restarts == next(row.restarts for row in LAUNCHERS if row.name == launch.launcher)
        or "SLURM_JOB_ID" in environment
    )


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"WORLD_SIZE": "2"}, "set RANK too"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "set RANK too"),
        ({"RANK": "1"}, "set WORLD_SIZE too"),
        (TORCH | {"RANK": "4"}, "RANK=4"),
        (TORCH | {"RANK": "-1"}, "RANK=-1"),
        (TORCH | {"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
        (TORCH | {"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE=9"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "2.0", "RANK": "1"}, "WORLD_SIZE=2.0"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "set MASTER_ADDR too"),
        (TORCH | {"MASTER_PORT": "abc"}, "MASTER_PORT: h:abc"),
        (TORCH | {"MASTER_ADDR": "a b"}, "MASTER_ADDR and MASTER_PORT: a b"),
        (TORCH | {"MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "2"}, "on another one"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1"),
        ({"NODE_RANK": "1", "MASTER_ADDR": "h"}, "set NNODES too"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "JAX_COORDINATOR_ADDRESS"),
        ({"JAX_NUM_PROCESSES": "2"}, "set JAX_PROCESS_ID too"),
        (
            {"JAX_COORDINATOR_ADDRESS": "h", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            "JAX_COORDINATOR_ADDRESS names",
        ),
        ({"NUM_PROCESSES": "2", "PROCESS_ID": "1"}, "COORDINATOR_ADDRESS"),
        ({"COORDINATOR_ADDRESS": "h", "NUM_PROCESSES": "2"}, "set PROCESS_ID too"),
        (HYDRA | {"PMI_SIZE": "4"}, "does not say where"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, "does not say where"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "set OMPI_COMM_WORLD_RANK too"),
        ({"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "1"}, "does not say where"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "n"}, "PMIX_RANK=0"),
        ({"ALPS_APP_PE": "0"}, "ALPS_APP_PE=0"),
        ({"JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "1"}, "does not say where"),
        ({"VC_TASK_INDEX": "1"}, "VC_TASK_INDEX=1"),
        (
            {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "2"},
            "does not say where",
        ),
        ({"PBS_NODENUM": "3"}, "PBS_NODENUM=3"),
        ({"TF_CONFIG": TF % ("ps", 0)}, "no ps 0"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG"),
        ({"TF_CONFIG": "[" * 100_000}, "cannot be read"),
        ({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "c"}, "SM_HOSTS"),
        ({"PET_NNODES": "1:3", "PET_NODE_RANK": "0"}, "1:3 is a range"),
        (STEP | {"SLURM_JOB_ID": "x"}, "that SLURM has set"),
        (STEP | {"SLURM_PROCID": "7"}, "SLURM_PROCID=7"),
        # Each of four tasks would train its own run, or all four would be process 0.
        (STEP | TORCHRUN | {"GROUP_WORLD_SIZE": "1"}, "SLURM has started 4 processes"),
        (STEP | TORCH | {"WORLD_SIZE": "2", "RANK": "0"}, "SLURM has started 4"),
        (STEP | TORCH | {"RANK": "0"}, "do not agree"),
        (MPI | {"OMPI_MCA_orte_hnp_uri": "nonsense"}, "OMPI_MCA_orte_hnp_uri"),
        ({"OMPI_MCA_orte_hnp_uri": "nonsense"}, "fix or unset OMPI_MCA_orte_hnp_uri, or"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1"),
        ({"SLURM_PROCID": "1"}, "SLURM_PROCID=1"),
        ({"NODE_RANK": "1"}, "NODE_RANK=1"),
        (
            {"MPI_LOCALRANKID": "0", "LOCAL_RANK": "0", "SLURM_LOCALID": "2"},
            "given: SLURM_LOCALID=2",
        ),
        ({"MPI_LOCALNRANKS": "2"}, "MPI_LOCALNRANKS=2"),
        ({"PMIX_RANK": "0", "RANK_ID": "3"}, "RANK_ID=3"),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "1"}, "LOCAL_RANK=1"),
        (
            {"RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "but not how many processes there are\n  given: RANK=0 LOCAL_WORLD_SIZE=2",
        ),
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2"}, "several, but not which one this is\n"),
        ({"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX=1"),
        ({"DMLC_WORKER_ID": "1"}, "DMLC_WORKER_ID=1"),
        (
            {"DMLC_NUM_WORKER": "2", "DMLC_WORKER_ID": "0", "BYTEPS_LOCAL_SIZE": "8"},
            "BYTEPS_LOCAL_SIZE=8 processes on a host, which share DMLC_WORKER_ID",
        ),
        ({"MLP_ROLE_INDEX": "1"}, "set MLP_WORKER_NUM too"),
        ({"NODE_RANK": "1", "MASTER_ADDR": "h"}, "given: NODE_RANK=1 MASTER_ADDR=h\n"),
        ({"OPTIMUS_NUM_PROCESSES": "1"}, "the only one, but not which"),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
            "do:    set JAX_COORDINATOR_ADDRESS",
        ),
        # The only task of its step, in which another launcher has started several processes.
        (
            STEP
            | {
                "SLURM_STEP_NUM_TASKS": "1",
                "SLURM_PROCID": "0",
                "RANK": "0",
                "LOCAL_RANK": "1",
            },
            "given: RANK=0 LOCAL_RANK=1",
        ),
        (
            {
                "TF_CONFIG": (
                    '{"cluster": {"worker": ["a b:1", "c:1"]}, "task": {"type": "worker",'
                    ' "index": 1}}'
                )
            },
            "do:    set JAX_COORDINATOR_ADDRESS=HOST:PORT to the host of",
        ),
        (
            {
                "CLUSTER_SPEC": (
                    '{"cluster": {"workerpool0": ["a/b:1", "c:1"]}, "task": {"type": "workerpool0",'
                    ' "index": 1}}'
                )
            },
            "do:    set JAX_COORDINATOR_ADDRESS=HOST",
        ),
        ({"MACHINE_RANK": "1"}, "a node's rank says that (.|\n)*given: MACHINE_RANK=1"),
        ({"GROUP_RANK": "2"}, "GROUP_RANK=2"),
        ({"CROSS_RANK": "1"}, "CROSS_RANK=1"),
        ({"NODE_RANK": "0", "MACHINE_RANK": "3"}, "MACHINE_RANK=3"),
        ({"MACHINE_RANK": "one"}, "MACHINE_RANK=one"),
        ({"HOROVOD_CROSS_RANK": "1"}, "CROSS_RANK=1"),
        ({"LOCAL_RANK": "-1", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=-1"),
        ({"LOCAL_RANK": "-1", "RANK": "1"}, "given: RANK=1\n"),
        ({"LOCAL_RANK": "-2"}, "LOCAL_RANK=-2"),
        ({"JAX_LOCAL_DEVICE_IDS": "abc"}, "JAX_LOCAL_DEVICE_IDS=abc"),
    ],
)
def test_incomplete_launcher_variables_are_refused_with_what_to_set(
    found, monkeypatch, environment, named
):
    monkeypatch.setattr(coordinator_address, "common_parent", lambda variable: None)
    with pytest.raises(ConfigError, match=named) as raised:
        found(environment)
    assert (
        "--coordinator" in str(raised.value)
        or "_COORDINATOR_" in str(raised.value)
        or "JAX_LOCAL" in str(raised.value)
    )
    if "JAX_LOCAL_DEVICE_IDS" not in environment:
        assert found(environment, config=DistributedConfig(launcher="none")).is_alone
        assert place(
            found(
                environment,
                config=DistributedConfig(coordinator="h:1", num_processes=2, process_id=1),
            )
        ) == ("flags", "h:1", 2, 1)


@pytest.mark.parametrize(
    "environment",
    [
        {"MASTER_ADDR": "h", "MASTER_PORT": "29500"},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "", "RANK": ""},
        {"RANK": "0"},
        {"LOCAL_RANK": "0"},
        {"LOCAL_RANK": "-1"},
        {"RANK": "-1", "WORLD_SIZE": "-1", "LOCAL_RANK": "-1"},
        {"WORLD_SIZE": "1", "LOCAL_RANK": "-1"},
        {"MACHINE_RANK": "0", "GROUP_RANK": "0", "CROSS_RANK": "0"},
        {"NODE_RANK": "-1"},
        {"KUBERNETES_SERVICE_HOST": "", "JOB_COMPLETION_INDEX": "0"},
        {"NODE_RANK": "0"},
        {"SLURM_PROCID": "0"},
        {"PMI_SIZE": "1"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "8"},
        {"NUM_PROCESSES": "8"},
        {"PROCESS_ID": "17"},
        {"NNODES": "4"},
        {"TF_CONFIG": '{"environment": "cloud"}'},
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"},
        {"PBS_NODENUM": "0"},
        {"VC_TASK_INDEX": "0"},
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "h:1"},
        STEP
        | {
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_PROCID": "0",
            "PMIX_RANK": "0",
            "PMIX_NAMESPACE": "slurm.pmix.12.0",
        },
        {"OPTIMUS_COORDINATOR": "h:1", "OPTIMUS_NUM_PROCESSES": "1", "OPTIMUS_PROCESS_ID": "0"},
        {
            "MPI_LOCALRANKID": "0",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "SLURM_LOCALID": "0",
            "FLUX_TASK_LOCAL_ID": "0",
        },
        {"LOCAL_WORLD_SIZE": "1", "MPI_LOCALNRANKS": "1"},
        {"LOCAL_SIZE": "8"},
        {"BYTEPS_LOCAL_SIZE": "1"},
        {"MLP_ROLE_INDEX": "0"},
        {"MLP_WORKER_NUM": "1", "MLP_ROLE_INDEX": "0", "MLP_WORKER_0_HOST": "h"},
        {"JOB_COMPLETION_INDEX": "0"},
        {"DMLC_WORKER_ID": "0"},
        STEP
        | {
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_PROCID": "0",
            "LOCAL_RANK": "0",
            "MPI_LOCALRANKID": "0",
        },
        {
            "SLURM_JOB_ID": "12",
            "SLURM_NTASKS": "8",
            "SLURM_NTASKS_PER_NODE": "4",
            "SLURM_TASKS_PER_NODE": "4(x2)",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        },
    ],
)
def test_leftover_variables_of_a_shell_mean_a_single_process(found, environment):
    assert found(environment).is_alone


NEEDED = {
    "TORCHELASTIC_RUN_ID": "none",
    "PET_NNODES": "4",
    "PMIX_NAMESPACE": "n",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_NODELIST": "n1,n2",
    "SM_HOSTS": '["a","b"]',
    "SM_CURRENT_HOST": "b",
    "TF_CONFIG": TF % ("worker", 1),
    "PALS_RANKID": "1",
    "SLURM_PROCID": "1",
    "CLUSTER_SPEC": (
        '{"cluster":{"workerpool0":["a:1","b:1"]},"task":{"type":"workerpool0","index":1}}'
    ),
    "AWS_BATCH_JOB_NUM_NODES": "4",
    "DMLC_NUM_WORKER": "4",
}
"""Values of the variables by which rows of the table are recognised."""


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_error_messages_name_variables_that_can_be_set(monkeypatch, launcher):
    """For every subset of what a launcher may set, with each of its names: the run is formed, or
    the message says what is set and what to set.
    """
    monkeypatch.setattr(coordinator_address, "common_parent", lambda variable: None)
    values = {
        "count": "4",
        "index": "1",
        "address": "h:1" if launcher.is_explicit else "h",
        "local_count": "2",
        "local_index": "1",
    }
    numbers = values.keys() - {"address"}
    names = {
        field: [name for name in getattr(launcher, field) if " " not in name] for field in values
    }
    for fields in itertools.chain.from_iterable(
        itertools.combinations([field for field in values if names[field]], n) for n in range(1, 6)
    ):
        for place in range(max(len(names[field]) for field in fields)):
            environment = {name: NEEDED[name] for name in launcher.needs}
            environment |= {
                name: values[field]
                for field in fields
                for name in [names[field][place % len(names[field])]]
            }
            with monkeypatch.context() as patch:
                patch.setattr(os, "environ", environment)
                try:
                    launch = find_launch(AUTO, on_cpu=True)
                except ConfigError as error:
                    what, given, do = str(error).split("\n")
                else:
                    silent = (
                        launcher.min_fields == 2 and not {"index", "address"} & set(fields)
                    ) or environment.keys() <= {
                        "LOCAL_SIZE",
                        "MASTER_ADDR",
                        "NUM_PROCESSES",
                        "PROCESS_ID",
                        "COORDINATOR_ADDRESS",
                        "BYTEPS_LOCAL_SIZE",
                    }
                    assert not launch.is_alone or silent or not numbers & set(fields), environment
                    continue
            if "JAX_COORDINATOR_ADDRESS names" in what:  # it is there, and names no port
                continue
            shown_variables = dict(
                pair.split("=", 1)
                for pair in given.removeprefix("  given: ").split(": ")[0].split(" ")
            )
            assert shown_variables.items() <= environment.items(), given
            to_set = re.match(r"  do:    set (.*?) too,", do)
            for name in re.split(" and | or ", to_set[1]) if to_set else ():
                assert re.fullmatch(r"\w+", name), do
                assert name not in environment, do
            if "but not" in what:
                assert ("how many" in what) != bool(
                    set(variables_of(*launcher.count)) & environment.keys()
                ), what
                assert ("which one" in what) != bool(
                    set(variables_of(*launcher.index)) & environment.keys()
                ), what


def test_local_processes_of_torchrun_share_the_gpus_of_their_host(found):
    assert found(EIGHT_GPUS, TORCHRUN).local_devices == (4, 5, 6, 7)
    with pytest.raises(
        ConfigError,
        match=r"nothing says how many(.|\n)*local process 1, 8 GPUs(.|\n)*LOCAL_WORLD_SIZE",
    ):
        found(TORCH, {"LOCAL_RANK": "1"}, without=["TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"])


def test_the_common_parent_is_the_first_ancestor_without_the_variable(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    script = (
        "from optimus_jax.cluster.process_info import common_parent;"
        " print(common_parent('PMI_RANK'))"
    )
    # under a shell, which is not the launcher
    command = f'{sys.executable} -c "{script}" && true'
    assert int(subprocess.check_output(["bash", "-c", command], text=True)) == os.getpid()


def test_unconnected_ray_train_workers_are_refused(found, monkeypatch):
    context = SimpleNamespace(get_world_size=lambda: 2, get_world_rank=lambda: 1)
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: context))
    with pytest.raises(ConfigError, match=r"Ray Train(.|\n)*worker 1 of 2(.|\n)*use_gpu=True"):
        found()


@pytest.mark.parametrize(
    ("cluster", "environment"),
    [
        (OmpiCluster, MPI),
        (SlurmCluster, STEP),
        (SlurmCluster, STEP | {"SLURM_STEP_NODELIST": "n1,n2"}),
        (
            OmpiCluster,
            MPI | {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b,2620:10d::2]:43370"},
        ),
    ],
)
def test_coordinator_addresses_are_derived_as_jax_derives_them(found, cluster, environment):
    launch = found(environment)
    host, _, port = cluster.get_coordinator_address(
        timeout_secs=None, override_coordinator_port=None
    ).rpartition(":")
    assert launch.coordinator == f"{f'[{host}]' if ':' in host else host}:{port}"


def table_row(launcher: Launcher) -> str:
    """The launcher's row in docs/clusters.md."""

    def cell(names: tuple[str, ...]) -> str:
        return " or ".join(name if " " in name else f"`{name}`" for name in names)

    needs = " and ".join(
        [cell((name,)) for name in launcher.needs]
        + [f"no {cell((name,))}" for name in launcher.unless]
    )
    where = cell(launcher.address)
    if launcher.port:
        port = cell(launcher.port)
        where += f", {port}" if "port " in port else f", port {port}"
    local = ", ".join(filter(None, (cell(launcher.local_index), cell(launcher.local_count))))
    cells = (
        launcher.name,
        needs,
        cell(launcher.count),
        cell(launcher.index),
        where,
        local,
        "yes" if launcher.restarts else "",
    )
    return "| " + " | ".join(text or "-" for text in cells) + " |"


def test_the_docs_table_of_launchers_matches_the_code():
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    for row in LAUNCHERS:
        assert table_row(row) in page, "docs/clusters.md lacks this row"
