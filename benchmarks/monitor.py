"""Measures how much a training slows down because ddpnb polls the state of the ranks.

One training switches every second between polling as usual, not at all, and as often as the
notebook can.  So other load on this machine affects all three.  With frequent polls the cost shows
several times as large.
"""

import json
import textwrap

import numpy as np

from benchmarks.kernel import Kernel, kernel
from benchmarks.measure import Figure
from benchmarks.work import LOOP

WINDOW_SECONDS = 1
NUM_TURNS = 30
EVERY = {"asked": 0.8, "never": 1e9, "often": 0.0}
"""Seconds between two polls, for each kind of turn; "often" takes about 0.1 s."""

TAKE_TURNS = textwrap.dedent(
    f"""
    import threading, time
    from dataclasses import replace
    from ddpnb.session.session import this_session
    cluster = this_session()._cluster
    is_over = threading.Event()
    def take_turns():
        while not is_over.wait(0.02):
            turn = int(time.time() / {WINDOW_SECONDS}) % {len(EVERY)}
            seconds = {list(EVERY.values())}[turn]
            cluster.timeouts = replace(cluster.timeouts, poll_seconds=seconds)
    threading.Thread(target=take_turns, daemon=True).start()
    """
).lstrip()
"""Takes turns by the clock, which is the same for the kernel and the ranks."""

STOP_TURNS = "is_over.set()"
PREPARE = "%%ddp\nimport json, time\nmoments = []"
PRINT = "%%rank 0\nprint(json.dumps(moments))"

CELL = "%%ddp\n" + LOOP[: LOOP.index("dist.barrier()")]
CELL += textwrap.dedent(
    f"""
    go_on, end = torch.ones(1), time.time() + {WINDOW_SECONDS * len(EVERY) * (NUM_TURNS + 1)}
    while go_on.item():
        steps(1)
        moments.append(time.time())
        go_on.fill_(float(time.time() < end))
        dist.broadcast(go_on, 0)
    """
)

COMPARE = textwrap.dedent(
    """
    %%ddp_compare ddp --epochs {epochs} --batch-size 256 --no-baseline --name monitor
    import torch
    from torch import nn

    def model():
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10),
        )

    def data(split):
        return torch.randn(8192, 1, 8, 8), torch.randint(0, 10, (8192,))

    def loss(outputs, targets):
        moments.append(time.time())
        return nn.functional.cross_entropy(outputs, targets)
    """
).lstrip()
STEPS_AN_EPOCH = 8192 // 256


def rates(moments: list[float]) -> dict[str, list[float]]:
    """Return the steps/s of each whole turn, by its kind; ``moments`` are seconds since 1970."""
    windows = np.arange(np.ceil(moments[0] / WINDOW_SECONDS), moments[-1] // WINDOW_SECONDS + 1)
    made = np.interp(windows * WINDOW_SECONDS, moments, np.arange(len(moments)))
    found = np.diff(made) / WINDOW_SECONDS
    turns = windows[:-1].astype(int) % len(EVERY)
    return {name: found[turns == turn].tolist() for turn, name in enumerate(EVERY)}


def moments_of(running: Kernel, training: str) -> list[float]:
    """Run a training during which ddpnb polls in turns, and return the time of each step."""
    running.run(PREPARE)
    running.run(TAKE_TURNS)
    running.run(training)
    running.run(STOP_TURNS)
    printed = running.run(PRINT)
    found: list[float] = json.loads(printed[printed.index("[", 1 + printed.index("]")) :])
    return found


def comparison(running: Kernel) -> list[float]:
    """Return the times of the steps of a comparison with the same number of turns as the cell."""
    tried = moments_of(running, COMPARE.format(epochs=20))
    seconds_a_step = (tried[-1] - tried[len(tried) // 2]) / (len(tried) - len(tried) // 2)
    epochs = WINDOW_SECONDS * len(EVERY) * NUM_TURNS / (seconds_a_step * STEPS_AN_EPOCH)
    return moments_of(running, COMPARE.format(epochs=round(epochs)))


def measure() -> list[Figure]:
    with kernel() as running:
        running.run("%load_ext ddpnb\n%ddp_start -n 2")
        found = {
            "a %%ddp cell": rates(moments_of(running, CELL)),
            "a comparison": rates(comparison(running)),
        }
        running.run("%ddp_stop")
    return [
        Figure(
            name=f"steps/s of ddp in {name} while ddpnb polls the ranks {how}, compared with no "
            "polling (2 ranks)",
            unit="steps/s",
            ours=rate[kind],
            theirs=rate["never"],
            limit=limit,
        )
        for name, rate in found.items()
        for kind, how, limit in (
            ("asked", "as usual", ">= 0.99"),
            ("often", "eight times as often", ">= 0.92"),
        )
    ]
