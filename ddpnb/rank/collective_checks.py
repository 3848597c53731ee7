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
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ddpnb.compat import torch_internals
from ddpnb.compat.probe import sentence
from ddpnb.rank.collective_calls import METHODS, NO_ROOT, Collective, is_match, spelled
from ddpnb.rank.collective_log import CollectiveLog, Entry

FILES = "calls-{generation}-"
CELLS = f"{os.sep}ipykernel_"
"""What is in the file name of every cell's code."""
USUAL_DEPTH = 5
"""How far up the user's line is where a cell calls a function of ``torch.distributed``."""
BACKWARD = torch.autograd.backward.__code__.co_filename
"""Torch's file of what computes gradients."""
MAX_FRAMES = 24
"""How far up the stack the user's line is looked for."""


class CollectiveMismatchError(RuntimeError):
    """The ranks of a group are in different calls, or in one with tensors that do not match."""


@final
class CollectiveChecker:
    """Compares the collectives of this process with the other ranks'."""

    def __init__(self) -> None:
        self._folder = Path()
        self._generation = -1
        self._collective_logs: dict[
            int, tuple[weakref.ref[ProcessGroup], CollectiveLog | None]
        ] = {}
        self._num_opened: Counter[str] = Counter()
        self._kernels: torch_internals.CollectiveKernels | None = None
        self._compared: dict[str, Collective] = {}

    def begin(self, folder: Path, generation: int) -> None:
        """Start anew with a new default group, and remove what older ones have left.

        Args:
            folder: a private directory that all ranks of this host share.
            generation: how many default groups there were before.
        """
        self._folder, self._generation = folder, generation
        self._collective_logs.clear()
        self._num_opened.clear()
        for path in folder.glob(FILES.format(generation="*") + "*"):
            if int(path.name.split("-")[1]) < generation:
                path.unlink(missing_ok=True)
        if self._kernels is None and torch_internals.intercepts_collectives.works:
            self._compared = {name: each for name, each in METHODS.items() if is_known(each)}
            for name, collective in self._compared.items():
                torch_internals.replace_method(name, partial(self._method, collective))
            self._watch_torch()

    def missing_features(self) -> tuple[str, ...]:
        """Return a sentence where some collectives alone are not compared with this torch."""
        names = sorted({each.name for each in METHODS.values() if not is_known(each)})
        if not names or not torch_internals.intercepts_collectives.works:
            return ()  # that none is compared is said of all at once
        lost = f"{', '.join(names)} not compared before gloo; `--check` still does it"
        return (sentence("torch", lost),)

    @contextlib.contextmanager
    def trusting_torch(self) -> Iterator[None]:
        """Return a context in which what torch calls from C++ is not compared.

        For a training that is known to call the same on all ranks: two calls from DDP in a
        step of 15 ms take 2 % of it.
        """
        if self._kernels is None:
            yield
            return
        self._kernels.remove()
        try:
            yield
        finally:
            self._watch_torch()

    def _watch_torch(self) -> None:
        """Step in between torch's own callers and the backends."""
        by_operation = {each.operation: each for each in self._compared.values()}
        self._kernels = torch_internals.CollectiveKernels(
            {operation: self._kernel(collective) for operation, collective in by_operation.items()}
        )

    def _method(self, collective: Collective, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands in for a method of ``ProcessGroup``."""

        @functools.wraps(original)
        def method(group: ProcessGroup, *arguments: Any, **options: Any) -> Any:
            root = _root_of(collective, arguments)
            if root is None:  # not called as torch.distributed does: the kernel sees it
                return original(group, *arguments, **options)
            collective_log = self._enter(group, collective, arguments, root)
            with _taken_back_if_refused(collective_log), torch_internals.below_autograd():
                return original(group, *arguments, **options)

        return method

    def _kernel(self, collective: Collective) -> Callable[..., Any]:
        """Return what the dispatcher calls before the backend's own kernel."""
        carry_out = torch_internals.next_kernel(collective.operation)
        num = collective.num_tensors

        def kernel(keys: Any, *arguments: Any) -> Any:
            group, rest = ProcessGroup.unbox(arguments[num]), arguments[num + 1 :]
            root = NO_ROOT if collective.root is None else rest[collective.root]
            collective_log = self._enter(group, collective, arguments[:num] + rest, root)
            with _taken_back_if_refused(collective_log):
                return carry_out(keys, *arguments)

        return kernel

    def _enter(
        self, group: ProcessGroup, collective: Collective, arguments: Sequence[Any], root: int
    ) -> CollectiveLog | None:
        """Write a call down, and compare it with the others'.

        Returns:
            Where it is written; None where there is nobody to compare with.

        Raises:
            CollectiveMismatchError: another rank has made another call.
        """
        known = self._collective_logs.get(id(group))
        collective_log = known[1] if known and known[0]() is group else self._open(group)
        if collective_log is None:
            return None
        line, in_backward = _users_place()
        if not collective_log.write(*collective.text(arguments, root), line, in_backward):
            entries = collective_log.entries()
            (mine,) = (entry for entry in entries if entry.place == collective_log.place)
            if not all(is_match(mine.text, entry.text) for entry in entries):
                collective_log.take_back()
                raise CollectiveMismatchError(_told(entries, collective_log.ranks))
        return collective_log

    def _open(self, group: ProcessGroup) -> CollectiveLog | None:
        """Return the ledger of a group's life; None where there is no use or no room for it."""
        try:
            ranks = dist.get_process_group_ranks(group)
        except KeyError:  # not a group of torch.distributed's, or not yet
            return None
        collective_log = None
        if len(ranks) > 1:
            # A name may come again: torch gives it away anew where a group was destroyed.
            name = hashlib.sha256(f"{group.group_name} {sorted(ranks)}".encode()).hexdigest()[:16]
            self._num_opened[name] += 1
            start = FILES.format(generation=self._generation)
            path = self._folder / f"{start}{name}-{self._num_opened[name]}"
            with contextlib.suppress(OSError):
                collective_log = CollectiveLog.open(path, place=group.rank(), ranks=ranks)
        self._collective_logs[id(group)] = (weakref.ref(group), collective_log)
        return collective_log


@contextlib.contextmanager
def _taken_back_if_refused(collective_log: CollectiveLog | None) -> Iterator[None]:
    """Return a context for the call itself: what raises was not made, and not written down."""
    try:
        yield
    except BaseException:
        if collective_log is not None:
            collective_log.take_back()
        raise


def is_known(collective: Collective) -> bool:
    """Tell whether torch's dispatcher has a collective as it stands in ``METHODS``."""
    return torch_internals.has_operation(
        collective.operation, collective.num_tensors, collective.root
    )


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
        in_backward = in_backward or frame.f_code.co_filename == BACKWARD
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
