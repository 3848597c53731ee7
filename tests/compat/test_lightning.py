"""Lightning's Fabric and Trainer work on ranks as on processes of torchrun."""

import pytest

from tests.compat.conftest import Run, require
from tests.kernel.client import Kernel, both

require("lightning")

FABRIC = """%%ddp
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(strategy="ddp", devices=world_size)
fabric.launch()
fabric.seed_everything(5, verbose=False)
model = nn.Linear(4, 1)
inputs = torch.randn(64, 4)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = fabric.setup_dataloaders(
    DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
)
for _ in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
last = fabric.all_reduce(loss.detach())
weights = fabric.all_gather(model.module.weight.detach())
print(fabric.world_size, fabric.global_rank == rank, len(loader), last.item() < 0.1)
print(torch.equal(weights[0], weights[1]))
"""


def test_fabric_trains_on_the_ranks(run: Run):
    for _ in range(2):
        assert run(FABRIC).by_rank == both("2 True 4 True", "True")


TRAINER = """%%ddp
import lightning, os, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.line(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("held_out", nn.functional.mse_loss(self.line(batch[0]), batch[1]), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

lightning.seed_everything(7, verbose=False)
inputs = torch.randn(64, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
trainer = lightning.Trainer(
    strategy="ddp", devices=world_size, max_epochs=3, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
line = Line()
trainer.fit(line, loader, loader)
"""


def test_trainer_fits_goes_on_and_costs_no_rank_where_it_fails(run: Run, kernel: Kernel):
    before = set(kernel.folder.rglob("*"))
    run(TRAINER)
    cell = run(
        "%%ddp\nimport torch.distributed as dist\nnow = [None, None]\n"
        "dist.all_gather_object(now, line.line.weight.tolist())\n"
        "print(trainer.world_size, trainer.num_training_batches, trainer.global_step, "
        "now[0] == now[1], trainer.callback_metrics['held_out'].item() < 1)"
    )
    assert cell.by_rank == both("2 4 12 True True")
    assert set(kernel.folder.rglob("*")) == before
    cell = run(
        "%%ddp\ntrainer.fit_loop.max_epochs = 5\ntrainer.fit(line, loader)\n"
        "print(trainer.global_step)"
    )
    assert cell.by_rank == both("20")
    failing = "loss = 1 / (rank - batch_idx - 1) and "
    cell = kernel.run(TRAINER.replace("loss = ", failing, 1))
    assert "rank 1 failed: ZeroDivisionError" in cell.error_text
    assert "in Line.training_step" in cell.error_text
    run(TRAINER)


BUSY = "%%ddp\nprint('begun', flush=True)\nwhile True: pass"


def test_an_interrupted_fit_leaves_ranks_that_can_be_interrupted(run: Run, kernel: Kernel):
    """After an interrupt Lightning makes the process ignore SIGINT."""
    run("%%ddp\nkept = rank")
    endless = TRAINER.replace("max_epochs=3", "max_epochs=-1")
    for source in (endless.replace("loss = ", "print('begun', flush=True); loss = ", 1), BUSY):
        cell = kernel.interrupted(source, "begun", timeout=60)
        assert "All variables are kept" in cell.error_text
    assert run("%%ddp\nkept").by_rank == {0: ["0"], 1: ["1"]}


@pytest.mark.parametrize("name", ["ddp_notebook", "ddp_fork"])
def test_its_notebook_strategies_are_refused_in_a_sentence(kernel: Kernel, name: str):
    cell = kernel.run(
        f"%%ddp\nfrom lightning.fabric import Fabric\n"
        f"Fabric(accelerator='cpu', strategy={name!r}, devices=2).launch(print)"
    )
    assert 'use strategy="ddp", devices=2.' in cell.error_text
