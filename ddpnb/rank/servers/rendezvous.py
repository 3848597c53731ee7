"""How ranks find and wait for each other without a collective (ranks).

In a collective, ranks would go on waiting for one that has failed.  Here they exchange short texts
through the process group's own store, and check for failures while they wait.
"""

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import psutil
import torch.distributed as dist
from torch import nn

from ddpnb.compat import torch_internals
from ddpnb.protocol.processes import ProcessId, is_alive, process_id
from ddpnb.rank.cancellation import CancellationToken, RankLostError
from ddpnb.rank.collectives.link import NO_LINK, Link
from ddpnb.rank.meter import Meter, NullTimer

NO_RANK = -1
_POLL_SECONDS = 0.005
_FAILED = "failed"


class RunOverError(Exception):
    """There is nothing to join: the run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What one rank of a run needs to reach the others."""

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

    @property
    def other_ranks(self) -> range:
        """All ranks but rank 0, which serves."""
        return range(1, self.world_size)

    def path(self, suffix: str) -> Path:
        """Return where a file of the run lies."""
        return self.folder / f"{self.name}.{suffix}"


@final
class Rendezvous:
    """Short texts that the ranks of a run leave for each other."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._store = _store(config.name)
        self._peers = {rank: pid for rank, pid in _pids(config.folder) if rank != config.rank}

    def set(self, key: str, text: str) -> None:
        """Leave a text."""
        self._store.set(key, text)

    def get(self, key: str, *, from_rank: int) -> str:
        """Return a text, once it is there.

        Raises:
            RankLostError: a rank failed meanwhile, or ``from_rank`` did not leave the text in time.
        """
        deadline = time.monotonic() + self._config.timeout_seconds
        while not self._store.check([key]):
            if (failed := self.find_failed_rank()) != NO_RANK:
                raise RankLostError(failed)
            if time.monotonic() > deadline:
                raise RankLostError(from_rank)
            time.sleep(_POLL_SECONDS)
        return str(self._store.get(key).decode())

    def find_failed_rank(self) -> int:
        """Return a rank that failed or died before the run began, or ``NO_RANK``.

        Raises:
            RuntimeError: this rank should no longer wait.
        """
        self._config.cancellation.check()
        if self._store.check([_FAILED]):
            rank = int(self._store.get(_FAILED))
            if rank != self._config.rank:
                return rank
        dead = (rank for rank, pid in self._peers.items() if pid is None or not is_alive(pid))
        return next(dead, NO_RANK)

    def delete(self, *keys: str) -> None:
        """Remove texts that no rank will read again."""
        for key in keys:
            with contextlib.suppress(RuntimeError):  # the store went with its rank
                self._store.delete_key(key)


@contextlib.contextmanager
def announce_failure(name: str, rank: int) -> Iterator[None]:
    """Notify the ranks of a run that wait for this one, where the body raises."""
    try:
        yield
    except RankLostError:  # a consequence: another rank has announced the cause
        raise
    except BaseException:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                _store(name).set(_FAILED, str(rank))
        raise


def host_id(folder: Path) -> str:
    """Return a text that is the same for two ranks if and only if they share this folder."""
    running = Path("/proc/sys/kernel/random/boot_id")  # hosts may have the same name
    status = folder.stat()
    boot = running.read_text().strip() if running.exists() else ""
    return f"{socket.gethostname()} {boot} {status.st_dev} {status.st_ino}"


def _pids(folder: Path) -> Iterator[tuple[int, ProcessId | None]]:
    """Yield the ranks of this host with their processes, as ``Group.announce`` wrote them."""
    for path in folder.glob("rank-*.pid"):
        rank = int(path.stem.removeprefix("rank-"))
        try:
            yield rank, process_id(int(path.read_text()))
        except (psutil.Error, ValueError):  # it has ended, or its number is another process's
            yield rank, None


def _store(name: str) -> dist.Store:
    return dist.PrefixStore(f"ddpnb/{name}", torch_internals.group_store())
