"""The clock of an emulated device computes times instead of waiting.  Runs on the ranks.

The length of a compute phase is known when the phase begins.  When the phase has issued a part of
its bytes, the clock has advanced by the same part of this length.  For example, half of DDP's bytes
are issued after half of the backward pass.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import final

from torch import Tensor

from ddpnb.protocol.costs import Messages
from ddpnb.protocol.devices import FORWARD_SHARE
from ddpnb.protocol.messages import Parts, StepEvent
from ddpnb.rank.laboratory import Laboratory
from ddpnb.rank.meter import Meter, Moment, Phase, completed


@final
class VirtualClock(Meter):
    """Virtual time of a device, or of the slowest device if a process emulates several devices."""

    num_steps_ahead = 0

    def __init__(self, laboratory: Laboratory, ranks: range) -> None:
        super().__init__()
        self.seconds = 0.0
        """Virtual seconds since the run began."""
        self.is_paused = False
        """True while exchanges take no time."""
        self.laboratory = laboratory
        self.scale = laboratory.scale
        self._ranks = ranks
        self._usual_bytes = laboratory.scale * laboratory.num_bytes
        """Gradient size in bytes.  ddpnb assumes this size for a phase that has not ended yet."""
        self._phase: Phase = "data"
        self._since = 0.0
        self._spent: dict[str, float] = {}
        self._step = 0
        self._delay_left = 0.0
        self.settle: Callable[[], None] = lambda: None
        """Function that advances the clock to the end of the exchanges that C++ code waited for."""
        self._unplanned = 0
        """Number of samples of the current step; 0 after its first compute phase has begun."""
        self._computing: Phase = "data"
        """The compute phase to which ``_length`` and ``_progress`` belong."""
        self._length, self._progress = 0.0, 1.0
        self._num_issued = self._num_produced = 0.0
        """Bytes that the phase has issued, and bytes of gradients that the phase has produced."""
        self._all_issued: dict[Phase, float] = {}
        """Number of bytes that each phase had issued when the phase last ended."""

    # -- a step -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start to count time, once per run.  A late worker's time starts when the worker joins."""
        self._since = self.seconds
        self._phase, self._spent = "data", {}

    def begin_step(self, num_samples: int) -> None:
        """Begin a step on ``num_samples`` samples of this worker."""
        self._unplanned = num_samples
        self._delay_left = max(self.laboratory.times.delay(rank) for rank in self._ranks)

    def begin(self, phase: Phase, at: Moment = None) -> Phase:
        """Count the time after ``at`` (default: now) as ``phase``; return the previous phase."""
        before, until = self._phase, self.seconds if at is None else at
        self._spent[before] = self._spent.get(before, 0.0) + until - self._since
        self._since, self._phase = until, phase
        return before

    def compute(self, phase: Phase, num_samples: int) -> None:
        """Begin a compute phase on ``num_samples`` samples."""
        self._unplanned = 0
        self._compute_rest()
        if phase == "backward":
            self.seconds += self._delay_left
            self._delay_left = 0.0
        self.begin(phase)
        share = FORWARD_SHARE if phase == "forward" else 1 - FORWARD_SHARE
        self._computing, self._progress, self._num_produced = phase, 0.0, 0.0
        self._length = share * self._work(num_samples)
        if phase == "forward" and len(self._ranks) > 1:
            self._length += len(self._ranks) * self.laboratory.devices.seconds_per_replica

    def produced(self, num_bytes: int) -> None:
        """Advance until the phase has produced ``num_bytes`` more bytes of gradients."""
        self._num_produced += self.scale * num_bytes
        self._advance(self._num_produced / self._usual_bytes)

    def computed(self) -> None:
        """Advance until the compute phase and all exchanges that C++ has issued are complete."""
        self._compute_unplanned()
        self._compute_rest()
        self.settle()

    def moment(self) -> Moment:
        """Return the virtual time."""
        return self.seconds

    def hide(self, begun: Moment, ended: Moment) -> None:
        """Count the time between two virtual times as hidden communication."""
        self._spent["hidden"] = self._spent.get("hidden", 0.0) + ended - begun

    def timing(self, step: StepEvent, values: Mapping[str, Tensor]) -> list[StepEvent]:
        """End a step, and return the step with its times."""
        self.computed()
        self.begin("data")
        parts, self._spent = Parts(**self._spent), {}
        self._step += 1
        return [completed(step, self.seconds, parts, values)]

    def stop(self) -> list[StepEvent]:
        """Return an empty list, because ``timing`` has already returned every step."""
        return []

    def end(self) -> None:
        """Do nothing, because ``seconds`` already includes the time after the last step."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """In this context, exchanges take no time, because they do not belong to a step."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    # -- computing and exchanging -----------------------------------------------------------

    def issue(self, num_bytes: float, *, is_needed: bool) -> tuple[float, float]:
        """Advance to the time of a call; return when the call's first and last bytes are ready.

        ``is_needed`` is True if later computation needs the call's result, as for FSDP's gathers.
        If ``is_needed`` is False, earlier computation has produced the bytes that the call sends.
        """
        self._compute_unplanned()
        if self._progress >= 1.0:
            return self.seconds, self.seconds
        usual = max(self._all_issued.get(self._computing, self._usual_bytes), 1.0)
        begun = self._num_issued / usual
        self._num_issued += num_bytes
        first = self.seconds
        self._advance(begun if is_needed else self._num_issued / usual)
        return (self.seconds if is_needed else first), self.seconds

    def _compute_rest(self) -> None:
        """Advance to the end of the current compute phase, if any."""
        if self._progress < 1.0:
            self._advance(1.0)
        if self._num_issued:
            self._all_issued[self._computing], self._num_issued = self._num_issued, 0.0

    def _compute_unplanned(self) -> None:
        """If the strategy has not begun a compute phase, advance by the time of a whole step."""
        num_samples, self._unplanned = self._unplanned, 0
        if num_samples:
            self.compute("forward", num_samples)
            self.compute("backward", num_samples)
            self._compute_rest()

    def exchange(self, num_messages: int, num_bytes: float, *, is_scaled: bool = True) -> None:
        """Advance the clock by the time that this process's devices need to send the messages."""
        messages = Messages(num_messages, num_bytes * (self.scale if is_scaled else 1.0))
        self.wait_until(self.seconds + messages.seconds(self.laboratory.devices.device_link))

    def wait_until(self, end: float) -> None:
        """Advance to a later time, and count the difference as communication."""
        if end > self.seconds:
            before = self.begin("communication")
            self.seconds = end
            self.begin(before)

    def _advance(self, progress: float) -> None:
        progress = min(max(progress, self._progress), 1.0)
        self.seconds += (progress - self._progress) * self._length
        self._progress = progress

    def _work(self, num_samples: int) -> float:
        """Return how many seconds the slowest device of this process computes."""
        each = -(-num_samples // len(self._ranks))
        factors = (self.laboratory.times.factor(rank, self._step) for rank in self._ranks)
        return max(factors) * self.laboratory.times.work(each)
