"""The notebook can run cells while a comparison trains in the background."""

import re
from collections.abc import Iterator

import pytest

from tests.kernel.client import Cell, Kernel

LONG = "%ddp_compare ddp --task digits --epochs 100000 --no-baseline --no-wait"
LONG += " --slow 0:20ms,1:20ms"  # leaves the cores to the other tests


def wait_for_end(kernel: Kernel) -> None:
    kernel.wait_for_value("this_session().comparison is None", "True", timeout=30)


@pytest.fixture
def training(kernel: Kernel) -> Iterator[Cell]:
    """The cell of a comparison that would take hours, after its first updates."""
    cell = kernel.run(f"running = {LONG} --name long").passed
    kernel.wait_for_value("len(running.result.steps()) > 0", "True", timeout=30)
    yield cell
    kernel.run("%ddp_interrupt")
    wait_for_end(kernel)


def test_while_it_trains_the_notebook_goes_on_and_an_interrupt_keeps_its_steps(
    training: Cell, kernel: Kernel
):
    assert len(training.pictures) == 1
    before = training.num_updates
    assert max(kernel.run("1 + 1").seconds for _ in range(20)) < 10
    kernel.wait_until(lambda: training.num_updates > before)
    assert len(training.outputs) == 3
    (again,) = kernel.run("%ddp_plot").pictures
    assert again
    shown = kernel.run("running").text
    assert re.fullmatch(r"<comparison, started \d\d:\d\d:\d\d; %ddp_status shows its state>", shown)
    text = kernel.run("%ddp_why").text
    assert "idle" not in text
    for rank in (0, 1):
        assert re.search(rf"rank {rank} (is training and is not in a collective|waits in )", text)
    assert text.count("in step\n") >= 1, "the stack must show the strategy's step"
    text = kernel.run("%ddp_status").text
    assert re.search(r"a comparison is running: ddp: \d+ % · [\d,]+ samples/s", text)
    assert text.count("busy") == 2
    assert kernel.value("this_session().answer_now(None)") == "None", "Tab must not ask a rank"
    for source in ("%%ddp\nrank", LONG, "%ddp_pull 1", "%ddp_restart --ranks 1"):
        assert "A comparison is training" in kernel.run(source).refusal

    kernel.run("first = len(running.result.steps())")
    cell = kernel.run("%ddp_interrupt")
    assert cell.text == "Interrupted the comparison.\n"
    wait_for_end(kernel)
    assert kernel.value("running") == "<comparison: stopped>"
    assert kernel.value("running.result.comparison.runs[0].status") == "stopped"
    assert kernel.value("len(running.result.steps()) >= first > 0") == "True"
    kernel.wait_until(lambda: "<table" in training.bundles("text/html")[-1])
    assert kernel.run("%%ddp\n1 + rank").by_rank == {0: ["1"], 1: ["2"]}


def test_stopping_the_cluster_ends_it_first(training: Cell, kernel: Kernel):
    cell = kernel.run("%ddp_stop")
    assert "The cluster has stopped." in cell.stdout
    assert kernel.value("running.done, running.stop_requested") == "True True"
    assert kernel.value("running.result.comparison.runs[0].status") == "stopped"


def test_one_that_ends_gives_its_result_and_shows_it_where_it_began(kernel: Kernel):
    cell = kernel.run(
        "short = %ddp_compare ddp --task digits --epochs 0.5 --no-baseline --no-wait --name short"
    ).passed
    assert kernel.run("short.wait(60).table()", timeout=90).passed
    kernel.wait_until(lambda: len(cell.outputs) == 3)
    assert [set(output["data"]) for output in cell.outputs] == [
        {"text/html", "text/plain"},
        {"image/png", "text/plain"},
        {"text/html", "text/plain"},
    ]
    assert "samples/s" in cell.text
    assert kernel.value("short") == "<comparison: finished>"
    assert len(kernel.run("short.wait(60)").pictures) == 1


@pytest.mark.parametrize(
    "error", ["SystemExit", "GeneratorExit", "KeyboardInterrupt", "ValueError"]
)
def test_work_that_raises_any_error_has_ended(kernel: Kernel, error: str):
    assert kernel.run(
        "from ddpnb.session.background import Background\nclass Work(Background):\n"
        f"    def run(self): raise {error}('on purpose')\n"
        "work = Work('work')\nthis_session()._keep(work)\nwork.begin().join(20)"
    ).passed
    assert kernel.value("work.done, type(work.error).__name__") == f"True {error}"
    assert kernel.run("%ddp_interrupt").text == "Nothing runs in the background.\n"


def test_an_interrupt_does_not_claim_that_work_has_ended(kernel: Kernel):
    assert kernel.run(
        "%%ddp --no-wait\nimport time\nend = time.monotonic() + 8\nwhile time.monotonic() < end:\n"
        "    try: time.sleep(1)\n    except KeyboardInterrupt: pass"
    ).passed
    cell = kernel.run("%ddp_interrupt")
    sentence = "The cell on ranks 0-1 is still stopping. Run %ddp_interrupt again to wait longer.\n"
    assert cell.text == sentence
    for _ in range(10):
        if "still" not in (cell := kernel.run("%ddp_interrupt")).text:
            break
    assert cell.text in (
        "Interrupted the cell on ranks 0-1.\n",
        "Nothing runs in the background.\n",
    )
    assert kernel.run("%%ddp\n1 + rank").by_rank == {0: ["1"], 1: ["2"]}


def test_a_rank_that_dies_ends_it_and_is_shown_under_its_cell(training: Cell, kernel: Kernel):
    kernel.run("import os, signal\nos.kill(cluster.states[1].pid, signal.SIGKILL)")
    wait_for_end(kernel)
    kernel.wait_until(lambda: "<table" in training.bundles("text/html")[-1])
    kernel.wait_until(lambda: "%ddp_restart" in training.stdout)
    assert "rank 1" in training.stdout
    assert "%ddp_restart --ranks 1" in training.stdout
    assert kernel.value("running") == "<comparison: failed>"
    assert "failed" in training.bundles("text/html")[-1]
