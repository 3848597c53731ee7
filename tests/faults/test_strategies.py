"""With every strategy, a failure or an interrupt ends the run on all ranks."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddpnb.cluster.call import CallEvent, Returned
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import ensure_group
from ddpnb.cluster.supervision import Watch
from ddpnb.protocol.calls import calls
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.messages import RunSpec
from ddpnb.results.run import Status
from ddpnb.session.errors import RankError
from tests.cluster.rig import DYNAMO, prepared, pull, run, started, wait_until

ALL = [*(name for name in STRATEGIES if name not in ("single", "dp")), "async:bound=1"]
WAIT_ELSEWHERE = ["async", "async:bound=1", "hogwild"]
"""Strategies with ranks that wait at sockets instead of in the process group."""
GENEROUS_SECONDS = 6.0
"""Time limit that suits a busy machine. The usual time is about one second."""

CELL = """
import time, torch
from pathlib import Path
from torch import nn

class Moody(nn.Linear):
    num_calls = 0

    def forward(self, x):
        Moody.num_calls += self.training  # in training alone, and behind the check and the warm-up
        if rank == 1 and self.training and Moody.num_calls == 40:
            Path({marker!r}).touch()
            {mood}
        time.sleep(0.002)
        return super().forward(x)

def model():
    return nn.Sequential(Moody(4, 4), nn.Linear(4, 2))

def data(split):
    x = torch.randn(400, 4)
    return x, (x.sum(dim=1) > 0).long()
"""
RAISES = "raise ZeroDivisionError('on purpose')"
SLEEPS = "time.sleep(1000)"
OF_A_RUN = (".clock", ".s", ".k", ".sum", ".w", ".q")
"""Suffixes of the files that a run makes in the cluster's folder."""
LONG = 500.0
SHORT = 2.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with started(2, environment=DYNAMO) as cluster:
        run(cluster, "kept = [rank]")
        yield cluster


@pytest.fixture(autouse=True)
def kept(cluster: Cluster) -> Iterator[None]:
    """Check after each test that the same processes are alive and have their variables."""
    pids = pull(cluster, "__import__('os').getpid()")
    yield
    assert not cluster.exits
    ensure_group(cluster)
    assert pull(cluster, "__import__('os').getpid()") == pids
    assert pull(cluster, "kept") == [[0], [1]]
    assert not [path.name for path in cluster.folder.iterdir() if path.suffix in OF_A_RUN]


def options(marker: Path, mood: str, num_epochs: float = LONG) -> dict[str, Any]:
    source = CELL.format(marker=str(marker), mood=mood)
    return {"source": source, "num_epochs": num_epochs, "batch_size": 10}


def call_once(marker: Path, function: Callable[[], object]) -> Future[float]:
    """Call a function in a thread as soon as a file exists. The future has the time of the call."""

    def call() -> float:
        wait_until(marker.exists, "a rank that trains", timeout=30)
        time.sleep(0.1)  # the other rank begins to wait
        began = time.monotonic()
        function()
        return began

    return ThreadPoolExecutor().submit(call)


@pytest.mark.parametrize("strategy", ALL)
def test_a_model_that_raises_on_one_rank_ends_the_run_for_all(cluster, tmp_path, strategy):
    training = prepared(cluster, tmp_path, strategy, **options(tmp_path / "marker", RAISES))
    with pytest.raises(RankError) as caught:
        training.run()
    ended = time.time()
    first, *others = caught.value.failures
    assert (first.rank, first.name) == (1, "ZeroDivisionError")
    assert all(failure.is_consequence for failure in others), others
    assert strategy != "no-comm" or not any(failure.was_waiting for failure in others)
    assert ended - first.failed_at < GENEROUS_SECONDS
    (snapshot,) = training.recorder.comparison.runs
    assert snapshot.status is Status.FAILED
    assert "on purpose" in snapshot.detail


@pytest.mark.parametrize(
    ("strategy", "is_stop"),
    [("async", True), *((name, False) for name in ("no-comm", *WAIT_ELSEWHERE))],
)
def test_an_interrupt_ends_a_run_in_which_a_rank_waits_also_some_time_after_a_stop(
    cluster, tmp_path, strategy, is_stop
):
    marker = tmp_path / "marker"
    training = prepared(cluster, tmp_path, strategy, **options(marker, SLEEPS))
    interrupt = partial(os.kill, os.getpid(), signal.SIGINT)
    called = call_once(marker, training.interrupt if is_stop else interrupt)
    with pytest.raises(KeyboardInterrupt):
        training.run()
    assert time.monotonic() - called.result() < GENEROUS_SECONDS
    (snapshot,) = training.recorder.comparison.runs
    assert (snapshot.status, snapshot.detail) == (Status.STOPPED, "interrupted")


@pytest.mark.parametrize("is_begun", [True, False])
@pytest.mark.parametrize("strategy", ["ddp", *WAIT_ELSEWHERE])
def test_to_cut_the_group_frees_whoever_waits(cluster, tmp_path, strategy, is_begun):
    """The rank waits for a step, or for the run to begin."""
    marker = tmp_path / "marker"
    chosen = options(marker, SLEEPS if is_begun else "pass", SHORT)
    spec = RunSpec(run_id=str(tmp_path), strategy=strategy, **chosen)
    if not is_begun:
        is_late = f"    if rank == 1: Path({str(marker)!r}).touch(); {SLEEPS}\n"
        source = spec.source.replace("def model():\n", f"def model():\n{is_late}")
        spec = replace(spec, source=source)
    ensure_group(cluster)
    freed: list[float] = []

    def handle(event: CallEvent) -> None:
        if isinstance(event, Returned) and event.rank == 0:
            freed.append(time.monotonic())
            watch.stop_requested = True  # interrupts rank 1's sleep

    watch = Watch(
        cluster=cluster,
        call=cluster.submit(calls.train(spec, None), cluster.ranks),
        handle=handle,
        timeout=30,
    )
    called = call_once(marker, lambda: cluster.abort([0]))
    watch.run()
    assert not watch.timed_out
    (failure,) = (each for each in watch.failures if each.rank == 0)
    assert failure.is_consequence, failure
    assert freed[0] - called.result() < GENEROUS_SECONDS
