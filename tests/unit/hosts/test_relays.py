"""A router and a relay accept only relays with the key, forward everything and leave nothing."""

import contextlib
import json
import random
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import zmq

from ddpnb.cluster.link import ForkServerLink
from ddpnb.hosts.network import free_ports, reserve_port
from ddpnb.hosts.processes import HostProcesses
from ddpnb.hosts.router import Router
from ddpnb.hosts.wire import Word
from ddpnb.protocol.processes import KernelRequest
from tests.cluster.rig import wait_until, wait_until_gone

FRAME = b"x" * 1_000_000


@pytest.fixture
def router(tmp_path) -> Iterator[Router]:
    made = Router(f"ipc://{tmp_path}/relays")
    yield made
    made.stop()
    made.stop()


@contextlib.contextmanager
def coming(place: dict[str, str]) -> "Iterator[zmq.Socket[bytes]]":
    """Connect a fake relay that sends the hello message."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as relay:
        relay.curve_publickey, relay.curve_secretkey = zmq.curve_keypair()
        relay.curve_serverkey = place["key"].encode()
        relay.linger, relay.identity = 0, b"a"
        relay.connect(place["endpoint"])
        hello = {"token": place["token"], "host": "a", "reached": "127.0.0.1"}
        relay.send_multipart([Word.HELLO, json.dumps(hello).encode()])
        yield relay


def test_strangers_are_refused(router):
    stranger, _ = zmq.curve_keypair()
    for wrong in ({"token": "0" * 64}, {"key": stranger.decode()}):
        with coming(router.place() | wrong) as relay:
            assert not relay.poll(300)
    assert not router.relays
    with coming(router.place()) as relay:
        assert relay.poll(10_000)
        assert relay.recv_multipart()[0] == Word.PROBE
        assert list(router.relays) == ["a"]


def test_much_passes_in_both_directions_at_once(router):
    with coming(router.place()) as relay:
        relay.recv_multipart()
        pipe = router.relays["a"].pipe
        sender = threading.Thread(target=lambda: [pipe.send_bytes(FRAME) for _ in range(20)])
        sender.start()
        for _ in range(20):
            relay.send_multipart([Word.FRAME, FRAME])
        assert all(pipe.poll(20) and pipe.recv_bytes() == FRAME for _ in range(20))
        frames = 0
        while frames < 20:
            assert relay.poll(20_000)
            frames += relay.recv_multipart() == [Word.FRAME, FRAME]
        sender.join()


def test_a_relay_that_is_gone_is_noticed(router):
    with coming(router.place()) as relay:
        relay.recv_multipart()
        pipe = router.relays["a"].pipe
    assert pipe.poll(10)
    with pytest.raises(EOFError):
        pipe.recv_bytes()
    assert not router.relays


@pytest.fixture
def relay(router, tmp_path) -> "Iterator[subprocess.Popen[bytes]]":
    file = tmp_path / "place.json"
    file.write_text(json.dumps(router.place(name=f"test-{secrets.token_hex(8)}")))
    words = [sys.executable, "-m", "ddpnb.hosts.relay", str(file), "--a-word-of-a-launcher"]
    with subprocess.Popen(words) as process:
        wait_until(lambda: bool(router.relays), "the relay")
        yield process
        process.kill()


@pytest.mark.parametrize("first", ["agent", "link", "kernel"])
def test_agent_and_relay_end_with_each_other_and_with_the_kernel(router, relay, first):
    (name,) = router.relays
    folder = Path(f"/dev/shm/ddpnb-{name}")
    link = ForkServerLink(router.relays[name].pipe, on_exit=print, on_end=lambda: None)
    assert link.request(KernelRequest.PROBE, others=[]).result(30) is None
    (agent,) = psutil.Process(relay.pid).children()
    assert folder.stat().st_mode & 0o777 == 0o700
    {"agent": agent.kill, "link": link.close, "kernel": router.stop}[first]()
    assert link.is_over.wait(30)
    wait_until_gone([agent])
    assert relay.wait(10) == 0
    assert not folder.exists()
    assert not router.relays


def test_an_error_while_processes_are_stopped_is_raised_once_all_are():
    def fail() -> None:
        raise TimeoutError("the fork server does not end")

    stopped = []
    processes = HostProcesses.__new__(HostProcesses)
    processes._hosts = []
    processes.server = SimpleNamespace(stop=fail)
    processes._starter = SimpleNamespace(stop=lambda: stopped.append(1))
    with pytest.raises(TimeoutError):
        processes.stop()
    assert stopped


def test_a_port_that_is_kept_is_for_who_asks_for_it_by_number():
    with reserve_port("127.0.0.1") as kept, socket.socket() as other, socket.socket() as listener:
        place = kept.getsockname()
        with pytest.raises(OSError, match="in use"):
            other.bind(place)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
        socket.create_connection(place, timeout=10).close()


def test_the_choice_of_ports_leaves_the_users_random_numbers_alone():
    random.seed(1)
    before = random.getstate()
    assert len({*free_ports("127.0.0.1", 3)}) == 3
    assert random.getstate() == before
