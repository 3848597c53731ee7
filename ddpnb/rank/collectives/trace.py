"""Which collectives and messages are made while a cell runs?  (ranks)

A span begins when the backend is called and ends when its work is complete.  Where nobody waits for
it at once, one of gloo's threads reports that to Python, and the end may be seen late while another
thread holds Python's lock.  All ranks of a host share the clock (``time.monotonic``).
"""

import time
from typing import Any, Final, final

import torch.distributed as dist

from ddpnb.compat import torch_internals
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.trace import RankSpans, Span
from ddpnb.rank.collectives.intercept import Listener
from ddpnb.rank.collectives.table import Call
from ddpnb.rank.stack import users_line

MAX_SPANS: Final = 20_000
"""Spans that a rank keeps; later ones are counted."""
LATE_END_S: Final = 0.1
"""Seconds for which a cell's end waits for gloo's threads to report what is complete."""


@final
class TraceRecorder(Listener):
    """Keeps what this rank does, the first ``MAX_SPANS`` calls.

    Raises:
        UserError: this version of torch is not known.
    """

    def __init__(self, rank: int) -> None:
        if not (probe := torch_internals.intercepts_collectives).works:
            raise UserError(f"{probe.sentence}; leave --trace out.")
        self._rank = rank
        self._calls: list[dict[str, Any]] = []  # not the calls themselves, which hold tensors
        self._num_dropped = 0

    def begin(self, call: Call) -> None:
        """Note that a call begins."""
        if len(self._calls) >= MAX_SPANS:
            self._num_dropped += 1
            return
        noted: dict[str, Any] = {
            "name": call.name,
            "num_bytes": call.num_bytes or None,
            "group": _ranks_of(call),
            "line": users_line(),
        }
        call.notes[self] = noted
        self._calls.append(noted)
        noted["start"] = time.monotonic()

    def ended(self, call: Call) -> None:
        """Note that a call is complete."""
        if self in call.notes:
            call.notes[self]["end"] = time.monotonic()

    def refused(self, call: Call, error: BaseException) -> None:
        """Note that a call has failed."""
        self.ended(call)

    def spans(self) -> RankSpans:
        """Return what was recorded; calls that have not ended end now."""
        now = time.monotonic()
        while self._num_open() and time.monotonic() < now + LATE_END_S:
            time.sleep(0.001)  # DDP's last all-reduce may be complete, and gloo's thread not heard
        facts: dict[str, Any] = {"rank": self._rank, "lane": "communication", "end": now}
        return RankSpans(
            rank=self._rank,
            spans=tuple(Span(**(facts | noted)) for noted in self._calls),
            num_dropped=self._num_dropped,
            num_open=self._num_open(),
            clock_at=time.time() - time.monotonic(),
        )

    def _num_open(self) -> int:
        return sum("end" not in noted for noted in self._calls)


def _ranks_of(call: Call) -> tuple[int, ...]:
    """Return the ranks of a call's group; of a message, from and to, as far as they are known."""
    if not call.collective.is_message:
        return call.ranks
    own = dist.get_rank()
    if call.collective.is_from_any:
        return (own,)
    peer = call.ranks[call.arguments[1]]
    return (own, peer) if call.name == "send" else (peer, own)
