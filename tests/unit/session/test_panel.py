from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ddpnb.magics.arguments import arguments, following
from ddpnb.magics.magics import DdpMagics, comparison_of
from ddpnb.magics.panel import Panel
from ddpnb.protocol.notation import LINKS


@pytest.fixture
def panel() -> Iterator[Panel]:
    panel = Panel(InteractiveShell.instance(), parse=comparison_of, own_cell=lambda: "x = 1")
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
    runs = comparison_of(arguments(DdpMagics.ddp_compare, line), line, "").run_specs()
    first, last = runs[0], runs[-1]
    assert (first.strategy, first.task, first.batch_size) == ("single", "digits", 64)
    assert (first.num_epochs, first.slow, last.repeat) == (1.5, ("1:3x", "0:50ms"), 2)
    assert first.link == "1Gbit,0.5ms"


@pytest.mark.parametrize(
    ("strategies", "trained"),
    [
        (("single", "ddp"), {"single", "no-comm", "ddp"}),
        (("ddp",), {"ddp"}),
        (("single",), {"single"}),
        (("dp", "async"), {"dp", "async"}),
    ],
)
def test_single_is_trained_where_it_is_chosen(panel: Panel, strategies, trained):
    for name, box in panel.strategies.items():
        box.value = name in strategies
    line = panel.line()
    spec = comparison_of(arguments(DdpMagics.ddp_compare, line), line, "")
    assert {run.strategy for run in spec.run_specs()} == trained


def test_an_emulated_link_is_completed():
    offered = following((DdpMagics,), ["%ddp_compare", "ddp", "--link"], {}, "")
    assert [each.text for each in offered] == list(LINKS)
