"""Starts relays over ssh on the hosts that the user names.  Runs in the kernel."""

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
"""Maximum seconds to wait until a host has started its relay and agent."""
SSH_END_SECONDS = 5.0
"""Maximum seconds to wait for ssh to end after its relay was told to end."""
SSH = (
    "ssh",
    "-T",  # no terminal
    "-a",  # no agent forwarding, even if the user's configuration turns it on
    "-x",
    *("-o", "BatchMode=yes"),  # no questions, because nobody can answer them
    *("-o", "StrictHostKeyChecking=yes"),
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5"),  # ssh notices a dead host after 15 to 20 s
    *("-o", "ServerAliveCountMax=3"),
    *("-o", "ControlPath=none"),  # a shared connection would keep the forwarded sockets open
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
"""Shell script that starts the relay on a host and then removes the sockets that sshd has left."""
REASONS = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key differs from the key in your known_hosts. Check the new key, then remove the "
        "old key as `ssh {host}` advises",
    ),
    ("ost key", "its host key is not known. Connect once with `ssh {host}` and check the key"),
    ("Permission denied", "it rejects your login. Set up a key for `ssh {host}`"),
    ("port forwarding failed", "its sshd needs the setting AllowStreamLocalForwarding yes"),
    ("no answer at", "it cannot reach the kernel. Check that its sshd forwards Unix sockets"),
    ("No module named", "its Python has {line}. Install ddpnb {version}, or add --python"),
)
"""Fragments of messages from ssh, relay and agent, each with an explanation for users."""


class SshHosts:
    """The ssh processes, one for each host, that start and connect the relays."""

    address = ""
    """Empty, because engines reach the controller through ssh's sockets, not at an address."""

    def __init__(self, spec: HostsSpec, folder: Path) -> None:
        """Start an ssh process for each host; ``wait`` waits for the relays."""
        if shutil.which("ssh") is None:
            raise UserError("--hosts needs ssh on this host. Install the OpenSSH client.")
        self._folder = folder
        self._python = spec.python
        self._ssh: dict[str, subprocess.Popen[bytes]] = {}
        self._hosts: list[RemoteHost] = []
        self.router = Router(f"ipc://{folder / 'relays'}")
        for n in range(1, NUM_SOCKETS + 1):  # ssh's -R does not accept the colon in these names
            (folder / f"engine-{n}").symlink_to(folder / f"profile/socket:{n}")
        try:
            for name, size in parse_hosts(spec.hosts).items():
                self._hosts.append(RemoteHost(name=name, size=size, relay=self._start(name)))
        except BaseException:
            self.stop()
            raise

    def wait(self, progress: Callable[[str], None]) -> list[RemoteHost]:
        """Wait until all hosts are connected, and return them."""
        progress("connecting to the hosts")
        for host in self._hosts:
            self._wait_for(host)
        return self._hosts

    def start_again(self, host: RemoteHost) -> None:
        """Start a host's relay again through a new ssh process."""
        self._ssh[host.name].kill()
        self._ssh[host.name].wait()
        host.relay = self._start(host.name)
        self._wait_for(host)

    def explain(self, host: RemoteHost) -> str:
        """Return an error message for a host's agent that exited during startup."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._ssh[host.name].wait(1.0)  # ssh ends soon after its relay and completes the log
        text = self._log(host.name).read_text(errors="replace")
        lines = text.strip().splitlines() or ["ssh has ended"]
        for found, reason in REASONS:
            if line := next((each for each in lines if found in each), ""):
                line = line[line.find(found) :].replace("'", "").replace("No", "no", 1)
                words = {"host": host.name, "line": line, "version": versions()["ddpnb"]}
                return f"Host {host.name} cannot be used: {reason.format(**words)}."
        return f"Host {host.name} cannot be used: {lines[-1].strip().removesuffix('.')}."

    def stop(self) -> None:
        """Disconnect the relays, so that their ssh processes end."""
        self.router.stop()
        deadline = time.monotonic() + SSH_END_SECONDS
        for ssh in self._ssh.values():
            try:
                ssh.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                ssh.kill()
                ssh.wait()

    def _start(self, name: str) -> str:
        """Start the ssh process of a host; return the name that the host's relay will have."""
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
                start_new_session=True,  # interrupts must reach only the kernel
            )
        self._ssh[name] = ssh
        place = self.router.place(name=relay, endpoint=f"ipc://{there}.relay", sockets=there)
        assert ssh.stdin is not None
        with contextlib.suppress(OSError), ssh.stdin:  # ssh may have ended; `_wait_for` notices
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
    """Return the error message for a host that does not answer."""
    return (
        f"Host {host} did not answer within {seconds:g} s. Either the host is too slow, or its "
        "connection was lost."
    )
