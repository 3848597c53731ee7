"""The check that all ranks call the same collective, before the backend has the call (ranks).

If ranks meet in one collective with tensors of different sizes, gloo ends the process.  So each
rank writes each call to its group's ``CollectiveLog`` and compares it with the other ranks' calls
of the same number.  Of two that differ at most one reaches the backend: whoever finds another call
raises.  The rank that waits in the backend is freed afterwards.
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final
from weakref import WeakKeyDictionary

from ddpnb.compat import torch_internals
from ddpnb.compat.probe import sentence
from ddpnb.rank.collectives import intercept
from ddpnb.rank.collectives.log import FILES, CollectiveLog, entry_of
from ddpnb.rank.collectives.table import METHODS, Call
from ddpnb.rank.stack import users_line


@final
class MismatchCheck(intercept.Listener):
    """Compares this process's collectives with the other ranks'."""

    def __init__(self) -> None:
        self._folder = Path()
        self._generation = -1
        self._logs: WeakKeyDictionary[Any, CollectiveLog | None] = WeakKeyDictionary()
        """By group; None: its calls are not compared."""
        self._num_opened: Counter[str] = Counter()
        self._trusts_cpp = False

    def start(self, folder: Path, generation: int) -> None:
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
        intercept.remove(self)
        intercept.add(self)

    def num_calls(self) -> dict[str, int | None]:
        """Return how many calls each group has had from this rank; see ``CollectiveLog``."""
        found: dict[str, int | None] = {}
        for group in torch_internals.process_groups():
            log = self._logs.get(group)
            found[group.group_name] = 0 if log is None else log.num_made
        return found

    @contextlib.contextmanager
    def trusting_torch(self) -> Iterator[None]:
        """Return a context in which calls from torch's C++ code are not compared.

        For a training that is known to make the same calls on all ranks: two calls from DDP
        take 2 % of a step of 15 ms.
        """
        self._trusts_cpp = True
        try:
            yield
        finally:
            self._trusts_cpp = False

    def begin(self, call: Call) -> None:
        """Compare a call with the other ranks'.

        Raises:
            CollectiveMismatchError: another rank has made another call.
        """
        if call.collective.is_message or (call.is_in_cpp and self._trusts_cpp):
            return
        group = call.group
        log = self._logs[group] if group in self._logs else self._open(call)
        if log is None:
            return
        entry, line = entry_of(call, log.ranks), users_line()
        try:
            log.write(entry, line)
        except BaseException as error:
            log.take_back(is_certain=isinstance(error, Exception))
            raise
        call.notes[self] = log

    def refused(self, call: Call, error: BaseException) -> None:
        """Note that there was no such call."""
        if self in call.notes:
            call.notes[self].take_back(is_certain=isinstance(error, Exception))

    def _open(self, call: Call) -> CollectiveLog | None:
        """Return the log of a new group; None if it is of no use, or if there is no room for it."""
        group, ranks, log = call.group, call.ranks, None
        if not ranks:  # not a group of torch.distributed's, or not yet
            return None
        if len(ranks) > 1:
            # Torch gives the name of a destroyed group to a new one.
            name = hashlib.sha256(f"{group.group_name} {sorted(ranks)}".encode()).hexdigest()[:16]
            self._num_opened[name] += 1
            start = FILES.format(generation=self._generation)
            path = self._folder / f"{start}{name}-{self._num_opened[name]}"
            with contextlib.suppress(OSError):
                log = CollectiveLog(path, place=group.rank(), ranks=ranks)
        self._logs[group] = log
        return log


def missing_features() -> tuple[str, ...]:
    """Return a sentence if this version of torch lets only some collectives be compared."""
    names = sorted({each.name for each in METHODS.values() if not intercept.is_known(each)})
    if not names or not torch_internals.intercepts_collectives.works:
        return ()  # if none can be compared, the probe itself says so
    lost = f"{', '.join(names)} not compared before gloo; `--check` still does it"
    return (sentence("torch", lost),)
