"""The clock of an emulated device computes times instead of waiting.  Runs on the ranks.

The length of a computing phase is known when the phase begins.  When the phase has issued a part of
its bytes, the clock has advanced by the same part of this length.  For example, half of DDP's bytes
are issued after half of the backward pass.

A collective begins when the last of its ranks is ready and the link of the group is free.  A
collective takes as long as its messages (see ``ddpnb.protocol.costs``).  A message between two
ranks begins when the sender is ready.
"""

import contextlib
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from ddpnb.compat import torch_internals
from ddpnb.protocol.costs import Cost, algorithm_of, in_turn, num_buckets
from ddpnb.protocol.devices import FORWARD_SHARE
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Parts, StepEvent
from ddpnb.rank.clock import Clock, Moment, Phase, completed
from ddpnb.rank.collectives.shared_memory import Board, SharedSums
from ddpnb.rank.collectives.table import CollectiveCall
from ddpnb.rank.emulation import Emulation

LEAST_BYTES: Final = 1 << 14
"""Minimum number of bytes for a sum in shared memory.  Gloo computes smaller sums equally fast."""
GATHERS = ("all_gather", "broadcast", "scatter")
"""Prefixes of the names of collectives that provide input for the caller's next computation."""
SUMS = ("all_reduce", "reduce", "send")
"""Calls with which strategies send gradients or weights that they have copied to a buffer."""


@dataclass(slots=True, kw_only=True)
class _Pending:
    """An issued collective with an end time that the clock has not computed yet."""

    call: CollectiveCall
    number: int
    num_buckets: int
    seconds: float
    """Seconds that each part of the call takes."""
    is_late: bool
    """True if Python's wait does not count: on a GPU, only the end of the pass would wait."""
    end: float = math.nan


@final
class VirtualClock(Clock):
    """Virtual time of a device, or of the slowest device if a process emulates several devices.

    Args:
        emulation: the emulated devices.
        ranks: the devices of this process.
        path: path prefix of the files that the ranks share in the run folder.
        check: function that raises an error if this rank should stop waiting.
    """

    def __init__(
        self, emulation: Emulation, ranks: range, path: Path, check: Callable[[], None]
    ) -> None:
        super().__init__()
        self.emulation = emulation
        self.scale = emulation.scale
        self._ranks = ranks
        self._path, self._check = path, check
        self._is_paused = False
        """True while exchanges take no time."""
        self._usual_bytes = emulation.scale * emulation.num_bytes
        """Gradient size in bytes.  The clock assumes this size for a phase that has not ended."""
        self._phase: Phase | None = "data"
        self._since = 0.0
        self._spent: dict[str, float] = {}
        self._step = 0
        self._delay_left = 0.0
        self._unplanned = self._forwarded = 0
        """Samples of this step that have not begun a forward pass, or not a backward pass."""
        self._computing: Phase = "forward"
        """The computing phase to which ``_length`` and ``_progress`` belong."""
        self._length, self._progress = 0.0, 1.0
        self._num_issued = self._num_produced = 0.0
        """Bytes that the phase has issued, and bytes of gradients that the phase has produced."""
        self._all_issued: dict[Phase, float] = {}
        """Number of bytes that each phase had issued when the phase last ended."""
        self._copied_share = 0.0
        """Share of the gradients that this step has copied to buffers, from 0 to 1."""
        self._error: UserError | None = None
        """Error of a call that a thread has made; the run's own thread raises it too."""
        self._boards: dict[str, Board] = {}
        self._sums = SharedSums(path, check)
        self._numbers: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)
        """Counters of a group's collectives (key -1), and of the messages between two ranks."""
        self._calls: deque[_Pending] = deque()
        self.ends: deque[float] = deque(maxlen=1000)
        """End times of the latest collectives."""
        self._free: defaultdict[str, float] = defaultdict(float)
        """Time from which each group's links are free, the same on all ranks of the group."""
        self._sends_until = self._receives_until = 0.0
        self._num_gathers = 0
        """Number of gathers in the computing phase."""
        self._gathered_at = 0.0
        """Time at which the computing phase began, or at which its latest gather ended."""

    def close(self) -> None:
        """Remove the files.  Calling ``close`` twice is safe."""
        for board in self._boards.values():
            board.close()
        self._sums.close()

    # -- the steps of a run -------------------------------------------------------------------

    def start(self) -> None:
        """Start to count time, once per run.  A late worker's time starts when the worker joins."""
        self._since = self.seconds
        self._phase, self._spent = "data", {}

    def begin_step(self, num_samples: int) -> None:
        """Begin a step on ``num_samples`` samples of this worker."""
        self._unplanned, self._forwarded, self._copied_share = num_samples, 0, 0.0
        self._delay_left = max(self.emulation.times.delay(rank) for rank in self._ranks)

    def timing(self, step: StepEvent, values: Mapping[str, Tensor]) -> list[StepEvent]:
        """End a step, and return the step with its times."""
        if self._error is not None:
            raise self._error
        self._compute_unplanned()
        self.computed()
        self.enter("data")
        parts, self._spent = Parts(**self._spent), {}
        self._step += 1
        return [completed(step, self.seconds, parts, values)]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """In this context, exchanges take no time, because they do not belong to a step."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    # -- the phases of a step -----------------------------------------------------------------

    def enter(self, phase: Phase | None, at: Moment = None) -> Phase | None:
        """Count the time after ``at`` (default: now) as ``phase``; return the previous phase."""
        before, until = self._phase, self.seconds if at is None else at
        name = before or self._computing
        self._spent[name] = self._spent.get(name, 0.0) + until - self._since
        self._since, self._phase = until, phase
        return before

    def moment(self) -> Moment:
        """Return the virtual time."""
        return self.seconds

    def forward(self, num_samples: int) -> None:
        """Begin a forward pass on ``num_samples`` samples."""
        self._unplanned, self._forwarded = 0, num_samples
        self._compute("forward", num_samples)

    @contextlib.contextmanager
    def _backward(self) -> Iterator[None]:
        """Advance to the end of a backward pass and of the calls that its C++ code waits for.

        If no forward pass was announced, the step's first backward pass is for all samples.
        """
        if not self.is_own_thread() or self._phase == "communication" or self._is_paused:
            yield
            return
        if self._unplanned:
            self.forward(self._unplanned)
        if num_samples := self._forwarded:
            self._forwarded = 0
            self._compute("backward", num_samples)
        yield
        self.computed()

    def _compute(self, phase: Phase, num_samples: int) -> None:
        """Begin a computing phase on ``num_samples`` samples."""
        self._compute_rest()
        if phase == "backward":
            self.seconds += self._delay_left
            self._delay_left = 0.0
        self.enter(phase)
        share = FORWARD_SHARE if phase == "forward" else 1 - FORWARD_SHARE
        self._computing, self._progress, self._num_produced = phase, 0.0, 0.0
        self._length = share * self._work(num_samples)
        self._gathered_at, self._num_gathers = self.seconds, 0
        if phase == "forward" and len(self._ranks) > 1:
            self._length += len(self._ranks) * self.emulation.devices.seconds_per_replica

    def produced(self, num_bytes: int) -> None:
        """Advance until the phase has produced ``num_bytes`` more bytes of gradients."""
        self._num_produced += self.scale * num_bytes
        self._advance(self._num_produced / self._usual_bytes)

    def computed(self) -> None:
        """Advance until the computing phase and all exchanges that it waits for are complete."""
        self._compute_rest()
        waited_for = [each for each in self._calls if each.is_late or each.call.is_in_cpp]
        if waited_for:
            self._settle(waited_for[-1])

    def wait_until(self, end: float) -> None:
        """Advance to a later time, and count the difference as communication."""
        if end > self.seconds:
            with self.communicating():
                self.seconds = end

    def exchange(self, name: str, num_bytes: float, num_devices: int, scale: float = 1.0) -> None:
        """Advance the clock by the time of a collective between this process's devices."""
        algorithm = algorithm_of(name, "nccl")  # only GPUs are the devices of one process
        assert algorithm is not None
        cost = algorithm.of(scale * num_bytes, num_devices)
        self.wait_until(self.seconds + cost.seconds(self.emulation.devices.device_link))

    def _compute_rest(self) -> None:
        """Advance to the end of the current computing phase, if any."""
        if self._progress < 1.0:
            self._advance(1.0)
        if self._num_issued:
            self._all_issued[self._computing], self._num_issued = self._num_issued, 0.0

    def _compute_unplanned(self) -> None:
        """If the step has not begun to compute, advance by the time of a whole step."""
        if self._unplanned:
            with self._backward():
                pass

    def _advance(self, progress: float) -> None:
        progress = min(max(progress, self._progress), 1.0)
        self.seconds += (progress - self._progress) * self._length
        self._progress = progress

    def _work(self, num_samples: int) -> float:
        """Return how many seconds the slowest device of this process computes."""
        each = -(-num_samples // len(self._ranks))
        factors = (self.emulation.times.factor(rank, self._step) for rank in self._ranks)
        return max(factors) * self.emulation.times.work(each)

    # -- collectives --------------------------------------------------------------------------

    def begin(self, call: CollectiveCall) -> None:
        """Post the time at which this rank is ready for a call."""
        if self._is_paused:
            return
        cost = self.count_call(call, self.emulation.devices.backend)
        if call.group.size() == 1:
            return
        if not self.is_own_thread():
            self._error = UserError(
                f"A thread of rank {call.group.rank()} called {call.name}. On emulated devices, "
                "only the thread that runs the step can communicate. Call it in the step, or "
                "remove --devices and --link."
            )
            raise self._error
        self._compute_unplanned()
        if call.name in SUMS:
            self._copy(call)
        if call.collective.is_message:
            self._begin_message(call, cost)
            return
        group, size = call.group, self.scale * call.num_bytes
        is_needed = call.name.startswith(GATHERS)
        ready = self._ready(size, is_needed=is_needed)
        number = next(self._numbers[group.group_name, -1])
        self._board(group.group_name, group.size()).post(number, group.rank(), ready)
        num = num_buckets(size, ready)
        part = call.cost(self.scale / num, self.emulation.devices.backend)
        pending = _Pending(
            call=call,
            number=number,
            num_buckets=num,
            seconds=part.seconds(self.emulation.devices.link_between(call.ranks)),
            is_late=self.gathers_ahead and self._is_late(call, is_needed=is_needed),
        )
        call.notes[self] = partial(self._wait_for, pending)
        self._calls.append(pending)

    def _is_late(self, call: CollectiveCall, *, is_needed: bool) -> bool:
        """Return True for calls of FSDP whose results a GPU does not need at once.

        In a backward pass, FSDP gathers a layer before it computes the layer after.  Only the first
        gather is needed at once.
        """
        if not is_needed:
            return call.name.startswith("reduce_scatter")
        self._num_gathers += 1
        return self._computing == "backward" and self._num_gathers > 1

    def _copy(self, call: CollectiveCall) -> None:
        """Advance by the time that copies to and from buffers add to a step, e.g. DDP's buckets."""
        num = sum(tensor.numel() for tensor in call.tensors)
        share = min(4 * self.scale * num / self._usual_bytes, 1.0 - self._copied_share)
        self._copied_share += share
        self.seconds += share * self.emulation.devices.wrapper_seconds

    def _ready(self, num_bytes: float, *, is_needed: bool) -> tuple[float, float]:
        """Advance to the time of a call; return when the call's first and last bytes are ready.

        ``is_needed`` is True if later computation needs the call's result, as for FSDP's gathers.
        If ``is_needed`` is False, earlier computation has produced the bytes that the call sends.
        """
        if self._progress >= 1.0:
            return self.seconds, self.seconds
        usual = max(self._all_issued.get(self._computing, self._usual_bytes), 1.0)
        begun = self._num_issued / usual
        self._num_issued += num_bytes
        first = self.seconds
        self._advance(begun if is_needed else self._num_issued / usual)
        if not is_needed:
            return first, self.seconds
        if self.gathers_ahead and self._computing == "forward":
            return self._gathered_at, self._gathered_at
        ahead = [
            each for each in self._calls if each.is_late and each.call.name.startswith(GATHERS)
        ]
        if ahead:  # the next layer needs it now
            self._settle(ahead[-1])
        return self.seconds, self.seconds

    def make(self, call: CollectiveCall) -> Any:
        """Make an all-reduce in shared memory if it sums one large float tensor on the CPU."""
        tensors, arguments = call.tensors, call.arguments
        if call.name != "all_reduce" or call.group.size() == 1 or len(tensors) != 1:
            return None
        if len(arguments) < 2 or not torch_internals.is_sum(arguments[1]) or not _fits(tensors[0]):
            return None
        self._sums.add(call.group, tensors[0].detach().view(-1))
        return torch_internals.lone_group().allreduce(tensors)

    @contextlib.contextmanager
    def waiting(self, call: CollectiveCall) -> Iterator[None]:
        """Advance to the end of a call that Python code has waited for."""
        yield
        if settle := call.notes.pop(self, None):
            settle()

    def _wait_for(self, pending: _Pending) -> None:
        """Advance the clock to the end of a call that Python code has waited for."""
        if not pending.is_late or self._progress >= 1.0:
            self._settle(pending)

    def _settle(self, last: _Pending) -> None:
        """Advance the clock to a call's end, after computing the ends of all earlier calls."""
        while math.isnan(last.end):
            self._end(self._calls.popleft())
        self.wait_until(last.end)
        if last.call.name.startswith(GATHERS):
            self._gathered_at = self.seconds

    def _end(self, pending: _Pending) -> None:
        """Compute the end of a call.  Count the call's time up to now as hidden communication."""
        name, num_ranks = pending.call.group.group_name, pending.call.group.size()
        board = self._board(name, num_ranks)
        ready = [board.read(pending.number, place) for place in range(num_ranks)]
        now = self.seconds
        for begin, end in in_turn(pending.seconds, pending.num_buckets, ready, self._free[name]):
            hidden = min(end, now) - min(begin, now)
            self._spent["hidden"] = self._spent.get("hidden", 0.0) + hidden
            self._free[name] = pending.end = end
        self.ends.append(pending.end)

    # -- messages -----------------------------------------------------------------------------

    def _begin_message(self, call: CollectiveCall, cost: Cost) -> None:
        """Post the time at which a message is sent, or prepare to wait for a message."""
        self.computed()
        if call.collective.is_from_any:
            return  # the sender is not known yet
        name, size, is_sent = call.group.group_name, call.group.size(), call.name == "send"
        own, other = call.group.rank(), call.arguments[1]
        link = self.emulation.devices.link_between([call.ranks[own], call.ranks[other]])
        seconds = cost.seconds(link) - link.latency_seconds
        place = own * size + other if is_sent else other * size + own
        board, numbers = self._board(f"{name}.m", size * size), self._numbers[name, place]
        if is_sent:
            departs = max(self.seconds, self._sends_until)
            self._sends_until = departs + seconds
            board.post(next(numbers), place, (departs, departs))
            call.notes[self] = partial(self.wait_until, self._sends_until)
            return

        def receive() -> None:  # messages arrive in the order in which the caller waits for them
            departed, _ = board.read(next(numbers), place)
            begins = max(departed + link.latency_seconds, self._receives_until)
            self._receives_until = begins + seconds
            self.wait_until(self._receives_until)

        call.notes[self] = receive

    def _board(self, group: str, num_places: int) -> Board:
        if group not in self._boards:
            path = self._path.with_name(f"{self._path.name}.{group}.clock")
            self._boards[group] = Board(path, num_places, self._check)
        return self._boards[group]


def _fits(tensor: Tensor) -> bool:
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    is_exact = tensor.dtype in (torch.float32, torch.float64)
    return is_plain and is_exact and tensor.is_contiguous() and tensor.nbytes >= LEAST_BYTES
