import math

import pytest

from ddpnb.history.metrics import absences, slowness, step_split
from ddpnb.history.model import Run
from ddpnb.protocol.messages import Mark, MarkKind
from tests.unit.history.fake_runs import batch, fake_run, step


def test_the_mean_step_adds_up_and_hidden_time_is_not_in_it():
    run = fake_run("ddp", num_steps=50).snapshot()
    split = step_split([run, run])
    assert split.seconds == pytest.approx(float(run.events["seconds"].max()) / 50, rel=0.05)
    assert split.parts.hidden > 0
    assert split.exposed_share == pytest.approx(0.24, abs=0.01)
    assert split.num_bytes_sent == 49_380


def test_a_slow_rank_makes_the_other_wait():
    run = fake_run("ddp", num_steps=50, slow_rank=1).snapshot()
    first, second = run.aggregate.ranks
    assert first.parts.waiting > 10 * second.parts.waiting
    times = slowness(run.aggregate.ranks)
    assert times[0] == 1.0
    assert times[1] > 1.15


def test_nothing_is_known_of_a_run_without_parts():
    split = step_split([Run(run_id="m", name="mine").snapshot()])
    assert not split.is_known
    assert math.isnan(split.exposed_share)
    assert slowness([]) == {}


@pytest.mark.parametrize("marked_at", [7.0, 7.5])
def test_a_rank_that_died_is_away_from_its_last_step_until_its_next(marked_at: float):
    run = Run(run_id="m", name="mine", num_ranks=2)
    run.add(batch("m", [step(i, i + 1.0) for i in range(9)]))
    marks = [
        Mark(rank=1, seconds=at, kind=kind)
        for at, kind in ((3.4, MarkKind.KILLED), (marked_at, MarkKind.CAME_BACK))
    ]
    run.add(
        batch("m", [step(i, at) for i, at in enumerate((1.0, 3.0, 7.0, 8.0))], rank=1, marks=marks)
    )
    run.end("finished")
    assert absences(run.snapshot()) == {1: [(3.0, 7.0)]}
    run.add(batch("m", [], sequence=1, marks=[Mark(rank=0, seconds=9.5, kind=MarkKind.DIED)]))
    assert absences(run.snapshot()) == {1: [(3.0, 7.0)], 0: [(9.0, math.inf)]}
