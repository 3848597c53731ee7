"""Starts hosts through a launcher of ipyparallel: Slurm, MPI, PBS, LSF, SGE, HTCondor.

The launcher starts relays instead of engines.  The launcher runs in a separate process
(``holder.py``), which ends the relays when this process ends.  A file in the user's home, which all
hosts share, tells the relays how to connect to this process.  Runs in the kernel.
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

QUEUE_SECONDS = 600.0
"""Default number of seconds to wait until all hosts are connected."""
QUEUE_POLL_SECONDS = 0.1
REPORT_SECONDS = 2.0
HOLDER_END_SECONDS = 60.0
"""Maximum seconds to wait until a launcher has ended its programs."""
STRICT = {"TRAITLETS_APPLICATION_RAISE_CONFIG_FILE_ERROR": "1"}
"""Makes errors in a profile fatal.  By default, traitlets ignores a profile that has errors."""


class LaunchedHosts:
    """The relays that one launcher starts."""

    def __init__(self, spec: HostsSpec, folder: Path) -> None:
        """Make the launcher start relays.  ``wait`` waits until the relays are connected."""
        if spec.profile and spec.profile not in profiles():
            raise UserError(
                f"ipyparallel has no profile {spec.profile}, only {', '.join(profiles())}. Create "
                f"one with `ipython profile create --parallel --profile={spec.profile}`."
            )
        assert spec.num_ranks is not None
        self._what = f"profile {spec.profile}" if spec.profile else f"--engines {spec.engines}"
        self._size = spec.ranks_per_host or spec.num_ranks
        self._num = spec.num_ranks // self._size
        self._seconds = QUEUE_SECONDS if spec.timeout is None else spec.timeout
        self._log = folder / "launcher.log"
        self.address = own_address(spec.interface)
        """The address at which engines reach the controller."""
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
                stdin=subprocess.PIPE,  # closes when this process ends for any reason
                stdout=errors,
                stderr=errors,
                env=os.environ | STRICT,
                start_new_session=True,  # interrupts must reach only the kernel
            )

    def wait(self, progress: Callable[[str], None]) -> list[RemoteHost]:
        """Wait until all hosts are connected; return them in the order of their names."""
        deadline, next_report = time.monotonic() + self._seconds, 0.0
        relays: set[str] = set()
        while len(relays) < self._num:
            here = f"{len(relays)} of {self._num}"
            if time.monotonic() > deadline:
                raise UserError(
                    f"Only {here} hosts of {self._what} connected within {self._seconds:g} s. To "
                    "wait longer, add --timeout."
                )
            if self._holder.poll() is not None:
                raise UserError(self._explain_end(here))
            if time.monotonic() > next_report:
                progress(f"waiting for the hosts of {self._what}: {here}")
                next_report = time.monotonic() + min(REPORT_SECONDS, self._seconds / 4)
            time.sleep(QUEUE_POLL_SECONDS)
            if lost := relays - (relays := set(self.router.relays)):
                raise UserError(f"Lost {len(lost)} hosts of {self._what}. Start the ranks again.")
        self._file.unlink(missing_ok=True)
        found = sorted((relay.host, name) for name, relay in [*self.router.relays.items()])
        return [RemoteHost(name=host, size=self._size, relay=name) for host, name in found]

    def start_again(self, host: RemoteHost) -> None:
        """Raise UserError, because a launcher cannot start a single host again."""
        raise UserError(
            f"Host {host.name} was lost, and {self._what} cannot start a single host again. "
            "Restart all ranks with %ddp_restart."
        )

    def explain(self, host: RemoteHost) -> str:
        """Return an error message for a host's agent that exited during startup."""
        return f"Host {host.name} of {self._what} was lost: its connection or its agent ended."

    def stop(self) -> None:
        """Make the launcher end its programs."""
        self.router.stop()
        self._file.unlink(missing_ok=True)
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        try:
            self._holder.wait(HOLDER_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()

    def _explain_end(self, here: str) -> str:
        """Return a message saying that the launcher ended, with the last line of its log."""
        text = self._log.read_text(errors="replace")
        lines = [line.strip(" -.") for line in text.splitlines() if "srun: error" not in line]
        end = next(filter(None, reversed(lines)), "it printed no message")
        return f"The launcher of {self._what} ended when {here} hosts were connected: {end}."


def own_address(interface: str) -> str:
    """Return this host's address on an interface, or by default its first public address."""
    if not interface:
        return next(iter(public_ips()), "127.0.0.1")
    if found := interfaces().get(interface, []):
        return found[0]
    raise UserError(
        f"This host has no interface {interface} with an IPv4 address. Choose an --interface that "
        "all hosts have."
    )


def profiles() -> list[str]:
    """Return the names of the user's IPython profiles."""
    folders = Path(get_ipython_dir()).glob("profile_*")
    return sorted(each.name.removeprefix("profile_") for each in folders)
