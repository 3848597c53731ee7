"""Collectives and messages of ``torch.distributed`` that end as over an emulated link (ranks).

Torch's dispatcher calls a Python kernel before the backend's own.  So this is the one place for all
strategies, whether they call ``torch.distributed``, torch's C++ code does (DDP's buckets, which
still overlap with the backward pass, also where a hook compresses them), or FSDP.  The backend
really makes the exchange; what the caller waits for is a future, which a thread completes when the
link is done.  Messages between two ranks pass methods of ``ProcessGroup`` alone: there the caller
itself sleeps after its wait.
"""

import contextlib
import functools
import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from ddpnb.compat import torch_internals
from ddpnb.protocol.errors import UserError
from ddpnb.rank.collectives.table import METHODS
from ddpnb.rank.comm.flat_buffers import num_bytes
from ddpnb.rank.comm.link import COLLECTIVES, NUM_GROUPS, EmulatedLink
from ddpnb.rank.comm.rendezvous import CancellationToken

POLL_SECONDS = 0.001
"""How often to look whether the last rank has come: a root may be done before."""


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
    operations = {each.operation: each for each in METHODS.values()}
    known = [name for name in COLLECTIVES if name in operations]
    with contextlib.ExitStack() as opened:
        opened.enter_context(link.opened())
        clock = opened.enter_context(contextlib.closing(_Clock(link)))
        opened.enter_context(cancellation.held(clock.cancel))
        groups = _Groups(link)
        kernels = torch_internals.CollectiveKernels(
            {name: _kernel(operations[name], groups, clock) for name in known}, is_lowest=True
        )
        opened.callback(kernels.remove)
        makers = {"send": _sending, "recv": _receiving, "recv_anysource": _receiving_any}
        for name, make in makers.items():
            original = torch_internals.replace_method(name, partial(make, groups))
            opened.callback(torch_internals.restore_method, name, original)
        for name in METHODS:
            original = torch_internals.replace_method(name, _raising)
            opened.callback(torch_internals.restore_method, name, original)
        yield


@final
class _Groups:
    """The channel and the ranks of each process group."""

    def __init__(self, link: EmulatedLink) -> None:
        self.link = link
        self._known: dict[str, tuple[int, list[int]]] = {}

    def of(self, group: dist.ProcessGroup) -> tuple[int, list[int]]:
        """Return a group's channel, and its ranks as the default group numbers them."""
        name = group.group_name
        if name not in self._known:
            ranks = dist.get_process_group_ranks(group)
            is_default = len(ranks) == dist.get_world_size()
            channel = 0 if is_default else 1 + sum(name.encode()) % (NUM_GROUPS - 1)
            self._known[name] = (channel, ranks)
        return self._known[name]


def _kernel(collective: Any, groups: _Groups, clock: "_Clock") -> Callable[..., Any]:
    operation, num = collective.operation, collective.num_tensors
    backends_own = torch_internals.next_kernel(operation, is_lowest=True)
    messages_of = COLLECTIVES[operation]
    link = groups.link

    @torch_internals.not_compiled
    def kernel(keys: Any, *arguments: Any) -> Any:
        group = torch_internals.ProcessGroup.unbox(arguments[num])
        if group.size() == 1:
            return backends_own(keys, *arguments)
        channel, ranks = groups.of(group)
        size = 0 if collective.tensor is None else num_bytes(_tensors(arguments[collective.tensor]))
        number = link.timeline.next_number(channel)
        seconds = messages_of(size, len(ranks)).seconds(link.spec)
        link.timeline.come(channel, number, len(ranks), [(r, r) for r in ranks], seconds)
        result = backends_own(keys, *arguments)
        *tensors, work = result if isinstance(result, tuple) else (result,)
        linked = clock.later(torch_internals.unboxed_work(work), channel, number)
        return (*tensors, linked) if tensors else linked

    return kernel


def _tensors(argument: Any) -> list[Tensor]:
    return [argument] if isinstance(argument, Tensor) else argument


# -- messages between two ranks ------------------------------------------------------------


def _sending(groups: _Groups, original: Callable[..., Any]) -> Callable[..., Any]:
    def send(group: dist.ProcessGroup, tensors: list[Tensor], target: int, *rest: Any) -> Any:
        _, ranks = groups.of(group)
        source = dist.get_rank()
        come = _come(groups.link, source, ranks[target], tensors)
        return _LinkedMessage(original(group, tensors, target, *rest), groups.link, come, 0.0)

    return send


def _receiving(groups: _Groups, original: Callable[..., Any]) -> Callable[..., Any]:
    def recv(group: dist.ProcessGroup, tensors: list[Tensor], source: int, *rest: Any) -> Any:
        _, ranks = groups.of(group)
        come = _come(groups.link, ranks[source], dist.get_rank(), tensors)
        latency = groups.link.spec.latency_seconds
        return _LinkedMessage(original(group, tensors, source, *rest), groups.link, come, latency)

    return recv


def _receiving_any(groups: _Groups, original: Callable[..., Any]) -> Callable[..., Any]:
    def recv_anysource(group: dist.ProcessGroup, tensors: list[Tensor], *rest: Any) -> Any:
        raise UserError("--link needs to know where a message comes from: recv(tensor, src=...).")

    return recv_anysource


def _come(link: EmulatedLink, source: int, target: int, tensors: list[Tensor]) -> tuple[int, int]:
    """Note that this rank has come to a message; return its channel and number."""
    channel = link.timeline.pair(source, target)
    number = link.timeline.next_number(channel)
    seconds = num_bytes(tensors) * 8 / link.spec.bits_per_second
    link.timeline.come(channel, number, 2, [(source, target)], seconds)
    return channel, number


@final
class _LinkedMessage(dist.Work):
    """A message's work, which ends when the link is done."""

    def __init__(
        self, work: Any, link: EmulatedLink, come: tuple[int, int], latency: float
    ) -> None:
        super().__init__()
        self._work = work
        self._link = link
        self._come = come
        self._latency = latency

    def wait(self, *timeout: Any) -> bool:
        """Wait for the backend, then for the link."""
        done = bool(self._work.wait(*timeout))
        while math.isnan(end := self._link.timeline.end(*self._come)):
            time.sleep(POLL_SECONDS)
            self._link.check()
        self._link.sleep_until(end + self._latency)
        return done

    def is_completed(self) -> bool:
        """Return whether a wait would return at once."""
        end = self._link.timeline.end(*self._come)
        return bool(self._work.is_completed()) and end + self._latency <= time.monotonic()


# -- collectives ---------------------------------------------------------------------------


def _raising(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of ``ProcessGroup`` with work that raises what went wrong."""

    @functools.wraps(original)
    def method(*arguments: Any, **options: Any) -> Any:
        work = original(*arguments, **options)
        return _LinkedWork(work) if isinstance(work, dist.Work) else work

    return method


@final
class _LinkedWork(dist.Work):
    """Work made from a future, for callers in Python: torch's own raises nothing in ``wait``."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._future = work.get_future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; raise what went wrong, or that it takes too long."""
        ends_at = time.monotonic() + timeout.total_seconds() if timeout else math.inf
        while ends_at < math.inf and not self._future.done():
            if time.monotonic() > ends_at:
                raise RuntimeError("Timed out waiting for a collective over an emulated link.")
            time.sleep(POLL_SECONDS)
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether a wait would return at once."""
        return bool(self._future.done())

    def get_future(self) -> Any:
        """Return the future of the result."""
        return self._future


class _Pending(NamedTuple):
    at: float
    """When to look at it next, by the monotonic clock."""
    order: int
    channel: int
    number: int
    done: Any
    """The future that is completed when the exchange has ended."""


def start_thread(target: Callable[..., None], *arguments: object) -> threading.Thread:
    """Start a thread that does not keep the process alive."""
    thread = threading.Thread(target=target, args=arguments, name="ddpnb-link", daemon=True)
    thread.start()
    return thread


@final
class _Clock:
    """A thread that has futures completed when their exchanges have ended.

    Each is completed in a thread of its own: torch's PowerSGD waits for an exchange in what the end
    of the one before calls.
    """

    def __init__(self, link: EmulatedLink) -> None:
        self._link = link
        self._order = itertools.count()
        self._pending: list[_Pending] = []
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = start_thread(self._run)

    def later(self, work: Any, channel: int, number: int) -> Any:
        """Return work that is done when a backend's is, and the link is done with an exchange."""
        future = torch_internals.future_of(work)
        done = torch.futures.Future()  # type: ignore[var-annotated]

        def complete(_: object) -> Any:
            self._link.check()
            return future.value()  # raises the backend's error

        def watch(_: object) -> None:
            with self._changed:
                if self._is_open:
                    self._add(_Pending(0.0, next(self._order), channel, number, done))
                    return
            done.set_result(None)

        later = torch_internals.work_of(done.then(complete))
        future.add_done_callback(watch)
        return later

    def cancel(self) -> None:
        """Complete all futures with an error, now and later."""
        self._link.cancel()
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """End the thread; may be called twice."""
        with self._changed:
            self._is_open = False
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (due := self._next_due()) is not None:
            start_thread(due.done.set_result, None)

    def _next_due(self) -> _Pending | None:
        """Wait for the next exchange that has ended; None: there is none any more."""
        with self._changed:
            while self._is_open or self._pending:
                if not self._pending:
                    self._changed.wait()
                    continue
                first = self._pending[0]
                if self._link.is_cancelled or not self._is_open:
                    return heapq.heappop(self._pending)
                if (seconds := first.at - time.monotonic()) > 0:
                    self._changed.wait(seconds)
                    continue
                end = self._link.timeline.end(first.channel, first.number)
                if end <= time.monotonic():
                    return heapq.heappop(self._pending)
                heapq.heappop(self._pending)
                self._add(first._replace(at=self._look_again_at(end)))
        return None

    def _look_again_at(self, end: float) -> float:
        if math.isnan(end):
            return time.monotonic() + POLL_SECONDS
        self._link.note_end(end)
        return end

    def _add(self, pending: _Pending) -> None:
        heapq.heappush(self._pending, pending)
        self._changed.notify()
