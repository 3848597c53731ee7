"""The protocol between the kernel and a host's relay, over CurveZMQ (kernel, relay)."""

from enum import Enum

import zmq

LOST_MS = 15_000
"""The longest time without a heartbeat of a live end; ZMQ's own thread answers heartbeats."""
COME_MS = 15_000
"""The limit for the time to set up a new connection, which unknown processes may also open."""

NUM_SOCKETS = 12
"""The number of the controller's sockets or ports for engines; ipyparallel needs eight."""


class Word(bytes, Enum):
    """The first part of a message; the second part is the content."""

    HELLO = b"hello"
    """From the relay: the agent has been started.  The content has the host and the token."""
    FRAME = b"frame"
    """From both ends: a frame of the agent's pipe."""
    END = b"end"
    """From the kernel: close the agent's pipe.  From the relay: all of the agent has ended."""
    PROBE = b"probe"
    """From the kernel: the relay is accepted.  Sending this to a lost relay fails."""


def keep_alive(end: "zmq.Socket[bytes]", lost_ms: int) -> None:
    """Make ZMQ notice a lost connection, and queue any number of messages without dropping some."""
    end.heartbeat_ivl, end.heartbeat_timeout, end.heartbeat_ttl = lost_ms // 3, lost_ms, lost_ms
    end.handshake_ivl = COME_MS
    end.sndhwm = end.rcvhwm = 0
    end.linger = 1000
