"""Steps that outlive the process of the rank that made them."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from ddpnb.notebook.record.events import EVENT
from ddpnb.unsent import NUM_KEPT, UnsentSteps, read_death, read_unsent
from ddpnb.wire import Mark, MarkKind, pack_step
from tests.record.fake_runs import step


def steps_in(folder: Path, run_id: str = "run", rank: int = 1) -> list[int]:
    rows = np.frombuffer(read_unsent(folder, rank=rank, run_id=run_id), dtype=EVENT)
    assert set(rows["rank"]) <= {rank}
    return [int(number) for number in rows["step"]]


def a_ring(folder: Path) -> UnsentSteps:
    ring = UnsentSteps.open(folder, rank=1, run_id="run")
    assert ring is not None
    return ring


@pytest.mark.parametrize("num_steps", [0, 1, NUM_KEPT, NUM_KEPT + 1, 3 * NUM_KEPT - 5])
def test_the_last_steps_are_there_in_order(tmp_path: Path, num_steps: int):
    ring = a_ring(tmp_path)
    for number in range(num_steps):
        ring.add(pack_step(1, step(number, 0.1 * number)))
    assert steps_in(tmp_path) == list(range(max(0, num_steps - NUM_KEPT), num_steps))


def test_they_are_of_one_run_and_one_rank(tmp_path: Path):
    a_ring(tmp_path).add(pack_step(1, step(0, 0.1)))
    assert steps_in(tmp_path) == [0]
    assert steps_in(tmp_path, run_id="the next") == steps_in(tmp_path, rank=0) == []
    a_ring(tmp_path)  # as a new process of the rank does
    assert steps_in(tmp_path) == []


def test_a_death_on_purpose_is_there_with_its_time(tmp_path: Path):
    ring, mark = a_ring(tmp_path), Mark(rank=3, seconds=1.25, kind=MarkKind.KILLED)
    assert read_death(tmp_path, rank=1, run_id="run") is None
    ring.add(pack_step(1, step(0, 0.1)))
    ring.add_death(mark)
    assert read_death(tmp_path, rank=1, run_id="run") == mark
    assert read_death(tmp_path, rank=1, run_id="the next") is None
    assert read_death(tmp_path, rank=0, run_id="run") is None
    assert steps_in(tmp_path) == [0]


def test_nothing_is_left_when_all_was_sent(tmp_path: Path):
    ring = a_ring(tmp_path)
    ring.add(pack_step(1, step(0, 0.1)))
    ring.close()
    ring.close()
    assert steps_in(tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_a_training_goes_on_without_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert UnsentSteps.open(tmp_path, rank=1, run_id="run") is None
    assert steps_in(tmp_path) == []
