"""Which collectives, messages and calls of the store are made while a cell runs?  (ranks)

A span begins when the backend is called and ends when its work is complete.  Where nobody waits for
it at once, one of gloo's threads reports that to Python, and the end may be seen late while another
thread holds Python's lock.  All ranks of a host share the clock (``time.monotonic``).
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import torch.distributed as dist

from ddpnb.compat import torch_internals
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.trace import RankSpans, Span
from ddpnb.rank.collectives.intercept import Listener, listening
from ddpnb.rank.collectives.table import ANY_SOURCE, Call
from ddpnb.rank.stack import users_place

MAX_SPANS: Final = 20_000
"""Spans that a rank keeps; later ones are counted."""
MAX_VALUE: Final = 32
"""Characters of a value in the store that are shown."""
STORE_CALLS = ("set", "get", "add", "append", "compare_set", "delete_key", "check", "wait")
"""Calls of a store that are recorded."""
LATE_END_S: Final = 0.1
"""Seconds for which a cell's end waits for gloo's threads to report what is complete."""


@contextlib.contextmanager
def recording(rank: int, max_spans: int = MAX_SPANS) -> Iterator["TraceRecorder"]:
    """Return a context in which this process's exchanges are recorded, the first so many.

    Raises:
        UserError: this version of torch is not known.
    """
    if not torch_internals.intercepts_collectives.works:
        raise UserError(f"{torch_internals.intercepts_collectives.sentence}; leave --trace out.")
    recorder = TraceRecorder(rank, max_spans)
    with listening(recorder), _heard_stores(recorder):
        yield recorder


@final
class TraceRecorder(Listener):
    """Keeps what this rank does, the first so many calls."""

    def __init__(self, rank: int, max_spans: int) -> None:
        self._rank = rank
        self._max_spans = max_spans
        self._calls: list[dict[str, Any]] = []  # not the calls themselves, which hold tensors
        self._store_calls: list[Span] = []
        self._num_dropped = 0
        self._is_open = True

    def begin(self, call: Call) -> None:
        """Note that a call begins."""
        if self._is_full(self._calls):
            return
        noted: dict[str, Any] = {
            "name": call.name,
            "num_bytes": call.num_bytes_given,
            "group": _ranks_of(call),
            "line": _users_line(),
        }
        call.notes[self] = noted
        self._calls.append(noted)
        noted["start"] = time.monotonic()

    def ended(self, call: Call) -> None:
        """Note that a call is complete."""
        if self in call.notes:
            call.notes[self]["end"] = time.monotonic()
            if call.collective is ANY_SOURCE:
                call.notes[self]["group"] = _ranks_of(call)

    def refused(self, call: Call, error: BaseException) -> None:
        """Note that a call has failed."""
        self.ended(call)

    def hear_store(self, name: str, key: str, value: object, start: float) -> None:
        """Note a call of a store that has ended."""
        # A group that was formed meanwhile goes on using its store.
        if not self._is_open or self._is_full(self._store_calls):
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
        while self._num_open() and time.monotonic() < now + LATE_END_S:
            time.sleep(0.001)  # DDP's last all-reduce may be complete, and gloo's thread not heard
        facts: dict[str, Any] = {"rank": self._rank, "lane": "communication", "end": now}
        return RankSpans(
            rank=self._rank,
            spans=(*(Span(**(facts | noted)) for noted in self._calls), *self._store_calls),
            num_dropped=self._num_dropped,
            num_open=self._num_open(),
            clock_at=time.time() - time.monotonic(),
        )

    def _num_open(self) -> int:
        return sum("end" not in noted for noted in self._calls)

    def _is_full(self, kept: Sequence[object]) -> bool:
        """Return whether no more is kept, and count what is not."""
        is_full = len(kept) >= self._max_spans
        self._num_dropped += is_full
        return is_full


def _ranks_of(call: Call) -> tuple[int, ...]:
    """Return the ranks of a call's group; of a message, from and to."""
    if not call.collective.is_message:
        return call.ranks
    own, peer = (dist.get_rank(),), () if call.peer is None else (call.peer,)
    return (*own, *peer) if call.name == "send" else (*peer, *own)


def _users_line() -> str:
    """Return where the user's code is: ``"line 3"``; empty if there is none near."""
    line, in_backward = users_place()
    return f"line {line}{' (backward)' if in_backward else ''}" if line else ""


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


# -- stores --------------------------------------------------------------------------------


@contextlib.contextmanager
def _heard_stores(recorder: TraceRecorder) -> Iterator[None]:
    """Return a context in which stores' calls are heard of, from C++ where a group is formed.

    Python's calls are methods of ``Store``, which are replaced.  C++ calls the default group's
    store, in whose place comes one in Python that makes its calls.
    """
    originals = {name: getattr(dist.Store, name) for name in STORE_CALLS}
    heard = {name: _heard(name, recorder, original) for name, original in originals.items()}
    methods = {n: each for n, each in vars(dist.Store).items() if callable(each) and n[0] != "_"}
    for name, each in heard.items():
        setattr(dist.Store, name, each)
    default = None
    if dist.is_initialized() and dist.get_backend() == "gloo":  # NCCL's threads outlive the cell
        default = torch_internals.default_store()
    if default is not None:
        methods = {name: _on_inner(each) for name, each in (methods | heard).items()}
        torch_internals.set_default_store(_store_class(methods)(default))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist.Store, name, original)
        if default is not None and dist.is_initialized():
            torch_internals.set_default_store(default)


def _heard(name: str, recorder: TraceRecorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(store: Any, *arguments: Any, **options: Any) -> Any:
        start, result = time.monotonic(), None
        try:
            result = original(store, *arguments, **options)
        finally:
            key = arguments[0] if arguments else next(iter(options.values()), "")
            given = next(iter(arguments[1:2]), None) if name in ("set", "append") else result
            recorder.hear_store(name, _key(key), given, start)
        return result

    return call


def _on_inner(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda store, *arguments, **options: call(store.inner, *arguments, **options)


def _store_class(methods: dict[str, Callable[..., Any]]) -> type:
    """Return a store that makes another's calls, also those that torch makes from C++."""

    def begin(self: Any, inner: Any) -> None:
        dist.Store.__init__(self)
        self.inner = inner

    timeout = property(lambda self: self.inner.timeout)
    return type("RecordedStore", (dist.Store,), {"__init__": begin, "timeout": timeout, **methods})


def _key(given: object) -> str:
    """Return a key, or several, as a text."""
    if isinstance(given, bytes):
        return given.decode(errors="replace")
    if isinstance(given, Sequence) and not isinstance(given, str):
        return ", ".join(map(_key, given))
    return str(given)
