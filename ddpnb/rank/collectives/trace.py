"""Traces the collectives and messages of a cell.  Runs on the ranks.

A span begins when ddpnb calls the backend and ends when the backend's work is complete.  If no
caller waits for the work, a thread of gloo reports the end to Python.  The recorded end may be
late, because gloo's thread needs the GIL.  All ranks of a host share the clock ``time.monotonic``.
"""

import time
from typing import Any, Final, final

import torch.distributed as dist

from ddpnb.compat import torch_internals
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.trace import RankSpans, Span
from ddpnb.rank.collectives.intercept import Listener
from ddpnb.rank.collectives.table import CollectiveCall
from ddpnb.rank.stack import users_line

MAX_SPANS: Final = 20_000
"""Maximum number of spans that a rank keeps.  Later spans are counted, but not kept."""
LATE_END_S: Final = 0.1
"""Maximum seconds to wait at the end of a cell until gloo's threads report completed calls."""


@final
class TraceRecorder(Listener):
    """Records the first ``MAX_SPANS`` calls of this rank.

    Raises:
        UserError: ddpnb cannot intercept the collectives of this version of torch.
    """

    def __init__(self, rank: int) -> None:
        if not (probe := torch_internals.intercepts_collectives).works:
            raise UserError(f"{probe.sentence}. So --trace cannot work. Remove --trace.")
        self._rank = rank
        self._calls: list[dict[str, Any]] = []  # the calls themselves would keep tensors alive
        self._num_dropped = 0

    def begin(self, call: CollectiveCall) -> None:
        """Record the start of a call."""
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

    def ended(self, call: CollectiveCall) -> None:
        """Record that a call is complete."""
        if self in call.notes:
            call.notes[self]["end"] = time.monotonic()

    def refused(self, call: CollectiveCall, error: BaseException) -> None:
        """Record that a call has failed."""
        self.ended(call)

    def spans(self) -> RankSpans:
        """Return the recorded spans.  If a call is still running, its span ends now."""
        now = time.monotonic()
        while self._num_open() and time.monotonic() < now + LATE_END_S:
            time.sleep(0.001)  # gloo's thread may not have reported DDP's last all-reduce yet
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


def _ranks_of(call: CollectiveCall) -> tuple[int, ...]:
    """Return a collective's ranks, or the sender (if known) and the receiver of a message."""
    if not call.collective.is_message:
        return call.ranks
    own = dist.get_rank()
    if call.collective.is_from_any:
        return (own,)
    peer = call.ranks[call.arguments[1]]
    return (own, peer) if call.name == "send" else (peer, own)
