import pytest

from ddpnb.magics.arguments import arguments, following
from ddpnb.magics.magics import DdpMagics, comparison_of
from ddpnb.magics.panel_form import FormState
from ddpnb.protocol.catalogue import CELL_TASK
from ddpnb.protocol.notation import LINKS

CHOSEN = {
    "strategies": ("single", "ddp"),
    "task": "digits",
    "num_ranks": 2,
    "choices": {"batch_size": 64, "num_epochs": 1.5, "learning_rate": 0.02},
}


def test_the_line_asks_for_what_the_controls_say():
    state = FormState(**CHOSEN, num_repeats=3, name="race")
    spec = comparison_of(arguments(DdpMagics.ddp_compare, state.line()), state.line(), "")
    (first, *_, last) = spec.run_specs()
    assert spec.run_specs()[0].strategy == "single"
    assert (first.task, first.batch_size, first.num_epochs, first.learning_rate) == (
        "digits",
        64,
        1.5,
        0.02,
    )
    assert (last.strategy, last.repeat, spec.name) == ("no-comm", 2, "race")


@pytest.mark.parametrize(
    ("strategies", "trained"),
    [
        (("single", "ddp"), ["single", "no-comm", "ddp"]),
        (("ddp",), ["ddp"]),
        (("single",), ["single"]),
        (("single", "async", "dp"), ["single", "no-comm", "async", "dp"]),
        (("dp", "async"), ["dp", "async"]),
    ],
)
def test_single_is_trained_where_it_is_chosen(strategies: tuple[str, ...], trained: list[str]):
    line = FormState(**(CHOSEN | {"strategies": strategies})).line()
    spec = comparison_of(arguments(DdpMagics.ddp_compare, line), line, "")
    assert [run.strategy for run in spec.run_specs()] == trained


def test_a_straggler_is_written_as_the_magic_takes_it():
    state = FormState(**(CHOSEN | {"choices": {"slow": "1:3x, 0:50ms"}}))
    assert "--slow 1:3x,0:50ms" in state.line()


def test_the_magic_starts_ranks_only_where_none_run():
    state = FormState(**CHOSEN)
    assert state.magic(cell="", has_ranks=False).startswith("%ddp_start -n 2\n%ddp_compare ddp ")
    assert state.magic(cell="", has_ranks=True).startswith("%ddp_compare ddp ")


def test_the_users_own_cell_is_part_of_the_magic():
    state = FormState(**(CHOSEN | {"task": CELL_TASK}))
    first, *rest = state.magic(cell="def model(): ...", has_ranks=True).splitlines()
    assert first.startswith("%%ddp_compare ddp --epochs 1.5 --batch-size 64")
    assert "--task" not in first
    assert rest == ["def model(): ..."]


def test_an_emulated_link_is_completed_and_chosen_in_the_panel():
    offered = following((DdpMagics,), ["%ddp_compare", "ddp", "--link"], {}, "")
    assert [each.text for each in offered] == list(LINKS)
    state = FormState(**(CHOSEN | {"choices": {"link": "1Gbit, 0.5ms"}}))
    assert state.line().endswith("--link 1Gbit,0.5ms")
    assert "--link" not in FormState(**(CHOSEN | {"choices": {"link": ""}})).line()
