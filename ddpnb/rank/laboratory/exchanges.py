"""Computes how long ``torch.distributed`` calls take on emulated devices.  Runs on the ranks.

A collective begins when the last of its ranks is ready and this rank's link is free.  A collective
takes as long as its messages (see ``ddpnb.protocol.costs``).  A message between two ranks begins
when the sender is ready.  The interceptor gets all calls, for example from DDP's C++ code, from
FSDP and from the user's own code.
"""

import contextlib
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from ddpnb.compat import torch_internals
from ddpnb.protocol.costs import Messages, in_turn, num_parts
from ddpnb.rank.collectives.board import Board
from ddpnb.rank.collectives.intercept import Listener
from ddpnb.rank.collectives.sums import SharedSums
from ddpnb.rank.collectives.table import Call
from ddpnb.rank.laboratory.clock import VirtualClock

LEAST_BYTES: Final = 1 << 14
"""Minimum number of bytes for a sum in shared memory.  Gloo computes smaller sums equally fast."""
GATHERS = ("all_gather", "broadcast", "scatter")
"""Prefixes of the names of collectives that provide input for the caller's next computation."""


@dataclass(slots=True, kw_only=True)
class _Pending:
    """An issued call with an end time that ddpnb has not computed yet."""

    call: Call
    board: Board
    number: int
    num_parts: int
    seconds: float
    """Seconds that each part of the call takes."""
    end: float = math.nan


@final
@dataclass(eq=False)
class Exchanges(Listener):
    """Advances a rank's clock by the time of the rank's exchanges."""

    clock: VirtualClock
    """The clock of this rank's device."""
    path: Path
    """Path prefix of the files that the ranks share in the run folder."""
    check: Callable[[], None]
    """Function that raises an error if this rank should stop waiting."""

    def __post_init__(self) -> None:
        laboratory = self.clock.laboratory
        self._devices = laboratory.devices
        self._wrapper_seconds = self._devices.wrapper_seconds / max(laboratory.num_bytes, 1)
        """Seconds per byte of the gradients that DDP itself adds to a step."""
        self.clock.settle = self._settle_cpp
        self._boards: dict[str, Board] = {}
        self._sums = SharedSums(self.path, self.check)
        self._numbers: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)
        """Counters of a group's collectives (key -1), and of the messages between two ranks."""
        self._pending: deque[_Pending] = deque()
        self.ends: deque[float] = deque(maxlen=1000)
        """End times of the latest collectives."""
        self._free = 0.0
        """Time from which this rank's link is free for the next collective."""
        self._sends_until = self._receives_until = 0.0

    def begin(self, call: Call) -> None:
        """Post the time at which this rank is ready for a call."""
        if self.clock.is_paused:
            return
        sent, received = call.traffic
        scale = self.clock.scale
        self.clock.count(sent=round(sent * scale), received=round(received * scale))
        if call.group.size() == 1:
            return
        if call.collective.is_message:
            self._begin_message(call)
            return
        group, messages = call.group, call.messages
        is_needed = call.name.startswith(GATHERS)
        size = call.num_bytes * scale
        is_of_ddp = call.is_in_cpp and not call.is_blocking
        if is_of_ddp:
            self.clock.seconds += self._wrapper_seconds * call.num_bytes
        ready = self.clock.issue(size, is_needed=is_needed)
        board = self._board(group.group_name, group.size())
        number = next(self._numbers[group.group_name, -1])
        board.post(number, group.rank(), ready)
        num = num_parts(size, ready)
        part = Messages(messages.number, messages.num_bytes * scale / num)
        pending = _Pending(
            call=call,
            board=board,
            number=number,
            num_parts=num,
            seconds=part.seconds(self._devices.link_between(call.ranks)),
        )
        call.notes[self] = partial(self._settle, pending)
        self._pending.append(pending)

    def make(self, call: Call) -> Any:
        """Make an all-reduce in shared memory if it sums one large float tensor on the CPU."""
        tensors, arguments = call.tensors, call.arguments
        if call.name != "all_reduce" or call.group.size() == 1 or len(tensors) != 1:
            return None
        if len(arguments) < 2 or not torch_internals.is_sum(arguments[1]) or not _fits(tensors[0]):
            return None
        self._sums.add(call.group, tensors[0].detach().view(-1))
        return torch_internals.lone_group().allreduce(tensors)

    @contextlib.contextmanager
    def waiting(self, call: Call) -> Iterator[None]:
        """Advance to the end of a call that Python code has waited for."""
        yield
        if self in call.notes:
            call.notes[self]()

    def _settle(self, last: _Pending) -> None:
        """Advance the clock to a call's end, after computing the ends of all earlier calls."""
        while math.isnan(last.end):
            self._end(self._pending.popleft())
        self.clock.wait_until(last.end)

    def _settle_cpp(self) -> None:
        """Advance the clock to the end of all calls that C++ code has waited for."""
        waited_for = [each for each in self._pending if each.call.is_in_cpp]
        if waited_for:
            self._settle(waited_for[-1])

    def _end(self, pending: _Pending) -> None:
        """Compute the end of a call.  Count the call's time up to now as hidden communication."""
        places = range(pending.call.group.size())
        ready = [pending.board.read(pending.number, place) for place in places]
        now = self.clock.seconds
        for begin, end in in_turn(pending.seconds, pending.num_parts, ready, self._free):
            self.clock.hide(min(begin, now), min(end, now))
            self._free = pending.end = end
        self.ends.append(pending.end)

    # -- messages ---------------------------------------------------------------------------

    def _begin_message(self, call: Call) -> None:
        """Post the time at which a message is sent, or prepare to wait for a message."""
        self.clock.computed()
        if call.collective.is_from_any:
            return  # the sender is not known yet
        name, size, is_sent = call.group.group_name, call.group.size(), call.name == "send"
        own, other = call.group.rank(), call.arguments[1]
        link = self._devices.link_between([call.ranks[own], call.ranks[other]])
        seconds = Messages(0, self.clock.scale * call.num_bytes).seconds(link)
        place = own * size + other if is_sent else other * size + own
        board, numbers = self._board(f"{name}.m", size * size), self._numbers[name, place]
        if is_sent:
            departs = max(self.clock.seconds, self._sends_until)
            self._sends_until = departs + seconds
            board.post(next(numbers), place, (departs, departs))
            call.notes[self] = partial(self.clock.wait_until, self._sends_until)
            return

        def receive() -> None:  # messages arrive in the order in which the caller waits for them
            departed, _ = board.read(next(numbers), place)
            begins = max(departed + link.latency_seconds, self._receives_until)
            self._receives_until = begins + seconds
            self.clock.wait_until(self._receives_until)

        call.notes[self] = receive

    def close(self) -> None:
        """Remove the files.  Calling ``close`` twice is safe."""
        for board in self._boards.values():
            board.close()
        self._sums.close()

    def _board(self, group: str, num_places: int) -> Board:
        if group not in self._boards:
            path = self.path.with_name(f"{self.path.name}.{group}.clock")
            self._boards[group] = Board(path, num_places, self.check)
        return self._boards[group]


def _fits(tensor: Tensor) -> bool:
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    is_exact = tensor.dtype in (torch.float32, torch.float64)
    return is_plain and is_exact and tensor.is_contiguous() and tensor.nbytes >= LEAST_BYTES
