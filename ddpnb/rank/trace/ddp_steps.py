"""A model's steps through DistributedDataParallel, each with all that happens in it (ranks).

All is done on copies of the model and its optimizer, and random numbers are put back: an inspection
changes nothing.  Hooks note when each gradient is there and when each bucket's all-reduce begins
and ends.  On a CPU they read the host's monotonic clock, on the threads that run the backward pass
and that complete the all-reduce; on a GPU they record events on its streams.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
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

from ddpnb.protocol.inspection import (
    DEFAULT_CAP_MB,
    Bucket,
    CapReport,
    DdpReport,
    InspectSpec,
)
from ddpnb.protocol.messages import RankState
from ddpnb.protocol.notation import parse_link
from ddpnb.protocol.trace import Span
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.collectives import link as emulated_link
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.collectives.link import EmulatedLink
from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.trace.subject import Subject, subject_of

NUM_WARMUP_STEPS: Final = 3
"""DDP forms its final buckets after the first; memory that is new is slow."""
MOST_STEPS, FEWEST_STEPS = 15, 3
MOST_SECONDS: Final = 2.0
"""Of the measured steps with one value of ``bucket_cap_mb``, about."""


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
        reports, pairs = [], list[tuple[float, float]]()
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
                    pairs.append((plain.step().seconds, steps[-1].seconds))
            reports.append(_report(cap, first, steps, stepper.notes))
    return DdpReport(
        rank=state.rank,
        caps=tuple(reports),
        pairs=tuple(pairs),
        num_threads=torch.get_num_threads(),
        notes=subject.notes,
    )


@contextlib.contextmanager
def _linked(
    spec: InspectSpec, state: RankState, folder: Path, cancellation: CancellationToken
) -> Iterator[None]:
    if not spec.link:
        yield
        return
    emulated_link.check(state.device)
    path = folder / f"{spec.inspection_id}.link"
    link = EmulatedLink(parse_link(spec.link), path, state.world_size)
    with emulated_link.over(link, cancellation):
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
        self._subject = subject
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
        loss = self._subject.loss(self._ddp)
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
