"""How the agent of another host is started: over ssh, and why it or the host is of no use (kernel).

``allocation.py`` has the other ways to start agents: each is a process that passes the frames on
between this end of the pipe and the agent.  ``agent_script`` runs in the shell of the agent's host.
"""

import importlib.metadata
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ddpnb.protocol.errors import UserError

CONNECT_SECONDS = 10
MAX_CLOCK_SECONDS = 5.0
"""How far a host's clock may be off: times of runs and of checkpoints are compared."""
SSH = (
    "ssh",
    "-T",  # no terminal
    "-a",  # whatever the user's configuration says, the host gets no use of the user's keys
    "-x",
    *("-o", "BatchMode=yes"),  # no question that nobody would answer
    *("-o", "StrictHostKeyChecking=yes"),
    *("-o", f"ConnectTimeout={CONNECT_SECONDS}"),
    *("-o", "ServerAliveInterval=1"),  # a host without power is noticed after 3 to 4 s
    *("-o", "ServerAliveCountMax=2"),
    *("-o", "ControlPath=none"),  # a shared connection would keep the forwarded sockets
    *("-o", "ExitOnForwardFailure=yes"),
    *("-o", "LogLevel=ERROR"),
)
NO_PYTHON = 127
"""The exit code of a shell that does not find a program; also in ``CHOOSE_PYTHON``."""

CHOOSE_PYTHON = """\
python={python}
[ -n "$python" ] || {{ python={same}; [ -x "$python" ] || python=python3; }}
command -v "$python" >/dev/null || exit 127
"""
AGENT = (
    """\
trap 'rm -rf /dev/shm/ddpnb-{token} "${{TMPDIR:-/tmp}}/ddpnb-{token}" /tmp/ddpnb-{token}.*' EXIT
"""
    + CHOOSE_PYTHON
    + """\
exec 3<&0
"$python" -m ddpnb.launcher.agent {token} <&3 3<&- &
agent=$!
exec 3<&- 0</dev/null
trap '' HUP TERM INT PIPE
wait $agent
code=$?
kill -9 -- -$agent 2>/dev/null
exit $code
"""
)
"""Runs in a shell on the host, which removes what an agent leaves behind that was killed."""


def start_agent(
    host: str, token: str, *, python: str, sockets: Sequence[Path], log: Path
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a host's agent; return the process on this host, and the pipe to the agent.

    Args:
        host: a name that ssh knows.
        token: a part of the names of the host's files.
        python: there; empty: this one's path if it exists there, else ``python3``.
        sockets: those of this host that the agent reaches as ``agent.forwarded_socket``.
        log: what ssh and the agent write to their stderr.

    Raises:
        UserError: there is no ssh here.
    """
    if shutil.which("ssh") is None:
        raise UserError("There is no ssh on this host: install OpenSSH's client for --hosts.")
    forwards = [
        word
        for number, path in enumerate(sockets)
        for word in ("-R", f"/tmp/ddpnb-{token}.{number}:{path}")
    ]
    script = agent_script(token, python)
    return connected([*SSH, *forwards, "--", host, f"exec sh -c {shlex.quote(script)}"], log)


def agent_script(token: str, python: str) -> str:
    """Return what a shell on the host runs; see ``start_agent``."""
    return AGENT.format(
        python=shlex.quote(python),
        same=shlex.quote(sys.executable),
        token=token,
    )


def connected(
    words: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    kept_open: int | None = None,
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a program that leads to an agent; return its keeper, and the pipe to the agent.

    Args:
        words: the program's command line.
        log: what it writes to its stderr.
        environment: of the program, by default this process's.
        kept_open: a descriptor that the keeper holds open as long as it lives.
    """
    pipe, theirs = Pipe()
    kept = [theirs.fileno()] if kept_open is None else [theirs.fileno(), kept_open]
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "ddpnb.launcher.keeper", str(theirs.fileno()), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            pass_fds=kept,
            start_new_session=True,  # interrupts are for the kernel
        )
    theirs.close()
    return process, pipe


_REASONS = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "has another host key than in your known_hosts: check the new key, then remove the old one "
        "in the way that `ssh {h}` names.",
    ),
    ("Host key verification failed", "has a host key that ssh does not know: {w}"),
    ("host key is known for", "has a host key that ssh does not know: {w}"),
    ("Permission denied", "does not let you in: set up a key, so that `ssh {h}` asks for nothing."),
    (
        "Could not resolve hostname",
        "is not known: check how it is written, or add it to ~/.ssh/config.",
    ),
    ("remote port forwarding failed", "does not forward Unix sockets: {f}"),
    ("No module named ddpnb.launcher", "has another version of ddpnb: install {v} there."),
    ("No module named 'ddpnb.launcher", "has another version of ddpnb: install {v} there."),
    ("No module named ddpnb", "has no ddpnb in its Python: install {v} there, or give --python."),
    ("No module named 'ddpnb", "has no ddpnb in its Python: install {v} there, or give --python."),
    ("No module named", "lacks a package that ddpnb needs ({l}): install {v} there."),
    ("no file with keys", "does not share your home folder: {l}."),
    (
        "no answer at",
        "does not reach this one ({l}): open its ports, or choose another --interface.",
    ),
    ("Connection timed out", "cannot be reached: no answer within {s} s."),
    ("Connection refused", "cannot be reached: no ssh server listens there."),
    ("No route to host", "cannot be reached: there is no route to it."),
)


def explain(host: str, code: int | None, log: Path, version: str) -> str:
    """Return the sentence on why a host's agent did not start, from ssh's exit code and stderr."""
    text = log.read_text(errors="replace") if log.exists() else ""
    last = (text.strip().splitlines() or [f"exit code {code}"])[-1].strip()
    words = {
        "h": host,
        "w": f"check the key, then connect once with `ssh {host}`.",
        "f": "its sshd needs AllowStreamLocalForwarding yes.",
        "v": f"ddpnb {version}",
        "s": CONNECT_SECONDS,
    }
    for found, reason in _REASONS:
        if line := next((each for each in text.splitlines() if found in each), ""):
            words["l"] = re.sub(r".*No module named ", "", line)
            return f"Host {host} {reason.format(**words)}"
    if code == NO_PYTHON:
        return f"Host {host} has no such Python: name one with --python PATH."
    return f"Host {host} could not be used: {last}"


def unfit(name: str, report: Mapping[str, Any], home: Path, interface: str) -> str:
    """Return the sentence on why a host cannot be used; empty if it can."""
    for package, here in (
        ("Python", ".".join(platform.python_version_tuple()[:2])),
        ("ddpnb", importlib.metadata.version("ddpnb")),
        ("torch", importlib.metadata.version("torch").split("+")[0]),
    ):
        there = str(report[package.lower()])
        if package == "Python":
            there = ".".join(there.split(".")[:2])
        if not there:
            return f"Host {name} has no {package}: install {package} {here} there, as it is here."
        if there.split("+")[0] != here:
            return (
                f"Host {name} has {package} {there}, and this one {here}: install the same "
                "version, or name another Python with --python."
            )
    if not report["has_home"]:
        return f"Host {name} has no folder {home}, in which this notebook's cells run: make it."
    if abs(off := report["clock"]) > MAX_CLOCK_SECONDS:
        return f"The clock of host {name} is off by {off:+.0f} s: set it, or run NTP on both."
    if interface and not report["address"]:
        known = ", ".join(report["interfaces"])
        return f"Host {name} has no interface {interface} with an IPv4 address; it has: {known}."
    return ""
