"""Is a rank that was started anew told what the rank before it was told?"""

from concurrent.futures import Future
from types import SimpleNamespace

from ddpnb.protocol.processes import RankCommand
from ddpnb.session.comparison import Training


class Ranks:
    """A cluster whose rank 1 has died, with the ranks to which commands were sent."""

    dead, living, lost, spans_hosts = (1,), (0, 1), None, True

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.processes = SimpleNamespace(command=self.command)

    def command(self, rank: int, command: RankCommand) -> "Future[None]":
        assert command is RankCommand.EXPECT_STOP
        self.asked.append(rank)
        answer: Future[None] = Future()
        answer.set_result(None)
        return answer

    def bring_back(self, ranks: tuple[int, ...]) -> dict[str, list[int]]:
        assert ranks == self.dead
        return {}


def test_a_new_process_is_asked_to_expect_a_stop():
    cluster = Ranks()
    training = Training(cluster=cluster, recorder=None, specs=(), survivors=())  # type: ignore[arg-type]
    assert training._all_expect_stop()
    assert training._replace_dead("died")
    assert training._all_expect_stop()
    assert cluster.asked == [0, 1, 1]
