"""The protocol between the kernel and a relay, over CurveZMQ.  Used in the kernel and in relays."""

from enum import Enum

import zmq

LOST_MS = 15_000
"""Milliseconds until a connection without heartbeats counts as lost.  ZMQ sends heartbeats."""
COME_MS = 15_000
"""Maximum milliseconds to set up a connection; needed because unknown processes may connect."""

NUM_SOCKETS = 12
"""Number of sockets or ports that the controller opens for engines.  ipyparallel needs eight."""


class Word(bytes, Enum):
    """The first part of a message; the second part is the content."""

    HELLO = b"hello"
    """The relay has started the agent.  The content has the hostname and the token."""
    FRAME = b"frame"
    """A frame of the agent's pipe, sent by the kernel or by the relay."""
    END = b"end"
    """The kernel asks the relay to end the agent, or the relay says that the agent has ended."""
    PROBE = b"probe"
    """The kernel accepts a relay, or checks that the relay is still connected."""


def keep_alive(end: "zmq.Socket[bytes]", lost_ms: int) -> None:
    """Make ZMQ notice lost connections, and let ZMQ queue any number of messages."""
    end.heartbeat_ivl, end.heartbeat_timeout, end.heartbeat_ttl = lost_ms // 3, lost_ms, lost_ms
    end.handshake_ivl = COME_MS
    end.sndhwm = end.rcvhwm = 0
    end.linger = 1000
