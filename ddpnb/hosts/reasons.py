"""Sentences on why a host is of no use (kernel)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpnb.hosts.network import versions
from ddpnb.protocol.errors import UserError

MAX_CLOCK_SECONDS = 5.0
"""How far a host's clock may be off: times of runs and of checkpoints are compared."""

_REASONS = (
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


def explain(host: str, text: str) -> str:
    """Return the sentence on why a host's agent did not start.

    ``text`` is what ssh, the relay and the agent have written.
    """
    lines = text.strip().splitlines() or ["ssh has ended"]
    for found, reason in _REASONS:
        if line := next((each for each in lines if found in each), ""):
            line = line[line.find(found) :].replace("'", "").replace("No", "no", 1)
            words = {"host": host, "line": line, "version": versions()["ddpnb"]}
            return f"Host {host} cannot be used: {reason.format(**words)}."
    return f"Host {host} cannot be used: {lines[-1].strip().removesuffix('.')}."


def silent(host: str, seconds: float) -> str:
    """Return the sentence on a host that does not answer."""
    return (
        f"Host {host} has not answered within {seconds:g} s: it is too slow, or its connection "
        "was lost."
    )


def check(name: str, report: Mapping[str, Any], home: Path, interface: str) -> None:
    """Raise a UserError if a host cannot be used."""
    for package, here in versions().items():
        there = report["versions"][package] or "none"
        if there != here:
            raise UserError(
                f"Host {name} has {package} {there}, and this one {here}: install the same "
                "version, or name another Python with --python."
            )
    if not report["has_home"]:
        raise UserError(f"Host {name} has no folder {home}, where cells are to run: make it.")
    if abs(off := report["clock"]) > MAX_CLOCK_SECONDS:
        raise UserError(f"The clock of host {name} is off by {off:+.0f} s: run NTP on both.")
    if interface and not report["address"]:
        known = ", ".join(report["interfaces"])
        raise UserError(f"Host {name} has no interface {interface} with IPv4; it has: {known}.")
