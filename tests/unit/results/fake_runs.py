"""Fake runs for tests of plots and tables."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ddpnb.protocol.messages import (
    EventBatch,
    Mark,
    Parts,
    RunHeader,
    RunReport,
    RunSpec,
    StepEvent,
    pack_step,
)
from ddpnb.results.comparison import Comparison
from ddpnb.results.query import StoredRun
from ddpnb.results.rows import Records, rows_of, stacked
from ddpnb.results.run import Run, RunSnapshot, Status

BATCH_SIZE = 256
NUM_RANKS = 2
NUM_REPORTING = {"single": 1, "dp": 1}
"""The number of ranks that report, for strategies in which not all ranks report."""
STEP_SECONDS = {"single": 0.0240, "dp": 0.0200, "ddp": 0.0150, "async": 0.0262}
NOTES = {"dp": ("emulated on CPU threads: 2 replicas in one process",)}


def spec(strategy: str, repeat: int = 0, comparison: str = "digits-1") -> RunSpec:
    return RunSpec(
        run_id=f"{comparison}:{strategy}:{repeat}",
        strategy=strategy,
        task="digits",
        batch_size=BATCH_SIZE,
        repeat=repeat,
    )


class KeptRun(Run):
    """A run that keeps its steps in memory, because it has no store."""

    def __init__(self, **known: Any) -> None:
        self.batches: list[EventBatch] = []
        super().__init__(read_steps=self.read, **known)

    def add(self, batch: EventBatch) -> None:
        self.batches.append(batch)
        super().add(batch)

    def read(self) -> Records:
        return stacked([rows_of(batch) for batch in self.batches])


def run_of(run_spec: RunSpec, *, comparison: str = "", created: float = 0.0) -> Run:
    return KeptRun(
        run_id=run_spec.run_id,
        name=run_spec.strategy,
        comparison=comparison,
        spec=run_spec,
        created=created,
    )


def ended_run(
    strategy: str | RunSpec, *steps: Sequence[StepEvent], repeat: int = 0, comparison: str = "c"
) -> Run:
    """Return a finished run with these steps of each rank."""
    run_spec = spec(strategy, repeat) if isinstance(strategy, str) else strategy
    run = run_of(run_spec, comparison=comparison, created=float(repeat))
    for rank, own in enumerate(steps):
        run.add(batch(run.run_id, own, rank=rank, header=header(run_spec, len(own))))
    run.end(Status.FINISHED)
    return run


def stored(name: str = "digits-1/ddp", created: float = 1e9, **fields: Any) -> StoredRun:
    comparison, _, strategy = name.partition("/")
    given = {"run_id": name, "comparison_id": comparison, "task": "digits"} | fields
    return StoredRun(comparison=comparison, name=strategy, created=created, **given)


def compared(*runs: Run) -> Comparison:
    return Comparison(comparison_id="c", name="c", runs=tuple(run.snapshot() for run in runs))


def header(run_spec: RunSpec, num_steps: int) -> RunHeader:
    strategy = run_spec.strategy
    return RunHeader(
        synchronous=strategy != "async",
        num_workers=1 if strategy == "single" else NUM_RANKS,
        num_ranks=NUM_REPORTING.get(strategy, NUM_RANKS),
        num_threads=1,
        device="cpu",
        backend="gloo",
        num_parameters=12_345,
        num_samples=num_steps * BATCH_SIZE,
        is_emulated=strategy == "dp",
        notes=NOTES.get(strategy, ()),
    )


def batch(
    run_id: str,
    steps: Sequence[StepEvent],
    *,
    rank: int = 0,
    sequence: int = 0,
    header: RunHeader | None = None,
    metrics: Sequence[tuple[int, str, float]] = (),
    marks: Sequence[Mark] = (),
) -> EventBatch:
    return EventBatch(
        run_id=run_id,
        rank=rank,
        sequence=sequence,
        header=header,
        rows=b"".join(pack_step(rank, step) for step in steps),
        metrics=tuple(metrics),
        marks=tuple(marks),
    )


def step(
    index: int, seconds: float, loss: float = 1.0, samples: int = 10, staleness: int | None = None
) -> StepEvent:
    return StepEvent(
        step=index, seconds=seconds, num_samples=samples, loss=loss, staleness=staleness
    )


def fake_run(
    strategy: str,
    *,
    repeat: int = 0,
    num_steps: int = 400,
    share: float = 1.0,
    comparison: str = "digits-1",
    nan_from: int | None = None,
    slow_rank: int | None = None,
    marks: Sequence[Mark] = (),
) -> Run:
    """Return a run that has trained ``share`` of its ``num_steps`` global batches.

    Ranks of synchronous strategies end each step together. If one rank is slow, the other ranks
    report their waiting time as communication, like in real strategies.
    """
    run_spec = spec(strategy, repeat, comparison)
    run = run_of(run_spec, comparison=comparison, created=1000.0 + repeat)
    random_ = random.Random(f"{strategy}{repeat}")
    num_reporting = NUM_REPORTING.get(strategy, NUM_RANKS)
    for rank in range(num_reporting):
        seconds = 0.0
        events = []
        noise = random.Random(f"{strategy}{repeat}{rank if strategy == 'async' else 0}")
        for index in range(int(num_steps * share)):
            lasted = STEP_SECONDS.get(strategy, 0.018) * noise.uniform(0.9, 1.12)
            if slow_rank is not None and strategy != "async":
                lasted *= 1.6
            seconds += lasted
            level = 0.12 + 2.2 * math.exp(-6.0 * index / num_steps)
            loss = level * math.exp(random_.gauss(0, 0.16))
            if nan_from is not None and index >= nan_from:
                loss = math.nan
            staleness = random_.choice((0, 1, 1, 1, 2, 3)) if strategy == "async" else None
            event = step(index, seconds, loss, BATCH_SIZE // num_reporting, staleness)
            parts = _parts(strategy, lasted, is_slow=slow_rank == rank)
            sent = 0 if strategy == "single" else 49_380
            events.append(replace(event, parts=parts, num_bytes_sent=sent))
        own = [mark for mark in marks if mark.rank == rank]
        head = header(run_spec, num_steps)
        run.add(batch(run.run_id, events, rank=rank, header=head, marks=own))
        if share == 1.0:
            run.add_report(_report(run.run_id, rank, events, strategy))
    if share == 1.0:
        run.end(Status.FINISHED)
    return run


def _parts(strategy: str, lasted: float, *, is_slow: bool) -> Parts:
    others = 0.0 if strategy == "single" else 0.04 if is_slow else 0.24
    own = lasted * (1 - others)
    return Parts(
        data=0.06 * own,
        forward=0.30 * own,
        backward=0.54 * own,
        communication=lasted * others,
        optimizer=0.10 * own,
        hidden=0.18 * lasted if strategy == "ddp" else 0.0,
    )


def fake_comparison(
    strategies: Sequence[str] = ("single", "dp", "ddp", "async"),
    *,
    repeats: int = 1,
    num_steps: int = 400,
    share: float = 1.0,
) -> Comparison:
    """Return a comparison that has done ``share`` of its training."""
    specs = tuple(spec(name, repeat) for repeat in range(repeats) for name in strategies)
    done = share * len(specs)
    runs: list[RunSnapshot] = []
    for index, run_spec in enumerate(specs):
        part = min(max(done - index, 0.0), 1.0)
        if part > 0:
            run = fake_run(
                run_spec.strategy, repeat=run_spec.repeat, num_steps=num_steps, share=part
            )
            runs.append(run.snapshot())
    return Comparison(
        comparison_id="id-1",
        name="digits-1",
        created=1000.0,
        task="digits",
        specs=specs,
        runs=tuple(runs),
        environment={"torch": "2.13.0", "python": "3.11.7", "host": "lab-7"},
    )


def _report(run_id: str, rank: int, events: Sequence[StepEvent], strategy: str) -> RunReport:
    evaluates = rank == 0
    return RunReport(
        run_id=run_id,
        rank=rank,
        num_steps=len(events),
        seconds=events[-1].seconds,
        final_loss={"async": 0.131}.get(strategy, 0.118) if evaluates else math.nan,
        held_out_loss=0.152 if evaluates else math.nan,
        held_out_accuracy={"async": 0.9472}.get(strategy, 0.9611) if evaluates else math.nan,
    )
