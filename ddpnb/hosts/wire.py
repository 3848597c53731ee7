"""The protocol between the kernel and a host's relay, over CurveZMQ (kernel, relay)."""

from enum import Enum

import zmq

LOST_MS = 15_000
"""Milliseconds without a heartbeat until a connection counts as lost.  ZMQ sends heartbeats."""
COME_MS = 15_000
"""Maximum milliseconds to set up a connection.  Unknown processes may also try to connect."""

NUM_SOCKETS = 12
"""The number of the controller's sockets or ports for engines; ipyparallel needs eight."""


class Word(bytes, Enum):
    """The first part of a message; the second part is the content."""

    HELLO = b"hello"
    """The relay has started the agent.  The content has the hostname and the token."""
    FRAME = b"frame"
    """A frame of the agent's pipe, sent by the kernel or by the relay."""
    END = b"end"
    """The kernel asks the relay to end the agent, or the relay says that the agent has ended."""
    PROBE = b"probe"
    """The kernel accepts the relay, or checks its connection; sending to a lost relay fails."""


def keep_alive(end: "zmq.Socket[bytes]", lost_ms: int) -> None:
    """Make ZMQ notice a lost connection, and queue any number of messages."""
    end.heartbeat_ivl, end.heartbeat_timeout, end.heartbeat_ttl = lost_ms // 3, lost_ms, lost_ms
    end.handshake_ivl = COME_MS
    end.sndhwm = end.rcvhwm = 0
    end.linger = 1000
