"""How do ranks of one host exchange tensors?  Through shared memory, in turns.  (Rank side.)

Each worker of another rank writes its gradients into its part of the shared memory, and
trains on one of the copies of the parameters there.  The turns go by Unix sockets: a dead
process is seen at once.  Address and secret lie in the run's folder, the secret in a file of
mode 0600, so that a process that comes later finds the server without any collective.
"""

import contextlib
import hmac
import os
import socket
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import final

from torch import nn

from ddpnb.processes import atomic_write
from ddpnb.rank.lifeline import Lifeline
from ddpnb.rank.transport.host import Caller, Host, serve
from ddpnb.rank.transport.link import Landing, Link, write_gradients
from ddpnb.rank.transport.message import (
    KEY_BYTES,
    REPLY_BYTES,
    Asked,
    PeerGoneError,
    RankLostError,
    Reply,
    Request,
    RunOverError,
    receive,
    receive_hello,
    receive_request,
    send,
    send_hello,
    send_request,
    set_timeout,
)
from ddpnb.rank.transport.packed import Packed
from ddpnb.rank.transport.server import SERVER_RANK, Server
from ddpnb.rank.transport.shared_memory import SharedMemory

_MAX_SOCKET_PATH_BYTES = 107
"""What Linux allows for the address of a local socket."""


@final
class ShmHost(Host):
    """Listens on a Unix socket; a thread for each worker.

    Args:
        server: what the workers call.
        memory: what the server shares with them.
        folder: private directory for the socket and the secret.
        name: what the files there begin with.
        timeout_seconds: how long a worker may take to say hello, and a thread to end.
    """

    def __init__(
        self,
        server: Server,
        memory: SharedMemory,
        *,
        folder: Path,
        name: str,
        timeout_seconds: float,
    ) -> None:
        self.key = os.urandom(KEY_BYTES)
        """What a worker must show when it connects."""
        self._server = server
        self._memory = memory
        self._timeout = timeout_seconds
        self._threads: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        self._acceptor = threading.Thread(target=self._accept, name="ddpnb-door", daemon=True)
        with contextlib.ExitStack() as opened:
            self._listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            path = socket_path(folder, name)
            opened.callback(path.unlink, missing_ok=True)
            self._listener.bind(str(path))
            self._listener.listen()
            opened.callback(key_path(folder, name).unlink, missing_ok=True)
            atomic_write(key_path(folder, name), self.key, mode=0o600)
            self._opened = opened.pop_all()

    def start(self) -> None:
        """Open the door."""
        self._acceptor.start()

    def settle(self) -> None:
        """Wait for the threads of all workers."""
        for thread in list(self._threads):
            thread.join(self._timeout)

    def close(self) -> None:
        """Close the door, hang up on everybody."""
        with contextlib.suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._acceptor.is_alive():
            self._acceptor.join(self._timeout)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # what is left to say can still be said
        self.settle()
        self._opened.close()

    # From here on: in threads.

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the door is closed
                return
            self._connections.append(connection)
            thread = threading.Thread(
                target=partial(self._welcome, connection), name="ddpnb-server", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _welcome(self, connection: socket.socket) -> None:
        """Serve one worker, if it knows the secret."""
        with connection:
            set_timeout(connection, self._timeout)
            try:
                key, rank = receive_hello(connection)
                if not hmac.compare_digest(key, self.key):
                    return
                self._memory.hand_over(connection)
            except PeerGoneError:
                return
            set_timeout(connection, 0)  # a thread is ended by ``close``; the server watches times
            serve(self._server, _ShmCaller(rank, connection, self._memory.gradients(rank)))


@final
class _ShmCaller(Caller):
    def __init__(self, rank: int, connection: socket.socket, gradients: Packed) -> None:
        self.rank = rank
        self.gradients = gradients
        self._connection = connection

    def receive(self) -> Asked:
        return receive_request(self._connection)

    def answer(self, reply: Reply) -> None:
        send(self._connection, reply.pack())


@final
class ShmLink(Link):
    """A worker's connection: it trains on the shared memory itself.

    Args:
        folder: the server's directory.
        name: what the server's files begin with.
        rank: this worker.
        num_workers: of all ranks.
        parameters: the parameters to train, on this worker's device.
        timeout_seconds: how long the server may take to answer.
        lifeline: frees this worker from waiting for the server.
        key: the server's secret; read from its file if not given.

    Raises:
        RunOverError: there is no server, or not any more.
    """

    def __init__(
        self,
        *,
        folder: Path,
        name: str,
        rank: int,
        num_workers: int,
        parameters: Sequence[nn.Parameter],
        timeout_seconds: float,
        lifeline: Lifeline,
        key: bytes | None = None,
    ) -> None:
        self._parameters = parameters
        self._is_over = False
        self._landing: Landing | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        set_timeout(self._connection, timeout_seconds)
        self._held = contextlib.ExitStack()
        self._held.enter_context(lifeline.held(self._hang_up))
        try:
            secret = key or key_path(folder, name).read_bytes()
            self._connection.connect(str(socket_path(folder, name)))
            send_hello(self._connection, secret, rank)
            memory = SharedMemory.receive(self._connection, parameters, num_workers)
        except (OSError, PeerGoneError) as error:
            self._held.close()
            self._connection.close()
            raise RunOverError from error
        self._gradients = memory.gradients(rank)
        self._landing = Landing(parameters, memory.copies)

    def begin(self) -> Reply:
        """Wait for the first answer."""
        return self._take()

    def push(self, weight: float = 1.0) -> Reply:
        """Copy the gradients to where the server reads them, and wait for the answer."""
        write_gradients(self._gradients.tensors, self._parameters)
        self._ask(Asked(Request.PUSH, weight))
        return self._take()

    def finish(self) -> None:
        """Wait for the last answer."""
        self._ask(Asked(Request.DONE))
        self._take()
        self._is_over = True
        self.close()

    def close(self) -> None:
        """Say that this worker failed, if it has not finished."""
        if not self._is_over:
            self._is_over = True
            self._ask(Asked(Request.LEAVE))
        self._held.close()
        self._connection.close()
        if self._landing is not None:
            self._landing.leave()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # not connected yet, or not any more
            self._connection.shutdown(socket.SHUT_RDWR)

    def _ask(self, asked: Asked) -> None:
        # Where the server has hung up, its last word, read next, says why.
        with contextlib.suppress(PeerGoneError):
            send_request(self._connection, asked)

    def _take(self) -> Reply:
        assert self._landing is not None
        try:
            reply = Reply.unpack(receive(self._connection, REPLY_BYTES))
        except PeerGoneError as error:
            self._is_over = True
            raise RankLostError(SERVER_RANK) from error
        except RankLostError:
            self._is_over = True
            raise
        self._landing.take(reply.copy)
        return reply


def key_path(folder: Path, name: str) -> Path:
    """Return the file of the server's secret."""
    return folder / f"{name}.k"


def socket_path(folder: Path, name: str) -> Path:
    """Return the address of the server's socket."""
    path = folder / f"{name}.s"
    assert len(bytes(path)) <= _MAX_SOCKET_PATH_BYTES, f"too long for a socket: {path}"
    return path
