"""Which calls of a store are made, also from C++ where a group is formed?  (Ranks.)"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ddpnb.compat import torch_internals

Hear = Callable[[str, str, object, float], None]
"""Takes the name of a call that has ended, its key and value, and when it began."""
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


@contextlib.contextmanager
def heard_stores(hear: Hear) -> Iterator[None]:
    """Return a context in which stores' calls are recorded, from C++ where a group is formed."""
    originals = {name: getattr(dist.Store, name) for name in STORE_CALLS}
    rest = {name: getattr(dist.Store, name, None) for name in OTHER_STORE_CALLS}
    for name, original in originals.items():
        setattr(dist.Store, name, _store_call(name, hear, original))
    default = None
    if dist.is_initialized() and dist.get_backend() == "gloo":  # NCCL's threads outlive the cell
        default = torch_internals.default_store()
    if default is not None:
        calls = {name: _store_call(name, hear, each) for name, each in originals.items()}
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


def _store_call(name: str, hear: Hear, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(store: Any, *arguments: Any, **options: Any) -> Any:
        start, result = time.monotonic(), None
        try:
            result = original(store, *arguments, **options)
        finally:
            key = arguments[0] if arguments else next(iter(options.values()), "")
            given = next(iter(arguments[1:2]), None) if name in ("set", "append") else result
            hear(name, _key(key), given, start)
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
