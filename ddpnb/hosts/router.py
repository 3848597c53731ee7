"""Where relays connect: one thread between their socket and a pipe for each agent (kernel)."""

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
"""How often it is checked whether relays are connected."""
STOP_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Relay:
    """A relay that has come."""

    host: str
    """What its host calls itself."""
    reached: str
    """The address by which ssh has reached it, if it has."""
    pipe: Connection
    """Leads to its agent."""
    end: Connection
    """The router's end of the pipe."""


@dataclass(kw_only=True, slots=True, eq=False)
class RemoteHost:
    """One host, as the kernel sees it."""

    name: str
    """As the user wrote it, or as it calls itself."""
    size: int | None
    """How many ranks are to be there; None: as many as fit."""
    relay: str
    """The name of its relay in the router."""
    link: ForkServerLink = field(init=False)
    """To its agent."""
    report: dict[str, Any] = field(default_factory=dict)
    """What it has; ``clock`` is by how many seconds it is ahead."""


class Router:
    """Lets relays in that have the token, and connects a pipe with the agent of each."""

    def __init__(self, endpoint: str) -> None:
        self.relays: dict[str, Relay] = {}
        """Those that are connected, by name."""
        self._token = secrets.token_hex(32)
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._key, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.router_mandatory = True  # to send to a relay that is lost is an error then
        keep_alive(self._socket, LOST_MS)
        self._socket.bind(endpoint)
        self._control, theirs = Pipe()
        self._thread = threading.Thread(
            target=self._serve, args=(theirs,), name="ddpnb-router", daemon=True
        )
        self._thread.start()

    def place(self, *, name: str = "", endpoint: str = "", sockets: str = "") -> dict[str, Any]:
        """Return what a relay needs to come; whoever reads it may come too.

        Without a name it chooses one.  It connects to ``endpoint``, by default where this host
        listens.  ssh has forwarded the controller's sockets to ``sockets`` and their numbers.
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
        """Disconnect from all relays, which ends them; may be called twice."""
        self._control.close()
        self._thread.join(STOP_SECONDS)

    def _serve(self, control: Connection) -> None:
        next_probe, ready = 0.0, set[object]()
        while control.fileno() not in ready:  # it has been closed then
            poller = zmq.Poller()
            ends = {relay.end.fileno(): name for name, relay in self.relays.items()}
            for each in (self._socket, control, *ends):
                poller.register(each, zmq.POLLIN)
            ready = {found for found, _ in poller.poll(int(PROBE_SECONDS * 1000))}
            if self._socket in ready:
                try:
                    self._receive(*self._socket.recv_multipart())
                except Exception:  # noqa: BLE001  the edge of the thread: others go on
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
        """Take a message of a relay, or of a stranger."""
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
            except OSError:  # the kernel has closed its end, or does not read
                self._end(name)

    def _pass_on(self, name: str) -> None:
        """Send a frame of the kernel, or its end, to the agent."""
        try:
            self._send(name, Word.FRAME, self.relays[name].end.recv_bytes())
        except (EOFError, OSError):
            self._end(name)

    def _end(self, name: str) -> None:
        """Have an agent end, which nobody needs any more."""
        self._send(name, Word.END)
        self._drop(name)

    def _send(self, name: str, word: Word, content: bytes = b"") -> None:
        """Send a message to a relay, or drop one that is lost."""
        try:
            self._socket.send_multipart([name.encode(), word, content])
        except zmq.ZMQError:
            self._drop(name)

    def _drop(self, name: str) -> None:
        """Forget a relay, and have the kernel read the end of its pipe."""
        if (relay := self.relays.pop(name, None)) is not None:
            relay.end.close()
