"""Two hosts for tests: network namespaces on one bridge, each with a real sshd."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from ddpnb.hosts import router
from tests.cluster.rig import wait_until
from tests.programs import find_program, skip_or_fail

ROOT = Path(__file__).parents[2]
NETNS = Path("/etc/netns")
"""Files in this folder replace files of /etc under "ip netns exec".

Torch looks up the name of each address that it connects to. Without an answer, this takes 10 s.
"""
SSHD = """
ListenAddress {address}
Port 22
HostKey {folder}/host-key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PidFile none
SetEnv PYTHONPATH={root}
"""
CONFIG = """
Host a
  HostName {a}
Host b
  HostName {b}
Host nobody
  HostName {nobody}
Host stranger
  HostName {a}
  UserKnownHostsFile {folder}/no-hosts
Host impostor
  HostName {a}
  UserKnownHostsFile {folder}/wrong-hosts
Host locked
  HostName {a}
  IdentityFile {folder}/wrong-key
Host * !locked
  IdentityFile {folder}/key
Host *
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known-hosts
  GlobalKnownHostsFile none
"""


LOST_MS = 5_000
"""Time without a heartbeat after which a host is lost: a third of the usual time."""


@dataclass(frozen=True, kw_only=True)
class TwoHosts:
    """Hosts ``a`` and ``b``, which the test's ssh can reach. This process is on neither host."""

    folder: Path
    prefix: str
    """Prefix of the names of namespaces and interfaces."""
    subnet: str

    def address(self, host: str) -> str:
        return f"{self.subnet}.{'ab'.index(host) + 1}"

    def call(self, host: str, *words: str) -> str:
        """Run a program on a host."""
        return call("ip", "netns", "exec", f"{self.prefix}{host}", *words)

    def processes(self, host: str) -> list[psutil.Process]:
        found = []
        for pid in call("ip", "netns", "pids", f"{self.prefix}{host}").split():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                if process.name() != "sshd":
                    found.append(process)
        return found

    def running(self, module: str, host: str) -> list[psutil.Process]:
        """Return a host's processes that run ``ddpnb.hosts.MODULE``, without their children."""
        named = [p for p in self.processes(host) if f"ddpnb.hosts.{module}" in p.cmdline()]
        return [each for each in named if each.ppid() not in [other.pid for other in named]]

    def names(self, host: str) -> list[str]:
        """Return the token of each agent on the host. An agent's file names contain its token."""
        agents = self.running("agent", host)
        return [each.cmdline()[-1].removeprefix("/tmp/ddpnb-") for each in agents]

    @contextlib.contextmanager
    def unplugged(self, host: str) -> Iterator[None]:
        """Disconnect a host from all other hosts."""
        call("ip", "link", "set", f"{self.prefix}v{host}", "down")
        try:
            yield
        finally:
            call("ip", "link", "set", f"{self.prefix}v{host}", "up")

    @contextlib.contextmanager
    def slow(self, rate: str) -> Iterator[None]:
        """Limit the bits per second that each host sends. Skip the test if that is impossible."""
        device = ("dev", "net0", "root")
        words = ("tbf", "rate", rate, "burst", "32kb", "latency", "400ms")
        try:
            for host in "ab":
                self.call(host, "tc", "qdisc", "add", *device, *words)
        except subprocess.CalledProcessError as error:
            skip_or_fail(f"{' '.join(error.cmd)}: {error.stderr}")
        try:
            yield
        finally:
            for host in "ab":
                self.call(host, "tc", "qdisc", "del", *device)

    @contextlib.contextmanager
    def parted(self) -> Iterator[None]:
        """Cut the connection between the hosts. This process still reaches both hosts."""
        for host, other in ("ab", "ba"):
            self.call(host, "ip", "route", "add", "blackhole", f"{self.address(other)}/32")
        try:
            yield
        finally:
            for host, other in ("ab", "ba"):
                self.call(host, "ip", "route", "del", "blackhole", f"{self.address(other)}/32")


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Make two hosts and an ssh that can reach them. Skip the test if that is impossible."""
    find_program(["ip"], "needs iproute2")
    sshd = find_program(["sshd", "/usr/sbin/sshd"], "needs openssh-server")
    ssh = find_program(["ssh"], "needs openssh-client")
    if os.geteuid() != 0:
        skip_or_fail("needs root, to make network namespaces")
    number = os.getpid()
    hosts = TwoHosts(
        folder=folder,
        prefix=f"dd{number % 100_000}",
        subnet=f"10.{100 + number % 100}.{number // 100 % 250}",
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    servers: list[subprocess.Popen[bytes]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "LOST_MS", LOST_MS)
        try:
            make_network(hosts)
            make_keys(hosts, ssh)
            for host in "ab":
                config = folder / f"sshd-{host}.conf"
                config.write_text(
                    SSHD.format(address=hosts.address(host), folder=folder, root=ROOT)
                )
                words = ["ip", "netns", "exec", f"{hosts.prefix}{host}", sshd, "-D", "-f", config]
                servers.append(subprocess.Popen(words, stderr=subprocess.DEVNULL))
            patch.setenv("PATH", f"{folder}/bin", prepend=os.pathsep)
            for host in "ab":
                wait_for_server(host)
            yield hosts
        except subprocess.CalledProcessError as error:
            skip_or_fail(f"{' '.join(map(str, error.cmd))}: {error.stderr}")
        finally:
            for server in servers:
                for process in psutil.Process(server.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                server.kill()
                server.wait()
            # Delete the links by name, because a namespace is removed some time after "delete".
            for words in (
                *(("link", "delete", f"{hosts.prefix}{link}") for link in ("va", "vb", "br")),
                *(("netns", "delete", f"{hosts.prefix}{host}") for host in "ab"),
            ):
                subprocess.run(["ip", *words], check=False, capture_output=True)
            for host in "ab":
                shutil.rmtree(NETNS / f"{hosts.prefix}{host}", ignore_errors=True)


def files_of(token: str) -> list[Path]:
    """Return the files that an agent, or the ssh connection to the agent, has on its host."""
    return [*Path("/dev/shm").glob(f"ddpnb-{token}*"), *Path("/tmp").glob(f"ddpnb-{token}*")]


def make_network(hosts: TwoHosts) -> None:
    bridge = f"{hosts.prefix}br"
    call("ip", "link", "add", bridge, "type", "bridge")
    call("ip", "addr", "add", f"{hosts.subnet}.254/24", "dev", bridge)
    call("ip", "link", "set", bridge, "up")
    for host in "ab":
        name, outside = f"{hosts.prefix}{host}", f"{hosts.prefix}v{host}"
        (NETNS / name).mkdir(parents=True)
        (NETNS / name / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        call("ip", "netns", "add", name)
        call("ip", "link", "add", outside, "type", "veth", "peer", "name", "net0", "netns", name)
        call("ip", "link", "set", outside, "master", bridge, "up")
        call("ip", "-n", name, "addr", "add", f"{hosts.address(host)}/24", "dev", "net0")
        for interface in ("lo", "net0"):
            call("ip", "-n", name, "link", "set", interface, "up")
        call("ip", "-n", name, "route", "add", "default", "via", f"{hosts.subnet}.254")


def make_keys(hosts: TwoHosts, ssh: str) -> None:
    folder = hosts.folder
    for name in ("key", "wrong-key", "host-key"):
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    places = f"{hosts.address('a')},{hosts.address('b')}"
    for file, key in (("known-hosts", "host-key"), ("wrong-hosts", "wrong-key")):
        (folder / file).write_text(f"{places} {(folder / f'{key}.pub').read_text()}")
    addresses = {host: hosts.address(host) for host in "ab"} | {"nobody": f"{hosts.subnet}.254"}
    (folder / "config").write_text(CONFIG.format(folder=folder, **addresses))
    (folder / "bin").mkdir()
    program = folder / "bin/ssh"
    program.write_text(f'#!/bin/sh\nexec {ssh} -F {folder}/config "$@"\n')
    program.chmod(0o755)


def wait_for_server(host: str) -> None:
    words = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", host, "true"]
    answers = partial(subprocess.run, words, check=False, capture_output=True)
    wait_until(lambda: answers().returncode == 0, f"the sshd of host {host}")


def call(*words: str) -> str:
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)
    return done.stdout
