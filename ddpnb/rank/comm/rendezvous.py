"""How do the ranks of a group agree on a run's beginnings without a collective?  (Every rank.)

Through the store in which the process group itself has met.  A collective would make those
who wait for a rank that has failed wait on; here they look whether it has.
"""

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import final

import psutil
import torch.distributed as dist

from ddpnb.compat.torch_internals import group_store
from ddpnb.protocol.processes import ProcessId, is_alive, process_id
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.comm.messages import NOBODY, RankLostError

_LOOK_SECONDS = 0.005


@final
class Rendezvous:
    """Short texts that the ranks of a group leave for each other, by run.

    Args:
        name: of the run; no two trainings share it.
        rank: this rank.
        folder: where the ranks of this host say which process they are.
        timeout_seconds: how long a text may take to come.
        lifeline: frees this rank from waiting.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        folder: Path,
        timeout_seconds: float,
        cancellation: CancellationToken,
    ) -> None:
        self._store = dist.PrefixStore(f"ddpnb/{name}", group_store())
        self._rank = rank
        self._timeout = timeout_seconds
        self._cancellation = cancellation
        self._peers = [(process, other) for process, other in _peers(folder) if other != rank]

    def tell(self, what: str, text: str) -> None:
        """Leave a text."""
        self._store.set(what, text)

    def read(self, what: str, *, of_rank: int) -> str:
        """Return a text, once it is there.

        Raises:
            RankLostError: somebody has failed meanwhile, or the text did not come.
        """
        deadline = time.monotonic() + self._timeout
        while not self._store.check([what]):
            if (absent := self.absent()) != NOBODY:
                raise RankLostError(absent)
            if time.monotonic() > deadline:
                raise RankLostError(of_rank)
            time.sleep(_LOOK_SECONDS)
        return str(self._store.get(what).decode())

    def absent(self) -> int:
        """Return who has failed, or died, before it could tell the server, or ``NOBODY``.

        Raises:
            RuntimeError: this rank should wait for nobody any more.
        """
        self._cancellation.check()
        if self._store.check(["absent"]) and (rank := int(self._store.get("absent"))) != self._rank:
            return rank
        return next(iter(self.dead()), NOBODY)

    def dead(self) -> list[int]:
        """Return the ranks of this host whose processes have died."""
        return [rank for process, rank in self._peers if process is None or not is_alive(process)]

    def forget(self, *what: str) -> None:
        """Remove texts that nobody will read any more; that somebody failed may be read yet."""
        for key in what:
            with contextlib.suppress(RuntimeError):  # the store went with its rank
                self._store.delete_key(key)


@contextlib.contextmanager
def announce_failure(name: str, rank: int, folder: Path) -> Iterator[None]:
    """Where this fails, have those told at once who would wait for this rank in vain."""
    try:
        yield
    except RankLostError:  # a consequence: another rank has told why
        raise
    except BaseException:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                Rendezvous(name, rank, folder, 0.0, CancellationToken()).tell("absent", str(rank))
        raise


def _peers(folder: Path) -> Iterator[tuple[ProcessId | None, int]]:
    """Yield the processes of the ranks of this host, as ``Group.announce`` has noted them."""
    for path in folder.glob("rank-*.pid"):
        rank = int(path.stem.removeprefix("rank-"))
        try:
            yield process_id(int(path.read_text())), rank
        except (psutil.NoSuchProcess, ValueError):
            yield None, rank


def this_host(folder: Path) -> str:
    """Return what two ranks have in common that share memory in a folder."""
    status = folder.stat()
    return f"{socket.gethostname()} {status.st_dev} {status.st_ino}"
