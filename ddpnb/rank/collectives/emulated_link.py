"""Collectives and messages of ``torch.distributed`` that end as over an emulated link (ranks).

The backend really makes an exchange.  It ends as late as over the link: when the link is free of
what came before, it takes the time of the exchange's messages from there, or from the real end.
Each rank keeps that time for itself, as a real exchange ends for all its ranks at about one time;
only the messages to one rank, which may come from many, are lined up among all ranks.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import final

import torch.distributed as dist

from ddpnb.compat import torch_internals
from ddpnb.protocol.errors import UserError
from ddpnb.rank.collectives.intercept import Listener, listening
from ddpnb.rank.collectives.table import ANY_SOURCE, Call
from ddpnb.rank.comm.link import EmulatedLink
from ddpnb.rank.comm.rendezvous import CancellationToken


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
def over(link: EmulatedLink, cancellation: CancellationToken) -> Iterator[None]:
    """Return a context in which all exchanges of this process go over a link."""
    with link.opened(), cancellation.held(link.cancel), listening(_Linked(link)):
        yield


@final
class _Linked(Listener):
    """Holds the end of each exchange back until the link is done with it."""

    def __init__(self, link: EmulatedLink) -> None:
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
            pair = (call.peer, dist.get_rank())
            transfer = messages._replace(number=0).seconds(spec)
            arrived = self._link.timeline.reserve([pair], transfer)
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
