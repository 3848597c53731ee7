"""How long does a run communicate, and how many bytes?  (ranks)

The bytes are those of the usual algorithms, as ``table`` lists them: what the busiest link
carries.  Where one rank has another part than the others, as the root of a broadcast has, the
others count the bytes of their own tensors.
"""

import contextlib
import threading
from contextlib import AbstractContextManager
from typing import final

from ddpnb.rank.collectives.intercept import Listener
from ddpnb.rank.collectives.table import Call
from ddpnb.rank.meter import Meter


@final
class Account(Listener):
    """Reports the calls of a run to its meter.

    Args:
        meter: of the thread that makes the account.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._thread = threading.get_ident()

    def begin(self, call: Call) -> None:
        """Count the bytes, and a message that is on its way from now on."""
        sent, received = traffic_of(call)
        self._meter.count(sent=sent, received=received)
        if not call.is_blocking:
            self._meter.issued()

    def waiting(self, call: Call) -> AbstractContextManager[None]:
        """Count the time of a wait."""
        if threading.get_ident() != self._thread:  # beside the run's own steps
            return contextlib.nullcontext()
        return self._meter.communicating() if call.is_blocking else self._meter.awaited()


def traffic_of(call: Call) -> tuple[int, int]:
    """Return how many bytes this rank sends in a call, and how many it receives."""
    collective, carried = call.collective, round(call.messages.num_bytes)
    if collective.is_message:
        return (carried, 0) if collective.name == "send" else (0, carried)
    if collective.root is None or not carried:
        return carried, carried
    is_root, own = call.group.rank() == call.root, call.num_bytes
    if collective.root_is == "from":
        return (carried, 0) if is_root else (0, own)
    return (0, carried) if is_root else (own, 0)
