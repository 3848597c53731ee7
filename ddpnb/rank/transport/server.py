"""How does the parameter server talk to all workers at once?  (Rank 0.)

One thread serves one request at a time, whichever worker's has arrived, and waits for
no worker in particular.
"""

import contextlib
import hmac
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from ddpnb.rank.transport.mailbox import Mailbox, mailbox_path, socket_path
from ddpnb.rank.transport.master import Master
from ddpnb.rank.transport.message import (
    KEY_BYTES,
    NO_SHARE,
    PeerGoneError,
    RankLostError,
    Reply,
    Request,
    receive_hello,
    receive_request,
    send_reply,
)

_SERVER_RANK = 0


@dataclass(slots=True, kw_only=True)
class _Worker:
    """What the server knows of one worker."""

    rank: int
    connection: socket.socket
    mailbox: Mailbox
    heard_at: float
    is_done: bool = False


class _ClosedError(Exception):
    """``close`` was called while there was work left."""


class Server:
    """Hands out parameters and shares, and takes gradients, until all workers are done.

    It listens when made, and serves from ``start`` on.  A worker that leaves before the end
    ends the run for all: each is told so, and by whom.

    Args:
        folder: private directory for the socket and the shared memory.
        name: what its files there begin with.
        master: the parameters.
        num_workers: ranks 0, 1, 2 ... that will connect.
        num_shares: shares to hand out, in order, to whoever asks next.
        timeout_seconds: how long it may be that no worker at all makes progress.
    """

    def __init__(
        self,
        *,
        folder: Path,
        name: str,
        master: Master,
        num_workers: int,
        num_shares: int,
        timeout_seconds: float,
    ) -> None:
        self.key = os.urandom(KEY_BYTES)
        """What a worker must show when it connects."""
        self.error: Exception | None = None
        """What ended the thread before its time, if anything did."""
        self._master = master
        self._shares = iter(range(num_shares))
        self._timeout = timeout_seconds
        self._paths = [mailbox_path(folder, name, rank) for rank in range(num_workers)]
        self._socket_path = socket_path(folder, name)
        self._workers: dict[int, _Worker] = {}
        self._num_left = num_workers
        self._thread = threading.Thread(target=self._run, name="ddpnb-server", daemon=True)
        with contextlib.ExitStack() as opened:
            self._open(opened)
            self._opened = opened.pop_all()

    def start(self) -> None:
        """Begin to serve, in a thread."""
        self._thread.start()

    def wait(self) -> None:
        """Return when every worker has the final parameters, or will not have them."""
        self._thread.join(2 * self._timeout)  # by then it has given up on whoever is silent

    def close(self) -> None:
        """End the thread, and remove what is left in the folder; may be called twice."""
        if self._thread.is_alive():
            self._bell.send(b"!")
            self._thread.join(self._timeout)
        self._opened.close()

    def _open(self, opened: contextlib.ExitStack) -> None:
        """Make the mailboxes, and listen; ``opened`` undoes it."""
        self._selector = opened.enter_context(selectors.DefaultSelector())
        self._bell, heard = (opened.enter_context(end) for end in socket.socketpair())
        self._selector.register(heard, selectors.EVENT_READ, self._stop)
        self._mailboxes: list[Mailbox] = []
        for path in self._paths:
            opened.callback(path.unlink, missing_ok=True)
            self._mailboxes.append(Mailbox.create(path, self._master.tensors))
        self._listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        opened.callback(self._socket_path.unlink, missing_ok=True)
        self._listener.bind(str(self._socket_path))
        self._listener.listen(len(self._paths))
        self._listener.settimeout(self._timeout)
        self._selector.register(self._listener, selectors.EVENT_READ, self._welcome)

    # From here on: in the thread.

    def _run(self) -> None:
        lost_rank = _SERVER_RANK
        try:
            self._serve_all()
            return
        except _ClosedError:
            pass
        except RankLostError as error:
            self.error, lost_rank = error, error.rank
        except Exception as error:  # noqa: BLE001  # the thread's edge: rank 0 raises it
            self.error = error
        for worker in self._workers.values():
            with contextlib.suppress(PeerGoneError, OSError):
                send_reply(worker.connection, Reply(lost_rank=lost_rank))

    def _serve_all(self) -> None:
        self._progress_at = time.monotonic()
        while self._num_left:
            wait_seconds = self._progress_at + self._timeout - time.monotonic()
            ready = self._selector.select(max(0.0, wait_seconds))
            if not ready:
                raise RankLostError(self._most_silent())
            for key, _ in ready:
                key.data()

    def _stop(self) -> NoReturn:
        raise _ClosedError

    def _welcome(self) -> None:
        """Let a worker connect; after the last, nothing is left in the folder."""
        connection, _ = self._listener.accept()
        self._opened.enter_context(connection)
        connection.settimeout(self._timeout)
        try:
            key, rank = receive_hello(connection)
        except PeerGoneError:
            return
        if not hmac.compare_digest(key, self.key):
            connection.close()
            return
        self._workers[rank] = _Worker(
            rank=rank,
            connection=connection,
            mailbox=self._mailboxes[rank],
            heard_at=time.monotonic(),
        )
        self._paths[rank].unlink()
        if len(self._workers) == len(self._paths):
            self._begin()

    def _begin(self) -> None:
        """Everybody is there: close the door, and hand out the first shares."""
        self._selector.unregister(self._listener)
        self._socket_path.unlink()
        for _, worker in sorted(self._workers.items()):
            serve = partial(self._serve, worker)
            self._selector.register(worker.connection, selectors.EVENT_READ, serve)
            self._hand_out(worker, staleness=0)

    def _serve(self, worker: _Worker) -> None:
        """Do what a worker asks."""
        try:
            request = receive_request(worker.connection)
        except PeerGoneError:
            raise RankLostError(worker.rank) from None
        worker.heard_at = time.monotonic()
        if request is Request.PUSH:
            staleness = self._master.write(worker.rank, worker.mailbox.gradients)
            self._hand_out(worker, staleness)
        else:
            self._settle(worker)

    def _hand_out(self, worker: _Worker, staleness: int) -> None:
        """Give a worker the newest parameters and the next share."""
        self._progress_at = worker.heard_at
        self._master.read(worker.rank, worker.mailbox.parameters)
        share = next(self._shares, NO_SHARE)
        send_reply(worker.connection, Reply(staleness=staleness, share=share))

    def _settle(self, worker: _Worker) -> None:
        """Give a worker that is done the parameters, which are final if all are."""
        worker.is_done = True
        settled = all(other.is_done for other in self._workers.values())
        if settled:
            self._master.read(worker.rank, worker.mailbox.parameters)
            self._selector.unregister(worker.connection)
            self._num_left -= 1
        send_reply(worker.connection, Reply(settled=settled))

    def _most_silent(self) -> int:
        """Return the rank not heard of for longest, of those that the others wait for."""
        missing = set(range(len(self._paths))) - self._workers.keys()
        if missing:
            return min(missing)
        working = [worker for worker in self._workers.values() if not worker.is_done]
        return min(working, key=lambda worker: worker.heard_at).rank
