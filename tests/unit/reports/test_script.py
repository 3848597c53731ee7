"""An exported script contains only code that its run uses, and some cells cannot be exported."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.reports.export.script import script, write_script
from ddpnb.results.comparison import Comparison
from tests.programs import development_package

PLAIN = """import torch
from torch import nn
def model():
    return nn.Linear(4, 2)
def data(split):
    x = torch.randn(103, 4)
    y = (x.sum(1) > 0).long()
    return x, y
"""
GENERAL = """# Which split?
import numpy as np
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
import torch

NUM = 20  # samples


class Net(nn.Module):
    def forward(self, x):
        return x.to(device)


def model():
    return Net()


def data(split):
    return DataLoader(TensorDataset(torch.zeros(NUM, 4)))


def training_step(model, batch):
    return model(batch).sum()


def optimizer(params, num_steps):
    return torch.optim.AdamW(params)
"""


def comparison_of(source: str, *strategies: str, **options) -> Comparison:
    task = options.pop("task", "cell")
    spec = RunSpec(run_id="r", strategy="ddp", task=task, source=source, **options)
    specs = [replace(spec, strategy=strategy) for strategy in strategies or ["ddp"]]
    return Comparison(comparison_id="c", name="race", specs=tuple(specs))


def text_of(source: str, *strategies: str, **options) -> str:
    return script(comparison_of(source, *strategies, **options), "train.py")


def defined(text: str) -> set[str]:
    kinds = ast.FunctionDef | ast.ClassDef
    return {node.name for node in ast.parse(text).body if isinstance(node, kinds)}


def values(text: str) -> dict[str, object]:
    """Return the constants at the top of a script."""
    found: dict[str, object] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and re.match("[A-Z_]+[, ]", ast.unparse(node)):
            exec(ast.unparse(node), {"device": None}, found)
    return found


def test_a_cell_of_eight_lines_gives_a_script_of_a_hundred():
    text = text_of(PLAIN)
    assert len(PLAIN.splitlines()) == 8
    assert len(text.splitlines()) <= 101
    own = {"save_checkpoint", "load_checkpoint", "join_group", "main"}
    assert defined(text) == {"model", "data", *own}


@pytest.mark.parametrize(
    ("source", "options"),
    [(PLAIN, {}), (GENERAL, {}), (PLAIN, {"accumulate": 2, "clip": 0.5}), ("", {"task": "digits"})],
)
def test_it_is_formatted_imports_once_and_needs_all_that_it_has(source: str, options, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(text_of(source, **options))
    development_package("ruff")
    ruff = [sys.executable, "-m", "ruff"]
    for words in (
        ["check", "--isolated", "--select=E4,E7,E9,F,I"],
        ["format", "--isolated", "--check"],
    ):
        ended = subprocess.run([*ruff, *words, file], capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout
    tree = ast.parse(file.read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert defined(file.read_text()) <= used
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert tree.body[1 : 1 + len(imports)] == imports


def test_a_script_has_what_its_run_uses():
    text = text_of(GENERAL, "ddp:find_unused_parameters=on", num_data_workers=2)
    assert {"step_loss", "own_optimizer", "update", "held_out_loss", "Net"} <= defined(text)
    assert not {"pair_loss", "sgd", "update_in_parts", "own_metric", "main"} & defined(text)
    assert values(text)["DDP_OPTIONS"] == {"find_unused_parameters": True}
    assert values(text)["DATA_WORKERS"] == 2
    assert "# Which split?\n\nNUM = 20  # samples\n" in text
    assert text.count("import torch\n") == text.count("import numpy as np\n") == 1
    assert "device = torch.device" in text
    assert "world_size = int" not in text
    seeded = text_of("from sklearn.model_selection import train_test_split\n" + PLAIN)
    assert {"seed_everything", "main"} <= defined(seeded), "libraries may draw random numbers"
    drawn = PLAIN.replace("torch.randn", "numpy.random.randn")
    assert "run" in defined(text_of("import numpy\n" + drawn))


def test_the_settings_are_the_runs():
    options = {"num_epochs": 2.5, "batch_size": 41, "learning_rate": 0.2, "momentum": 0.5}
    text = text_of(PLAIN, "async", **options, seed=3, slow=("1:2x",))
    assert values(text) == {
        **{"EPOCHS": 2.5, "BATCH_SIZE": 40, "SEED": 3, "CHECKPOINT": "train.pt"},
        **{"LEARNING_RATE": 0.2, "MOMENTUM": 0.5},
    }
    about = ast.get_docstring(ast.parse(text))
    for said in ("40 samples", "--slow", "race did not train ddp"):
        assert said in about


def test_a_built_in_task_is_written_with_its_options_and_files(tmp_path: Path, monkeypatch):
    text = text_of("", task="synthetic:samples=640,parameters=50000")
    assert values(text) | {"SAMPLES": 640, "PARAMETERS": 50_000} == values(text)
    assert {"model", "data", "make_images", "main"} <= defined(text)
    assert "build" not in defined(text)
    monkeypatch.chdir(tmp_path)
    write_script(comparison_of("", task="digits"), tmp_path / "train.py")
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "digits.npz"}
    Path("train.pt").touch()
    again = write_script(comparison_of(PLAIN), tmp_path / "train.py")
    assert "train.py was replaced" in again
    assert "resumes from train.pt" in again


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("from numpy import random as os", "The cell defines os"),
        ("from torch.nn import *", "The cell uses 'from torch.nn import \\*'"),
        ("print(top_secret)", "The cell uses top_secret"),
        ("!ls", "Line 9 of the cell is not plain Python"),
        ("from ddpnb.rank.variables import notebook_functions", "functions of the notebook"),
    ],
)
def test_a_cell_that_is_no_script_is_refused(more: str, expected: str):
    with pytest.raises(UserError, match=expected):
        text_of(PLAIN + more)


def test_what_is_not_one_model_or_a_class_of_ones_own_is_refused():
    with pytest.raises(UserError, match="race has no models"):
        script(Comparison(comparison_id="c", name="race"), "train.py")
    with pytest.raises(UserError, match="a class of your own"):
        text_of(PLAIN, "Own")
    specs = comparison_of(PLAIN).specs + comparison_of(GENERAL).specs
    with pytest.raises(UserError, match="race has 2 models"):
        script(Comparison(comparison_id="c", name="race", specs=specs), "train.py")
