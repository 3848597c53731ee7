"""Asynchronous strategies do not wait, count staleness and lose only a dead worker's shard."""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing import connection as connections
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpnb.rank.cancellation import RankLostError
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.asynchronous import RunOverError
from tests.rank.fit import Problem, by_hand, by_strategy, distance

KINDS = [
    ("host", "async"),
    ("hosts", "async:compensate=0.04"),
    ("host", "async:bound=1"),
    ("host", "hogwild"),
]
kinds = pytest.mark.parametrize(("way", "word"), KINDS)


def wait_for(sign: Path) -> None:
    deadline = time.monotonic() + 30.0
    while not sign.exists():
        assert time.monotonic() < deadline, f"the file {sign.name} did not appear"
        time.sleep(0.002)


def hold_rank_1(sign: Path, num_steps: int, rank: int, step: int) -> None:
    """Hold rank 1 before its step 2 until rank 0 has made this many steps.

    Rank 0 waits at its step 3 until rank 1 is held, even on a busy machine.
    """
    held = sign.with_name("held")
    if rank == 1 and step == 2:
        held.touch()
        wait_for(sign)
    if rank == 0 and step == 3:
        wait_for(held)
    if rank == 0 and step == num_steps:
        sign.touch()


def unhurried(rank: int, step: int) -> None:
    """Sleep before each step, so that the other ranks have time for their steps."""
    time.sleep(0.004)


@kinds
def test_every_shard_is_trained_once_and_all_have_the_same_weights(ranks, way, word):
    problem = Problem(num_epochs=6, learning_rate=0.02)
    fits = ranks(3).call(by_strategy, word, problem, unhurried, way)
    reports = [report for fit in fits for report in fit.reports]
    assert len(reports) == problem.order(3).num_steps * 3
    assert sum(report.num_samples for report in reports) == problem.order(3).num_samples
    assert max(distance(fit, fits[0]) for fit in fits) == 0
    assert all(0 <= report.staleness < len(reports) for report in reports)
    assert list(ranks(3).folder.iterdir()) == []


class RareHead(nn.Module):
    """A model with a layer that few samples use, and a layer that no sample uses."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.rare, self.idle = (nn.Linear(6, 3) for _ in range(3))

    def forward(self, inputs):
        outputs, chosen = self.common(inputs), inputs[:, 0] > 1.0
        if chosen.any():
            outputs = outputs.index_add(0, chosen.nonzero()[:, 0], self.rare(inputs[chosen]))
        return outputs


@pytest.mark.parametrize("optimizer", ["decay", "adamw"])
@pytest.mark.parametrize(("size", "way"), [(2, "hosts"), (3, "host"), (4, "host"), (5, "hosts")])
def test_a_bound_of_0_is_synchronous_and_unused_parameters_stay(ranks, size, way, optimizer):
    problem = Problem(model=RareHead, optimizer=optimizer, num_epochs=3)
    reference, start = by_hand(problem, size), problem.build()
    for fit in ranks(size).call(by_strategy, "async:bound=0", problem, None, way):
        assert distance(fit, reference) < 1e-5
        assert {report.staleness for report in fit.reports} == {0}
    for fit in ranks(size).call(by_strategy, "async", problem, None, way):
        assert torch.equal(fit.parameters[-2], start.idle.weight)


@kinds
def test_it_finds_the_known_optimum_of_a_convex_problem(ranks, way, word):
    problem = Problem(model="linear", learning_rate=0.2, num_epochs=45, batch_size=16)
    fit, _ = ranks(2).call(by_strategy, word, problem, unhurried, way)
    inputs, targets = problem.data()
    affine = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1)
    best = torch.linalg.lstsq(affine, targets).solution
    torch.testing.assert_close(tuple(fit.parameters), (best[:6].T, best[6]), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("way", "word"), [kind for kind in KINDS if "bound" not in kind[1]])
def test_a_slow_worker_delays_no_other_and_its_gradient_is_staler(ranks, tmp_path, way, word):
    problem = Problem(num_epochs=20, learning_rate=0.02)
    hold = partial(hold_rank_1, tmp_path / "sign", 220)
    fast, slow = ranks(2).call(by_strategy, word, problem, hold, way)
    assert len(fast.reports) >= 220 > 3 * len(slow.reports)
    assert slow.reports[2].staleness > 200
    assert distance(fast, slow) == 0


LONG = Problem(num_epochs=16, learning_rate=0.02)


@pytest.mark.parametrize(("way", "word"), [KINDS[1], ("host", "async:bound=0"), KINDS[3]])
def test_a_death_costs_what_the_dead_held_and_the_others_train_the_rest(fresh_ranks, way, word):
    group = fresh_ranks(3)
    fit, dead, other = group.attempt(by_strategy, word, LONG, KILL_RANK_1, way)
    assert dead.cause is None
    assert len(fit.lost) == 1
    num_trained = len(fit.reports) + len(other.reports) + 5  # rank 1 trained five shards
    assert num_trained + len(fit.lost) == LONG.order(3).num_steps * 3
    assert distance(fit, other) == 0
    assert [path.name for path in group.folder.iterdir() if path.name != "own-1"] == []


JOINS = partial(by_strategy, joins=True)


@pytest.mark.parametrize("word", ["async:bound=1", "hogwild"])
def test_a_new_process_takes_a_dead_ones_place(fresh_ranks, tmp_path, word):
    group, came = fresh_ranks(2), tmp_path / "came"
    group.begin(by_strategy, word, LONG, partial(wait_for_another, came))
    group.ranks[1].process.join(30)
    outside = group.outside(1)
    outside.begin(JOINS, word, LONG, partial(say_i_came, came))
    fit, dead, joined = (rank.end() for rank in (*group.ranks, outside))
    assert dead.cause is None
    assert len(joined.reports) > 5
    assert joined.reports[0].staleness is not None
    num_trained = len(fit.reports) + len(joined.reports) + 5
    assert num_trained + len(fit.lost) == LONG.order(2).num_steps * 2
    assert distance(fit, joined) == 0
    assert list(group.folder.iterdir()) == []


def test_a_worker_that_joins_after_the_end_gets_an_error(ranks):
    late = ranks(2).outside(1)
    late.begin(JOINS, "async", LONG)
    assert isinstance(late.end().cause, RunOverError)


@pytest.mark.parametrize(("way", "word"), KINDS[1::2])
def test_the_death_of_rank_0_ends_the_run_with_a_sentence(fresh_ranks, way, word):
    failures = fresh_ranks(2).attempt(by_strategy, word, LONG, partial(strike, 0, 5, die), way)
    assert failures[0].cause is None
    assert failures[1].cause.rank == 0


@kinds
def test_where_a_worker_raises_the_others_name_it(ranks, way, word):
    group = ranks(3)
    failures = group.attempt(by_strategy, word, LONG, partial(strike, 1, 5, fail), way)
    first, second, third = (failure.cause for failure in failures)
    assert isinstance(second, ZeroDivisionError)
    assert first.rank == third.rank == 1
    assert list(group.folder.iterdir()) == []


@pytest.mark.parametrize("word", ["async:timeout=1", "async:timeout=1,bound=1"])
def test_a_silent_worker_is_given_up(ranks, word):
    problem = Problem(num_epochs=3, learning_rate=0.02)
    hangs = partial(strike, 1, 2, partial(time.sleep, 2.5))
    fit, failure, other = ranks(3).attempt(by_strategy, word, problem, hangs)
    assert failure.cause.rank == 1
    assert len(fit.lost) == 1
    assert distance(fit, other) == 0


def schedule_steps(state, folder, seed, before_step, joins=False):
    """Train at a random speed. Return the number of known updates and the rate of each step."""
    problem, found = Problem(optimizer="scheduled", num_epochs=8), []
    slowness = random.Random(seed + state.rank).choice([0.001, 0.004, 0.02])
    with closing(make_strategy("hogwild", {})) as strategy:
        context = problem.context(strategy, state, folder)
        worker = context.worker("t", num_steps=context.schedule.num_steps)
        worker.joins = joins
        strategy.setup(worker)
        with context.source(strategy.shards()) as source:
            for number, (shard, tree) in enumerate(source):
                time.sleep(slowness)
                before_step(state.rank, number)
                known = worker.version
                strategy.step(context.batch(shard, tree))
                found.append((known, worker.optimizers[0].param_groups[0]["lr"]))
        strategy.finish()
    return found


@pytest.mark.parametrize("size", range(1, 6))
def test_schedules_of_hogwild_follow_the_updates_by_all_workers(fresh_ranks, tmp_path, size):
    """One worker has plain torch's schedule, and a new process continues in the schedule."""
    group, came = fresh_ranks(size), tmp_path / "came"
    for seed in range(2):
        dies = seed == 1 and size > 1
        group.begin(schedule_steps, seed, partial(wait_for_another, came) if dies else unhurried)
        if dies:
            assert group.ranks[1].end().cause is None
            group.ranks[1] = group.outside(1)
            group.ranks[1].begin(schedule_steps, seed, partial(say_i_came, came), True)
        results = [rank.end() for rank in group.ranks]
        for found in results:
            rates = [0.1 / (1 + known // size) for known, _ in found]
            assert [rate for _, rate in found] == pytest.approx(rates)
        assert size > 1 or [known for known, _ in results[0]] == list(range(len(results[0])))
        assert not dies or results[1][0][0] > 5


BIG = Problem(model=lambda: nn.Sequential(nn.Linear(6, 400_000), nn.Linear(400_000, 3)))
"""16 MB of parameters, which is more than the buffers of a connection can hold."""


def close_beside_stopped(state, folder, stopped, sign, ends_by, way):
    """Block this rank at a stopped rank, and return how many seconds ``close`` takes.

    The test stops workers after the server has counted their step, or rank 0 before it gets
    gradients.
    """
    own = folder / f"own-{state.rank}" if way == "hosts" else folder
    own.mkdir(exist_ok=True)
    strategy = make_strategy("async:bound=0", {})
    context = BIG.context(strategy, state, own)
    worker = context.worker("t", num_steps=9)
    worker.local_world_size = 1 if way == "hosts" else state.world_size
    strategy.setup(worker)
    batch = context.first_batch(2)
    if state.rank == 0 and 0 not in stopped:
        while sum(strategy.queue._clocks()) < len(stopped):
            time.sleep(0.002)
    sign.with_name(f"ready-{state.rank}").touch()
    if state.rank not in stopped:
        wait_for(sign)
    if state.rank not in [0, *stopped]:
        interrupt = partial(os.kill, os.getpid(), signal.SIGINT)
        end = worker.cancellation.abort if ends_by == "abort" else interrupt
        threading.Timer(0.5, end).start()
    try:
        strategy.step(batch)
        time.sleep(0.3)
    except (RankLostError, KeyboardInterrupt):
        pass
    began = time.monotonic()
    strategy.close()
    return time.monotonic() - began


@pytest.mark.parametrize("way", ["host", "hosts"])
@pytest.mark.parametrize(
    ("size", "stopped", "ends_by"),
    [*((num + 1, range(1, num + 1), "") for num in (1, 2, 5)), (3, [0], "abort"), (3, [0], "")],
)
def test_a_stopped_process_does_not_delay_the_end(
    fresh_ranks, tmp_path, size, stopped, ends_by, way
):
    group, sign = fresh_ranks(size), tmp_path / "sign"
    group.begin(close_beside_stopped, list(stopped), sign, ends_by, way)
    for rank in range(size):
        wait_for(sign.with_name(f"ready-{rank}"))
    processes = [psutil.Process(group.ranks[rank].process.pid) for rank in stopped]
    for process in processes:
        process.suspend()
    sign.touch()
    try:
        others = [rank for rank in group.ranks if rank.number not in stopped]
        assert all(rank.end() < 2 for rank in others)
    finally:
        for process in processes:
            process.resume()


def visit(port: int, opened: list[socket.socket]) -> None:
    """Connect as a port scan, a browser, a silent process and a worker of another run."""
    for greeting in (None, b"GET / HTTP/1.0\r\n\r\n", b""):
        opened.append(socket.create_connection(("127.0.0.1", port), 5))
        opened[-1].close() if greeting is None else opened[-1].sendall(greeting)
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        connections.Client(("127.0.0.1", port), authkey=b"another")


def with_strangers(state, folder):
    """Train while strangers connect to the server before, between and after the workers."""
    process, opened, broadcast = psutil.Process(), [], dist.broadcast_object_list
    look = getattr(process, "net_connections", None) or process.connections
    ports = {each.laddr.port for each in look("tcp")}

    def attacked(*args, **options):
        if state.rank == 0:
            (port,) = {each.laddr.port for each in look("tcp") if each.status == "LISTEN"} - ports
            visit(port, opened)
            threading.Thread(target=visit, args=(port, opened)).start()
        return broadcast(*args, **options)

    with patch.object(dist, "broadcast_object_list", attacked):
        return by_strategy(state, folder, "async", LONG, unhurried, "hosts")


def test_strangers_at_the_servers_port_neither_join_nor_delay_a_worker(ranks):
    began = time.monotonic()
    fits = ranks(3).call(with_strangers)
    assert time.monotonic() - began < 10
    assert len(fits[0].lost) == 0
    assert sum(len(fit.reports) for fit in fits) == LONG.order(3).num_steps * 3


def strike(who: int, when: int, do: Callable[[], object], rank: int, step: int) -> None:
    """Call ``do`` before step ``when`` of rank ``who``. Before all other steps only sleep."""
    if (rank, step) == (who, when):
        do()
    unhurried(rank, step)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ZeroDivisionError


KILL_RANK_1 = partial(strike, 1, 5, die)


def wait_for_another(came: Path, rank: int, step: int) -> None:
    """Kill rank 1, and hold rank 0 until another process has replaced rank 1."""
    if step == 20:
        wait_for(came)
    KILL_RANK_1(rank, step)


def say_i_came(came: Path, rank: int, step: int) -> None:
    came.touch()
    unhurried(rank, step)
