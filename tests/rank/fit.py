"""How is a small problem fitted: by a strategy on this rank, or by plain torch?"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.collectives.account import Account
from ddpnb.rank.collectives.intercept import listening
from ddpnb.rank.servers.memory import PackedTensors, pack
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.tasks.base import OptimizerFactory, Supervised
from ddpnb.rank.tasks.batches import BatchSchedule, Shard, every_step
from ddpnb.rank.training.timing import StepReport
from ddpnb.rank.worker import Batch, Memory, Worker

BeforeStep = Callable[[int, int], None]
"""Called with rank and step number: where a test injects a fault."""

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
    "linear": lambda: nn.Linear(6, 3),
    "batchnorm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
    "frozen": lambda: frozen(),
    "mixed": lambda: nn.Sequential(
        nn.Linear(6, 8), Cast(torch.double), nn.Linear(8, 3).double(), Cast(torch.float)
    ),
}


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.dtype)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


@dataclass(frozen=True, kw_only=True)
class Problem:
    model: str = "mlp"
    optimizer: str = "momentum"
    batch_size: int = 10
    num_epochs: float = 3
    num_samples: int = 64
    learning_rate: float | None = None
    seed: int = 0
    accumulate: int = 1
    clip: float | None = None

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        inputs = torch.randn(self.num_samples, 6, generator=generator)
        return inputs, inputs @ torch.randn(6, 3, generator=generator) + 0.5

    def build(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return MODELS[self.model]()

    def factory(self) -> OptimizerFactory:
        make = OPTIMIZERS[self.optimizer]
        if self.learning_rate is not None:
            make = partial(torch.optim.SGD, lr=self.learning_rate)
        return make if self.clip is None else partial(clipped, make, self.clip)

    def order(self, num_ranks: int) -> BatchSchedule:
        return BatchSchedule(
            self.num_samples,
            batch_size=self.batch_size,
            num_epochs=self.num_epochs,
            num_ranks=num_ranks,
            seed=self.seed,
        )


def clipped(make: OptimizerFactory, largest: float, parameters: list) -> torch.optim.Optimizer:
    """An optimizer that clips by itself, as the worker's do."""

    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(held, largest)

    optimizer = make(parameters)
    optimizer.register_step_pre_hook(before_step)
    return optimizer


@dataclass(frozen=True, kw_only=True)
class Fit:
    parameters: list[Tensor]
    buffers: list[Tensor]
    reports: list[StepReport]
    num_files_left: int = 0
    memory: Memory = field(default_factory=Memory)


def by_hand(problem: Problem, num_ranks: int = 1) -> Fit:
    """Plain torch, one process, whole batches; one thread, as on the ranks."""
    torch.set_num_threads(1)
    model, (inputs, targets), order = problem.build(), problem.data(), problem.order(num_ranks)
    optimizer = problem.factory()([p for p in model.parameters() if p.requires_grad])
    reports = []
    for shard in every_step(order.num_steps, part=0, num_parts=1):
        indices = order.indices(shard)
        loss = nn.functional.mse_loss(model(inputs[indices]), targets[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reports.append(StepReport(loss.detach(), len(indices)))
    return fit_of(model, reports)


def by_strategy(
    state: RankState,
    folder: Path,
    word: str,
    problem: Problem,
    before_step: BeforeStep | None = None,
) -> Fit:
    """The same by a strategy, on one of the ranks."""
    strategy = make_strategy(word, {})
    if state.rank >= strategy.plan(state).num_ranks:
        return fit_of(nn.Module(), [])
    try:
        fit = drive(strategy, state, folder, problem, before_step)
    finally:
        strategy.close()
        strategy.close()
    return replace(fit, num_files_left=len(list(folder.iterdir())))


def drive(
    strategy: Strategy,
    state: RankState,
    folder: Path,
    problem: Problem,
    before_step: BeforeStep | None = None,
    **fields: Any,
) -> Fit:
    """Train on every shard that the strategy names; ``fields``: more fields of the worker."""
    order, (inputs, targets) = problem.order(state.world_size), problem.data()
    worker = worker_of(problem, state, folder, **fields)
    strategy.setup(worker)
    reports = []
    shards = taken_in_advance(strategy.shards(), fields.get("num_prefetched", 0))
    with listening(Account(worker.meter)):
        for number, shard in enumerate(shards):
            if before_step is not None:
                before_step(state.rank, number)
            batch = batch_of(order, shard, inputs, targets)
            loss = strategy.step(batch)
            traffic = worker.meter.take()
            reports.append(StepReport(loss, batch.num_samples, traffic, worker.staleness))
    memory = strategy.memory()
    return replace(
        fit_of(strategy.finish(), reports),
        memory=memory,
    )


def worker_of(problem: Problem, state: RankState, folder: Path, **fields: Any) -> Worker:
    return Worker(
        model=problem.build(),
        make_model=problem.build,
        training_step=Supervised(nn.functional.mse_loss),
        device=torch.device("cpu"),
        rank=state.rank,
        world_size=state.world_size,
        num_steps=problem.order(state.world_size).num_steps,
        folder=folder,
        accumulate=problem.accumulate,
        **({"name": "fit", "make_optimizer": problem.factory()} | fields),
    )


def taken_in_advance(shards: Iterator[Shard], num_prefetched: int) -> Iterator[Shard]:
    """Take so many shards in advance, as prefetching does."""
    held = deque(itertools.islice(shards, num_prefetched))
    for shard in shards:
        held.append(shard)
        yield held.popleft()
    yield from held


def batch_of(order: BatchSchedule, shard: Shard, inputs: Tensor, targets: Tensor) -> Batch:
    indices = order.indices(shard)
    num_global = order.size(shard.step)
    return Batch(
        tree=(inputs[indices], targets[indices]),
        num_samples=len(indices),
        num_global=num_global,
        most_parts=num_global // shard.num_parts,
    )


def fit_of(model: nn.Module, reports: list[StepReport]) -> Fit:
    return Fit(
        parameters=[parameter.detach().clone() for parameter in model.parameters()],
        buffers=[buffer.clone() for buffer in model.buffers()],
        reports=reports,
    )


def packed(values: list[Tensor], num_copies: int = 1) -> list[PackedTensors]:
    """Memory for a store; the first copy holds these values."""
    copies = [pack(values) for _ in range(num_copies)]
    copies[0].fill([value.detach() for value in values])
    return copies


def optimum(problem: Problem) -> tuple[Tensor, Tensor]:
    """Weight and bias of the linear model that fits a problem best."""
    inputs, targets = problem.data()
    ones = torch.ones(len(inputs), 1)
    solution = torch.linalg.lstsq(torch.cat([inputs, ones], dim=1), targets).solution
    return solution[:6].T, solution[6]


@torch.no_grad()
def average(models: list[nn.Module]) -> None:
    """Give all models the mean of their parameters."""
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = sum(same) / len(same)
        for parameter in same:
            parameter.copy_(mean)


def distance(one: Fit, other: Fit) -> float:
    """Largest difference of any parameter."""
    pairs = zip(one.parameters, other.parameters, strict=True)
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs)
