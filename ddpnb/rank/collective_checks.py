"""The check that all ranks call the same collective, before the backend has the call (ranks).

If ranks meet in one collective with tensors of different sizes, gloo ends the process.  So each
rank writes each call to its group's ``CollectiveLog`` and compares it with the other ranks' calls
of the same number.  If two differ, at most one of them reaches the backend.  The other rank raises
once the backend has accepted that one.  The rank that waits in the backend is freed afterwards.

Calls reach a backend in two ways.  Users call methods of ``ProcessGroup``, which are wrapped.
Torch's own C++ code, such as DDP in the backward pass, goes through the dispatcher alone.  There a
Python kernel runs before the backend's own.  It costs more, so the wrapped methods bypass it.
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
from ddpnb.rank.collective_log import (
    FILES,
    METHODS,
    NO_ROOT,
    Collective,
    CollectiveLog,
    mark_of,
    settle_dispute,
)
from ddpnb.rank.comm.flat_buffers import num_bytes
from ddpnb.rank.comm.rendezvous import (
    CancellationToken,
    FreeableMessage,
    FreeableWork,
    freeable_future,
)

CELLS = f"{os.sep}ipykernel_"
"""A part of the file name of every cell's code."""
_users_file = CELLS
"""A part of the file name of the code with the user's lines."""
_users_mark = 0
"""Is added to these lines; see ``collective_log.mark_of``."""
USUAL_DEPTH = 5
"""How far up the stack the user's line is if a cell calls a function of ``torch.distributed``."""
BACKWARD = torch.autograd.backward.__code__.co_filename
"""The file of torch that computes gradients."""
DDP_FRAMES = 3
"""Between torch's function and its caller are those of a decorator."""
ALL_REDUCE = "allreduce_"
"""The operation of DDP's backward pass, in which computation goes on beside it."""
WHOLE_BYTES = 1000
"""A message of so many bytes comes as a whole or not at all; gloo's end of it can be closed."""
MAX_FRAMES = 24
"""How far up the stack to look for the user's line."""


@final
class CollectiveChecker:
    """Compares this process's collectives with the other ranks'."""

    def __init__(self) -> None:
        self._folder = Path()
        self._generation = -1
        self._logs: dict[int, tuple[weakref.ref[ProcessGroup], CollectiveLog | None]] = {}
        self._num_opened: Counter[str] = Counter()
        self._kernels: torch_internals.CollectiveKernels | None = None
        self._compared: dict[str, Collective] = {}
        self.token: CancellationToken | None = None
        """Ends the waits for collectives of Python code, where the ranks are on several hosts."""

    def begin(self, folder: Path, generation: int) -> None:
        """Start afresh with a new default group, and remove the files of older ones.

        Args:
            folder: a private directory that all ranks of this host share.
            generation: how many default groups there were before.
        """
        self._folder, self._generation = folder, generation
        self._logs.clear()
        self._num_opened.clear()
        for path in folder.glob(FILES.format(generation="*") + "*"):
            if int(path.name.split("-")[1]) < generation:
                path.unlink(missing_ok=True)
        if self._kernels is None and torch_internals.intercepts_collectives.works:
            self._compared = {name: each for name, each in METHODS.items() if is_known(each)}
            for name, collective in self._compared.items():
                torch_internals.replace_method(name, partial(self._method, collective))
            for name in ("send", "recv", "recv_anysource"):
                torch_internals.replace_method(name, self._message)
            self._intercept_torch()

    def digests(self) -> dict[str, int]:
        """Return for each group a number that is the same on ranks with the same last calls."""
        logs = [log for _, log in self._logs.values() if log is not None]
        return {log.name: log.digest() for log in logs}

    def num_calls(self) -> dict[str, int | None]:
        """Return how many calls each group has had from this rank; see ``CollectiveLog``."""
        found: dict[str, int | None] = {}
        for group in torch_internals.process_groups():
            known = self._logs.get(id(group))
            log = known[1] if known and known[0]() is group else None
            found[group.group_name] = 0 if log is None else log.num_made
        return found

    def missing_features(self) -> tuple[str, ...]:
        """Return a sentence if this version of torch lets only some collectives be compared."""
        names = sorted({each.name for each in METHODS.values() if not is_known(each)})
        if not names or not torch_internals.intercepts_collectives.works:
            return ()  # if none can be compared, the probe itself says so
        lost = f"{', '.join(names)} not compared before gloo; `--check` still does it"
        return (sentence("torch", lost),)

    @contextlib.contextmanager
    def trusting_torch(self) -> Iterator[None]:
        """Return a context in which calls from torch's C++ code are not compared.

        For a training that is known to make the same calls on all ranks: two calls from DDP
        take 2 % of a step of 15 ms.
        """
        if self._kernels is None:
            yield
            return
        self._kernels.remove()
        if self.token is not None:
            self._intercept_torch(compares=False)
        try:
            yield
        finally:
            self._kernels.remove()
            self._intercept_torch()

    def _intercept_torch(self, *, compares: bool = True) -> None:
        """Put a kernel between torch's own callers and the backends."""
        by_operation = {each.operation: each for each in self._compared.values()}
        make = self._kernel if compares else self._freeing_kernel
        self._kernels = torch_internals.CollectiveKernels(
            {operation: make(collective) for operation, collective in by_operation.items()}
        )

    def _method(self, collective: Collective, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of a method of ``ProcessGroup``."""

        @torch_internals.not_compiled
        @functools.wraps(original)
        def method(group: ProcessGroup, *arguments: Any, **options: Any) -> Any:
            root = _root_of(collective, arguments)
            if root is None:  # not called as torch.distributed does: the kernel compares it
                return original(group, *arguments, **options)
            if self.token is not None:
                self.token.check_usable()
            make = original, group, *arguments
            with torch_internals.below_autograd():
                work = self._compare_and_make(group, collective, arguments, root, *make, **options)
            if self.token is None or work is None:
                return work
            if _called_by_ddp():
                future = freeable_future(work, self.token)
                return torch_internals.unboxed_work(torch_internals.work_of(future))
            return FreeableWork(work, self.token)

        return method

    def _message(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of a method of ``ProcessGroup`` for messages between two ranks."""

        @torch_internals.not_compiled
        @functools.wraps(original)
        def method(group: ProcessGroup, tensors: list[torch.Tensor], *rest: Any) -> Any:
            work = original(group, tensors, *rest)
            if self.token is None or work is None or num_bytes(tensors) <= WHOLE_BYTES:
                return work
            return FreeableMessage(work, self.token)

        return method

    def _kernel(self, collective: Collective) -> Callable[..., Any]:
        """Return what the dispatcher calls before the backend's own kernel."""
        make_freeable = self._freeing_kernel(collective)
        num = collective.num_tensors

        @torch_internals.not_compiled
        def kernel(keys: Any, *arguments: Any) -> Any:
            group, rest = ProcessGroup.unbox(arguments[num]), arguments[num + 1 :]
            root = NO_ROOT if collective.root is None else rest[collective.root]
            compared = arguments[:num] + rest
            make = make_freeable, keys, *arguments
            return self._compare_and_make(group, collective, compared, root, *make)

        return kernel

    def _freeing_kernel(self, collective: Collective) -> Callable[..., Any]:
        """Return a kernel that makes a call, and work that an abort of the group ends."""
        backends_own = torch_internals.next_kernel(collective.operation)

        @torch_internals.not_compiled
        def kernel(keys: Any, *arguments: Any) -> Any:
            made = backends_own(keys, *arguments)
            if self.token is None:
                return made
            *tensors, boxed = made if isinstance(made, tuple) else (made,)
            work = torch_internals.unboxed_work(boxed)
            if collective.operation != ALL_REDUCE:  # torch's C++ code waits for these at once
                FreeableWork(work, self.token).wait()
                return made
            freeable = torch_internals.work_of(freeable_future(work, self.token))
            return (*tensors, freeable) if tensors else freeable

        return kernel

    def _compare_and_make(
        self,
        group: ProcessGroup,
        collective: Collective,
        compared: Sequence[Any],
        root: int,
        call: Callable[..., Any],
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Compare a call with the other ranks', make it, and note that the backend accepts it.

        Raises:
            CollectiveMismatchError: another rank has made another call.
        """
        known = self._logs.get(id(group))
        log = known[1] if known and known[0]() is group else self._open(group)
        if log is None:
            return call(*arguments, **options)
        line, in_backward = _users_place()
        text = collective.text(compared, root)
        try:
            number, is_alike = log.write(*text, line, in_backward)
            if not is_alike:
                settle_dispute(log, number, _users_file if _users_mark else "")
            result = call(*arguments, **options)
        except BaseException as error:
            log.take_back(is_certain=isinstance(error, Exception))
            raise
        log.accept(number)
        return result

    def _open(self, group: ProcessGroup) -> CollectiveLog | None:
        """Return the log of a new group; None if it is of no use, or if there is no room for it."""
        try:
            ranks = dist.get_process_group_ranks(group)
        except KeyError:  # not a group of torch.distributed's, or not yet
            return None
        log = None
        if len(ranks) > 1:
            # Torch gives the name of a destroyed group to a new one.
            name = hashlib.sha256(f"{group.group_name} {sorted(ranks)}".encode()).hexdigest()[:16]
            self._num_opened[name] += 1
            start = FILES.format(generation=self._generation)
            path = self._folder / f"{start}{name}-{self._num_opened[name]}"
            with contextlib.suppress(OSError):
                log = CollectiveLog(path, place=group.rank(), ranks=ranks)
        self._logs[id(group)] = (weakref.ref(group), log)
        return log


@contextlib.contextmanager
def lines_of(path: str) -> Iterator[None]:
    """Return a context in which the user's lines are those of a script."""
    global _users_file, _users_mark
    _users_file, _users_mark = path, 0 if path == CELLS else mark_of(path)
    try:
        yield
    finally:
        _users_file, _users_mark = CELLS, 0


def users_file() -> str:
    """Return a part of the file name of the code with the user's lines."""
    return _users_file


def is_known(collective: Collective) -> bool:
    """Return whether torch's dispatcher has a collective as it stands in ``METHODS``."""
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


def _called_by_ddp() -> bool:
    """Return whether DDP's Python code calls: under ``Join`` its work goes on to C++, as it is."""
    frame: FrameType | None = sys._getframe(3)
    for _ in range(DDP_FRAMES):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "torch.nn.parallel.distributed":
            return True
        frame = frame.f_back
    return False


def _users_place() -> tuple[int, bool]:
    """Return the user's innermost line, 0 if there is none near, and whether DDP calls."""
    try:
        frame = sys._getframe(USUAL_DEPTH)
    except ValueError:  # called from C++, in a thread of its own
        return 0, False
    if _users_file in frame.f_code.co_filename:
        return frame.f_lineno + _users_mark, False
    nearest: FrameType | None = sys._getframe(3)
    in_backward = False
    for _ in range(MAX_FRAMES):
        if nearest is None:
            break
        if _users_file in nearest.f_code.co_filename:
            return nearest.f_lineno + _users_mark, in_backward
        in_backward = in_backward or nearest.f_code.co_filename == BACKWARD
        nearest = nearest.f_back
    return 0, in_backward
