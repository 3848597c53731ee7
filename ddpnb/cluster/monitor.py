"""Looks at the ranks while a call runs: where they are, who is stopped, who is silent (kernel)."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, final

from ddpnb.cluster.call import Call
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.hangs import Hang, HangDetector, Lasting
from ddpnb.cluster.wording import restart, say, sentence, them
from ddpnb.protocol.messages import RankStatus
from ddpnb.protocol.processes import RankCommand

NUM_AT_FULL_RATE = 8
"""Number of ranks that are asked at every poll; more are asked more seldom, at the same cost."""


@final
class Monitor:
    """Asks the ranks of a call where they are, in rounds, and says what keeps it from ending.

    A round ends when all ranks that still run have answered.
    """

    def __init__(self, cluster: Cluster) -> None:
        timeouts, gap = cluster.timeouts, cluster.timeouts.longest_gap_seconds
        self._cluster = cluster
        self._answers: dict[int, Future[Any]] = {}
        self._asked_at = time.monotonic()
        self._hangs = HangDetector(after_seconds=timeouts.hang_after_seconds, longest_gap=gap)
        self._silent = Lasting(seconds=timeouts.silent_after_seconds, longest_gap=gap)
        self._stopped = Lasting(seconds=timeouts.stopped_after_seconds, longest_gap=gap)

    def hang(self, call: Call, finished: Mapping[int, int], now: float) -> Hang | None:
        """Return why a call hangs; None as long as it is not known to.

        ``finished``: ranks that have finished it, each with its number of collectives.
        """
        running = call.running
        answers = {rank: self._answers[rank] for rank in running if rank in self._answers}
        if not all(answer.done() for answer in answers.values()):
            return None
        if not self._answers:
            self._begin_round(running, now)
            return None
        self._answers = {}
        found = [each.result() for each in answers.values() if each.exception() is None]
        statuses = tuple(RankStatus(**each) for each in found)
        if not self._hangs.check(statuses, len(running), now):
            return None
        idle = tuple(rank for rank in self._cluster.ranks if rank not in call.ranks)
        return Hang(waiting=statuses, finished=finished, idle=idle)

    def notices(self, running: Collection[int], now: float) -> Iterator[str]:
        """Say, once, which ranks are stopped, and which have not answered for long."""
        stopped = stopped_ranks(self._cluster, running)
        if new := self._stopped.new(stopped, now):
            yield f"{describe_stopped(self._cluster, new)} An interrupt ends the cell."
        asked = [rank for rank, answer in self._answers.items() if not answer.done()]
        silent = sorted(set(asked) & set(running) - set(stopped))
        if new := self._silent.new(silent, now):
            yield (
                f"{sentence(describe_silent(new))} Until then no hang is noticed. "
                "An interrupt ends the cell."
            )

    def reset(self) -> None:
        """Start over: the ranks were just freed, and need time to notice."""
        self._answers = {}
        self._hangs.reset()

    def _begin_round(self, running: Collection[int], now: float) -> None:
        seconds = self._cluster.timeouts.poll_seconds * max(1, len(running) / NUM_AT_FULL_RATE)
        if now - self._asked_at > seconds:
            self._asked_at = now
            alive = set(running) & set(self._cluster.living)
            command = self._cluster.processes.command
            self._answers = {rank: command(rank, RankCommand.STATUS) for rank in alive}


def stopped_ranks(cluster: Cluster, ranks: Iterable[int]) -> list[int]:
    """Return those of the ranks that received SIGSTOP, as the fork server of each reports."""
    stopped = cluster.processes.stopped_members
    return [rank for rank in sorted(set(ranks) & set(cluster.living)) if rank in stopped]


def describe_stopped(cluster: Cluster, ranks: Collection[int]) -> str:
    """Say that ranks are stopped, and what can be done."""
    pids: dict[str, list[str]] = {}
    for rank in ranks:
        host = "" if cluster.is_local else f" on host {cluster.states[rank].host}"
        pids.setdefault(host, []).append(str(cluster.states[rank].pid))
    kills = " and ".join(f"`kill -CONT {' '.join(each)}`{host}" for host, each in pids.items())
    return sentence(
        f"{say(ranks, 'is stopped')} (SIGSTOP). To let {them(ranks)} go on: {kills}; to start "
        f"{them(ranks)} anew: {restart(ranks)}"
    )


def describe_silent(ranks: Collection[int]) -> str:
    """Say that ranks do not answer, and why that may be."""
    it = "it" if len(ranks) == 1 else "they"
    return (
        f"{say(ranks, 'does not answer')}: {it} may run code that keeps all other threads waiting"
    )
