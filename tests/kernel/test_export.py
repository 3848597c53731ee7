"""What leaves the notebook is read by other tools and says the same."""

import csv
import json
import math
import os
import re
import subprocess
import sys

import pytest

from tests.kernel.client import Cell, Kernel

CELL = """%%ddp_compare ddp async --epochs 2.5 --batch-size 40 --lr 0.1 --seed 5 --name out
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def data(split):
    inputs = torch.randn(103, 4)
    return inputs, (inputs.sum(1) > 0).long()

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)
"""


@pytest.fixture(scope="module")
def compared(shared_kernel: Kernel) -> Cell:
    shared_kernel.run("%ddp_auto off\n%ddp_start -n 2 --device cpu")
    cell = shared_kernel.run(CELL, timeout=120)
    assert not cell.error, cell.error_text
    shared_kernel.run("import ddpnb\nout = ddpnb.load('out')")
    return cell


def test_csv_has_one_row_per_step_or_per_run(compared: Cell, kernel: Kernel):
    shown = kernel.run("%ddp_export out deep/out.csv\n%ddp_export out out.runs.csv").stdout
    with (kernel.folder / "deep" / "out.csv").open() as file:
        steps = list(csv.DictReader(file))
    with (kernel.folder / "out.runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert [run["strategy"] for run in runs] == ["single", "no-comm", "ddp", "async"]
    assert f"{len(steps):,} rows, one per step of each worker." in shown
    assert kernel.value("len(out.steps())") == str(len(steps))
    ddp = [row for row in steps if row["strategy"] == "ddp"]
    assert {row["rank"] for row in ddp} == {"0", "1"}
    assert all(float(row["loss"]) > 0 for row in ddp)


def test_json_holds_everything_and_no_nan(compared: Cell, kernel: Kernel):
    kernel.run(
        "%%ddp --name lone\nimport ddpnb\nddpnb.log(loss=float('nan'), lr=0.5)\n"
        "ddpnb.log(loss=0.25, samples=3)"
    )
    cell = kernel.run("%ddp_export lone lone.json\n%ddp_export out out.json")
    assert not cell.error, cell.error_text
    text = (kernel.folder / "lone.json").read_text()
    assert "NaN" not in text
    (run,) = json.loads(text)["runs"]
    assert sorted(map(str, run["steps"]["loss"])) == ["0.25", "0.25", "None", "None"]
    assert sorted(map(str, run["metrics"]["lr"])) == ["0.5", "0.5", "None", "None"]
    assert run["steps"]["staleness"] == [None] * 4
    whole = json.loads((kernel.folder / "out.json").read_text())
    assert whole["format"] == 1
    assert "def model()" in whole["comparison"]["source"]
    assert whole["comparison"]["environment"]["backend"] == "gloo"
    assert [run["name"] for run in whole["runs"]] == ["single", "no-comm", "ddp", "async"]
    ddp = whole["runs"][2]
    assert ddp["spec"]["seed"] == 5
    assert {len(column) for column in ddp["steps"].values()} == {len(ddp["steps"]["rank"])}
    assert ddp["reports"][0]["final_loss"] > 0
    assert all(value is not None for value in whole["runs"][3]["steps"]["staleness"])


def test_tensorboard_reads_it_and_the_kernel_imports_no_torch(compared: Cell, kernel: Kernel):
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed (pip install 'ddpnb[tensorboard]')",
    )
    cell = kernel.run("%ddp_export out logs/out")
    assert not cell.error, cell.error_text
    assert "tensorboard --logdir logs/out" in cell.stdout
    assert kernel.value("'torch' in __import__('sys').modules") == "False"
    read = accumulators.EventAccumulator(str(kernel.folder / "logs" / "out" / "ddp" / "1"))
    read.Reload()
    assert {"loss", "samples per second", "final loss"} <= set(read.Tags()["scalars"])
    points = read.Scalars("loss")
    steps = json.loads(
        kernel.value(
            "__import__('json').dumps(out.steps().query("
            "'strategy == \"ddp\"').num_samples.sum().item())"
        )
    )
    assert points[-1].step == steps
    assert [point.step for point in points] == sorted(point.step for point in points)
    again = kernel.run("%ddp_export out logs/out")
    assert "already holds TensorBoard events" in again.error_text


def test_without_tensorboard_it_says_what_to_install(compared: Cell, kernel: Kernel):
    kernel.run(
        "from ddpnb.reports import data as writer\n"
        "find, writer.find_spec = writer.find_spec, lambda name: None"
    )
    cell = kernel.run("%ddp_export out logs/none")
    kernel.run("writer.find_spec = find")
    assert "pip install 'ddpnb[tensorboard]'" in cell.error_text


def test_the_script_trains_under_torchrun_to_the_same_loss(compared: Cell, kernel: Kernel):
    shown = kernel.run("%ddp_export out train.py").stdout
    assert "torchrun --nproc-per-node 2 train.py" in shown
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "train.py",
        ],
        cwd=kernel.folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr
    (reached,) = re.findall(r"final training loss ([\d.]+)", ended.stdout)
    wanted = float(kernel.value("out.to_frame().query('strategy == \"ddp\"').final_loss.item()"))
    assert math.isclose(float(reached), wanted, rel_tol=1e-4), (reached, wanted)


def test_the_report_is_one_page_with_everything(compared: Cell, kernel: Kernel):
    assert kernel.value("ddpnb.report('out', path='race.html')") == "race.html"
    html = (kernel.folder / "race.html").read_text()
    for piece in ("data:image/png;base64,", "<table", "def model()", "gloo", "@media print"):
        assert piece in html
    assert not re.search(r'(?:src|href)="(?!data:)', html)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("out out.xlsx", "Choose one of .csv, .json, .html, .png, .py, .runs.csv"),
        ("out", "%ddp_export? explains it."),
        ("nobody x.csv", "There is no run 'nobody'"),
    ],
)
def test_a_wrong_line_is_one_sentence(compared: Cell, kernel: Kernel, line: str, expected: str):
    cell = kernel.run(f"%ddp_export {line}")
    assert cell.error == "UserError"
    assert expected in cell.error_text


def test_what_cannot_be_a_script_is_refused(compared: Cell, kernel: Kernel):
    kernel.run("%ddp_compare ddp --task digits --epochs 0.3 --no-baseline --name built")
    assert "built has no such cell" in kernel.run("%ddp_export built built.py").error_text
