"""Which collectives has each rank of a group called, and do they match?  (ranks)

Each rank has a ring of its last calls in one file that all ranks of the host map, and writes to its
own ring only.  When two ranks write their call of the same number and then read the other's, at
least one of them finds the other's: every write and every read holds a lock, which orders memory.
"""

import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from ddpnb.rank.collectives.table import NO_ROOT, ROOT_WORDS, Call, dtype_name

FILES: Final = "calls-{generation}-"
"""How the name of a group's file begins."""
NOT_COMPARED = -1
"""Stands for the size if tensors of different sizes may meet."""
NUM_KEPT: Final = 64
"""Calls kept for each rank; a rank further behind finds nothing to compare with."""
TEXT_BYTES: Final = 111
_ENTRY: Final = struct.Struct(f"<{TEXT_BYTES}s?IIQ")
_KEY: Final = struct.Struct("<IQ")
_KEY_OFFSET: Final = _ENTRY.size - _KEY.size
_NUMBER: Final = struct.Struct("<Q")
_ACCEPTED: Final = NUM_KEPT * _ENTRY.size
"""Behind the ring: the number of the last call that the backend accepted."""
_DISPUTED: Final = _ACCEPTED + _NUMBER.size
"""Behind that: the number of the call that is in dispute; 0 if there is none."""
_RANK_BYTES: Final = _DISPUTED + _NUMBER.size
DISPUTE_SECONDS = 1.0
"""How long a backend may take to accept or refuse a call that differs from another rank's."""
POLL_SECONDS = 0.001
SETTLE_SECONDS = 0.05
"""How long to wait before raising, so that the error also names ranks that come a little later."""


class CollectiveMismatchError(RuntimeError):
    """The ranks of a group make different calls, or one call with tensors that do not match."""


def text_of(call: Call) -> tuple[bytes, int]:
    """Return the text by which a call is compared, and the text's checksum."""
    collective, arguments = call.collective, call.arguments
    if collective.tensor is None:
        return _text(call.name, None, call.root, NOT_COMPARED, ())
    part = arguments[collective.tensor]
    first = part if isinstance(part, Tensor) else part[0] if part else None
    if first is None:
        return _text(call.name, None, call.root, NOT_COMPARED, ())
    if collective.sizes != "equal" and not collective.is_sized(first, arguments):
        size = NOT_COMPARED
    elif part is first or len(part) == 1:
        size = first.numel()
    else:
        size = sum(each.numel() for each in part)
    return _text(call.name, first.dtype, call.root, size, first.shape)


def is_match(one: bytes, other: bytes) -> bool:
    """Return whether two ranks' calls may meet: ``[4]`` and ``[2, 2]`` may, as flat memory."""
    if one == other:
        return True
    *alike, size, _ = one.split(b"\t")
    *other_alike, other_size, _ = other.split(b"\t")
    not_compared = str(NOT_COMPARED).encode()
    return alike == other_alike and (size == other_size or not_compared in (size, other_size))


def spelled(text: bytes, ranks: Sequence[int], *, in_backward: bool = False) -> str:
    """Return a call in words: ``"broadcast from rank 0 with Float [3]"``.

    Args:
        text: what ``Collective.text`` returned.
        ranks: the group's, as the default group numbers them.
        in_backward: whether DDP's backward pass calls it.
    """
    name, kind, root, _, shape = text.decode().split("\t")
    words = [f"{name} of the backward pass" if in_backward else name]
    if int(root) != NO_ROOT:
        words.append(f"{ROOT_WORDS[name]} rank {ranks[int(root)]}")
    if kind:
        words.append(f"with {kind} {shape}")
    return " ".join(words)


class Entry(NamedTuple):
    """What one rank has written about one call."""

    place: int
    """The rank in the group."""
    text: bytes
    """What is compared, up to ``TEXT_BYTES``."""
    line: int
    """The line of the user's cell or script that made the call; 0 if it is not known."""
    in_backward: bool
    is_accepted: bool
    """Whether the backend has taken it."""
    is_disputed: bool
    """Whether its rank holds it back because another rank's call differs."""


@final
class CollectiveLog:
    """The calls of one group.

    Args:
        path: the group's file; the first rank to come makes it.
        place: this rank's number in the group.
        ranks: the group's ranks, as the default group numbers them.

    Raises:
        OSError: there is no room for the file.
    """

    def __init__(self, path: Path, *, place: int, ranks: Sequence[int]) -> None:
        self.place = place
        self.ranks = tuple(ranks)
        self._own = place * _RANK_BYTES
        self._others = [n * _RANK_BYTES for n in range(len(ranks)) if n != place]
        self._num_calls = 0
        self._is_certain = True
        self._lock = threading.Lock()
        size = len(ranks) * _RANK_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # else a full disk would end the process
            self._shared = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def write(self, text: bytes, checksum: int, line: int, in_backward: bool) -> tuple[int, bool]:
        """Write this rank's next call: an ``Entry``'s fields, and the text's checksum (32 bits).

        Returns:
            The call's number, and whether no other rank has written another call under it.
        """
        shared = self._shared
        with self._lock:
            self._num_calls = number = self._num_calls + 1
            start = number % NUM_KEPT * _ENTRY.size
            _ENTRY.pack_into(shared, self._own + start, text, in_backward, line, checksum, number)
        with self._lock:
            for other in self._others:
                seen = _KEY.unpack_from(shared, other + start + _KEY_OFFSET)
                if seen[1] == number and seen[0] != checksum:
                    return number, False
        return number, True

    def accept(self, number: int) -> None:
        """Note that the backend has taken a call of this rank."""
        with self._lock:
            _NUMBER.pack_into(self._shared, self._own + _ACCEPTED, number)

    @property
    def num_made(self) -> int | None:
        """How many calls this rank has made; None: it is not known of one that was interrupted."""
        return self._num_calls if self._is_certain else None

    def take_back(self, *, is_certain: bool = True) -> None:
        """Undo the last ``write``: the call was refused, or, not certain, it was interrupted."""
        self._is_certain = self._is_certain and is_certain
        self.set_disputed(0)
        with self._lock:
            start = self._own + self._num_calls % NUM_KEPT * _ENTRY.size
            _KEY.pack_into(self._shared, start + _KEY_OFFSET, 0, 0)
            self._num_calls -= 1

    def set_disputed(self, number: int) -> None:
        """Note which call this rank holds back; 0: none."""
        with self._lock:
            _NUMBER.pack_into(self._shared, self._own + _DISPUTED, number)

    def entries(self, number: int) -> list[Entry]:
        """Return the calls of a number that have been written."""
        found = []
        for place in range(len(self.ranks)):
            first = place * _RANK_BYTES
            with self._lock:  # the state before the call, which may be replaced until then
                (accepted,) = _NUMBER.unpack_from(self._shared, first + _ACCEPTED)
                (disputed,) = _NUMBER.unpack_from(self._shared, first + _DISPUTED)
            start = first + number % NUM_KEPT * _ENTRY.size
            with self._lock:
                text, in_backward, line, _, written = _ENTRY.unpack_from(self._shared, start)
            if written == number:
                state = accepted >= number, disputed == number
                found.append(Entry(place, text.rstrip(b"\0"), line, in_backward, *state))
        return found


def settle_dispute(log: CollectiveLog, number: int, script: str = "") -> None:
    """Return once the call of this rank may go to the backend.

    A call that differs may be one that the backend is about to refuse.  So only a call that the
    backend has accepted counts against this one.  Of several ranks in dispute, the first of the
    group goes to the backend, and the others hold their calls back until the outcome is known.

    Args:
        log: the group's.
        number: of the call.
        script: the path of the script that this rank runs; empty: a cell.

    Raises:
        CollectiveMismatchError: the backend has accepted another rank's call.
    """
    deadline = time.monotonic() + DISPUTE_SECONDS
    while True:
        log.set_disputed(0)  # before others are read: whoever comes later finds this call in force
        differing = _differing(log, number)
        if all(each.is_disputed and each.place > log.place for each in differing):
            return
        log.set_disputed(number)
        is_accepted = any(each.is_accepted for each in differing)
        if is_accepted or time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    time.sleep(SETTLE_SECONDS)
    entries = {each.place: each for each in (*differing, *log.entries(number))}
    raise CollectiveMismatchError(_described(list(entries.values()), log.ranks, script))


def _differing(log: CollectiveLog, number: int) -> list[Entry]:
    """Return the other ranks' calls of a number that do not match this rank's."""
    entries = log.entries(number)
    (own,) = (each for each in entries if each.place == log.place)
    return [each for each in entries if not is_match(own.text, each.text)]


@lru_cache(maxsize=1024)
def _text(
    name: str, dtype: torch.dtype | None, root: int, size: int, shape: tuple[int, ...]
) -> tuple[bytes, int]:
    kind = "" if dtype is None else dtype_name(dtype)
    text = f"{name}\t{kind}\t{root}\t{size}\t{list(shape)}".encode()[:TEXT_BYTES]
    return text, zlib.crc32(text)


def _described(entries: Sequence[Entry], ranks: Sequence[int], script: str) -> str:
    """Return the sentence that says which ranks make which call, and where in the script."""
    file = f" of {Path(script).name}" if script else ""
    calls: dict[str, list[int]] = {}
    for entry in sorted(entries, key=lambda entry: ranks[entry.place]):
        call = spelled(entry.text, ranks, in_backward=entry.in_backward)
        line = f" (line {entry.line}{file})" if entry.line else ""
        calls.setdefault(call + line, []).append(ranks[entry.place])
    parts = [
        f"rank {callers[0]} calls {call}"
        if len(callers) == 1
        else f"ranks {','.join(map(str, callers))} call {call}"
        for call, callers in calls.items()
    ]
    return f"the calls of the ranks do not match: {', but '.join(parts)}"
