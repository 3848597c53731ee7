"""DataParallel: replicas on the threads of one process (rank 0; the other ranks rest).

    w  <-  w - lr * g(w),    g = sum over replicas i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over replica i's b_i samples of the global batch
of B: the same update as ``single``.

Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", PVLDB 13(12), 2020, section 2.2; code: ``torch.nn.parallel.DataParallel``,
which torch discourages in favour of DistributedDataParallel.

Where the cell defines ``training_step``, each replica computes the loss of its own part, and the
step's loss is their mean, weighted by their samples; so on threads where the model returns no
tensor.

Messages per step, with N replicas, for each part that the batch is split into: the parameters
and buffers to N - 1 of them, the samples, the outputs to the first, their gradients back, and
N - 1 replicas' gradients to the first.
Bytes sent by the first device per step, in A parts: A (N - 1) (P + U), with P the bytes of all
parameters and U those of all buffers; received: A (N - 1) S, with S the bytes of the gradients.
Samples and outputs are not counted.

Copying the parameters to the replicas and gathering outputs count as communication, and on threads
summing the gradients too.  On GPUs that is a part of the backward pass.
"""

from typing import final

import torch
from torch import Tensor, nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.strategies.device_replicas import GpuReplicas, Replicas, ThreadReplicas
from ddpnb.rank.tasks.base import Supervised
from ddpnb.rank.worker import Batch, Worker


@final
class DataParallel(Strategy):
    """Torch's ``DataParallel`` on two GPUs or more; else the same steps on threads."""

    replicas: Replicas

    def plan(self, state: RankState) -> Plan:
        """Rank 0 alone, with a replica for each rank, or for each GPU where there are fewer."""
        gpus = _gpus(torch.device(state.device), state.world_size)
        if len(gpus) > 1:
            return Plan(num_ranks=1, num_workers=len(gpus), synchronous=True, sees_exposed=False)
        where = "CPU threads" if state.device == "cpu" else "threads that share one GPU"
        return Plan(
            num_ranks=1,
            num_workers=state.world_size,
            synchronous=True,
            is_emulated=True,
            notes=(f"DataParallel is emulated on {where}.",),
        )

    def setup(self, worker: Worker) -> None:
        """Make the replicas, and one optimizer for the first."""
        super().setup(worker)
        gpus = _gpus(worker.device, worker.world_size)
        self.replicas = GpuReplicas(worker, gpus) if len(gpus) > 1 else ThreadReplicas(worker)
        self.opened.enter_context(self.replicas.pool)

    def step(self, batch: Batch) -> Tensor:
        """Train on one global batch."""
        # forward: each replica on its slice, the loss on all outputs together
        # backward; agree: at its end the gradients of all replicas are summed in the first
        loss = self.worker.compute_gradients(batch, loss_of=self.loss_of)
        # update: the first replica only; the others are overwritten in the next step
        self.worker.update(self.optimizer)
        return loss

    def loss_of(self, batch: Batch, share: float) -> Tensor:
        """Replicate, run; gather the outputs, or the losses where there are only these."""
        step = self.worker.training_step
        # As torch does: a small batch makes fewer slices than replicas, the last may be smaller.
        chunks = torch.arange(batch.num_samples, device="cpu").chunk(len(self.replicas.devices))
        slices = batch.cut(map(len, chunks))
        trees = [each.tree for each in slices]
        if isinstance(step, Supervised):
            outputs = self.replicas.run(nn.Module.__call__, [inputs for inputs, _ in trees])
            if all(map(_has_rows, outputs, slices)):
                return step.loss(self.replicas.gather(outputs), batch.tree[1])
            results = [step.loss(out, tree[1]) for out, tree in zip(outputs, trees, strict=True)]
        else:
            results = self.replicas.run(step, trees)
        shares = [each.num_samples / batch.num_samples for each in slices]
        losses = [
            own * self.worker.loss_in(result, share * own).reshape(1)
            for result, own in zip(results, shares, strict=True)
        ]
        return self.replicas.gather(losses).sum()


def _has_rows(output: object, batch: Batch) -> bool:
    return isinstance(output, Tensor) and output.shape[:1] == (batch.num_samples,)


def _gpus(device: torch.device, world_size: int) -> list[torch.device]:
    """Return the GPUs for replicas, the rank's own first; one for each rank at most."""
    if device.type != "cuda":
        return []
    own = device.index or 0
    others = [gpu for gpu in range(torch.cuda.device_count()) if gpu != own]
    return [torch.device("cuda", gpu) for gpu in (own, *others)][:world_size]
