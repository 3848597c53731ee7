"""Hosts that a launcher of ipyparallel gives: Slurm, MPI, PBS, LSF, SGE, HTCondor (kernel).

The launcher starts relays in place of engines.  A process of its own holds it (``holder.py``), and
ends what it started when this process is gone.  What the relays need to come here is in a file of
the user's home, which the hosts share.
"""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from IPython.paths import get_ipython_dir
from jupyter_client.localinterfaces import public_ips

from ddpnb.hosts.network import free_ports, interfaces
from ddpnb.hosts.router import RemoteHost, Router
from ddpnb.hosts.spec import HostsSpec
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


class LaunchedHosts:
    """The relays that one launcher has started."""

    def __init__(self, spec: HostsSpec, folder: Path) -> None:
        """Have the launcher start relays; ``wait`` waits for them."""
        if spec.profile and spec.profile not in profiles():
            raise UserError(
                f"There is no profile {spec.profile} of ipyparallel, but {', '.join(profiles())}: "
                f"`ipython profile create --parallel --profile={spec.profile}` makes one."
            )
        assert spec.num_ranks is not None
        self._what = f"profile {spec.profile}" if spec.profile else f"--engines {spec.engines}"
        self._size = spec.ranks_per_host or spec.num_ranks
        self._num = spec.num_ranks // self._size
        self._seconds = WAIT_SECONDS if spec.timeout is None else spec.timeout
        self._log = folder / "launcher.log"
        self.address = own_address(spec.interface)
        """Where engines reach the controller."""
        self.router = Router(f"tcp://{self.address}:{free_ports(self.address, 1)[0]}")
        self._file = Path.home() / f".ddpnb-{secrets.token_hex(8)}.json"
        atomic_write(self._file, json.dumps(self.router.place()).encode(), mode=0o600)
        order = {
            "profile": spec.profile,
            "engines": spec.engines,
            "num": self._num,
            "num_ranks": self._size,
            "folder": str(folder),
            "words": [spec.python or sys.executable, "-m", "ddpnb.hosts.relay", str(self._file)],
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
        """Wait until all hosts are there; return them in the order of their names."""
        deadline, next_report = time.monotonic() + self._seconds, 0.0
        relays: set[str] = set()
        while len(relays) < self._num:
            here = f"{len(relays)} of {self._num}"
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
            if lost := relays - (relays := set(self.router.relays)):
                raise UserError(f"{len(lost)} hosts of {self._what} were lost again.")
        self._file.unlink(missing_ok=True)
        found = sorted((relay.host, name) for name, relay in self.router.relays.items())
        return [RemoteHost(name=host, size=self._size, relay=name) for host, name in found]

    def start_again(self, host: RemoteHost) -> None:
        """Refuse: a launcher starts all of its hosts or none."""
        raise UserError(
            f"Host {host.name} is lost with what {self._what} has started there: start anew with "
            "%ddp_restart."
        )

    def explain(self, host: RemoteHost) -> str:
        """Return the sentence on why a host's agent has ended before it was of use."""
        return f"Host {host.name} of {self._what} was lost: its connection or its agent has ended."

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
        lines = [line.strip(" -.") for line in text.splitlines() if "srun: error" not in line]
        end = next(filter(None, reversed(lines)), "it wrote nothing")
        return f"The launcher of {self._what} has ended, with {here} hosts there: {end}."


def own_address(interface: str) -> str:
    """Return this host's address for the others, or that of an interface, which a user names."""
    if not interface:
        return next(iter(public_ips()), "127.0.0.1")
    if found := interfaces().get(interface, []):
        return found[0]
    raise UserError(
        f"This host has no interface {interface} with an IPv4 address; --interface names one that "
        "this host and all others have."
    )


def profiles() -> list[str]:
    """Return the names of the user's profiles."""
    folders = Path(get_ipython_dir()).glob("profile_*")
    return sorted(each.name.removeprefix("profile_") for each in folders)
