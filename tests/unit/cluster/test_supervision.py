"""The loop that waits for a call ends it and reports it correctly, with fake ranks."""

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict

import pytest

from ddpnb.cluster.call import Call, CallEvent, Lost, OutputEnded, Returned, Timeouts
from ddpnb.cluster.supervision import Watch
from ddpnb.protocol.cell_messages import CellReport, Failure
from ddpnb.protocol.processes import RankCommand, RankStatus
from tests.cluster.rig import EIGHTH


class FakeCluster:
    """Two fake ranks that wait, and that obey a request if the test's ``obeys`` allows it."""

    def __init__(self, timeouts: Timeouts, *, obeys: Callable[[str], bool]) -> None:
        self.timeouts, self.obeys, self.processes = timeouts, obeys, self
        self.ranks = self.living = (0, 1)
        self.is_over = False
        self.supervised: list[Call] = []
        self.asked: list[str] = []
        self.survivors: set[int] = set()
        self.call = Call(ranks=(0, 1))
        self.abort = lambda ranks: self.ask("abort")
        self.interrupt = lambda ranks: self.ask("interrupt")
        self.kill = lambda ranks: self.ask("kill")

    def end(self, *ranks: int) -> None:
        for rank in ranks:
            self.call.inbox.put(Returned(rank=rank, value=CellReport()))
            self.call.inbox.put(OutputEnded(rank=rank))

    def ask(self, what: str) -> None:
        self.asked.append(what)
        if self.obeys(what):
            self.end(*self.call.running)

    def signal(self, ranks: Sequence[int], number: int) -> None:
        assert number == signal.SIGCONT

    def gather(self, *_: object) -> list[dict[str, int]]:
        return [{"world": 3}, {"world": 3}]

    def command(self, rank: int, command: RankCommand) -> "Future[object]":
        answer: Future[object] = Future()
        answer.set_result(asdict(RankStatus(rank=rank, is_busy=True, line=2, call="barrier")))
        return answer


def watched(cluster: FakeCluster) -> tuple[Watch, list[str]]:
    notes: list[str] = []
    watch = Watch(cluster=cluster, call=cluster.call, handle=lambda _: None, notify=notes.append)
    return watch, notes


@pytest.mark.parametrize(
    ("obeyed", "asked"),
    [
        ("interrupt", {"interrupt"}),
        ("abort", {"interrupt", "abort"}),
        ("kill", {"interrupt", "abort", "kill"}),
    ],
)
def test_a_stop_becomes_harder_until_it_is_obeyed(obeyed: str, asked: set[str]):
    quick = Timeouts(**{**asdict(EIGHTH), "kill_after_seconds": 0.3})
    cluster = FakeCluster(quick, obeys=lambda what: what == obeyed)
    watch, notes = watched(cluster)
    watch.stop_requested = True
    watch.run()
    assert not watch.timed_out
    assert set(cluster.asked) == asked
    assert not cluster.supervised
    assert not cluster.survivors
    assert len(notes) == (obeyed == "kill")


def test_output_that_comes_too_late_is_said_to_be_missing_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ddpnb.cluster.call.OUTPUT_TIMEOUT_SECONDS", 0.1)
    cluster = FakeCluster(Timeouts(), obeys=lambda _: False)
    watch, notes = watched(cluster)
    cluster.end(0)
    cluster.call.inbox.put(Returned(rank=1, value=CellReport()))
    watch.run()
    (note,) = notes
    assert "rank 1 " in note


def failed(rank: int, **more: bool) -> Returned:
    failure = Failure(rank=rank, name="ValueError", text="bad", failed_at=0.0, **more)
    return Returned(rank=rank, value=CellReport(failure=failure))


def ended(rank: int) -> Returned:
    return Returned(rank=rank, value=CellReport(num_collectives=3))


def noting(monkeypatch: pytest.MonkeyPatch) -> tuple[Watch, Callable[[CallEvent, float], None]]:
    """Return a watch over four ranks, and a function that hands it an event at a time."""
    cluster = FakeCluster(Timeouts(tick_seconds=0), obeys=lambda _: False)
    cluster.call = Call(range(4))
    watch, _ = watched(cluster)

    def note(event: CallEvent, now: float) -> None:
        monkeypatch.setattr("time.monotonic", lambda: now)
        cluster.call.inbox.put(event)
        watch._attend()

    return watch, note


def test_ranks_are_waited_for_after_a_failure_and_from_the_last_end_on(monkeypatch):
    watch, note = noting(monkeypatch)
    note(ended(0), 1.0)
    assert not watch.is_waited_for(now=9.0, seconds=2.0)
    note(failed(1), 10.0)
    note(ended(2), 11.0)
    assert not watch.is_waited_for(now=12.5, seconds=2.0)
    assert watch.is_waited_for(now=13.5, seconds=2.0)
    assert watch._failed_at == 10.0


def test_a_death_counts_as_a_failure_if_the_other_ranks_need_the_rank(monkeypatch):
    watch, note = noting(monkeypatch)
    watch.dispensable = (1, 2)
    note(Lost(rank=1, cause="was killed"), 1.0)
    assert not watch.is_waited_for(now=9.0, seconds=2.0)
    assert not watch.lost
    note(Lost(rank=0, cause="was killed"), 2.0)
    assert watch.lost == {0: "was killed"}
    assert watch._failed_at == 2.0


def test_causes_leave_out_what_followed_from_another(monkeypatch):
    watch, note = noting(monkeypatch)
    note(failed(0, is_consequence=True), 1.0)
    assert not watch.causes(), "a rank released from a hang is not a cause"
    note(failed(2), 1.0)
    note(Lost(rank=1, cause="was killed by SIGKILL"), 1.0)
    assert watch.causes() == "rank 1 was killed by SIGKILL; rank 2 failed: ValueError: bad"


def test_the_output_of_a_rank_that_ends_before_all_of_it_has_arrived_is_missing():
    call = Call([0, 1])
    for event in (ended(0), Lost(rank=0, cause="died"), Lost(rank=1, cause="died")):
        call.inbox.put(event)
    assert [type(event) for event in call.events(0.0)] == [Returned, Lost]
    assert call.speaking == {0}
