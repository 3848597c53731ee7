"""Does an emulated link slow training down as much as a real one of the same figures?

    python -m tests.rank.test_shaped_link RANK FOLDER

is one rank of the real one: a plain script in a network namespace, which prints its step times.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddpnb.protocol.messages import RankState
from tests.delayed import INTERFACE, delayed_link, ip
from tests.rank.ranks import make_state
from tests.rank.runs import spec_of, steps_of, train_job
from tests.system_packages import skip_or_fail

ROOT = Path(__file__).parents[2]
RATE, DELAY_MS = "100Mbit", 2
SUBNET = "10.77.0"

CELL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 1000), nn.Linear(1000, 1000), nn.Linear(1000, 2))

def data(split):
    x = torch.randn(128, 8)
    return x, (x.sum(dim=1) > 0).long()
"""
"""A million floats, which take 0.32 s at 100 Mbit/s; it computes for hundredths of that."""

TRAININGS = {
    "ddp": {"slow": ("0:100ms", "1:100ms")},
    # rank 0, beside the server, would else take nearly all the samples
    "async": {"slow": ("0:600ms",), "num_epochs": 1.25},
}
"""With steps that sleep, so that it does not matter how busy the machine is."""


def step_seconds(state: RankState, folder: Path, **devices: str) -> dict[str, float]:
    """Return the median time of two steps in a row of each training on this rank."""
    found = {}
    for number, (strategy, options) in enumerate(TRAININGS.items()):
        chosen = {
            "num_epochs": 1,
            "num_warmup_steps": 1,
            "batch_size": 16,
            "eval_every": 0.0,
        } | options
        spec = spec_of(strategy, run_id=f"run-{number}", source=CELL, **devices, **chosen)
        ends = [event.seconds for event in steps_of(train_job(state, folder, spec))][1:]
        found[strategy] = statistics.median(
            after - before for before, after in zip(ends, ends[2:], strict=False)
        )
    return found


def emulated_seconds(state: RankState, folder: Path) -> dict[str, float]:
    link = f"{RATE},{DELAY_MS}ms"
    return step_seconds(state, folder, devices="2", compute="0.2ms/sample", link=link)


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(f"{SUBNET}.1", 29500, 2, is_master=rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    own = folder / str(rank)  # as on a host of its own: nothing goes through shared memory
    own.mkdir()
    print(json.dumps(step_seconds(make_state(rank, 2), own)))
    sys.stdout.flush()
    os._exit(0)  # with gloo, torch sometimes aborts a process at its normal end


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces, connected by a link of limited rate on which all comes later."""
    names = (f"ddpnb-{os.getpid()}-0", f"ddpnb-{os.getpid()}-1")
    rate = ("rate", RATE, "burst", "16kb", "limit", "16mb")
    with contextlib.ExitStack() as opened:
        try:
            for name in names:
                ip("netns", "add", name)
                opened.callback(ip, "netns", "delete", name)
                ip("-n", name, "link", "set", "lo", "up")
            opened.enter_context(delayed_link(names, subnet=SUBNET, seconds=DELAY_MS / 1000))
            for name in names:
                shaped = ("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *rate)
                ip("netns", "exec", name, *shaped)
        except (OSError, subprocess.CalledProcessError) as error:
            skip_or_fail(f"needs root, iproute2 and /dev/net/tun: {error}")
        yield names


def test_an_emulated_link_is_as_slow_as_a_shaped_one(ranks, namespaces):
    script = [sys.executable, "-m", "tests.rank.test_shaped_link"]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *script, str(rank), folder],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": INTERFACE},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(namespaces)
        ]
        try:
            emulated = ranks(2).call(emulated_seconds)
            printed = [process.communicate(timeout=100)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    real = [json.loads(text.splitlines()[-1]) for text in printed]
    # rank 1: rank 0 reaches its own server without any link
    ratios = {each: emulated[1][each] / real[1][each] for each in TRAININGS}
    # 0.9 to 1.04 on an idle machine; a message or a delay too many would be half as much again.
    assert ratios == pytest.approx(dict.fromkeys(TRAININGS, 1), abs=0.25)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
