"""A transport between hosts: gloo's send and recv (ranks).

All ranks form a gloo group of the run's own, for tensors and for messages of fixed size.  Only
members of the process group can take part: no worker joins later.
"""

import threading
from contextlib import ExitStack
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from ddpnb.rank.comm.messages import PeerGoneError
from ddpnb.rank.comm.packed_tensors import pack
from ddpnb.rank.comm.parameter_server import SERVER_RANK, ParameterServer
from ddpnb.rank.comm.transport import (
    ConnectionTransport,
    PeerConnection,
    ServerTransport,
    WorkerConfig,
    serve_connection,
)


@final
class GlooServerTransport(ServerTransport):
    """A thread for each other rank, which waits for its messages; takes part: every rank."""

    def __init__(self, server: ParameterServer, config: WorkerConfig) -> None:
        self._opened = ExitStack()
        group = _new_group(config, self._opened)
        self._timeout = config.timeout_seconds
        self._threads = [
            threading.Thread(
                target=serve_connection,
                args=(server, rank, _GlooConnection(group, rank), pack(config.parameters)),
                name="ddpnb-server",
                daemon=True,
            )
            for rank in config.other_ranks
        ]
        for thread in self._threads:
            thread.start()

    def drain(self) -> None:
        """Wait for the threads: each ends with its worker's last message, or with its worker."""
        for thread in self._threads:
            thread.join(self._timeout)

    def close(self) -> None:
        """Wait for the threads, leave the group."""
        self.drain()
        self._opened.close()


def connect_gloo(config: WorkerConfig) -> ConnectionTransport:
    """Connect a worker to rank 0; takes part: every rank."""
    opened = ExitStack()
    connection = _GlooConnection(_new_group(config, opened), SERVER_RANK)
    copies = [pack(config.parameters)] * config.world_size  # one, whichever a reply names
    return ConnectionTransport(connection, pack(config.parameters), copies, opened)


@final
class _GlooConnection(PeerConnection):
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


def _new_group(config: WorkerConfig, opened: ExitStack) -> dist.ProcessGroup:
    """Form the run's group, which ``opened`` destroys; takes part: every rank."""
    timeout = timedelta(seconds=config.timeout_seconds)
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    opened.callback(dist.destroy_process_group, group)
    return group
