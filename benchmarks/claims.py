"""Is what the sentence claims true?  ``python -m benchmarks claims``, about an hour and a half.

``same``: a strategy against itself under two names, on an idle machine; ``load``: the same beside a
busy loop on every core; ``power``: rank 1 of the second one is slower, by ``slow=1:1.1x`` if
nothing is said.  Only its computation is: the last row says what the step lost.  Each of the
comparisons has 5 repeats; its first 3 make a comparison of their own.

In parts: ``claims:part=power,num=20,slow=1:1.2x``; ``seconds=2`` makes each run longer.
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
from ddpnb.history.comparison import Comparison
from ddpnb.history.store import Store
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.result import ComparisonResult
from ddpnb.reports.sentence import sentence
from ddpnb.session.comparison import prepare
from ddpnb.session.comparison_spec import ComparisonSpec

PAIR = ("ddp", "ddp:bucket_cap_mb=25")
"""One strategy under two names: 25 MB is the default."""
NUM_REPEATS = 5
FEW_REPEATS = 3
SLOW = "1:1.1x"
CLAIM = re.compile(r"\d\.\d\d× ddp")
TRIAL_EPOCHS = 20.0
PARTS = ("same", "load", "power")


class Unseen:
    """A display that shows nothing."""

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
                slowed = slow if each == "power" else ""
                figures += _figures(cluster, store, num, seconds, each, slowed)
    return figures


def _figures(
    cluster: Cluster, store: Store, num: int, seconds: float, part: str, slow: str
) -> Iterator[Figure]:
    trial = compared(cluster, store, TRIAL_EPOCHS, num_repeats=1).to_frame()
    last = trial.iloc[-1]  # the first one found a cold machine
    epochs = TRIAL_EPOCHS * seconds / last.seconds
    found = [compared(cluster, store, epochs, slow=slow) for _ in range(num)]
    frames = [each.to_frame().set_index(["strategy", "repeat"]) for each in found]
    speeds = [frame["samples_per_second"] for frame in frames]
    ratios = [
        speed[PAIR[1], repeat] / speed[PAIR[0], repeat]
        for speed in speeds
        for repeat in range(1, NUM_REPEATS + 1)
    ]
    what = {
        "same": "ddp against itself, idle",
        "load": "ddp against itself, beside a busy loop on every core",
        "power": f"ddp against ddp under --slow {slow}, idle",
    }[part]
    for repeats in (FEW_REPEATS, NUM_REPEATS):
        claims = [bool(CLAIM.search(said(each.comparison, repeats))) for each in found]
        limit = "<= 0.05" if part != "power" else ">= 0.8" if repeats == NUM_REPEATS else ""
        yield Figure(
            name=f"sentences that claim a difference, {what}, {repeats} repeats of {seconds:g} s",
            unit=f"of {num} sentences",
            ours=[sum(claims) / num],
            limit=limit,
            note="" if part == "power" else f"at a true 5 %, up to {_most(num)} by chance",
        )
    yield Figure(name=f"samples/s of the second over the first, {what}", unit="", ours=ratios)


def _most(num: int) -> int:
    """Return how many of so many sentences claim something in 95 % of cases, if 5 % do in truth."""
    return next(most for most in range(num + 1) if bdtr(most, num, 0.05) >= 0.95)


def compared(
    cluster: Cluster, store: Store, epochs: float, *, num_repeats: int = NUM_REPEATS, slow: str = ""
) -> ComparisonResult:
    """Compare the two names; only the second one is slow."""
    training = TrainingSpec(task="digits", num_epochs=epochs)
    spec = ComparisonSpec(
        strategies=PAIR, training=training, num_repeats=num_repeats, baseline=False
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        made = prepare(cluster, store, spec, Unseen())  # type: ignore[arg-type]
        if slow:
            made.specs = tuple(
                replace(each, slow=(slow,)) if each.strategy == PAIR[1] else each
                for each in made.specs
            )
        return made.run()


def said(comparison: Comparison, num_repeats: int) -> str:
    """Return the sentence about the first repeats alone."""
    return sentence(
        comparison.with_runs([run for run in comparison.runs if run.repeat < num_repeats])
    )


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Keep every core busy."""
    num = len(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
