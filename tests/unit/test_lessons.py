"""The students' notebooks are the output of ``make student`` from the solutions."""

import re
import shutil
from pathlib import Path

import pytest
from nbformat import NotebookNode

from ddpnb.course.exercises import HINTS
from ddpnb.course.in_notebook import CHECKS_IN_NOTEBOOK
from ddpnb.results.store import FILE_NAME, Store
from tests.lessons import NOTEBOOKS, SOLUTIONS, code_of, may_fail, read


def is_gap(cell: NotebookNode) -> bool:
    return bool(cell.metadata.get("nbgrader", {}).get("solution"))


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_students_have_the_same_lesson_without_solutions_and_outputs(path: Path):
    ours, theirs = read(path).cells, read(NOTEBOOKS / path.name).cells
    assert [cell.metadata.get("tags") for cell in ours] == [
        cell.metadata.get("tags") for cell in theirs
    ]
    assert [cell.source for cell in ours if not is_gap(cell)] == [
        cell.source for cell in theirs if not is_gap(cell)
    ]
    gaps = [cell.source for cell in theirs if is_gap(cell)]
    assert len(gaps) >= 2
    assert all("..." in gap and "SOLUTION" not in gap for gap in gaps)
    assert all("### BEGIN SOLUTION" in cell.source for cell in ours if is_gap(cell))
    assert not any(cell.get("outputs") for cell in theirs)


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_no_cell_needs_a_solution_so_an_unsolved_lesson_runs_to_its_end(path: Path):
    solutions = "\n".join(cell.source for cell in code_of(path) if is_gap(cell))
    others = "\n".join(
        cell.source for cell in code_of(path) if not (is_gap(cell) or may_fail(cell))
    )
    defined = re.findall(r"^(?:def |class )?(\w+)(?:\(.*| = .*)$", solutions, re.MULTILINE)
    assert defined
    assert not {*defined} & {*re.findall(r"(?<![\w.])\w+", others)}  # not .steps() of a result


def test_every_exercise_has_its_check_its_hint_and_its_place():
    magic = "%ddp_exercise "
    asked = [
        cell.source.removeprefix(magic)
        for path in SOLUTIONS
        for cell in code_of(path)
        if cell.source.startswith(magic)
    ]
    assert sorted(asked) == sorted(HINTS)
    assert set(CHECKS_IN_NOTEBOOK) < set(HINTS)


def test_every_named_comparison_of_the_lessons_is_among_the_stored_runs(tmp_path: Path):
    shutil.copy(NOTEBOOKS.parent / "data" / "lessons.sqlite3", tmp_path / FILE_NAME)
    lines = [cell.source for path in SOLUTIONS for cell in code_of(path)]
    named = {name for line in lines for name in re.findall(r"--name ([\w-]+)", line)}
    store = Store(tmp_path)
    assert {run.comparison for run in store.list()} >= named
    race = store.load("race")
    assert all(len(run.events) for run in race.runs)
    store.close()
