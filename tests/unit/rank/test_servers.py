"""A worker's parameters stay fixed while it trains, and a shard is trained or lost only once."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpnb.rank.servers.queue import UpdateCounter, WorkQueue
from ddpnb.rank.servers.server import Server
from ddpnb.rank.strategies.async_ps import ParameterStore
from ddpnb.rank.strategies.asynchronous import scaled_rate
from tests.rank.fit import packed


@pytest.fixture
def parameters():
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]


def make_store(parameters, num_workers, **options):
    sgd = partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)
    return ParameterStore(packed(parameters, num_workers), sgd, **options)


def test_a_compensated_gradient_is_that_of_its_paper(parameters):
    """The gradient is g + lambda g g (w_now - w_old) per coordinate, and g without staleness."""
    ends = {}
    g = torch.tensor([1.0, 2.0, -3.0])
    for strength in (0.0, 2.0):
        store = make_store(parameters, 2, compensation=strength)
        store.pull(0), store.pull(1)
        store.push(0, [g, None])  # not stale
        fresh = store.tensors[0].clone()
        store.push(1, [g, None])  # stale: computed when all parameters were 1
        ends[strength] = fresh, store.tensors[0].clone()
        assert store.tensors[1].unique().tolist() == [1], "parameters without a gradient must stay"
    assert torch.equal(ends[0.0][0], ends[2.0][0])
    (now, plain), compensated = ends[0.0], ends[2.0][1]
    torch.testing.assert_close(plain - compensated, 0.1 * 2.0 * g * g * (now - 1))


def test_a_step_at_a_share_of_its_rate_leaves_the_rate_as_it_was():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.2)
    parameter.grad = torch.ones(1)
    for fraction, so_far in ((0.5, 0.5), (0.25, 0.75), (1.0, 1.75)):
        with scaled_rate(optimizer, fraction):
            optimizer.step()
        assert parameter.item() == pytest.approx(-so_far * 0.2)
        assert optimizer.param_groups[0]["lr"] == 0.2


def test_parameters_stay_while_a_worker_trains_on_them_and_staleness_is_counted(parameters):
    """The workers write their gradients in random order."""
    num_workers, chance, num_updates = 4, random.Random(3), 0
    store = make_store(parameters, num_workers)
    ones = [torch.ones_like(parameter) for parameter in parameters]
    held: dict[int, tuple[list[Tensor], int]] = {}
    for _ in range(500):
        rank = chance.randrange(num_workers)
        if rank in held:
            assert store.push(rank, ones) == num_updates - held[rank][1]
            num_updates += 1
        store.pull(rank)
        held[rank] = [each.clone() for each in store.tensors], num_updates
        for reader, (expected, _) in held.items():
            assert all(map(torch.equal, store.copies[reader].tensors, expected))


def make_queue(num_workers: int = 2, updates: UpdateCounter | None = None, **options) -> WorkQueue:
    options = {"num_shards": 9, "timeout_seconds": 5.0} | options
    return WorkQueue(updates or UpdateCounter(), num_workers=num_workers, **options)


def begun(queue: WorkQueue, *ranks: int) -> list[list[int]]:
    """Let workers begin together, and return each worker's first shards."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        replies = list(pool.map(lambda rank: queue.handle(rank, "begin"), ranks))
    return [list(reply.shards) for reply in replies]


def test_what_a_lost_worker_held_is_lost_once_and_a_stopped_ones_is_not():
    queue = make_queue()
    begun(queue, 0, 1)
    queue.handle(1, "step")
    for _ in range(2):
        queue.lose(1)
    assert queue.lost_shards == [2]
    assert queue.handle(1, "step").lost_rank == 1  # rank 1 is alive after all
    assert queue.handle(0, "finish").lost_rank == -1
    assert queue.lost_shards == [2]


def test_no_worker_gets_further_ahead_than_the_bound():
    queue = make_queue(bound=1)
    begun(queue, 0, 1)
    with ThreadPoolExecutor(1) as pool:
        assert queue.handle(0, "step").waited_seconds < 1
        waits = pool.submit(queue.handle, 0, "step")
        with pytest.raises(TimeoutError):
            waits.result(0.3)
        queue.handle(1, "step")
        assert waits.result(10).waited_seconds > 0.2


def test_a_server_whose_socket_was_removed_ends_at_once(tmp_path: Path):
    unused: Any = None
    server = Server([torch.ones(3)], 1, timeout_seconds=60.0)
    path = Path(server.serve(unused, str(tmp_path / "s")))
    path.unlink()
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 30
    path.touch()  # the listener removes it at the process's exit
