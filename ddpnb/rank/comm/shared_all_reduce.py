"""How do ranks of one host add tensors up in shared memory?  (Rank side.)

Each rank has slots in one file that all have mapped.  A tensor goes through them piece by
piece, each small enough to stay in the processor's cache:

two ranks    each copies its piece into its slot, and the next piece too before it waits for
             the other's; each adds the other's slot to its own piece
more ranks   each copies into its slot what others will sum, all wait for all; rank r adds up
             part r of all slots and puts the sum into its own; all wait for all; each copies
             the other sums out

Pieces take turns in four sets of slots, so that nobody overwrites what another still reads.
Who writes turn t has heard from all others that they have written turn t - 2, which they do
after they have read turn t - 4, the last one in the same set.

Ranks wait for each other by a byte through a local socket each: the kernel's locks order
what is written before and read after, on any processor; and where a rank dies or lets go,
its sockets close, and all others know at once.
"""

import contextlib
import socket
import struct
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Final, Self, final

import torch
import torch.distributed as dist
from torch import Tensor

from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.comm.packed_tensors import create_shared
from ddpnb.rank.comm.shm_transport import set_timeout, socket_path

PIECE_BYTES: Final = 1 << 20
"""Of the sizes from 64 KB to 44 MB this was the fastest, or close to it, with 2 ranks."""
_NUM_SETS: Final = 4
_MEETING_SECONDS: Final = 60.0
_HANDSHAKE: Final = struct.Struct("!i")
Turn = tuple[Tensor, list[Tensor]]
"""A piece, and the slots that it goes through: one for each rank, as long as it is."""


@final
class SharedAllReduce:
    """Sums of tensors over all ranks of the default group, which all live on this host.

    Args:
        raw: the shared memory, uint8, shape (sets x ranks x ``PIECE_BYTES``,).
        rank: this rank.
        peers: a connection to each other rank, by rank.
        timeout_seconds: how long to wait for a rank that is alive.
        lifeline: frees this rank from waiting for another.
    """

    def __init__(
        self,
        raw: Tensor,
        *,
        rank: int,
        peers: dict[int, socket.socket],
        timeout_seconds: float,
        cancellation: CancellationToken,
    ) -> None:
        self._raw = raw
        self._rank = rank
        self._peers = peers
        self._num_ranks = len(peers) + 1
        self._turn = 0
        self._slots: dict[torch.dtype, list[list[Tensor]]] = {}
        self._on_wait: Callable[[bool], None] = _nobody_listens
        for peer in peers.values():
            set_timeout(peer, timeout_seconds)
        self._held = contextlib.ExitStack()
        self._held.enter_context(cancellation.held(self._hang_up))

    @classmethod
    def open(
        cls,
        folder: Path,
        name: str,
        *,
        rank: int,
        num_ranks: int,
        timeout_seconds: float,
        cancellation: CancellationToken,
    ) -> Self:
        """Meet the other ranks; takes part: every rank of the default group, in one folder.

        Nothing is left in the folder.

        Raises:
            UserError: there is no room for the shared memory.
            RuntimeError: a rank did not come.
        """
        path, size = folder / f"{name}.sum", _NUM_SETS * num_ranks * PIECE_BYTES
        address = str(socket_path(folder, f"{name}.{rank}"))
        with contextlib.ExitStack() as made:
            if rank == 0:
                create_shared(path, size)
                made.callback(path.unlink)
            listener = made.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            made.callback(Path(address).unlink)
            listener.listen(num_ranks)
            made.enter_context(cancellation.held(lambda: listener.shutdown(socket.SHUT_RDWR)))
            dist.barrier()  # takes part: every rank; all listen
            try:
                peers = _connect(listener, folder, name, rank, num_ranks)
            except OSError as error:
                raise RuntimeError("Connection closed by peer: a rank did not come.") from error
            raw = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
            dist.barrier()  # takes part: every rank; all are connected and have mapped the file
        return cls(
            raw, rank=rank, peers=peers, timeout_seconds=timeout_seconds, cancellation=cancellation
        )

    def tell(self, on_wait: Callable[[bool], None]) -> None:
        """Have ``on_wait`` called with True before each wait for others, with False after it."""
        self._on_wait = on_wait

    def add(self, flat: Tensor) -> None:
        """Sum a tensor over all ranks, in place: the same bits everywhere; takes part: every rank.

        Args:
            flat: shape (n,), contiguous, on the CPU; the same n and dtype on every rank.

        Raises:
            RuntimeError: a rank has left, or was silent for too long.
        """
        pieces = flat.split(PIECE_BYTES // flat.element_size())
        add = self._add_both if self._num_ranks == 2 else self._add_in_parts
        add([(piece, self._next_slots(piece)) for piece in pieces])

    def close(self) -> None:
        """Hang up; may be called twice."""
        self._held.close()
        self._hang_up()
        for peer in self._peers.values():
            peer.close()

    def _hang_up(self) -> None:
        """End every wait, on both ends, also where a child process holds a copy of a socket."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # the other end may be gone
                peer.shutdown(socket.SHUT_RDWR)

    def _add_both(self, turns: list[Turn]) -> None:
        (peer,) = self._peers
        self._put(*turns[0])
        for (piece, slots), following in zip_longest(turns, turns[1:]):
            if following is not None:
                self._put(*following)
            self._await_others()
            piece.add_(slots[peer])

    def _put(self, piece: Tensor, slots: list[Tensor]) -> None:
        slots[self._rank].copy_(piece)
        self._tell_others()

    def _add_in_parts(self, turns: list[Turn]) -> None:
        for piece, slots in turns:
            parts = [slot.tensor_split(self._num_ranks) for slot in slots]
            mine, own = piece.tensor_split(self._num_ranks), self._rank
            for rank in self._peers:
                parts[own][rank].copy_(mine[rank])
            self._meet()
            for rank in self._peers:
                mine[own].add_(parts[rank][own])
            parts[own][own].copy_(mine[own])
            self._meet()
            for rank in self._peers:
                mine[rank].copy_(parts[rank][rank])

    def _meet(self) -> None:
        """Wait until every rank is here; takes part: every rank."""
        self._tell_others()
        self._await_others()

    def _tell_others(self) -> None:
        """Say that this rank has written what others read next."""
        try:
            for peer in self._peers.values():
                peer.send(b".")
        except OSError as error:
            raise _left() from error

    def _await_others(self) -> None:
        """Wait until every other rank has said the same."""
        self._on_wait(True)
        try:
            for peer in self._peers.values():
                if not peer.recv(1):
                    raise _left()
        except BlockingIOError as error:
            raise RuntimeError("A rank was silent for too long in a shared sum.") from error
        except OSError as error:
            raise _left() from error
        self._on_wait(False)

    def _next_slots(self, piece: Tensor) -> list[Tensor]:
        """Return the slots of the next turn, one for each rank, as long as its piece."""
        slots = self._slots_for(piece.dtype)[self._turn % _NUM_SETS]
        self._turn += 1
        return [slot[: len(piece)] for slot in slots]

    def _slots_for(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """Return the slots as tensors of a dtype: one list for each set, one slot for each rank."""
        if dtype not in self._slots:
            slots, num = self._raw.view(dtype).chunk(_NUM_SETS * self._num_ranks), self._num_ranks
            self._slots[dtype] = [list(slots[at : at + num]) for at in range(0, len(slots), num)]
        return self._slots[dtype]


def _left() -> RuntimeError:
    return RuntimeError("Connection closed by peer: a rank left a shared sum.")


def _nobody_listens(is_waiting: bool) -> None:
    """Do nothing."""


def _connect(
    listener: socket.socket, folder: Path, name: str, rank: int, num_ranks: int
) -> dict[int, socket.socket]:
    """Return a connection to each other rank: made to the lower ones, taken from the higher."""
    peers: dict[int, socket.socket] = {}
    listener.settimeout(_MEETING_SECONDS)
    for other in range(rank):
        peers[other] = socket.socket(socket.AF_UNIX)
        peers[other].settimeout(_MEETING_SECONDS)
        peers[other].connect(str(socket_path(folder, f"{name}.{other}")))
        peers[other].sendall(_HANDSHAKE.pack(rank))
    for _ in range(rank + 1, num_ranks):
        peer, _ = listener.accept()
        peer.settimeout(_MEETING_SECONDS)
        (other,) = _HANDSHAKE.unpack(peer.recv(_HANDSHAKE.size, socket.MSG_WAITALL))
        peers[other] = peer
    return dict(sorted(peers.items()))
