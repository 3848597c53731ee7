"""The way to an agent on a host that a batch system has chosen: bytes over CurveZMQ (both ends).

On each such host Slurm, MPI or ipyparallel's launcher starts ``python -m ddpnb.launcher.tunnel come
FILE``.  It connects to a port of the kernel's host, sends its host's name, and runs the script that
it is sent.  The process at that port, ``... serve FILE``, passes on what the script reads and
writes, as ssh does: its own standard input and output are the kernel's pipe.
"""

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import zmq
from zmq.auth.thread import ThreadAuthenticator

from ddpnb.protocol.processes import atomic_write

HELLO, WELCOME, TAKEN, ALIVE = b"hello", b"welcome", b"taken", b"alive"
RUN, INPUT, OUTPUT, ERRORS, ENDED = b"run", b"input", b"output", b"errors", b"ended"
HEARTBEAT_MS = 1000
LOST_MS = 3000
"""After so long without a heartbeat, which ZMQ's own thread answers, the other host is lost."""
POLL_MS = 500
COME_SECONDS = 600.0
"""How long a host goes on asking for something to run: an agent that has ended may be replaced."""
ONCE_SECONDS = 10.0
"""The same where the kernel waits for it."""
SHARED_SECONDS = 10.0
"""How long a file of another host may take to appear on a disk that both share."""
END_SECONDS = 5.0
"""How long the command that had the host come may take to end by itself."""
TERMINATE_SECONDS = 2.0
"""How long it may take once it was asked to."""
CLOSE_SECONDS = 10.0
"""How long the agent may take to end its ranks once the kernel has closed its pipe."""
LOST = 255
"""The exit code where the host was lost, which is also ssh's."""

Place = dict[str, Any]
"""What a file says of a port: address, number, and the keys of ``zmq.curve_keypair``."""
Router = zmq.Socket  # of the process that serves
Dealer = zmq.Socket  # of the host that comes


class Outlet:
    """Bytes on their way to a descriptor, which need not take them at once.

    A program that writes before it goes on reading must not meet one here that does the same.
    """

    def __init__(self, end: int, poller: zmq.Poller) -> None:
        self.end = end
        self.waiting = bytearray()
        self._poller = poller

    def put(self, data: bytes) -> None:
        """Have data written as soon as ``poller`` says that it can be."""
        os.set_blocking(self.end, False)
        self.waiting += data
        self._poller.register(self.end, zmq.POLLOUT)

    def write(self) -> None:
        """Write what the descriptor takes now; nobody may read there any more."""
        if self.waiting:  # else there is nothing, or it has been closed a moment ago
            try:
                del self.waiting[: os.write(self.end, self.waiting)]
            except BlockingIOError:
                return
            except OSError:
                self.waiting.clear()
        if not self.waiting:
            self.drop()

    def drop(self) -> None:
        """Write nothing more; may be called twice."""
        self.waiting.clear()
        with contextlib.suppress(KeyError):
            self._poller.unregister(self.end)


class OneClient:
    """Admits the client with the key that is in the user's home."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a key is the client's."""
        return key == self._key


def serve(place: Place) -> int:
    """Wait for a host and pass bytes on; return the exit code of what ran there."""
    context = zmq.Context()
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback("*", OneClient(place["client"][0].encode()))
    router = context.socket(zmq.ROUTER)
    router.curve_publickey, router.curve_secretkey = map(str.encode, place["server"])
    router.curve_server = True
    router.router_mandatory = True  # to send to a host that is lost is an error then
    watch_over(router)
    try:
        router.bind(f"tcp://{place['address']}:{place['port']}")
        with command_of(place) as command:
            return pass_on(router, place, command)
    finally:
        remove_file(place)
        router.close()
        guard.stop()
        context.term()


def remove_file(place: Place) -> None:
    """Remove the file by which the host has come, if it is for this one alone."""
    if place["remove"]:
        Path(place["remove"]).unlink(missing_ok=True)


def after(command: "subprocess.Popen[bytes] | None", code: int) -> int:
    """Return the code once the command has noticed that all has ended at the other end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        if command is not None:
            command.wait(END_SECONDS)
    return code


@contextlib.contextmanager
def command_of(place: Place) -> "Iterator[subprocess.Popen[bytes] | None]":
    """Have the host come, if there is a command for it, and end that command."""
    if not place["command"]:
        yield None
        return
    command = subprocess.Popen(place["command"], stdin=subprocess.DEVNULL, stdout=2)
    try:
        yield command
    finally:
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(command.pid).children(recursive=True)
        command.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # mpiexec removes its files
            command.wait(TERMINATE_SECONDS)
        command.kill()
        for each in below:  # mpiexec's ssh, which a lost host does not end
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        command.wait()


def pass_on(
    router: "Router[bytes]", place: Place, command: "subprocess.Popen[bytes] | None"
) -> int:
    """Pass bytes on between the kernel's pipe and the host that comes first.

    The first message in the pipe is the script.  The host's name goes into the file ``arrived``,
    what the script writes to its stderr into ``log``.
    """
    pipe = Connection(os.dup(0), writable=False)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(0, zmq.POLLIN)
    outlet = Outlet(1, poller)
    peer, word, waiting = b"", RUN, list[tuple[bytes, bytes]]()
    code: int | None = None
    deadline = math.inf
    while time.monotonic() < deadline:
        events = dict(poller.poll(POLL_MS))
        if 1 in events:
            outlet.write()
        if command is not None and not peer and not events and command.poll() is not None:
            return abs(command.returncode) or LOST
        if 0 in events:
            try:
                data = read_script(pipe) if word == RUN else os.read(0, 1 << 16)
            except (EOFError, OSError):
                data = b""
            if not data and (word == RUN or not peer):
                return 0
            if not data:
                poller.unregister(0)
                deadline = time.monotonic() + CLOSE_SECONDS
            waiting.append((word, data))
            word = INPUT
        if router in events:
            sender, what, data = router.recv_multipart()
            if what == HELLO:
                with contextlib.suppress(zmq.ZMQError):
                    router.send_multipart([sender, TAKEN if peer else WELCOME, b""])
                if not peer:
                    peer = sender
                    atomic_write(Path(place["arrived"]), data)
                    remove_file(place)
            elif sender == peer and what == OUTPUT:
                outlet.put(data)
            elif sender == peer and what == ERRORS:
                with contextlib.suppress(OSError), Path(place["log"]).open("ab") as errors:
                    errors.write(data)  # the folder goes before the last host has ended
            elif sender == peer and what == ENDED:
                code, deadline = int(data), time.monotonic() + CLOSE_SECONDS
        if code is not None:
            if not outlet.waiting:
                return after(command, code)
        elif peer:
            try:
                for message in [*waiting, (ALIVE, b"")]:
                    router.send_multipart([peer, *message])
            except zmq.ZMQError:
                return LOST
            waiting.clear()
    return LOST


def read_script(pipe: Connection) -> bytes:
    """Read the kernel's first frame."""
    return str(json.loads(pipe.recv_bytes())["script"]).encode()


def come(place: Place) -> int:
    """Run what the kernel's host sends, one script after the other, until it sends none."""
    seconds = ONCE_SECONDS if place["is_once"] else COME_SECONDS
    deadline = time.monotonic() + seconds
    ports = place["ports"]
    while time.monotonic() < deadline:
        for port in ports:
            with connected(place, port) as (dealer, monitor):
                dealer.send_multipart([HELLO, socket.gethostname().encode()])
                if dealer.poll(LOST_MS) and dealer.recv_multipart()[0] == WELCOME:
                    ports = [port]  # which is this host's from now on
                    run_scripts(dealer, monitor)
                    if place["is_once"]:
                        return 0
                    deadline = time.monotonic() + seconds
        time.sleep(0.2)
    print(f"no answer at {place['address']}, port {place['ports'][0]}", file=sys.stderr)
    return 1


@contextlib.contextmanager
def connected(place: Place, port: int) -> "Iterator[tuple[Dealer[bytes], zmq.Socket[bytes]]]":
    """Yield a socket that is connected to a port, and one that reports its end."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.curve_publickey, dealer.curve_secretkey = map(str.encode, place["client"])
        dealer.curve_serverkey = place["server"].encode()
        watch_over(dealer)
        dealer.reconnect_ivl = -1
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(f"tcp://{place['address']}:{port}")
        try:
            yield dealer, monitor
        finally:
            dealer.disable_monitor()


def run_scripts(dealer: "Dealer[bytes]", monitor: "zmq.Socket[bytes]") -> None:
    """Wait for a script, run it, and say how it ended."""
    poller = zmq.Poller()
    poller.register(dealer, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    while monitor not in dict(poller.poll()):
        word, data = dealer.recv_multipart()
        if word == RUN:
            with subprocess.Popen(
                ["sh", "-c", data.decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a batch system's signals come to an end by its pipe
            ) as shell:
                pass_script(dealer, poller, shell)
            send(dealer, ENDED, str(shell.returncode).encode())
            return


def pass_script(
    dealer: "Dealer[bytes]", poller: zmq.Poller, shell: "subprocess.Popen[bytes]"
) -> None:
    """Pass bytes on between the connection and a script, until it has closed its output.

    A script that does not read, because it waits until its own output is read, is no reason to
    wait here.
    """
    assert shell.stdin is not None
    assert shell.stdout is not None
    assert shell.stderr is not None
    words = {shell.stdout.fileno(): OUTPUT, shell.stderr.fileno(): ERRORS}
    for end in words:
        poller.register(end, zmq.POLLIN)
    outlet, is_over = Outlet(shell.stdin.fileno(), poller), False
    while OUTPUT in words.values():
        for found, _ in poller.poll():
            if found is dealer:
                word, data = dealer.recv_multipart()
                if word == INPUT and not shell.stdin.closed:
                    outlet.put(data)
                    is_over = is_over or not data
            elif found == outlet.end:
                outlet.write()
                if is_over and not outlet.waiting:
                    shell.stdin.close()  # again, if it is closed: that does nothing
            elif found in words:
                data = os.read(found, 1 << 16)
                send(dealer, words[found], data)
                if not data:
                    poller.unregister(found)
                    del words[found]
            else:  # the kernel's host is lost: the script ends with its input
                outlet.drop()
                shell.stdin.close()
                poller.unregister(found)


def send(dealer: "Dealer[bytes]", word: bytes, data: bytes) -> None:
    """Send a message, or drop it where the connection is lost: it would wait without end."""
    with contextlib.suppress(zmq.Again):  # there is no limit to what waits to be sent
        dealer.send_multipart([word, data], zmq.NOBLOCK)


def watch_over(end: "zmq.Socket[bytes]") -> None:
    """Have a lost connection noticed, and no message dropped for there being many."""
    end.heartbeat_ivl, end.heartbeat_timeout, end.heartbeat_ttl = HEARTBEAT_MS, LOST_MS, LOST_MS
    end.handshake_ivl = LOST_MS  # how long a stranger may hold a connection
    end.sndhwm = end.rcvhwm = 0
    end.linger = 1000


def main() -> int:
    """Be one of the ends; launchers may add words of their own to the line."""
    path = Path(sys.argv[2])
    deadline = time.monotonic() + SHARED_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            print(f"no file with keys, {path}", file=sys.stderr)
            return 1
        time.sleep(0.05)
    place = json.loads(path.read_text())
    return serve(place) if sys.argv[1] == "serve" else come(place)


if __name__ == "__main__":
    sys.exit(main())
