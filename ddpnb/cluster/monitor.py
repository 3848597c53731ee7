"""Looks at the ranks while a call runs: where they are, who is stopped, who is silent (kernel)."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, final

import psutil

from ddpnb.cluster.call import Call
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.hangs import Hang, HangDetector, rarity
from ddpnb.cluster.wording import restart, say, sentence, them
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
        self._named: set[int] = set()
        """Ranks that have been said not to answer."""
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
        self._named.clear()
        found = [each.result() for each in answers.values() if each.exception() is None]
        statuses = tuple(RankStatus(**each) for each in found)
        if not self._hangs.check(statuses, len(running), now):
            return None
        idle = tuple(rank for rank in self._cluster.ranks if rank not in call.ranks)
        return Hang(waiting=statuses, finished=finished, idle=idle)

    def notices(self, running: Collection[int]) -> Iterator[str]:
        """Say, once, which ranks have not answered for long, and whether they are stopped."""
        timeouts = self._cluster.timeouts
        asked = {rank for rank, answer in self._answers.items() if not answer.done()}
        silent = asked & set(running) - self._named
        if self._waited < timeouts.stopped_after_seconds:
            return
        if stopped := stopped_ranks(self._cluster, silent):
            self._named.update(stopped)
            yield f"{describe_stopped(self._cluster, stopped)} An interrupt ends the cell."
        if (silent := silent - set(stopped)) and self._waited > timeouts.silent_after_seconds:
            self._named.update(silent)
            yield (
                f"{sentence(describe_silent(sorted(silent)))} Until then no hang is noticed. "
                "An interrupt ends the cell."
            )

    def reset(self) -> None:
        """Start over: the ranks were just freed, and need time to notice."""
        self._answers = {}
        self._hangs.reset()

    def _begin_round(self, running: Collection[int]) -> None:
        if self._waited > self._cluster.timeouts.poll_seconds * rarity(len(running)):
            self._waited = 0.0
            alive = set(running) & set(self._cluster.living)
            command = self._cluster.processes.command
            self._answers = {rank: command(rank, RankCommand.STATUS) for rank in alive}


def stopped_ranks(cluster: Cluster, ranks: Iterable[int]) -> list[int]:
    """Return those of the ranks on this host that received SIGSTOP and have not gone on."""
    found = []
    for rank in sorted(set(ranks) & set(cluster.living)) if cluster.is_local else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(cluster.states[rank].pid).status() == psutil.STATUS_STOPPED:
                found.append(rank)
    return found


def describe_stopped(cluster: Cluster, ranks: Collection[int]) -> str:
    """Say that ranks are stopped, and what can be done."""
    pids = ", ".join(f"`kill -CONT {cluster.states[rank].pid}`" for rank in ranks)
    return sentence(
        f"{say(ranks, 'is stopped')} (SIGSTOP). To let {them(ranks)} go on: {pids}; to start "
        f"{them(ranks)} anew: {restart(ranks)}"
    )


def describe_silent(ranks: Collection[int]) -> str:
    """Say that ranks do not answer, and why that may be."""
    it = "it" if len(ranks) == 1 else "they"
    return (
        f"{say(ranks, 'does not answer')}: {it} may run code that keeps all other threads waiting"
    )
