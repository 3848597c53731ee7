"""When ranks are freed, and what is said of a failure: events and a clock, no process."""

from ddpnb.cluster.call import Lost, Returned
from ddpnb.cluster.outcome import Outcome
from ddpnb.protocol.messages import CellReport, Failure


def failed(rank: int, **more: bool) -> Returned:
    failure = Failure(rank=rank, name="ValueError", text="bad", failed_at=0.0, **more)
    return Returned(rank=rank, value=CellReport(failure=failure))


def ended(rank: int) -> Returned:
    return Returned(rank=rank, value=CellReport(num_collectives=3))


def test_ranks_are_waited_for_after_a_failure_and_from_the_last_end_on():
    outcome = Outcome()
    outcome.note(ended(0), now=1.0)
    assert not outcome.is_waited_for(now=9.0, seconds=2.0)
    outcome.note(failed(1), now=10.0)
    outcome.note(ended(2), now=11.0)
    assert not outcome.is_waited_for(now=12.5, seconds=2.0)
    assert outcome.is_waited_for(now=13.5, seconds=2.0)
    assert outcome.failed_at == 10.0
    assert outcome.num_collectives == {0: 3, 1: 0, 2: 3}


def test_a_death_counts_as_a_failure_where_the_others_cannot_go_on():
    outcome = Outcome(survives=lambda rank: rank == 1)
    outcome.note(Lost(rank=1, cause="was killed"), now=1.0)
    assert outcome.failed_at is None
    assert not outcome.lost
    outcome.note(Lost(rank=0, cause="was killed"), now=2.0)
    assert outcome.failed_at == 2.0


def test_causes_leave_out_what_followed_from_another():
    outcome = Outcome()
    outcome.note(failed(0, is_consequence=True), now=1.0)
    assert not outcome.causes(), "freed from a hang: none has failed"
    outcome.note(failed(2), now=1.0)
    outcome.note(Lost(rank=1, cause="was killed by SIGKILL"), now=1.0)
    assert outcome.causes() == "rank 1 was killed by SIGKILL; rank 2 failed: ValueError: bad"
