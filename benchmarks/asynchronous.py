"""Compares asynchronous exchanges in shared memory with TCP, and with no exchange."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measure import Figure
from benchmarks.rank_calls import rank_calls
from ddpnb.protocol.messages import RankState, RunSpec
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.async_ps import AsyncParameterServer
from ddpnb.rank.tasks import load_task
from ddpnb.rank.tasks.base import Supervised
from ddpnb.rank.tasks.batches import BatchSchedule, Shard, every_step
from ddpnb.rank.worker import Batch, Worker

_numbers = itertools.count()
BATCH_SIZE = 128
SECONDS = 2.0
"""Training time of each asynchronous loop in each round; it may stop at any step."""
NUM_SYNCHRONOUS_STEPS = 30


def exchange_ms(
    state: RankState, folder: Path, way: str, num_floats: int, rounds: int
) -> list[float]:
    """Return the milliseconds of each push and pull of rank 1; the server makes SGD steps.

    With ``way="TCP"`` each rank has a different folder, as on two hosts.
    """
    own = folder / f"rank-{state.rank}" if way == "TCP" else folder
    own.mkdir(exist_ok=True)
    worker = _ready_worker(state, own, num_floats, rounds)
    worker.local_world_size = 1 if way == "TCP" else 2
    taken = []
    with closing(AsyncParameterServer()) as strategy:
        strategy.setup(worker)
        for _ in range(rounds if state.rank == 1 else 0):
            began = time.perf_counter()
            strategy.exchange(0.5, worker.ready)
            taken.append(1e3 * (time.perf_counter() - began))
        strategy.finish()
    return taken


class Ready(Worker):
    """A worker whose gradients are ready, so that it computes nothing."""

    ready: list[torch.Tensor]

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        for parameter, gradient in zip(self.parameters, self.ready, strict=True):
            parameter.grad = gradient
        self.mean_loss = torch.zeros(())
        return iter(())


def _ready_worker(state: RankState, folder: Path, num_floats: int, num_steps: int) -> Ready:
    model = nn.Linear(num_floats, 1, bias=False)
    worker = Ready(
        model=model,
        make_model=lambda: model,
        training_step=Supervised(nn.functional.mse_loss),
        make_optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        device=torch.device("cpu"),
        rank=state.rank,
        world_size=2,
        local_world_size=2,
        num_shards=2,
        num_steps=num_steps,
        folder=folder,
        name=f"bench-{next(_numbers)}",
    )
    worker.ready = [torch.ones_like(each) for each in worker.parameters]
    return worker


def in_place_ms(state: RankState, folder: Path, num_floats: int, rounds: int) -> list[float]:
    """Return the milliseconds of each hogwild step of rank 1, from its gradient to its next shard.

    The parameters are updated in shared memory. Only the next shard comes from the queue.
    """
    worker = _ready_worker(state, folder, num_floats, rounds)
    nothing = torch.zeros(1)
    batch, taken = Batch(tree=(nothing, nothing), num_samples=1, num_global=2), []
    with closing(make_strategy("hogwild", {})) as strategy:
        strategy.setup(worker)
        shards = strategy.shards()
        if state.rank == 1:
            next(shards)
            for _ in range(rounds):
                began = time.perf_counter()
                strategy.step(batch)
                next(shards)
                taken.append(1e3 * (time.perf_counter() - began))
        strategy.finish()
    return taken


def rate(state: RankState, folder: Path, strategy: str, sleeps: float) -> tuple[int, float]:
    """Return the number of samples that this rank trained on (digits CNN), and the seconds.

    Without a ``strategy``, ranks exchange nothing.  After each step rank 1 sleeps ``sleeps`` times
    as long as the step took.
    """
    torch.manual_seed(0)
    spec = RunSpec(run_id="bench", strategy="single", task="digits", batch_size=BATCH_SIZE)
    task = load_task(spec, {}, "digits")
    order = BatchSchedule(
        len(task.train), batch_size=BATCH_SIZE, num_epochs=10_000, num_ranks=2, seed=0
    )
    worker = Worker(
        model=task.model(),
        make_model=task.model,
        training_step=task.step,
        make_optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=spec.learning_rate, momentum=0.9
        ),
        device=torch.device("cpu"),
        rank=state.rank,
        world_size=2,
        local_world_size=2,
        num_shards=2,
        num_steps=NUM_SYNCHRONOUS_STEPS if strategy == "ddp" else order.num_steps,
        folder=folder,
        name=f"bench-{next(_numbers)}",
    )
    if not strategy:
        return timed(
            plain(worker),
            every_step(10**9, index=state.rank, num_shards=2),
            task,
            order,
            sleeps * state.rank,
        )
    with closing(make_strategy(strategy, {})) as made:
        made.setup(worker)
        counted = timed(
            made.step, made.shards(), task, order, sleeps * state.rank, strategy == "ddp"
        )
        made.finish()
        return counted


def plain(worker: Worker) -> Callable[[Batch], object]:
    optimizer = worker.optimizer(worker.parameters)

    def step(batch: Batch) -> None:
        worker.compute_gradients(batch, weight=batch.weight)
        worker.update(optimizer)

    return step


def timed(
    step: Callable[[Batch], object],
    shards: Iterator[Shard],
    task: Any,
    order: BatchSchedule,
    late: float,
    is_synchronous: bool = False,
) -> tuple[int, float]:
    dist.barrier()
    num_samples, began = 0, time.perf_counter()
    for shard in shards:
        pair = task.train.fetch(order.indices(shard))
        size = len(pair[1])
        batch = Batch(tree=pair, num_samples=size, num_global=2 * size)
        step_began = time.perf_counter()
        step(batch)
        if late:
            time.sleep(late * (time.perf_counter() - step_began))
        num_samples += size
        if not is_synchronous and time.perf_counter() - began > SECONDS:
            break
    return num_samples, time.perf_counter() - began


def total(results: list[tuple[int, float]]) -> float:
    return sum(num / seconds for num, seconds in results)


def measure() -> list[Figure]:
    figures = []
    with rank_calls(2) as call:
        for num_floats, rounds in ((1_000, 300), (11_000_000, 9)):
            taken: dict[str, list[float]] = {"shared memory": [], "TCP": [], "hogwild": []}
            for turn in range(6):
                for way, found in taken.items():
                    if way == "hogwild":
                        times = call(in_place_ms, num_floats, rounds)[1]
                    else:
                        times = call(exchange_ms, way, num_floats, rounds)[1]
                    found += [statistics.median(times)] if turn else []
            for way, words in (
                ("shared memory", "push and pull in shared memory"),
                ("hogwild", "hogwild's in-place update"),
            ):
                figures.append(
                    Figure(
                        name=f"time to exchange {num_floats:,} floats: {words}, compared with a "
                        "push and pull over TCP",
                        unit="ms",
                        ours=taken[way],
                        theirs=taken["TCP"],
                        limit="<= 0.8",
                    )
                )
        rates: dict[tuple[str, float], list[float]] = {
            (name, late): [] for late in (0.0, 3.0) for name in ("", "async", "hogwild", "ddp")
        }
        for turn in range(6):
            for (name, late), found in rates.items():
                found += [total(call(rate, name, late))] if turn else []
        for late, limit, words in (
            (0.0, ">= 0.95", "digits, 2 ranks"),
            (3.0, ">= 0.9", "digits, 2 ranks, rank 1 takes 4 times as long per step"),
        ):
            for name in ("async", "hogwild"):
                figures.append(
                    Figure(
                        name=f"samples/s of {name}, compared with no exchange ({words})",
                        unit="samples/s",
                        ours=rates[name, late],
                        theirs=rates["", late],
                        limit=limit,
                    )
                )
        figures.append(
            Figure(
                name=f"samples/s of async, compared with ddp ({words})",
                unit="samples/s",
                ours=rates["async", 3.0],
                theirs=rates["ddp", 3.0],
                limit=">= 1.3",
            )
        )
    return figures
