"""The panel's outputs in a kernel. tests/browser tests the panel in JupyterLab."""

from tests.cells import COMPARED
from tests.kernel.client import Kernel

PANEL = "from ddpnb.magics.magics import the_panel\npanel = the_panel()"


def test_it_trains_the_users_own_cell_and_shows_it_in_both_places(kernel: Kernel):
    first = kernel.run("%ddp_panel").passed
    assert len(first.outputs) == 4
    assert kernel.run(COMPARED).passed
    again = kernel.run("%ddp_panel").passed
    setting = (
        f"{PANEL}\n"
        "panel.choices['--epochs'].value, panel.choices['--batch-size'].value = '1', '32'\n"
        "panel.strategies['async'].value = False\npanel.run.click()"
    )
    assert kernel.run(setting).passed
    magic = "%%ddp_compare ddp --epochs 1 --batch-size 32"
    assert kernel.value("panel.magic.value.splitlines()[0]") == magic
    kernel.wait_for_value("panel.status.value", "Finished")
    for cell in (first, again):
        assert len(cell.pictures) == 1
        assert "ddp" in cell.bundles("text/html")[-1]
    assert kernel.value("sorted(__import__('ddpnb').plot().runs().strategy)") == (
        "['ddp', 'no-comm', 'single']"
    )


def test_run_and_stop_at_the_wrong_moment_are_reported(kernel: Kernel):
    kernel.run(f"%ddp_panel\n{PANEL}\npanel.stop.click()")
    assert "Nothing is training." in kernel.value("panel.status.value")
    kernel.run(
        "panel.choices['--epochs'].value, panel.task.value = '500', 'digits'\npanel.run.click()"
    )
    kernel.run("panel.run.click()")
    assert "A comparison is training on the ranks" in kernel.value("panel.status.value")
    kernel.run("panel.stop.click()")
    kernel.wait_for_value("panel.status.value", "Stopped")
