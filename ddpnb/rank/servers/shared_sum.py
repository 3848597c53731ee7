"""An all-reduce in shared memory, for the ranks of one host (ranks).

Each rank has slots in memory that all ranks map.  A tensor passes through them chunk by chunk,
each small enough to stay in the processor's cache.  Each rank copies its chunk into its slot, but
for its own part; all wait for all.  Rank r sums part r of all slots and puts the sum into its own
slot; all wait for all.  Each copies the other parts' sums out.

Chunks use two sets of slots in turn, so that no rank overwrites what another still reads.  Before
a rank writes chunk t, every other rank has reported that it has summed its part of chunk t - 1,
which it does after it has read chunk t - 2, the last one in the same set.

Ranks wait for each other by one byte through a Unix socket.  The kernel's locks order memory on any
processor, and where a rank dies or closes, all others notice at once.
"""

import contextlib
import socket
from collections.abc import Mapping
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from ddpnb.protocol.errors import UserError
from ddpnb.rank.cancellation import ConsequenceError
from ddpnb.rank.servers.memory import SharedMemory
from ddpnb.rank.servers.rendezvous import HELLO, hosts_of, set_timeout, shut_down, socket_path
from ddpnb.rank.worker import Worker

CHUNK_BYTES: Final = 1 << 20
"""The fastest, or close to it, of the sizes from 64 KB to 44 MB, with 2 ranks."""
_NUM_SETS: Final = 2


@final
class SharedAllReduce:
    """Sums of tensors over the ranks, which share a folder, and so memory.

    Each sum counts on the worker's meter, waits for other ranks apart from copying.  Nothing is
    left in the folder.

    Args:
        worker: this rank's; takes part: every rank of the default group.
        timeout_seconds: how long to wait for a rank that is alive.

    Raises:
        UserError: the ranks are on several hosts.
        RuntimeError: a rank did not connect.
    """

    def __init__(self, worker: Worker, timeout_seconds: float) -> None:
        self._rank = worker.rank
        self._num_ranks = worker.world_size
        self._num_chunks = 0
        self._meter = worker.meter
        if len(set(hosts_of(worker))) > 1:
            raise UserError("Ranks of several hosts share no memory to sum in: compare ddp.")
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            address = socket_path(worker, worker.rank)
            listener.bind(str(address))
            opened.callback(address.unlink)
            listener.listen(worker.world_size)
            opened.enter_context(
                worker.cancellation.held(lambda: listener.shutdown(socket.SHUT_RDWR))
            )
            dist.barrier()  # takes part: every rank; all listen
            try:
                self._peers = _connect(listener, worker, timeout_seconds)
                self._raw = _share_memory(self._peers, worker)
                """Shape (sets x ranks x ``CHUNK_BYTES``,)."""
            except OSError as error:
                raise ConsequenceError("A rank did not come.") from error
        self._opened = contextlib.ExitStack()
        self._opened.enter_context(worker.cancellation.held(self._shut_down))

    def all_reduce(self, flat: Tensor) -> None:
        """Sum a tensor over all ranks, in place, to the same bits; takes part: every rank.

        Args:
            flat: shape (n,), contiguous, on the CPU; the same n and dtype on every rank.

        Raises:
            RuntimeError: a rank has left, or was silent for too long.
        """
        with self._meter.communicating():
            for piece in flat.split(CHUNK_BYTES // flat.element_size()):
                self._sum_chunk(piece)
        if self._num_ranks > 1:
            received = 2 * (self._num_ranks - 1) * flat.nbytes // self._num_ranks
            self._meter.count(sent=flat.nbytes, received=received)

    def close(self) -> None:
        """Disconnect; may be called twice."""
        self._opened.close()
        self._shut_down()
        for peer in self._peers.values():
            peer.close()

    def _shut_down(self) -> None:
        """End every wait on both ends, even where a child process holds a copy of a socket."""
        for peer in self._peers.values():
            shut_down(peer)

    def _sum_chunk(self, chunk: Tensor) -> None:
        own, num_ranks = self._rank, self._num_ranks
        sets = self._raw.view(chunk.dtype).view(_NUM_SETS, num_ranks, -1)
        slots = [
            slot[: len(chunk)].tensor_split(num_ranks)
            for slot in sets[self._num_chunks % _NUM_SETS]
        ]
        mine = chunk.tensor_split(num_ranks)
        self._num_chunks += 1
        for rank in self._peers:
            slots[own][rank].copy_(mine[rank])
        self._wait_for_all()
        for rank in self._peers:
            mine[own].add_(slots[rank][own])
        slots[own][own].copy_(mine[own])
        self._wait_for_all()
        for rank in self._peers:
            mine[rank].copy_(slots[rank][rank])

    def _wait_for_all(self) -> None:
        """Report that this rank has written what others read next; wait for the same of them."""
        try:
            for peer in self._peers.values():
                peer.send(b".")
            with self._meter.communicating("waiting"):
                for peer in self._peers.values():
                    if not peer.recv(1):
                        raise ConnectionResetError
        except BlockingIOError as error:
            raise RuntimeError("A rank was silent for too long in a shared sum.") from error
        except OSError as error:
            raise ConsequenceError("A rank left a shared sum.") from error


def _connect(
    listener: socket.socket, worker: Worker, timeout_seconds: float
) -> dict[int, socket.socket]:
    """Return a connection to each other rank: made to lower ranks, accepted from higher ones."""
    peers: dict[int, socket.socket] = {}
    set_timeout(listener, timeout_seconds)
    for other in range(worker.rank):
        peers[other] = socket.socket(socket.AF_UNIX)
        set_timeout(peers[other], timeout_seconds)
        peers[other].connect(str(socket_path(worker, other)))
        peers[other].sendall(HELLO.pack(worker.rank))
    for _ in range(worker.rank + 1, worker.world_size):
        peer, _ = listener.accept()
        set_timeout(peer, timeout_seconds)
        (other,) = HELLO.unpack(peer.recv(HELLO.size, socket.MSG_WAITALL))
        peers[other] = peer
    return dict(sorted(peers.items()))


def _share_memory(peers: Mapping[int, socket.socket], worker: Worker) -> Tensor:
    """Return memory that rank 0 sends to all others."""
    num_bytes = _NUM_SETS * worker.world_size * CHUNK_BYTES
    like = [torch.empty(num_bytes, dtype=torch.uint8, device="meta")]
    if worker.rank == 0:
        memory = SharedMemory.create(like, num_copies=1)
        for peer in peers.values():
            memory.send(peer)
    else:
        memory = SharedMemory.receive(peers[0], like, num_copies=1)
    memory.close()
    return memory.copies[0].raw
