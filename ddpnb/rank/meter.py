"""Where the time of a step goes, and how many bytes it sends (ranks).

A strategy marks nothing.  ``Worker.compute_gradients`` begins the phases of a step, and whatever
carries messages between ranks reports here: the interceptor of collectives for everything that goes
through ``torch.distributed``, the servers for everything that goes through shared memory.
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
"""What the time of a step can be spent on; the fields of ``messages.Parts`` that exclude each
other."""

Moment = Any
"""A point in time on the device's own clock, from ``Meter.moment``."""


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work, before a clock is read; a CPU has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, until the device has done its work."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


class Traffic(NamedTuple):
    """Bytes that a worker exchanged with others."""

    sent: int = 0
    received: int = 0


def completed(
    step: StepEvent, seconds: float, parts: Parts, values: Mapping[str, Tensor]
) -> StepEvent:
    """Return a step that has ended: ``values`` are its loss and the task's further numbers."""
    numbers = {name: value.item() for name, value in values.items()}
    return replace(step, seconds=seconds, parts=parts, loss=numbers.pop("loss"), metrics=numbers)


class Meter:
    """Counts the communication of one worker: its seconds, exposed and hidden, and its bytes.

    A message that is issued and waited for later is hidden until the wait begins.  Messages that
    C++ waits for, as in DDP's backward pass, are hidden until the last of them is issued; the rest
    of the backward pass waits for them and is exposed.

    A subclass has a clock, which divides the time of a step into phases; without one no time is
    counted.
    """

    def __init__(self) -> None:
        self._sent = self._received = 0
        self._num_in_flight = 0
        self._first: Moment = None
        self._last: Moment = None

    def count(self, *, sent: int = 0, received: int = 0) -> None:
        """Add bytes that this worker exchanged."""
        self._sent += sent
        self._received += received

    def take(self) -> Traffic:
        """Return the bytes since the last call."""
        taken = Traffic(self._sent, self._received)
        self._sent = self._received = 0
        return taken

    @contextlib.contextmanager
    def communicating(self, phase: Phase = "communication") -> Iterator[None]:
        """Count the time in this context as exposed communication, or as waiting."""
        before = self.begin(phase)
        try:
            yield
        finally:
            self.begin(before)
            if self._num_in_flight:
                self._last = self.moment()

    def issued(self) -> None:
        """Note a message that is on its way while this worker goes on computing."""
        self._last = self.moment()
        if not self._num_in_flight:
            self._first = self._last
        self._num_in_flight += 1

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Count the wait for messages that were issued: hidden until now, exposed in here."""
        if self._num_in_flight:
            self.hide(self._first, self.moment())
            self._num_in_flight = 0
        with self.communicating():
            yield

    def backward_ended(self) -> None:
        """Split the backward pass that has just ended where its last message was issued."""
        if self._num_in_flight:
            self.hide(self._first, self._last)
            self.begin("communication", at=self._last)
            self._num_in_flight = 0

    # -- the clock: here it does nothing ------------------------------------------------------

    def begin(self, phase: Phase, at: Moment = None) -> Phase:
        """Count the time from now on, or from a recent moment, as ``phase``.

        Returns:
            The phase that time was counted as before.
        """
        return phase

    def moment(self) -> Moment:
        """Return this point in time without waiting for the device."""

    def hide(self, begun: Moment, ended: Moment) -> None:
        """Count communication between two moments as hidden behind other work."""

    # Where time is computed in place of measured (``laboratory``), these advance it.

    scale = 1.0
    """Bytes of the emulated model for each byte of the one that is trained."""

    def begin_step(self, num_samples: int) -> None:
        """Begin a step on so many samples of this worker."""

    def compute(self, phase: Phase, num_samples: int) -> None:
        """Begin a phase that computes on so many samples."""
        self.begin(phase)

    def produced(self, num_bytes: int) -> None:
        """Note that the phase has made so many more bytes of gradients."""

    def computed(self) -> None:
        """Note that what this worker computes is needed now."""

    def exchange(self, num_messages: int, num_bytes: float, *, is_scaled: bool = True) -> None:
        """Exchange messages, of so many bytes together, with other devices of this process.

        ``is_scaled``: they hold parameters or gradients, not samples or outputs.
        """

    def wait_until(self, end: float) -> None:
        """Wait for another worker until a time."""


@final
class Account(Listener):
    """Reports the calls of a run to the meter of the thread that makes the account."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._thread = threading.get_ident()

    def begin(self, call: Call) -> None:
        """Count the bytes, and a message that is on its way from now on."""
        sent, received = call.traffic
        self._meter.count(sent=sent, received=received)
        if not call.is_blocking:
            self._meter.issued()

    def waiting(self, call: Call) -> contextlib.AbstractContextManager[None]:
        """Count the time of a wait."""
        if threading.get_ident() != self._thread:  # beside the run's own steps
            return contextlib.nullcontext()
        return self._meter.communicating() if call.is_blocking else self._meter.awaited()
