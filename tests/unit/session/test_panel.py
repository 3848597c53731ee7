from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ddpnb.magics.magics import comparison_of
from ddpnb.magics.panel import Panel
from tests.unit.session.test_comparison_spec import spec_of


@pytest.fixture
def panel() -> Iterator[Panel]:
    panel = Panel(InteractiveShell.instance(), comparison_of)
    yield panel
    panel.close()
    InteractiveShell.clear_instance()


def test_the_line_asks_for_what_the_controls_say(panel: Panel):
    panel.task.value = "digits"
    for flag, text in {
        "--epochs": "1.5",
        "--slow": "1:3x, 0:50ms",
        "--link": "1Gbit, 0.5ms",
    }.items():
        panel.choices[flag].value = text
    panel.repeats.value = 3
    line = panel.line()
    assert panel.magic.value == f"%ddp_start -n 2\n%ddp_compare {line}"
    first, *_, last = spec_of(line).run_specs()
    assert (first.strategy, first.task, first.batch_size) == ("single", "digits", 64)
    assert (first.num_epochs, first.slow, last.repeat) == (1.5, ("1:3x", "0:50ms"), 2)
    assert first.link == "1Gbit,0.5ms"


def test_single_is_trained_where_it_is_chosen(panel: Panel):
    for chosen, added in (("single ddp", {"no-comm"}), ("ddp", set()), ("single", set())):
        for name, box in panel.strategies.items():
            box.value = name in chosen.split()
        trained = {run.strategy for run in spec_of(panel.line()).run_specs()}
        assert trained == {*chosen.split(), *added}
