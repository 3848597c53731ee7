"""An emulated network: exchanges are real, and end as late as over it (ranks).

The backend really makes an exchange.  From its real end, or from when this rank's link is free of
what came before, it takes the time of its messages (``table``).  Who waits sleeps, so that the
cores are free, as they are where a network card does the work.  Each rank keeps the time of its own
link, as a collective ends for all its ranks at about one time.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final, final

from ddpnb.compat import torch_internals
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import LinkSpec, parse_link
from ddpnb.rank.cancellation import CancellationToken, ConsequenceError
from ddpnb.rank.collectives.intercept import Listener, listening
from ddpnb.rank.collectives.table import Call, Messages


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


@final
class Link(Listener):
    """One rank's link: holds the end of each exchange back until the link is done with it."""

    def __init__(self, spec: LinkSpec) -> None:
        self.busy_until = 0.0
        """The end, on the monotonic clock, of the last exchange that waits for the link."""
        self._spec = spec
        self._lock = threading.Lock()
        self._sends_until = self._receives_until = 0.0
        self._cancelled = threading.Event()

    def ended(self, call: Call) -> None:
        """Have the link carry what the backend has exchanged."""
        messages = call.messages
        if not messages.number:
            return
        if call.name == "recv":
            call.held_until = self._received_at(call.num_bytes)
        else:
            if call.collective.is_message:  # a sender does not wait for the arrival
                messages = messages._replace(number=0)
            with self._lock:
                start = max(time.monotonic(), self._sends_until)
                self._sends_until = call.held_until = start + messages.seconds(self._spec)
        self.busy_until = max(self.busy_until, call.held_until)

    def hold(self, call: Call) -> None:
        """Sleep until the link is done."""
        self._sleep_until(call.held_until)

    def receive(self, num_bytes: int) -> None:
        """Sleep until a message that now begins has come, after those before it."""
        self._sleep_until(self._received_at(num_bytes))

    @contextlib.contextmanager
    def lasting(self, messages: Messages) -> Iterator[None]:
        """Have the body last as long as messages, at least; the link is not otherwise in use."""
        end = time.monotonic() + messages.seconds(self._spec)
        yield
        self._sleep_until(end)

    def cancel(self) -> None:
        """End all sleep, present and future; from any thread."""
        self.busy_until = 0.0
        self._cancelled.set()

    def _received_at(self, num_bytes: int) -> float:
        with self._lock:
            start = max(time.monotonic(), self._receives_until)
            self._receives_until = start + num_bytes * 8 / self._spec.bits_per_second
            return self._receives_until + self._spec.latency_seconds

    def _sleep_until(self, end: float) -> None:
        """Sleep until a time of the monotonic clock.

        Raises:
            ConsequenceError: the group was aborted.
        """
        self.busy_until = max(self.busy_until, end)
        if self._cancelled.wait(max(0.0, end - time.monotonic())):
            raise ConsequenceError("This rank was freed from its wait.")


NO_LINK: Final = Link(LinkSpec(bits_per_second=float("inf"), latency_seconds=0.0))
"""No network is emulated: nothing lasts longer than it does."""

_in_use = NO_LINK


@contextlib.contextmanager
def opened(given: str, cancellation: CancellationToken) -> Iterator[Link]:
    """Return a context in which all exchanges of this process go over a link as the user gave it.

    Args:
        given: such as ``"1Gbit,1ms"``; empty: there is no link to emulate.
        cancellation: ends waits.
    """
    global _in_use
    if not given:
        yield NO_LINK
        return
    link = Link(parse_link(given))
    with cancellation.held(link.cancel), listening(link):
        _in_use = link
        try:
            yield link
        finally:
            _in_use = NO_LINK


def is_exchanging() -> bool:
    """Return whether this rank waits for an emulated link: then it does not wait for others."""
    return time.monotonic() < _in_use.busy_until
