"""A SLURM cluster of virtual nodes on this host: own daemons, own sockets and ports, gone afterwards.

Needs root and Debian's slurmctld, slurmd, slurm-client and munge. Each node pretends to have 8 GPUs and 64 cores, so
the shipped batch script runs unchanged. Of the two partitions `high` preempts `low`.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.slurm.free_ports import free_ports

NODES = ("n0", "n1")
COMMAND_LIMIT_S = 30.0
START_LIMIT_S = 60.0

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_delay=1
PriorityType=priority/basic
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
SlurmdTimeout=300
KillWait=20
MinJobAge=600
JobRequeue=1
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} {sizes}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} {sizes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=10
"""
SIZES = "CPUs=64 Sockets=1 CoresPerSocket=64 ThreadsPerCore=1 RealMemory=512000 Gres=gpu:8 State=UNKNOWN"


class Cluster:
    """`with Cluster(base) as cluster`; base is a short path, since sockets lie in it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._env = {**os.environ, "SLURM_CONF": str(base / "slurm.conf")}
        for name in [name for name in self._env if name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF"]:
            del self._env[name]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            self._configure()
            self._start("munged", *self._munged())
            wait_for(lambda: (self.base / "munge.socket").is_socket(), START_LIMIT_S, "munged")
            self._start("slurmctld", "slurmctld", "-D")
            for node in NODES:
                self.start_node(node)
            wait_for(lambda: self.states() == {node: "idle" for node in NODES}, START_LIMIT_S, "idle nodes")
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, *command: str, check: bool = True, **environment: str) -> str:
        """Output of a SLURM client."""
        done = subprocess.run(
            command, env=self._env | environment, cwd=self.base, capture_output=True, text=True, check=False,
            timeout=COMMAND_LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: str, **environment: str) -> str:
        """sbatch; returns the job's id."""
        return self.run("sbatch", "--parsable", "--output", f"{self.base}/%j.out", *arguments, **environment)

    def output(self, job: str) -> str:
        path = self.base / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def states(self) -> dict[str, str]:
        """Short state of each node."""
        said = self.run("sinfo", "-hN", "-p", "low", "-o", "%N %t", check=False)
        return dict(line.split() for line in said.splitlines())

    def wait_state(self, job: str, state: str, limit_s: float) -> dict[str, str]:
        """The job, once it is in `state` for good or has got that far."""
        wait_for(lambda: self.job(job)["JobState"] == state, limit_s, f"job {job} {state}", lambda: self.output(job))
        return self.job(job)

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """As a power cut: the daemon and all that it started are gone at once."""
        for process in self._of_this_cluster():
            if process.pid == self._daemons[node].pid or _variable(process, "SLURMD_NODENAME") == node:
                _kill(process)
            elif process.name() == "slurmstepd" and process.ppid() == self._daemons[node].pid:
                _kill(process)
        self._daemons[node].wait(timeout=COMMAND_LIMIT_S)

    def ranks(self) -> list[psutil.Process]:
        """The processes that train, of all jobs."""
        found = [process for process in self._of_this_cluster() if _variable(process, "LOCAL_RANK")]
        return [process for process in found if "recipes." in " ".join(process.cmdline())]

    def lose_node(self, node: str) -> None:
        """Kill it, let SLURM notice, and bring it back."""
        self.kill_node(node)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        self.start_node(node)
        self.run("scontrol", "update", f"nodename={node}", "state=resume")

    def _configure(self) -> None:
        for folder in ("state", "dev", *(f"spool/{node}" for node in NODES)):
            (self.base / folder).mkdir(parents=True)
        host = socket.gethostname().split(".")[0]
        ports = free_ports(3)
        (self.base / "slurm.conf").write_text(CONF.format(host=host, base=self.base, ports=ports, sizes=SIZES))
        (self.base / "gres.conf").write_text(f"Name=gpu File={self.base}/dev/gpu[0-7]\n")
        for index in range(8):
            os.mknod(self.base / "dev" / f"gpu{index}", 0o20666, os.makedev(1, 3))
        key = self.base / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def _munged(self) -> list[str]:
        kinds = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        files = [f"--{option}={self.base}/munge.{kind}" for option, kind in kinds.items()]
        return ["munged", "--foreground", "--force", *files]

    def _start(self, name: str, program: str, *arguments: str) -> None:
        path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        assert path is not None, f"{program} is not installed"
        with (self.base / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [path, *arguments], env=self._env, cwd=self.base, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _of_this_cluster(self) -> list[psutil.Process]:
        """Every process that was started with this cluster's slurm.conf, but not this one."""
        mine = self._env["SLURM_CONF"]
        return [p for p in psutil.process_iter() if p.pid != os.getpid() and _variable(p, "SLURM_CONF") == mine]

    def _end(self) -> None:
        if (self.base / "slurmctld.pid").exists():
            self.run("scancel", "--signal=KILL", "--full", "--user=root", check=False)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(timeout=10)
        for process in self._of_this_cluster():
            _kill(process)


def wait_for(
    is_true: Callable[[], bool], limit_s: float, what: str, explain: Callable[[], str] = lambda: ""
) -> None:
    """Poll until `is_true`, fail after `limit_s` seconds."""
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline_s, f"no {what} within {limit_s:g} s\n{explain()}"
        time.sleep(0.1)


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, OSError):
        return None


def _kill(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return
