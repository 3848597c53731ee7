from dataclasses import replace

import pytest

from ddpnb.history.comparison import Comparison, magic_of
from ddpnb.magics.arguments import arguments
from ddpnb.magics.magics import DdpMagics, comparison_of
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.session.comparison_spec import ComparisonSpec

CELL = "def model(): ...\ndef data(split): ...\n"


def comparison(specs: tuple[RunSpec, ...]) -> Comparison:
    return Comparison(comparison_id="1", name="race", specs=specs)


def same(specs: tuple[RunSpec, ...]) -> list[RunSpec]:
    return [replace(spec, run_id="", comparison="") for spec in specs]


@pytest.mark.parametrize(
    "line",
    [
        "ddp --task digits",
        "dp async --task digits --epochs 0.25 --batch-size 64 --lr 0.001 --seed 7 --repeats 3",
        "async --task digits --no-baseline",
        "single --task synthetic:samples=64",
        "ddp:hook=fp16 async:bound=2 --task text --slow 1:3x,0:50ms --jitter 20% --kill 1@2s",
        "ddp --task digits --amp bf16 --clip 0.5 --accumulate 2 --save --link 1Gbit,0.5ms",
        "async:momentum=0.5 --task digits --momentum 0.9 --batch-per-worker 64",
        "async:compensate=2 hogwild:momentum=0 --task digits --batch-per-worker 8",
    ],
)
def test_the_magic_asks_for_the_same_runs(line: str):
    asked = comparison_of(arguments(DdpMagics.ddp_compare, line), line, "").run_specs()
    again = magic_of(comparison(asked)).removeprefix("%ddp_compare ")
    spec = comparison_of(arguments(DdpMagics.ddp_compare, again), again, "")
    assert same(spec.run_specs()) == same(asked)


def test_an_own_cell_is_there_with_its_magic_in_place_of_the_comment():
    source = f"# %%ddp_compare ddp --name x\n{CELL}"
    specs = ComparisonSpec(
        strategies=("ddp",), training=TrainingSpec(source=source, seed=3)
    ).run_specs()
    first, rest = magic_of(comparison(specs)).split("\n", 1)
    assert first == "%%ddp_compare ddp --epochs 2 --batch-size 256 --lr 0.05 --momentum 0 --seed 3"
    assert rest == CELL


def test_a_hand_written_loop_has_none():
    assert magic_of(comparison(())) == ""
