"""accelerate and torchmetrics work on ranks as on processes of ``accelerate launch``."""

from tests.compat.conftest import Run, require
from tests.kernel.client import Kernel, both

require("accelerate", "torchmetrics")

LOOP = """%%ddp
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(3)
accelerator = Accelerator()
inputs = torch.randn(64, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
weights = accelerator.gather(accelerator.unwrap_model(model).weight)
print(type(model).__name__, len(loader), losses[-1] < losses[0] / 10)
print(torch.equal(weights[0], weights[1]))
"""
LAUNCHED = """%%ddp
from accelerate import notebook_launcher
from accelerate.state import AcceleratorState
AcceleratorState._reset_state(reset_partial_state=True)
notebook_launcher(print, ('started',), num_processes=2)
"""


def test_a_loop_of_accelerate_trains_also_after_a_failed_rank(run: Run, kernel: Kernel):
    trained = both("DistributedDataParallel 4 True", "True")
    assert run(LOOP).by_rank == trained
    failed = kernel.run(
        "%%ddp\nif rank == 1: raise ValueError('boom')\naccelerator.wait_for_everyone()"
    )
    assert "rank 1 failed: ValueError: boom" in failed.error_text
    assert run(LOOP).by_rank == trained
    run("%%ddp\naccelerator.end_training()")
    cell = run("%%ddp\ntotal = torch.ones(1)\ntorch.distributed.all_reduce(total)\ntotal.item()")
    assert cell.by_rank == both("2.0")
    cell = kernel.run(LAUNCHED)
    assert "call the training function directly, on all ranks." in cell.error_text
    assert not [line for line in cell.lines if line.endswith("] started")]


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
MEASURED = """%%ddp_compare ddp async --no-baseline --epochs 1 --batch-size 20
import torch
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryF1Score, BinaryAUROC
from torchmetrics.functional import r2_score

def model():
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))

def data(split):
    x = torch.randn(100, 4)
    return x, (x.sum(1) > 0).long()

def loss(outputs, targets):
    return nn.functional.binary_cross_entropy_with_logits(outputs, targets.float())

"""


def test_metrics_of_torchmetrics_are_computed_over_all_ranks_and_compared(run: Run, compare: Run):
    assert run(SYNCED).by_rank == both("0.5 0.75")
    shown = compare(f"{MEASURED}metric = MetricCollection([BinaryF1Score(), BinaryAUROC()])").text
    assert "held-out BinaryF1Score" in shown
    assert "held-out BinaryAUROC" in shown
    shown = compare(f"{MEASURED}metric = r2_score").text
    assert "held-out r2_score" in shown
    assert "accuracy" not in shown
