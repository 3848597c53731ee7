"""Benchmarks can be imported, tables match stored figures, and ``make gpu`` tries every step."""

import importlib
import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import benchmarks
from benchmarks import gpu_day, table, versus
from benchmarks.gpu_day import Step
from tests.mutants import MUTANTS, ROOT

NAMES = sorted(path.stem for path in Path(benchmarks.__file__).parent.glob("[a-z]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_benchmark_calls_is_there(name: str):
    importlib.import_module(f"benchmarks.{name}")


def test_the_table_is_what_the_newest_figures_make():
    text = table.README.read_text()
    assert table.with_table(text) == text


@pytest.mark.parametrize(
    "readme", [versus.README, versus.OVERVIEW], ids=lambda path: path.parent.name
)
def test_the_tables_beside_other_tools_are_those_of_the_stored_rows(readme: Path):
    assert versus.with_table(readme) == readme.read_text()


class Exec:
    """A notebook that runs cells of one rank in this process."""

    remark = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def cell(self, source: str, limit: float) -> None:
        exec(source, {})

    def said(self) -> list[str]:
        return [path.read_text() for path in self.folder.iterdir()]

    def close(self) -> None: ...


@pytest.mark.parametrize("took", [0.1, 29.9, 30.1, 1000.0])
def test_a_time_above_the_one_limit_is_not_shown(tmp_path, monkeypatch, took):
    monkeypatch.setattr(versus, "wait_for_quiet", lambda: None)
    row = versus.Row(name="", work=lambda _: took, rounds=1, is_open=True)
    found = row.measure(dict.fromkeys("ab"), 1, {each: Exec(tmp_path) for each in "ab"})
    shown = f"{took:g}" if took < 30 else "cannot: not within 30 s"
    assert list(map(str, found.values())) == [shown, shown]


def test_no_stored_time_is_above_the_limit():
    for name, stored in json.loads(versus.RESULT.read_text()).items():
        row = versus.ROWS.get(name) or versus.OURS[name]
        values = [value for each in stored["peers"].values() for value in each["values"]]
        assert row.unit != "s" or max(values) <= row.limit, name


@pytest.mark.parametrize("num", [1, 2, 3])
def test_ranks_train_with_one_thread_and_get_their_number_of_threads_back(
    tmp_path, monkeypatch, num
):
    seen = "class dist:\n    get_rank = lambda: 0\nimport torch\nrate = torch.get_num_threads()\n"
    monkeypatch.setattr(versus, "LOOP", seen)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num)
        assert versus._rate(Exec(tmp_path)) == 1
        assert torch.get_num_threads() == num
        assert versus._default_rate(ranks := Exec(tmp_path)) == num
        assert ranks.remark.startswith(f"{num} thread")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("ours", "theirs"), [(1.0, 4.0), (1.7, 4.0), (5.0, 4.0)])
def test_the_table_says_if_a_promise_is_missed_and_when_it_was_measured(ours, theirs):
    peers = {"ddpnb": {"values": [ours]}, "torchrun": {"values": [theirs]}}
    stored = {"date": "2026-01-02", "machine": {"cpu": "A"}, "peers": peers}
    row = versus.table(["start"], {"start": stored}).splitlines()[2]
    assert ("**missed**" in row) == (ours / theirs > 0.4)
    assert row.endswith("| 2026-01-02, A |")


HANGS = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
    "print(child.pid, flush=True)\ntime.sleep(100)"
)


def step(name: str, source: str, limit: float = 30) -> Step:
    return Step(name, [sys.executable, "-c", source], limit)


@pytest.fixture
def report(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_day, "REPORT", tmp_path / "gpu" / "report.json")
    return gpu_day.REPORT


def test_every_step_is_tried_whatever_the_others_do_and_is_in_the_report_at_once(report):
    todo = [
        step("fails", "raise SystemExit(3)"),
        step("hangs", HANGS, limit=3),
        step("crashes", "import os; os.kill(os.getpid(), 11)"),
        step("passes", f"print(len(__import__('json').load(open('{report}'))['steps']))"),
        step("skips", "print('SKIPPED [1] test_x.py:3: needs two CUDA GPUs, there are 1')"),
    ]
    outcomes = gpu_day.main(todo, 1, {"gpus": "one"})
    assert [each.state for each in outcomes] == [
        "failed: exit 3",
        "failed: not within 3 s",
        "failed: died of SIGSEGV",
        "passed",
        "skipped: needs two CUDA GPUs, there are 1",
    ]
    assert outcomes[3].output == "3\n"
    child = int(outcomes[1].output)
    while psutil.pid_exists(child) and psutil.Process(child).status() != "zombie":
        time.sleep(0.01)
    written = json.loads(report.read_text())
    assert [each["state"] for each in written["steps"]] == [each.state for each in outcomes]


def test_steps_end_when_the_minutes_are_over(report, monkeypatch):
    monkeypatch.setattr(gpu_day, "LEAST_SECONDS", 1)
    todo = [step("long", "import time; time.sleep(100)", limit=60), step("late", "")]
    outcomes = gpu_day.main(todo, 1, {}, minutes=2 / 60)
    assert [each.state for each in outcomes] == ["failed: not within 2 s", "skipped: no time left"]


MISSING = ("playwright", "grimp", "nbformat", "xdist", "pytest_timeout", "hypothesis", "lightning")
"""Packages that a machine with a GPU may lack."""


def test_without_a_gpu_and_without_most_packages_every_step_says_so(report, tmp_path, monkeypatch):
    for name in MISSING:
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    outcomes = gpu_day.main(gpu_day.steps(), 0, {})
    assert {each.state for each in outcomes} == {"skipped: no GPU"}
    tests = [each.name for each in outcomes if each.name.startswith("test_")]
    assert len(tests) == len(outcomes) - 2 > 12


def test_each_mutant_fits_its_file():
    for _, file, before, *_ in (each.strip().split("\n") for each in MUTANTS.split("\n\n")):
        assert Path(ROOT, "ddpnb", file).read_text().count(before.removeprefix("- ")) == 1, file
