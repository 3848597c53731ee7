"""How does a worker send its gradient, and get parameters and work?  (Every rank.)"""

import contextlib
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ddpnb.rank.transport.mailbox import Mailbox, mailbox_path, socket_path
from ddpnb.rank.transport.message import (
    NOBODY,
    PeerGoneError,
    RankLostError,
    Reply,
    Request,
    receive_reply,
    send_hello,
    send_request,
)

_SERVER_RANK = 0
_ASK_AGAIN_SECONDS = 0.005


class Link:
    """One worker's connection to the server.

    Args:
        folder: the server's directory.
        name: what the server's files begin with.
        key: the server's secret.
        rank: this worker.
        parameters: the parameters to train, on this worker's device.
        timeout_seconds: how long the server may take to answer.

    Raises:
        RankLostError: by this and every method: the server or another worker is gone.
    """

    def __init__(
        self,
        *,
        folder: Path,
        name: str,
        key: bytes,
        rank: int,
        parameters: Sequence[nn.Parameter],
        timeout_seconds: float,
    ) -> None:
        self._parameters = parameters
        self._mailbox = Mailbox.map(mailbox_path(folder, name, rank), parameters)
        self._connection = socket.socket(socket.AF_UNIX)
        try:
            self._connection.settimeout(timeout_seconds)
            self._connection.connect(str(socket_path(folder, name)))
            send_hello(self._connection, key, rank)
        except BaseException:
            self.close()
            raise

    def begin(self) -> Reply:
        """Wait until all workers have connected; take the first parameters and share."""
        return self._take()

    def push(self) -> Reply:
        """Send the gradients that the parameters have; take parameters and the next share."""
        self._write_gradients()
        self._ask(Request.PUSH)
        return self._take()

    def finish(self) -> None:
        """Wait until all workers are done; take the final parameters.

        The server gives up where nobody makes progress, so this ends.
        """
        while True:
            self._ask(Request.DONE)
            if self._take().settled:
                return
            time.sleep(_ASK_AGAIN_SECONDS)

    def close(self) -> None:
        """Hang up; may be called twice."""
        self._connection.close()

    def _write_gradients(self) -> None:
        for slot, parameter in zip(self._mailbox.gradients.tensors, self._parameters, strict=True):
            if parameter.grad is None:
                slot.zero_()
            else:
                slot.copy_(parameter.grad)

    def _ask(self, request: Request) -> None:
        # Where the server has hung up, its last word, read next, says why.
        with contextlib.suppress(PeerGoneError):
            send_request(self._connection, request)

    @torch.no_grad()
    def _take(self) -> Reply:
        """Wait for the answer, and copy the parameters that came with it."""
        try:
            reply = receive_reply(self._connection)
        except (PeerGoneError, TimeoutError) as error:
            raise RankLostError(_SERVER_RANK) from error
        if reply.lost_rank != NOBODY:
            raise RankLostError(reply.lost_rank)
        slots: list[Tensor] = self._mailbox.parameters.tensors
        for parameter, slot in zip(self._parameters, slots, strict=True):
            parameter.copy_(slot)
        return reply
