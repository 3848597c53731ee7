"""A comparison that starts the ranks itself, in the background, as the panel's does."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ddpnb import api
from ddpnb.cluster.placement import ClusterSpec
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import RankCommand
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.session.comparison_spec import ComparisonSpec
from ddpnb.session.jobs import RunningComparison
from ddpnb.session.session import Session
from tests.rank.ranks import make_state

SPEC = ComparisonSpec(strategies=("ddp",), training=TrainingSpec(task="digits"))
STATES = tuple(make_state(rank, 2) for rank in (0, 1))


class FakeCluster(SimpleNamespace):
    """Two ranks that run nothing."""

    def __init__(self) -> None:
        super().__init__(states=STATES, ranks=(0, 1), living=(0, 1), exits={}, lost=None)
        self.is_local, self.busy, self.missing, self.is_stopped = True, set(), (), False
        self.processes = SimpleNamespace(command=self.command)
        self.commands: list[tuple[int, RankCommand]] = []

    def require(self, ranks: object) -> None:
        """Accept whatever is asked for."""

    def stop(self) -> None:
        self.is_stopped = True

    def command(self, rank: int, command: RankCommand) -> object:
        self.commands.append((rank, command))
        return SimpleNamespace(done=lambda: True)


@pytest.fixture
def slow_start(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A start that takes until ``go_on`` is set, and reports its phases as the real one does."""
    start = SimpleNamespace(go_on=threading.Event(), began=threading.Event(), clusters=[])

    def begin(_: ClusterSpec, progress: Callable[[str], None]) -> FakeCluster:
        start.began.set()
        start.go_on.wait(20)
        progress("2 ranks form a process group")
        start.clusters.append(FakeCluster())
        return start.clusters[-1]

    monkeypatch.setattr("ddpnb.session.session.start_cluster", begin)
    return start


def press_run(session: Session) -> RunningComparison:
    shown = SimpleNamespace(announce=lambda text: None)
    return session.compare_in_background(
        SPEC, cluster=ClusterSpec(num_ranks=2), live=shown, on_end=lambda _: None
    )


def test_run_pressed_twice_starts_one_cluster(slow_start: SimpleNamespace):
    session = Session()
    press_run(session)
    with pytest.raises(UserError, match="A comparison is training"):
        press_run(session)
    session.interrupt()
    slow_start.go_on.set()


def test_stop_ends_a_start_in_the_background(slow_start: SimpleNamespace):
    session = Session()
    running = press_run(session)
    slow_start.began.wait(20)
    threading.Timer(0.2, slow_start.go_on.set).start()
    assert session.stop()
    assert running.was_stopped
    assert session.num_ranks is None
    assert all(cluster.is_stopped for cluster in slow_start.clusters)


def test_ranks_that_the_panel_started_are_busy_while_they_train(
    slow_start: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    trains, session = threading.Event(), Session()
    monkeypatch.setattr(api, "this_session", lambda: session)
    slow_start.go_on.set()
    monkeypatch.setattr("ddpnb.session.session.prepare", lambda *_: trains.wait(20))
    running = press_run(session)
    while session.num_ranks is None:
        slow_start.began.wait(0.01)
    table = api.status()
    assert [row[-1].text for row in table.rows] == ["busy", "busy"]
    assert session.answer_now(None) is None
    trains.set()
    with pytest.raises(AttributeError):  # there is nothing to train
        running.wait(20)
