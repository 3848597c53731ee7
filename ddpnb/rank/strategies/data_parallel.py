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

For replicas on threads, copying parameters, gathering outputs and summing gradients count as
communication. On GPUs, they are parts of the forward and the backward pass.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import gather

from ddpnb.protocol.messages import RankState
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.tasks.base import StepFunction, Supervised
from ddpnb.rank.tasks.batches import moved, tensors_of
from ddpnb.rank.worker import Batch, Worker, copy_buffers, state_of


@final
class DataParallel(Strategy):
    """Torch's ``DataParallel`` on two or more GPUs, or an emulation of it on threads."""

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
        self.num = len(gpus) if len(gpus) > 1 else worker.world_size
        self.replicas: GpuReplicas | ThreadReplicas
        if len(gpus) > 1:
            self.replicas = GpuReplicas(worker, gpus)
        else:
            self.replicas = ThreadReplicas(worker)
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
        self.optimizer.step()
        return worker.mean_loss

    def loss_of(self, batch: Batch) -> Tensor:
        """Copy the parameters, run the replicas, gather their outputs, and return the loss."""
        worker, step = self.worker, self.worker.training_step
        # As in torch, a small batch has fewer slices than replicas. The last slice may be smaller.
        chunks = torch.arange(batch.num_rows, device="cpu").chunk(self.num)
        slices = batch.cut(map(len, chunks))
        trees = [each.tree for each in slices]
        if len(slices) > 1:  # the first device sends the parameters once, and gets gradients once
            sent, received = num_bytes(state_of(worker.model)), num_bytes(worker.parameters)
            scale = worker.clock.scale
            worker.clock.count(sent=scale * sent, received=scale * received)
        if isinstance(step, Supervised):
            outputs = self.replicas(nn.Module.__call__, [inputs for inputs, _ in trees])
            if all(map(_has_rows, outputs, slices)):
                return step.loss(self.replicas.gathered(outputs), batch.tree[1])
            results = [step.loss(out, tree[1]) for out, tree in zip(outputs, trees, strict=True)]
        else:
            results = self.replicas(step, trees)
        shares = [each.num_samples / batch.num_rows for each in slices]
        losses = [
            own * worker.loss_in(result, batch.share * own).reshape(1)
            for result, own in zip(results, shares, strict=True)
        ]
        return self.replicas.gathered(losses).sum()


class _Replica(nn.Module):
    """A replica of the model. It calls the task's step with the model and a slice."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.model = worker.model
        self._worker = worker

    def forward(self, number: int, call: StepFunction, inputs: Any) -> Any:
        """Return the result of ``call(model, inputs)`` on this replica's own thread."""
        worker = self._worker
        measured = nullcontext() if number else worker.activations.hooks()
        with worker.autocast(), measured:  # both are settings of one thread
            return call(self.model, inputs)


@final
class GpuReplicas(nn.DataParallel[_Replica]):
    """Torch's ``DataParallel``. It gets slices of any kind of batch instead of tensors to cut."""

    def __init__(self, worker: Worker, gpus: list[torch.device]) -> None:
        super().__init__(_Replica(worker), device_ids=gpus)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> tuple[Any, Any]:
        """Copy each slice to its GPU, instead of torch's ``scatter``, which cuts only tensors."""
        call, slices = inputs
        gpus = [torch.device("cuda", each) for each in device_ids]
        placed = [(place, call, moved(each, gpus[place])) for place, each in enumerate(slices)]
        return placed, [{} for _ in placed]

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Return the list of outputs. ``gathered`` concatenates them if they have rows."""
        return outputs

    def gathered(self, outputs: Sequence[Tensor]) -> Tensor:
        """Call torch's ``gather``. Autograd later sends the gradients back to the replicas."""
        found: Tensor = gather(outputs, self.output_device)
        return found


@final
class ThreadReplicas:
    """Replicas on the threads of one device, with the same steps as on GPUs.

    On emulated devices, each exchange takes the time of NCCL's algorithm, as torch uses on GPUs.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker, self.clock = worker, worker.clock
        self.replicas = [_Replica(worker) for _ in range(worker.world_size)]
        for other in self.replicas[1:]:
            other.model = worker.make_model().train()
        # Reuse the threads, because torch needs milliseconds to prepare a new thread.
        self.pool = ThreadPoolExecutor(worker.world_size, thread_name_prefix="ddpnb-replica")

    def __call__(self, call: StepFunction, slices: list[Any]) -> list[Any]:
        """Copy the first replica to all others. Return the results of ``call(model, slice)``."""
        num = len(slices)
        self.clock.exchange("scatter", num_bytes(tensors_of(slices[:1])), num)
        with self.clock.communicating():
            self.copy_model(num)
        size = num_bytes(state_of(self.worker.model))
        self.clock.exchange("broadcast", size, num, self.clock.scale)
        calls = self.pool.map(_Replica.__call__, self.replicas, range(num), num * [call], slices)
        return list(calls)

    @torch.no_grad()
    def copy_model(self, num: int) -> None:
        """Copy the parameters and buffers. As in torch, this overwrites other replicas' buffers."""
        first, *others = (each.model for each in self.replicas[:num])
        for other in others:
            for mine, theirs in zip(first.parameters(), other.parameters(), strict=True):
                theirs.copy_(mine)
            copy_buffers(first, other)

    def gathered(self, outputs: list[Tensor]) -> Tensor:
        """Concatenate the outputs. On CPUs, a thread runs each replica's backward pass."""

        def go_back(gradient: Tensor) -> None:
            slices = gradient.split([len(output) for output in outputs])
            self.clock.exchange("scatter", num_bytes(slices[:1]), len(slices))
            if self.worker.device.type == "cpu":
                list(self.pool.map(Tensor.backward, outputs, slices))  # wait for all threads
            else:  # autograd's only thread for a GPU runs this hook, so others would wait forever
                torch.autograd.backward(outputs, list(slices))
            self.clock.computed()
            size = num_bytes(self.worker.parameters)
            self.clock.exchange("reduce", size, len(outputs), self.clock.scale)
            with self.clock.communicating():
                self.sum_gradients()

        self.clock.computed()
        with self.clock.communicating():
            gathered = torch.cat([output.detach() for output in outputs]).requires_grad_()
        self.clock.exchange("gather", num_bytes(outputs[:1]), len(outputs))
        gathered.register_hook(go_back)
        return gathered

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add the gradients of the other replicas to the first replica's gradients."""
        first, *others = ([*each.model.parameters()] for each in self.replicas)
        for other in others:
            for mine, theirs in zip(first, other, strict=True):
                if mine.grad is None:  # e.g. only the other replica used this expert
                    mine.grad = theirs.grad
                elif theirs.grad is not None:
                    mine.grad.add_(theirs.grad)
                theirs.grad = None


def _has_rows(output: object, batch: Batch) -> bool:
    return isinstance(output, Tensor) and output.shape[:1] == (batch.num_samples,)


def _gpus(device: torch.device, world_size: int) -> list[torch.device]:
    """Return at most ``world_size`` GPUs for the replicas, beginning with this rank's GPU."""
    if device.type != "cuda":
        return []
    own = device.index or 0
    others = [gpu for gpu in range(torch.cuda.device_count()) if gpu != own]
    return [torch.device("cuda", gpu) for gpu in (own, *others)][:world_size]
