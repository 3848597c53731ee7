"""Records when each step ends, the step's loss, and the seconds of each phase.  Runs on the ranks.

The measurements never make the device wait.  On a CPU, a timestamp is the time of the host's clock.
The Python thread submits a step, and a GPU executes the step later.  So on a GPU, a timestamp is a
CUDA event, and each step queues a copy of its loss.  ddpnb reads the event and the copy a few steps
later, after the GPU has finished the step.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor

from ddpnb.protocol.messages import Parts, StepEvent
from ddpnb.rank.meter import Meter, Moment, Phase, completed, synchronize

MAX_PENDING = 8
"""Maximum number of steps that the Python thread may be ahead of a GPU."""


class _Pending(NamedTuple):
    step: StepEvent
    marks: list[tuple[Phase, Moment]]
    """The step's phases, each with the timestamp of its start.  The last mark ends the step."""
    hidden: list[tuple[Moment, Moment]]
    values: Mapping[str, Tensor]
    """The loss and the metrics, in the host's memory; valid after the device has done the step."""

    def parts(self) -> Parts:
        spent: dict[str, float] = {}
        for (part, begun), (_, ended) in zip(self.marks, self.marks[1:], strict=False):
            spent[part] = spent.get(part, 0.0) + seconds_between(begun, ended)
        return Parts(**spent, hidden=sum(seconds_between(*moments) for moments in self.hidden))


@final
class Clock(Meter):
    """Measures all steps of a run with the device's own clock.

    ``Clock`` adds up the seconds between successive timestamps, because ``elapsed_time`` returns
    milliseconds as a float32.  After a quarter of an hour, such a float32 has a resolution of only
    0.1 ms (torch.cuda.Event, CUDA's cudaEventElapsedTime).
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._on_gpu = device.type == "cuda"
        self.num_steps_ahead = MAX_PENDING + 1 if self._on_gpu else 0
        """Maximum number of steps that a rank may begin before an earlier step has ended."""
        self.seconds = 0.0
        """Seconds from ``start`` to the end of the last finished step, or to a call of ``end``."""
        self._marks: list[tuple[Phase, Moment]] = []
        self._hidden: list[tuple[Moment, Moment]] = []
        self._pending: deque[_Pending] = deque()

    def begin(self, phase: Phase, at: Moment = None) -> Phase:
        """Begin a phase that starts after all work that is queued on the device so far."""
        before = self._marks[-1][0] if self._marks else "data"
        self._marks.append((phase, self.moment() if at is None else at))
        return before

    def moment(self) -> Moment:
        """Return a timestamp: the host's time, or an event on the GPU's current stream."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def hide(self, begun: Moment, ended: Moment) -> None:
        """Count the communication between two timestamps as hidden."""
        self._hidden.append((begun, ended))

    def start(self) -> None:
        """Wait until the device has done its work, then start counting time."""
        synchronize(self._device)
        self._marks, self._hidden = [], []
        self.begin("data")

    def timing(self, step: StepEvent, values: Mapping[str, Tensor]) -> list[StepEvent]:
        """Record the loss and metrics of a step; return the steps that the device has finished."""
        held = {name: value.to("cpu", non_blocking=True) for name, value in values.items()}
        self.begin("data")
        self._pending.append(_Pending(step, self._marks, self._hidden, held))
        self._marks, self._hidden = [self._marks[-1]], []
        if len(self._pending) > MAX_PENDING:
            self._pending[0].marks[-1][1].synchronize()
        return self._finished()

    def stop(self) -> list[StepEvent]:
        """Wait until the device has done its work; return the remaining finished steps."""
        synchronize(self._device)
        return self._finished()

    def end(self) -> None:
        """Wait until the device is done; add the time since the last step to ``seconds``."""
        last = self.moment()
        synchronize(self._device)
        self.seconds += seconds_between(self._marks[0][1], last)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time in this context.  Call ``stop`` before you enter the context."""
        try:
            yield
        finally:
            self.start()

    def _finished(self) -> list[StepEvent]:
        steps = []
        while self._pending and _is_reached(self._pending[0].marks[-1][1]):
            done = self._pending.popleft()
            parts = done.parts()
            self.seconds += sum(parts) - parts.hidden
            steps.append(completed(done.step, self.seconds, parts, done.values))
        return steps


def seconds_between(begun: Moment, ended: Moment) -> float:
    """Return the seconds between two timestamps that the device has reached."""
    if isinstance(begun, float):
        return float(ended - begun)
    return float(begun.elapsed_time(ended)) / 1000


def _is_reached(moment: Moment) -> bool:
    return isinstance(moment, float) or bool(moment.query())
