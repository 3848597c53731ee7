from typing import Any

import pytest

from ddpnb.errors import UserError
from ddpnb.notebook.compare import ComparisonSpec

CELL = "def model(): ...\ndef data(split): ..."


def test_repeats_are_interleaved_so_that_none_is_favoured():
    spec = ComparisonSpec(strategies=("dp", "ddp"), task="digits", num_repeats=2)
    runs = spec.run_specs()
    assert [(run.repeat, run.strategy) for run in runs] == [
        (0, "single"),
        (0, "dp"),
        (0, "ddp"),
        (1, "single"),
        (1, "dp"),
        (1, "ddp"),
    ]
    assert len({run.run_id for run in runs}) == 6


@pytest.mark.parametrize(
    ("asked", "baseline", "expected"),
    [
        (("ddp",), True, ["single", "ddp"]),
        (("ddp",), False, ["ddp"]),
        (("ddp", "single"), True, ["single", "ddp"]),
        (("ddp", "single"), False, ["ddp", "single"]),
        (("async", "ddp", "async"), False, ["async", "ddp"]),
    ],
)
def test_the_baseline_is_added_once_and_first(
    asked: tuple[str, ...], baseline: bool, expected: list[str]
):
    spec = ComparisonSpec(strategies=asked, task="digits", baseline=baseline)
    assert [run.strategy for run in spec.run_specs()] == expected


def test_all_runs_have_the_same_training():
    spec = ComparisonSpec(
        strategies=("dp", "async"),
        source=CELL,
        num_epochs=0.5,
        batch_size=64,
        learning_rate=0.1,
        seed=7,
    )
    for run in spec.run_specs():
        assert (run.source, run.num_epochs, run.batch_size) == (CELL, 0.5, 64)
        assert (run.learning_rate, run.seed, run.task) == (0.1, 7, "cell")


DIGITS: dict[str, Any] = {"strategies": ("ddp",), "task": "digits"}
NAN = float("nan")


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        (
            {"strategies": ("dpp",), "task": "digits"},
            "There is no strategy 'dpp'; choose one of: single, dp, ddp, async, hogwild.",
        ),
        ({"strategies": (), "task": "digits"}, "Name the strategies to compare, one or more of:"),
        (
            {"strategies": ("ddp",), "task": "mnist"},
            "There is no task 'mnist'; choose one of: digits, synthetic.",
        ),
        (DIGITS | {"source": CELL}, "--task digits and a cell that defines the task: leave one"),
        ({"strategies": ("ddp",)}, "Nothing to train: define model() and data(split) in the cell"),
        ({"strategies": ("ddp",), "source": "  \n"}, "Nothing to train"),
        (DIGITS | {"num_repeats": 0}, "--repeats must be at least 1, not 0."),
        (DIGITS | {"num_epochs": 0.0}, "--epochs must be greater than 0, not 0.0."),
        (DIGITS | {"num_epochs": NAN}, "--epochs must be greater than 0"),
        (DIGITS | {"batch_size": 0}, "--batch-size must be at least 1, not 0."),
        (DIGITS | {"learning_rate": -1.0}, "--lr must be greater than 0, not -1.0."),
        (DIGITS | {"learning_rate": NAN}, "--lr must be greater than 0"),
        (DIGITS | {"seed": -1}, "--seed must be at least 0, not -1."),
    ],
)
def test_a_wrong_wish_is_one_sentence_before_anything_trains(wish: dict[str, Any], told: str):
    with pytest.raises(UserError) as caught:
        ComparisonSpec(**wish).run_specs()
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
