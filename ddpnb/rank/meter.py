"""Measures how long each phase of a step takes, and how many bytes the step sends.

Strategies need no code for these measurements.  ``Worker.compute_gradients`` begins the phases of a
step.  The interceptor of collectives reports the messages that ``torch.distributed`` sends.  The
servers report the messages that go through shared memory.  Runs on the ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from ddpnb.protocol.messages import Parts, StepEvent
from ddpnb.rank.collectives.intercept import Listener
from ddpnb.rank.collectives.table import Call

Phase = Literal["data", "forward", "backward", "communication", "optimizer", "waiting"]
"""Name of a step's phase.  Phases never overlap.  Each phase is a field of ``messages.Parts``."""

Moment = Any
"""A timestamp of the device's own clock, returned by ``Meter.moment``."""


def synchronize(device: torch.device) -> None:
    """If the device is a GPU, wait until it has finished its work, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the duration of a call in seconds, including the work that it starts on the device."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


class Traffic(NamedTuple):
    """Bytes that a worker sent to other workers, and bytes that it received from them."""

    sent: int = 0
    received: int = 0


def completed(
    step: StepEvent, seconds: float, parts: Parts, values: Mapping[str, Tensor]
) -> StepEvent:
    """Return a copy of ``step`` with the given duration, phases and ``values`` (loss, metrics)."""
    numbers = {name: value.item() for name, value in values.items()}
    return replace(step, seconds=seconds, parts=parts, loss=numbers.pop("loss"), metrics=numbers)


class Meter:
    """Measures one worker's communication: exposed seconds, hidden seconds and bytes.

    A message that does not block the worker is hidden until the worker waits for the message.  In
    DDP's backward pass, C++ code waits for messages.  Communication in this pass counts as hidden
    until DDP issues the last message.  The rest of the backward pass counts as exposed.

    Subclasses have a clock, and measure the time of each phase of a step.  This base class measures
    no time.
    """

    def __init__(self) -> None:
        self._sent = self._received = 0
        self._num_in_flight = 0
        self._first: Moment = None
        self._last: Moment = None

    def count(self, *, sent: int = 0, received: int = 0) -> None:
        """Add to the number of bytes that this worker has sent and received."""
        self._sent += sent
        self._received += received

    def take(self) -> Traffic:
        """Return the number of bytes sent and received since the previous call of ``take``."""
        taken = Traffic(self._sent, self._received)
        self._sent = self._received = 0
        return taken

    @contextlib.contextmanager
    def communicating(self) -> Iterator[None]:
        """Count the time in this context as communication."""
        before = self.begin("communication")
        try:
            yield
        finally:
            self.begin(before)
            if self._num_in_flight:
                self._last = self.moment()

    def issued(self) -> None:
        """Record that a message is under way while this worker continues to compute."""
        self._last = self.moment()
        if not self._num_in_flight:
            self._first = self._last
        self._num_in_flight += 1

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Count time in the context as exposed, and time from the first message to it as hidden."""
        if self._num_in_flight:
            self.hide(self._first, self.moment())
            self._num_in_flight = 0
        with self.communicating():
            yield

    def backward_ended(self) -> None:
        """After a backward pass, count the time since its last message as communication."""
        if self._num_in_flight:
            self.hide(self._first, self._last)
            self.begin("communication", at=self._last)
            self._num_in_flight = 0

    # -- the clock: these methods do nothing in this class ------------------------------------

    def begin(self, phase: Phase, at: Moment = None) -> Phase:
        """Begin a phase now, or at the timestamp ``at`` if ``at`` is given.

        Returns:
            The previous phase.
        """
        return phase

    def moment(self) -> Moment:
        """Return the current timestamp without waiting for the device."""

    def hide(self, begun: Moment, ended: Moment) -> None:
        """Count the communication between two timestamps as hidden behind other work."""

    # On emulated devices (``laboratory``), the methods below advance the computed time.

    scale = 1.0
    """Size of the emulated model in bytes, divided by the size of the trained model in bytes."""

    def begin_step(self, num_samples: int) -> None:
        """Begin a step of this worker on ``num_samples`` samples."""

    def compute(self, phase: Phase, num_samples: int) -> None:
        """Begin a phase that computes on ``num_samples`` samples."""
        self.begin(phase)

    def produced(self, num_bytes: int) -> None:
        """Record that the current phase has produced ``num_bytes`` more bytes of gradients."""

    def computed(self) -> None:
        """Record that this worker now needs the results of its computation."""

    def exchange(self, num_messages: int, num_bytes: float, *, is_scaled: bool = True) -> None:
        """Record an exchange of ``num_bytes`` bytes between this process's devices.

        ``is_scaled`` is True for parameters and gradients, and False for samples and outputs.
        """

    def wait_until(self, end: float) -> None:
        """Record that this worker waits for another worker until the computed time ``end``."""


@final
class Account(Listener):
    """Reports a run's collectives to the meter of the thread that created the account."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._thread = threading.get_ident()

    def begin(self, call: Call) -> None:
        """Count a call's bytes.  If the call does not block, record that a message is under way."""
        sent, received = call.traffic
        self._meter.count(sent=sent, received=received)
        if not call.is_blocking:
            self._meter.issued()

    def waiting(self, call: Call) -> contextlib.AbstractContextManager[None]:
        """Return a context that counts the time of a wait as exposed communication."""
        if threading.get_ident() != self._thread:  # not part of the run's own steps
            return contextlib.nullcontext()
        return self._meter.communicating() if call.is_blocking else self._meter.awaited()
