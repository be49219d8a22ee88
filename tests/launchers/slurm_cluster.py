"""A SLURM cluster of three nodes on this machine, without systemd: one controller and three
daemons, each with the name of a node.

It writes only into its own folder, with its own key and socket. It needs root, and Debian's
packages slurm-wlm and munge. Its nodes are named after addresses of this machine (127.0.0.1 to .3),
so that names resolve without /etc/hosts.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from jobs import TIMEOUT_S, environments, python_of, until, without_launcher_variables

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "srun",
    "sbatch",
    "scontrol",
    "squeue",
    "sinfo",
    "scancel",
)
NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")

# KillWait, SlurmdTimeout and the others are small, so that tests are short; 5 is the least
# cred_expire that SLURM takes: a requeued job waits a second longer than that, and by default two
# minutes.
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={there}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
StateSaveLocation={there}/state
SlurmdSpoolDir={there}/spool-%n
SlurmctldPidFile={there}/slurmctld.pid
SlurmdPidFile={there}/slurmd-%n.pid
SlurmctldLogFile={there}/slurmctld.log
SlurmdLogFile={there}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
KillWait=2
BatchStartTimeout=10
MessageTimeout=10
SlurmdTimeout=5
InactiveLimit=0
JobRequeue=1
RequeueExit={requeue_exit}
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 \
    PreemptMode=REQUEUE GraceTime=20 OverSubscribe=EXCLUSIVE
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing_requirement() -> str | None:
    """Why SLURM cannot run here; None: it can."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(missing)} here (Debian: apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "SLURM's daemons were tried as root only"


class Slurm:
    """A cluster, while entered; its nodes are idle at the start.

    Args:
      requeue_exit: exit code with which SLURM itself requeues a job.
    """

    def __init__(self, *, requeue_exit: int = 75) -> None:
        # Paths of its sockets may not be longer than 107 characters, which a test's own folder may
        # exceed.
        self._folder = tempfile.TemporaryDirectory(prefix="slurm-")
        self.there = there = Path(self._folder.name)
        self._path = there / "slurm.conf"
        self._environment = without_launcher_variables() | {"SLURM_CONF": str(self._path)}
        ports = _free_ports(1 + len(NODES))
        nodes = (
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port}"
            " CPUs=2 RealMemory=1000 State=UNKNOWN"
            for name, port in zip(NODES, ports[1:], strict=True)
        )
        self._path.write_text(
            CONFIGURATION.format(
                there=there,
                host=socket.gethostname(),
                ports=ports,
                requeue_exit=requeue_exit,
                nodes="\n".join(nodes),
                names=",".join(NODES),
            )
        )

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def _start(self) -> None:
        (self.there / "state").mkdir()
        key = self.there / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        own = {name: self.there / f"munge.{name}" for name in ("socket", "log", "pid", "seed")}
        self._call(
            "munged",
            "--force",
            f"--socket={own['socket']}",
            f"--key-file={key}",
            f"--log-file={own['log']}",
            f"--pid-file={own['pid']}",
            f"--seed-file={own['seed']}",
        )
        self._call("slurmctld", "-i", "-f", str(self._path))
        for name in NODES:
            self._call("slurmd", "-N", name, "-f", str(self._path))
        self.until(
            lambda: (
                self.run(
                    "sinfo", "--noheader", "--states=idle", "--partition=main", "--format=%D"
                ).stdout.strip()
                == str(len(NODES))
            ),
            "the nodes are idle",
        )

    def _stop(self) -> None:
        """End the daemons and whatever they have started: every process with our configuration in
        its environment.
        """
        while pids := [
            pid
            for pid, environment in environments()
            if environment.get("SLURM_CONF") == str(self._path)
        ]:
            for pid in pids:  # more than once: a daemon may be about to start something
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._folder.cleanup()

    def run(
        self, *command: str, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of SLURM to its end."""
        return subprocess.run(
            command,
            env=self._environment | (environment or {}),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )

    def state(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def tasks(self, job: str) -> dict[int, int]:
        """Pids of a job's tasks, by the number of the task."""
        found = {}
        for pid, environment in environments():
            if (
                environment.get("SLURM_CONF") == str(self._path)
                and environment.get("SLURM_JOB_ID") == job
                and "SLURM_STEP_NODELIST" in environment
                and python_of(environment, pid)
            ):
                found[int(environment["SLURM_PROCID"])] = pid
        return found

    def until(self, happens: Callable[[], bool], what: str) -> None:
        """Wait for a condition."""
        until(happens, what, self.logs)

    def logs(self) -> str:
        """The ends of all logs of daemons and jobs."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.there.glob("*.log"))
        )

    def lose(self, node: str) -> None:
        """Kill a node with everything on it, and tell the controller, which would otherwise wait
        for SlurmdTimeout.
        """
        for pid, environment in environments():
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            is_daemon = environment.get("SLURM_CONF") == str(self._path) and command.split("\0")[
                :3
            ] == ["slurmd", "-N", node]
            if is_daemon or (
                environment.get("SLURMD_NODENAME") == node
                and environment.get("SLURM_CONF") == str(self._path)
            ):
                os.kill(pid, signal.SIGKILL)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def _call(self, *command: str) -> None:
        # The daemons keep their standard streams: a pipe would never end.
        subprocess.run(
            command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=True,
        )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
