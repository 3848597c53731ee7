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

Copying the parameters to the replicas, scattering samples, gathering outputs and summing gradients
count as communication.  So does the time in which the first device waits for the others' outputs.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import gather, parallel_apply, replicate, scatter

from ddpnb.protocol.messages import RankState
from ddpnb.rank.comm.flat_buffers import num_bytes
from ddpnb.rank.comm.link import NO_LINK, Link, Messages
from ddpnb.rank.strategies.base import Plan, SynchronousStrategy
from ddpnb.rank.strategies.replica import (
    Batch,
    Memory,
    NullTimer,
    Part,
    Replica,
    StepReport,
    Timer,
)
from ddpnb.rank.tasks.base import StepFunction, Supervised
from ddpnb.rank.tasks.batches import Shard, moved
from ddpnb.rank.tasks.samples import Items

Autocast = Callable[[], AbstractContextManager[object]]
"""Makes the context to compute in; torch's autocast belongs to one thread."""


@final
class DataParallel(SynchronousStrategy):
    """Torch's ``DataParallel`` on two GPUs or more; else the same steps on threads."""

    _threads: "ThreadReplicas | None" = None

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
        """Those of the last replica: the batch is split into parts, and each among the replicas."""
        num_parts = min(accumulate, num_samples)
        sizes = (num_samples // num_parts, -(-num_samples // num_parts))
        return min(_fewest_of(size, plan.num_workers) for size in sizes)

    def setup(self, replica: Replica) -> None:
        """Make the replicas, and one optimizer for the first."""
        super().setup(replica)
        gpus = _gpus(replica.device, replica.world_size)
        self._gpus = gpus if len(gpus) >= 2 else []
        self._num_replicas = len(self._gpus) or replica.world_size
        self._first = Cast(replica.model, replica.autocast)
        if not self._gpus:
            self._threads = ThreadReplicas(
                replica.model,
                self._num_replicas,
                replica.autocast,
                replica.timer,
                replica.link,
            )
        self._num_copied = num_bytes(_state(replica.model))
        self._num_summed = num_bytes(replica.parameters)  # gradients are as large

    def shards(self) -> Iterator[Shard]:
        """Every global batch, whole."""
        return self._replica.whole_batches()

    def step(self, batch: Batch) -> StepReport:
        """Train on one global batch."""
        replica = self._replica
        # forward: each replica on its part, the loss on all outputs together; backward
        loss = replica.compute_gradients(batch, loss_of=self._loss_of, unsynced=self._summed)
        # agree
        self._sum_gradients()
        # update: the first replica only; the others are overwritten in the next step
        replica.update(self._optimizer)
        num_times = len(batch.split(replica.accumulate)) * (self._num_replicas - 1)
        return batch.report(
            loss,
            num_bytes_sent=num_times * self._num_copied,
            num_bytes_received=num_times * self._num_summed,
        )

    def _loss_of(self, part: Batch, share: float) -> Tensor:
        """Scatter, replicate, run; gather the outputs, or the losses where there are only these."""
        step = self._replica.training_step
        if isinstance(step, Supervised) and self._gpus:
            inputs, targets = part.tree
            return step.loss(self._forward(inputs), targets)
        # As torch does: a small batch makes fewer parts than replicas, and the last may be smaller.
        most = -(-part.num_samples // self._num_replicas)
        starts = range(0, part.num_samples, most)
        chunks = part.cut(min(most, part.num_samples - start) for start in starts)
        results: list[Any]
        if isinstance(step, Supervised):
            trees = [chunk.tree for chunk in chunks]  # once: a collate_fn may draw random numbers
            outputs = self._run(_call, [inputs for inputs, _ in trees])
            is_whole = not isinstance(part.content, Items)
            if is_whole and all(map(_has_rows, outputs, chunks)):
                return step.loss(self._gather(outputs), part.targets)
            pairs = zip(outputs, trees, strict=True)
            results = [step.loss(output, targets) for output, (_, targets) in pairs]
        else:
            results = self._run(step, [chunk.tree for chunk in chunks])
        shares = [chunk.num_samples / part.num_samples for chunk in chunks]
        losses = [
            own * self._replica.loss_in(result, share * own).reshape(1)
            for result, own in zip(results, shares, strict=True)
        ]
        return self._gather(losses).sum()

    def _run(self, call: StepFunction, parts: list[Any]) -> list[Any]:
        """Return the results of a call on each replica, with the newest parameters."""
        if self._threads is not None:
            return self._threads.run(call, parts)
        gpus = self._gpus[: len(parts)]
        self._replica.timer.begin("communication")
        placed = [
            moved(part, torch.device("cuda", gpu)) for part, gpu in zip(parts, gpus, strict=True)
        ]
        return self._apply(call, placed)

    def _forward(self, inputs: Any) -> Tensor:
        """Do on GPUs what torch's ``DataParallel.forward`` does, with its own functions."""
        self._replica.timer.begin("communication")
        return self._gather(self._apply(_call, list(scatter(inputs, self._gpus))))

    def _apply(self, call: StepFunction, parts: list[Any]) -> list[Any]:
        """Replicate, and call something with each replica and its part, on its GPU."""
        gpus = self._gpus[: len(parts)]
        copies = replicate(self._first, gpus)
        self._time_sum(copies)
        self._replica.timer.begin("forward")
        return parallel_apply(copies, [(call, part) for part in parts], None, gpus)

    def _time_sum(self, copies: list[Any]) -> None:
        """Count the sum of the gradients, which ends the backward pass, as communication.

        The copies come from one node of autograd's graph, which sums when it goes backward.
        """
        nodes = {p.grad_fn for copied in copies for p in copied.parameters() if p.grad_fn}
        timer = self._replica.timer
        for node in nodes:
            node.register_prehook(lambda _: _note(timer, "communication"))
            node.register_hook(lambda *_: _note(timer, "backward"))

    def _gather(self, tensors: list[Tensor]) -> Tensor:
        """Return the rows of all replicas on the first."""
        if self._threads is not None:
            return self._threads.gather(tensors)
        timer = self._replica.timer
        timer.begin("communication")
        gathered: Tensor = gather(tensors, self._gpus[0])
        timer.begin("forward")
        return gathered

    @contextmanager
    def _summed(self) -> Iterator[None]:
        """Sum the gradients of each part of the batch but the last."""
        yield
        self._sum_gradients()

    def _sum_gradients(self) -> None:
        """Finish a backward pass on threads; on GPUs torch's own has summed the gradients."""
        if self._threads is not None:
            self._threads.backward()
            self._replica.timer.begin("communication")
            self._threads.reduce()

    def held(self) -> Iterable[object]:
        """The replicas; on GPUs torch makes them in each step."""
        return () if self._threads is None else self._threads.modules()

    def memory(self) -> Memory:
        """The parameters of each replica, and one optimizer's state."""
        one = super().memory()
        return replace(one, parameters=self._num_replicas * one.parameters)

    def close(self) -> None:
        """End the replicas' threads."""
        if self._threads is not None:
            self._threads.close()


@final
class Cast(nn.Module):
    """A model that enters its context itself, on whatever thread it is called.

    The context that torch's ``DataParallel`` opens in its threads is float16 on every GPU,
    whichever type was asked for.
    """

    def __init__(self, model: nn.Module, autocast: Autocast) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast

    def forward(self, call: StepFunction, part: Any) -> Any:
        """Call something with the model and a part of the batch, in the context."""
        with self.autocast():
            return call(self.model, part)


@final
class ThreadReplicas(nn.Module):
    """The same steps as torch's ``DataParallel``, each replica on a thread of its own.

    Over an emulated link what passes between the first replica and the others takes its time: one
    message for each other replica, one after the other, through the first one's link.
    """

    def __init__(
        self,
        model: nn.Module,
        num_replicas: int,
        autocast: Autocast,
        timer: Timer | None = None,
        link: Link = NO_LINK,
    ) -> None:
        super().__init__()
        self._timer = timer or NullTimer()
        self._link = link
        models = [model, *(copy.deepcopy(model) for _ in range(num_replicas - 1))]
        self._models = nn.ModuleList(Cast(each, autocast) for each in models)
        self._pool = ThreadPoolExecutor(num_replicas, thread_name_prefix="ddpnb-replica")
        self._outputs: list[Tensor] = []
        self._gathered = torch.empty(0)

    def run(self, call: StepFunction, parts: list[Any]) -> list[Any]:
        """Replicate; call something with each replica and its part, on its thread."""
        self._timer.begin("communication")
        self._replicate()
        self._timer.begin("forward")
        return list(self._pool.map(Cast.__call__, self._models, itertools.repeat(call), parts))

    def gather(self, outputs: list[Tensor]) -> Tensor:
        """Return the rows of all outputs; ``backward`` scatters their gradient."""
        self._outputs = outputs
        self._timer.begin("communication")
        with self._lasting(*([output] for output in outputs[1:])):
            self._gathered = torch.cat([output.detach() for output in outputs])
        self._timer.begin("forward")
        return self._gathered.requires_grad_()

    def backward(self) -> None:
        """Scatter the gradient of the outputs; run each replica's backward pass on its thread."""
        assert self._gathered.grad is not None, "backward has not reached the outputs"
        parts = self._gathered.grad.split([len(output) for output in self._outputs])
        with self._lasting(
            *([output] for output in self._outputs[1:])
        ):  # their gradients go the other way
            pass
        list(self._pool.map(Tensor.backward, self._outputs, parts))  # the list waits, and raises

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients in the first replica, which the optimizer updates."""
        first, *others = self._models
        found = [[p.grad for p in other.parameters() if p.grad is not None] for other in others]
        with self._lasting(*found):
            for other in others:
                for mine, theirs in zip(first.parameters(), other.parameters(), strict=True):
                    if mine.grad is None:  # as of an expert that only the other replica has used
                        mine.grad = theirs.grad
                    elif theirs.grad is not None:
                        mine.grad.add_(theirs.grad)
                other.zero_grad()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    @torch.no_grad()
    def _replicate(self) -> None:
        """Copy parameters and buffers of the first replica to all others.

        As in torch, only the first replica's changes to buffers last.
        """
        first, *others = self._models
        with self._lasting(*(_state(other) for other in others)):
            for other in others:
                for mine, theirs in zip(_state(first), _state(other), strict=True):
                    theirs.copy_(mine)

    def _lasting(self, *messages: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Have the body last as long as so many messages over the link."""
        return self._link.lasting(Messages(len(messages), sum(map(num_bytes, messages))))


def _note(timer: Timer, part: Part) -> None:
    """Begin a part of the step; a hook of autograd must return nothing."""
    timer.begin(part)


def _call(model: nn.Module, inputs: Any) -> Any:
    return model(inputs)


def _has_rows(output: object, chunk: Batch) -> bool:
    return isinstance(output, Tensor) and output.shape[:1] == (chunk.num_samples,)


def _gpus(device: torch.device, world_size: int) -> list[int]:
    """Return the GPUs for replicas, the rank's own first; one for each rank at most."""
    if device.type != "cuda":
        return []
    own = device.index or 0
    others = [gpu for gpu in range(torch.cuda.device_count()) if gpu != own]
    return [own, *others][:world_size]


def _fewest_of(num_samples: int, num_replicas: int) -> int:
    """Return how many samples the last replica that has any gets: 1, where 3 share 7 as 3, 3, 1."""
    most = -(-num_samples // num_replicas)
    return (num_samples - 1) % most + 1


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
