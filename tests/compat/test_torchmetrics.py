"""Metrics of torchmetrics: over the ranks, and as what a comparison measures."""

from tests.compat.conftest import Run, require
from tests.kernel.client import both

require("torchmetrics")

SYNCED = """%%ddp
import torch
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics import MeanMetric

accuracy = MulticlassAccuracy(num_classes=3, average="micro")
mean = MeanMetric()
found = torch.tensor([0, 1, 2, 0])
accuracy.update(found, found if rank == 0 else (found + 1) % 3)
mean.update(float(rank), weight=1 + 2 * rank)
print(accuracy.compute().item(), mean.compute().item())
"""


def test_a_metric_is_computed_over_all_ranks(run: Run):
    assert run(SYNCED).by_rank == both("0.5 0.75")


MODEL = """%%ddp_compare ddp async --epochs 2 --batch-size 20
import torch
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryF1Score, BinaryAUROC
from torchmetrics.functional import r2_score

def model():
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))

def data(split):
    x = torch.randn(100, 4)
    return x, TARGETS

loss = LOSS
metric = METRIC
"""


def compared(targets: str, loss: str, metric: str) -> str:
    return MODEL.replace("TARGETS", targets).replace("LOSS", loss).replace("METRIC", metric)


LABELS = "(x.sum(1) > 0).long()"
BCE = "lambda outputs, targets: nn.BCEWithLogitsLoss()(outputs, targets.float())"


def test_a_metric_of_torchmetrics_is_a_cells_metric(compare: Run):
    assert "held-out BinaryF1Score" in compare(compared(LABELS, BCE, "BinaryF1Score()")).text
    both_scores = "MetricCollection([BinaryF1Score(), BinaryAUROC()])"
    cell = compare(compared(LABELS, BCE, both_scores))
    assert "held-out BinaryF1Score" in cell.text
    assert "held-out BinaryAUROC" in cell.text


def test_a_function_of_it_is_one_too(compare: Run):
    cell = compare(compared("x.sum(1)", "nn.MSELoss()", "r2_score"))
    assert "held-out r2_score" in cell.text
    assert "accuracy" not in cell.text
