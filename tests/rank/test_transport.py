"""Do tensors of any kind cross shared memory unharmed, and only for those who know the key?"""

import stat

import pytest
import torch
from torch import nn

from ddpnb.errors import UserError
from ddpnb.rank.lifeline import Lifeline
from ddpnb.rank.transport import packed
from ddpnb.rank.transport.link import DirectLink
from ddpnb.rank.transport.mailbox import Mailbox
from ddpnb.rank.transport.master import Master
from ddpnb.rank.transport.message import KEY_BYTES, RankLostError, Reply, RunOverError
from ddpnb.rank.transport.server import Server
from ddpnb.rank.transport.shm import ShmHost, ShmLink

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
def parameters():
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]


def make_server(parameters, **options) -> Server:
    master = Master(parameters, lambda p: torch.optim.SGD(p, lr=0.1), **options)
    return Server(master=master, num_workers=1, num_shares=3, timeout_seconds=0.5)


@pytest.fixture
def served(tmp_path, parameters):
    server = make_server(parameters)
    host = ShmHost(server, folder=tmp_path, name="test", timeout_seconds=5)
    yield server, host
    host.close()
    host.close()
    assert list(tmp_path.iterdir()) == []


def connect(tmp_path, key=None) -> ShmLink:
    return ShmLink(
        folder=tmp_path,
        name="test",
        key=key,
        rank=1,
        parameters=[nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))],
        timeout_seconds=5,
        lifeline=Lifeline(),
    )


def test_a_caller_without_the_key_is_turned_away(tmp_path, served):
    _, host = served
    host.start()
    with pytest.raises(RunOverError):
        connect(tmp_path, bytes(KEY_BYTES))
    friend = connect(tmp_path)
    assert friend.begin().share == 0
    friend.finish()
    host.settle()


def test_the_key_lies_in_a_file_that_nobody_else_can_read(tmp_path, served):
    _, host = served
    path = tmp_path / "test.k"
    assert path.read_bytes() == host.key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_worker_that_nobody_joins_gives_up(parameters):
    master = Master(parameters, lambda p: torch.optim.SGD(p, lr=0.1))
    server = Server(master=master, num_workers=2, num_shares=3, timeout_seconds=0.2)
    with pytest.raises(RankLostError, match="Rank 1 left"):
        server.begin(0, packed.pack(parameters))


def test_a_server_that_never_started_closes(tmp_path, served):
    assert len(list(tmp_path.iterdir())) == 2


def test_parameters_are_the_models_own_memory_again_in_the_end(tmp_path, parameters):
    server = make_server(parameters)
    link = DirectLink(server, 0, parameters)
    addresses = [parameter.data_ptr() for parameter in parameters]
    link.begin()
    assert [parameter.data_ptr() for parameter in parameters] == addresses
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    link.push()
    link.finish()
    assert parameters[0].tolist() == pytest.approx([0.9] * 3)
    assert [parameter.data_ptr() for parameter in parameters] != addresses


def test_a_damped_update_is_divided_by_one_plus_staleness(parameters):
    master = Master(parameters, lambda p: torch.optim.SGD(p, lr=0.1), is_damped=True)
    memory = packed.pack(parameters)
    ones = [torch.ones_like(parameter) for parameter in parameters]
    master.read(0, memory), master.read(1, memory), master.read(2, memory)
    found = []
    for rank in range(3):
        assert master.write(rank, ones) == rank
        master.read(rank, memory)
        found.append(memory.tensors[0][0].item())
    assert found == pytest.approx([1 - 0.1, 1 - 0.1 - 0.05, 1 - 0.1 - 0.05 - 0.1 / 3])


def test_gradients_that_are_gathered_are_summed(parameters):
    master = Master(parameters, lambda p: torch.optim.SGD(p, lr=0.1), period=2)
    memory = packed.pack(parameters)
    gradient = [torch.ones_like(parameter) for parameter in parameters]
    master.read(0, memory)
    for expected in (1.0, 0.8, 0.8):
        master.write(0, gradient)
        master.read(0, memory)
        assert memory.tensors[0][0].item() == pytest.approx(expected)
    master.apply()
    assert master.tensors[0][0].item() == pytest.approx(0.7)


def test_a_parameter_without_a_gradient_is_left_alone(parameters):
    master = Master(parameters, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5))
    master.read(0, packed.pack(parameters))
    master.write(0, [torch.ones(3), None])
    assert master.tensors[0][0].item() == pytest.approx(1 - 0.1 * 1.5)
    assert master.tensors[1].unique().tolist() == [1]


def test_a_reply_survives_the_wire():
    reply = Reply(staleness=3, share=7, waited_seconds=0.25)
    assert Reply.unpack(reply.pack()) == reply
    with pytest.raises(RankLostError, match="Rank 2"):
        Reply.unpack(Reply(lost_rank=2).pack())
