"""How does DataParallel train, in one process?  (Rank 0; the other ranks rest.)

    w  <-  w - lr * g(w),    g = sum over replicas i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over replica i's b_i samples of the global batch
of B: the same update as ``single``.

Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", PVLDB 13(12), 2020, section 2.2; code: ``torch.nn.parallel.DataParallel``,
which torch discourages in favour of DistributedDataParallel.

Messages per step, with N replicas, for each part that the batch is cut into: the parameters
and buffers to N - 1 of them, the samples, the outputs to the first, their gradients back, and
N - 1 replicas' gradients to the first.
Bytes sent per step, in A parts: A (N - 1) (2 S + U), with S the bytes of all parameters and U
those of all buffers; samples and outputs are not counted.
"""

from collections.abc import Iterator
from typing import final

import torch
from torch import nn

from ddpnb.rank.order import Share
from ddpnb.rank.strategies.base import Batch, Memory, Plan, Replica, StepReport, Strategy
from ddpnb.rank.strategies.support.flat import memory_of, num_bytes
from ddpnb.rank.strategies.support.replicas import GpuReplicas, Replicas, ThreadReplicas, fewest_of
from ddpnb.wire import RankState


@final
class DataParallel(Strategy):
    """Torch's ``DataParallel`` on two GPUs or more; else the same steps on threads."""

    def __init__(self) -> None:
        self._replicas: Replicas | None = None

    def plan(self, state: RankState) -> Plan:
        """Rank 0 alone, with a replica for each rank, or for each GPU where there are fewer."""
        num_gpus = len(_gpus(torch.device(state.device), state.world_size))
        if num_gpus >= 2:
            return Plan(num_ranks=1, num_workers=num_gpus, synchronous=True)
        where = "CPU threads" if state.device == "cpu" else "threads that share one GPU"
        note = f"DataParallel is emulated on {where}."
        return Plan(
            num_ranks=1,
            num_workers=state.world_size,
            synchronous=True,
            is_emulated=True,
            notes=(note,),
        )

    def fewest_samples(self, num_samples: int, plan: Plan, accumulate: int) -> int:
        """Those of the last replica: the batch is cut into parts, and each for the replicas."""
        num_parts = min(accumulate, num_samples)
        sizes = (num_samples // num_parts, -(-num_samples // num_parts))
        return min(fewest_of(size, plan.num_workers) for size in sizes)

    def setup(self, replica: Replica) -> None:
        """Make the replicas, and one optimizer for the first."""
        self._replica = replica
        self._optimizer = replica.optimizer(replica.parameters)
        gpus = _gpus(replica.device, replica.world_size)
        if len(gpus) >= 2:
            self._replicas = GpuReplicas(replica.model, gpus)
        else:
            self._replicas = ThreadReplicas(replica.model, replica.world_size)
        buffers = num_bytes(replica.model.buffers())
        self._num_bytes = num_bytes(replica.model.parameters()) + buffers
        self._num_bytes += num_bytes(replica.parameters)  # their gradients

    def shares(self) -> Iterator[Share]:
        """Every global batch, whole."""
        return self._replica.whole_batches()

    def step(self, batch: Batch) -> StepReport:
        """Train on one global batch."""
        assert self._replicas is not None, "not set up"
        replica, replicas, timer = self._replica, self._replicas, self._replica.timer
        total = torch.zeros((), device=replica.device)
        parts = batch.split(replica.accumulate)
        self._optimizer.zero_grad()
        for part in parts:
            share = part.num_samples / batch.num_samples
            # forward: each replica on its part; the loss on all outputs together
            timer.begin("forward")
            with replica.autocast():
                outputs = replicas.forward(part.inputs, replica.autocast)
                loss = replica.loss(outputs, part.targets)
            # backward: to the outputs, and from there through each replica
            timer.begin("backward")
            (share * loss).backward()
            replicas.backward()
            # agree: add the gradients up in the first replica
            timer.begin("communication")
            replicas.reduce()
            total += share * loss.detach()
        # update: the first replica only; the others are overwritten in the next step
        replica.update(self._optimizer)
        return StepReport(
            loss=total,
            num_samples=batch.num_samples,
            num_bytes_sent=len(parts) * (replicas.num_replicas - 1) * self._num_bytes,
        )

    def memory(self) -> Memory:
        """The parameters of each replica, and one optimizer's state."""
        assert self._replicas is not None, "not set up"
        one = memory_of(self._replica.model.parameters(), self._optimizer)
        num = self._replicas.num_replicas
        return Memory(parameters=num * one.parameters, optimizer=one.optimizer)

    def finish(self) -> nn.Module:
        """Return the first replica, which is the model."""
        return self._replica.model

    def close(self) -> None:
        """End the replicas' threads."""
        if self._replicas is not None:
            self._replicas.close()


def _gpus(device: torch.device, world_size: int) -> list[int]:
    """Return the GPUs for replicas, the rank's own first; one for each rank at most."""
    if device.type != "cuda":
        return []
    own = device.index or 0
    others = [gpu for gpu in range(torch.cuda.device_count()) if gpu != own]
    return [own, *others][:world_size]
