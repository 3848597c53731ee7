"""What a rank needs to reach the others outside the process group (ranks)."""

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch import nn

from ddpnb.compat import torch_internals
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.collectives.link import NO_LINK, Link
from ddpnb.rank.meter import Meter, NullTimer

HELLO = struct.Struct("<q")
"""The first message of a rank that connects to another: its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One rank of a run, as the servers see it."""

    rank: int
    world_size: int
    folder: Path
    """A directory that only the ranks of this host can reach."""
    name: str
    """Of the run; no two trainings share it."""
    timeout_seconds: float
    """How long to wait for a rank that is alive."""
    cancellation: CancellationToken
    """Frees this rank from waiting for another."""
    parameters: Sequence[nn.Parameter] = ()
    """The trained parameters, on this rank's device."""
    link: Link = NO_LINK
    """An emulated network between the ranks."""
    meter: Meter = field(default_factory=lambda: Meter(NullTimer()))
    """Counts seconds and bytes of communication."""

    def socket_path(self, rank: int) -> Path:
        """Return the address of the Unix socket at which a rank of this host listens."""
        return self.folder / f"{self.name}.{rank}.s"


def hosts_of(config: WorkerConfig) -> list[str]:
    """Return a text for each rank's host; takes part: every rank of the default group.

    Two ranks have the same text if and only if they share a folder.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()  # hosts may have the same name
    status = config.folder.stat()
    hosts = [""] * config.world_size
    own = f"{socket.gethostname()} {boot} {status.st_dev} {status.st_ino}"
    dist.all_gather_object(hosts, own)
    return hosts


def server_address() -> str:
    """Return the address at which other hosts reach rank 0's: that of the group's own store."""
    store = torch_internals.group_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else "127.0.0.1"


def set_timeout(connected: socket.socket, seconds: float) -> None:
    """Bound each wait in the kernel: Python's own timeouts cost one more system call a wait."""
    connected.settimeout(None)
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, value)
