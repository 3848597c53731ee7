"""Slurm for tests: Debian's daemons with two nodes. Both nodes are this machine."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.rig import wait_until
from tests.programs import daemon, find_program, skip_or_fail

CONFIG = """
ClusterName=ddpnb
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=main Nodes=n1,n2 Default=YES State=UP
"""


@contextlib.contextmanager
def simulated_slurm() -> Iterator[None]:
    """Run Slurm with nodes ``n1`` and ``n2``. Skip the test if Slurm is not installed."""
    places = ["/usr/sbin", os.environ["PATH"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.pathsep.join(places))
        for program in ("slurmctld", "slurmd", "salloc", "munged"):
            find_program([program], "needs slurm-wlm and munge")
        if os.geteuid() != 0:
            skip_or_fail("needs root, to run Slurm's daemons")
        folder = Path(tempfile.mkdtemp(prefix="ddpnb-slurm-"))
        folder.chmod(0o755)
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            configure(folder)
            patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
            log = stack.enter_context((folder / "daemons.log").open("ab"))
            for words in (
                ["munged", "--foreground", *munge_options(folder)],
                ["slurmctld", "-D"],
                ["slurmd", "-D", "-N", "n1"],
                ["slurmd", "-D", "-N", "n2"],
            ):
                stack.enter_context(daemon(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
                if words[0] == "munged":
                    wait_until((folder / "munge.socket").exists, "munged")
            stack.callback(subprocess.run, ["scancel", "--me"], check=False)
            states = ("sinfo", "--noheader", "--format=%t %D")
            wait_until(lambda: answer(*states) == "idle 2", "both nodes", timeout=60)
            yield


def configure(folder: Path) -> None:
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [probe.getsockname()[1] for probe in probes]
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, ports=ports, folder=folder))


def munge_options(folder: Path) -> list[str]:
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
    found = [f"--{option}={folder}/munge.{name}" for option, name in names.items()]
    return [*found, f"--seed-file={folder}/munge.seed"]


def jobs() -> set[str]:
    return {*answer("squeue", "--noheader", "--format=%i").split()}


def answer(*words: str) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=30)
    return done.stdout.strip()
