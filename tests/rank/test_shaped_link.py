"""Does an emulated link slow training down as much as a real one of the same figures?"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rank.shaped import TRAININGS, step_seconds
from tests.system_packages import find_program, skip_or_fail

ROOT = Path(__file__).parents[2]
RATE = "100Mbit"
DELAY = "2ms"
VETH_LATENCY = "0.05ms"
"""Of the real one without a delay: what the kernel takes from one end to the other."""


@dataclass(frozen=True, kw_only=True)
class ShapedLink:
    namespaces: tuple[str, str]
    interface: str
    figures: str
    """As for ``--link``."""


@pytest.fixture(scope="module")
def shaped() -> Iterator[ShapedLink]:
    """Two network namespaces, connected by a pair of interfaces of limited rate."""
    ip = find_program(["ip"], "needs iproute2")
    tc = find_program(["tc"], "needs iproute2")
    if os.geteuid() != 0:
        skip_or_fail("needs root, to make network namespaces")
    names = tuple(f"ddpnb-{os.getpid()}-{rank}" for rank in range(2))
    try:
        for name in names:
            call(ip, "netns", "add", name)
        first, second = names
        peer = ("peer", "name", "shaped", "netns", second)
        call(ip, "link", "add", "shaped", "netns", first, "type", "veth", *peer)
        latency = VETH_LATENCY
        for rank, name in enumerate(names):
            call(ip, "-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "shaped")
            for interface in ("lo", "shaped"):
                call(ip, "-n", name, "link", "set", interface, "up")
            call(ip, "-n", name, "link", "set", "shaped", "mtu", "9000")  # few headers
            rate = ("handle", "1:", "tbf", "rate", RATE, "burst", "16kb", "limit", "16mb")
            call(tc, "-n", name, "qdisc", "add", "dev", "shaped", "root", *rate)
            delay = ("parent", "1:", "netem", "delay", DELAY, "limit", "100000")
            if has_netem(tc, name, delay):
                latency = DELAY
        yield ShapedLink(
            namespaces=(first, second), interface="shaped", figures=f"{RATE},{latency}"
        )
    except subprocess.CalledProcessError as error:
        skip_or_fail(f"{' '.join(error.cmd)}: {error.stderr}")
    finally:
        for name in names:
            subprocess.run([ip, "netns", "delete", name], check=False, capture_output=True)


def call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)


def has_netem(tc: str, namespace: str, delay: tuple[str, ...]) -> bool:
    """Whether this kernel can delay what goes out; then it does."""
    words = [tc, "-n", namespace, "qdisc", "add", "dev", "shaped", *delay]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def in_namespace(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


def test_an_emulated_link_is_as_slow_as_a_shaped_one(ranks, shaped):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        processes = [
            subprocess.Popen(
                [*in_namespace(name), sys.executable, "-m", "tests.rank.shaped", str(rank), folder],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": shaped.interface},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(shaped.namespaces)
        ]
        try:
            emulated = ranks(2).call(step_seconds, shaped.figures)
            printed = [process.communicate(timeout=100)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    real = [json.loads(text.splitlines()[-1]) for text in printed]
    ratios = {}
    for strategy in TRAININGS:  # rank 1: rank 0 reaches its own server without any link
        ratios[strategy] = emulated[1][strategy] / real[1][strategy]
        print(f"{strategy}: {emulated[1][strategy]:.3f} s, shaped {real[1][strategy]:.3f} s")
    assert ratios == pytest.approx(dict.fromkeys(TRAININGS, 1), abs=0.15)
