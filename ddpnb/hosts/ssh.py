"""Hosts that the user names, over ssh (kernel)."""

import contextlib
import json
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ddpnb.hosts.network import versions
from ddpnb.hosts.router import RemoteHost, Router
from ddpnb.hosts.spec import HostsSpec, parse_hosts
from ddpnb.hosts.wire import NUM_SOCKETS
from ddpnb.protocol.errors import UserError

COME_SECONDS = 30.0
"""How long a host may take to start its relay and agent."""
END_SECONDS = 5.0
"""How long ssh may take to end once its relay is asked to."""
SSH = (
    "ssh",
    "-T",  # no terminal
    "-a",  # whatever the user's configuration says, the host gets no use of the user's keys
    "-x",
    *("-o", "BatchMode=yes"),  # no question that nobody would answer
    *("-o", "StrictHostKeyChecking=yes"),
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5"),  # a host without power is noticed after 15 to 20 s
    *("-o", "ServerAliveCountMax=3"),
    *("-o", "ControlPath=none"),  # a shared connection would keep the forwarded sockets
    *("-o", "ExitOnForwardFailure=yes"),
    *("-o", "LogLevel=ERROR"),
)
SCRIPT = """\
trap 'rm -f {forwarded}.*' EXIT
trap '' HUP
python={python}
[ -n "$python" ] || {{ python={same}; [ -x "$python" ] || python=python3; }}
"$python" -m ddpnb.hosts.relay
"""
"""Runs in a shell on the host, which removes the sockets that sshd leaves behind."""
REASONS = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "it has another host key than in your known_hosts: check the new key, then remove the old "
        "one as `ssh {host}` says",
    ),
    ("ost key", "its host key is not known: check it, then connect once with `ssh {host}`"),
    ("Permission denied", "it does not let you in: set up a key for `ssh {host}`"),
    ("port forwarding failed", "its sshd needs AllowStreamLocalForwarding yes"),
    ("no answer at", "it does not reach the kernel: does its sshd forward Unix sockets?"),
    ("No module named", "its Python has {line}: install ddpnb {version}, or give --python"),
)
"""What ssh, the relay or the agent may write, and what it means."""


class SshHosts:
    """One ssh for each host, which starts the relay there and forwards its sockets."""

    address = ""
    """Where engines reach the controller: not at an address of this host, but at those sockets."""

    def __init__(self, spec: HostsSpec, folder: Path) -> None:
        """Start them; ``wait`` waits for the relays."""
        if shutil.which("ssh") is None:
            raise UserError("There is no ssh on this host: install OpenSSH's client for --hosts.")
        self._folder = folder
        self._python = spec.python
        self._ssh: dict[str, subprocess.Popen[bytes]] = {}
        self._hosts: list[RemoteHost] = []
        self.router = Router(f"ipc://{folder / 'relays'}")
        for n in range(1, NUM_SOCKETS + 1):  # ssh's -R takes no colon, which the names have
            (folder / f"engine-{n}").symlink_to(folder / f"profile/socket:{n}")
        try:
            for name, size in parse_hosts(spec.hosts).items():
                self._hosts.append(RemoteHost(name=name, size=size, relay=self._start(name)))
        except BaseException:
            self.stop()
            raise

    def wait(self, progress: Callable[[str], None]) -> list[RemoteHost]:
        """Wait until all hosts are there."""
        progress("connecting to the hosts")
        for host in self._hosts:
            self._wait_for(host)
        return self._hosts

    def start_again(self, host: RemoteHost) -> None:
        """Start a relay by a new connection."""
        self._ssh[host.name].kill()
        self._ssh[host.name].wait()
        host.relay = self._start(host.name)
        self._wait_for(host)

    def explain(self, host: RemoteHost) -> str:
        """Return the sentence on why a host's agent has ended before it was of use."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._ssh[host.name].wait(1.0)  # it ends soon after its relay, and has written all then
        text = self._log(host.name).read_text(errors="replace")
        lines = text.strip().splitlines() or ["ssh has ended"]
        for found, reason in REASONS:
            if line := next((each for each in lines if found in each), ""):
                line = line[line.find(found) :].replace("'", "").replace("No", "no", 1)
                words = {"host": host.name, "line": line, "version": versions()["ddpnb"]}
                return f"Host {host.name} cannot be used: {reason.format(**words)}."
        return f"Host {host.name} cannot be used: {lines[-1].strip().removesuffix('.')}."

    def stop(self) -> None:
        """Disconnect from the relays, with which each ssh ends."""
        self.router.stop()
        deadline = time.monotonic() + END_SECONDS
        for ssh in self._ssh.values():
            try:
                ssh.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                ssh.kill()
                ssh.wait()

    def _start(self, name: str) -> str:
        """Start the ssh of a host; return the name that its relay will have."""
        relay = secrets.token_hex(8)
        there = f"/tmp/ddpnb-{relay}"
        here = {"relay": "relays"} | {n: f"engine-{n}" for n in range(1, NUM_SOCKETS + 1)}
        sockets = [f"{there}.{n}:{self._folder / path}" for n, path in here.items()]
        forwards = [word for each in sockets for word in ("-R", each)]
        script = SCRIPT.format(
            forwarded=there, python=shlex.quote(self._python), same=shlex.quote(sys.executable)
        )
        with self._log(name).open("wb") as log:
            ssh = subprocess.Popen(
                [*SSH, *forwards, "--", name, f"exec sh -c {shlex.quote(script)}"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # interrupts are for the kernel
            )
        self._ssh[name] = ssh
        place = self.router.place(name=relay, endpoint=f"ipc://{there}.relay", sockets=there)
        assert ssh.stdin is not None
        with contextlib.suppress(OSError), ssh.stdin:  # it has ended, as waiting for it says
            ssh.stdin.write(json.dumps(place).encode() + b"\n")
        return relay

    def _wait_for(self, host: RemoteHost) -> None:
        deadline = time.monotonic() + COME_SECONDS
        while host.relay not in self.router.relays:
            if self._ssh[host.name].poll() is not None:
                raise UserError(self.explain(host))
            if time.monotonic() > deadline:
                raise UserError(silent(host.name, COME_SECONDS))
            time.sleep(0.005)

    def _log(self, name: str) -> Path:
        return self._folder / f"host-{name}.log"


def silent(host: str, seconds: float) -> str:
    """Return the sentence on a host that does not answer."""
    return (
        f"Host {host} has not answered within {seconds:g} s: it is too slow, or its connection "
        "was lost."
    )
