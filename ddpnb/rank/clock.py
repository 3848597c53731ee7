"""When did a step end, and what was its loss, without making the device wait?  (Every rank.)

On a CPU both are known at once.  A GPU works behind the Python thread: there each
step leaves a CUDA event and a copy of its loss, and both are read when the GPU
has come by, a few steps later.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from ddpnb.rank.strategies.base import StepReport

MAX_PENDING = 8
"""Steps that the Python thread may be ahead of a GPU."""


class Lap(NamedTuple):
    """One finished step."""

    report: StepReport
    seconds: float
    """Since the clock was started."""
    loss: float


class Clock(ABC):
    """A clock that is started once, and told of every step."""

    num_ahead: ClassVar[int]
    """Steps that a rank may have begun without every earlier one having ended."""

    @abstractmethod
    def start(self) -> None:
        """Start counting, when the device has done all it was given."""

    @abstractmethod
    def lap(self, report: StepReport) -> list[Lap]:
        """Note that a step was made; return the steps that are known to have finished."""

    @abstractmethod
    def stop(self) -> list[Lap]:
        """Wait for the device; return the steps not yet returned."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """From start to stop."""


def clock_of(device: torch.device) -> Clock:
    """Return the clock for the steps of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


@final
class CpuClock(Clock):
    """Reads the host's clock: when a step returns, it is done."""

    num_ahead = 0

    def __init__(self) -> None:
        self._start = self._end = 0.0

    def start(self) -> None:
        """Read the clock."""
        self._start = self._end = time.perf_counter()

    def lap(self, report: StepReport) -> list[Lap]:
        """Return this step."""
        self._end = time.perf_counter()
        return [Lap(report, self._end - self._start, report.loss.item())]

    def stop(self) -> list[Lap]:
        """Return nothing: every step has been returned."""
        return []

    @property
    def seconds(self) -> float:
        """From the start to the end of the last step."""
        return self._end - self._start


class _Pending(NamedTuple):
    report: StepReport
    event: torch.cuda.Event
    loss: Tensor


@final
class CudaClock(Clock):
    """Reads CUDA events, those of finished steps only."""

    num_ahead = MAX_PENDING + 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = torch.cuda.Event(enable_timing=True)
        self._pending: deque[_Pending] = deque()
        self._seconds = 0.0

    def start(self) -> None:
        """Let the GPU finish what it has, then record the first event."""
        torch.cuda.synchronize(self._device)
        self._start.record(torch.cuda.current_stream(self._device))

    def lap(self, report: StepReport) -> list[Lap]:
        """Record an event behind this step; return the steps that the GPU has finished."""
        loss = torch.empty((), dtype=report.loss.dtype, pin_memory=True)
        loss.copy_(report.loss, non_blocking=True)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._pending.append(_Pending(report, event, loss))
        if len(self._pending) > MAX_PENDING:
            self._pending[0].event.synchronize()
        return self._finished()

    def stop(self) -> list[Lap]:
        """Let the GPU finish, and return the rest."""
        torch.cuda.synchronize(self._device)
        return self._finished()

    @property
    def seconds(self) -> float:
        """From the start to the end of the last step, on the GPU's own clock."""
        return self._seconds

    def _finished(self) -> list[Lap]:
        laps = []
        while self._pending and self._pending[0].event.query():
            done = self._pending.popleft()
            self._seconds = self._start.elapsed_time(done.event) / 1000
            laps.append(Lap(done.report, self._seconds, done.loss.item()))
        return laps
