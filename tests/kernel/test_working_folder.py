"""Ranks work in the notebook's current folder, even after ``%cd``."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cells import COMPARED
from tests.kernel.client import Kernel, both


@pytest.fixture
def moved(kernel: Kernel, project: Path) -> Iterator[Kernel]:
    """A kernel that has changed to a folder with other files."""
    folder = project / "elsewhere"
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text("print(open('sizes.txt').read())\n")
    (folder / "beside.py").write_text("VALUE = 7\n")
    (folder / "sizes.txt").write_text("4 2")
    kernel.run("%cd elsewhere")
    yield kernel
    kernel.run(f"%cd {project}\n%ddp_pull 1")


def test_a_script_a_cell_and_a_comparison_find_the_files_of_the_new_folder(moved: Kernel):
    assert moved.run("%ddp_run script.py").by_rank == both("4 2")
    cell = moved.run("%%ddp\nimport beside\nprint(beside.VALUE, open('sizes.txt').read())")
    assert cell.by_rank == both("7 4 2"), cell.text
    read = "*map(int, open('sizes.txt').read().split())"
    assert moved.run(COMPARED.replace("4, 2", read), timeout=120).passed


def test_a_folder_that_a_cell_has_chosen_stays_until_the_notebook_moves(moved: Kernel):
    moved.run("%%ddp\nimport os\nos.chdir('/')")
    assert moved.run("%%ddp\nprint(os.getcwd())").by_rank == both("/")
    moved.run("%cd ..")
    assert moved.run("%%ddp\nprint(os.getcwd())").by_rank == both(str(moved.folder))


def test_a_folder_that_has_been_removed_changes_nothing(moved: Kernel, tmp_path: Path):
    gone = tmp_path / "gone"
    gone.mkdir()
    moved.run(f"%cd {gone}")
    gone.rmdir()
    assert moved.run("%%ddp\nprint(rank)").by_rank == {0: ["0"], 1: ["1"]}


def test_a_comparison_without_a_working_folder_is_refused_in_one_sentence(kernel: Kernel):
    folder = kernel.folder / "removed"
    line = "%ddp_compare ddp --task digits --epochs 0.1 --no-baseline"
    kernel.run(f"import os\nbefore = os.getcwd()\nos.mkdir({str(folder)!r})\n%cd {folder}")
    assert kernel.run("%%ddp\n1").passed
    folder.rmdir()
    assert "no longer exists. Change to another folder with %cd" in kernel.run(line).refusal
    assert kernel.run("%cd {before}").passed
    assert kernel.run(line).passed
