"""Measures how a step of ``ddp`` changes with step accounting and with ``training_step``."""

import contextlib
import multiprocessing
import shutil
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.measure import Figure
from ddpnb.protocol.messages import StepEvent
from ddpnb.rank.clock import Clock, MeasuredClock
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.tasks import digits
from ddpnb.rank.tasks.base import CLASSIFY
from ddpnb.rank.tasks.batches import moved
from ddpnb.rank.tasks.samples import TensorSamples
from ddpnb.rank.worker import Batch, Worker

NUM_RANKS = 2


NUM_LAUNCHES = 4
"""The number of times that processes start and do all turns. The place of a model in memory can
make it one percent slower until its process ends, so several launches are needed."""
NUM_STEPS = 50
"""The number of steps of each trainer in a turn."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two trainings of the same model with ``ddp``, in turns."""

    name: str
    num_global: int
    """The number of samples of a global batch."""
    is_timed: bool = True
    """True if ``theirs`` has step accounting too."""
    is_general: bool = False
    """True if ``ours`` uses a ``training_step`` on a dict, and ``theirs`` uses the shorthand. Both
    then fetch their batches."""
    num_turns: int
    """The number of rates that each training reports."""
    limit: str


CASES = (
    *(
        Case(
            name="samples/s of ddp with step accounting, compared with ddp without step "
            f"accounting (digits CNN, global batch {num_global})",
            num_global=num_global,
            is_timed=False,
            num_turns=10,
            limit=limit,
        )
        for num_global, limit in ((256, ">= 0.99"), (64, ">= 0.97"))
    ),
    *(
        Case(
            name="samples/s of ddp with a training_step on dicts, compared with model and loss on "
            f"pairs (digits CNN, global batch {num_global})",
            num_global=num_global,
            is_general=True,
            num_turns=12,
            limit=">= 0.99",
        )
        for num_global in (256, 64)
    ),
)


def training_step(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


class Trainer:
    """One strategy on one rank, which trains on the same batch in every step."""

    def __init__(self, case: Case, rank: int, folder: Path, is_timed: bool, is_ours: bool) -> None:
        self.clock = MeasuredClock(torch.device("cpu")) if is_timed else None
        self.strategy: Strategy = make_strategy("ddp", {})
        torch.manual_seed(0)
        model = digits.model()
        num_samples = case.num_global // NUM_RANKS
        inputs = torch.randn(num_samples, 1, 8, 8)
        targets = torch.randint(0, 10, (num_samples,))
        self.batch = Batch(
            tree=(inputs, targets), num_samples=num_samples, num_global=case.num_global
        )
        self.samples: TensorSamples | None = None
        is_general = case.is_general and is_ours
        if case.is_general:
            tree = {"image": inputs, "label": targets} if is_general else (inputs, targets)
            self.samples = TensorSamples(tree)
        self.chosen = torch.randperm(num_samples)
        self.strategy.setup(
            Worker(
                model=model,
                make_model=digits.model,
                training_step=training_step if is_general else CLASSIFY,
                make_optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
                device=torch.device("cpu"),
                rank=rank,
                world_size=NUM_RANKS,
                local_world_size=NUM_RANKS,
                num_shards=NUM_RANKS,
                num_steps=1,
                folder=folder,
                name="bench",
                clock=self.clock or Clock(),
            )
        )

    def seconds(self) -> float:
        """Return the seconds of one step."""
        with nullcontext() if self.clock is None else self.clock.running():
            dist.barrier()
            began = time.perf_counter()
            if self.clock is not None:
                self.clock.start()
            loss = self.strategy.step(self.fetched())
            if self.clock is not None:
                self.clock.timing(StepEvent(num_samples=self.batch.num_samples), {"loss": loss})
            else:
                loss.item()
            dist.barrier()
            return time.perf_counter() - began

    def fetched(self) -> Batch:
        """Return the batch; if the comparison includes fetching, fetch it as in a training."""
        if self.samples is None:
            return self.batch
        content = moved(self.samples.fetch(self.chosen), torch.device("cpu"))
        return replace(self.batch, tree=content)


def serve(rank: int, folder: Path, case: Case, pipe: Connection) -> None:
    torch.set_num_threads(1)
    # The model learns one batch by heart within a few turns.  Its gradients then become so small
    # that each operation on them takes several times as long, with any strategy.
    torch.set_flush_denormal(True)
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    ours = Trainer(case, rank, folder, is_timed=True, is_ours=True)
    theirs = Trainer(case, rank, folder, is_timed=case.is_timed, is_ours=False)
    with contextlib.closing(ours.strategy), contextlib.closing(theirs.strategy):
        rates: list[tuple[float, float]] = []
        for turn in range(case.num_turns + 2):
            # The order alternates, so that no trainer always finds the caches of the other.
            order = (ours, theirs) if turn % 2 else (theirs, ours)
            spent = {ours: 0.0, theirs: 0.0}
            for _ in range(NUM_STEPS):
                for trainer in order:
                    spent[trainer] += trainer.seconds()
            num_samples = NUM_STEPS * case.num_global
            rates.append((num_samples / spent[ours], num_samples / spent[theirs]))
        dist.barrier()
    pipe.send(rates[2:])


def rates_of(case: Case) -> list[tuple[float, float]]:
    folder = Path(tempfile.mkdtemp(prefix="ddpnb-bench-", dir="/dev/shm"))
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(NUM_RANKS)]
    ranks = [
        context.Process(target=serve, args=(rank, folder, case, theirs))
        for rank, (_, theirs) in enumerate(ends)
    ]
    try:
        for rank in ranks:
            rank.start()
        rates: list[tuple[float, float]] = ends[0][0].recv()
        for rank in ranks:
            rank.join()
    finally:
        for rank in ranks:
            rank.kill()
        shutil.rmtree(folder)
    return rates


def measure() -> list[Figure]:
    return [_figure(case) for case in CASES]


def _figure(case: Case) -> Figure:
    launches = [rates_of(case) for _ in range(NUM_LAUNCHES)]
    rates = [pair for launch in launches for pair in launch]
    in_pairs = statistics.median(ours / theirs for ours, theirs in rates)
    return Figure(
        name=case.name,
        unit="samples/s",
        ours=[ours for ours, _ in rates],
        theirs=[theirs for _, theirs in rates],
        limit=case.limit,
        note=f"median of the ratios of the {len(rates)} pairs: {in_pairs:.3f}",
    )
