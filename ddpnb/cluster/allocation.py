"""How agents are started: over ssh, in a job of Slurm, by MPI, or by a profile (kernel).

Whichever starts them, a process on this host passes the frames on between the kernel and an agent.
Over ssh the engines' sockets are forwarded too.  The others forward none: there the engines
connect to the controller's ports, which CurveZMQ guards, with keys from a file in the user's home.
"""

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ddpnb.cluster.placement import ClusterSpec, parse_hosts, parse_slurm
from ddpnb.cluster.profile import Profile
from ddpnb.cluster.ssh import explain, start_agent
from ddpnb.cluster.starter import AgentStarter, Started, own_address
from ddpnb.cluster.tunnels import Tunnels
from ddpnb.protocol.errors import UserError

QUEUE_SECONDS = 600.0
"""How long a job may wait in Slurm's queue, if nothing else is said."""
POLL_SECONDS = 0.1
REPORT_SECONDS = 2.0
ANSWER_SECONDS = 5.0
"""How long Slurm may take to answer a question; without an answer, it is not asked again."""
LIST_SECONDS = 60.0
"""How long MPI may take to list its hosts."""
END_SECONDS = 15.0
"""How long Slurm may take to end a job."""


class Ssh(AgentStarter):
    """Hosts that the user names, over ssh."""

    def __init__(self, hosts: str) -> None:
        self.hosts = hosts

    def start(
        self, host: str, token: str, *, python: str, sockets: Sequence[Path], log: Path
    ) -> Started:
        """Start a host's agent; see ``ssh.start_agent``."""
        return start_agent(host, token, python=python, sockets=sockets, log=log)


class Slurm(AgentStarter):
    """The hosts of a job, which ``salloc`` holds: it lasts until this process lets go of it."""

    def __init__(
        self, spec: ClusterSpec, folder: Path, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        for program in ("salloc", "srun", "squeue", "scontrol"):
            if shutil.which(program) is None:
                raise UserError(
                    f"There is no {program} on this host: --engines slurm needs Slurm's programs."
                )
        assert spec.num_ranks is not None
        seconds = QUEUE_SECONDS if spec.timeout is None else spec.timeout
        self._size = spec.ranks_per_host or spec.num_ranks
        self._num_hosts = spec.num_ranks // self._size
        self._ways: Tunnels | None = None
        self._name = f"ddpnb-{secrets.token_hex(4)}"
        self.job = ""
        """Its number, once it runs."""
        self._log = folder / "salloc.log"
        self._granted = folder / "salloc.txt"
        with self._log.open("wb") as errors, self._granted.open("wb") as granted:
            self._holder = subprocess.Popen(
                [
                    "salloc",
                    f"--nodes={self._num_hosts}",
                    f"--ntasks-per-node={self._size}",
                    f"--job-name={self._name}",
                    f"--immediate={int(seconds) + 2}",  # if this process is killed meanwhile
                    *parse_slurm(spec.slurm),
                    *("sh", "-c", "echo $SLURM_JOB_ID; scontrol show hostnames; exec cat"),
                ],
                stdin=subprocess.PIPE,  # it closes with this process, however that ends
                stdout=granted,
                stderr=errors,
                env=own_environment(),
                start_new_session=True,  # interrupts are for the kernel
            )
        try:
            self.job, *names = self._wait(seconds, progress)
            self.hosts = ",".join(f"{name}:{self._size}" for name in names)
            node = answer_of("scontrol", "show", "node", names[0], "--oneliner")
            found = re.search(r"NodeAddr=(\S+)", node)
            self.address = own_address(spec.interface, [found[1] if found else names[0]])
            self._ways = Tunnels(self.address, folder)
        except BaseException:
            self.stop()
            raise

    def start(
        self, host: str, token: str, *, python: str, sockets: Sequence[Path], log: Path
    ) -> Started:
        """Start a host's agent, in a step of the job that may use all that the job has there."""
        words = [
            "srun",
            f"--jobid={self.job}",
            f"--nodelist={host}",
            *("--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none"),
        ]
        assert self._ways is not None
        assert self._holder.stdin is not None
        return self._ways.start_agent(
            words,
            token,
            python=python,
            log=log,
            environment=own_environment(),
            kept_open=self._holder.stdin.fileno(),
        )

    def explain(self, host: str, code: int | None, log: Path, version: str) -> str:
        """Return the sentence on why a host's agent did not start."""
        if sentence := self.ended():
            return f"{sentence[0].upper()}{sentence[1:]}: start anew with %ddp_restart."
        return explain(host, code, log, version)

    def ended(self) -> str:
        """Say that the job has ended, and how; empty if it has not."""
        deadline = time.monotonic() + END_SECONDS
        while (state := self._state()) == "COMPLETING" and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if state in ("", "RUNNING", "PENDING", "CONFIGURING", "SUSPENDED"):  # "": not known
            return ""
        return f"job {self.job} of Slurm has ended ({state})"

    def stop(self) -> None:
        """End the job; may be called twice."""
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        if self._ways is not None:
            self._ways.remove_files()
        if not self.job:
            self._holder.terminate()  # it waits in the queue
        try:
            self._holder.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            answer_of("scancel", f"--name={self._name}", "--me")
            self._holder.kill()
            self._holder.wait()

    def _wait(self, seconds: float, progress: Callable[[str], None]) -> list[str]:
        """Wait for the job; return its number and its hosts."""
        deadline, next_report, reason = time.monotonic() + seconds, time.monotonic(), ""
        while len(lines := self._granted.read_text().split()) <= self._num_hosts:
            if self._holder.poll() is not None:
                errors = re.findall(r"error: (.+)", self._log.read_text()) or ["no reason is given"]
                raise UserError(f"Slurm gave no job: {errors[-1].strip()}.")
            if time.monotonic() > deadline:
                raise UserError(
                    f"Slurm's job has waited for {seconds:g} s and is cancelled"
                    f"{f' (its reason to wait: {reason})' if reason else ''}: ask for less, or "
                    "give it longer with --timeout."
                )
            if time.monotonic() > next_report:
                reason = answer_of("squeue", "--noheader", f"--name={self._name}", "--format=%r")
                reason = "" if reason == "None" else reason
                progress(f"waiting in Slurm's queue{f': {reason}' if reason else ''}")
                next_report = time.monotonic() + min(REPORT_SECONDS, seconds / 4)
            time.sleep(POLL_SECONDS)
        return lines

    def _state(self) -> str:
        shown = answer_of("scontrol", "show", "job", self.job, "--oneliner")
        found = re.search(r"JobState=(\S+)", shown)
        return found[1] if found else ""


class Mpi(AgentStarter):
    """The hosts that ``mpiexec`` knows: those of the job it is called in, or those named."""

    def __init__(self, spec: ClusterSpec, folder: Path) -> None:
        if shutil.which("mpiexec") is None:
            raise UserError("There is no mpiexec on this host: --engines mpi needs Open MPI.")
        self.hosts = spec.hosts or self._known_hosts(spec)
        names = [name for name, _ in parse_hosts(self.hosts)]
        self.address = own_address(spec.interface, names)
        self._ways = Tunnels(self.address, folder)

    def start(
        self, host: str, token: str, *, python: str, sockets: Sequence[Path], log: Path
    ) -> Started:
        """Start a host's agent."""
        words = ["mpiexec", "-n", "1", "--host", host, "--bind-to", "none"]
        return self._ways.start_agent(words, token, python=python, log=log)

    def explain(self, host: str, code: int | None, log: Path, version: str) -> str:
        """Return the sentence on why a host's agent did not start."""
        refuse_root(log.read_text(errors="replace"))
        return explain(host, code, log, version)

    def stop(self) -> None:
        """Remove what no host has come by; may be called twice."""
        self._ways.remove_files()

    def _known_hosts(self, spec: ClusterSpec) -> str:
        try:
            done = subprocess.run(
                ["mpiexec", "--map-by", "ppr:1:node", "hostname"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=LIST_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"mpiexec has not listed its hosts within {LIST_SECONDS:g} s: one of them may not "
                "answer; name those to use with --hosts a:4,b:4."
            ) from None
        refuse_root(done.stderr)
        names = list(dict.fromkeys(done.stdout.split()))
        if done.returncode or not names:
            raise UserError("mpiexec does not list its hosts: name them with --hosts a:4,b:4.")
        num_hosts = len(names)
        if spec.num_ranks is None:
            return ",".join(names)
        if spec.ranks_per_host is not None:
            num_hosts = spec.num_ranks // spec.ranks_per_host
            if num_hosts > len(names):
                raise UserError(
                    f"-n {spec.num_ranks} with --ranks-per-host {spec.ranks_per_host} needs "
                    f"{num_hosts} hosts, and mpiexec knows {len(names)}: {', '.join(names)}."
                )
        if spec.num_ranks % num_hosts:
            raise UserError(
                f"-n {spec.num_ranks} cannot be divided among the {num_hosts} hosts of mpiexec: "
                "use a multiple, or name them with --hosts a:4,b:3."
            )
        return ",".join(f"{name}:{spec.num_ranks // num_hosts}" for name in names[:num_hosts])


def starter_for(spec: ClusterSpec, folder: Path, progress: Callable[[str], None]) -> AgentStarter:
    """Return what starts the agents that a user asks for; a job is there when it returns."""
    if spec.profile:
        return Profile(spec, folder, progress)
    match spec.engines:
        case "slurm":
            return Slurm(spec, folder, progress)
        case "mpi":
            return Mpi(spec, folder)
        case _:
            return Ssh(spec.hosts)


def own_environment() -> dict[str, str]:
    """Return this process's environment without what Slurm says about a job it may run in."""
    kept = ("SLURM_CONF", "SLURM_CONF_SERVER")
    return {
        name: value
        for name, value in os.environ.items()
        if name in kept or not name.startswith("SLURM_")
    }


def refuse_root(text: str) -> None:
    """Raise the sentence on Open MPI's refusal to run as root, if that is what it wrote."""
    if "as the root user" in text or "run as root" in text:
        raise UserError(
            "Open MPI does not run as root: use another user, or set OMPI_ALLOW_RUN_AS_ROOT=1 and "
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 before the notebook starts."
        )


def answer_of(*words: str) -> str:
    """Return what one of Slurm's programs prints; empty if it fails."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=ANSWER_SECONDS,
            env=own_environment(),
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip()
