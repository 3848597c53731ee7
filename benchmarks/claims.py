"""Counts true and false claims of the summary sentence: ``python -m benchmarks claims``, 1.5 hours.

- ``same`` compares a strategy with itself under two names, on an idle machine.
- ``load`` does the same while a busy loop runs on every core.
- ``power`` slows the computation of rank 1 down in the second run (default: ``slow=1:1.1x``).  The
  last row has the ratio of the samples/s.  Example: ``claims:part=power,num=20,slow=1:1.2x``.
- ``advice`` does the same with 3 repeats.  If the sentence then names a number of repeats, a new
  comparison with this number follows.

Each comparison has 5 repeats.  Its first 3 repeats also count as a separate comparison.
``seconds=2`` makes each run longer.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from scipy.special import bdtr

from benchmarks.measure import Figure
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.placement import ClusterSpec
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.result import ComparisonResult
from ddpnb.results.comparison import Comparison
from ddpnb.results.store import Store
from ddpnb.session.comparison import prepare
from ddpnb.session.comparison_spec import ComparisonSpec

PAIR = ("ddp", "ddp:bucket_cap_mb=25")
"""One strategy under two names, because 25 MB is the default."""
NUM_REPEATS = 5
FEW_REPEATS = 3
SLOW = "1:1.1x"
CLAIM = re.compile(r"\d\.\d\d× ddp")
TRIAL_EPOCHS = 20.0
PARTS = ("same", "load", "power", "advice")


class Unseen:
    """A display without any output."""

    def announce(self, text: str) -> None: ...

    def begin(self, comparison: Comparison) -> None: ...

    def is_due(self) -> bool:
        return False

    def update(self, comparison: Comparison) -> None: ...

    def finish(self, result: ComparisonResult) -> None: ...


def measure(num: int = 100, seconds: float = 1.0, part: str = "", slow: str = SLOW) -> list[Figure]:
    figures = []
    cluster = Cluster.start(ClusterSpec(num_ranks=2, device="cpu"))
    with (
        contextlib.ExitStack() as opened,
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Store(Path(folder))) as store,
    ):
        opened.callback(cluster.stop)
        for each in (part,) if part else PARTS:
            with busy() if each == "load" else contextlib.nullcontext():
                slowed = slow if each in ("power", "advice") else ""
                measured = _advice if each == "advice" else _figures
                figures += measured(cluster, store, num, seconds, each, slowed)
    return figures


def _figures(
    cluster: Cluster, store: Store, num: int, seconds: float, part: str, slow: str
) -> Iterator[Figure]:
    epochs = _epochs(cluster, store, seconds)
    found = [compared(cluster, store, epochs, slow=slow) for _ in range(num)]
    frames = [each.runs().set_index(["strategy", "repeat"]) for each in found]
    speeds = [frame["samples_per_second"] for frame in frames]
    ratios = [
        speed[PAIR[1], repeat] / speed[PAIR[0], repeat]
        for speed in speeds
        for repeat in range(1, NUM_REPEATS + 1)
    ]
    pair = f"ddp with --slow {slow} compared with ddp" if slow else "ddp compared with itself"
    where = "busy loop on every core" if part == "load" else "idle machine"
    claim = "correct claim" if slow else "false claim"
    for repeats in (FEW_REPEATS, NUM_REPEATS):
        claims = [bool(CLAIM.search(said(each.comparison, repeats))) for each in found]
        limit = "<= 0.05" if part != "power" else ">= 0.8" if repeats == NUM_REPEATS else ""
        yield Figure(
            name=f"share of sentences with a {claim}: {pair} ({where}, {repeats} repeats of "
            f"{seconds:g} s)",
            unit=f"share of {num} sentences",
            ours=[sum(claims) / num],
            limit=limit,
            note="" if part == "power" else f"up to {_most(num)} by chance if the true rate is 5 %",
        )
    name = f"samples/s of the second run, divided by the first run: {pair} ({where})"
    yield Figure(name=name, unit="", ours=ratios)


def _advice(
    cluster: Cluster, store: Store, num: int, seconds: float, part: str, slow: str
) -> Iterator[Figure]:
    epochs = _epochs(cluster, store, seconds)
    claims, advised = [], []
    for _ in range(num):
        pilot = compared(cluster, store, epochs, num_repeats=FEW_REPEATS, slow=slow)
        if repeats := int(pilot.ratios().repeats_needed.iloc[0]):
            again = compared(cluster, store, epochs, num_repeats=repeats, slow=slow)
            claims.append(again.ratios().verdict.iloc[0] == "different")
            advised.append(repeats)
    pair = f"ddp with --slow {slow} compared with ddp"
    yield Figure(
        name=f"share of claims with the number of repeats that the sentence named: {pair} (runs of "
        f"{seconds:g} s)",
        unit=f"share of {len(claims)} sentences",
        ours=[sum(claims) / max(len(claims), 1)],
        limit=">= 0.8",
    )
    yield Figure(name="number of repeats that the sentence named", unit="repeats", ours=advised)


def _epochs(cluster: Cluster, store: Store, seconds: float) -> float:
    """Return the number of epochs that take ``seconds``."""
    trial = compared(cluster, store, TRIAL_EPOCHS, num_repeats=1).runs()
    last = trial.iloc[-1]  # the first run warmed the machine up
    return float(TRIAL_EPOCHS * seconds / last.seconds)


def _most(num: int) -> int:
    """Return the 95 % quantile of the number of claims in ``num`` sentences if 5 % are claims."""
    return next(most for most in range(num + 1) if bdtr(most, num, 0.05) >= 0.95)


def compared(
    cluster: Cluster, store: Store, epochs: float, *, num_repeats: int = NUM_REPEATS, slow: str = ""
) -> ComparisonResult:
    """Compare the strategy under its two names; ``slow`` concerns only the second."""
    training = TrainingSpec(task="digits", num_epochs=epochs)
    spec = ComparisonSpec(
        strategies=PAIR, training=training, num_repeats=num_repeats, baseline=False
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        made = prepare(cluster, store, spec, Unseen())
        if slow:
            made.specs = tuple(
                replace(each, slow=(slow,)) if each.strategy == PAIR[1] else each
                for each in made.specs
            )
        return made.run()


def said(comparison: Comparison, num_repeats: int) -> str:
    """Return the sentence about only the first ``num_repeats`` repeats."""
    runs = [run for run in comparison.runs if run.repeat < num_repeats]
    return ComparisonResult(comparison.with_runs(runs)).sentence()


@contextlib.contextmanager
def busy() -> Iterator[None]:
    num = len(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
