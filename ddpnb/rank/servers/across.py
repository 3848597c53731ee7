"""Connections between hosts: gloo's send and recv (ranks).

All ranks form a group of the run's own, for tensors and for messages of fixed size.  No worker can
join later.
"""

import threading
from contextlib import ExitStack
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from ddpnb.rank.servers.connections import (
    PeerConnection,
    RemoteQueue,
    join_threads,
    serve,
    start_thread,
)
from ddpnb.rank.servers.memory import PackedTensors, pack
from ddpnb.rank.servers.queue import SERVER_RANK, WorkQueue
from ddpnb.rank.servers.rendezvous import WorkerConfig


def serve_hosts(
    queue: WorkQueue, copies: list[PackedTensors], config: WorkerConfig, opened: ExitStack
) -> list[threading.Thread]:
    """Serve each other rank in a thread, until its last message; takes part: every rank."""
    group = _new_group(config, opened)
    threads = [
        start_thread(
            serve, queue, rank, _GlooConnection(group, rank), pack(config.parameters), copies
        )
        for rank in config.other_ranks
    ]
    opened.callback(join_threads, threads, config.timeout_seconds)
    return threads


def connect_hosts(config: WorkerConfig, opened: ExitStack) -> RemoteQueue:
    """Connect a worker to rank 0; takes part: every rank."""
    connection = _GlooConnection(_new_group(config, opened), SERVER_RANK)
    copies = [pack(config.parameters)] * config.world_size  # one, whichever a reply names
    return RemoteQueue(connection, pack(config.parameters), copies)


@final
class _GlooConnection(PeerConnection):
    gone = RuntimeError

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group = group
        self._peer = peer

    def send(self, data: bytes) -> None:
        self.send_tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def receive(self, num_bytes: int) -> bytes:
        data = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self.receive_tensor(data)
        return bytes(data.tolist())

    def send_tensor(self, tensor: Tensor) -> None:
        dist.send(tensor, self._peer, group=self._group)

    def receive_tensor(self, tensor: Tensor) -> None:
        dist.recv(tensor, self._peer, group=self._group)


def _new_group(config: WorkerConfig, opened: ExitStack) -> dist.ProcessGroup:
    """Form the run's group, which ``opened`` destroys; takes part: every rank."""
    timeout = timedelta(seconds=config.timeout_seconds)
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    opened.callback(dist.destroy_process_group, group)
    return group
