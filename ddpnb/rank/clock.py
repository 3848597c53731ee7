"""Clocks measure how long each phase of a step takes, and count bytes.  Runs on the ranks.

Strategies and users' own classes need no code for these measurements.  A clock listens to three
things: each call of ``torch.distributed`` (see ``collectives.intercept``), the start and the end of
each backward pass, and the start and the end of each optimizer's ``step``.  The time between them
has a name too: see ``name_gaps``.

``MeasuredClock`` never makes the device wait.  A GPU executes a step later than the Python thread
submits the step.  So a timestamp of a GPU is a CUDA event, and each step queues a copy of its loss.
ddpnb reads both a few steps later.  ``emulation.clock`` has the clock of emulated devices.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddpnb.compat.torch_internals import replaced_backward
from ddpnb.protocol.costs import Cost
from ddpnb.protocol.messages import Parts, StepEvent
from ddpnb.rank.collectives.intercept import Listener, listening
from ddpnb.rank.collectives.table import CollectiveCall
from ddpnb.rank.device import synchronize

Phase = Literal["data", "forward", "backward", "communication", "optimizer", "waiting"]
"""Name of a step's phase.  Phases never overlap.  Each phase is a field of ``messages.Parts``."""

Moment = Any
"""A timestamp: seconds, or an event on a GPU."""

MAX_PENDING = 8
"""Maximum number of steps that the Python thread may be ahead of a GPU."""


class Clock(Listener):
    """A clock that is off: it measures nothing.  Subclasses measure the steps of a run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Seconds from ``start`` to the end of the last finished step, or to a call of ``end``."""
        self.before_backward: Callable[[], None] = lambda: None
        """Function that is called when a step's backward pass begins (injected faults)."""
        self._sent = self._received = 0
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """In this context, the clock hears of collectives, backward passes and optimizer steps."""
        with ExitStack() as opened:
            opened.enter_context(listening(self))
            opened.enter_context(replaced_backward(self._run_backward))
            opened.callback(register_optimizer_step_pre_hook(self._before_update).remove)
            opened.callback(register_optimizer_step_post_hook(self._after_update).remove)
            yield

    def close(self) -> None:
        """Remove the clock's files, if it has any.  Calling ``close`` twice is safe."""

    def is_own_thread(self) -> bool:
        """Return True on the thread that takes the steps; other threads' calls have no phase."""
        return threading.get_ident() == self._thread

    def count(self, *, sent: float = 0, received: float = 0) -> None:
        """Add to the number of bytes that this worker has sent and received."""
        self._sent += round(sent)
        self._received += round(received)

    def count_call(self, call: CollectiveCall, backend: str = "") -> Cost:
        """Count the bytes of a call, except those of DDP's buffers.  Return the call's cost."""
        cost = call.cost(self.scale, backend)
        if not (call.is_in_cpp and call.name == "broadcast"):
            self.count(sent=cost.sent, received=cost.received)
        return cost

    def take(self) -> tuple[int, int]:
        """Return the numbers of bytes sent and received since the previous call of ``take``."""
        taken = self._sent, self._received
        self._sent = self._received = 0
        return taken

    # -- the steps of a run -------------------------------------------------------------------

    def start(self) -> None:
        """Start counting time."""

    def begin_step(self, num_samples: int) -> None:
        """Begin a step of this worker on ``num_samples`` samples."""

    def forward(self, num_samples: int) -> None:
        """Begin a forward pass on ``num_samples`` samples.  Calls are optional."""

    def timing(self, step: StepEvent, values: Mapping[str, Tensor]) -> list[StepEvent]:
        """End a step with these values (loss, metrics); return steps that the device has done."""
        return []

    def stop(self) -> list[StepEvent]:
        """Wait until the device has done its work; return the remaining finished steps."""
        return []

    def end(self) -> None:
        """Add the time since the last step to ``seconds``."""

    def paused(self) -> AbstractContextManager[object]:
        """Do not count the time in this context.  Call ``stop`` before you enter the context."""
        return contextlib.nullcontext()

    # -- the phases of a step -----------------------------------------------------------------

    def enter(self, phase: Phase | None, at: Moment = None) -> Phase | None:
        """Begin a phase now or at a timestamp, and return the previous phase.

        None is a gap: ``name_gaps`` later names its phase.
        """
        return None

    def moment(self) -> Moment:
        """Return the current timestamp without waiting for the device."""

    def communicating(self) -> AbstractContextManager[None]:
        """Return a context whose time counts as communication."""
        return self.during("communication")

    @contextlib.contextmanager
    def during(self, phase: Phase | None) -> Iterator[None]:
        """Count the time in this context as a phase."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def _run_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            with self._backward():
                return original(*arguments, **options)

        return run

    def _backward(self) -> AbstractContextManager[object]:
        """Return a context for a backward pass."""
        return contextlib.nullcontext()

    def _before_update(self, _: object, arguments: Any, options: Any) -> Any:
        """Begin an optimizer's step."""

    def _after_update(self, *_: object) -> None:
        """End an optimizer's step."""

    # -- emulated devices: these methods advance the computed time ------------------------------

    scale = 1.0
    """Size of the emulated model in bytes, divided by the size of the trained model in bytes."""
    gathers_ahead = False
    """True if the strategy's all-gathers begin one layer ahead, as those of FSDP on a GPU."""

    def computed(self) -> None:
        """Record that this worker now needs the results of its computation."""

    def produced(self, num_bytes: int) -> None:
        """Record that the backward pass has produced ``num_bytes`` more bytes of gradients."""

    def exchange(self, name: str, num_bytes: float, num_devices: int, scale: float = 1.0) -> None:
        """Record a collective between this process's devices, in which each has ``num_bytes``."""

    def wait_until(self, end: float) -> None:
        """Record that this worker waits for another worker until the computed time ``end``."""


def name_gaps(phases: Sequence[Phase | None]) -> list[Phase]:
    """Return a step's phases with a phase for each gap.

    A gap is "forward" if a backward pass comes next in the step, before an optimizer's step.
    Any other gap continues the computing phase before it.  So "forward" includes each forward pass
    of a step with several losses, and "backward" includes copying gradients to flat buffers.
    """
    named: list[Phase] = []
    last: Phase = "forward"
    for number, phase in enumerate(phases):
        if phase in ("backward", "optimizer"):
            last = phase
        if phase is None:
            following = (each for each in phases[number:] if each in ("backward", "optimizer"))
            phase = "forward" if next(following, None) == "backward" else last
        named.append(phase)
    return named


def length_outside(
    spans: Sequence[tuple[float, float]], holes: Sequence[tuple[float, float]]
) -> float:
    """Return the length of the union of ``spans``, without the parts inside ``holes``."""
    changes = [(at, 0, step) for span in spans for at, step in zip(span, (1, -1), strict=True)]
    changes += [(at, step, 0) for hole in holes for at, step in zip(hole, (1, -1), strict=True)]
    total = before = 0.0
    num_holes = num_spans = 0
    for at, hole, span in sorted(changes):
        if num_spans > 0 and num_holes <= 0:
            total += at - before
        before, num_holes, num_spans = at, num_holes + hole, num_spans + span
    return total


class _Pending(NamedTuple):
    """A step that the device may not have finished."""

    step: StepEvent
    marks: list[tuple[Phase | None, Moment]]
    """The step's phases, each with the timestamp of its start.  The last mark ends the step."""
    flights: list[tuple[Moment, Moment]]
    """Times during which a message was under way and the worker did not wait for it."""
    values: Mapping[str, Tensor]
    """The loss and the metrics, in the host's memory; valid after the device has done the step."""

    def parts(self) -> Parts:
        """Return the seconds of each phase, and the seconds of hidden communication."""
        first = self.marks[0][1]
        times = [seconds_between(first, moment) for _, moment in self.marks]
        phases = name_gaps([phase for phase, _ in self.marks[:-1]])
        spent: dict[str, float] = {}
        exposed = []
        for phase, begun, ended in zip(phases, times, times[1:], strict=False):
            spent[phase] = spent.get(phase, 0.0) + ended - begun
            if phase == "communication":
                exposed.append((begun, ended))
        flights = [
            (seconds_between(first, begun), seconds_between(first, ended))
            for begun, ended in self.flights
        ]
        return Parts(**spent, hidden=length_outside(flights, exposed))


@final
class MeasuredClock(Clock):
    """Measures all steps of a run with the device's own clock.

    The clock adds up the seconds of steps, because ``elapsed_time`` returns a float32 of
    milliseconds.  After a quarter of an hour, its resolution is only 0.1 ms.

    A call that does not block is hidden from its start until the worker waits for it.  In DDP's
    backward pass, C++ code waits, and ddpnb cannot see these waits.  The pass counts as hiding
    communication until DDP issues its last message.  The rest of the pass counts as exposed.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Phase | None, Moment]] = []
        self._flights: list[tuple[Moment, Moment]] = []
        self._issued: list[CollectiveCall] = []
        """Calls that the current backward pass has issued without waiting."""
        self._num_marks = 0
        """Number of marks when the latest of these calls was issued."""
        self._before_updates: list[Phase | None] = []
        self._pending: deque[_Pending] = deque()

    # -- the steps of a run -------------------------------------------------------------------

    def start(self) -> None:
        """Wait until the device has done its work, then start counting time."""
        synchronize(self._device)
        self._marks, self._flights = [], []
        self.enter("data")

    def begin_step(self, num_samples: int) -> None:
        """End the fetching of data.  What follows is named by the hooks of the step."""
        self._before_updates.clear()
        self.enter(None)

    def timing(self, step: StepEvent, values: Mapping[str, Tensor]) -> list[StepEvent]:
        """Record the loss and metrics of a step; return the steps that the device has finished."""
        held = {name: value.to("cpu", non_blocking=True) for name, value in values.items()}
        self.enter("data")
        self._pending.append(_Pending(step, self._marks, self._flights, held))
        self._marks, self._flights = [self._marks[-1]], []
        if len(self._pending) > MAX_PENDING:
            self._pending[0].marks[-1][1].synchronize()
        return self._finished()

    def stop(self) -> list[StepEvent]:
        """Wait until the device is done; return the remaining steps."""
        synchronize(self._device)
        return self._finished()

    def end(self) -> None:
        """Wait until the device is done; add the time since the last step to ``seconds``."""
        last = self.moment()
        synchronize(self._device)
        self.seconds += seconds_between(self._marks[0][1], last)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time in this context."""
        yield
        self.start()

    def _finished(self) -> list[StepEvent]:
        steps = []
        while self._pending and (not self._on_gpu or self._pending[0].marks[-1][1].query()):
            done = self._pending.popleft()
            parts = done.parts()
            self.seconds += sum(parts) - parts.hidden
            steps.append(completed(done.step, self.seconds, parts, done.values))
        return steps

    # -- the phases of a step -----------------------------------------------------------------

    def enter(self, phase: Phase | None, at: Moment = None) -> Phase | None:
        """Begin a phase that starts after all work that is queued on the device so far."""
        before = self._marks[-1][0] if self._marks else None
        self._marks.append((phase, self.moment() if at is None else at))
        return before

    def moment(self) -> Moment:
        """Return a timestamp: the host's time, or an event on the GPU's current stream."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _is_outside(self) -> bool:
        """Return True if a hook runs for the worker's own step, not for an exchange or a thread."""
        is_outside = bool(self._marks) and self._marks[-1][0] != "communication"
        return is_outside and self.is_own_thread()

    @contextlib.contextmanager
    def _backward(self) -> Iterator[None]:
        """Count the time in this context as backward, and split off the waits of C++ code."""
        if not self._is_outside():
            yield
            return
        self.before_backward()
        before = self.enter("backward")
        try:
            yield
        finally:
            waited = [call for call in self._issued if call.is_in_cpp and self in call.notes]
            if waited:
                first, last = (call.notes[self] for call in (waited[0], waited[-1]))
                self._flights.append((first, last))
                if self._num_marks == len(self._marks):  # nothing else began after the last call
                    self.enter("communication", at=last)
                for call in waited:
                    del call.notes[self]
            self._issued.clear()
            self.enter(before)

    def _before_update(self, _: object, arguments: Any, options: Any) -> Any:
        """Begin an optimizer's step.  Time in its closure counts as in a step of its own."""
        if not self._is_outside():
            return None
        self._before_updates.append(self.enter("optimizer"))
        own, *others = arguments
        closure = options.get("closure", others[0] if others else None)
        if not callable(closure):
            return None

        def evaluated() -> Any:
            with self.during(None):
                return closure()

        return (own, *others[1:]), {**options, "closure": evaluated}

    def _after_update(self, *_: object) -> None:
        """End an optimizer's step."""
        if self._before_updates and self._is_outside():
            self.enter(self._before_updates.pop())

    # -- calls of torch.distributed -------------------------------------------------------------

    def begin(self, call: CollectiveCall) -> None:
        """Count a call's bytes.  If the call does not block, note when it was issued."""
        self.count_call(call)
        if call.is_blocking:
            return
        call.notes[self] = self.moment()
        if self._marks and self._marks[-1][0] == "backward":
            self._issued.append(call)
            self._num_marks = len(self._marks)

    def waiting(self, call: CollectiveCall) -> AbstractContextManager[object]:
        """Return a context that counts the time of a wait as exposed communication."""
        if not self.is_own_thread():  # not part of the run's own steps
            return contextlib.nullcontext()
        if self in call.notes:
            self._flights.append((call.notes.pop(self), self.moment()))
        return self.communicating()


def completed(
    step: StepEvent, seconds: float, parts: Parts, values: Mapping[str, Tensor]
) -> StepEvent:
    """Return a copy of ``step`` with the given duration, phases and ``values`` (loss, metrics)."""
    numbers = {name: value.item() for name, value in values.items()}
    return replace(step, seconds=seconds, parts=parts, loss=numbers.pop("loss"), metrics=numbers)


def seconds_between(begun: Moment, ended: Moment) -> float:
    """Return the seconds between two timestamps that the device has reached."""
    if isinstance(begun, float):
        return float(ended - begun)
    return float(begun.elapsed_time(ended)) / 1000
