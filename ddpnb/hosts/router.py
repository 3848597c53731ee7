"""Where relays connect: one thread between their socket and a pipe for each agent (kernel)."""

import contextlib
import hmac
import json
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import zmq

from ddpnb.hosts.reasons import silent
from ddpnb.hosts.wire import Word, keep_alive
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import limit_waits

PROBE_SECONDS = 1.0
"""How often it is checked whether relays are connected."""
WRITE_SECONDS = 10.0
"""How long the kernel may take to read a frame."""
COME_SECONDS = 30.0
"""How long a host may take to start its relay and agent."""
STOP_SECONDS = 5.0


@dataclass(kw_only=True, slots=True)
class Relay:
    """A relay that has come."""

    identity: bytes
    host: str
    """What its host calls itself."""
    addresses: list[str]
    reached: str
    """The one by which ssh has reached it, if it has."""
    pipe: Connection
    """Leads to its agent."""
    last_words: str = ""
    """What the agent wrote last, once it has ended."""


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
        keep_alive(self._socket)
        self._socket.bind(endpoint)
        self._control, theirs = Pipe()
        self._ends: dict[str, Connection] = {}
        """This thread's ends of the pipes, by their relays' names."""
        self._thread = threading.Thread(
            target=self._serve, args=(theirs,), name="ddpnb-router", daemon=True
        )
        self._thread.start()

    def place(self, *, name: str = "", endpoint: str = "", forwarded: str = "") -> dict[str, str]:
        """Return what a relay needs to come; whoever reads it may come too.

        Args:
            name: what this relay is called; empty: it chooses a name.
            endpoint: where it connects, if not where this host listens.
            forwarded: where ssh has forwarded the controller's sockets to, less their numbers.
        """
        return {
            "name": name,
            "endpoint": endpoint or self._endpoint,
            "key": self._key.decode(),
            "token": self._token,
            "forwarded": forwarded,
        }

    def start_agent(self, name: str) -> None:
        """Have a relay start its agent again, once that has ended; it gets another ``Relay``."""
        self._control.send_bytes(self.relays.pop(name).identity)

    def wait_for(self, name: str, host: str, look: Callable[[], None] = lambda: None) -> None:
        """Wait until a relay with an agent is there.

        Args:
            name: the relay's.
            host: its host's.
            look: called repeatedly; raises to give up.

        Raises:
            UserError: it does not come.
        """
        deadline = time.monotonic() + COME_SECONDS
        while name not in self.relays:
            look()
            if time.monotonic() > deadline:
                raise UserError(silent(host, COME_SECONDS))
            time.sleep(0.005)

    def stop(self) -> None:
        """Disconnect from all relays, which ends them; may be called twice."""
        self._control.close()
        self._thread.join(STOP_SECONDS)

    def _serve(self, control: Connection) -> None:
        next_probe = 0.0
        with contextlib.suppress(EOFError, OSError):
            while True:
                poller = zmq.Poller()
                for each in (self._socket, control, *self._ends.values()):
                    poller.register(each, zmq.POLLIN)
                ready = {found for found, _ in poller.poll(int(PROBE_SECONDS * 1000))}
                if control.fileno() in ready:
                    self._send(control.recv_bytes(), Word.START)
                if self._socket in ready:
                    try:
                        self._receive(*self._socket.recv_multipart())
                    except Exception:  # noqa: BLE001  the edge of the thread: others go on
                        traceback.print_exc()
                for name, end in list(self._ends.items()):
                    if end.fileno() in ready:
                        self._pass_on(name, end)
                if time.monotonic() > next_probe:
                    self._drop_lost()
                    next_probe = time.monotonic() + PROBE_SECONDS
        for name in list(self._ends):
            self._close(name)
        self._socket.close()
        self._context.term()

    def _drop_lost(self) -> None:
        for name, relay in list(self.relays.items()):
            if not self._send(relay.identity, Word.PROBE):
                del self.relays[name]
                self._close(name)

    def _receive(self, identity: bytes, word: bytes, content: bytes) -> None:
        """Take a message of a relay, or of a stranger."""
        name = next((n for n, relay in self.relays.items() if relay.identity == identity), "")
        if word == Word.HELLO:
            hello = json.loads(content)
            if hmac.compare_digest(hello["token"], self._token):
                self._let_in(identity, hello)
        elif word == Word.ENDED and name:
            self.relays[name].last_words = content.decode(errors="replace")
            self._close(name)
        elif word == Word.FRAME and name in self._ends:
            try:
                self._ends[name].send_bytes(content)
            except OSError:  # the kernel has closed its end, or does not read
                self._close(name)

    def _let_in(self, identity: bytes, hello: dict[str, Any]) -> None:
        pipe, theirs = Pipe()
        limit_waits(theirs, write_seconds=WRITE_SECONDS).close()
        self._ends[hello["name"]] = theirs
        about = {name: hello[name] for name in ("host", "addresses", "reached")}
        self.relays[hello["name"]] = Relay(identity=identity, pipe=pipe, **about)
        self._send(identity, Word.WELCOME)

    def _pass_on(self, name: str, end: Connection) -> None:
        """Send a frame of the kernel, or its end, to the agent."""
        identity = self.relays[name].identity
        try:
            self._send(identity, Word.FRAME, end.recv_bytes())
        except (EOFError, OSError):
            self._close(name)
            self._send(identity, Word.CLOSE)

    def _send(self, identity: bytes, word: Word, content: bytes = b"") -> bool:
        """Send a message; return whether the relay is connected."""
        try:
            self._socket.send_multipart([identity, word, content])
        except zmq.ZMQError:
            return False
        return True

    def _close(self, name: str) -> None:
        """Close this thread's end of a pipe: the agent has ended, or nobody needs it."""
        if (end := self._ends.pop(name, None)) is not None:
            end.close()
