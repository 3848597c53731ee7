"""Repeats three published results at a small scale.

- Mitliagkas et al., "Asynchrony begets Momentum", 2016: N workers that finish in random order act
  as a momentum of 1 - 1/N.
- Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020: averaging every H steps
  sends 1/H of the bytes.  The loss after the same number of samples rises with H.
- Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018: one
  slow worker slows all-reduce down to its speed, but not asynchronous workers (here: ``async``).
"""

import contextlib
import io
import textwrap
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd

import ddpnb
from benchmarks.measure import Figure
from ddpnb.reports.result import ComparisonResult

WORKERS = (2, 3, 4)
REPEATS = 40
NUM_UPDATES = 60
ROUNDS = (1, 2, 4, 8, 16)
FACTORS = (2, 4, 10)
LINK = "100Mbit,1ms"

PARABOLA = textwrap.dedent(
    f"""
    import random
    import time

    import torch
    from torch import nn

    class Parabola(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

    model = Parabola

    def data(split):
        return torch.zeros({NUM_UPDATES} if split == "train" else 1, 1)

    def training_step(model, batch):
        w = next(model.parameters())
        read = w.item()
        time.sleep(random.expovariate(1 / 0.01))  # has no memory, like the paper's queue
        return {{"loss": w**2 / 2, "w": read}}
    """
)


def measure(part: str = "") -> list[Figure]:
    """Measure all three results, or one: ``papers:part=stragglers``."""
    parts = {"momentum": momentum, "local_sgd": local_sgd, "stragglers": stragglers}
    with TemporaryDirectory() as folder, contextlib.chdir(folder):  # runs are stored there
        return [figure for name, each in parts.items() if part in ("", name) for figure in each()]


def momentum() -> Iterator[Figure]:
    """Fit v(t+1) = m v(t) - a w(t), with v(t) = w(t) - w(t-1), to the mean of many runs."""
    for num_workers in WORKERS:
        ddpnb.start(num_workers)
        try:
            result = compare(
                "async",
                source=PARABOLA,
                batch_size=num_workers,
                epochs=1,
                lr=1.0,
                repeats=REPEATS,
            )
        finally:
            ddpnb.stop()
        steps = result.steps()
        runs = [trace(each) for _, each in steps.groupby("repeat")]
        shortest = min(map(len, runs))
        w = np.mean([run[:shortest] for run in runs], axis=0)
        v = np.diff(w)
        known = np.stack([v[:-1], -w[1:-1]], axis=1)
        (fitted, _), *_ = np.linalg.lstsq(known, v[1:], rcond=None)
        yield Figure(
            name=f"momentum of asynchrony, {num_workers} workers, compared with 1 - 1/N",
            unit="",
            ours=[float(fitted)],
            theirs=[1 - 1 / num_workers],
            note=f"mean of {REPEATS} runs of {shortest} updates of a parabola",
        )


def trace(steps: pd.DataFrame) -> list[float]:
    """Return w after each update: the value that the same worker read for its next step."""
    ordered = steps.sort_values("seconds").reset_index(drop=True)
    after = ordered.groupby("rank")["w"].shift(-1)
    return [1.0, *after[: after.isna().idxmax()].tolist()]


def local_sgd() -> Iterator[Figure]:
    ddpnb.start(2)
    try:
        names = {h: f"local-sgd:every={h}" for h in ROUNDS}
        result = compare(*names.values(), task="digits", epochs=8, link=LINK)
    finally:
        ddpnb.stop()
    rows = result.to_frame().set_index("strategy")
    first = rows.loc[names[1]]
    for h, name in names.items():
        row = rows.loc[name]
        yield Figure(
            name=f"bytes sent by local-sgd:every={h}, divided by every=1, compared with 1/H",
            unit="",
            ours=[row["bytes_sent_per_step"] / first["bytes_sent_per_step"]],
            theirs=[1 / h],
            note=f"{row['samples_per_second'] / first['samples_per_second']:.2f} times the "
            f"samples/s of every=1 over {LINK}; training loss {row['final_loss']:.3f}",
        )


def stragglers() -> Iterator[Figure]:
    """Compare the samples/s with and without a slow rank 1: medians of three runs."""
    ddpnb.start(2)
    try:
        rates = {
            factor: compare("ddp", "async", task="digits", epochs=40, repeats=3, **slow)
            .to_frame()
            .groupby("strategy")["samples_per_second"]
            .median()
            for factor, slow in (
                (1, {}),
                *((factor, {"slow": f"1:{factor}x"}) for factor in FACTORS),
            )
        }
    finally:
        ddpnb.stop()
    for factor in FACTORS:
        for name, expected in (("ddp", 1 / factor), ("async", (1 + 1 / factor) / 2)):
            yield Figure(
                name=f"samples/s of {name} if one of 2 ranks takes {factor} times as long, "
                "divided by samples/s without a slow rank",
                unit="",
                ours=[rates[factor][name] / rates[1][name]],
                theirs=[expected],
                note="theirs: the speed of the slowest rank, or the sum of both ranks' speeds",
            )


def compare(*strategies: str, **options: object) -> ComparisonResult:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        result = ddpnb.compare(*strategies, baseline=False, **options)
    assert isinstance(result, ComparisonResult), "it waits"
    return result
