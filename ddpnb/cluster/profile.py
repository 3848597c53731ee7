"""Hosts that a profile of ipyparallel gives: by PBS, LSF, SGE, HTCondor or what it names (kernel).

ipyparallel's launcher starts, in place of engines, a program that connects back over CurveZMQ and
waits for an agent's script: ``launcher/tunnel.py``.  A process here for each host passes the frames
on, and another one holds the launcher, which ends what it started when this process is gone.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from IPython.core.profiledir import ProfileDir, ProfileDirError
from IPython.paths import get_ipython_dir
from jupyter_client.localinterfaces import public_ips

from ddpnb.cluster.placement import ClusterSpec
from ddpnb.cluster.ssh import agent_script
from ddpnb.cluster.starter import AgentStarter, Started, free_ports, own_address
from ddpnb.cluster.tunnels import Tunnel, Tunnels
from ddpnb.protocol.errors import UserError

WAIT_SECONDS = 600.0
"""How long hosts may take to come, if nothing else is said."""
POLL_SECONDS = 0.1
REPORT_SECONDS = 2.0
AGAIN_SECONDS = 15.0
"""How long a host may take to come again after its agent has ended."""
STOP_SECONDS = 60.0
"""How long a launcher may take to end what it started."""
STRICT = {"TRAITLETS_APPLICATION_RAISE_CONFIG_FILE_ERROR": "1"}
"""Without it, a profile with an error in it is read as an empty one, with local engines."""


class Profile(AgentStarter):
    """Hosts that the launcher of a profile gives."""

    def __init__(
        self, spec: ClusterSpec, folder: Path, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        assert spec.num_ranks is not None
        self._name = spec.profile
        self._directory = find_profile(spec.profile)
        self._folder = folder
        self._log = folder / "launcher.log"
        size = spec.ranks_per_host or spec.num_ranks
        num_hosts = spec.num_ranks // size
        self.address = own_address(spec.interface, public_ips()[:1] or ["127.0.0.1"])
        self._ways = Tunnels(self.address, folder)
        self._ports = free_ports(self.address, num_hosts)
        self._file = self._ways.write_file(self._ports, is_once=False)
        self._tunnels: list[Tunnel] = []
        self._names: list[str] = []
        self._holder: subprocess.Popen[bytes] | None = None
        self._held, self._hold = os.pipe()  # it ends what it started once the second is closed
        try:
            self._tunnels = [self._tunnel(number) for number in range(num_hosts)]
            self._launch(spec.python or sys.executable)
            seconds = WAIT_SECONDS if spec.timeout is None else spec.timeout
            self._wait(seconds, progress)
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(self._held)
            self._ways.remove_files()
        self._came = [tunnel.host for tunnel in self._tunnels]
        self._names = distinct(self._came)
        self._used = [False] * num_hosts
        self.hosts = ",".join(f"{name}:{size}" for name in self._names)

    def start(
        self, host: str, token: str, *, python: str, sockets: Sequence[Path], log: Path
    ) -> Started:
        """Start a host's agent; see ``ssh.start_agent``."""
        number = self._names.index(host)
        if self._used[number]:
            self._tunnels[number] = self._tunnel(number)
            deadline = time.monotonic() + AGAIN_SECONDS
            while not self._tunnels[number].host:
                if time.monotonic() > deadline:
                    self._tunnels[number].end()
                    raise UserError(
                        f"Host {host} has not come again: what profile {self._name} started there "
                        "has ended. Start anew with %ddp_restart."
                    )
                time.sleep(POLL_SECONDS)
            if (other := self._tunnels[number].host) != self._came[number]:
                self._tunnels[number].end()
                raise UserError(
                    f"In place of host {host}, profile {self._name} gives {other}: start anew with "
                    "%ddp_restart."
                )
        self._used[number] = True
        return self._tunnels[number].run(agent_script(token, python))

    def ended(self) -> str:
        """Say that the launcher has ended; empty if it has not."""
        assert self._holder is not None
        if self._holder.poll() is None:
            return ""
        return f"the launcher of profile {self._name} has ended"

    def stop(self) -> None:
        """Have the launcher end what it started; may be called twice."""
        for tunnel in self._tunnels:
            tunnel.end()
        self._ways.remove_files()
        if self._hold >= 0:
            os.close(self._hold)
            self._hold = -1
        if self._holder is not None:
            try:
                self._holder.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._holder.kill()
                self._holder.wait()

    def _tunnel(self, number: int) -> Tunnel:
        log = self._folder / f"host-{number}.log"
        return self._ways.open(self._ports[number], log, kept_open=self._hold)

    def _launch(self, python: str) -> None:
        """Have the profile's launcher start the hosts' programs."""
        program = [python, "-m", "ddpnb.launcher.tunnel", "come", str(self._file)]
        words = [self._name, str(len(self._ports)), str(self._folder), *program]
        with self._log.open("wb") as errors:
            self._holder = subprocess.Popen(
                [sys.executable, "-m", "ddpnb.launcher.profile", *words],
                stdin=self._held,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | STRICT,
                start_new_session=True,  # interrupts are for the kernel
            )
        assert self._holder.stdout is not None
        answer = self._holder.stdout.readline()
        if not answer:
            raise UserError(f"Profile {self._name} cannot be used{self._last()}.")
        if error := json.loads(answer):
            raise UserError(f"The launcher of profile {self._name} has started nothing: {error}.")

    def _last(self) -> str:
        """Return what the launcher has written last, as the end of a sentence."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f": {lines[-1].strip().removesuffix('.')}" if lines else ""

    def _wait(self, seconds: float, progress: Callable[[str], None]) -> None:
        """Wait until all hosts have come."""
        began = next_report = time.monotonic()
        while num_missing := [tunnel.host for tunnel in self._tunnels].count(""):
            num_hosts = len(self._tunnels)
            lost = [each for each in self._tunnels if each.process.poll() is not None]
            num_lost = len([each for each in lost if each.host])
            here = f"{num_hosts - num_missing - num_lost} of {num_hosts}"
            if time.monotonic() > began + seconds:
                raise UserError(
                    f"{here} hosts of profile {self._name} have come within {seconds:g} s: see "
                    f"{self._directory / 'log'}, or give them longer with --timeout."
                )
            if reason := self.ended():
                raise UserError(
                    f"{reason[0].upper()}{reason[1:]}, with {here} hosts there{self._last()}."
                )
            for tunnel in lost:
                host = f"Host {tunnel.host}" if tunnel.host else "The way to a host"
                raise UserError(
                    f"{host} of profile {self._name} was lost with {here} hosts there: start "
                    "again with %ddp_start."
                )
            if time.monotonic() > next_report:
                progress(f"waiting for the hosts of profile {self._name}: {here}")
                next_report = time.monotonic() + min(REPORT_SECONDS, seconds / 4)
            time.sleep(POLL_SECONDS)


def distinct(names: Sequence[str]) -> list[str]:
    """Return names that differ, where the launcher has used a host twice: ``["n", "n-2"]``."""
    found: list[str] = []
    for name in names:
        candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        found.append(next(each for each in candidates if each not in found))
    return found


def profiles() -> list[str]:
    """Return the names of the user's profiles."""
    folders = Path(get_ipython_dir()).glob("profile_*")
    return sorted(each.name.removeprefix("profile_") for each in folders)


def find_profile(name: str) -> Path:
    """Return the folder of a profile of ipyparallel.

    Raises:
        UserError: there is none of this name.
    """
    try:
        found = ProfileDir.find_profile_dir_by_name(get_ipython_dir(), name)
    except ProfileDirError:
        known = ", ".join(profiles())
        there = f"{get_ipython_dir()}; there is {known}" if known else get_ipython_dir()
        raise UserError(
            f"There is no profile {name} in {there}: make one with `ipython profile create "
            f"--parallel --profile={name}`, and name a launcher in its ipcluster_config.py."
        ) from None
    return Path(found.location)
