"""Do tensors of any kind cross shared memory unharmed, and only for those who know the key?"""

import stat

import pytest
import torch
from torch import nn

from ddpnb.errors import UserError
from ddpnb.rank.transport import message, packed
from ddpnb.rank.transport.link import Link
from ddpnb.rank.transport.mailbox import Mailbox
from ddpnb.rank.transport.master import Master, no_log
from ddpnb.rank.transport.message import KEY_BYTES, RankLostError
from ddpnb.rank.transport.server import Server

KINDS = [
    torch.randn(3, 5),
    torch.randn(7, dtype=torch.float64),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.zeros(0),
    torch.randn(2, 3, dtype=torch.complex64),
]


def test_any_mix_of_tensors_is_packed_and_copied_at_once():
    one, other = packed.pack(KINDS), packed.pack(KINDS)
    for slot, value in zip(one.tensors, KINDS, strict=True):
        slot.copy_(value)
    other.raw.copy_(one.raw)
    for slot, value in zip(other.tensors, KINDS, strict=True):
        assert torch.equal(slot, value)
        assert slot.dtype == value.dtype


def test_two_maps_of_a_mailbox_are_the_same_memory(tmp_path):
    path = tmp_path / "box"
    mine, theirs = Mailbox.create(path, KINDS), Mailbox.map(path, KINDS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    mine.gradients.tensors[0].fill_(1)
    mine.parameters.tensors[0].fill_(2)
    assert theirs.gradients.tensors[0].unique().tolist() == [1]
    assert theirs.parameters.tensors[0].unique().tolist() == [2]


def test_where_there_is_no_room_it_is_said(tmp_path):
    with pytest.raises(UserError, match=r"no room for .* MB of shared memory"):
        packed.create_shared(tmp_path / "box", 2**60)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def server(tmp_path):
    parameters = [nn.Parameter(torch.ones(3))]
    master = Master(parameters, lambda p: torch.optim.SGD(p, lr=0.1), no_log)
    server = Server(
        folder=tmp_path,
        name="test",
        master=master,
        num_workers=1,
        num_shares=3,
        timeout_seconds=0.5,
    )
    yield server
    server.close()
    server.close()
    assert list(tmp_path.iterdir()) == []


def connect(tmp_path, key) -> Link:
    return Link(
        folder=tmp_path,
        name="test",
        key=key,
        rank=0,
        parameters=[nn.Parameter(torch.zeros(3))],
        timeout_seconds=5,
    )


def test_a_caller_without_the_key_is_turned_away(tmp_path, server):
    server.start()
    stranger = connect(tmp_path, bytes(KEY_BYTES))
    with pytest.raises(RankLostError):
        stranger.begin()
    stranger.close()
    friend = connect(tmp_path, server.key)
    assert friend.begin().share == 0
    friend.finish()
    friend.close()
    server.wait()
    assert server.error is None


def test_a_server_that_nobody_calls_gives_up(tmp_path, server):
    server.start()
    server.wait()
    assert isinstance(server.error, RankLostError)


def test_a_server_that_never_started_closes(tmp_path, server):
    assert len(list(tmp_path.iterdir())) == 2


def test_a_reply_survives_the_wire():
    here, there = message.socket.socketpair()
    reply = message.Reply(staleness=3, share=7, settled=True, lost_rank=2)
    with here, there:
        message.send_reply(here, reply)
        assert message.receive_reply(there) == reply
