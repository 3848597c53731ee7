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


OWN = """
class Own:
    def setup(self, replica):
        self.replica, self.optimizer = replica, replica.optimizer(replica.parameters)
    def step(self, batch): return self.replica.compute_gradients(batch)
    def finish(self): pass
"""


@pytest.fixture(scope="module")
def compared(kernel_of_module: Kernel) -> Cell:
    cell = kernel_of_module.run(CELL, timeout=120)
    assert not cell.error, cell.error_text
    kernel_of_module.run("import ddpnb\nout = ddpnb.load('out')")
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
    assert whole["format"] == 2
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
    assert "\n    torchrun --standalone --nproc-per-node 2 train.py\n" in shown
    assert_same(
        kernel, "out", under_torchrun(kernel, "train.py"), "final training loss", "final_loss"
    )


def test_a_script_that_takes_the_place_of_another_says_so(compared: Cell, kernel: Kernel):
    assert "replaced" not in kernel.run("%ddp_export out twice.py").stdout
    assert (
        "The twice.py that was there is replaced." in kernel.run("%ddp_export out twice.py").stdout
    )


def under_torchrun(kernel: Kernel, name: str) -> str:
    """What a script in the notebook's folder prints."""
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*launcher, "--nproc-per-node", "2", name],
        cwd=kernel.folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def assert_same(kernel: Kernel, name: str, printed: str, what: str, attribute: str) -> None:
    (reached,) = re.findall(rf"^{what} ([\d.]+)$", printed, re.MULTILINE)
    run = f"next(r for r in ddpnb.load({name!r}).comparison.runs if r.name.startswith('ddp'))"
    wanted = float(kernel.value(f"{run}.reports[0].{attribute}"))
    assert math.isclose(float(reached), wanted, rel_tol=1e-4), (what, reached, wanted)


GENERAL = """%%ddp_compare ddp:find_unused_parameters=on --epochs 2.5 --batch-size 14 --name general
import torch
from torch import nn
from torch.utils.data import DataLoader

class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.EmbeddingBag(20, 8), nn.Linear(8, 2)
        self.dropout, self.unused = nn.Dropout(0.5), nn.Linear(1, 1)
    def forward(self, words, starts):
        return self.last(self.dropout(self.words(words, starts)))

vocabulary = {}

def model():
    return Text()

def data(split):
    vocabulary.update({"a": 1})
    assert rank < world_size and str(device) == "cpu"
    length = torch.randint(1, 6, (90,)).tolist()
    return DataLoader([(list(range(n)), n % 2) for n in length], batch_size=3)

def collate_fn(items):
    texts, labels = zip(*items)
    starts = torch.tensor([0, *map(len, texts)]).cumsum(0)[:-1]
    return {"words": torch.tensor(sum(texts, [])), "starts": starts, "y": torch.tensor(labels)}

def training_step(model, batch):
    assert vocabulary
    scores = model(batch["words"], batch["starts"])
    return {"loss": nn.functional.cross_entropy(scores, batch["y"]), "mean": scores.mean()}

def validation_step(model, batch):
    scores = model(batch["words"], batch["starts"])
    return {"right": (scores.argmax(1) == batch["y"]).double().mean()}

def optimizer(model, num_steps):
    groups = [{"params": [p for n, p in model.named_parameters() if "bias" in n], "lr": 0.02},
              {"params": [p for n, p in model.named_parameters() if "bias" not in n]}]
    made = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return made, torch.optim.lr_scheduler.OneCycleLR(made, max_lr=0.5, total_steps=num_steps)
"""
ROWS = """%%ddp_compare ddp async --epochs 2 --batch-size 24 --name rows
import torch
from torch import nn
def model(): return nn.Linear(4, 2)
def data(split):
    x = torch.randn(101, 4)
    return {"x": (x[:, :2], x[:, 2:]), "y": (x.sum(1) > 0).long().numpy()}
def training_step(model, batch):
    return nn.functional.cross_entropy(model(torch.cat(batch["x"], 1)), batch["y"])
def optimizer(params):
    made = torch.optim.AdamW(params, lr=0.05)
    return made, torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
"""


@pytest.mark.parametrize("source", [GENERAL, ROWS], ids=["general", "rows"])
def test_a_training_of_ones_own_is_a_script_too(compared: Cell, kernel: Kernel, source: str):
    cell = kernel.run(source, timeout=120)
    assert not cell.error, cell.error_text
    name = source.partition("\n")[0].rpartition(" ")[2]
    exported = kernel.run(f"%ddp_export {name} {name}.py")
    assert not exported.error, exported.error_text
    printed = under_torchrun(kernel, f"{name}.py")
    assert_same(kernel, name, printed, "final training loss", "final_loss")
    assert_same(kernel, name, printed, "held-out loss", "held_out_loss")
    if "def validation_step" in source:
        assert_same(kernel, name, printed, "held-out right", "held_out_metrics['right']")


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
    assert "built trains the built-in task " in kernel.run("%ddp_export built built.py").error_text
    kernel.run("%%ddp\ntop_secret = 4")
    using = CELL.replace("randn(103, 4)", "randn(103, top_secret)").replace("out", "using", 1)
    assert not kernel.run(using.replace("ddp async", "ddp --no-baseline")).error
    refused = kernel.run("%ddp_export using using.py").error_text
    assert "The cell uses top_secret, which it does not define" in refused
    own = CELL.replace("ddp async", "Own").replace("--name out", "--no-baseline --name a-class")
    assert not kernel.run(own + OWN).error
    refused = kernel.run("%ddp_export a-class a-class.py").error_text
    assert "a-class trained with Own, a class of your own: compare ddp, too." in refused
