"""A process's connections include the connections that a child has inherited."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ddpnb.rank.connections import ends_of, own_connections


@pytest.fixture
def connected() -> Iterator[list[socket.socket]]:
    """Both ends of two IPv4 connections. One server socket also accepts IPv6."""
    with ExitStack() as stack:
        old = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        new = stack.enter_context(
            socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        )
        made = []
        for server in (old, new):
            port = server.getsockname()[1]
            made.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            made.append(stack.enter_context(server.accept()[0]))
        yield made


def addresses(end: socket.socket) -> tuple[tuple[str, int], ...]:
    ends = end.getsockname(), end.getpeername()
    return tuple((ip.removeprefix("::ffff:"), port) for ip, port, *_ in ends)


@pytest.mark.parametrize("is_portable", ["0", "1"])
def test_a_process_and_a_child_that_has_inherited_them_have_the_same_connections(
    connected, is_portable, monkeypatch
):
    monkeypatch.setenv("DDPNB_PORTABLE", is_portable)
    expected = {addresses(end) for end in connected}
    assert expected <= {ends for _, ends in own_connections()}
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        pass_fds=[end.fileno() for end in connected],
    )
    try:
        assert all(expected <= ends_of([pid]) for pid in (os.getpid(), child.pid))
    finally:
        child.kill()
        child.communicate()
