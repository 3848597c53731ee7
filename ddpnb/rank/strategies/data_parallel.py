"""DataParallel: train replicas on the threads of one process.  Only rank 0 takes part.

    w  <-  w - lr * g(w),    g = sum over replicas i of (b_i / B) * g_i(w)

g_i is the gradient of the mean loss over replica i's b_i samples. The global batch has B samples.
The update is the same as in ``single``.

If the cell defines ``training_step``, each replica computes the loss of its slice. The step's loss
is the mean of these losses, weighted by the number of samples in each slice. Replicas also compute
losses if the model does not return a tensor with one row for each sample.

Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
PVLDB 13(12), 2020, section 2.2; code: ``torch.nn.parallel.DataParallel``. PyTorch recommends
DistributedDataParallel instead of DataParallel.

Messages per step, with N replicas, for each of A micro-batches:

- parameters, buffers and samples, from the first replica to the N - 1 other replicas
- outputs, from the other replicas to the first replica
- gradients of the outputs, from the first replica to the other replicas
- gradients of the parameters, from the other replicas to the first replica

As in torch, NCCL broadcasts the parameters and sums the gradients, so each device passes them on to
the next device. In each step, the first device sends A (P + U) bytes and receives A S bytes. P, U
and S are the sizes in bytes of all parameters, buffers and gradients. Bytes of samples and outputs
are not counted.

Copying parameters and gathering outputs count as communication. Summing gradients counts as
communication for replicas on threads. On GPUs, it counts as a part of the backward pass.
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
    """Torch's ``DataParallel`` on two or more GPUs, or an emulation of it on threads."""

    replicas: Replicas

    def plan(self, state: RankState) -> Plan:
        """Return a plan with one replica per GPU, or per rank if there are fewer than two GPUs."""
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
        """Create the replicas, and one optimizer for the first replica."""
        super().setup(worker)
        gpus = _gpus(worker.device, worker.world_size)
        self.replicas = GpuReplicas(worker, gpus) if len(gpus) > 1 else ThreadReplicas(worker)
        self.opened.enter_context(self.replicas.pool)

    def step(self, batch: Batch) -> Tensor:
        """Train on one global batch."""
        worker = self.worker
        worker.model.zero_grad()
        for micro_batch in worker.micro_batches(batch):
            # forward: each replica computes its slice, then one loss is computed on all outputs
            loss = worker.loss(micro_batch, loss_of=self.loss_of)
            # backward; communicate: then the first replica sums the gradients of all replicas
            (micro_batch.share * loss).backward()
        # update: only the first replica, because the next step overwrites the other replicas
        worker.update(self.optimizer)
        return worker.mean_loss

    def loss_of(self, batch: Batch) -> Tensor:
        """Copy the parameters, run the replicas, gather their outputs, and return the loss."""
        step = self.worker.training_step
        # As in torch, a small batch has fewer slices than replicas. The last slice may be smaller.
        chunks = torch.arange(batch.num_rows, device="cpu").chunk(len(self.replicas.devices))
        slices = batch.cut(map(len, chunks))
        trees = [each.tree for each in slices]
        if isinstance(step, Supervised):
            outputs = self.replicas.run(nn.Module.__call__, [inputs for inputs, _ in trees])
            if all(map(_has_rows, outputs, slices)):
                return step.loss(self.replicas.gather(outputs), batch.tree[1])
            results = [step.loss(out, tree[1]) for out, tree in zip(outputs, trees, strict=True)]
        else:
            results = self.replicas.run(step, trees)
        shares = [each.num_samples / batch.num_rows for each in slices]
        losses = [
            own * self.worker.loss_in(result, batch.share * own).reshape(1)
            for result, own in zip(results, shares, strict=True)
        ]
        return self.replicas.gather(losses).sum()


def _has_rows(output: object, batch: Batch) -> bool:
    return isinstance(output, Tensor) and output.shape[:1] == (batch.num_samples,)


def _gpus(device: torch.device, world_size: int) -> list[torch.device]:
    """Return at most ``world_size`` GPUs for the replicas, beginning with this rank's GPU."""
    if device.type != "cuda":
        return []
    own = device.index or 0
    others = [gpu for gpu in range(torch.cuda.device_count()) if gpu != own]
    return [torch.device("cuda", gpu) for gpu in (own, *others)][:world_size]
