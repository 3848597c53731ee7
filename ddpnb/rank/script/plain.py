"""A script that trains the model of a cell with DDP and SGD.  Runs on torchrun's ranks."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy as loss
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from ddpnb.rank.script.placeholders import *


def save_checkpoint(step: int, *parts: Any) -> None:
    """On rank 0, replace the checkpoint by a new complete file.  Every rank takes part."""
    state = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    dist.all_gather_object(random := [None] * dist.get_world_size(), state)
    saved = {"step": step, "parts": [each.state_dict() for each in parts]}
    if dist.get_rank() == 0:
        torch.save(saved | {"random": random}, f"{CHECKPOINT}.tmp")
        os.replace(f"{CHECKPOINT}.tmp", CHECKPOINT)


def load_checkpoint(*parts: Any) -> int:
    """Load the checkpoint into all parts.  Return the step, or 0 if there is no checkpoint."""
    if not os.path.exists(CHECKPOINT):
        return 0
    saved = torch.load(CHECKPOINT, map_location="cpu")
    for part, state in zip(parts, saved["parts"], strict=True):
        part.load_state_dict(state)
    on_cpu, *on_gpus = saved["random"][dist.get_rank()]
    torch.set_rng_state(on_cpu)
    torch.cuda.set_rng_state_all(on_gpus[: torch.cuda.device_count()])
    return int(saved["step"])


def join_group() -> str:
    """Join torchrun's group, and return this rank's device."""
    num_gpus = torch.cuda.device_count()
    shares = num_gpus < int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("gloo" if shares else None)  # NCCL: one rank per GPU
    if num_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % num_gpus)
    return "cuda" if num_gpus else "cpu"


def main() -> None:
    """Train and evaluate on one of torchrun's ranks."""
    device = join_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    samples = TensorDataset(*map(torch.as_tensor, data("train")))
    held_out = TensorDataset(*map(torch.as_tensor, data("test")))
    sampler: Any = DistributedSampler(samples, seed=SEED, drop_last=True)
    batches = BatchSampler(sampler, BATCH_SIZE // world_size, drop_last=False)
    num_steps = max(1, round(EPOCHS * len(batches)))
    torch.manual_seed(SEED)
    net = model().to(device)
    torch.manual_seed(SEED + 1 + rank)  # dropout differs between ranks
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE, MOMENTUM)
    step = load_checkpoint(net, optimizer)
    while step < num_steps:
        sampler.set_epoch(step // len(batches))
        for numbers in list(batches)[step % len(batches) :][: num_steps - step]:
            inputs, targets = (each.to(device) for each in samples[numbers])
            optimizer.zero_grad()
            error = loss(ddp(inputs), targets)
            error.backward()
            optimizer.step()
            step += 1
        dist.all_reduce(mean := error.detach() / world_size)
        if rank == 0:
            print(f"step {step} of {num_steps}: loss {mean:.8f}", flush=True)
        save_checkpoint(step, net, optimizer)
    dist.destroy_process_group()
    net.eval().requires_grad_(False)
    total = 0.0
    for x, y in DataLoader(held_out, batch_size=512):
        total += loss(net(x.to(device)), y.to(device)).item() * len(y)
    if rank == 0:
        print(f"held-out loss {total / len(held_out):.8f}")
