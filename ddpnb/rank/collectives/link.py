"""An emulated network: exchanges are real, and end as late as over it (ranks).

The backend really makes an exchange.  It ends as late as over the link: when the link is free of
what came before, it takes the time of the exchange's messages (``costs``) from there, or from the
real end.  Who waits sleeps, so that the cores are free, as they are where a network card does the
work.  Each rank keeps that time for itself, as a collective ends for all its ranks at about one
time; only the messages to one rank, which may come from many, are lined up among all ranks, in a
file that all ranks of the host map.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Final, final

import torch.distributed as dist

from ddpnb.compat import torch_internals
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import LinkSpec, parse_link
from ddpnb.rank.cancellation import CancellationToken, ConsequenceError
from ddpnb.rank.collectives.costs import Messages
from ddpnb.rank.collectives.intercept import Listener, listening
from ddpnb.rank.collectives.table import ANY_SOURCE, Call


def check(device: str) -> None:
    """Refuse an emulated link where the end of an exchange cannot be delayed.

    Raises:
        UserError: on a GPU, which does not wait for the host, or with an unknown torch.
    """
    if device != "cpu":
        raise UserError(
            "--link emulates a network between ranks on CPUs: %ddp_start --device cpu, "
            "or leave --link out."
        )
    for probe in (torch_internals.intercepts_collectives, torch_internals.delays_collectives):
        if not probe.works:
            raise UserError(f"{probe.sentence}; leave --link out.")


@contextlib.contextmanager
def opened(
    given: str, path: Path, world_size: int, cancellation: CancellationToken
) -> Iterator["Link"]:
    """Return a context in which all exchanges of this process go over a link as the user gave it.

    Args:
        given: such as ``"1Gbit,1ms"``; empty: there is no link to emulate.
        path: of a file that the ranks of this host share.
        world_size: the number of all ranks.
        cancellation: ends waits.
    """
    if not given:
        yield NO_LINK
        return
    link = EmulatedLink(parse_link(given), path, world_size)
    with over(link, cancellation):
        yield link


@contextlib.contextmanager
def over(link: "EmulatedLink", cancellation: CancellationToken) -> Iterator[None]:
    """Return a context in which all exchanges of this process go over a link."""
    with link.opened(), cancellation.held(link.cancel), listening(_Linked(link)):
        yield


@final
class _Linked(Listener):
    """Holds the end of each exchange back until the link is done with it."""

    def __init__(self, link: "EmulatedLink") -> None:
        self._link = link
        self._free_at = 0.0
        """When this rank's link is done with all that has ended, on the monotonic clock."""
        self._lock = threading.Lock()

    def begin(self, call: Call) -> None:
        """Refuse a message from anybody: the link leads from one rank to another."""
        if call.collective is ANY_SOURCE:
            raise UserError("--link needs to know where a message comes from: recv(tensor, src=0).")

    def ended(self, call: Call) -> None:
        """Have the link carry what the backend has exchanged."""
        spec, messages = self._link.spec, call.messages
        if not messages.number:
            return
        if call.collective.is_message and call.name == "recv":
            assert call.peer is not None
            transfer = messages._replace(number=0).seconds(spec)
            arrived = self._link.timeline.reserve(call.peer, dist.get_rank(), transfer)
            call.held_until = arrived + spec.latency_seconds
        else:
            if call.collective.is_message:  # a sender does not wait for the arrival
                messages = messages._replace(number=0)
            with self._lock:
                start = max(time.monotonic(), self._free_at)
                self._free_at = call.held_until = start + messages.seconds(spec)
        self._link.note_end(call.held_until)

    def hold(self, call: Call) -> None:
        """Sleep until the link is done."""
        self._link.sleep_until(call.held_until)


class Link(ABC):
    """What a strategy uses where its exchanges are not calls of ``torch.distributed``."""

    @abstractmethod
    def message(self, source: int, target: int, num_bytes: int) -> None:
        """Return when a message that now begins has come from one rank to another."""

    @abstractmethod
    def lasting(self, messages: Messages) -> contextlib.AbstractContextManager[None]:
        """Have the body last as long as messages, at least; the link is not otherwise in use."""


@final
class NoLink(Link):
    """No network is emulated: nothing lasts longer than it does."""

    def message(self, source: int, target: int, num_bytes: int) -> None:
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
            self.timeline.reserve(source, target, num_bytes * 8 / self.spec.bits_per_second)
            + self.spec.latency_seconds
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
        if self._cancelled.wait(max(0.0, end - time.monotonic())):
            raise ConsequenceError("This rank was freed from its wait.")

    def note_end(self, end: float) -> None:
        """Note that an exchange of this rank ends then."""
        self.busy_until = max(self.busy_until, end)

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

    def reserve(self, source: int, target: int, seconds: float) -> float:
        """Use the link from one rank to another once both ends are free; return until when."""
        with self._locked():
            sends, free = self._ends(source)[0], self._ends(target)[1]
            end = max(time.monotonic(), sends, free) + seconds
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
