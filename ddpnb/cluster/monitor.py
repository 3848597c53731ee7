"""Monitors the ranks of a call: finds hangs and silent ranks.  Runs in the kernel."""

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any, final

from ddpnb.cluster.call import Call
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.hangs import Hang, HangDetector, rarity
from ddpnb.cluster.wording import describe_silent, sentence
from ddpnb.protocol.processes import RankCommand, RankStatus


@final
class Monitor:
    """Asks the ranks of a call for their positions, and finds out why the call does not end.

    The monitor asks in rounds.  A round ends when all running ranks have answered.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._answers: dict[int, Future[Any]] = {}
        self._looked_at: float | None = None
        self._waited = 0.0
        """Seconds since the round began."""
        self._has_named = False
        """True if the user has been told about the silent ranks of this round."""
        self._hangs = HangDetector(timeouts=cluster.timeouts)

    def hang(self, call: Call, finished: Mapping[int, int], now: float) -> Hang | None:
        """Return where and why the ranks of a call hang, or None if no hang has been detected.

        ``finished`` maps each rank that has finished the call to the rank's number of collectives.
        """
        passed = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        self._waited += min(passed, self._cluster.timeouts.longest_gap_seconds)
        running = call.running
        answers = {rank: self._answers[rank] for rank in running if rank in self._answers}
        if not all(answer.done() for answer in answers.values()):
            return None
        if not self._answers:
            self._begin_round(running)
            return None
        self._answers = {}
        self._has_named = False
        found = [each.result() for each in answers.values() if each.exception() is None]
        statuses = tuple(RankStatus(**each) for each in found)
        if not self._hangs.check(statuses, len(running), now):
            return None
        idle = tuple(rank for rank in self._cluster.ranks if rank not in call.ranks)
        return Hang(waiting=statuses, finished=finished, idle=idle)

    def notice(self, running: Collection[int]) -> str:
        """Return a message about silent ranks once per round, and otherwise an empty string."""
        asked = {rank for rank, answer in self._answers.items() if not answer.done()}
        is_late = self._waited > self._cluster.timeouts.silent_after_seconds
        if self._has_named or not is_late or not (silent := asked & set(running)):
            return ""
        self._has_named = True
        return (
            f"{sentence(describe_silent(silent))} ddpnb cannot detect hangs until all ranks "
            "answer. Interrupt the cell to stop it."
        )

    def _begin_round(self, running: Collection[int]) -> None:
        if self._waited > self._cluster.timeouts.poll_seconds * rarity(len(running)):
            self._waited = 0.0
            alive = set(running) & set(self._cluster.living)
            command = self._cluster.processes.command
            self._answers = {rank: command(rank, RankCommand.STATUS) for rank in alive}
