"""All ranks stop before the same step, in simulated runs with random speeds and communication."""

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpnb.rank.cancellation import CancellationToken, ConsequenceError
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.training import loop
from tests.rank.ranks import TIMEOUT_SECONDS, make_state

Partners = Callable[[int, int], set[int]]
"""The ranks that communicate with a rank in a step, including the rank."""


class Simulation:
    """Threads that take turns in virtual time.  It also is the ranks' store and their clock."""

    def __init__(self, num_ranks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.values: dict[str, str] = {}
        self.wake_at = dict.fromkeys(range(num_ranks), 0.0)
        """The virtual time at which each running rank continues.  Blocked ranks are missing."""
        self.blocked: dict[tuple[int, frozenset[int]], list[int]] = {}
        self.turns = [threading.Semaphore(0) for _ in range(num_ranks)]
        self.yielded = threading.Semaphore(0)
        self.rank = 0

    def run(self, job: Callable[[int], Any]) -> list[Any]:
        results: dict[int, Any] = {}

        def work(rank: int) -> None:
            self.turns[rank].acquire()
            try:
                results[rank] = job(rank)
            except Exception as error:  # noqa: BLE001  the test checks it
                results[rank] = error
            self.wake_at.pop(rank)
            self.yielded.release()

        for rank in self.wake_at:
            threading.Thread(target=work, args=(rank,), daemon=True).start()
        while self.wake_at:
            self.rank = min(
                self.wake_at, key=lambda each: (self.wake_at[each], self.random.random())
            )
            self.now = self.wake_at[self.rank]
            self.turns[self.rank].release()
            assert self.yielded.acquire(timeout=TIMEOUT_SECONDS)
            assert self.now < 1e4, "the ranks never stop"
        assert not self.blocked, f"ranks wait for ever: {self.blocked}"
        return [results[rank] for rank in range(len(self.turns))]

    def sleep(self, seconds: float) -> None:
        self.wake_at[self.rank] = self.now + seconds
        self._yield()

    def monotonic(self) -> float:
        return self.now

    def meet(self, step: int, ranks: set[int]) -> None:
        """Wait until all these ranks have called ``meet`` in this step."""
        here = self.blocked.setdefault((step, frozenset(ranks)), [])
        here.append(self.rank)
        if len(here) < len(ranks):
            del self.wake_at[self.rank]
            self._yield()
            return
        del self.blocked[step, frozenset(ranks)]
        self.wake_at |= dict.fromkeys(here, self.now)

    def _yield(self) -> None:
        rank = self.rank
        self.yielded.release()
        self.turns[rank].acquire()

    # -- the store -------------------------------------------------------------------------

    def _sent(self) -> dict[str, str]:
        """Return the values when a request arrives."""
        self.sleep(self.random.choice([1e-5, 1e-4, 1e-3]))
        return self.values

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self._sent()

    def get(self, key: str) -> bytes:
        return self._sent()[key].encode()

    def add(self, key: str, number: int) -> None:
        values = self._sent()
        values[key] = str(int(values.get(key, 0)) + number)
        self._sent()

    def compare_set(self, key: str, expected: str, new: str) -> None:
        values = self._sent()
        if values.get(key, "") == expected:
            values[key] = new
        self._sent()


def stopped(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    partners: Partners,
    *,
    seconds: list[float],
    asked: dict[int, float],
    num_steps: int = 10**6,
    is_one_host: bool = True,
    token: CancellationToken | None = None,
) -> tuple[list[Any], int]:
    """Return each rank's number of steps, and the largest step before the first request.

    ``seconds`` has the time of each rank's steps, and ``asked`` the time of each request to stop.
    """
    num_ranks = len(seconds)
    world = Simulation(num_ranks, seed)
    monkeypatch.setattr(loop, "time", world)
    monkeypatch.setattr(loop, "SERVER_LOCK", "")  # the run folder exists, and has no files
    monkeypatch.setattr(loop, "group_store", lambda: world)

    def train(rank: int) -> int:
        here = num_ranks if is_one_host else 1
        state = replace(make_state(rank, num_ranks), local_world_size=here)
        context: Any = SimpleNamespace(
            plan=Plan(num_ranks=num_ranks, num_workers=num_ranks, synchronous=True),
            state=state,
            name=str,
            here=SimpleNamespace(cancellation=token or CancellationToken(), folder=Path()),
        )
        decides = loop.Stop(context, lambda: world.now >= asked.get(rank, 1e9))
        for step in range(num_steps):
            if world.now < min(asked.values()):
                first[0] = max(first[0], step)
            if decides.before(step):
                return step
            world.sleep(seconds[rank] * world.random.uniform(0.8, 1.2))
            if len(others := partners(rank, step)) > 1:
                world.meet(step, others)
        return num_steps

    first = [0]
    return world.run(train), first[0]


def partners_of(kind: str, every: int, num_ranks: int) -> Partners:
    """Return which ranks meet in a step: all, pairs or none, every ``every`` steps."""

    def partners(rank: int, step: int) -> set[int]:
        if (step + 1) % every or kind == "none":
            return {rank}
        if kind == "all":
            return set(range(num_ranks))
        first = (step + 1) // every % num_ranks  # a ring that turns; the last may be alone
        place = (rank - first) % num_ranks
        pair = {place, place ^ 1} if place ^ 1 < num_ranks else {place}
        return {(each + first) % num_ranks for each in pair}

    return partners


SEEDS = 60


@pytest.mark.parametrize("kind", ["all", "pairs", "none"])
def test_all_ranks_stop_before_the_same_step_and_soon(monkeypatch, kind):
    for seed in range(SEEDS):
        draw = random.Random(f"{kind} {seed}")
        num_ranks, every = draw.randint(2, 5), draw.choice([1, 1, 2, 5, 8, 20, 50])
        is_one_host = draw.random() < 0.7
        step_seconds = 10 ** draw.uniform(-3, -0.5)
        asked_at = draw.uniform(1, 60) * step_seconds
        found, first = stopped(
            monkeypatch,
            seed,
            partners_of(kind, every, num_ranks),
            seconds=[step_seconds * draw.uniform(1, 3) for _ in range(num_ranks)],
            asked={
                rank: asked_at + draw.choice([0, 0, draw.uniform(0, 3) * step_seconds])
                for rank in draw.sample(range(num_ranks), draw.randint(1, num_ranks))
            },
            num_steps=draw.choice([40, 10**6]),
            is_one_host=is_one_host,
        )
        looks = 1 if is_one_host else loop.STEPS_BETWEEN_LOOKS
        assert len(set(found)) == 1, (seed, found)
        assert found[0] - first <= 2 * every + 4 * looks, seed


def test_a_class_that_communicates_every_500_steps_stops_in_seconds(monkeypatch):
    """Rank 1 waits in step 500 for rank 0, which is asked to stop in step 10."""
    found, _ = stopped(
        monkeypatch,
        0,
        partners_of("all", 500, 2),
        seconds=[0.01, 1e-5],
        asked={0: 0.1},
    )
    assert found[0] == found[1] < 1100


def test_a_rank_that_waits_for_the_others_is_released_if_the_run_is_cancelled(monkeypatch):
    token = CancellationToken()

    def partners(rank: int, step: int) -> set[int]:
        if rank == 1:
            token.abort()
        return {rank}

    found, _ = stopped(monkeypatch, 0, partners, seconds=[0.01, 10.0], asked={0: 0.1}, token=token)
    assert isinstance(found[0], ConsequenceError)
