"""A model's steps through DistributedDataParallel, each with all that happens in it (ranks).

All is done on copies of the model and its optimizer, and random numbers are put back: an inspection
changes nothing.  Hooks note when each gradient is there and when each bucket's all-reduce begins
and ends.  On a CPU they read the host's monotonic clock, on the threads that run the backward pass
and that complete the all-reduce; on a GPU they record events on its streams.
"""

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddpnb.protocol.errors import UserError, kind_of, summary_of
from ddpnb.protocol.inspection import (
    DEFAULT_CAP_MB,
    Bucket,
    CapReport,
    DdpReport,
    Found,
    InspectSpec,
    ParameterSize,
)
from ddpnb.protocol.messages import RankState
from ddpnb.protocol.notation import parse_link
from ddpnb.protocol.trace import Span
from ddpnb.rank import linked_collectives
from ddpnb.rank.comm.flat_buffers import num_bytes
from ddpnb.rank.comm.link import EmulatedLink
from ddpnb.rank.comm.rendezvous import CancellationToken
from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.strategies.replica import NullTimer
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.training.context import build_context

NUM_WARMUP_STEPS: Final = 3
"""DDP forms its final buckets after the first; memory that is new is slow."""
MOST_STEPS, FEWEST_STEPS = 15, 3
MOST_SECONDS: Final = 2.0
"""Of the measured steps with one value of ``bucket_cap_mb``, about."""
_LEARNING_RATE = 0.01

LossOf = Callable[[nn.Module], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, its input and its optimizer; only copies of them make steps."""

    title: str
    model: nn.Module
    """Plain."""
    loss_of: LossOf
    """Calls a model, or a wrapper of it, with the batch."""
    optimizer: torch.optim.Optimizer
    cap_mb: float = DEFAULT_CAP_MB
    options: Mapping[str, Any]
    """Of ``DistributedDataParallel``."""
    num_samples: int | None
    notes: tuple[str, ...] = ()

    def copied(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a copy of the model, and one of the optimizer for the parameters of that copy.

        Raises:
            UserError: torch cannot copy it.
        """
        try:
            copied: tuple[nn.Module, torch.optim.Optimizer] = copy.deepcopy(
                (self.model, self.optimizer)
            )
        except Exception as error:
            raise UserError(
                f"{self.title} cannot be copied, and an inspection must not change it: "
                f"{summary_of(error)}."
            ) from error
        copied[0].zero_grad()
        return copied


def find(spec: InspectSpec, state: RankState, namespace: Mapping[str, Any], **task: Any) -> Found:
    """Look at the model on this rank alone: it sends nothing.

    Raises:
        UserError: there is no such model, it does not fit the batch, or it needs no gradient.
    """
    device = torch.device(state.device)
    with preserve_globals(device):
        subject = subject_of(spec, state, namespace, **task)
        model, _ = subject.copied()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise UserError(f"{subject.title} has no parameter that needs a gradient.")
        try:
            loss = subject.loss_of(model)
        except UserError:
            raise
        except Exception as error:
            called = f"{spec.model} on the batch {spec.batch}" if spec.model else subject.title
            raise UserError(f"{called} fails: {summary_of(error).rstrip('.')}.") from error
        _check_loss(loss)
        loss.backward()
        return Found(
            rank=state.rank,
            title=subject.title,
            parameters=tuple(
                ParameterSize(name=name, shape=tuple(p.shape), num_bytes=num_bytes([p]))
                for name, p in trained.items()
            ),
            unused=tuple(name for name, p in trained.items() if p.grad is None),
            num_samples=subject.num_samples,
        )


def measure(
    spec: InspectSpec,
    state: RankState,
    namespace: Mapping[str, Any],
    *,
    finds_unused: bool,
    folder: Path,
    cancellation: CancellationToken,
    **task: Any,
) -> DdpReport:
    """Make steps with each value of ``bucket_cap_mb``.  Takes part: every rank.

    Args:
        spec: the same on every rank; ``find`` has accepted it there.
        state: where this rank lives.
        namespace: the user's variables on this rank.
        finds_unused: whether a parameter had no part in the loss of some rank.
        folder: that the ranks of this host share.
        cancellation: ends waits for an emulated link.
        **task: what a task's context needs besides.
    """
    device = torch.device(state.device)
    with preserve_globals(device), _linked(spec, state, folder, cancellation):
        subject = subject_of(spec, state, namespace, **task)
        options = dict(subject.options)
        if finds_unused and not options["static_graph"]:
            options["find_unused_parameters"] = True
        others = [cap for cap in spec.bucket_caps if cap != subject.cap_mb]
        caps = list(dict.fromkeys([subject.cap_mb, *others]))
        plain = _Stepper(subject, caps[0], options, device, is_noted=False)
        reports, plain_seconds, noted_seconds = [], list[float](), list[float]()
        for cap in caps:
            stepper = _Stepper(subject, cap, options, device)
            first = stepper.first_buckets()
            seconds = [stepper.step().seconds for _ in range(NUM_WARMUP_STEPS - 1)]
            if cap == caps[0]:
                for _ in range(NUM_WARMUP_STEPS):
                    plain.step()
            steps = []
            for _ in range(_num_steps(min(seconds), device)):
                steps.append(stepper.step())
                if cap == caps[0]:
                    noted_seconds.append(steps[-1].seconds)
                    plain_seconds.append(plain.step().seconds)
            reports.append(_report(cap, first, steps, stepper.notes))
    return DdpReport(
        rank=state.rank,
        caps=tuple(reports),
        plain_seconds=min(plain_seconds),
        added_seconds=min(noted_seconds) - min(plain_seconds),
        num_threads=torch.get_num_threads(),
        notes=subject.notes,
    )


# -- what is inspected ---------------------------------------------------------------------


def subject_of(
    spec: InspectSpec, state: RankState, namespace: Mapping[str, Any], **task: Any
) -> Subject:
    """Return the model that a spec names, or that of its task."""
    if spec.task is not None:
        return _of_task(spec, state, namespace, **task)
    model = _value(spec.model, namespace)
    if not isinstance(model, nn.Module):
        raise UserError(f"{spec.model} is {kind_of(model)} and no model, an nn.Module.")
    cap_mb, options = DEFAULT_CAP_MB, _options(None)
    notes: tuple[str, ...] = ()
    if isinstance(model, DistributedDataParallel):
        options = _options(model)
        cap_mb = model.bucket_bytes_cap / 2**20
        plain = model.module
    else:
        plain = model.module if isinstance(model, nn.DataParallel) else model
        notes = (f"{spec.model} is not DDP: a copy of it is wrapped for this.",)
    batch = _copied(_value(spec.batch, namespace))
    optimizer = _optimizer(spec, plain, namespace)
    if not spec.optimizer:
        notes += ("The update is that of plain SGD: --optimizer names another.",)
    return Subject(
        title=spec.model,
        model=plain,
        loss_of=partial(_loss, spec, batch, namespace),
        optimizer=optimizer,
        cap_mb=cap_mb,
        options=options,
        num_samples=_num_rows(batch),
        notes=notes,
    )


def _of_task(
    spec: InspectSpec, state: RankState, namespace: Mapping[str, Any], **task: Any
) -> Subject:
    assert spec.task is not None
    context = build_context(spec.task, state, namespace, **task)
    replica = context.replica("i", num_steps=1, timer=NullTimer(), is_grouped=False)
    shard = Shard(step=0, part=state.rank, num_parts=state.world_size)
    batch = context.batch(shard, context.fetch(shard))
    tree = batch.tree

    def loss_of(model: nn.Module) -> Tensor:
        with replica.autocast():
            return replica.loss_in(replica.training_step(model, _copied(tree)))

    parameters = replica.parameters
    trained = parameters or [nn.Parameter(torch.zeros(1))]  # else refused, by ``find``
    return Subject(
        title=spec.task.task if not spec.task.source else "the cell's model",
        model=replica.model,
        loss_of=loss_of,
        optimizer=replica.optimizer(trained),
        options=_options(None),
        num_samples=batch.num_samples,
    )


def _value(expression: str, namespace: Mapping[str, Any], **others: Any) -> Any:
    """Return what the user's expression is on this rank.

    Raises:
        UserError: it cannot be computed.
    """
    try:
        return eval(expression, {**namespace, **others})  # the user's code, as a cell is
    except NameError as error:
        raise UserError(f"{error.name} is not defined: define it in a %%ddp cell.") from None
    except Exception as error:
        raise UserError(f"{expression} fails: {summary_of(error).rstrip('.')}.") from error


def _optimizer(
    spec: InspectSpec, model: nn.Module, namespace: Mapping[str, Any]
) -> torch.optim.Optimizer:
    if spec.optimizer:
        optimizer = _value(spec.optimizer, namespace)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(f"{spec.optimizer} is {kind_of(optimizer)} and no torch optimizer.")
        return optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained or [nn.Parameter(torch.zeros(1))], lr=_LEARNING_RATE)


def _loss(spec: InspectSpec, batch: Any, namespace: Mapping[str, Any], model: nn.Module) -> Tensor:
    given = _copied(batch)
    inputs, rest = (given[0], given[1:]) if isinstance(given, tuple | list) else (given, ())
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    if spec.loss:
        loss = _value(spec.loss, namespace, output=output)
        loss = loss if isinstance(loss, Tensor) or not callable(loss) else loss(output, *rest)
    else:
        loss = getattr(output, "loss", None)  # such as transformers' models return
        loss = _mean(output) if loss is None else loss
    _check_loss(loss)
    return loss  # type: ignore[no-any-return]


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise UserError(f"The loss is {found or kind_of(loss)}: --loss must give one number.")
    if not loss.requires_grad:
        raise UserError("The loss does not depend on any parameter that needs a gradient.")


def _mean(output: Any) -> Any:
    """Return the mean over all numbers in an output."""
    if isinstance(output, Tensor):
        return output.float().mean()
    values = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, Mapping | tuple | list):
        raise UserError(f"The model returns {kind_of(output)}: name the loss with --loss.")
    found = [_mean(each) for each in values if isinstance(each, Tensor | Mapping | tuple | list)]
    return sum(found)


def _copied(batch: Any) -> Any:
    """Return a batch with tensors of its own, which a forward pass may change."""
    match batch:
        case Tensor():
            return batch.detach().clone().requires_grad_(batch.requires_grad)
        case dict():
            return {name: _copied(each) for name, each in batch.items()}
        case tuple() | list() if type(batch) in (tuple, list):
            return type(batch)(_copied(each) for each in batch)
    return batch


def _num_rows(batch: Any) -> int | None:
    values = batch.values() if isinstance(batch, dict) else batch
    found = batch if isinstance(batch, Tensor) else next(iter(values), None)
    return len(found) if isinstance(found, Tensor) and found.ndim else None


def _options(ddp: DistributedDataParallel | None) -> dict[str, Any]:
    return {
        "find_unused_parameters": ddp is not None and ddp.find_unused_parameters,
        "static_graph": ddp is not None and ddp.static_graph,
        "gradient_as_bucket_view": ddp is not None and ddp.gradient_as_bucket_view,
    }


# -- its steps -----------------------------------------------------------------------------


@contextlib.contextmanager
def _linked(
    spec: InspectSpec, state: RankState, folder: Path, cancellation: CancellationToken
) -> Iterator[None]:
    if not spec.link:
        yield
        return
    linked_collectives.check(state.device)
    path = folder / f"{spec.inspection_id}.link"
    link = EmulatedLink(parse_link(spec.link), path, state.world_size)
    with linked_collectives.over(link, cancellation):
        yield


def _num_steps(seconds: float, device: torch.device) -> int:
    """Return how many steps to measure, the same odd number on every rank.  Takes part: every."""
    slowest = torch.tensor([seconds], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    num = int(MOST_SECONDS / max(slowest.item(), 1e-6))
    return min(max(num, FEWEST_STEPS), MOST_STEPS) // 2 * 2 + 1


def _report(
    cap: float, first: tuple[Bucket, ...], steps: list["_Step"], notes: "_Notes"
) -> CapReport:
    ready = {
        name: statistics.median(each.ready[name] for each in steps if name in each.ready)
        for name in steps[0].ready
    }
    return CapReport(
        cap_mb=cap,
        first_buckets=first,
        buckets=tuple(notes.buckets[index] for index in sorted(notes.buckets)),
        steps=tuple(each.spans for each in steps),
        ready_seconds=dict(sorted(ready.items(), key=lambda item: item[1])),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    spans: tuple[Span, ...]
    seconds: float
    ready: dict[str, float]


@final
class _Stepper:
    """Makes steps with a copy of the subject in a DDP of its own."""

    def __init__(
        self,
        subject: Subject,
        cap_mb: float,
        options: Mapping[str, Any],
        device: torch.device,
        *,
        is_noted: bool = True,
    ) -> None:
        self._loss_of = subject.loss_of
        self._model, self._optimizer = subject.copied()
        self._ddp = DistributedDataParallel(
            self._model,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=None if cap_mb == DEFAULT_CAP_MB else cap_mb,
            **options,
        )
        self._clock = _Clock(device)
        self.notes = _Notes(self._clock, self._model)
        if is_noted:
            self.notes.register(self._ddp, self._model)

    def first_buckets(self) -> tuple[Bucket, ...]:
        """Make the first step; return its buckets."""
        self.step()
        return tuple(self.notes.buckets[index] for index in sorted(self.notes.buckets))

    def step(self) -> _Step:
        """Make a step.  Takes part: every rank."""
        notes, now = self.notes, self._clock.now
        self._optimizer.zero_grad()
        self._clock.begin()
        notes.begin()
        begun = now()
        loss = self._loss_of(self._ddp)
        forward_done = now()
        loss.backward()
        backward_done = now()
        self._optimizer.step()
        updated = now()
        return self._step(begun, forward_done, backward_done, updated)

    def _step(self, *moments: Any) -> _Step:
        seconds = self._clock.seconds
        begun, forward_done, backward_done, updated = map(seconds, moments)
        notes, rank, ranks = self.notes, dist.get_rank(), tuple(range(dist.get_world_size()))
        spans: list[Span] = []

        def add(lane: Any, name: str, start: float, end: float, size: int | None = None) -> None:
            if end > start:
                group = ranks if lane == "communication" else ()
                spans.append(
                    Span(
                        rank=rank,
                        lane=lane,
                        name=name,
                        start=start,
                        end=end,
                        num_bytes=size,
                        group=group,
                    )
                )

        forward_begun = begun
        if notes.buffers:
            start, end = map(seconds, notes.buffers)
            add("communication", "buffers", start, end, num_bytes(self._model.buffers()))
            add("wait", "wait for buffers", start, end)
            forward_begun = end
        add("compute", "forward", forward_begun, forward_done)
        ready = {name: seconds(moment) for name, moment in notes.ready.items()}
        last = min(max(ready.values(), default=backward_done), backward_done)
        sent = {index: (seconds(a), seconds(b)) for index, (a, b) in notes.sent.items()}
        for index, (start, end) in sorted(sent.items()):
            add("communication", f"bucket {index}", start, end, notes.buckets[index].num_bytes)
        waited = min(max([last, *(end for _, end in sent.values())]), backward_done)
        add("compute", "backward", forward_done, last)
        add("wait", "wait for buckets", last, waited)
        add("compute", "copy back", waited, backward_done)
        add("compute", "update", backward_done, updated)
        return _Step(
            spans=tuple(spans),
            seconds=updated - begun,
            ready={name: at - forward_done for name, at in ready.items()},
        )


@final
class _Notes:
    """What hooks note in a step."""

    def __init__(self, clock: "_Clock", model: nn.Module) -> None:
        self._clock = clock
        self._names = {id(p): name for name, p in model.named_parameters()}
        self.buckets: dict[int, Bucket] = {}
        self.begin()

    def begin(self) -> None:
        """Forget the step before."""
        self.ready: dict[str, Any] = {}
        self.sent: dict[int, tuple[Any, Any]] = {}
        self.buffers: tuple[Any, ...] = ()

    def register(self, ddp: DistributedDataParallel, model: nn.Module) -> None:
        """Hook a DDP that has made no step, and its parameters."""
        ddp.register_comm_hook(None, self._send)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._note_gradient, name))
        if next(model.buffers(), None) is not None:
            ddp.register_forward_pre_hook(lambda *_: self._begin_buffers(ddp))
            model.register_forward_pre_hook(lambda *_: self._end_buffers())

    def _note_gradient(self, name: str, _: Tensor) -> None:
        self.ready[name] = self._clock.now()

    def _send(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        begun, index = self._clock.now(), bucket.index()
        names = tuple(self._names[id(p)] for p in bucket.parameters())
        buffer = bucket.buffer()
        self.buckets[index] = Bucket(names=names, num_bytes=num_bytes([buffer]))
        if bucket.is_last():  # rebuilt buckets may be fewer
            self.buckets = {n: each for n, each in self.buckets.items() if n <= index}

        def end(sent: torch.futures.Future[Tensor]) -> Tensor:
            self.sent[index] = begun, self._clock.now()
            return sent.value()

        # type: DDP has no group of its own here, and the hook takes None for the default one
        return allreduce_hook(None, bucket).then(end)  # type: ignore[arg-type]

    def _begin_buffers(self, ddp: DistributedDataParallel) -> None:
        if ddp.will_sync_module_buffers():
            self.buffers = (self._clock.now(),)

    def _end_buffers(self) -> None:
        if len(self.buffers) == 1:
            self.buffers += (self._clock.now(),)


@final
class _Clock:
    """Moments of this device as seconds of the host's monotonic clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"

    def begin(self) -> None:
        """Begin a step: the device has nothing left to do."""
        if self._is_gpu:
            torch.cuda.synchronize(self._device)
            self._base = self._event()
            self._base_seconds = time.monotonic()

    def now(self) -> Any:
        """Return this moment, without waiting for the device."""
        return self._event() if self._is_gpu else time.monotonic()

    def seconds(self, moment: Any) -> float:
        """Return when a moment was."""
        if not self._is_gpu:
            return float(moment)
        moment.synchronize()
        return float(self._base_seconds + self._base.elapsed_time(moment) / 1000)

    def _event(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
