"""The cell of a comparison as a script for torchrun (kernel).

The script needs only torch and trains as ``ddp`` did: the same initial weights, the same
samples in the same order, the same steps.
"""

import ast
from string import Template

from ddpnb.history.comparison import Comparison, body_of, chosen
from ddpnb.protocol.catalogue import CELL_TASK
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec

CARRIED = ("num_epochs", "batch_size", "batch_per_worker", "learning_rate", "momentum", "seed")
"""Settings that the script has; its docstring names the others that were used."""

SCRIPT = Template('''\
"""Train the model of the comparison $name with DistributedDataParallel.

    torchrun --nproc-per-node $num_ranks $file
$missing"""

import os
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

NUM_EPOCHS, BATCH_SIZE, SEED = $num_epochs, $batch_size, $seed
LEARNING_RATE, MOMENTUM = $learning_rate, $momentum
MAX_JUDGED = 10_000  # samples of the training split in the final loss


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


seed_everything(SEED)

# ---- the notebook's cell -----------------------------------------------------------------

$cell

# ---- training ----------------------------------------------------------------------------


class Batches:
    """This rank's part of each global batch, as lists of sample numbers."""

    def __init__(self, num_samples):
        self.num_samples = num_samples
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        num_full, rest = divmod(num_samples, BATCH_SIZE)
        self.steps_per_epoch = num_full + (rest >= self.world_size)
        self.num_steps = max(1, round(NUM_EPOCHS * self.steps_per_epoch))

    def __len__(self):
        return self.num_steps

    def __iter__(self):
        for step in range(self.num_steps):
            epoch, batch = divmod(step, self.steps_per_epoch)
            if batch == 0:
                generator = torch.Generator().manual_seed((SEED * 1_000_003 + epoch) % 2**63)
                order = torch.randperm(self.num_samples, generator=generator)
            whole = order[batch * BATCH_SIZE : (batch + 1) * BATCH_SIZE]
            yield whole.tensor_split(self.world_size)[self.rank].tolist()

    def size(self, step):
        start = step % self.steps_per_epoch * BATCH_SIZE
        return min(BATCH_SIZE, self.num_samples - start)


def as_dataset(split):
    return TensorDataset(*map(torch.as_tensor, split)) if isinstance(split, tuple) else split


def main():
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    train = as_dataset(data("train"))
    data("test")  # may draw random numbers, as it does in the notebook
    compute_loss = globals().get("loss") or nn.functional.cross_entropy
    seed_everything(SEED)
    plain = model().to(device)
    seed_everything(SEED + 1 + dist.get_rank())  # dropout differs between ranks
    wrapped = DistributedDataParallel(plain, device_ids=[device] if on_gpu else None)
    parameters = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    if globals().get("optimizer"):
        optimize = optimizer(parameters)
    else:
        optimize = torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)

    batches = Batches(len(train))
    for step, (inputs, targets) in enumerate(DataLoader(train, batch_sampler=batches)):
        inputs, targets = inputs.to(device), targets.to(device)
        optimize.zero_grad()
        error = compute_loss(wrapped(inputs), targets)
        # DDP divides by the number of ranks; the weight makes that a mean over samples.
        (error * (dist.get_world_size() * len(inputs) / batches.size(step))).backward()
        optimize.step()
        if dist.get_rank() == 0 and step % max(1, len(batches) // 10) == 0:
            print(f"step {step + 1} of {len(batches)}: loss {error.item():.4f}", flush=True)

    if dist.get_rank() == 0:
        print(f"final training loss {judge(plain, compute_loss, train, device):.6f}")
    dist.destroy_process_group()


@torch.no_grad()
def judge(plain, compute_loss, train, device):
    """Return the mean loss over the training split, in evaluation mode."""
    plain.eval()
    chosen = torch.arange(min(len(train), MAX_JUDGED)) * len(train) // min(len(train), MAX_JUDGED)
    total = 0.0
    parts = [part.tolist() for part in chosen.split(512)]
    for inputs, targets in DataLoader(train, batch_sampler=parts):
        total += compute_loss(plain(inputs.to(device)), targets.to(device)).item() * len(inputs)
    return total / len(chosen)


if __name__ == "__main__":
    main()
    # With gloo, torch sometimes aborts a process at its normal end ("terminate called without
    # an active exception"), and torchrun then reports a failure.
    sys.stdout.flush()
    os._exit(0)
''')


def script(comparison: Comparison, file: str) -> str:
    """Return the text of the script; ``file`` is its name.

    Raises:
        UserError: the comparison has no cell, or several, or one with magics or a training_step.
    """
    specs = [run.spec for run in comparison.runs if run.spec] or list(comparison.specs)
    sources = dict.fromkeys(spec.source for spec in specs if spec.task == CELL_TASK)
    if len(sources) != 1:
        raise UserError(
            "A script is made of the cell of one %%ddp_compare: "
            f"{comparison.name} has {len(sources) or 'no'} such cell{'s' * (len(sources) > 1)}."
        )
    spec = next(spec for spec in specs if spec.task == CELL_TASK)
    cell = body_of(spec.source).strip()
    try:
        _refuse_general(ast.parse(cell))
    except SyntaxError as error:
        raise UserError(
            f"Line {error.lineno} of the cell is not plain Python: only a notebook can run it."
        ) from error
    return SCRIPT.substitute(
        name=comparison.name,
        file=file,
        num_ranks=num_ranks_of(comparison),
        missing=_missing(spec),
        num_epochs=repr(spec.num_epochs),
        batch_size=repr(spec.global_batch(num_ranks_of(comparison))),
        learning_rate=repr(spec.learning_rate),
        momentum=repr(spec.momentum),
        seed=repr(spec.seed),
        cell=cell,
    )


def _refuse_general(cell: ast.Module) -> None:
    """Refuse a cell that defines more than the script calls."""
    for statement in cell.body:
        names = [getattr(statement, "name", "")]
        names += [
            each.id for each in getattr(statement, "targets", []) if isinstance(each, ast.Name)
        ]
        found = [name for name in names if name in ("training_step", "collate_fn")]
        if isinstance(statement, ast.FunctionDef) and statement.name == "optimizer":
            given = [argument.arg for argument in statement.args.args]
            if given[:1] == ["model"] or "num_steps" in given:
                found.append(f"optimizer({', '.join(given)})")
        if found:
            raise UserError(
                f"A script is made of model(), data(split), loss and optimizer(params) alone, and "
                f"the cell defines {found[0]}: its own training loop is for you to write."
            )


def num_ranks_of(comparison: Comparison) -> int:
    """Return how many ranks the script is for."""
    return max((run.header.num_workers for run in comparison.runs if run.header), default=2)


def _missing(spec: RunSpec) -> str:
    used = [option.flag for name, option in chosen(spec) if name not in (*CARRIED, "task")]
    return f"\nThe comparison also used {', '.join(used)}: this script does not.\n" if used else ""
