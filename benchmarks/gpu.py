"""Measures the strategies on one GPU and on several GPUs.

Every row except one is a comparison that a user could make.  The exception is the cost of timing,
which users cannot switch off.  It is measured on one rank without a cluster.
"""

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn

import ddpnb
from benchmarks.measure import Figure
from benchmarks.rank_calls import rank_calls
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState, StepEvent
from ddpnb.rank.clock import Clock, MeasuredClock
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.tasks import digits
from ddpnb.rank.tasks.base import Supervised
from ddpnb.rank.worker import Batch, Worker
from ddpnb.session.session import only_session

PARTS = ("data", "forward", "backward", "communication", "optimizer", "waiting")
SHARING = ("ddp", "async", "hogwild", "no-comm")


@dataclass(frozen=True, kw_only=True)
class Work:
    """A task that is large enough to hide the cost of starting up."""

    task: str
    batch_size: int
    epochs: float


WORKS = (
    Work(task="digits", batch_size=256, epochs=20),
    Work(task="synthetic:parameters=11000000,compute=20", batch_size=256, epochs=3),
)


def measure(
    device: str = "cuda", works: Sequence[Work] = WORKS, num_repeats: int = 3
) -> Iterator[Figure]:
    num_gpus = torch.cuda.device_count()
    if device == "cuda" and num_gpus == 0:
        return print("These benchmarks need a GPU, and this machine has none.")
    yield _timing(device, num_repeats)
    with _elsewhere():
        with _started(1, device):
            for work in works:
                yield _against_single("ddp", work, num_repeats, ">= 0.97")
                yield _against_single("dp", work, num_repeats)
            yield _bf16(works[-1], num_repeats)
        if num_gpus < 2:
            print("Skipped: comparing ddp over NCCL with dp and single needs 2 GPUs.")
        else:
            with _started(num_gpus, device):
                yield from (row for work in works for row in _several(work, num_repeats))
        with _started(2, device, "gloo"):
            yield from (row for work in works for row in _sharing(work, num_repeats))


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """Work in a temporary folder, so that the user's stored runs stay unchanged."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="ddpnb-bench-") as folder:
        (Path(folder) / "data").mkdir()
        os.chdir(folder)
        only_session.cache_clear()
        try:
            yield
        finally:
            only_session.cache_clear()
            os.chdir(before)


@contextlib.contextmanager
def _started(num_ranks: int, device: str, backend: str = "auto") -> Iterator[None]:
    ddpnb.start(num_ranks, device=device, backend=backend)
    try:
        yield
    finally:
        ddpnb.stop()


def _compared(work: Work, num_repeats: int, *strategies: str, **choices: Any) -> pd.DataFrame:
    """Train in turns, and return a frame with one row for each run."""
    with contextlib.redirect_stdout(io.StringIO()):
        result = ddpnb.compare(
            *strategies,
            task=work.task,
            batch_size=work.batch_size,
            epochs=work.epochs,
            lr=0.01,
            repeats=num_repeats,
            **choices,
        )
    return result.runs()


def _sharing(work: Work, num_repeats: int) -> list[Figure]:
    """Compare each strategy with ``single`` on two ranks that share a device, over gloo."""
    found = _compared(work, num_repeats, *filter(_is_allowed, SHARING))
    where = f"2 ranks, gloo, {work.task}"
    rows = [_figure(found, name, "single", where) for name in SHARING]
    return [row for row in rows if row is not None]


def _is_allowed(strategy: str) -> bool:
    """Return True if a strategy trains on these ranks; print the error if not (hogwild on GPUs)."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            ddpnb.compare(strategy, task="digits", epochs=0.1, baseline=False)
    except UserError as error:
        print(f"Skipped {strategy}: {error}")
        return False
    return True


def _against_single(strategy: str, work: Work, num_repeats: int, limit: str = "") -> Figure:
    """Compare a strategy with ``single`` on one rank, which shows the cost of the wrapper."""
    found = _compared(work, num_repeats, strategy)
    row = _figure(found, strategy, "single", f"1 rank, {work.task}")
    assert row is not None
    return replace(row, limit=limit)


def _bf16(work: Work, num_repeats: int) -> Figure:
    plain, half = (_compared(work, num_repeats, "single", amp=amp) for amp in ("none", "bf16"))
    return Figure(
        name=f"samples/s of single in bf16 autocast, compared with fp32 ({work.task})",
        unit="samples/s",
        ours=list(half.samples_per_second),
        theirs=list(plain.samples_per_second),
        note=f"bf16: {_parts(half)}; fp32: {_parts(plain)}",
    )


def _several(work: Work, num_repeats: int) -> list[Figure]:
    found = _compared(work, num_repeats, "ddp", "dp")
    num = int(found.num_workers.max())
    pairs = [("ddp", "single"), ("ddp", "dp")]
    where = f"{num} GPUs, NCCL, {work.task}"
    rows = [_figure(found, ours, theirs, where) for ours, theirs in pairs]
    return [row for row in rows if row is not None]


def _figure(found: pd.DataFrame, ours: str, theirs: str, where: str) -> Figure | None:
    """Return the row of a strategy, or None if a strategy was not trained."""
    mine, other = (found[found.strategy == strategy] for strategy in (ours, theirs))
    if mine.empty or other.empty:
        return None
    said = "; ".join(sorted(set(mine.notes) - {""}))
    return Figure(
        name=f"samples/s of {ours}, compared with {theirs} ({where})",
        unit="samples/s",
        ours=list(mine.samples_per_second),
        theirs=list(other.samples_per_second),
        note=f"{ours}: {_parts(mine)}; {theirs}: {_parts(other)}" + (f" ({said})" if said else ""),
    )


def _parts(runs: pd.DataFrame) -> str:
    """Return the time of each part of a step: medians over the runs."""
    medians = {part: 1000 * runs[f"{part}_seconds"].median() for part in PARTS}
    return ", ".join(f"{part} {value:.3g} ms" for part, value in medians.items() if value > 0)


def _timing(device: str, num_repeats: int) -> Figure:
    """Compare DDP with and without step accounting, in a group of one rank."""
    with rank_calls(1) as call:
        [rates] = call(_rates, device, 4 * num_repeats)
    return Figure(
        name="samples/s of ddp with step accounting, compared with ddp without step accounting "
        f"(1 rank on {device})",
        unit="samples/s",
        ours=[timed for timed, _ in rates],
        theirs=[untimed for _, untimed in rates],
        limit=">= 0.99",
    )


def _rates(
    state: RankState, folder: Path, device: str, num_turns: int
) -> list[tuple[float, float]]:
    """Train with and without a clock in turns; return the samples/s of all turns except two."""
    on = torch.device(device, 0) if device == "cuda" else torch.device(device)
    if on.type == "cuda":
        torch.cuda.set_device(on)
        dist.destroy_process_group()
        store = dist.FileStore(str(folder / "nccl"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    batch = Batch(
        tree=(torch.randn(256, 1, 8, 8, device=on), torch.randint(0, 10, (256,), device=on)),
        num_samples=256,
        num_global=256,
    )
    clock = MeasuredClock(on)
    timed, untimed = (_strategy(on, folder, timer) for timer in (clock, None))
    ways: list[Callable[[], float]] = [
        partial(_rate, timed, batch, on, clock),
        partial(_rate, untimed, batch, on, None),
    ]
    rates = []
    for turn in range(num_turns + 2):
        order = ways if turn % 2 else ways[::-1]
        found = {way: way() for way in order}
        rates.append((found[ways[0]], found[ways[1]]))
    return rates[2:]


def _strategy(device: torch.device, folder: Path, timer: Clock | None) -> Strategy:
    strategy = make_strategy("ddp", {})
    strategy.setup(
        Worker(
            model=digits.model().to(device),
            make_model=digits.model,
            training_step=Supervised(nn.functional.cross_entropy),
            make_optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
            device=device,
            rank=0,
            world_size=1,
            local_world_size=1,
            num_shards=1,
            num_steps=1,
            folder=folder,
            name="bench",
            clock=timer or Clock(),
        )
    )
    return strategy


def _rate(
    strategy: Strategy, batch: Batch, device: torch.device, clock: Clock | None, num_steps: int = 50
) -> float:
    began = time.perf_counter()
    if clock is not None:
        clock.start()
    with contextlib.nullcontext() if clock is None else clock.running():
        for _ in range(num_steps):
            loss = strategy.step(batch)
            if clock is not None:
                clock.timing(StepEvent(num_samples=batch.num_samples), {"loss": loss})
            elif device.type == "cpu":
                loss.item()
    if clock is not None:
        clock.stop()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return num_steps * batch.num_samples / (time.perf_counter() - began)
