"""The panel as a kernel sees it; what a person sees is in tests/browser."""

import time

from tests.cells import COMPARED
from tests.kernel.client import Kernel

FORM = "get_ipython().magics_manager.registry['DdpMagics'].panel._form"


def test_it_trains_the_users_own_cell_and_shows_it_in_both_places(kernel: Kernel):
    first = kernel.run("%ddp_panel").passed
    assert len(first.outputs) == 4
    assert kernel.run(COMPARED.replace("--name lines", "--name before")).passed
    assert kernel.value(f"{FORM}._task.value") == "own cell"
    assert kernel.value(f"{FORM}._stored.options[:2]") == "('before/ddp', 'before/no-comm')"
    again = kernel.run("%ddp_panel").passed
    setting = (
        f"form = {FORM}\nchoices = form._choices\n"
        "choices['num_epochs'].value, choices['batch_size'].value = 1, 32\n"
        "form._strategies['async'].value = False\nform._name.value = 'paneled'\nform._run.click()"
    )
    assert kernel.run(setting).passed
    assert kernel.value("form._magic.value.splitlines()[0]") == (
        "%%ddp_compare ddp --epochs 1 --batch-size 32 --lr 0.05 --momentum 0 --name paneled"
    )
    deadline = time.monotonic() + 60
    while "Finished" not in kernel.value("form._status.value"):
        assert time.monotonic() < deadline, kernel.value("form._status.value")
        time.sleep(0.1)
    for cell in (first, again):
        assert len(cell.bundles("image/png")) == 1
        assert "paneled" in cell.bundles("text/html")[-1]
    assert kernel.value("sorted(__import__('ddpnb').plot('paneled').to_frame().strategy)") == (
        "['ddp', 'no-comm', 'single']"
    )


def test_run_and_stop_at_the_wrong_moment_are_reported(kernel: Kernel):
    kernel.run(f"%ddp_panel\nform = {FORM}\nform._stop.click()")
    assert "Nothing is training." in kernel.value("form._status.value")
    kernel.run(
        "form._choices['num_epochs'].value, form._task.value = 500, 'digits'\nform._run.click()"
    )
    kernel.run("form._run.click()")
    assert "A comparison is training on the ranks" in kernel.value("form._status.value")
    kernel.run("form._stop.click()")
    deadline = time.monotonic() + 30
    while "Stopped" not in kernel.value("form._status.value"):
        assert time.monotonic() < deadline, kernel.value("form._status.value")
        time.sleep(0.1)
