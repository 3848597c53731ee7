"""accelerate takes the ranks for processes of ``accelerate launch``."""

from tests.cluster.rig import ALL_REDUCE
from tests.compat.conftest import Run, require
from tests.kernel.client import Kernel, both

require("accelerate")

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
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
losses = []
for _ in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
"""


def test_a_loop_of_accelerate_trains_on_the_ranks(run: Run):
    run(LOOP)
    cell = run(
        "%%ddp\nprint(accelerator.num_processes, accelerator.process_index == rank, "
        "type(model).__name__, len(loader), losses[-1] < losses[0] / 10, "
        "accelerator.distributed_type.value)\n"
        "weights = accelerator.gather(accelerator.unwrap_model(model).weight)\n"
        "print(torch.equal(weights[0], weights[1]))"
    )
    assert cell.by_rank == both("2 True DistributedDataParallel 4 True MULTI_CPU", "True")


def test_after_a_failed_rank_it_prepares_anew(run: Run, kernel: Kernel):
    run(LOOP)
    failed = kernel.run(
        "%%ddp\nif rank == 1: raise ValueError('boom')\naccelerator.wait_for_everyone()"
    )
    assert "rank 1 failed: ValueError: boom" in failed.error_text
    run(LOOP)
    assert run("%%ddp\nlosses[-1] < losses[0] / 10").by_rank == both("True")


def test_its_end_leaves_the_group_for_later_cells(run: Run):
    run("%%ddp\nfrom accelerate import Accelerator\nAccelerator().end_training()")
    cell = run(f"%%ddp\n{ALL_REDUCE}\ntotal.item()")
    assert cell.by_rank == both("2.0")


def test_its_launcher_is_refused_in_a_sentence(kernel: Kernel):
    cell = kernel.run(
        "%%ddp\nfrom accelerate import notebook_launcher\n"
        "from accelerate.state import AcceleratorState\n"
        "AcceleratorState._reset_state(reset_partial_state=True)\n"
        "notebook_launcher(print, ('started',), num_processes=2)"
    )
    assert "call the training function itself, on all ranks." in cell.error_text
    assert not [line for line in cell.lines if line.endswith("] started")]
