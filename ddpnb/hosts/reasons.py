"""Sentences on why a host is of no use (kernel)."""

import importlib.metadata
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONNECT_SECONDS = 10
"""How long ssh may take to connect."""
MAX_CLOCK_SECONDS = 5.0
"""How far a host's clock may be off: times of runs and of checkpoints are compared."""
NO_PYTHON = 127
"""The exit code of a shell that does not find a program."""

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
    ("No module named ddpnb.hosts", "has another version of ddpnb: install {v} there."),
    ("No module named ddpnb", "has no ddpnb in its Python: install {v} there, or give --python."),
    ("No module named", "lacks a package that ddpnb needs ({l}): install {v} there."),
    ("no answer at", "does not reach the kernel ({l}): does its sshd forward Unix sockets?"),
    ("Connection timed out", "cannot be reached: no answer within {s} s."),
    ("Connection refused", "cannot be reached: no ssh server listens there."),
    ("No route to host", "cannot be reached: there is no route to it."),
)


def explain(host: str, text: str, code: int | None = None) -> str:
    """Return the sentence on why a host's agent did not start.

    Args:
        host: its name.
        text: what ssh, the relay and the agent have written.
        code: the exit code of ssh, if that has ended.
    """
    text = text.replace("'", "")  # of a module's name
    last = (text.strip().splitlines() or [f"exit code {code}"])[-1].strip()
    words = {
        "h": host,
        "w": f"check the key, then connect once with `ssh {host}`.",
        "f": "its sshd needs AllowStreamLocalForwarding yes.",
        "v": f"ddpnb {importlib.metadata.version('ddpnb')}",
        "s": CONNECT_SECONDS,
    }
    for found, reason in _REASONS:
        if line := next((each for each in text.splitlines() if found in each), ""):
            words["l"] = re.sub(r".*No module named ", "", line)
            return f"Host {host} {reason.format(**words)}"
    if code == NO_PYTHON:
        return f"Host {host} has no such Python: name one with --python PATH."
    return f"Host {host} could not be used: {last}"


def silent(host: str, seconds: float) -> str:
    """Return the sentence on a host that does not answer."""
    return (
        f"Host {host} has not answered within {seconds:g} s: it is too slow, or its connection "
        "was lost."
    )


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
