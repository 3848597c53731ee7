"""Per-step timing: its end, its loss, its seconds per phase (ranks).

Measuring never makes the device wait.  On a CPU, the host's clock is read.  A GPU runs behind the
Python thread, so each moment is a CUDA event and each step leaves a copy of its loss.  Both are
read a few steps later, when the GPU has reached them.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor

from ddpnb.protocol.messages import NO_PARTS, Parts
from ddpnb.rank.meter import Moment, Phase, Timer, Traffic, synchronize

MAX_PENDING = 8
"""Steps that the Python thread may be ahead of a GPU."""


class StepReport(NamedTuple):
    """What a step of one worker returned and exchanged."""

    loss: Tensor
    """Mean loss over the worker's samples before the update; shape (), on the device, detached."""
    num_samples: int
    traffic: Traffic = Traffic()
    staleness: int | None = None
    metrics: Mapping[str, Tensor] = {}
    """Further numbers of the task's step, each the mean over the worker's samples."""


class StepTiming(NamedTuple):
    """One finished step."""

    report: StepReport
    seconds: float
    """Since the clock was started."""
    loss: float
    parts: Parts
    metrics: Mapping[str, float]
    """Further numbers of the step."""


@final
class CpuClock(Timer):
    """Reads the host's clock: when a step returns, it has finished."""

    num_steps_ahead = 0
    """Steps that a rank may begin before an earlier one has ended."""

    def __init__(self) -> None:
        self._start = self._end = self._since = 0.0
        self._phase: Phase = "data"
        self._spent: dict[str, float] = {}

    def begin(self, phase: Phase, at: Moment = None) -> Phase:
        """Read the clock."""
        before, now = self._phase, time.perf_counter() if at is None else at
        self._spent[before] = self._spent.get(before, 0.0) + now - self._since
        self._phase, self._since = phase, now
        return before

    def moment(self) -> Moment:
        """Return the host's time."""
        return time.perf_counter()

    def hide(self, begun: Moment, ended: Moment) -> None:
        """Add the time between."""
        self._spent["hidden"] = self._spent.get("hidden", 0.0) + ended - begun

    def start(self) -> None:
        """Start counting, once for all steps of a run."""
        self._start = self._end = self._since = time.perf_counter()
        self._phase, self._spent = "data", {}

    def timing(self, report: StepReport, *, counts: bool = True) -> list[StepTiming]:
        """Record that a step was made, and return it; the next one begins with fetching data.

        Args:
            report: what the step returned.
            counts: whether its time counts.
        """
        loss = report.loss.item()
        self.begin("data")
        parts, self._spent = Parts(**self._spent), {}
        if not counts:
            self._start += self._since - self._end
            parts = NO_PARTS
        self._end = self._since
        metrics = {name: value.item() for name, value in report.metrics.items()}
        return [StepTiming(report, self._end - self._start, loss, parts, metrics)]

    def stop(self) -> list[StepTiming]:
        """Return the steps not yet returned: none."""
        return []

    def end(self) -> None:
        """Count what has followed the last step too."""
        self._end = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count no time in this context, which is entered between two steps."""
        begun, since, phase, spent = time.perf_counter(), self._since, self._phase, {**self._spent}
        try:
            yield
        finally:
            seconds = time.perf_counter() - begun
            self._start += seconds
            self._end += seconds
            self._since, self._phase, self._spent = since + seconds, phase, spent

    @property
    def seconds(self) -> float:
        """The time from the start to the end of the last step, or to ``end``."""
        return self._end - self._start


class _Pending(NamedTuple):
    report: StepReport
    marks: list[tuple[Phase, torch.cuda.Event]]
    """The phases of the step and when each began; the last is the end of the step."""
    hidden: list[tuple[torch.cuda.Event, torch.cuda.Event]]
    loss: Tensor
    metrics: Tensor
    """Their values, in the report's order."""
    counts: bool


@final
class CudaClock(Timer):
    """Reads CUDA events of finished steps.

    Seconds add up from event to event: ``elapsed_time`` returns milliseconds as a float32, which
    are no finer than 0.1 ms after a quarter of an hour (torch.cuda.Event, CUDA's
    cudaEventElapsedTime).
    """

    num_steps_ahead = MAX_PENDING + 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Phase, torch.cuda.Event]] = []
        self._hidden: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._pending: deque[_Pending] = deque()
        self._free: list[torch.cuda.Event] = []
        """Events of finished steps, to be recorded anew."""
        self._seconds = 0.0

    def begin(self, phase: Phase, at: Moment = None) -> Phase:
        """Record an event behind the work that the GPU has so far."""
        before = self._marks[-1][0] if self._marks else "data"
        self._marks.append((phase, self.moment() if at is None else at))
        return before

    def moment(self) -> Moment:
        """Record an event on the current stream."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def hide(self, begun: Moment, ended: Moment) -> None:
        """Keep both events, to be read later."""
        self._hidden.append((begun, ended))

    def start(self) -> None:
        """Let the GPU finish, then record the first event."""
        synchronize(self._device)
        self._marks, self._hidden, self._seconds = [], [], 0.0
        self.begin("data")

    def timing(self, report: StepReport, *, counts: bool = True) -> list[StepTiming]:
        """Record an event behind this step; return the steps that the GPU has finished."""
        loss = torch.empty((), dtype=report.loss.dtype, device="cpu", pin_memory=True)
        loss.copy_(report.loss, non_blocking=True)
        num = len(report.metrics)
        metrics = torch.empty(num, device="cpu", pin_memory=bool(num))
        for held, value in zip(metrics, report.metrics.values(), strict=True):
            held.copy_(value, non_blocking=True)
        self.begin("data")
        self._pending.append(_Pending(report, self._marks, self._hidden, loss, metrics, counts))
        self._marks, self._hidden = [self._marks[-1]], []
        if len(self._pending) > MAX_PENDING:
            self._pending[0].marks[-1][1].synchronize()
        return self._finished()

    def stop(self) -> list[StepTiming]:
        """Let the GPU finish; return the rest."""
        synchronize(self._device)
        return self._finished()

    def end(self) -> None:
        """Let the GPU finish, and count what has followed the last step too."""
        last = self.moment()
        synchronize(self._device)
        self._seconds += self._marks[0][1].elapsed_time(last) / 1000

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let the GPU finish before and after; the next step's time begins then."""
        synchronize(self._device)
        try:
            yield
        finally:
            synchronize(self._device)
            self._marks, self._hidden = [], []
            self.begin("data")

    @property
    def seconds(self) -> float:
        """The time from the start to the last step's end, or ``end``, on the GPU's own clock."""
        return self._seconds

    def _finished(self) -> list[StepTiming]:
        timings = []
        while self._pending and self._pending[0].marks[-1][1].query():
            done = self._pending.popleft()
            parts = _parts_of(done)
            self._seconds += sum(parts) - parts.hidden
            metrics = dict(zip(done.report.metrics, done.metrics.tolist(), strict=True))
            timings.append(StepTiming(done.report, self._seconds, done.loss.item(), parts, metrics))
            used = [event for _, event in done.marks[:-1]]  # the last begins the next step
            used += [event for pair in done.hidden for event in pair]
            self._free += {id(event): event for event in used}.values()
        return timings


Clock = CpuClock | CudaClock
"""A timer for all steps of a run, started once."""


def clock_of(device: torch.device) -> Clock:
    """Return the clock for the steps of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


@final
class StepTimer(Timer):
    """Notes when each phase of a step begins; no moment waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = clock_of(device)
        self.start()

    def start(self) -> None:
        """Begin a step, when the device has nothing left to do."""
        synchronize(self._device)
        self._base, self._base_seconds = self.moment(), time.perf_counter()
        self._marks: list[tuple[Phase, Moment]] = []

    def begin(self, phase: Phase, at: Moment = None) -> Phase:
        """Note the moment."""
        before = self._marks[-1][0] if self._marks else phase
        self._marks.append((phase, self.moment() if at is None else at))
        return before

    def moment(self) -> Moment:
        """Return this moment on the device's clock."""
        return self._clock.moment()

    def hide(self, begun: Moment, ended: Moment) -> None:
        """Note nothing: whoever inspects a step sees what is hidden."""

    def seconds(self, moment: Moment) -> float:
        """Return when a moment was, on the monotonic clock that a host's processes share."""
        if isinstance(moment, float):
            return moment
        moment.synchronize()
        return self._base_seconds + float(self._base.elapsed_time(moment)) / 1000

    def phases(self) -> list[tuple[Phase, float, float]]:
        """End the step; return its phases, each with its begin and end in seconds."""
        self.begin("data")
        begun = [self.seconds(moment) for _, moment in self._marks]
        names = [phase for phase, _ in self._marks]
        return list(zip(names, begun, begun[1:], strict=False))


def _parts_of(done: _Pending) -> Parts:
    if not done.counts:
        return NO_PARTS
    spent: dict[str, float] = {}
    for (part, begun), (_, ended) in zip(done.marks, done.marks[1:], strict=False):
        spent[part] = spent.get(part, 0.0) + begun.elapsed_time(ended) / 1000
    for begun, ended in done.hidden:
        spent["hidden"] = spent.get("hidden", 0.0) + begun.elapsed_time(ended) / 1000
    return Parts(**spent)
