"""Hosts that ddpnb cannot use are named before anything starts."""

import secrets
import sys
import venv
from pathlib import Path

import pytest

from ddpnb.hosts.processes import start_cluster
from ddpnb.hosts.spec import HostsSpec
from ddpnb.protocol.errors import UserError
from tests.cluster.rig import wait_until
from tests.cluster.two_hosts import files_of

pytestmark = pytest.mark.usefixtures("hosts")


def refused(folder: Path, sentence: str, setting: str, python: str = sys.executable) -> None:
    """Check that ddpnb rejects host a if its Python has another environment."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec env {setting} {python} "$@"\n')
    program.chmod(0o755)
    with pytest.raises(UserError, match=sentence):
        start_cluster(HostsSpec(hosts="a:1", device="cpu", python=str(program)))


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("import platform; platform.python_version = lambda: '3.9.1'", r"Host a has Python 3\.9, "),
        (
            "import time; real = time.time; time.time = lambda: real() + 600",
            "clock of host a is off",
        ),
    ],
)
def test_another_python_and_another_clock(tmp_path, lines, sentence):
    """The host's Python reports another version, or a clock that is off by 600 s."""
    (tmp_path / "sitecustomize.py").write_text(lines)
    refused(tmp_path, sentence, f"PYTHONPATH={tmp_path}:$PYTHONPATH")


@pytest.mark.parametrize("package", ["torch", "ddpnb"])
def test_another_version_of_a_package(tmp_path, package):
    installed = tmp_path / f"{package}-0.0.9.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Name: {package}\nVersion: 0.0.9\n")
    sentence = rf"Host a has {package} 0\.0\.9, but this host has [\d.]+. Install the same version"
    refused(tmp_path, sentence, f"PYTHONPATH={tmp_path}:$PYTHONPATH")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("PYTHONPATH=", "Host a .* no module named ddpnb.*Install ddpnb"),
        ("PYTHONPATH=$PYTHONPATH", "Host a .* no module named zmq. Install ddpnb"),
    ],
)
def test_a_python_without_packages(tmp_path, setting, sentence):
    venv.create(tmp_path / "empty")
    refused(tmp_path, sentence, setting, str(tmp_path / "empty/bin/python"))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"hosts": "nobody:1"}, "Host nobody cannot be used: .* Connection refused"),
        ({"hosts": "stranger:1"}, "Host stranger .* host key is not known"),
        ({"hosts": "impostor:1"}, "Host impostor .* its host key differs"),
        ({"hosts": "locked:1"}, "Host locked .* Set up a key"),
        ({"hosts": "a:1", "python": "/nowhere/python"}, "Host a .*/nowhere/python: not found"),
        ({"hosts": "a:1", "interface": "net7"}, "Host a has no interface net7 .* lo, net0"),
        ({"hosts": "a:1", "device": "cuda"}, "Host a has no GPU"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_starts(spec, sentence, monkeypatch):
    tokens: list[str] = []
    token_hex = secrets.token_hex
    monkeypatch.setattr(secrets, "token_hex", lambda n: tokens.append(token_hex(n)) or tokens[-1])
    with pytest.raises(UserError, match=sentence):
        start_cluster(HostsSpec(**{"device": "cpu"} | spec))
    wait_until(lambda: not any(map(files_of, tokens)), "no file is left")


def test_a_folder_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rename(tmp_path / "renamed")
    monkeypatch.setattr(Path, "cwd", lambda: gone)
    with pytest.raises(UserError, match=f"Host a has no folder {gone}"):
        start_cluster(HostsSpec(hosts="a:1", device="cpu"))


def test_closed_ports_between_hosts_are_named(hosts):
    with hosts.parted(), pytest.raises(UserError, match="Host a cannot reach host b"):
        start_cluster(HostsSpec(hosts="a:1,b:1", device="cpu"))
