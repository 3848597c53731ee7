"""What leaves the notebook is read by other tools and says the same."""

import csv
import re

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
"""


@pytest.fixture(scope="module")
def compared(kernel_of_module: Kernel) -> Cell:
    cell = kernel_of_module.run(CELL, timeout=120)
    assert not cell.error, cell.error_text
    kernel_of_module.run("import ddpnb\nout = ddpnb.load('out')")
    return cell


def test_files_have_one_row_per_step_or_per_run_and_a_page_has_all(compared: Cell, kernel: Kernel):
    shown = kernel.run("%ddp_export out deep/out.csv\n%ddp_export out out.runs.csv").stdout
    with (kernel.folder / "deep" / "out.csv").open() as file:
        steps = list(csv.DictReader(file))
    with (kernel.folder / "out.runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert [run["strategy"] for run in runs] == ["single", "no-comm", "ddp", "async"]
    assert "one row per step of each worker" in shown
    assert kernel.value("len(out.steps())") == str(len(steps))
    assert {row["rank"] for row in steps if row["strategy"] == "ddp"} == {"0", "1"}
    kernel.run("ddpnb.export('out', path='race.html')")
    html = (kernel.folder / "race.html").read_text()
    for piece in ("data:image/png;base64,", "<table", "def model()", "gloo", "@media print"):
        assert piece in html
    assert not re.search(r'(?:src|href)="(?!data:)', html)
    assert "torchrun" in kernel.run("%ddp_export out train.py").stdout
    refused = kernel.run("%ddp_export out out.json").refusal
    assert "choose one of .csv, .html, .png, .py, .runs.csv" in refused
