import math

import numpy as np
import pytest

from ddpnb.history.align import MAX_LAG_STEPS, AsynchronousAligner, SynchronousAligner
from ddpnb.history.database import EVENT, Records
from ddpnb.protocol.messages import Parts, StepEvent, pack_step


def reported(rank: int, *steps: StepEvent) -> Records:
    return np.frombuffer(b"".join(pack_step(rank, step) for step in steps), dtype=EVENT)


def timed(
    step: int, seconds: float, *, communication: float = 0.0, waiting: float = 0.0
) -> StepEvent:
    parts = Parts(forward=0.1, communication=communication, optimizer=0.5, waiting=waiting)
    return StepEvent(step=step, seconds=seconds, num_samples=10, loss=1.0, parts=parts)


def waiting_of(rows: Records) -> dict[int, tuple[float, float]]:
    """Waiting and communication by rank."""
    return {
        int(row["rank"]): (
            pytest.approx(float(row["waiting"]), abs=1e-6),
            pytest.approx(float(row["communication"]), abs=1e-6),
        )
        for row in rows
    }


def test_waiting_is_separated_from_communication_by_the_last_arrival():
    aligner = SynchronousAligner(2, 20)
    aligner.add(reported(0, timed(0, 10.0, communication=4.0)))  # arrived at 5.5
    updates = aligner.add(reported(1, timed(0, 10.0, communication=1.0)))  # at 8.5
    assert waiting_of(updates.rows) == {0: (3.0, 1.0), 1: (0.0, 1.0)}


def test_no_rank_waits_longer_than_it_communicates():
    aligner = SynchronousAligner(2, 20)
    aligner.add(reported(0, timed(0, 5.0, communication=1.0)))
    updates = aligner.add(reported(1, timed(0, 50.0, communication=1.0)))
    assert waiting_of(updates.rows)[0] == (1.0, 0.0)


def test_a_strategy_that_reports_its_waiting_is_believed():
    aligner = SynchronousAligner(2, 20)
    aligner.add(reported(0, timed(0, 10.0, communication=4.0, waiting=0.25)))
    updates = aligner.add(reported(1, timed(0, 10.0, communication=1.0)))
    assert waiting_of(updates.rows) == {0: (0.25, 4.0), 1: (0.0, 1.0)}


def test_steps_of_a_ceiling_that_only_the_faster_rank_made_are_none():
    aligner = SynchronousAligner(2, 20, is_ceiling=True)
    aligner.add(reported(0, *(timed(step, 1.0 + step) for step in range(4))))
    assert aligner.add(reported(1, timed(0, 4.0))).seconds.tolist() == [4.0]
    assert aligner.end().seconds.tolist() == []


def test_a_share_that_comes_late_counts_to_the_next_step():
    aligner = SynchronousAligner(2, 20)
    aligner.add(reported(0, *(timed(step, step + 1.0) for step in range(MAX_LAG_STEPS + 2))))
    updates = aligner.add(reported(1, timed(0, 1.0)))
    assert updates.weight.tolist() == [20]
    assert aligner.end().weight.sum() == (MAX_LAG_STEPS - 1) * 10


def test_a_worker_that_fell_silent_is_not_waited_for():
    now = [0.0]
    aligner = AsynchronousAligner(2, now=lambda: now[0])
    aligner.add(reported(0, timed(0, 1.0)))
    aligner.add(reported(1, timed(0, 0.5)))
    assert len(aligner.add(reported(0, timed(1, 2.0))).loss) == 0
    now[0] = 10.0
    assert aligner.add(reported(0, timed(2, 3.0))).seconds.tolist() == [1.0, 2.0, 3.0]


def test_a_worker_that_never_reports_is_not_waited_for():
    now = [0.0]
    aligner = AsynchronousAligner(2, now=lambda: now[0])
    assert len(aligner.add(reported(0, timed(0, 1.0))).loss) == 0
    now[0] = 10.0
    assert aligner.add(reported(0, timed(1, 2.0))).seconds.tolist() == [1.0, 2.0]
    assert aligner.is_in_order


def test_what_a_silent_worker_reports_after_all_is_no_longer_in_order():
    now = [0.0]
    aligner = AsynchronousAligner(2, now=lambda: now[0])
    aligner.add(reported(1, timed(0, 0.5)))
    now[0] = 10.0
    assert aligner.add(reported(0, timed(0, 1.0), timed(1, 2.0))).seconds.tolist() == [
        0.5,
        1.0,
        2.0,
    ]
    assert aligner.is_in_order
    aligner.add(reported(1, timed(1, 1.5)))
    aligner.end()
    assert not aligner.is_in_order


def test_steps_behind_one_that_no_rank_reported_are_there_in_the_end():
    aligner = SynchronousAligner(2, 20)
    aligner.add(reported(0, timed(0, 1.0), timed(3, 4.0)))
    assert aligner.add(reported(1, timed(0, 1.0), timed(3, 4.5))).seconds.tolist() == [1.0]
    assert aligner.end().seconds.tolist() == [4.5]


def test_nan_losses_stay_nan():
    event = StepEvent(step=0, seconds=1.0, num_samples=10, loss=math.inf)
    assert math.isinf(SynchronousAligner(1, 10).add(reported(0, event)).loss[0])
