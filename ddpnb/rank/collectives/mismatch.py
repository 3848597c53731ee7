"""Checks that all ranks call the same collective before the backend gets the call.

If ranks call the same collective with tensors of different sizes, gloo kills the process.  To
prevent this, a host's ranks share a file for each group, and each rank writes its last calls to the
file.  After a rank has written a call, it reads the other ranks' calls with the same number.  Each
write or read holds a lock that orders memory accesses.  If two ranks write at the same time, at
least one finds the other rank's call.  A rank that finds a different call raises an error, so at
most one of the two calls reaches the backend.  ddpnb then releases the rank that waits in the
backend.  Runs on the ranks.
"""

import contextlib
import hashlib
import struct
import threading
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ddpnb.compat import torch_internals
from ddpnb.compat.probe import disabled_sentence
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.rank.collectives import intercept
from ddpnb.rank.collectives.shared_memory import mapped_file
from ddpnb.rank.collectives.table import METHODS, NO_ROOT, CollectiveCall
from ddpnb.rank.stack import users_line

NOT_COMPARED = -1
"""The value of ``CallRecord.size`` for a call in which ranks' tensors may differ in size."""
NUM_KEPT: Final = 64
"""Number of calls that a file keeps for each rank.  Ranks cannot compare older calls."""
TEXT_BYTES: Final = 140
_ENTRY: Final = struct.Struct(f"<{TEXT_BYTES}sIIqQ")
"""The format of an entry: a call's text, two checksums (call and shape), size and number."""
_KEY: Final = struct.Struct("<IIqQ")
"""The format of the part of an entry after the text.  Ranks compare only this part."""
_RANK_BYTES: Final = NUM_KEPT * _ENTRY.size
CHECK_POLL_SECONDS = 0.001
SETTLE_SECONDS = 0.05
"""Seconds that a rank waits before it raises an error about a different call.  In this time, the
other rank may withdraw its call.  The error also names calls that ranks make in this time."""


class CollectiveMismatchError(RuntimeError):
    """Raised if a group's ranks make different calls, or the same call with unequal tensors."""


@final
class MismatchCheck(intercept.Listener):
    """Compares this process's collectives with the other ranks' collectives."""

    def __init__(self) -> None:
        self._prefix = Path()
        """The prefix of the paths of all groups' files."""
        self._logs: WeakKeyDictionary[Any, CollectiveLog | None] = WeakKeyDictionary()
        """The log of each group, or None if ddpnb does not compare the group's calls."""
        self._num_opened: Counter[str] = Counter()
        self._is_exact = False

    def start(self, folder: Path, generation: int, *, is_exact: bool = False) -> None:
        """Start again with a new default group, and remove the files of older groups.

        ``folder`` is the run folder.  If ``is_exact``, ranks also compare the tensors' shapes.
        """
        self._is_exact = is_exact
        self._prefix = folder / f"calls-{generation}-"
        self._logs.clear()
        self._num_opened.clear()
        for path in folder.glob("calls-*"):
            if int(path.name.split("-")[1]) < generation:
                path.unlink(missing_ok=True)
        intercept.remove(self)
        intercept.add(self)

    @property
    def num_made(self) -> int:
        """Number of this rank's calls in the default group, or 0 if the number is unknown."""
        log = self._logs.get(dist.group.WORLD) if dist.is_initialized() else None
        return (log and log.num_made) or 0

    def num_calls(self) -> dict[str, int | None]:
        """Map each group's name to this rank's number of calls, or to None if unknown."""
        found: dict[str, int | None] = {}
        for group in torch_internals.process_groups():
            log = self._logs.get(group)
            found[group.group_name] = 0 if log is None else log.num_made
        return found

    def begin(self, call: CollectiveCall) -> None:
        """Compare a call with the other ranks' calls.

        Raises:
            CollectiveMismatchError: another rank has made a different call.
            ValueError: a message's tensor is on a GPU, so gloo would kill the process.
        """
        if call.collective.is_message:
            (tensor,) = call.tensors
            if tensor.device.type != "cpu" and dist.get_backend(call.group) == "gloo":
                raise ValueError(
                    f"{call.name} got a tensor on {tensor.device}, but gloo sends and receives "
                    "only CPU tensors. Use tensor.cpu(), or call all_reduce or broadcast."
                )
            return
        group = call.group
        log = self._logs[group] if group in self._logs else self._open(call)
        if log is None:
            return
        entry = entry_of(call, log.ranks)
        if self._is_exact and entry.size != NOT_COMPARED:
            entry = entry._replace(checksum=entry.checksum ^ entry.shape)
        call.notes[self] = log
        log.write(entry, users_line())

    def refused(self, call: CollectiveCall, error: BaseException) -> None:
        """Withdraw a call that has not reached the backend."""
        if self in call.notes:
            call.notes[self].take_back(is_certain=isinstance(error, Exception))

    def _open(self, call: CollectiveCall) -> "CollectiveLog | None":
        """Return a new group's log; None for an unknown group, a single rank or a full disk."""
        group, ranks, log = call.group, call.ranks, None
        if not ranks:  # torch.distributed does not know this group (yet)
            return None
        if len(ranks) > 1:
            # Torch reuses the name of a destroyed group for a new group.
            name = hashlib.sha256(f"{group.group_name} {sorted(ranks)}".encode()).hexdigest()[:16]
            self._num_opened[name] += 1
            path = Path(f"{self._prefix}{name}-{self._num_opened[name]}")
            with contextlib.suppress(OSError):
                log = CollectiveLog(path, place=group.rank(), ranks=ranks)
        self._logs[group] = log
        return log


def missing_checks() -> tuple[str, ...]:
    """If ddpnb cannot compare some of the collectives, return a warning with their names."""
    names = sorted({each.name for each in METHODS.values() if not intercept.is_known(each)})
    if not names or not torch_internals.intercepts_collectives.works:
        return ()  # the probe itself reports that no collective can be compared
    lost = f"only `--check` can compare these calls before they run: {', '.join(names)}"
    return (disabled_sentence("torch", lost),)


class CallRecord(NamedTuple):
    """The record of a call that a rank writes to the group's file."""

    checksum: int
    """Checksum of the call's name, root and dtype."""
    shape: int
    """Checksum of the shape.  If only the shapes differ, ddpnb warns and allows the call."""
    size: int
    """Number of elements in the call's tensors, or ``NOT_COMPARED``.  Shapes may differ."""
    text: str
    """Description of the call, such as ``"broadcast from rank 0 with Float [3]"``."""

    def matches(self, other: "CallRecord") -> bool:
        """Return True if two ranks' calls are compatible."""
        sizes = {self.size, other.size}
        return self.checksum == other.checksum and (len(sizes) == 1 or NOT_COMPARED in sizes)


def entry_of(call: CollectiveCall, ranks: Sequence[int]) -> CallRecord:
    """Return the entry of a call in a group with the given ranks."""
    name, tensors = call.name, call.tensors
    if call.root != NO_ROOT:
        name = f"{name} {call.collective.root_is} rank {ranks[call.root]}"
    if not tensors:
        return CallRecord(zlib.crc32(name.encode()), 0, NOT_COMPARED, name)
    size = sum(each.numel() for each in tensors) if call.are_sizes_equal else NOT_COMPARED
    return _entry(name, tensors[0].dtype, size, tensors[0].shape)


@lru_cache(maxsize=1024)
def _entry(name: str, dtype: torch.dtype, size: int, shape: tuple[int, ...]) -> CallRecord:
    kind = torch.empty(0, dtype=dtype).type().split(".")[-1].removesuffix("Tensor")
    checksum = zlib.crc32(f"{name} {kind}".encode())
    return CallRecord(checksum, hash(shape) % 2**32, size, f"{name} with {kind} {list(shape)}")


@final
class CollectiveLog:
    """The log of one group's calls, in a file that the group's first rank creates.

    ``place`` is this rank's number in the group.  ``ranks`` are numbered as in the default group.
    If there is no space for the file, raise ``OSError``.
    """

    def __init__(self, path: Path, *, place: int, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._own = place * _RANK_BYTES
        self._others = [n * _RANK_BYTES for n in range(len(ranks)) if n != place]
        self._num_calls = 0
        self._is_certain = True
        self._lock = threading.Lock()
        self._shared = mapped_file(path, len(ranks) * _RANK_BYTES)

    @property
    def num_made(self) -> int | None:
        """Number of this rank's calls, or None if an interrupt has made the number unknown."""
        return self._num_calls if self._is_certain else None

    def write(self, entry: CallRecord, line: str = "") -> None:
        """Write this rank's next call and the user's line, then compare the calls of all ranks.

        Raises:
            CollectiveMismatchError: another rank's call still differs after ``SETTLE_SECONDS``.
        """
        shared, checksum, size = self._shared, entry.checksum, entry.size
        text = f"{entry.text} ({line})" if line else entry.text
        with self._lock:
            self._num_calls = number = self._num_calls + 1
            start = number % NUM_KEPT * _ENTRY.size
            _ENTRY.pack_into(
                shared, self._own + start, text.encode(), checksum, entry.shape, size, number
            )
        with self._lock:
            start += TEXT_BYTES
            seen = [_KEY.unpack_from(shared, other + start) for other in self._others]
        for other_checksum, other_shape, other_size, other_number in seen:
            if other_number != number:
                continue
            if other_checksum != checksum or other_size != size:
                self._settle(entry, number)
            elif other_shape != entry.shape and size != NOT_COMPARED:
                time.sleep(CHECK_POLL_SECONDS)  # the shape may become visible after the number
                found = self._entries(number)
                if all(each.shape == entry.shape for each in found.values()):
                    continue
                why = "The shapes differ, so elements are combined in memory order."
                warnings.warn(f"{_spoken(found)}. {why}", stacklevel=2)
                return

    def take_back(self, *, is_certain: bool = True) -> None:
        """Undo the last ``write``.  ``is_certain`` is False if the call was interrupted."""
        self._is_certain = self._is_certain and is_certain
        with self._lock:
            start = self._own + self._num_calls % NUM_KEPT * _ENTRY.size
            _KEY.pack_into(self._shared, start + TEXT_BYTES, 0, 0, 0, 0)
            self._num_calls -= 1

    def _settle(self, entry: CallRecord, number: int) -> None:
        """Raise an error unless other ranks withdraw different calls within ``SETTLE_SECONDS``."""
        seen: dict[int, CallRecord] = {}
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            found = self._entries(number)
            if all(entry.matches(each) for each in found.values()):
                return
            seen |= found
            time.sleep(CHECK_POLL_SECONDS)
        is_of_buffers = any(frame.name == "_sync_buffers" for frame in traceback.extract_stack())
        raise CollectiveMismatchError(
            f"the calls of the ranks do not match: {_spoken(seen)}"
            + ". DDP makes these calls to send the model's buffers, so a buffer of rank 0 has "
            "another size or does not exist on each rank. Register buffers in __init__, with one "
            "size for all ranks, or create DDP with broadcast_buffers=False" * is_of_buffers
        )

    def _entries(self, number: int) -> dict[int, CallRecord]:
        found = {}
        for place, rank in enumerate(self.ranks):
            start = place * _RANK_BYTES + number % NUM_KEPT * _ENTRY.size
            with self._lock:
                text, checksum, shape, size, written = _ENTRY.unpack_from(self._shared, start)
            if written == number:
                said = text.rstrip(b"\0").decode(errors="replace")
                found[rank] = CallRecord(checksum, shape, size, said)
        return found


def _spoken(entries: Mapping[int, CallRecord]) -> str:
    """Describe each rank's call, for example ``"rank 0 calls ... , but rank 1 calls ..."``."""
    calls: dict[str, list[int]] = {}
    for rank in sorted(entries):
        calls.setdefault(entries[rank].text, []).append(rank)
    return ", but ".join(
        f"{spoken_ranks(callers)} {'calls' if len(callers) == 1 else 'call'} {call}"
        for call, callers in calls.items()
    )
