"""An asynchronous comparison goes on when a rank is killed, and the rank is restarted."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.results.run import RunSnapshot
from ddpnb.results.store import Store
from ddpnb.session.errors import RankError
from ddpnb.session.training import RunningComparison
from tests.cluster.rig import DYNAMO, prepared, pull, run, started, total, wait_until

CELL = """
import os, signal, sys, time, torch
from dataclasses import replace
from pathlib import Path
from torch import nn

def is_measured():
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_train":
        frame = frame.f_back
    return frame is not None

class Deadly(nn.Linear):
    num_calls = 0

    def forward(self, x):
        time.sleep(0.01 * self.training)
        Deadly.num_calls += is_measured()
        deadline = time.monotonic() + 60
        while rank != 1 and Path({hold!r}).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        marker = Path({marker!r})
        if rank == {rank} and Deadly.num_calls == {num_calls} and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

def model():
    return Deadly(4, 2)

def data(split):
    x = torch.randn(1000 if split == 'train' else 100, 4)
    return x, (x.sum(dim=1) > 0).long()
"""


def deadly(
    cluster: Cluster,
    folder: Path,
    *strategies: str,
    rank: int = 1,
    num_calls: int = 50,
    more: str = "",
    **options: Any,
) -> RunningComparison:
    """Prepare a training in which one rank kills its own process once."""
    signs = {sign: str(folder / sign) for sign in ("marker", "hold")}
    source = CELL.format(rank=rank, num_calls=num_calls, **signs) + more
    usual = {"source": source, "num_epochs": 3, "batch_size": 10}
    return prepared(cluster, folder, *strategies, **usual | options)


def trained(folder: Path, training: RunningComparison) -> RunSnapshot:
    """Train while a rank dies. The other ranks wait until the rank is back."""
    has_ended = threading.Event()

    def marks() -> int:
        return sum(len(run.marks) for run in training.recorder.comparison.runs)

    def hold() -> None:
        wait_until(lambda: marks() >= 1 or has_ended.is_set(), "the death", timeout=60)
        (folder / "hold").touch()
        wait_until(lambda: marks() >= 2 or has_ended.is_set(), "the return", timeout=60)
        (folder / "hold").unlink()

    return trained_beside(training, hold, has_ended)


def trained_beside(
    training: RunningComparison, beside: Callable[[], None], has_ended: threading.Event
) -> RunSnapshot:
    """Train while a thread calls a function, which returns soon after ``has_ended`` is set."""
    thread = threading.Thread(target=beside)
    thread.start()
    try:
        (snapshot,) = training.run().comparison.runs
    finally:
        has_ended.set()
        thread.join()
    return snapshot


@pytest.mark.parametrize("strategy", ["async", "hogwild"])
def test_a_killed_rank_costs_its_share_and_comes_back(cluster, tmp_path, capsys, strategy):
    run(cluster, "kept = rank")
    snapshot = trained(tmp_path, deadly(cluster, tmp_path, strategy))
    assert snapshot.status == "finished"
    assert [mark.text for mark in snapshot.marks] == ["killed", "came back"]
    assert {mark.rank for mark in snapshot.marks} == {1}
    rank_0 = snapshot.reports[0]
    # the rank may not have sent the steps of its last half second
    num_samples = snapshot.events["num_samples"].sum() + rank_0.num_lost_samples
    assert 3000 - 50 * 5 <= num_samples <= 3000
    assert 0 < rank_0.num_lost_samples <= 5
    assert rank_0.held_out_accuracy > 0.9
    events = snapshot.events[snapshot.events["rank"] == 1]
    came_back = snapshot.marks[1].seconds  # at its first step, not when the notebook noticed
    assert came_back in events["seconds"]
    assert (events["seconds"] >= came_back).sum() > 10
    assert 1 <= (events["seconds"] < came_back).sum() < 50  # steps of the dead process
    assert len(set(events["step"])) == len(events)
    assert "rank 1 died, and ddpnb restarted it without variables" in capsys.readouterr().err
    assert total(cluster) == [2.0, 2.0]
    assert pull(cluster, "kept", ranks=[0]) == [0]


LATE = """
deadline = time.monotonic() + 60
while rank == 1 and Path({marker!r}).exists() and not Path({over!r}).exists():
    assert time.monotonic() < deadline, "the run is not over"
    time.sleep(0.01)

class Judging(Deadly):
    def forward(self, x):
        if not self.training and Path({marker!r}).exists():
            Path({over!r}).touch()  # rank 0 judges what was trained
        return super().forward(x)

def model():
    return Judging(4, 2)
"""


def test_a_rank_that_comes_when_the_run_is_over_is_there_for_the_next(cluster, tmp_path):
    late = LATE.format(marker=str(tmp_path / "marker"), over=str(tmp_path / "over"))
    training = deadly(cluster, tmp_path, "async", more=late, num_calls=20, num_epochs=0.5)
    (snapshot,) = training.run().comparison.runs
    assert snapshot.status == "finished"
    assert [mark.text for mark in snapshot.marks] == ["killed"]  # the rank did not come back
    assert (tmp_path / "over").exists()
    assert total(cluster) == [2.0, 2.0]


def test_of_a_rank_killed_on_purpose_every_step_is_there(cluster, tmp_path):
    training = deadly(cluster, tmp_path, "async:bound=1", num_calls=-1, kill=("1@1s",))
    snapshot = trained(tmp_path, training)
    assert [mark.text for mark in snapshot.marks] == ["killed", "came back"]
    killed, came_back = (mark.seconds for mark in snapshot.marks)
    lost = snapshot.reports[0].num_lost_samples
    assert 0 < lost <= 5
    assert snapshot.events["num_samples"].sum() + lost == 3000
    ended = snapshot.events[snapshot.events["rank"] == 1]["seconds"]
    before = ended[ended < came_back].max()
    assert killed >= 1.0
    assert before <= killed + 0.01
    assert killed - before < 0.5


def test_the_death_of_rank_0_fails_the_run(cluster, tmp_path):
    with pytest.raises(RankError):
        deadly(cluster, tmp_path, "async", rank=0).run()


def test_what_a_rank_did_before_its_kill_failed_the_run_is_reported(cluster, tmp_path):
    deadly(cluster, tmp_path, "ddp", num_calls=-1, kill=("1@700ms",)).run()
    (snapshot,) = Store(tmp_path).load("cell-1").runs
    assert (snapshot.status, [mark.text for mark in snapshot.marks]) == ("failed", ["killed"])
    killed = snapshot.marks[0].seconds
    events = snapshot.events[snapshot.events["rank"] == 1]
    assert list(events["step"]) == list(range(len(events)))
    assert killed - 0.3 < events["seconds"][-1] <= killed + 0.01


def test_the_strategies_after_one_that_a_death_ended_are_trained(cluster, tmp_path, capsys):
    names, options = ("single", "ddp", "no-comm"), {"num_repeats": 2, "num_epochs": 0.3}
    with pytest.raises(RankError, match="rank 1"):
        deadly(cluster, tmp_path, *names, num_calls=20, **options).run()
    shown = capsys.readouterr().err
    assert "ddp failed. ddpnb skips it and still trains no-comm, single." in shown
    assert "ddp: rank 1 died, and ddpnb restarted it without variables" in shown
    assert pull(cluster, "1 + rank") == [1, 2]
    found = [(run.name, str(run.status)) for run in Store(tmp_path).load("cell-1").runs]
    others = [("single", "finished"), ("no-comm", "finished")]
    assert sorted(found) == sorted([*others, *others, ("ddp", "failed")])


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    with started(4, environment=DYNAMO) as cluster:
        yield cluster


OWN = """
from ddpnb.rank.strategies.async_ps import AsyncParameterServer
class Own(AsyncParameterServer): pass
"""


@pytest.mark.parametrize("strategy", ["hogwild", "Own"])
def test_all_ranks_but_one_may_die_at_any_time(four, tmp_path, strategy):
    """Ranks die together, one after the other, and again while they start."""
    draw = random.Random(strategy)
    moments = [draw.choice([0.0, 0.4, draw.uniform(0, 1)]) for _ in range(6)]
    deaths = sorted(zip(moments, [1, 2, 3] * 2, strict=True))
    run(four, "kept = rank")
    training = deadly(four, tmp_path, strategy, num_calls=-1, more=OWN, num_epochs=5)
    has_ended = threading.Event()

    def has_begun() -> bool:
        return any(run.num_samples for run in training.recorder.comparison.runs)

    def kill() -> None:
        wait_until(lambda: has_ended.is_set() or has_begun(), "a step")
        began = time.monotonic()
        for seconds, rank in deaths:
            if not has_ended.wait(began + seconds - time.monotonic()):
                four.kill([rank])

    snapshot = trained_beside(training, kill, has_ended)
    assert snapshot.status == "finished"
    assert {mark.rank for mark in snapshot.marks if mark.text == "killed"} == {1, 2, 3}
    assert not four.exits
    assert total(four) == [4.0] * 4
    assert pull(four, "kept", ranks=[0]) == [0]
