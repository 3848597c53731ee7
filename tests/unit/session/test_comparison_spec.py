import inspect
import re
from dataclasses import replace

import numpy as np
import pytest

from ddpnb.api import compare
from ddpnb.magics.magics import comparison_of
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.notation import Target
from ddpnb.protocol.options import options_of, read_options
from ddpnb.protocol.training_options import TrainingSpec, make_training_spec
from ddpnb.reports.formatting import differences
from ddpnb.reports.style import PlotOptions
from ddpnb.results.comparison import Comparison, magic_of
from ddpnb.session.comparison_spec import ComparisonSpec

CELL = "def model(): ...\ndef data(split): ..."
DIGITS = TrainingSpec(task="digits")


def spec_of(line: str) -> ComparisonSpec:
    return comparison_of(line, "")


def test_each_repeat_begins_with_another_strategy_and_has_a_seed_that_all_share():
    training = TrainingSpec(task="digits", seed=2**63 - 2)
    spec = ComparisonSpec(
        strategies=("single", "dp", "ddp"), training=training, num_repeats=3, baseline=False
    )
    runs = spec.run_specs()
    turns = [" ".join(run.strategy for run in runs if run.repeat == num) for num in range(3)]
    assert turns == ["single dp ddp", "dp ddp single", "ddp single dp"]
    assert len({run.run_id for run in runs}) == 9
    seeds = [training.seed, 2**63 - 1, 0]  # 0 follows the largest seed
    assert all(run.seed == seeds[run.repeat] for run in runs)
    assert {run.data_seed for run in runs} == {training.seed}, "each repeat must have the same data"
    assert differences(runs) == []


@pytest.mark.parametrize("line", ["%matplotlib inline", "!pip list", "x = !ls", "%%time"])
def test_a_magic_in_the_cell_is_named_with_its_line(line: str):
    with pytest.raises(UserError, match=f"Line 3.*{re.escape(line)}"):
        ComparisonSpec(strategies=("ddp",), training=TrainingSpec(source=f"{CELL}\n{line}\nx = 1"))
    no_magic = f'{CELL}\nx = (5\n% 2)\ny = """\n%a\n"""'
    ComparisonSpec(strategies=("ddp",), training=TrainingSpec(source=no_magic))


@pytest.mark.parametrize(
    ("asked", "baseline", "expected"),
    [
        (("ddp",), True, ["single", "no-comm", "ddp"]),
        (("ddp",), False, ["ddp"]),
        (("single",), True, ["single"]),
        (("no-comm",), True, ["single", "no-comm"]),
        (("ddp", "single"), True, ["single", "no-comm", "ddp"]),
        (("ddp", "single"), False, ["ddp", "single"]),
        (("async", "ddp", "async"), False, ["async", "ddp"]),
    ],
)
def test_the_baseline_and_the_ceiling_are_added_once_and_first(
    asked: tuple[str, ...], baseline: bool, expected: list[str]
):
    spec = ComparisonSpec(strategies=asked, training=DIGITS, baseline=baseline)
    assert [run.strategy for run in spec.run_specs()] == expected


def test_a_ceiling_that_was_added_is_trained_for_its_rate_alone():
    training = TrainingSpec(task="digits", kill=("1@1s",), save=True, accumulate=4, clip=1.0)
    asked = ComparisonSpec(strategies=("ddp", "no-comm"), training=training).run_specs()
    assert not any(run.is_ceiling for run in asked)
    single, ceiling, ddp = ComparisonSpec(strategies=("ddp",), training=training).run_specs()
    for name in TrainingSpec.__dataclass_fields__:
        assert getattr(single, name) == getattr(ddp, name) == getattr(training, name)
    assert (ceiling.is_ceiling, ceiling.kill, ceiling.save) == (True, (), False)
    assert (ddp.is_ceiling, ddp.kill, ddp.save) == (False, ("1@1s",), True)
    assert differences([ceiling, ddp]) == []


def test_the_first_repeat_tries_each_learning_rate_and_the_ceiling_one():
    training = spec_of("ddp --task digits --seed 7 --lr 0.1,0.02").training
    assert (training.learning_rate, training.rates) == (0.1, (0.1, 0.02))
    spec = ComparisonSpec(strategies=("ddp",), training=training, num_repeats=2)
    runs = spec.run_specs()
    assert [(run.strategy, run.repeat, run.seed, run.learning_rate) for run in runs] == [
        ("single", 0, 7, 0.1),
        ("no-comm", 0, 7, 0.1),
        ("ddp", 0, 7, 0.1),
        ("ddp", 0, 7, 0.02),
        ("single", 0, 7, 0.02),
        ("ddp", 1, 8, 0.1),  # or its best rate
        ("single", 1, 8, 0.1),
        ("no-comm", 1, 8, 0.1),
    ]
    assert differences(runs) == []


@pytest.mark.parametrize("given", ["0.02, 0.1", (0.02, 0.1), np.array([0.02, 0.1])])
def test_learning_rates_may_be_a_text_or_a_list(given: object):
    made = make_training_spec({"task": "digits", "lr": given})
    assert made == TrainingSpec(task="digits", learning_rate=0.02, rates=(0.02, 0.1))
    assert made.rate_words == "0.02,0.1"
    assert make_training_spec({"task": "digits", "lr": [0.05]}) == TrainingSpec(task="digits")


MISTAKES = {
    "dpp": ["dpp", "dp or ddp"],
    "async:bund=2": ["bund", "bound"],
    "gossip:together=on": ["gossip has no options"],
    "ddp ddp:": ["ddp:option=value"],
    "ddp:hook=fp16,hook=bf16": ["twice"],
    "ddp:bucket_cap_mb=0": ["ddp:bucket_cap_mb"],
    "diloco:outer_lr=0": ["diloco:outer_lr"],
    "async:momentum=1": ["async:momentum", "less than 1"],
    "hogwild:momentum=-1": ["hogwild:momentum", "at least 0"],
    "async:compensate=yes": ["async:compensate", "'yes'"],
    "async:compensate=-1": ["async:compensate", "at least 0"],
    "ddp hogwild --link 1GbE": ["hogwild", "Remove --link"],
    "hogwild --devices 8": ["Use --devices real", "remove hogwild"],
    "single:threads=all --devices 8": ["Use --devices real", "remove single:threads=all"],
    "ddp single single:threads=all --link 1GbE": ["threads of all ranks", "Remove --link"],
    "single:threads=all --devices 2xT4 --as resnet18 --lr 0.1,0.2": ["emulated devices"],
    "--epochs 1": ["Name the strategies"],
    "ddp --repeats 0": ["--repeats", "at least 1"],
    "ddp --min-seconds 4 --devices 8": ["--epochs"],
    "ddp --epoxs 1": ["did you mean --epochs"],
    "ddp --task mnist": ["'mnist'", "digits, "],
    "ddp --task digits:size=3": ["digits has no options", "size"],
}
"""The words of a line, and the words that the error must contain."""


@pytest.mark.parametrize(("words", "named"), MISTAKES.items(), ids=MISTAKES)
def test_a_wrong_comparison_is_one_sentence(words: str, named: list[str]):
    with pytest.raises(UserError) as caught:
        spec_of(f"--task digits {words}")
    assert all(each in str(caught.value) for each in named)
    assert "\n" not in str(caught.value)


def test_a_comparison_has_one_task():
    for given in ({}, {"source": "  \n"}, {"task": "digits", "source": CELL}):
        with pytest.raises(
            UserError, match="--task digits" if "task" in given else "nothing to train"
        ):
            ComparisonSpec(training=TrainingSpec(**given), strategies=("ddp",))


WRONG_VALUES = {
    "--epochs": "0 nan one",
    "--min-seconds": "0 -3 nan",
    "--batch-size": "0",
    "--lr": "-1 nan 0.1, 0.1,,0.2 0.1,abc 0,0.1 0.1,0.2,0.10 1,2,3,4,5,6,7",
    "--momentum": "1 1.5 inf nan -0.1 much",
    "--batch-per-worker": "0",
    "--seed": f"-1 {2**63} {10**400}",
    "--accumulate": "0",
    "--amp": "fp8",
    "--clip": "0",
    "--data-workers": "-1 100000",
    "--eval-samples": "0",
    "--eval-every": "-1",
    "--link": "dsl 1Gbit 0Gbit,1ms 1Gbit,1m 1kbit,99s",
    "--devices": "0xV100 eight 8xV100",
    "--slow": "1 1:3x,2 1:0.5x 1:1x 1:0ms 1:99999x 1:9999999999999s",
    "--kill": "1 1@99999999999999999999s 1@1s,0@2s,1@9s",
    "--jitter": "lots 20 -5% 99999999999%",
    "--epoch": "1",
    "--lucky": "",
}
"""Options, and values that ddpnb rejects."""
WRONG_LINES = [
    *(f"{option}={each}" for option, given in WRONG_VALUES.items() for each in given.split(" ")),
    "--batch-size=128 --batch-per-worker 64",
    "--as=resnet50 --devices 8",
    "--as=vgg --devices 8xV100",
    "--as=gpt2-small --devices 8xT4",
    "--devices=9xV100/2 --as resnet50",
    "--compute=3 --devices 8",
    "--device-link=0GB/s,1us --devices 8",
    "--link=1GbE --devices real",
    "--epochs",
]


@pytest.mark.parametrize("line", WRONG_LINES)
def test_a_wrong_line_is_one_sentence_before_anything_trains(line: str):
    with pytest.raises(UserError) as caught:
        spec_of(f"ddp --task digits {line}")
    option, _, value = line.partition(" ")[0].partition("=")
    named = {option, value, value.partition(",")[0], "devices"}
    assert any(word and word in str(caught.value) for word in named)
    assert "\n" not in str(caught.value)


def test_every_choice_has_its_option():
    line = "--lr 0.1 --amp bf16 --clip 1.5 --slow 1:3x,0:50ms --slow 2:2x --jitter 20% --save"
    training = spec_of(f"ddp --task digits {line} --data-workers 2 --kill 1@5s").training
    assert training == TrainingSpec(
        **{"task": "digits", "learning_rate": 0.1, "amp": "bf16", "clip": 1.5, "save": True},
        **{"slow": ("1:3x", "0:50ms", "2:2x"), "jitter": 0.2, "kill": ("1@5s",)},
        num_data_workers=2,
    )


def test_momentum_is_no_option_of_a_class_of_ones_own():
    run = RunSpec(run_id="r", strategy="Own:momentum=0.5", task="digits", momentum=0.9)
    assert run.used_momentum == 0.9


def test_the_python_twin_has_the_same_choices_and_defaults():
    parameters = inspect.signature(compare).parameters
    chosen = {o.keyword: parameters[o.keyword].default for o in options_of(TrainingSpec).values()}
    assert make_training_spec(chosen, source=CELL) == TrainingSpec(source=CELL)
    shown = inspect.getdoc(compare) or ""
    assert all(f"\n    {o.keyword}: " in shown for o in options_of(TrainingSpec).values())
    for jitter in ("20%", 0.2):
        made = make_training_spec({"jitter": jitter, "slow": "1:3x"}, source=CELL)
        assert made == TrainingSpec(source=CELL, jitter=0.2, slow=("1:3x",))
    with pytest.raises(UserError, match=r"would mean 2000 %\. Write 20% or 0\.2\."):
        make_training_spec({"jitter": 20}, source=CELL)


def test_a_target_is_a_training_loss_or_a_held_out_accuracy():
    for given, expected in (
        (None, None),
        (0.3, Target(value=0.3)),
        ("0.3", Target(value=0.3)),
        ("accuracy=0.95", Target(value=0.95, is_accuracy=True)),
        ("accuracy=95%", Target(value=0.95, is_accuracy=True)),
    ):
        assert read_options(PlotOptions, {"target": given}) == {"target": expected}
    for wrong in ("accuracy=1.2", "accuracy=0", "accuracy=", "f1=0.9", "95%", float("inf")):
        with pytest.raises(UserError, match=r"^--target .*accuracy[^\n]*$"):
            read_options(PlotOptions, {"target": wrong})


def magic_for(specs: tuple[RunSpec, ...]) -> str:
    return magic_of(Comparison(comparison_id="1", name="race", specs=specs))


@pytest.mark.parametrize(
    "line",
    [
        "ddp --task digits",
        "dp async --task digits --epochs 0.25 --batch-size 64 --lr 0.001 --seed 7 --repeats 3",
        "async --task digits --no-baseline",
        "single --task synthetic:samples=64",
        "single:threads=all hogwild --task digits --devices real",
        "ddp:hook=fp16 async:bound=2 --task text --slow 1:3x,0:50ms --jitter 20% --kill 1@2s",
        "ddp --task digits --amp bf16 --clip 0.5 --accumulate 2 --save --link 1Gbit,0.5ms",
        "async:momentum=0.5 --task digits --momentum 0.9 --batch-per-worker 64",
        "async:compensate=2 hogwild:momentum=0 --task digits --batch-per-worker 8",
    ],
)
def test_the_magic_of_a_stored_comparison_asks_for_the_same_runs(line: str):
    asked = spec_of(line).run_specs()
    again = spec_of(magic_for(asked).removeprefix("%ddp_compare ")).run_specs()
    one, other = (
        [replace(run, run_id="", comparison_id="") for run in runs] for runs in (asked, again)
    )
    assert one == other


def test_the_magic_of_an_own_cell_stands_in_place_of_its_comment_and_a_loop_has_none():
    training = TrainingSpec(source=f"# %%ddp_compare ddp --name x\n{CELL}", seed=3)
    specs = ComparisonSpec(strategies=("ddp",), training=training).run_specs()
    line = "%%ddp_compare ddp --epochs 2 --batch-size 256 --lr 0.05 --momentum 0 --seed 3"
    assert magic_for(specs) == f"{line}\n{CELL}"
    assert magic_for(()) == ""
