"""An emulated network: how long do exchanges last, and when do they end?  (ranks)

Each rank has one link to all others, with a latency (one way) and a rate in each direction.  A
message of n bytes takes latency + n / rate; messages that go through one end in one direction
follow each other.  This is the model of Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", IJHPCA 19(1), 2005, section 3, where the lists of messages
below are from; the ring's is in Patarasuk and Yuan, JPDC 69(2), 2009.

Exchanges are really made, in the host's memory, and end as late as over that network.  Who waits
sleeps, so that the cores are free, as they are where a network card does the work.  A file that all
ranks of the host map lines up the messages between two ranks.  ``collectives.emulated_link`` lines
up the collectives, in each rank for itself.
"""

import contextlib
import fcntl
import math
import mmap
import os
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, final

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import LinkSpec
from ddpnb.rank.errors import ConsequenceError

# -- the model: lists of messages ----------------------------------------------------------


class Messages(NamedTuple):
    """What follows each other on the busiest link of an exchange."""

    number: float
    num_bytes: float = 0.0
    """Of all of them."""

    def seconds(self, spec: LinkSpec) -> float:
        """Return how long they take."""
        return self.number * spec.latency_seconds + self.num_bytes * 8 / spec.bits_per_second


def all_reduce(size: int, num_ranks: int) -> Messages:
    """Around the ring twice, an N-th of ``size`` bytes in each message."""
    number = 2 * (num_ranks - 1)
    return Messages(number, number * size / num_ranks)


def ring(part: float, num_ranks: int) -> Messages:
    """Around the ring once, ``part`` bytes in each message: all-gather and reduce-scatter."""
    return Messages(num_ranks - 1, (num_ranks - 1) * part)


def tree(size: int, num_ranks: int) -> Messages:
    """Down a binomial tree of all ranks, or up: broadcast and reduce."""
    rounds = math.ceil(math.log2(num_ranks))
    return Messages(rounds, rounds * size)


def rooted(part: int, num_ranks: int) -> Messages:
    """``part`` bytes to or from each other rank, along such a tree: gather and scatter."""
    return Messages(math.ceil(math.log2(num_ranks)), (num_ranks - 1) * part)


def _ring_of_whole(size: int, num_ranks: int) -> Messages:
    return ring(size / num_ranks, num_ranks)


COLLECTIVES: Mapping[str, Callable[[int, int], Messages]] = {
    "allreduce_": all_reduce,
    "allreduce_coalesced_": all_reduce,
    "broadcast_": tree,
    "reduce_": tree,
    "allgather_": ring,
    "_allgather_base_": ring,
    "allgather_coalesced_": ring,
    "allgather_into_tensor_coalesced_": ring,
    "gather_": rooted,
    "scatter_": rooted,
    "reduce_scatter_": ring,
    "_reduce_scatter_base_": _ring_of_whole,
    "reduce_scatter_tensor_coalesced_": _ring_of_whole,
    "alltoall_": _ring_of_whole,
    "alltoall_base_": _ring_of_whole,
    "barrier": tree,
}
"""By the operation in torch's dispatcher: the messages, for the bytes of the tensors by which
``collectives.table.METHODS`` compares it, which are a part or the whole."""


# -- a rank's link -------------------------------------------------------------------------


class Link(ABC):
    """What a strategy uses where its exchanges are not calls of ``torch.distributed``."""

    @abstractmethod
    def message(self, source: int, target: int, num_bytes: int) -> None:
        """Return when a message that now begins has come from one rank to another."""

    @abstractmethod
    def swap(self, one: int, other: int, num_bytes: int) -> None:
        """Return when two ranks have requested and exchanged as many bytes, in both directions."""

    @abstractmethod
    def lasting(self, messages: Messages) -> contextlib.AbstractContextManager[None]:
        """Have the body last as long as messages, at least; the link is not otherwise in use."""


@final
class NoLink(Link):
    """No network is emulated: nothing lasts longer than it does."""

    def message(self, source: int, target: int, num_bytes: int) -> None:
        """Return at once."""

    def swap(self, one: int, other: int, num_bytes: int) -> None:
        """Return at once."""

    def lasting(self, messages: Messages) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()


NO_LINK: Final = NoLink()

_emulated: "EmulatedLink | None" = None
"""This process's, while a run trains over one."""


def is_exchanging() -> bool:
    """Return whether this rank waits for an emulated link: then it does not wait for others."""
    return _emulated is not None and time.monotonic() < _emulated.busy_until


@final
class EmulatedLink(Link):
    """The link of one rank, in a run whose ranks are all on this host.

    Args:
        spec: the same for all ranks.
        path: of the file in which ranks note their exchanges; the first to come creates it.
        world_size: number of ranks.
    """

    def __init__(self, spec: LinkSpec, path: Path, world_size: int) -> None:
        self.spec = spec
        self.busy_until = 0.0
        """The end, on the host's monotonic clock, of the last exchange that waits for the link."""
        self._cancelled = threading.Event()
        self.timeline = Timeline(path, world_size)

    def message(self, source: int, target: int, num_bytes: int) -> None:
        """Sleep until the message has come."""
        self.sleep_until(
            self.timeline.reserve([(source, target)], num_bytes * 8 / self.spec.bits_per_second)
            + self.spec.latency_seconds
        )

    def swap(self, one: int, other: int, num_bytes: int) -> None:
        """Sleep until both messages have come: a request, then both ways at once."""
        self.sleep_until(
            self.timeline.reserve(
                [(one, other), (other, one)], num_bytes * 8 / self.spec.bits_per_second
            )
            + 2 * self.spec.latency_seconds
        )

    @contextlib.contextmanager
    def lasting(self, messages: Messages) -> Iterator[None]:
        """Sleep after the body, if it took less."""
        end = time.monotonic() + messages.seconds(self.spec)
        yield
        self.sleep_until(end)

    def sleep_until(self, end: float) -> None:
        """Sleep until a time of the monotonic clock.

        Raises:
            ConsequenceError: the group was aborted.
        """
        self.note_end(end)
        self._cancelled.wait(max(0.0, end - time.monotonic()))
        self.check()

    def note_end(self, end: float) -> None:
        """Note that an exchange of this rank ends then."""
        self.busy_until = max(self.busy_until, end)

    @property
    def is_cancelled(self) -> bool:
        """Whether the group was aborted."""
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raise if the group was aborted."""
        if self.is_cancelled:
            raise ConsequenceError("This rank was freed from its wait.")

    def cancel(self) -> None:
        """End all sleep, present and future; from any thread."""
        self.busy_until = 0.0
        self._cancelled.set()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Be this process's link in the body; then remove the file."""
        global _emulated
        _emulated = self
        try:
            yield
        finally:
            _emulated = None
            self.timeline.close()


# -- until when is each link in use --------------------------------------------------------

_ENDS: Final = struct.Struct("<dd")
"""Until when a rank sends, and until when it receives."""


@final
class Timeline:
    """Until when each rank's link is in use, in a file that all ranks of the host map.

    Raises ``UserError`` where there is no room for it.  Times are of the host's monotonic clock.
    """

    def __init__(self, path: Path, world_size: int) -> None:
        self._path = path
        self._lock = threading.Lock()  # a record lock is a process's, whichever thread has it
        size = world_size * _ENDS.size
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(self._descriptor, 0, size)  # else a full disk would end the process
        except OSError as error:
            os.close(self._descriptor)
            path.unlink(missing_ok=True)
            raise UserError(
                f"There is no room for {size} bytes of shared memory in {path.parent}, "
                "which --link needs; free some."
            ) from error
        self._map = mmap.mmap(self._descriptor, size)

    def reserve(self, pairs: Collection[tuple[int, int]], seconds: float) -> float:
        """Use the links from one rank to another, as soon as all are free; return until when."""
        with self._locked():
            start = time.monotonic()
            for source, target in pairs:
                start = max(start, self._ends(source)[0], self._ends(target)[1])
            end = start + seconds
            for source, target in pairs:
                _ENDS.pack_into(self._map, source * _ENDS.size, end, self._ends(source)[1])
                _ENDS.pack_into(self._map, target * _ENDS.size, self._ends(target)[0], end)
            return end

    def close(self) -> None:
        """Remove the file; may be called twice."""
        if not self._map.closed:
            self._map.close()
            os.close(self._descriptor)
            self._path.unlink(missing_ok=True)

    def _ends(self, rank: int) -> tuple[float, float]:
        sends, receives = _ENDS.unpack_from(self._map, rank * _ENDS.size)
        return sends, receives

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, 0)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 0)
