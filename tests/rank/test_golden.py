"""Every synchronous strategy computes the losses that are stored in ``golden.json``.

If you change the losses on purpose, write the file again:

    python -m tests.rank.test_golden

``async`` and ``hogwild`` are left out because their losses depend on which rank is faster.
``single:threads=all`` is left out because its sums depend on the number of cores.
"""

import json
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ddpnb.protocol.catalogue import STRATEGIES
from tests.rank.ranks import Ranks
from tests.rank.runs import losses, spec_of, total_losses, train_job

VALUES = Path(__file__).with_name("golden.json")
OPTIONS = {"local-sgd": "local-sgd:every=2", "diloco": "diloco:every=2"}
SYNCHRONOUS = (
    *(OPTIONS.get(name, name) for name in STRATEGIES if name not in ("async", "hogwild")),
    "ddp:bucket_cap_mb=0.01",
    "ddp:find_unused_parameters=on",
    "ddp:hook=fp16",
    "ddp:hook=bf16",
    "ddp-overlap-by-hand:bucket_mb=0.01",
    "fsdp:reshard=off",
)
FEATURED = ("ddp", "fsdp", "dp")
"""Strategies that together exercise every case of the loop for synchronous strategies."""

CELL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(6, 16), {layer}, nn.Linear(16, 3))

def data(split):
    generator = torch.Generator().manual_seed(len(split))
    inputs = torch.randn(100, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(1)
"""
SCHEDULED_ADAMW = """
def optimizer(params, num_steps):
    made = torch.optim.AdamW(params, lr=1e-2)
    return made, torch.optim.lr_scheduler.OneCycleLR(made, max_lr=5e-2, total_steps=num_steps)
"""
OWN = {
    "source": CELL.format(layer="nn.Tanh()"),
    "num_epochs": 2,
    "batch_size": 31,
    "learning_rate": 0.1,
}
DIGITS = {"task": "digits", "num_epochs": 1, "batch_size": 255, "learning_rate": 0.02}

CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "cell": (SYNCHRONOUS, OWN),
    "digits": (FEATURED, DIGITS | {"momentum": 0.9}),
    "synthetic": (
        ("single",),
        {"task": "synthetic:samples=128", "num_epochs": 1, "batch_size": 31, "learning_rate": 0.05},
    ),
    "weak scaling": (
        ("ddp",),
        DIGITS | {"num_epochs": 0.5, "batch_per_worker": 100},
    ),
    "evaluated": (("ddp", "fsdp", "gossip"), OWN | {"eval_every": 0.5}),
    "accumulate": (FEATURED, OWN | {"accumulate": 3}),
    "clip": ((*FEATURED, "zero"), OWN | {"clip": 0.2}),
    "bf16": (FEATURED, OWN | {"amp": "bf16"}),
    "adamw": (
        (*FEATURED, "zero", "central", "diloco:every=2"),
        OWN | {"source": OWN["source"] + SCHEDULED_ADAMW},
    ),
    "dropout": (("ddp",), OWN | {"source": CELL.format(layer="nn.Tanh(), nn.Dropout(0.3)")}),
    "batchnorm": (
        (*FEATURED, "local-sgd:every=2"),
        OWN | {"source": CELL.format(layer="nn.BatchNorm1d(16)")},
    ),
}
"""Strategies and their training options, by case."""
ALL = [(case, name) for case, (strategies, _) in CASES.items() for name in strategies]


def computed(ranks: Ranks, case: str, strategy: str) -> dict[str, Any]:
    """Train on two ranks. Return each rank's losses, and rank 0's evaluations."""
    _, options = CASES[case]
    options = {"eval_every": 0.0, "eval_samples": 10_000} | options
    results = ranks.call(train_job, spec_of(strategy, **options))
    report, _ = results[0]
    return {
        "losses": {
            f"rank {rank}": rounded(losses(each)) for rank, each in enumerate(results) if each[1]
        },
        "final": rounded([report.final_loss, report.held_out_loss, report.held_out_accuracy]),
        "evaluations": [
            rounded([each.num_samples, each.loss, each.accuracy]) for each in report.evaluations
        ],
    }


def rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), 8) for value in values]


@pytest.mark.parametrize(("case", "strategy"), ALL)
def test_losses_are_the_stored_ones(ranks, case, strategy):
    found, expected = computed(ranks(2), case, strategy), EXPECTED[case][strategy]
    assert found["losses"].keys() == expected["losses"].keys()
    for rank, mine in found["losses"].items():
        assert mine == pytest.approx(expected["losses"][rank], abs=1e-6), rank
    assert found["final"] == pytest.approx(expected["final"], abs=1e-6)
    assert len(found["evaluations"]) == len(expected["evaluations"])
    for mine, theirs in zip(found["evaluations"], expected["evaluations"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)


LIKE_SINGLE = ("dp", "ddp", "ddp-by-hand", "ring-by-hand", "central", "zero", "fsdp")
"""Strategies that make the same updates as ``single``."""


@pytest.mark.parametrize("num_ranks", [1, 3, 5, 8])
def test_losses_are_those_of_one_process_on_any_number_of_ranks(ranks, num_ranks):
    """The last batch, of 7 samples, is divided unevenly or dropped."""
    options = OWN | {"num_epochs": 1, "eval_samples": 8, "eval_every": 0.0}
    alone, *others = (
        total_losses(ranks(num_ranks).call(train_job, spec_of(name, **options)))
        for name in ("single", *LIKE_SINGLE)
    )
    assert len(alone) == (3 if num_ranks == 8 else 4)
    assert others == [pytest.approx(alone, abs=1e-6)] * len(LIKE_SINGLE)


EXPECTED = json.loads(VALUES.read_text())


def main() -> None:
    lines = []
    with closing(Ranks(2)) as ranks:
        for case, (strategies, _) in CASES.items():
            inner = ",\n".join(
                f"  {json.dumps(each)}: {json.dumps(computed(ranks, case, each))}"
                for each in strategies
            )
            lines.append(f"{json.dumps(case)}: {{\n{inner}\n }}")
    VALUES.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
