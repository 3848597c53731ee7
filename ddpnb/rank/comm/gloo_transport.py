"""How do ranks of different hosts exchange tensors?  By gloo's send and recv.  (Rank side.)

All ranks form a gloo group of the run's own.  Besides tensors go messages of fixed size, as
bytes.  Only members of the process group can take part: nobody joins later.
"""

import threading
from contextlib import ExitStack
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from ddpnb.rank.comm.client import Place, ServerTransport, Wire, WireChannel, serve
from ddpnb.rank.comm.messages import PeerGoneError
from ddpnb.rank.comm.packed_tensors import pack
from ddpnb.rank.comm.parameter_server import SERVER_RANK, Server


@final
class GlooServer(ServerTransport):
    """A thread for each other rank, which waits for its messages; takes part: every rank."""

    def __init__(self, server: Server, place: Place) -> None:
        self._opened = ExitStack()
        group = _group(place, self._opened)
        self._timeout = place.timeout_seconds
        self._threads = [
            threading.Thread(
                target=serve,
                args=(server, rank, _GlooWire(group, rank), pack(place.parameters)),
                name="ddpnb-server",
                daemon=True,
            )
            for rank in place.others
        ]
        for thread in self._threads:
            thread.start()

    def settle(self) -> None:
        """Wait for the threads: each ends with its worker's last message, or with its worker."""
        for thread in self._threads:
            thread.join(self._timeout)

    def close(self) -> None:
        """Wait for the threads, leave the group."""
        self.settle()
        self._opened.close()


@final
class _GlooWire(Wire):
    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group = group
        self._peer = peer

    def send(self, data: bytes) -> None:
        self.send_tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def receive(self, num_bytes: int) -> bytes:
        data = torch.empty(num_bytes, dtype=torch.uint8)
        self.receive_tensor(data)
        return bytes(data.tolist())

    def send_tensor(self, tensor: Tensor) -> None:
        try:
            dist.send(tensor, self._peer, group=self._group)
        except RuntimeError as error:
            raise PeerGoneError from error

    def receive_tensor(self, tensor: Tensor) -> None:
        try:
            dist.recv(tensor, self._peer, group=self._group)
        except RuntimeError as error:
            raise PeerGoneError from error


def gloo_channel(place: Place) -> WireChannel:
    """Return a worker's channel to rank 0; takes part: every rank."""
    opened = ExitStack()
    wire = _GlooWire(_group(place, opened), SERVER_RANK)
    copies = [pack(place.parameters)] * place.world_size  # whichever the server names
    return WireChannel(wire, pack(place.parameters), copies, opened)


def _group(place: Place, opened: ExitStack) -> dist.ProcessGroup:
    """Form the group of one run, which ``opened`` leaves; takes part: every rank."""
    timeout = timedelta(seconds=place.timeout_seconds)
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    opened.callback(dist.destroy_process_group, group)
    return group
