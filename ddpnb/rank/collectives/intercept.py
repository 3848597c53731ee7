"""The interceptor of this rank's ``torch.distributed`` calls.  Runs on the ranks.

Users and torch's Python code call methods of ``ProcessGroup``.  ddpnb replaces these methods.
Torch's C++ code, such as DDP's backward pass, calls only the dispatcher.  In the dispatcher, ddpnb
adds a Python kernel in front of the backend's kernel.  The new methods bypass these kernels.
The new methods and kernels stay installed, but take almost no time if there is no listener.

A listener overrides only the methods that it needs.  A call returns the backend's own work object
unless a listener overrides ``waiting`` or ``ended``.
"""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, final

import torch.distributed as dist

from ddpnb.compat import torch_internals
from ddpnb.rank.collectives.table import METHODS, NO_ROOT, Collective, CollectiveCall


class Listener:
    """The base class of listeners.  ddpnb runs these methods for each call that this rank makes."""

    hears_waits = hears_ends = False
    """True if the class overrides ``waiting``, or ``ended``."""

    def __init_subclass__(cls) -> None:
        cls.hears_waits = cls.waiting is not Listener.waiting
        cls.hears_ends = cls.ended is not Listener.ended

    def begin(self, call: CollectiveCall) -> None:
        """Run before the backend gets a call.  To reject the call, a listener raises an error."""

    def make(self, call: CollectiveCall) -> Any:
        """Make a call and return its work, or return None to let the backend make the call."""
        return None

    def refused(self, call: CollectiveCall, error: BaseException) -> None:
        """Run if a call has failed before the backend ran the call."""

    def waiting(self, call: CollectiveCall) -> AbstractContextManager[object]:
        """Return a context manager that is active while Python code waits for a call.

        For a blocking call, ddpnb enters the context before the backend gets the call.
        """
        return contextlib.nullcontext()

    def ended(self, call: CollectiveCall) -> None:
        """Run once when a call is complete.  Any thread may run this method."""


Heard = TypeVar("Heard", bound=Listener)


Listeners = tuple[Listener, ...]
_listeners: Listeners = ()
_kept: "deque[Exchange]" = deque(maxlen=64)
"""Work objects that stay alive until a caller waits, because C++ may hold only their C++ part."""


@contextlib.contextmanager
def listening(listener: Heard) -> Iterator[Heard]:
    """Return a context manager in which a listener gets this process's calls."""
    add(listener)
    try:
        yield listener
    finally:
        remove(listener)
        _kept.clear()


def add(listener: Listener) -> None:
    """Add a listener for all later calls.  Listeners run in the order in which they were added."""
    global _listeners
    install()
    _listeners = (*_listeners, listener)


def remove(listener: Listener) -> None:
    """Remove a listener that ``add`` has added."""
    global _listeners
    _listeners = tuple(each for each in _listeners if each is not listener)


@functools.cache
def install() -> None:
    """Replace the methods of ``ProcessGroup`` and add the Python kernels, once per process."""
    if not torch_internals.intercepts_collectives.works:
        return
    known = {name: each for name, each in METHODS.items() if is_known(each)}
    for name, each in known.items():
        torch_internals.replace_method(name, partial(_method, each))
    by_operation = {each.operation: each for each in known.values() if not each.is_message}
    torch_internals.add_kernels({name: _kernel(each) for name, each in by_operation.items()})


def is_known(collective: Collective) -> bool:
    """Return True if torch's dispatcher has a collective in the form that ``METHODS`` expects."""
    return torch_internals.has_operation(
        collective.operation, collective.num_tensors, collective.root
    )


def _method(collective: Collective, original: Callable[..., Any]) -> Callable[..., Any]:

    @torch_internals.not_compiled
    @functools.wraps(original)
    def method(group: Any, *arguments: Any, **options: Any) -> Any:
        listeners = _listeners
        settings = options.get("opts", arguments[-1] if arguments else None)
        root = _root_of(collective, arguments, settings) if listeners else None
        if root is None:  # no listener, or arguments that torch.distributed never passes
            return original(group, *arguments, **options)
        blocks = not getattr(settings, "asyncOp", True)
        call = CollectiveCall(collective, group, arguments, root, is_blocking=blocks)

        def make() -> Any:
            work = _made_by(listeners, call)
            return original(group, *arguments, **options) if work is None else work

        with torch_internals.below_kernels():
            return _followed(call, listeners, make)

    return method


def _kernel(collective: Collective) -> Callable[..., Any]:
    """Return the kernel that the dispatcher calls before the backend's kernel."""
    backends_own, below = torch_internals.next_kernel(collective.operation)
    num = collective.num_tensors

    @torch_internals.not_compiled
    def kernel(keys: Any, *arguments: Any) -> Any:
        listeners = _listeners
        if not listeners:
            return backends_own(keys & below, *arguments)
        group = torch_internals.ProcessGroup.unbox(arguments[num])
        rest = arguments[num + 1 :]
        root = NO_ROOT if collective.root is None else rest[collective.root]
        blocks = collective.name == "broadcast"  # C++ waits at once, and ddpnb cannot see this wait
        compared = arguments[:num] + rest
        call = CollectiveCall(collective, group, compared, root, is_blocking=blocks, is_in_cpp=True)
        made: Any = None

        def make() -> Any:
            nonlocal made
            work = _made_by(listeners, call)
            made = (
                backends_own(keys & below, *arguments)
                if work is None
                else (arguments[0], work.boxed())
            )
            boxed = made[-1] if isinstance(made, tuple) else made
            is_followed = any(e.hears_ends or (blocks and e.hears_waits) for e in listeners)
            has_work = is_followed and boxed is not None
            return torch_internals.unboxed_work(boxed) if has_work else None

        _followed(call, listeners, make)
        return made

    return kernel


def _made_by(listeners: Listeners, call: CollectiveCall) -> Any:
    """Return the work of a call that a listener makes, or None if no listener makes the call."""
    return next((work for each in listeners if (work := each.make(call)) is not None), None)


def _root_of(collective: Collective, arguments: Sequence[Any], settings: Any) -> int | None:
    """Return a call's root, ``NO_ROOT`` if the call has no root, or None if the root is unknown."""
    if collective.tensor is not None and len(arguments) < collective.num_tensors:
        return None
    return NO_ROOT if collective.root is None else getattr(settings, "rootRank", None)


def _followed(call: CollectiveCall, listeners: Listeners, make: Callable[[], Any]) -> Any:
    has_ends = any(each.hears_ends for each in listeners)
    if not has_ends and not any(each.hears_waits for each in listeners):
        return _issued(call, listeners, make)
    if not call.is_blocking:
        work = _issued(call, listeners, make)
        is_over = call.is_in_cpp and not has_ends
        return work if work is None or is_over else Exchange(work, call, listeners)
    with _heard(call, listeners):
        work = _issued(call, listeners, make)
        try:
            if work is not None:
                work.wait()
        finally:
            _end(call, listeners)
    return work


def _issued(call: CollectiveCall, listeners: Listeners, make: Callable[[], Any]) -> Any:
    try:
        for each in listeners:
            each.begin(call)
        return make()
    except BaseException as error:
        for each in listeners:
            each.refused(call, error)
        raise


@contextlib.contextmanager
def _heard(call: CollectiveCall, listeners: Listeners) -> Iterator[None]:
    """Return a context manager that enters the ``waiting`` contexts of all listeners."""
    with contextlib.ExitStack() as waits:
        for each in listeners:
            waits.enter_context(each.waiting(call))
        yield


_ending = threading.Lock()


def _end(call: CollectiveCall, listeners: Listeners) -> None:
    with _ending:
        if not call.is_ended:
            call.is_ended = True
            for each in listeners:
                each.ended(call)


@final
class Exchange(dist.Work):
    """The ``Work`` of an asynchronous call.  It tells listeners about waits and the call's end."""

    def __init__(self, work: Any, call: CollectiveCall, listeners: Listeners) -> None:
        super().__init__()
        self._work, self._call, self._listeners = work, call, listeners
        has_ends = any(each.hears_ends for each in listeners)
        if has_ends and not call.collective.is_message:  # gloo's send and recv have no future
            torch_internals.future_of(work).add_done_callback(lambda _: _end(call, listeners))
        if not call.is_in_cpp:
            _kept.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is complete.  If the call fails, raise the backend's error."""
        with _heard(self._call, self._listeners):
            try:
                done = bool(self._work.wait(timeout) if timeout else self._work.wait())
            except RuntimeError:
                self.is_completed()  # ends a failed call; after a timeout, the call goes on
                raise
            _end(self._call, self._listeners)
        with contextlib.suppress(ValueError):  # a wait or the full deque has removed it
            _kept.remove(self)
        return done

    def is_completed(self) -> bool:
        """Return True if the call is complete, so that a wait would return at once."""
        if not self._work.is_completed():
            return False
        _end(self._call, self._listeners)
        return True

    def get_future(self) -> Any:
        """Return the future of the call's result.  C++ code may wait for this future."""
        self._call.is_in_cpp = True
        return torch_internals.future_of(self._work)


def _forwarded(name: str) -> Callable[..., Any]:
    def forward(self: Exchange, *arguments: Any) -> Any:
        return getattr(self._work, name)(*arguments)

    return forward


for _name in vars(dist.Work):
    if not _name.startswith("__") and _name not in (*vars(Exchange), "unbox"):
        setattr(Exchange, _name, _forwarded(_name))
