"""Who has started this process, told from environments as the engines make them."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from optimus_jax.config import DistributedConfig
from optimus_jax.errors import ConfigError
from optimus_jax.mesh import engines
from optimus_jax.mesh.engines import Launch, find_launch

AUTO = DistributedConfig()
STEP = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[07-09,11]", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}
"""Of task 2 of four, one per node."""
MPI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5",
       "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
EIGHT_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """Whatever has started the tests."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "OPTIMUS_", "KUBERNETES_", "JOB_COMPLETION", "JAX_", "CUDA_VISIBLE")):
            monkeypatch.delenv(name)


@pytest.fixture
def found(monkeypatch):
    """What is found in an environment."""
    def find(*environments, config=AUTO, without=(), on_cpu=False):
        for environment in environments:
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
        for name in without:
            monkeypatch.delenv(name)
        return find_launch(config, on_cpu=on_cpu)
    return find


def place(launch: Launch):
    return launch.engine, launch.coordinator, launch.num_processes, launch.process_id


def test_a_laptop_has_one_process(found):
    assert place(found()) == ("nobody", None, 1, 0)


def test_flags_win(found):
    config = DistributedConfig(coordinator="h:1", num_processes=3, process_id=2)
    assert place(found(STEP, MPI, config=config)) == ("flags", "h:1", 3, 2)


@pytest.mark.parametrize(("coordinator", "bind", "listens_on"), [
    ("10.0.0.1:1", None, "10.0.0.1"), ("[fd00::1]:1", None, "fd00::1"), ("localhost:1", None, "127.0.0.1"), ("node7:1", None, None),
    ("node7:1", "10.0.0.1", "10.0.0.1"), ("10.0.0.1:1", "0.0.0.0", "0.0.0.0")])
def test_process_0_listens_on_the_address_that_was_named(found, coordinator, bind, listens_on):
    config = DistributedConfig(coordinator=coordinator, num_processes=3, process_id=2, bind=bind)
    assert found(config=config).bind == listens_on
    variables = dict(zip(engines.VARIABLES, (coordinator, "3", "2"), strict=True))
    assert found(variables, config=DistributedConfig(bind=bind)).bind == listens_on


def test_under_an_engine_it_listens_on_all_addresses_or_the_one_that_is_asked_for(found):
    assert found(MPI).bind is None
    assert found(MPI, config=DistributedConfig(bind="10.0.0.1")).bind == "10.0.0.1"


def test_nobody_is_asked_if_that_is_said(found):
    launch = found(STEP, config=DistributedConfig(engine="none"))
    assert launch.is_alone
    assert "distributed.engine=none" in launch.why


def test_plain_variables(found):
    launch = found(STEP, {"OPTIMUS_COORDINATOR": "h:1", "OPTIMUS_NUM_PROCESSES": "2", "OPTIMUS_PROCESS_ID": "1"})
    assert place(launch) == ("environment", "h:1", 2, 1)
    assert launch.local_devices is None


@pytest.mark.parametrize(("variables", "message"), [
    ({"OPTIMUS_COORDINATOR": "h:1"}, "set OPTIMUS_NUM_PROCESSES and OPTIMUS_PROCESS_ID too"),
    ({"OPTIMUS_COORDINATOR": "h", "OPTIMUS_NUM_PROCESSES": "2", "OPTIMUS_PROCESS_ID": "0"}, "HOST:PORT"),
    ({"OPTIMUS_COORDINATOR": "h:1", "OPTIMUS_NUM_PROCESSES": "two", "OPTIMUS_PROCESS_ID": "0"}, "OPTIMUS_NUM_PROCESSES=two"),
    ({"OPTIMUS_COORDINATOR": "h:1", "OPTIMUS_NUM_PROCESSES": "2", "OPTIMUS_PROCESS_ID": "2"}, "OPTIMUS_PROCESS_ID to a number below")])
def test_plain_variables_that_are_no_use(found, variables, message):
    with pytest.raises(ConfigError, match=message):
        found(variables)


def test_a_task_of_srun(found):
    launch = found(STEP)
    assert place(launch) == ("SLURM", f"gpu07:{61440 + 12}", 4, 2)
    assert launch.job == "12.0, start 0"
    assert found({"SLURM_RESTART_COUNT": "3"}).job == "12.0, start 3", "who is late from the start before is told apart"
    assert launch.local_devices is None
    assert str(launch) == "SLURM: process 2 of 4 of step 12.0 on gpu[07-09,11]"


def test_the_address_can_be_given(found):
    assert found(STEP, {"JAX_COORDINATOR_PORT": "77"}).coordinator == "gpu07:77"
    assert found({"JAX_COORDINATOR_ADDRESS": "other:78"}).coordinator == "other:78"


@pytest.mark.parametrize(("variable", "value"), [
    ("JAX_COORDINATOR_ADDRESS", "myhost"), ("JAX_COORDINATOR_ADDRESS", "myhost:abc"), ("JAX_COORDINATOR_ADDRESS", ":78"), ("JAX_COORDINATOR_PORT", "abc"),
    ("JAX_COORDINATOR_PORT", "0"), ("JAX_COORDINATOR_PORT", "99999")])
@pytest.mark.parametrize("engine", [STEP, MPI], ids=["SLURM", "Open MPI"])
def test_an_address_that_is_none(found, engine, variable, value):
    with pytest.raises(ConfigError, match=rf"{variable} names .*\n  given: {value}\n  do:    give .* such as"):
        found(engine, {variable: value})


def test_a_single_task_waits_for_nobody(found):
    launch = found(STEP, {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "gpu07"})
    assert (launch.engine, launch.is_alone, launch.coordinator) == ("SLURM", True, None)
    assert "the only process of step 12.0" in launch.why


def test_the_shell_of_an_allocation_is_alone_in_it(found):
    """salloc's: a step of one task, with the job's SLURM_NTASKS. JAX would wait for three more."""
    launch = found(STEP, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"})
    assert launch.is_alone


def test_a_batch_script_without_srun_says_so(found):
    launch = found(STEP, without=["SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"])
    assert launch.is_alone
    assert launch.why == "in SLURM job 12, and not started by srun, which would start its 4 tasks"


def test_mpirun_comes_before_the_slurm_that_it_runs_in(found):
    assert place(found(STEP, MPI)) == ("Open MPI", f"10.96.0.1:{1531576320 // 4096 % 4096 + 61440}", 8, 5)


@pytest.mark.parametrize(("environments", "devices"), [
    ((STEP,), None),  # alone on its node: all eight, where JAX would take the first
    ((STEP, {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_LOCALID": "1"}), (4, 5, 6, 7)),
    ((STEP, {"SLURM_NTASKS": "32", "SLURM_STEP_NUM_TASKS": "32", "SLURM_STEP_TASKS_PER_NODE": "8(x4)", "SLURM_LOCALID": "3"}), (3,)),
    ((STEP, {"SLURM_NTASKS": "5", "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2,1(x3)", "SLURM_NODEID": "1"}), None),
    ((STEP, {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1", "SLURM_LOCALID": "1", "SLURM_GPUS_PER_TASK": "8"}), None),
    ((STEP, {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1", "SLURM_LOCALID": "1", "SLURM_GPUS_PER_TASK": "4", "SLURM_GPU_BIND": "none"}), (4, 5, 6, 7)),
    ((STEP, {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1", "SLURM_LOCALID": "1", "JAX_LOCAL_DEVICE_IDS": "0"}), None),
    ((MPI,), (2, 3)),
    (({"OPTIMUS_COORDINATOR": "h:1", "OPTIMUS_NUM_PROCESSES": "2", "OPTIMUS_PROCESS_ID": "1", "OPTIMUS_LOCAL_ID": "1", "OPTIMUS_NUM_LOCAL": "2"},), (4, 5, 6, 7)),
], ids=["one per node", "two per node", "one per GPU", "uneven nodes", "bound by SLURM", "given by SLURM and not bound", "said by JAX's variable", "Open MPI", "plain"])
def test_the_processes_of_a_node_share_its_gpus(found, environments, devices):
    assert found(EIGHT_GPUS, *environments).local_devices == devices


@pytest.mark.parametrize("environment", [{"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, {"PMI_SIZE": "2", "PMI_RANK": "0"}])
def test_a_launcher_that_jax_does_not_know_is_not_taken_for_nobody(found, environment):
    """Open MPI 5 says how many there are, and not where."""
    with pytest.raises(ConfigError, match=r"MPI launcher.*\n.*_SIZE=.*\n.*OPTIMUS_COORDINATOR"):
        found(environment)
    assert found(environment, config=DistributedConfig(engine="none")).is_alone


def test_each_sees_its_own_gpu(found):
    assert found(MPI, {"CUDA_VISIBLE_DEVICES": "5"}).local_devices is None


def test_gpus_are_not_counted_for_a_run_on_the_cpu(found):
    assert found(MPI, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"}, on_cpu=True).local_devices is None


def test_gpus_that_cannot_be_shared(found):
    with pytest.raises(ConfigError, match="4 processes, 6 GPUs"):
        found(MPI, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"})


def test_where_no_driver_counts_gpus_each_process_has_one(found, monkeypatch):
    def fail():
        raise engines.pynvml.NVMLError(engines.pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(engines.pynvml, "nvmlInit", fail)
    assert found(MPI).local_devices == (1,)


def test_a_pod_that_is_not_of_an_indexed_job_is_alone(found):
    launch = found({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "notebook-0"})
    assert launch.is_alone
    assert "not one of an indexed Job" in launch.why


def test_a_pod_of_an_indexed_job_does_not_guess(found, monkeypatch):
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"without the package `kubernetes`(.|\n)*optimus-jax\[k8s\]"):
        found({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"})


def test_an_engine_that_says_nonsense_is_named(found):
    with pytest.raises(ConfigError, match=r"SLURM has started this process(.|\n)*ValueError(.|\n)*distributed.engine=none"):
        found(STEP, {"SLURM_STEP_NUM_TASKS": "four"})


def test_what_the_program_has_connected_is_left_alone(found, monkeypatch):
    monkeypatch.setattr(engines.jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(engines, "global_state", SimpleNamespace(coordinator_address="h:1", num_processes=2, process_id=1))
    assert place(found(STEP)) == ("program", "h:1", 2, 1)


def test_launches_are_values():
    launch = Launch(engine="SLURM", why="")
    assert launch == replace(launch)
