"""Which collectives, messages and calls of the store are made while a cell runs?  (Ranks.)

While a cell is traced, methods of ``ProcessGroup`` are wrapped, and for torch's calls from C++,
such as DDP's, a kernel in torch's dispatcher stands directly before the backend's.  A span begins
when the backend is called and ends when its work is complete.  Where nobody waits for it at once,
one of gloo's threads reports that to Python, and the end may be seen late while another thread
holds Python's lock.  All ranks of a host share the clock (``time.monotonic``).  Nothing of this is
in place while no cell is traced.
"""

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any, Final, final

import torch.distributed as dist
from torch import Tensor

from ddpnb.compat import torch_internals
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.trace import RankSpans, Span
from ddpnb.rank import stack
from ddpnb.rank.collectives.table import METHODS, Collective
from ddpnb.rank.comm.flat_buffers import num_bytes
from ddpnb.rank.stack import BACKWARD

MAX_SPANS: Final = 20_000
"""Spans that a rank keeps; later ones are counted."""
DRAIN_SECONDS = 0.5
"""How long the ends of a cell's last calls may take to be noted."""
MAX_FRAMES: Final = 60
"""How far up the stack to look for the user's line."""
MAX_VALUE: Final = 32
"""Characters of a value in the store that are shown."""
STORE_CALLS = ("set", "get", "add", "append", "compare_set", "delete_key", "check", "wait")
"""Calls of a store that are recorded."""
OTHER_STORE_CALLS = (
    "num_keys",
    "multi_get",
    "multi_set",
    "has_extended_api",
    "set_timeout",
    "queue_push",
    "queue_pop",
    "queue_len",
    "list_keys",
)

_NAME, _START, _END, _BYTES, _GROUP, _LINE = range(6)
_OPEN = 0.0


def require_tracing() -> None:
    """Refuse a trace where torch's calls cannot be seen.

    Raises:
        UserError: this version of torch is not known.
    """
    if not torch_internals.intercepts_collectives.works:
        raise UserError(f"{torch_internals.intercepts_collectives.sentence}; leave --trace out.")


@final
class TraceRecorder:
    """Keeps what this rank does between ``recording``'s begin and end."""

    def __init__(self, rank: int, max_spans: int) -> None:
        self._rank = rank
        self._max_spans = max_spans
        self._calls: list[list[Any]] = []
        self._store_calls: list[Span] = []
        self._num_dropped = 0
        self._waiter: threading.Thread | None = None
        self._waited: SimpleQueue[tuple[Any, Callable[[object], None]] | None] = SimpleQueue()
        self.is_open = True

    def begin(self, name: str, tensors: Any, group: tuple[int, ...]) -> list[Any] | None:
        """Note that a call begins; return what ``end`` takes, None if there is no room for it."""
        if len(self._calls) >= self._max_spans:
            self._num_dropped += 1
            return None
        size = None if tensors is None else size_of(tensors)
        call = [name, 0.0, _OPEN, size, group, users_line()]
        self._calls.append(call)
        call[_START] = time.monotonic()
        return call

    def attend(self, call: list[Any], work: Any) -> None:
        """Have a call end when the backend's work is complete."""

        def end(_: object) -> None:
            call[_END] = time.monotonic()

        try:
            work.get_future().add_done_callback(end)
        except RuntimeError:  # gloo's reduce_scatter has no future
            if self._waiter is None:
                self._waiter = threading.Thread(target=self._wait, name="ddpnb-trace", daemon=True)
                self._waiter.start()
            self._waited.put((work, end))

    def note(self, name: str, key: str, value: object, start: float) -> None:
        """Note a call of a store that has ended."""
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
            line=users_line(),
            key=key,
            value=text,
        )
        self._store_calls.append(span)

    def spans(self) -> RankSpans:
        """Return what was recorded; calls that have not ended end now."""
        self.is_open = False
        if self._waiter is not None:
            self._waited.put(None)
            self._waiter.join(DRAIN_SECONDS)
        now = time.monotonic()
        num_open = sum(call[_END] == _OPEN for call in self._calls)
        spans = tuple(
            Span(
                rank=self._rank,
                lane="communication",
                name=call[_NAME],
                start=call[_START],
                end=max(call[_END] or now, call[_START]),
                num_bytes=call[_BYTES],
                group=call[_GROUP],
                line=call[_LINE],
            )
            for call in self._calls
        )
        return RankSpans(
            rank=self._rank,
            spans=(*spans, *self._store_calls),
            num_dropped=self._num_dropped,
            num_open=num_open,
            clock_at=time.time() - time.monotonic(),
        )

    def _wait(self) -> None:
        """Wait for each work in turn."""
        while (waited := self._waited.get()) is not None:
            work, end = waited
            with contextlib.suppress(RuntimeError):  # aborted: the caller's own wait raises it
                work.wait()
            end(None)


@contextlib.contextmanager
def recording(rank: int, max_spans: int = MAX_SPANS) -> Iterator[TraceRecorder]:
    """Return a context in which this process's exchanges are recorded, the first so many."""
    recorder = TraceRecorder(rank, max_spans)
    with contextlib.ExitStack() as opened:
        by_operation = {each.operation: each for each in METHODS.values()}
        known = {
            name: each
            for name, each in by_operation.items()
            if torch_internals.has_operation(name, each.num_tensors, each.root)
        }
        kernels = torch_internals.CollectiveKernels(
            {name: _kernel(each, recorder) for name, each in known.items()}, is_lowest=True
        )
        opened.callback(kernels.remove)
        replaced = {name: partial(_method, each, recorder) for name, each in METHODS.items()}
        replaced |= {name: partial(_message, name, recorder) for name in MESSAGES}
        for name, make in replaced.items():
            original = torch_internals.replace_method(name, make)
            opened.callback(torch_internals.restore_method, name, original)
        opened.enter_context(_recorded_stores(recorder))
        yield recorder


# -- collectives ---------------------------------------------------------------------------


def _kernel(collective: Collective, recorder: TraceRecorder) -> Callable[..., Any]:
    """Return what the dispatcher calls before the backend's own kernel."""
    backends_own = torch_internals.next_kernel(collective.operation, is_lowest=True)
    num, place = collective.num_tensors, size_argument(collective)

    @torch_internals.not_compiled
    def kernel(keys: Any, *arguments: Any) -> Any:
        group = torch_internals.ProcessGroup.unbox(arguments[num])
        tensors = None if place is None else arguments[place]
        call = recorder.begin(collective.name, tensors, ranks_of(group))
        result = backends_own(keys, *arguments)
        if call is None:
            return result
        work = result[-1] if isinstance(result, tuple) else result
        if work is None:  # a monitored barrier has ended
            call[_END] = time.monotonic()
        else:
            recorder.attend(call, torch_internals.unboxed_work(work))
        return result

    return kernel


def _method(
    collective: Collective, recorder: TraceRecorder, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the replacement of a method of ``ProcessGroup``.

    A call that its caller waits for at once is waited for here: the end is exact, and none of
    gloo's threads has to wait for Python's lock.
    """
    place = size_argument(collective)

    @torch_internals.not_compiled
    @functools.wraps(original)
    def method(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> Any:
        if place is not None and place >= len(arguments):
            return original(group, *arguments, **options)  # its kernel records it
        tensors = None if place is None else arguments[place]
        call = recorder.begin(collective.name, tensors, ranks_of(group))
        try:
            with torch_internals.below_lowest():  # so that the kernel does not record it again
                work = original(group, *arguments, **options)
            is_waited_for = not getattr(arguments[-1] if arguments else None, "asyncOp", True)
            if call is not None and work is not None and not is_waited_for:
                recorder.attend(call, work)
                return work
            if call is not None and work is not None:
                work.wait()
        except RuntimeError:  # refused, or aborted
            _end(call)
            raise
        _end(call)
        return work

    return method


def _end(call: list[Any] | None) -> None:
    if call is not None:
        call[_END] = time.monotonic()


def size_argument(collective: Collective) -> int | None:
    """Return the index of the argument that a rank gives: its input, or of a scatter its part."""
    if collective.tensor is None:
        return None
    return 1 if collective.num_tensors == 2 and collective.name != "scatter" else 0


def size_of(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all in a list, or in a list of lists."""
    if isinstance(tensors, Tensor):
        return num_bytes([tensors])
    return sum(map(size_of, tensors))


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of a group as the default group numbers them; empty if not known."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        return ()


def users_line() -> str:
    """Return where the user's code is: ``"line 3"``; empty if there is none near."""
    wanted, in_backward = stack._users_file, False
    frame: FrameType | None = sys._getframe(2)
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        file = frame.f_code.co_filename
        if wanted in file:
            return f"line {frame.f_lineno}{' (backward)' if in_backward else ''}"
        in_backward = in_backward or file == BACKWARD
        frame = frame.f_back
    return ""


# -- messages between two ranks ------------------------------------------------------------

MESSAGES = ("send", "recv", "recv_anysource")


def _message(
    name: str, recorder: TraceRecorder, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the replacement of a method that sends or receives; it ends when it is waited for."""

    @functools.wraps(original)
    def message(group: dist.ProcessGroup, tensors: list[Tensor], *rest: Any) -> Any:
        ranks, own = ranks_of(group), dist.get_rank()
        other = () if name == "recv_anysource" or not ranks else (ranks[rest[0]],)
        pair = (own, *other) if name == "send" else (*other, own)
        call = recorder.begin(name.removesuffix("_anysource"), tensors, pair)
        work = original(group, tensors, *rest)
        return work if call is None else _RecordedMessage(work, call)

    return message


@final
class _RecordedMessage(dist.Work):
    """A message's work; its span ends when a wait for it returns."""

    def __init__(self, work: Any, call: list[Any]) -> None:
        super().__init__()
        self._work = work
        self._call = call

    def wait(self, *timeout: Any) -> bool:
        """Wait for the message."""
        done = bool(self._work.wait(*timeout))
        self._note_end()
        return done

    def is_completed(self) -> bool:
        """Return whether a wait would return at once."""
        is_done = bool(self._work.is_completed())
        if is_done:
            self._note_end()
        return is_done

    def _source_rank(self) -> int:
        source = int(self._work._source_rank())
        if len(self._call[_GROUP]) == 1:
            self._call[_GROUP] = (source, *self._call[_GROUP])
        return source

    def _note_end(self) -> None:
        if self._call[_END] == _OPEN:
            self._call[_END] = time.monotonic()


# -- the store -----------------------------------------------------------------------------


@contextlib.contextmanager
def _recorded_stores(recorder: TraceRecorder) -> Iterator[None]:
    """Return a context in which stores' calls are recorded, from C++ where a group is formed."""
    originals = {name: getattr(dist.Store, name) for name in STORE_CALLS}
    rest = {name: getattr(dist.Store, name, None) for name in OTHER_STORE_CALLS}
    for name, original in originals.items():
        setattr(dist.Store, name, _store_call(name, recorder, original))
    default = None
    if dist.is_initialized() and dist.get_backend() == "gloo":  # NCCL's threads outlive the cell
        default = torch_internals.default_store()
    if default is not None:
        calls = {name: _store_call(name, recorder, each) for name, each in originals.items()}
        through = {name: each for name, each in rest.items() if each is not None}
        recorded = _store_class({name: _on_inner(each) for name, each in (calls | through).items()})
        torch_internals.set_default_store(recorded(default))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist.Store, name, original)
        if default is not None and dist.is_initialized():
            torch_internals.set_default_store(default)


def _store_call(
    name: str, recorder: TraceRecorder, original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(store: Any, *arguments: Any, **options: Any) -> Any:
        if not recorder.is_open:
            return original(store, *arguments, **options)
        start, result = time.monotonic(), None
        try:
            result = original(store, *arguments, **options)
        finally:
            key = arguments[0] if arguments else next(iter(options.values()), "")
            given = next(iter(arguments[1:2]), None) if name in ("set", "append") else result
            recorder.note(name, _key(key), given, start)
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
    if isinstance(given, bytes):
        return given.decode(errors="replace")
    return (
        ", ".join(map(_key, given))
        if isinstance(given, Sequence) and not isinstance(given, str)
        else str(given)
    )


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
