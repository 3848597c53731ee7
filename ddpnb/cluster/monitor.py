"""Looks at the ranks while a call runs: where they are, and who is silent (kernel)."""

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any, final

from ddpnb.cluster.call import Call
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.hangs import Hang, HangDetector, rarity
from ddpnb.cluster.wording import say, sentence
from ddpnb.protocol.processes import RankCommand, RankStatus


@final
class Monitor:
    """Asks the ranks of a call where they are, in rounds, and says what keeps it from ending.

    A round ends when all ranks that still run have answered.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._answers: dict[int, Future[Any]] = {}
        self._looked_at: float | None = None
        self._waited = 0.0
        """Seconds since the round began."""
        self._has_named = False
        """Whether the ranks have been named that do not answer in this round."""
        self._hangs = HangDetector(timeouts=cluster.timeouts)

    def hang(self, call: Call, finished: Mapping[int, int], now: float) -> Hang | None:
        """Return why a call hangs; None as long as it is not known to.

        ``finished``: ranks that have finished it, each with its number of collectives.
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
        """Say, once a round, which ranks have not answered for long; empty if there are none."""
        asked = {rank for rank, answer in self._answers.items() if not answer.done()}
        is_late = self._waited > self._cluster.timeouts.silent_after_seconds
        if self._has_named or not is_late or not (silent := asked & set(running)):
            return ""
        self._has_named = True
        return (
            f"{sentence(describe_silent(silent))} Until then no hang is noticed. "
            "An interrupt ends the cell."
        )

    def _begin_round(self, running: Collection[int]) -> None:
        if self._waited > self._cluster.timeouts.poll_seconds * rarity(len(running)):
            self._waited = 0.0
            alive = set(running) & set(self._cluster.living)
            command = self._cluster.processes.command
            self._answers = {rank: command(rank, RankCommand.STATUS) for rank in alive}


def describe_silent(ranks: Collection[int]) -> str:
    """Say that ranks do not answer, and why that may be."""
    it = "it" if len(ranks) == 1 else "they"
    why = f"{it} may be stopped, or run code that keeps all other threads waiting"
    return f"{say(ranks, 'does not answer')}: {why}"
