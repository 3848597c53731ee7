"""Measures the cost of redraws while runs grow.

Events of four strategies, 250,000 each, arrive as fast as the recorder takes them in.  The share of
a core is computed with the pauses that the live display makes on idle cores.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.measure import Figure
from ddpnb.protocol.messages import NO_STALENESS, EventBatch, RunHeader, RunSpec
from ddpnb.reports.figures.figure import draw
from ddpnb.reports.kit import Picture
from ddpnb.reports.live import MAX_PAUSE_SECONDS, MAX_SHARE, REDRAW_SECONDS
from ddpnb.results.frames import strategy_rows
from ddpnb.results.recorder import Recorder
from ddpnb.results.rows import EVENT
from ddpnb.results.run import Status
from ddpnb.results.store import Store

STRATEGIES = ("single", "dp", "ddp", "async")
NUM_REPORTING = {"single": 1, "dp": 1, "ddp": 2, "async": 2}
NUM_EVENTS = 1_000_000
EVENTS_IN_BATCH = 500
NUM_SAMPLED = 40
"""The number of timed redraws in each run."""


def rows(rank: int, first: int, strategy: str, rng: np.random.Generator) -> bytes:
    made = np.zeros(EVENTS_IN_BATCH, dtype=EVENT)
    made["step"] = np.arange(first, first + EVENTS_IN_BATCH)
    made["seconds"] = (made["step"] + 1) * 1e-3 + rng.uniform(0, 2e-4, EVENTS_IN_BATCH)
    made["loss"] = 0.1 + 2 * np.exp(-made["step"] / 30_000) * rng.uniform(0.8, 1.2, EVENTS_IN_BATCH)
    made["num_samples"] = 256 // NUM_REPORTING[strategy]
    made["staleness"] = rng.integers(0, 4, EVENTS_IN_BATCH) if strategy == "async" else NO_STALENESS
    made["rank"] = rank
    for part, seconds in (("forward", 2e-4), ("backward", 4e-4), ("communication", 2e-4)):
        made[part] = seconds
    return made.tobytes()


class Fed:
    """A comparison that receives made-up events, and the processor time of adding and drawing."""

    def __init__(self, folder: Path) -> None:
        self.specs = [
            RunSpec(run_id=f"bench-{name}", strategy=name, task="digits") for name in STRATEGIES
        ]
        self.store = Store(folder)
        self.recorder = Recorder(
            self.store, name="bench", task="digits", source="", specs=self.specs
        )
        self.draw_seconds: list[float] = []
        self.take_seconds = 0.0

    def train(self, spec: RunSpec, rng: np.random.Generator) -> None:
        self.recorder.begin(spec.run_id, spec.strategy, spec)
        num_reporting, per_run = NUM_REPORTING[spec.strategy], NUM_EVENTS // len(STRATEGIES)
        num_batches = per_run // EVENTS_IN_BATCH // num_reporting
        for sequence in range(num_batches):
            for rank in range(num_reporting):
                batch = self.batch(spec, rank, sequence, rng)
                began = time.process_time()
                self.recorder.add(batch)
                self.take_seconds += time.process_time() - began
            if sequence % max(num_batches // NUM_SAMPLED, 1) == 0:
                self.draw()
        self.recorder.end(spec.run_id, Status.FINISHED)

    def batch(
        self, spec: RunSpec, rank: int, sequence: int, rng: np.random.Generator
    ) -> EventBatch:
        return EventBatch(
            run_id=spec.run_id,
            rank=rank,
            sequence=sequence,
            header=self.header(spec) if sequence == 0 else None,
            rows=rows(rank, sequence * EVENTS_IN_BATCH, spec.strategy, rng),
        )

    def draw(self) -> None:
        began = time.process_time()
        comparison = self.recorder.comparison
        Picture(draw(comparison, strategy_rows(comparison), is_live=True), "").png()
        self.draw_seconds.append(time.process_time() - began)

    def header(self, spec: RunSpec) -> RunHeader:
        return RunHeader(
            synchronous=spec.strategy != "async",
            num_workers=1 if spec.strategy == "single" else 2,
            num_ranks=NUM_REPORTING[spec.strategy],
            num_threads=1,
            device="cpu",
            backend="gloo",
            num_parameters=1,
            num_samples=256 * NUM_EVENTS // len(STRATEGIES) // NUM_REPORTING[spec.strategy],
        )


def measure() -> list[Figure]:
    rng = np.random.default_rng(0)
    with TemporaryDirectory() as folder:
        timed = Fed(Path(folder))
        for spec in timed.specs:
            timed.train(spec, rng)
        timed.store.close()
    late = timed.draw_seconds[len(timed.draw_seconds) // 2 :]
    interval = [min(max(REDRAW_SECONDS, c / MAX_SHARE), MAX_PAUSE_SECONDS) for c in late]
    return [
        Figure(
            name=f"processor time of one redraw (4 strategies, up to {NUM_EVENTS:,} events, second "
            "half of the redraws)",
            unit="ms of CPU",
            ours=[1000 * cost for cost in late],
            limit="<= 250.0",
        ),
        Figure(
            name="share of a core that redraws use",
            unit="",
            ours=[cost / pause for cost, pause in zip(late, interval, strict=True)],
            limit="<= 0.1",
        ),
        Figure(
            name="number of redraws per second",
            unit="1/s",
            ours=[1 / pause for pause in interval],
            limit=">= 0.4",
        ),
        Figure(
            name="processor time to add an event to memory and store",
            unit="us of CPU per event",
            ours=[1e6 * timed.take_seconds / NUM_EVENTS],
            limit="<= 5.0",
        ),
    ]
