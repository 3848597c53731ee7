"""Do all ranks call the same collective?  Asked before the backend has the call.  (Rank side.)

Where ranks meet in one collective with tensors of different sizes, gloo ends a process.  So
each rank writes each call into its group's ``Ledger``, and looks what the others on this host
have written as their call of the same number.  Where two do not match, whoever comes second
raises, and the other, which waits by then, is freed.

Two ways lead to the backend.  Users come by methods of ``ProcessGroup``.  What torch calls
from C++, as DDP does in the backward pass, comes by the dispatcher alone: a kernel in Python
is called there, above the backend's, which costs more; so the methods pass it by.
"""

import contextlib
import functools
import hashlib
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from ddpnb.rank.collectives import METHODS, NO_ROOT, Collective, is_match, spelled
from ddpnb.rank.ledger import Entry, Ledger

FILES = "calls-{generation}-"
CELLS = f"{os.sep}ipykernel_"
"""What is in the file name of every cell's code."""
USUAL_DEPTH = 5
"""How far up the user's line is where a cell calls a function of ``torch.distributed``."""
MAX_FRAMES = 24
"""How far up the stack the user's line is looked for."""

_BELOW_AUTOGRAD = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.ADInplaceOrView)


class CollectiveMismatchError(RuntimeError):
    """The ranks of a group are in different calls, or in one with tensors that do not match."""


@final
class Agreement:
    """Compares the collectives of this process with the other ranks'."""

    def __init__(self) -> None:
        self._folder = Path()
        self._generation = -1
        self._ledgers: dict[int, tuple[weakref.ref[ProcessGroup], Ledger | None]] = {}
        self._num_opened: Counter[str] = Counter()
        self._library: Any = None

    def begin(self, folder: Path, generation: int) -> None:
        """Start anew with a new default group, and remove what older ones have left.

        Args:
            folder: a private directory that all ranks of this host share.
            generation: how many default groups there were before.
        """
        self._folder, self._generation = folder, generation
        self._ledgers.clear()
        self._num_opened.clear()
        for path in folder.glob(FILES.format(generation="*") + "*"):
            if int(path.name.split("-")[1]) < generation:
                path.unlink(missing_ok=True)
        if self._library is None:
            for name, collective in METHODS.items():
                setattr(ProcessGroup, name, self._method(getattr(ProcessGroup, name), collective))
            self._watch_torch()

    @contextlib.contextmanager
    def trusting_torch(self) -> Iterator[None]:
        """Return a context in which what torch calls from C++ is not compared.

        For a training that is known to call the same on all ranks: two calls from DDP in a
        step of 15 ms take 2 % of it.
        """
        if self._library is None:
            yield
            return
        self._library._destroy()
        try:
            yield
        finally:
            self._watch_torch()

    def _watch_torch(self) -> None:
        """Step in between torch's own callers and the backends."""
        self._library = torch.library.Library("c10d", "IMPL")
        for collective in {each.operation: each for each in METHODS.values()}.values():
            kernel = self._kernel(collective)
            self._library.impl(collective.operation, kernel, "Autograd", with_keyset=True)

    def _method(self, original: Callable[..., Any], collective: Collective) -> Callable[..., Any]:
        """Return what stands in for a method of ``ProcessGroup``."""

        @functools.wraps(original)
        def method(group: ProcessGroup, *arguments: Any, **options: Any) -> Any:
            root = _root_of(collective, arguments)
            if root is None:  # not called as torch.distributed does: the kernel sees it
                return original(group, *arguments, **options)
            ledger = self._enter(group, collective, arguments, root)
            with _taken_back_if_refused(ledger), torch._C._AutoDispatchBelowAutograd():
                return original(group, *arguments, **options)

        return method

    def _kernel(self, collective: Collective) -> Callable[..., Any]:
        """Return what the dispatcher calls before the backend's own kernel."""
        operation = getattr(torch.ops.c10d, collective.operation).default
        num = collective.num_tensors

        def kernel(keys: Any, *arguments: Any) -> Any:
            group, rest = ProcessGroup.unbox(arguments[num]), arguments[num + 1 :]
            root = NO_ROOT if collective.root is None else rest[collective.root]
            ledger = self._enter(group, collective, arguments[:num] + rest, root)
            with _taken_back_if_refused(ledger):
                return operation.redispatch(keys & _BELOW_AUTOGRAD, *arguments)

        return kernel

    def _enter(
        self, group: ProcessGroup, collective: Collective, arguments: Sequence[Any], root: int
    ) -> Ledger | None:
        """Write a call down, and compare it with the others'.

        Returns:
            Where it is written; None where there is nobody to compare with.

        Raises:
            CollectiveMismatchError: another rank has made another call.
        """
        known = self._ledgers.get(id(group))
        ledger = known[1] if known and known[0]() is group else self._open(group)
        if ledger is None:
            return None
        line, in_backward = _users_place()
        if not ledger.write(*collective.text(arguments, root), line, in_backward):
            entries = ledger.entries()
            (mine,) = (entry for entry in entries if entry.place == ledger.place)
            if not all(is_match(mine.text, entry.text) for entry in entries):
                ledger.take_back()
                raise CollectiveMismatchError(_told(entries, ledger.ranks))
        return ledger

    def _open(self, group: ProcessGroup) -> Ledger | None:
        """Return the ledger of a group's life; None where there is no use or no room for it."""
        ranks = dist.distributed_c10d._world.pg_group_ranks.get(group)
        if ranks is None:  # not a group of torch.distributed's, or not yet
            return None
        ledger = None
        if len(ranks) > 1:
            # A name may come again: torch gives it away anew where a group was destroyed.
            name = hashlib.sha256(f"{group.group_name} {sorted(ranks)}".encode()).hexdigest()[:16]
            self._num_opened[name] += 1
            start = FILES.format(generation=self._generation)
            path = self._folder / f"{start}{name}-{self._num_opened[name]}"
            in_order = sorted(ranks, key=lambda rank: ranks[rank])
            with contextlib.suppress(OSError):
                ledger = Ledger.open(path, place=group.rank(), ranks=in_order)
        self._ledgers[id(group)] = (weakref.ref(group), ledger)
        return ledger


@contextlib.contextmanager
def _taken_back_if_refused(ledger: Ledger | None) -> Iterator[None]:
    """Return a context for the call itself: what raises was not made, and not written down."""
    try:
        yield
    except BaseException:
        if ledger is not None:
            ledger.take_back()
        raise


def _root_of(collective: Collective, arguments: Sequence[Any]) -> int | None:
    """Return the root in a method's arguments, ``NO_ROOT`` without one, None if unknown."""
    if collective.tensor is not None and len(arguments) < collective.num_tensors:
        return None
    if collective.root is None:
        return NO_ROOT
    root: int | None = getattr(arguments[-1], "rootRank", None)
    return root


def _users_place() -> tuple[int, bool]:
    """Return the user's innermost line, 0 if there is none near, and whether DDP calls."""
    try:
        frame = sys._getframe(USUAL_DEPTH)
    except ValueError:  # C++ called, in a thread of its own
        return 0, False
    if CELLS in frame.f_code.co_filename:
        return frame.f_lineno, False
    return _nearest_place(sys._getframe(3))


def _nearest_place(frame: FrameType | None) -> tuple[int, bool]:
    in_backward = False
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        if CELLS in frame.f_code.co_filename:
            return frame.f_lineno, in_backward
        in_backward = in_backward or frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return 0, in_backward


def _told(entries: Sequence[Entry], ranks: Sequence[int]) -> str:
    """Say which ranks are in which call."""
    calls: dict[str, list[int]] = {}
    for entry in sorted(entries, key=lambda entry: ranks[entry.place]):
        call = spelled(entry.text, ranks, in_backward=entry.in_backward)
        line = f" (line {entry.line})" if entry.line else ""
        calls.setdefault(call + line, []).append(ranks[entry.place])
    told = [f"{_who(callers)} {call}" for call, callers in calls.items()]
    return f"the calls of the ranks do not match: {', but '.join(told)}"


def _who(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} calls"
    return f"ranks {','.join(map(str, ranks))} call"
