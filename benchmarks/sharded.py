"""Compares the memory of sharded ranks (``zero``, ``fsdp``) with the memory of ``ddp``."""

from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.measure import Figure
from benchmarks.rank_calls import rank_calls
from ddpnb.protocol.messages import RankState, RunReport, RunSpec
from ddpnb.protocol.processes import SERVER_LOCK
from ddpnb.rank.training import loop
from ddpnb.rank.training.run import Surroundings

NUM_RANKS = 2
MEGABYTE = 1e6
PARAMETERS, OPTIMIZER = "parameters", "optimizer"
LIMIT = "<= 0.55"

TRANSFORMER = """
import torch
from ddpnb.rank.tasks.text import CONTEXT, NUM_SYMBOLS, Transformer

model = Transformer
optimizer = torch.optim.Adam

def data(split):
    text = torch.randint(NUM_SYMBOLS, (16, CONTEXT + 1))
    return text[:, :-1], text[:, 1:]
"""
CNN = """
import torch
from ddpnb.rank.tasks.digits import model

optimizer = torch.optim.Adam

def data(split):
    return torch.randn(16, 1, 8, 8), torch.randint(10, (16,))
"""


def measure() -> list[Figure]:
    with rank_calls(NUM_RANKS) as call:

        def reports(strategy: str, source: str) -> list[RunReport]:
            spec = RunSpec(
                run_id="bench", strategy=strategy, source=source, num_epochs=1, batch_size=8
            )
            return call(train, spec)

        return [
            *figures("text transformer of 0.1 M floats", TRANSFORMER, reports, zero_limit=LIMIT),
            *figures("digits CNN of 0.3 M floats", CNN, reports, zero_limit=""),
        ]


def train(state: RankState, folder: Path, spec: RunSpec) -> RunReport:
    """Train two steps; every rank takes part."""
    (folder / SERVER_LOCK).touch()  # usually of the fork server
    return loop.train(
        spec,
        Surroundings(state=state, folder=folder),
        publish=lambda _: None,
        should_stop=lambda: False,
    )


def figures(
    model: str,
    source: str,
    reports: Callable[[str, str], list[RunReport]],
    *,
    zero_limit: str,
) -> Iterator[Figure]:
    """Yield the memory that each strategy shards; ``zero`` does not split tensors."""
    ddp, zero, fsdp = (reports(word, source) for word in ("ddp", "zero", "fsdp"))
    yield figure("Adam's state with zero", model, zero, ddp, OPTIMIZER, zero_limit)
    yield figure("Adam's state with fsdp", model, fsdp, ddp, OPTIMIZER, LIMIT)
    yield figure("parameters with fsdp", model, fsdp, ddp, PARAMETERS, LIMIT)


def figure(
    what: str, model: str, ours: list[RunReport], ddp: list[RunReport], field: str, limit: str
) -> Figure:
    """Return the largest memory of a rank, for one strategy and for ``ddp``."""
    held = [getattr(report.memory, field) / MEGABYTE for report in ours]
    whole = [getattr(report.memory, field) / MEGABYTE for report in ddp]
    return Figure(
        name=f"memory of {what}, compared with ddp (rank with the largest memory of 2 ranks, "
        f"{model})",
        unit="MB",
        ours=[max(held)],
        theirs=[max(whole)],
        limit=limit,
        note="MB of each rank: " + ", ".join(f"{each:.3f}" for each in held),
    )
