"""How is a rank reached while its main thread is busy?  (Rank side.)

A thread reads the pipe from the fork server.  It answers even while the main
thread waits inside a collective, where neither messages of ipyparallel nor
Python's signal handlers get through.
"""

import json
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from ddpnb.processes import Notice, Order

Handler = Callable[[], object]


class ControlThread(threading.Thread):
    """Carries out orders of the notebook's kernel, one at a time.

    Args:
        rank: this rank, named in every answer.
        pipe: the pipe to the fork server; its end is the end of this process.
        handlers: what to do on each order; the value returned is sent back.
    """

    def __init__(self, rank: int, pipe: Connection, handlers: Mapping[Order, Handler]) -> None:
        super().__init__(name="ddpnb-control", daemon=True)
        self.rank = rank
        self.pipe = pipe
        self.handlers = handlers

    def run(self) -> None:
        """Answer orders until the fork server is gone, then end the process."""
        while True:
            try:
                order: dict[str, Any] = json.loads(self.pipe.recv_bytes())
            except (EOFError, OSError):
                os.kill(os.getpid(), signal.SIGKILL)
            self.answer(order["order"], order["id"])

    def answer(self, order: str, order_id: int) -> None:
        """Carry out one order and send its result back."""
        value: object = None
        try:
            value = self.handlers[Order(order)]()
        except Exception:  # noqa: BLE001  the edge of the thread, which must live on: to the log
            traceback.print_exc()
        message = {"event": Notice.ANSWER, "rank": self.rank, "id": order_id, "value": value}
        self.pipe.send_bytes(json.dumps(message).encode())
