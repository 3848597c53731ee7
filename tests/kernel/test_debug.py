"""You can debug one rank at the notebook's prompt."""

import time
from queue import Empty

import pytest

from tests.cluster.rig import ALL_REDUCE
from tests.kernel.client import Kernel, both

pytestmark = pytest.mark.usefixtures("unharmed")

FAILING = """%%ddp
def broken(depth):
    local = depth + rank
    if rank == 1: raise ValueError(local)
broken(41)
dist.barrier()
"""

STOPPING = f"""{ALL_REDUCE}
def stops():
    here = rank + 5
    breakpoint()
    there = here + 1
    dist.all_reduce(total)
    return there
print(stops(), total.item())
"""


def test_after_an_error_the_failed_frame_is_looked_into(kernel: Kernel):
    assert kernel.run(FAILING).error == "RankError"
    cell, prompts = kernel.answer("%ddp_debug 1", "p local + 1000", "up", "p kept", "q")
    assert prompts == ["[1] ipdb> "] * 4
    assert {"1042", "11"} <= set(cell.passed.by_rank[1])
    assert 0 not in cell.by_rank


def test_a_rank_stops_at_a_breakpoint_while_the_others_wait(kernel: Kernel):
    lines = "p here * 100", "n", "n", "p there", "c"
    cell, _ = kernel.answer(f"%%ddp --debug 1\n{STOPPING}", *lines)
    assert "600" in cell.passed.by_rank[1]
    assert cell.by_rank[0] == ["6 4.0"]
    assert cell.by_rank[1][-1] == "7 4.0"
    assert "hang" not in cell.text


@pytest.mark.parametrize("last", ["breakpoint()", "breakpoint()\nz = y"])
def test_a_breakpoint_in_the_last_lines_shows_the_cells_variables(kernel: Kernel, last: str):
    cell, prompts = kernel.answer(f"%%ddp --debug 1\ny = rank + 100\n{last}", "p y * 10", "c")
    assert len(prompts) == 2
    assert "1010" in cell.passed.by_rank[1]
    assert "IPython" not in cell.text


def test_quitting_at_a_breakpoint_ends_the_cell(kernel: Kernel):
    cell, _ = kernel.answer(f"%%ddp --debug 1\n{STOPPING}", "q")
    assert "rank 1 failed: BdbQuit: quit ends the debugger and the cell" in cell.error_text
    assert "Traceback" not in cell.error_text


def test_input_asks_in_such_a_cell(kernel: Kernel):
    source = "name = input('Who? ') if rank == 0 else 'nobody'\nprint(name)"
    cell, prompts = kernel.answer(f"%%ddp --debug 0\n{source}", "me")
    assert prompts == ["[0] Who? "]
    assert cell.by_rank == {0: ["me"], 1: ["nobody"]}


def test_an_interrupt_at_the_prompt_ends_the_debugger(kernel: Kernel):
    kernel.run(FAILING)
    cell = kernel.begin("%ddp_debug 1", allow_stdin=True)
    assert kernel.client.get_stdin_msg(timeout=30)["content"]["prompt"] == "[1] ipdb> "
    kernel.interrupt()
    assert kernel.wait(cell, timeout=30).status == "ok"
    with pytest.raises(Empty):
        kernel.client.get_stdin_msg(timeout=0.1)


def test_without_a_prompt_the_debugger_ends(kernel: Kernel):
    kernel.run(FAILING)
    began = time.monotonic()
    assert "This frontend has no prompt" in kernel.run("%ddp_debug 1").stderr
    cell = kernel.run(f"%%ddp --debug 1\n{STOPPING}")
    assert "This frontend has no prompt" in cell.stderr
    assert cell.error == "RankError"
    assert time.monotonic() - began < 30


def test_bad_input(kernel: Kernel):
    for line in ("%ddp_debug 5", "%%ddp --debug 1 --no-wait\n1", "%%ddp --debug 1 --ranks 0\n1"):
        assert kernel.run(line).refusal


def test_a_script_stops_too(kernel: Kernel):
    script = "import os\nrank = int(os.environ['RANK'])\nbreakpoint()\nprint('after', rank)\n"
    (kernel.folder / "stops.py").write_text(script)
    cell, prompts = kernel.answer("%ddp_run --debug 1 stops.py", "p rank * 1000", "c")
    assert prompts == ["[1] ipdb> "] * 2
    assert "1000" in cell.by_rank[1]
    assert cell.by_rank[0] == ["after 0"]
    assert cell.by_rank[1][-1] == "after 1"


def test_a_rank_imports_debugpy_only_if_a_cell_does(kernel: Kernel):
    cell = kernel.run("%%ddp\nimport sys\nprint('debugpy' in sys.modules)\nimport debugpy")
    assert cell.passed.by_rank == both("False")
