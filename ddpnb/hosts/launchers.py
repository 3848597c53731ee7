"""Hosts that a launcher of ipyparallel gives: Slurm, MPI, PBS, LSF, SGE, HTCondor (kernel).

The launcher starts relays in place of engines.  A process of its own holds it (``holder.py``), and
ends what it started when this process is gone.  What the relays need to come here is in a file of
the user's home, which the hosts share.
"""

import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from IPython.paths import get_ipython_dir
from jupyter_client.localinterfaces import public_ips

from ddpnb.hosts.network import free_ports, interfaces, route_to
from ddpnb.hosts.reasons import explain
from ddpnb.hosts.router import Router
from ddpnb.hosts.spec import HostsSpec, parse_hosts
from ddpnb.hosts.starter import RemoteHost, Starter
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import atomic_write

WAIT_SECONDS = 600.0
"""How long hosts may take to come, if nothing else is said."""
POLL_SECONDS = 0.1
REPORT_SECONDS = 2.0
STOP_SECONDS = 60.0
"""How long a launcher may take to end what it started."""
STRICT = {"TRAITLETS_APPLICATION_RAISE_CONFIG_FILE_ERROR": "1"}
"""Without it, a profile with an error in it is read as an empty one, with local engines."""


class LaunchedHosts(Starter):
    """The relays that one launcher has started."""

    def __init__(self, spec: HostsSpec, folder: Path) -> None:
        """Have the launcher start relays; ``wait`` waits for them.

        Raises:
            UserError: there is no such profile, or this host has no address for the others.
        """
        if spec.profile and spec.profile not in profiles():
            raise UserError(
                f"There is no profile {spec.profile} of ipyparallel, but {', '.join(profiles())}: "
                f"`ipython profile create --parallel --profile={spec.profile}` makes one."
            )
        self._what = f"profile {spec.profile}" if spec.profile else f"--engines {spec.engines}"
        self._named = parse_hosts(spec.hosts) if spec.hosts else {}
        self._size = spec.ranks_per_host or spec.num_ranks or 1
        self._num = len(self._named) or (spec.num_ranks or 1) // self._size
        self._seconds = WAIT_SECONDS if spec.timeout is None else spec.timeout
        self._log = folder / "launcher.log"
        self.address = own_address(spec.interface, list(self._named))
        self.router = Router(f"tcp://{self.address}:{free_ports(self.address, 1)[0]}")
        self._file = Path.home() / f".ddpnb-{secrets.token_hex(8)}.json"
        atomic_write(self._file, json.dumps(self.router.place()).encode(), mode=0o600)
        program = [spec.python or sys.executable, "-m", "ddpnb.hosts.relay", str(self._file)]
        order = {
            "profile": spec.profile,
            "engines": spec.engines,
            "num": self._num,
            "num_ranks": self._size,
            "hosts": ",".join(self._named),
            "folder": str(folder),
            "words": program,
        }
        with self._log.open("wb") as errors:
            self._holder = subprocess.Popen(
                [sys.executable, "-m", "ddpnb.hosts.holder", json.dumps(order)],
                stdin=subprocess.PIPE,  # it closes with this process, however that ends
                stdout=errors,
                stderr=errors,
                env=os.environ | STRICT,
                start_new_session=True,  # interrupts are for the kernel
            )

    def wait(self, progress: Callable[[str], None]) -> list[RemoteHost]:
        """Wait until all hosts are there."""
        deadline, next_report = time.monotonic() + self._seconds, 0.0
        seen: set[str] = set()
        while len(seen) < self._num:
            here = f"{len(seen)} of {self._num}"
            if time.monotonic() > deadline:
                raise UserError(
                    f"{here} hosts of {self._what} have come within {self._seconds:g} s: give them "
                    "longer with --timeout."
                )
            if self._holder.poll() is not None:
                raise UserError(self._explain_end(here))
            if time.monotonic() > next_report:
                progress(f"waiting for the hosts of {self._what}: {here}")
                next_report = time.monotonic() + min(REPORT_SECONDS, self._seconds / 4)
            time.sleep(POLL_SECONDS)
            relays = set(self.router.relays)
            if seen - relays:
                raise UserError(f"A host of {self._what} was lost again: see what ended it there.")
            seen = relays
        self._file.unlink(missing_ok=True)
        return self._in_order()

    def start_again(self, host: RemoteHost) -> None:
        """Start an agent by the host's relay, if that is there."""
        if host.relay not in self.router.relays:
            raise UserError(
                f"Host {host.name} is lost with what {self._what} has started there: start anew "
                "with %ddp_restart."
            )
        self.router.start_agent(host.relay)
        self.router.wait_for(host.relay, host.name)

    def explain(self, host: RemoteHost) -> str:
        """Return the sentence on why a host's agent has ended before it was of use."""
        relay = self.router.relays.get(host.relay)
        return explain(host.name, relay.last_words if relay else "its connection was lost")

    def stop(self) -> None:
        """Have the launcher end what it started."""
        self.router.stop()
        self._file.unlink(missing_ok=True)
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        try:
            self._holder.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()

    def _explain_end(self, here: str) -> str:
        """Return the sentence on why the launcher has ended, from what it has written."""
        text = self._log.read_text(errors="replace")
        if "as the root user" in text or "run as root" in text:
            return (
                "Open MPI does not run as root: use another user, or set OMPI_ALLOW_RUN_AS_ROOT=1 "
                "and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 before the notebook starts."
            )
        lines = [line.strip() for line in text.splitlines() if not line.startswith("srun: error")]
        last = next((line for line in reversed(lines) if line), "it wrote nothing")
        end = last.removesuffix(".")
        return f"The launcher of {self._what} has ended, with {here} hosts there: {end}."

    def _in_order(self) -> list[RemoteHost]:
        """Return the hosts in the order that the user gave, or else by their names."""
        relays = sorted(self.router.relays.items(), key=lambda item: item[1].host)
        if not self._named:
            names = distinct([relay.host for _, relay in relays])
            return [
                RemoteHost(name=name, size=self._size, relay=key)
                for name, (key, _) in zip(names, relays, strict=True)
            ]
        found = []
        for name, size in self._named.items():
            place = socket.gethostbyname(name)
            each = next((r for r in relays if name == r[1].host or place in r[1].addresses), None)
            if each is None:
                raise UserError(f"Host {name} has not come by {self._what}, but another: name it.")
            relays.remove(each)
            found.append(RemoteHost(name=name, size=size, relay=each[0]))
        return found


def own_address(interface: str, hosts: Sequence[str]) -> str:
    """Return this host's address on the way to the hosts, or that of an interface.

    Raises:
        UserError: there is no such interface or way.
    """
    if interface:
        if found := interfaces().get(interface, []):
            return found[0]
        raise UserError(
            f"This host has no interface {interface} with an IPv4 address; --interface names one "
            "that this host and all others have."
        )
    addresses = []
    for host in hosts:
        try:
            addresses.append(route_to(socket.gethostbyname(host)))
        except OSError as error:
            raise UserError(
                f"Host {host} has no address that is known here ({error}): give its address in "
                "place of a name of ~/.ssh/config, or add it to /etc/hosts."
            ) from error
    addresses += [*public_ips()[:1], "127.0.0.1"] if not hosts else []
    return next((each for each in addresses if not each.startswith("127.")), addresses[0])


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
