"""Fits a small problem by a strategy on this rank, or by plain torch."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddpnb.protocol.messages import Memory, RankState
from ddpnb.rank.clock import MeasuredClock
from ddpnb.rank.servers.server import PackedTensors, pack
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.tasks.base import OptimizerFactory, Supervised, Task
from ddpnb.rank.tasks.batches import BatchSchedule, every_step
from ddpnb.rank.tasks.samples import TensorSamples
from ddpnb.rank.training.run import Surroundings, TrainingRun
from tests.rank.runs import spec_of

BeforeStep = Callable[[int, int], None]
"""A function of rank and step number that a test uses to inject a fault before a step."""


def scheduled(parameters: list[nn.Parameter]) -> Any:
    """Return an optimizer with a schedule that never uses a rate twice."""
    made = torch.optim.SGD(parameters, lr=0.1)
    return made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))


OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5),
    "scheduled": scheduled,
    "decay": lambda parameters: torch.optim.SGD(parameters, 0.05, 0.9, weight_decay=0.5),
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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
    "linear": lambda: nn.Linear(6, 3),
    "frozen": frozen,
    "mixed": lambda: nn.Sequential(
        nn.Linear(6, 8), Cast(torch.double), nn.Linear(8, 3).double(), Cast(torch.float)
    ),
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    model: str | Callable[[], nn.Module] = "mlp"
    """A name in ``MODELS``, or a function that makes another model."""
    optimizer: str = "momentum"
    batch_size: int = 10
    num_epochs: float = 3
    learning_rate: float | None = None
    accumulate: int = 1
    clip: float | None = None

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(64, 6, generator=generator)
        return inputs, inputs @ torch.randn(6, 3, generator=generator) + 0.5

    def make_model(self) -> nn.Module:
        return self.model() if callable(self.model) else MODELS[self.model]()

    def build(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.make_model()

    def factory(self) -> OptimizerFactory:
        if self.learning_rate is not None:
            return partial(torch.optim.SGD, lr=self.learning_rate)
        return OPTIMIZERS[self.optimizer]

    def order(self, num_ranks: int) -> BatchSchedule:
        chosen = {"batch_size": self.batch_size, "num_epochs": self.num_epochs}
        return BatchSchedule(64, num_ranks=num_ranks, seed=0, **chosen)

    def context(self, strategy: Strategy, state: RankState, folder: Path) -> TrainingRun:
        samples = TensorSamples(self.data())
        return TrainingRun(
            spec=spec_of("ddp", accumulate=self.accumulate, clip=self.clip),
            here=Surroundings(state=state, folder=folder),
            plan=strategy.plan(state),
            task=Task(
                model=self.make_model,
                train=samples,
                held_out=samples,
                step=Supervised(nn.functional.mse_loss),
                optimizer=self.factory(),
            ),
            schedule=self.order(state.world_size),
        )


class StepReport(NamedTuple):
    loss: Tensor
    num_samples: int
    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    staleness: int | None = None


@dataclass(frozen=True, kw_only=True)
class Fit:
    parameters: list[Tensor]
    buffers: list[Tensor]
    reports: list[StepReport]
    lost: list[int] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)


def by_hand(problem: Problem, num_ranks: int = 1) -> Fit:
    """Fit with plain torch in one process, on whole batches, with one thread as on the ranks."""
    torch.set_num_threads(1)
    model, (inputs, targets), order = problem.build(), problem.data(), problem.order(num_ranks)
    optimizer = problem.factory()([p for p in model.parameters() if p.requires_grad])
    reports = []
    for shard in every_step(order.num_steps, index=0, num_shards=1):
        indices = order.indices(shard)
        loss = nn.functional.mse_loss(model(inputs[indices]), targets[indices])
        optimizer.zero_grad()
        loss.backward()
        if problem.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), problem.clip)
        optimizer.step()
        reports.append(StepReport(loss.detach(), len(indices)))
    return fit_of(model, reports)


def by_strategy(
    state: RankState,
    folder: Path,
    word: str,
    problem: Problem,
    before_step: BeforeStep | None = None,
    way: str = "host",
    **fields: Any,
) -> Fit:
    """Fit with a strategy, on this rank.

    With ``way="host"`` ranks share memory. With ``way="hosts"`` each rank has a separate folder.
    """
    strategy = make_strategy(word, {})
    if state.rank >= strategy.plan(state).num_ranks:
        return fit_of(nn.Module(), [])
    own = folder / f"own-{state.rank}" if way == "hosts" else folder
    if way == "hosts":
        fields |= {"local_world_size": 1}
    own.mkdir(exist_ok=True)
    try:
        fit = drive(strategy, state, own, problem, before_step, **fields)
        return replace(fit, lost=list(strategy.queue.lost_shards if strategy.queue else ()))
    finally:
        strategy.close()
        strategy.close()
        if own != folder:
            own.rmdir()


def drive(
    strategy: Strategy,
    state: RankState,
    folder: Path,
    problem: Problem,
    before_step: BeforeStep | None = None,
    **fields: Any,
) -> Fit:
    """Train on every shard of the strategy. ``fields`` replaces fields of the worker."""
    context = problem.context(strategy, state, folder)
    clock = MeasuredClock(context.device)
    worker = context.worker("t", num_steps=context.schedule.num_steps, clock=clock)
    for name, value in fields.items():
        setattr(worker, name, value)
    strategy.setup(worker)
    reports = []
    clock.start()
    with clock.running(), context.source(strategy.shards()) as source:
        for number, (shard, tree) in enumerate(source):
            if before_step is not None:
                before_step(state.rank, number)
            batch = context.batch(shard, tree)
            loss = strategy.step(batch)
            reports.append(StepReport(loss, batch.num_samples, *clock.take(), worker.staleness))
    memory = strategy.memory()
    return replace(fit_of(strategy.finish(), reports), memory=memory)


def fit_of(model: nn.Module, reports: list[StepReport]) -> Fit:
    return Fit(
        parameters=[parameter.detach().clone() for parameter in model.parameters()],
        buffers=[buffer.clone() for buffer in model.buffers()],
        reports=reports,
    )


def packed(values: list[Tensor], num_copies: int = 1) -> list[PackedTensors]:
    """Return memory for a store. The first copy holds these values."""
    copies = [pack(values) for _ in range(num_copies)]
    copies[0].fill([value.detach() for value in values])
    return copies


def distance(one: Fit, other: Fit) -> float:
    """Return the largest difference between two fits' parameters."""
    pairs = zip(one.parameters, other.parameters, strict=True)
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs)
