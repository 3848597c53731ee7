"""The lessons run, every solution is right, and an unsolved exercise gets a hint.

``tests/browser/test_lab.py`` runs the first comparison in a browser.
"""

from pathlib import Path

import pytest
from nbformat import NotebookNode

from ddpnb.course.exercises import HINTS
from ddpnb.course.in_notebook import CHECKS_IN_NOTEBOOK
from tests.kernel.client import Kernel
from tests.lessons import (
    NOTEBOOKS,
    SOLUTIONS,
    code_of,
    executed,
    is_check,
    may_fail,
    read,
    with_gaps,
)


def errors_of(cell: NotebookNode) -> list[str]:
    return [output.ename for output in cell.outputs if output.output_type == "error"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_a_lesson_runs_a_gap_stops_nothing_and_the_solutions_are_right(path: Path, tmp_path: Path):
    notebook = executed(with_gaps(path), tmp_path)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    mistakes = [cell for cell in cells if may_fail(cell)]
    checks = [cell for cell in cells if is_check(cell)]
    assert len(checks) >= 4
    for gap, solution in zip(checks[::2], checks[1::2], strict=True):
        number = solution.source.split()[-1]
        assert gap.source == solution.source
        assert errors_of(gap) == ["UserError"]
        assert [output.get("text") for output in solution.outputs] == [
            f"Exercise {number} is solved.\n"
        ]
    for cell in mistakes:
        assert errors_of(cell) or "exercise" in cell.metadata.tags
    from nbconvert import HTMLExporter  # takes half a second

    page, _ = HTMLExporter().from_notebook_node(notebook)
    data = [output.get("data", {}) for cell in cells for output in cell.outputs]
    assert all(each["image/png"].replace("\n", "") in page for each in data if "image/png" in each)
    assert page.count("<caption") == sum(
        each.get("text/html", "").count("<caption") for each in data
    )


@pytest.mark.timeout(300)
def test_the_notebook_for_colab_runs(tmp_path: Path):
    cells = executed(read(NOTEBOOKS / "colab.ipynb"), tmp_path).cells
    pictures = [output for cell in cells for output in cell.get("outputs", ()) if "data" in output]
    assert sum("image/png" in output.data for output in pictures) == 2
    assert (tmp_path / "notebooks" / "emulated.html").exists()


@pytest.fixture(scope="module")
def three_ranks(kernel_of_module: Kernel) -> Kernel:
    kernel_of_module.run("%ddp_restart -n 3").passed  # noqa: B018 - raises if the cell failed
    return kernel_of_module


def cells_of(number: str, *, solved: bool) -> list[str]:
    (path,) = (NOTEBOOKS / "solutions" if solved else NOTEBOOKS).glob(f"0{number[0]}_*.ipynb")
    cells = [cell.source for cell in code_of(path) if "exercise" in cell.metadata.get("tags", ())]
    at = cells.index(f"%ddp_exercise {number}")
    return cells[at - 1 : at + 1]


@pytest.mark.parametrize("number", HINTS)
def test_a_gap_is_answered_with_a_hint(three_ranks: Kernel, number: str):
    gap, check = cells_of(number, solved=False)
    three_ranks.run(f"{gap}\n").passed  # noqa: B018
    for _ in range(2):
        cell = three_ranks.run(check)
        assert cell.error == "UserError", cell.text[:600]
        assert f"Exercise {number} is not solved yet" in cell.text


ON_RANKS = [number for number in HINTS if number not in CHECKS_IN_NOTEBOOK]


@pytest.mark.parametrize("number", ON_RANKS)
def test_a_solution_is_right_on_three_ranks_too(three_ranks: Kernel, number: str):
    imports = "import torch\nimport torch.distributed as dist\nfrom torch import nn\n"
    imports += "from torch.nn.parallel import DistributedDataParallel\n"
    solution, check = cells_of(number, solved=True)
    three_ranks.run(f"%%ddp\n{imports}").passed  # noqa: B018
    three_ranks.run(solution).passed  # noqa: B018
    assert three_ranks.run(check).passed.stdout == f"Exercise {number} is solved.\n"


WRONG = {
    "hangs": (
        "[(dist.all_reduce(p.grad), p.grad.div_(3)) for p in model.parameters()]\n"
        "    dist.get_rank() and dist.barrier()",
        "barrier",
    ),
    "ends never": ("while True: pass", "took longer than 2 s"),
    "sums": ("[dist.all_reduce(p.grad) for p in model.parameters()]", "is the sum"),
    "does nothing": ("pass", "still has its own gradient"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_solution_costs_no_rank(three_ranks: Kernel, mistake: str):
    body, said = WRONG[mistake]
    three_ranks.run(
        "import ddpnb.course.checking as checking\n"
        f"checking.CHECK_SECONDS = {2 if mistake == 'ends never' else 20}"
    )
    three_ranks.run(
        "%%ddp\nimport torch.distributed as dist\nkept = 1\n"
        f"def average_gradients(model):\n    {body}"
    )
    assert said in three_ranks.run("%ddp_exercise 3.1").refusal
    assert three_ranks.run("%%ddp\nprint(kept)").passed.lines == ["[0-2] 1"]


def test_what_is_missing_is_said(three_ranks: Kernel):
    assert "There is no exercise '9.9'" in three_ranks.run("%ddp_exercise 9.9").refusal
    three_ranks.run("%%ddp\nglobals().pop('my_indices', None)")
    assert "my_indices is not defined" in three_ranks.run("%ddp_exercise 3.2").refusal
    three_ranks.run("%ddp_stop")
    assert "%ddp_start" in three_ranks.run("%ddp_exercise 3.2").refusal
