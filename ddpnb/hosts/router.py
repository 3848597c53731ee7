"""The router: a thread that connects the kernel's pipes to relays.  Runs in the kernel."""

import hmac
import json
import secrets
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import zmq

from ddpnb.cluster.link import ForkServerLink
from ddpnb.hosts.wire import LOST_MS, Word, keep_alive
from ddpnb.protocol.processes import limit_waits

PROBE_SECONDS = 1.0
"""Seconds between two checks whether the relays are still connected."""
ROUTER_END_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Relay:
    """A connected relay."""

    host: str
    """The hostname that the host itself reports."""
    reached: str
    """The address over which ssh reached the host; without ssh, the loopback address."""
    pipe: Connection
    """The kernel's end of the pipe to the agent."""
    end: Connection
    """The router's end of the pipe."""


@dataclass(kw_only=True, slots=True, eq=False)
class RemoteHost:
    """The kernel's data about one host."""

    name: str
    """The name of the host in ``--hosts``, or else the hostname that the host reports."""
    size: int | None
    """The number of ranks to start on the host.  If None, ddpnb chooses the number."""
    relay: str
    """The name of the host's relay in the router."""
    link: ForkServerLink = field(init=False)
    """The connection to the host's agent."""
    report: dict[str, Any] = field(default_factory=dict)
    """The agent's report.  ``clock`` is the host's clock minus the kernel's clock, in seconds."""


class Router:
    """Accepts relays that have the token, and gives the kernel a pipe to each relay's agent."""

    def __init__(self, endpoint: str) -> None:
        self.relays: dict[str, Relay] = {}
        """The connected relays by name."""
        self._token = secrets.token_hex(32)
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._key, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.router_mandatory = True  # sending to a lost relay raises an error
        keep_alive(self._socket, LOST_MS)
        self._socket.bind(endpoint)
        self._control, theirs = Pipe()
        self._thread = threading.Thread(
            target=self._serve, args=(theirs,), name="ddpnb-router", daemon=True
        )
        self._thread.start()

    def place(self, *, name: str = "", endpoint: str = "", sockets: str = "") -> dict[str, Any]:
        """Return the address and the keys for a relay.  Any process with these keys can connect.

        Without a name, the relay chooses a name.  The relay connects to ``endpoint``, by default
        this router's address.  ``sockets`` is the path prefix of the sockets that ssh forwards.
        """
        return {
            "name": name,
            "endpoint": endpoint or self._endpoint,
            "key": self._key.decode(),
            "token": self._token,
            "sockets": sockets,
            "lost_ms": LOST_MS,
        }

    def stop(self) -> None:
        """Disconnect all relays, so that they end; may be called twice."""
        self._control.close()
        self._thread.join(ROUTER_END_SECONDS)

    def _serve(self, control: Connection) -> None:
        next_probe, ready = 0.0, set[object]()
        while control.fileno() not in ready:  # ready: `stop` has closed the other end
            poller = zmq.Poller()
            ends = {relay.end.fileno(): name for name, relay in self.relays.items()}
            for each in (self._socket, control, *ends):
                poller.register(each, zmq.POLLIN)
            ready = {found for found, _ in poller.poll(int(PROBE_SECONDS * 1000))}
            if self._socket in ready:
                try:
                    self._receive(*self._socket.recv_multipart())
                except Exception:  # noqa: BLE001  the edge of the thread; other relays continue
                    traceback.print_exc()
            for fd, name in ends.items():
                if fd in ready and name in self.relays:
                    self._pass_on(name)
            if time.monotonic() > next_probe:
                for name in list(self.relays):
                    self._send(name, Word.PROBE)
                next_probe = time.monotonic() + PROBE_SECONDS
        for name in list(self.relays):
            self._drop(name)
        self._socket.close()
        self._context.term()

    def _receive(self, identity: bytes, word: bytes, content: bytes) -> None:
        """Process a message from a relay, or from an unknown process."""
        name = identity.decode(errors="replace")
        if word == Word.HELLO and name not in self.relays:
            hello = json.loads(content)
            if hmac.compare_digest(hello["token"], self._token):
                pipe, end = Pipe()
                limit_waits(end).close()
                relay = Relay(host=hello["host"], reached=hello["reached"], pipe=pipe, end=end)
                self.relays[name] = relay
                self._send(name, Word.PROBE)
        elif word == Word.END:
            self._drop(name)
        elif word == Word.FRAME and name in self.relays:
            try:
                self.relays[name].end.send_bytes(content)
            except OSError:  # the kernel has closed its end or does not read
                self._end(name)

    def _pass_on(self, name: str) -> None:
        """Send a frame from the kernel to the agent; end the agent if the pipe is closed."""
        try:
            self._send(name, Word.FRAME, self.relays[name].end.recv_bytes())
        except (EOFError, OSError):
            self._end(name)

    def _end(self, name: str) -> None:
        """End an agent that the kernel no longer needs."""
        self._send(name, Word.END)
        self._drop(name)

    def _send(self, name: str, word: Word, content: bytes = b"") -> None:
        """Send a message to a relay; remove the relay if it is lost."""
        try:
            self._socket.send_multipart([name.encode(), word, content])
        except zmq.ZMQError:
            self._drop(name)

    def _drop(self, name: str) -> None:
        """Remove a relay, and close its pipe so that the kernel notices."""
        if (relay := self.relays.pop(name, None)) is not None:
            relay.end.close()
