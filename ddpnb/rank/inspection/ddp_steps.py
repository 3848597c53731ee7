"""Records events while a model takes steps with DistributedDataParallel.  Runs on the ranks.

An inspection has no side effects, because it uses copies of the model, and restores the random
states.  Hooks record when each gradient is ready, and when the all-reduce of each bucket begins and
ends.  The hooks run on the threads of the backward pass and on the threads of the all-reduces.
"""

import contextlib
import copy
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final
from weakref import proxy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddpnb.protocol.devices import Compute, Devices
from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.protocol.inspection import Bucket, CapReport, InspectSpec
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.trace import Lane, Span
from ddpnb.rank.clock import Clock, MeasuredClock, Moment, seconds_between
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.device import synchronize
from ddpnb.rank.emulation import ComputeTimes, Emulation, measured
from ddpnb.rank.emulation.clock import VirtualClock
from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.strategies.ddp import DEFAULT_CAP_MB
from ddpnb.rank.tasks.base import OptimizerFactory, split_step
from ddpnb.rank.tasks.batches import Shard, copied, tensors_of
from ddpnb.rank.training.model_checks import attempt
from ddpnb.rank.training.run import Surroundings, load_run
from ddpnb.rank.variables import value_of

NUM_WARMUP_STEPS: Final = 3
"""Number of steps before the measurement.  The first steps are slow, because DDP forms its final
buckets after the first step, and memory is newly allocated."""
MOST_STEPS, FEWEST_STEPS = 15, 3
MOST_SECONDS: Final = 2.0
"""Approximate limit, in seconds, for the total time of the measured steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with its input and its optimizer.  Only copies of the model take steps."""

    make_model: Callable[[], nn.Module]
    """Function that returns an unwrapped copy of the model in the model's current mode."""
    make_optimizer: OptimizerFactory
    loss_of: Callable[[nn.Module, Any], Tensor]
    """Function that returns a model's loss on a batch, and may change the batch."""
    batch: Any
    cap_mb: float = DEFAULT_CAP_MB
    finds_unused: bool = False
    """True if DDP looks for parameters that do not contribute to the loss."""


def check_model_here(
    spec: InspectSpec, here: Surroundings
) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """Check the model on this rank without communication.

    Return the shape of each parameter that needs a gradient, and the names of unused parameters.

    Raises:
        UserError: the model does not exist, does not fit the batch, or needs no gradient.
    """
    with preserve_globals(torch.device(here.state.device)):
        subject = subject_of(spec, here)
        with attempt(f"Copying {spec.title} and calling the copy on its batch failed"):
            model = subject.make_model()
            loss = subject.loss_of(model, copied(subject.batch))
        if not loss.requires_grad:
            raise UserError("The loss does not depend on any parameter that needs a gradient.")
        model.zero_grad()
        loss.backward()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        unused = tuple(name for name, p in trained.items() if p.grad is None)
        return {name: tuple(p.shape) for name, p in trained.items()}, unused


def measure(spec: InspectSpec, here: Surroundings) -> tuple[CapReport, ...]:
    """Take steps with each value of ``bucket_cap_mb``, beginning with the model's own value.

    Every rank takes part, with the same ``spec`` and folder.  ``check_model_here`` must have
    accepted ``spec``.
    """
    device, rank = torch.device(here.state.device), here.state.rank
    with preserve_globals(device):
        subject = subject_of(spec, here)
        caps = dict.fromkeys([subject.cap_mb, *spec.bucket_caps])
        emulation = None if spec.devices is None else _emulation(spec.devices, subject)
        reports, own = [], range(rank, rank + 1)
        for number, cap in enumerate(caps):
            with contextlib.ExitStack() as opened:
                stepper = _Stepper(subject, cap, device)
                if emulation is not None:
                    path = here.folder / f"inspect-{number}"
                    clock = VirtualClock(emulation, own, path, here.cancellation.check)
                    opened.enter_context(opened.enter_context(closing(clock)).running())
                    stepper.clock, stepper.ends = clock, clock.ends
                reports.append(stepper.report())
    return tuple(reports)


def subject_of(spec: InspectSpec, here: Surroundings) -> Subject:
    """Return the subject for the model of the spec's task, or for the model that the spec names."""
    if spec.task is not None:
        return _of_task(spec, spec.task, here)
    namespace = here.namespace
    model = value_of(spec.model, namespace)
    if not isinstance(model, nn.Module):
        raise UserError(f"{spec.model} is {kind_of(model)}, not an nn.Module.")
    ddp = model if isinstance(model, DistributedDataParallel) else None
    return Subject(
        make_model=partial(copy.deepcopy, model if ddp is None else ddp.module),
        make_optimizer=partial(torch.optim.SGD, lr=0.01),
        loss_of=partial(_loss, spec, namespace),
        batch=value_of(spec.batch, namespace),
        cap_mb=float(f"{ddp.bucket_bytes_cap / 2**20:.3g}") if ddp else DEFAULT_CAP_MB,
        finds_unused=spec.finds_unused or (ddp is not None and ddp.find_unused_parameters),
    )


def _of_task(spec: InspectSpec, task: RunSpec, here: Surroundings) -> Subject:
    context, state = load_run(task, here), here.state
    worker = context.worker("i", num_steps=1)
    shard = Shard(step=0, index=state.rank, num_shards=state.world_size)

    def loss_of(model: nn.Module, tree: Any) -> Tensor:
        with worker.autocast():
            return split_step(worker.training_step(model, tree))[0]

    return Subject(
        make_model=lambda: worker.make_model().train(),
        make_optimizer=worker.optimizer,
        loss_of=loss_of,
        batch=context.batch(shard).tree,
        finds_unused=spec.finds_unused,
    )


def _loss(spec: InspectSpec, namespace: Mapping[str, Any], model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    return split_step(value_of(spec.loss or "output.mean()", namespace, output=output), "--loss")[0]


def _emulation(devices: Devices, subject: Subject) -> Emulation:
    """Return the emulated devices.  Measure the devices' computing speed if it is not given."""
    model = subject.make_model()
    compute = devices.compute
    if compute is None:
        num_samples = len(next(tensors_of(subject.batch)))
        found = measured(
            lambda _: subject.loss_of(model, copied(subject.batch)).backward(), [num_samples]
        )
        fastest = torch.tensor([found.per_sample], dtype=torch.float64)
        dist.all_reduce(fastest, op=dist.ReduceOp.MIN)  # every rank takes part
        compute = Compute(fastest.item())
    size = num_bytes(each for each in model.parameters() if each.requires_grad)
    return Emulation(devices=devices, times=ComputeTimes(compute=compute), num_bytes=size)


Step = tuple[tuple[Span, ...], float, dict[str, float]]
"""The spans of a step, its seconds, and the seconds of each gradient since the backward pass."""


@final
class _Stepper:
    """Takes steps with a copy of the model in a new DDP wrapper, and records events with hooks."""

    def __init__(self, subject: Subject, cap_mb: float, device: torch.device) -> None:
        self._subject = subject
        self._cap_mb = cap_mb
        self.clock: Clock = MeasuredClock(device)
        self.ends: deque[float] | None = None
        """End times of the step's exchanges on emulated devices, or None on real devices."""
        self._num_samples = len(next(tensors_of(subject.batch)))
        self._model = subject.make_model()
        trained = [each for each in self._model.parameters() if each.requires_grad]
        self._optimizer = subject.make_optimizer(trained)
        self._names = {id(each): name for name, each in self._model.named_parameters()}
        self._ddp = DistributedDataParallel(
            self._model,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=None if cap_mb == DEFAULT_CAP_MB else cap_mb,
            find_unused_parameters=subject.finds_unused,
        )
        self._device = device
        own = proxy(self)  # DDP's C++ code holds the hooks, so they must not hold this object
        self._ddp.register_comm_hook(own, _Stepper._send)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                note = partial(_Stepper._note_gradient, own, name)
                parameter.register_post_accumulate_grad_hook(note)
        if next(self._model.buffers(), None) is not None:
            self._ddp.register_forward_pre_hook(self._note_buffers)
            self._model.register_forward_pre_hook(self._note_buffers)

    def report(self) -> CapReport:
        """Take steps, and return a report about them.  Every rank takes part."""
        fastest = min(seconds for _, seconds, _ in (self.step() for _ in range(NUM_WARMUP_STEPS)))
        slowest = torch.tensor([fastest], device=self._device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # all ranks take the same number of steps
        num_steps = min(max(int(MOST_SECONDS / slowest.item()), FEWEST_STEPS), MOST_STEPS)
        steps = [self.step() for _ in range(num_steps if self.ends is None else 1)]
        ready = {
            name: statistics.median(each[name] for *_, each in steps if name in each)
            for name in steps[0][2]
        }
        return CapReport(
            cap_mb=self._cap_mb,
            buckets=tuple(self._buckets[index] for index in sorted(self._buckets)),
            steps=tuple(spans for spans, *_ in steps),
            ready_seconds=dict(sorted(ready.items(), key=lambda item: item[1])),
        )

    def step(self) -> Step:
        """Take one step.  Every rank takes part."""
        self._ready: dict[str, Moment] = {}
        self._sent: dict[int, tuple[Moment, Moment]] = {}
        self._synced: list[Moment] = []
        self._buckets: dict[int, Bucket] = {}
        self._optimizer.zero_grad()
        batch = copied(self._subject.batch)
        synchronize(self._device)
        phases, self._base_seconds = [self.clock.moment()], time.perf_counter()
        if self.ends is not None:
            self._base_seconds = phases[0]
        self.clock.begin_step(self._num_samples)
        self.clock.forward(self._num_samples)
        loss = self._subject.loss_of(self._ddp, batch)
        self.clock.computed()
        phases.append(self.clock.moment())
        if self.ends is not None:
            self.ends.clear()
        loss.backward()
        for (index, (begun, _)), end in zip(self._sent.items(), self.ends or (), strict=False):
            self._sent[index] = begun, end  # later ends belong to DDP's other messages
        phases.append(self.clock.moment())
        self._optimizer.step()
        phases.append(self.clock.moment())
        synchronize(self._device)
        return self._noted(phases)

    def _note_gradient(self, name: str, gradient: Tensor) -> None:
        self.clock.produced(num_bytes([gradient]))
        self._ready[name] = self.clock.moment()

    def _note_buffers(self, *_: Any) -> None:
        """Record when DDP begins to send rank 0's buffers, and when the forward pass begins."""
        if self._synced or self._ddp.will_sync_module_buffers():
            self._synced.append(self.clock.moment())

    def _send(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Send a bucket as DDP does, and record when its all-reduce begins and ends."""
        begun, index = self.clock.moment(), bucket.index()
        self._sent[index] = begun, begun
        names = tuple(self._names[id(each)] for each in bucket.parameters())
        self._buckets[index] = Bucket(names=names, num_bytes=num_bytes([bucket.buffer()]))

        def end(sent: torch.futures.Future[Tensor]) -> Tensor:
            # A CUDA event of gloo's thread would come after kernels that were queued meanwhile.
            on_host = self.ends is None and dist.get_backend() == "gloo"
            self._sent[index] = begun, time.perf_counter() if on_host else self.clock.moment()
            return sent.value()

        # type: the hook accepts None for the default group, which DDP uses here
        return allreduce_hook(None, bucket).then(end)  # type: ignore[arg-type]

    def _noted(self, phases: list[Moment]) -> Step:
        """Return the recorded step, with times of the monotonic clock that a host's ranks share."""
        first = phases[0]

        def seconds(moment: Moment) -> float:
            if isinstance(moment, float) and not isinstance(first, float):  # the host's time
                return moment
            return self._base_seconds + seconds_between(first, moment)

        begun, forward_done, backward_done, updated = map(seconds, phases)
        ready = {name: seconds(moment) for name, moment in self._ready.items()}
        sent = {index: (seconds(a), seconds(b)) for index, (a, b) in sorted(self._sent.items())}
        sync_begun, started = map(seconds, self._synced or (begun, begun))
        last = min(max(ready.values(), default=backward_done), backward_done)
        waited = min(max([last, *(end for _, end in sent.values())]), backward_done)
        group = tuple(range(dist.get_world_size()))
        sizes = {"buffers": num_bytes(self._model.buffers())}
        noted: list[tuple[Lane, str, float, float]] = [
            ("communication", "buffers", sync_begun, started),
            ("wait", "wait for buffers", sync_begun, started),
            ("compute", "forward", started, forward_done),
            ("compute", "backward", forward_done, last),
            ("wait", "wait for buckets", last, waited),
            ("compute", "copy back", waited, backward_done),
            ("compute", "update", backward_done, updated),
        ]
        for index, times in sent.items():
            noted.append(("communication", f"bucket {index}", *times))
            sizes[f"bucket {index}"] = self._buckets[index].num_bytes
        spans = tuple(
            Span(
                rank=dist.get_rank(),
                lane=lane,
                name=name,
                start=start,
                end=end,
                num_bytes=sizes.get(name),
                group=group if name in sizes else (),
            )
            for lane, name, start, end in noted
            if end > start
        )
        return spans, updated - begun, {name: at - forward_done for name, at in ready.items()}
