"""The script for cells that need more than ``plain`` offers.  Runs on torchrun's ranks."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as loss
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler
from torch.utils.data import default_collate as collate_fn

from ddpnb.rank.script.names import seed_everything
from ddpnb.rank.script.placeholders import *
from ddpnb.rank.script.plain import join_group, load_checkpoint, save_checkpoint

Numbers = dict[str, float]
LossOf = Callable[[nn.Module, Any], Tensor]
Batches = Iterable[tuple[int, Any]]  # pairs: number of samples, batch


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to each leaf of nested dicts, tuples and lists."""
    if hasattr(tree, "to") or not isinstance(tree, Mapping | tuple | list):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: mapped(function, each) for key, each in tree.items()}
    parts = [mapped(function, each) for each in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def size_of(tree: Any) -> int:
    """Return the number of rows in the last tensor, usually the targets."""
    leaves: list[Any] = []
    mapped(leaves.append, tree)
    return next((len(leaf) for leaf in reversed(leaves) if getattr(leaf, "ndim", 0)), 1)


class Rows(Dataset[Any]):
    """A data set of tensors or arrays in dicts and tuples, with one row per sample."""

    def __init__(self, tree: Any) -> None:
        self.tree = mapped(torch.as_tensor, tree)

    def __len__(self) -> int:
        return size_of(self.tree)

    def __getitem__(self, number: int) -> Any:
        return mapped(itemgetter(number), self.tree)


def load(split: str) -> tuple[Any, Any]:
    """Return a split as a data set, and the function that collates its batches."""
    samples, collate = data(split), collate_fn
    if isinstance(samples, DataLoader):
        if collate is torch.utils.data.default_collate:
            collate = samples.collate_fn
        samples = samples.dataset
    is_rows = isinstance(samples, Mapping | tuple) or hasattr(samples, "dtype")
    return Rows(samples) if is_rows else samples, collate


def to_device(batch: Any, device: str) -> Any:
    """Move a batch to a device."""
    return mapped(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf, batch)


def pair_loss(net: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss over a batch of inputs and targets."""
    inputs, targets = batch
    return loss(net(inputs), targets)


def step_loss(net: nn.Module, batch: Any) -> Tensor:
    """Return the loss from the result of ``training_step``."""
    result = training_step(net, batch)
    error: Tensor = result["loss"] if isinstance(result, Mapping) else result
    return error


def sgd(net: nn.Module, num_steps: int) -> list[Any]:
    """Return an SGD optimizer."""
    return [torch.optim.SGD(net.parameters(), LEARNING_RATE, MOMENTUM)]


def own_optimizer(net: nn.Module, num_steps: int) -> list[Any]:
    """Return the cell's optimizer and scheduler.  The scheduler runs after each step."""
    names = list(inspect.signature(optimizer).parameters)
    parameters = [each for each in net.parameters() if each.requires_grad]
    counts = {"num_steps": num_steps} if "num_steps" in names else {}
    made = optimizer(net if names[:1] == ["model"] else parameters, **counts)
    if not isinstance(made, tuple):
        return [made]
    made[0].register_step_post_hook(lambda *_: made[1].step())
    return list(made)


def update(ddp: Any, optim: Any, batch: Any, loss_of: LossOf) -> Tensor:
    """Make one update, and return this rank's loss."""
    optim.zero_grad()
    error = loss_of(ddp, batch)
    error.backward()
    optim.step()
    return error.detach()


def update_in_parts(ddp: Any, optim: Any, batch: Any, loss_of: LossOf) -> Tensor:
    """Make one update from micro-batches, with clipped gradients, and return this rank's loss."""
    optim.zero_grad()
    num, total = size_of(batch), torch.zeros((), device=ddp.device)
    *others, last = torch.arange(num).tensor_split(min(ACCUMULATE, num))
    for part in (*others, last):
        rows = mapped(itemgetter(part), batch)
        with nullcontext() if part is last else ddp.no_sync():
            with torch.autocast(ddp.device.type, torch.bfloat16, enabled=AMP):
                error = loss_of(ddp, rows) * (len(part) / num)
            error.backward()
        total += error.detach()
    trained = [each for group in optim.param_groups for each in group["params"]]
    nn.utils.clip_grad_norm_(trained, CLIP)
    optim.step()
    return total


def held_out_loss(net: nn.Module, batches: Batches, loss_of: LossOf) -> Numbers:
    """Return the mean loss over all batches."""
    found = [(num, loss_of(net, batch).item()) for num, batch in batches]
    num_all = sum(num for num, _ in found)
    return {"loss": sum(num * value for num, value in found) / num_all}


@torch.no_grad()
def own_means(net: nn.Module, batches: Batches, loss_of: LossOf) -> Numbers:
    """Return the mean scores of ``validation_step`` over all batches."""
    totals: dict[str, float] = {}
    num_all = 0
    for num, batch in batches:
        num_all += num
        for name, value in named(validation_step, validation_step(net, batch)).items():
            totals[name] = totals.get(name, 0.0) + num * float(value)
    return {name: total / num_all for name, total in totals.items()}


@torch.no_grad()
def own_metric(net: nn.Module, batches: Batches, loss_of: LossOf) -> Numbers:
    """Return the scores of ``metric`` over the outputs of all batches."""
    pairs = [(net(inputs).cpu(), targets.cpu()) for _, (inputs, targets) in batches]
    return named(metric, metric(*map(torch.cat, zip(*pairs, strict=True))))


def named(function: Any, result: Any) -> Numbers:
    """Return scores with their names.  A single score gets the name of its function."""
    return dict(result) if isinstance(result, Mapping) else {function.__name__: result}


def run(
    loss_of: LossOf,
    make_optimizer: Callable[[nn.Module, int], list[Any]],
    update: Callable[[Any, Any, Any, LossOf], Tensor],
    *measures: Callable[[nn.Module, Batches, LossOf], Numbers],
) -> None:
    """Train and evaluate on one of torchrun's ranks."""
    device = join_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    (samples, collate), (held_out, collate_held_out) = load("train"), load("test")
    sampler: Any = DistributedSampler(samples, seed=SEED, drop_last=True)
    loader = DataLoader(
        samples,
        batch_sampler=BatchSampler(sampler, BATCH_SIZE // world_size, drop_last=False),
        collate_fn=collate,
        num_workers=DATA_WORKERS,
        generator=torch.Generator(),  # leaves the random numbers of dropout unchanged
    )
    num_steps = max(1, round(EPOCHS * len(loader)))
    seed_everything(SEED)
    net = model().to(device)
    seed_everything(SEED + 1 + rank)  # dropout differs between ranks
    ddp = nn.parallel.DistributedDataParallel(net, **DDP_OPTIONS)
    optim, *others = make_optimizer(net, num_steps)

    step = load_checkpoint(net, optim, *others)
    while step < num_steps:
        sampler.set_epoch(step // len(loader))
        left = islice(loader, step % len(loader), None)
        for _, batch in zip(range(step, num_steps), left):
            error = update(ddp, optim, to_device(batch, device), loss_of)
            step += 1
        dist.all_reduce(mean := error / world_size)
        if rank == 0:
            print(f"step {step} of {num_steps}: loss {mean:.8f}", flush=True)
        save_checkpoint(step, net, optim, *others)
    dist.destroy_process_group()
    net.eval()
    batches = DataLoader(held_out, 512, collate_fn=collate_held_out)
    for measure in measures:
        moved = (to_device(batch, device) for batch in batches)
        sized = ((size_of(batch), batch) for batch in moved)
        for name, value in measure(net, sized, loss_of).items():
            if rank == 0:
                print(f"held-out {name} {value:.8f}")
