"""What do the messages of ``fully_shard`` carry, and how long do ranks wait?  (Every rank.)

Gloo's collectives keep the thread until they are done, on CPUs and on GPUs: all their time is
exposed, with what they wait for other ranks, and none is hidden.  Copying parameters into a
message and out of it counts as the pass that needs them.

NCCL's run on streams of their own.  Each counts as hidden from its start to its end, also
while the GPU waits for it: where that is, torch lets nobody know.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from ddpnb.rank.strategies.timer import Moment, Part, Timer

Flight = Callable[[], AbstractContextManager[None]]
"""Makes the context that a collective is called in."""

NCCL_NOTE = (
    "fsdp over NCCL: all communication counts as overlapped, also where the GPU waits for it."
)


@final
class Messages:
    """The all-gathers and reduce-scatters of one rank: torch's own, but counted and timed.

    Args:
        timer: whom to tell.
        device: where the parameters are.
    """

    def __init__(self, timer: Timer, device: torch.device) -> None:
        resumed = _Resumed(timer)
        self.timer: Timer = resumed
        """Whom to tell of all else: so it is known what a message interrupts."""
        self.is_exposed = dist.get_backend() == "gloo"
        self._flight = _exposed(resumed, device) if self.is_exposed else _hidden(timer)
        self._num_bytes = 0

    def carry(self, layer: Any) -> None:
        """Be the messages of a layer that was fully sharded."""
        layer.set_custom_all_gather(_AllGather(self))
        layer.set_custom_reduce_scatter(_ReduceScatter(self))

    def take_num_bytes(self) -> int:
        """Return the bytes that this rank has sent since it was last asked."""
        taken, self._num_bytes = self._num_bytes, 0
        return taken

    def under_way(self, part: Tensor, group: dist.ProcessGroup) -> AbstractContextManager[None]:
        """Return the context of a collective that sends as much as ``part`` to each other rank."""
        self._num_bytes += (group.size() - 1) * part.numel() * part.element_size()
        return self._flight()


class _Comm:
    """What torch wants of both: it looks at no base class."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)


@final
class _AllGather(_Comm):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._messages.under_way(input_tensor, group):
            work: dist.Work | None = dist.all_gather_single(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        return work


@final
class _ReduceScatter(_Comm):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._messages.under_way(output_tensor, group):
            work: dist.Work | None = dist.reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        return work


@final
class _Resumed(Timer):
    """A timer that knows what it counts to, so that it can go on with it."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self.part: Part = "data"

    def begin(self, part: Part, at: Moment = None) -> None:
        """Note the part."""
        self.part = part
        self._timer.begin(part, at)

    def moment(self, seconds_ago: float = 0.0) -> Moment:
        """Return the timer's."""
        return self._timer.moment(seconds_ago)

    def hide(self, begun: Moment, ended: Moment) -> None:
        """Tell the timer."""
        self._timer.hide(begun, ended)


def _exposed(timer: _Resumed, device: torch.device) -> Flight:
    """Count a flight as communication, and what follows as what was before."""
    computing = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def moment() -> Moment:
        # Torch calls collectives on streams of their own; what waits is where it computes.
        with torch.cuda.stream(computing) if computing is not None else nullcontext():
            return timer.moment()

    @contextmanager
    def flight() -> Iterator[None]:
        before = timer.part
        timer.begin("communication", at=moment())
        try:
            yield
        finally:
            timer.begin(before, at=moment())

    return flight


def _hidden(timer: Timer) -> Flight:
    """Count a flight as hidden, on the stream that it is on."""

    @contextmanager
    def flight() -> Iterator[None]:
        begun = timer.moment()
        yield
        timer.hide(begun, timer.moment())

    return flight
