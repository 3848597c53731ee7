"""What crosses between the kernel and the relay of a host, over CurveZMQ (both ends)."""

from enum import Enum

import zmq

LOST_MS = 15_000
"""After so long without a heartbeat, which ZMQ's own thread answers, the other end is lost."""
COME_MS = 15_000
"""How long a new connection may take to be of use, and a stranger may hold one."""

NUM_SOCKETS = 12
"""Sockets or ports of the controller that engines reach; ipyparallel has eight."""


class Word(bytes, Enum):
    """The first part of a message; the second is its content."""

    HELLO = b"hello"
    """Relay: its agent has been started; a JSON object says where, and has the token."""
    FRAME = b"frame"
    """Both: a frame of the agent's pipe."""
    END = b"end"
    """Kernel: close the agent's pipe.  Relay: the agent has ended and nothing of it is left."""
    PROBE = b"probe"
    """Kernel: the relay is known; this cannot be sent to one that is lost."""


def keep_alive(end: "zmq.Socket[bytes]", lost_ms: int) -> None:
    """Have a lost connection noticed, and no message dropped because there are many."""
    end.heartbeat_ivl, end.heartbeat_timeout, end.heartbeat_ttl = lost_ms // 3, lost_ms, lost_ms
    end.handshake_ivl = COME_MS
    end.sndhwm = end.rcvhwm = 0
    end.linger = 1000
