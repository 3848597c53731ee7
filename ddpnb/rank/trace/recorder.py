"""Which collectives, messages and calls of the store are made while a cell runs?  (Ranks.)

A span begins when the backend is called and ends when its work is complete.  Where nobody waits for
it at once, one of gloo's threads reports that to Python, and the end may be seen late while another
thread holds Python's lock.  All ranks of a host share the clock (``time.monotonic``).
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final, final

import torch.distributed as dist

from ddpnb.compat import torch_internals
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.trace import RankSpans, Span
from ddpnb.rank.collectives.intercept import Listener, listening
from ddpnb.rank.collectives.table import ANY_SOURCE, Call
from ddpnb.rank.stack import MARK, users_place
from ddpnb.rank.trace.stores import heard_stores

MAX_SPANS: Final = 20_000
"""Spans that a rank keeps; later ones are counted."""
MAX_VALUE: Final = 32
"""Characters of a value in the store that are shown."""

_NAME, _START, _END, _BYTES, _GROUP, _LINE = range(6)


def require_tracing() -> None:
    """Refuse a trace where torch's calls cannot be seen.

    Raises:
        UserError: this version of torch is not known.
    """
    if not torch_internals.intercepts_collectives.works:
        raise UserError(f"{torch_internals.intercepts_collectives.sentence}; leave --trace out.")


@final
class TraceRecorder(Listener):
    """Keeps what this rank does, the first so many calls."""

    def __init__(self, rank: int, max_spans: int) -> None:
        self._rank = rank
        self._max_spans = max_spans
        self._calls: list[list[Any]] = []  # not the calls themselves, which hold tensors
        self._store_calls: list[Span] = []
        self._num_dropped = 0
        self._is_open = True

    def begin(self, call: Call) -> None:
        """Note that a call begins."""
        if len(self._calls) >= self._max_spans:
            self._num_dropped += 1
            return
        noted = [call.name, 0.0, 0.0, call.num_bytes_given, _ranks_of(call), _users_line()]
        call.notes[self] = noted
        self._calls.append(noted)
        noted[_START] = time.monotonic()

    def ended(self, call: Call) -> None:
        """Note that a call is complete."""
        if self in call.notes:
            call.notes[self][_END] = time.monotonic()
            if call.collective is ANY_SOURCE:
                call.notes[self][_GROUP] = _ranks_of(call)

    def refused(self, call: Call, error: BaseException) -> None:
        """Note that a call has failed."""
        self.ended(call)

    def hear_store(self, name: str, key: str, value: object, start: float) -> None:
        """Note a call of a store that has ended."""
        if not self._is_open:  # a group that was formed meanwhile goes on using its store
            return
        if len(self._store_calls) >= self._max_spans:
            self._num_dropped += 1
            return
        text, size = _preview(value)
        span = Span(
            rank=self._rank,
            lane="store",
            name=name,
            start=start,
            end=time.monotonic(),
            num_bytes=size,
            line=_users_line(),
            key=key,
            value=text,
        )
        self._store_calls.append(span)

    def spans(self) -> RankSpans:
        """Return what was recorded; calls that have not ended end now."""
        self._is_open, now = False, time.monotonic()
        spans = tuple(
            Span(
                rank=self._rank,
                lane="communication",
                name=noted[_NAME],
                start=noted[_START],
                end=max(noted[_END] or now, noted[_START]),
                num_bytes=noted[_BYTES],
                group=noted[_GROUP],
                line=noted[_LINE],
            )
            for noted in self._calls
        )
        return RankSpans(
            rank=self._rank,
            spans=(*spans, *self._store_calls),
            num_dropped=self._num_dropped,
            num_open=sum(not noted[_END] for noted in self._calls),
            clock_at=time.time() - time.monotonic(),
        )


@contextlib.contextmanager
def recording(rank: int, max_spans: int = MAX_SPANS) -> Iterator[TraceRecorder]:
    """Return a context in which this process's exchanges are recorded, the first so many."""
    recorder = TraceRecorder(rank, max_spans)
    with listening(recorder), heard_stores(recorder.hear_store):
        yield recorder


def _ranks_of(call: Call) -> tuple[int, ...]:
    """Return the ranks of a call's group; of a message, from and to."""
    if not call.collective.is_message:
        return call.ranks
    own, peer = (dist.get_rank(),), () if call.peer is None else (call.peer,)
    return (*own, *peer) if call.name == "send" else (*peer, *own)


def _users_line() -> str:
    """Return where the user's code is: ``"line 3"``; empty if there is none near."""
    line, in_backward = users_place()
    return f"line {line % MARK}{' (backward)' if in_backward else ''}" if line else ""


def _preview(value: object) -> tuple[str, int | None]:
    """Return a value in a few characters, and its bytes."""
    if value is None:
        return "", None
    if not isinstance(value, bytes | str):
        return str(value)[:MAX_VALUE], None
    raw = value.encode() if isinstance(value, str) else value
    text = raw.decode(errors="replace")
    if not text.isprintable():
        return f"{len(raw)} bytes", len(raw)
    return (text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"), len(raw)
