"""Do tensors cross shared memory unharmed, and do parameters stay while a worker uses them?"""

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
import torch
from torch import Tensor, nn

from ddpnb.protocol.errors import UserError
from ddpnb.rank.comm import flat_buffers
from ddpnb.rank.comm.client import ParameterClient
from ddpnb.rank.comm.parameter_server import (
    REPLY,
    REQUEST,
    ParameterServer,
    Reply,
    RequestKind,
    WorkerRequest,
)
from ddpnb.rank.comm.parameter_store import WHOLE_ROUND, ParameterStore, ScaledStep
from ddpnb.rank.comm.rendezvous import CancellationToken, RankLostError, WorkerConfig
from ddpnb.rank.comm.transport import DirectTransport, SharedMemory, connect_shm, serve_shm

KINDS = [
    torch.randn(3, 5),
    torch.randn(7, dtype=torch.float64),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.zeros(0),
    torch.randn(2, 3, dtype=torch.complex64),
]


def test_any_mix_of_tensors_is_packed_and_copied_at_once():
    one, other = flat_buffers.pack(KINDS), flat_buffers.pack(KINDS)
    for slot, value in zip(one.tensors, KINDS, strict=True):
        slot.copy_(value)
    other.raw.copy_(one.raw)
    for slot, value in zip(other.tensors, KINDS, strict=True):
        assert torch.equal(slot, value)
        assert slot.dtype == value.dtype


def test_memory_that_was_sent_is_the_same_and_has_no_name(tmp_path):
    mine = SharedMemory.create(tmp_path / "memory", KINDS, 3)
    assert list(tmp_path.iterdir()) == []
    one_end, other_end = socket.socketpair()
    with one_end, other_end, closing(mine):
        mine.send(one_end)
        theirs = SharedMemory.receive(other_end, KINDS, 3)
    pieces = [
        (
            memory.copies[0],
            memory.copies[1],
            memory.copies[2],
            memory.gradients(1),
            memory.gradients(2),
        )
        for memory in (mine, theirs)
    ]
    for number, piece in enumerate(pieces[0]):
        for tensor in piece.tensors:
            tensor.fill_(number)
    for number, piece in enumerate(pieces[1]):
        for tensor, kind in zip(piece.tensors, KINDS, strict=True):
            assert torch.equal(tensor, torch.full_like(kind, number))


def test_memory_is_not_waited_for_when_the_other_end_is_gone():
    one_end, other_end = socket.socketpair()
    with other_end:
        one_end.close()
        with pytest.raises(ConnectionError):
            SharedMemory.receive(other_end, KINDS, 2)


def test_missing_room_is_an_error_with_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"no room for .* MB of shared memory"):
        flat_buffers.create_shared_file(tmp_path / "box", 2**60)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def parameters():
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]


def make_store(parameters, num_workers=1, **options) -> ParameterStore:
    copies = [flat_buffers.pack(parameters) for _ in range(num_workers)]
    return ParameterStore(
        parameters, lambda p: torch.optim.SGD(p, lr=0.1, **options), copies=copies
    )


def make_server(store, num_workers=1) -> ParameterServer:
    return ParameterServer(store=store, num_workers=num_workers, num_shards=3, timeout_seconds=0.5)


@pytest.fixture
def served(tmp_path, parameters):
    memory = SharedMemory.create(tmp_path / "memory", parameters, 2)
    store = ParameterStore(parameters, lambda p: torch.optim.SGD(p, lr=0.1), copies=memory.copies)
    server = make_server(store)
    with ExitStack() as opened:
        yield server, serve_shm(server, memory, worker_config(tmp_path, 0), opened)
    memory.close()
    memory.close()
    assert list(tmp_path.iterdir()) == []


def worker_config(folder, rank) -> WorkerConfig:
    return WorkerConfig(
        rank=rank,
        world_size=2,
        folder=folder,
        name="test",
        transport="shm",
        parameters=[nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))],
        timeout_seconds=5,
        cancellation=CancellationToken(),
    )


def test_a_worker_finds_the_server_in_the_folder(tmp_path, served):
    _, drain = served
    config = worker_config(tmp_path, 1)
    with ExitStack() as opened:
        client = ParameterClient(connect_shm(config, opened), config.parameters)
        assert list(client.begin().shards) == [0]
        client.finish()
        drain()


def test_a_worker_that_waits_alone_gives_up(parameters):
    server = make_server(make_store(parameters, 2), 2)
    with pytest.raises(RankLostError, match="Rank 1 left"):
        server.begin(0)


def test_a_server_without_workers_closes(tmp_path, served):
    assert len(list(tmp_path.iterdir())) == 1


def test_parameters_are_the_models_own_memory_again_in_the_end(tmp_path, parameters):
    server = make_server(make_store(parameters))
    client = ParameterClient(DirectTransport(server), parameters)
    client.begin()
    addresses = [parameter.data_ptr() for parameter in parameters]
    assert [tensor.data_ptr() for tensor in server.store.tensors] == addresses
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    client.push()
    client.finish()
    assert parameters[0].tolist() == pytest.approx([0.9] * 3)
    assert [parameter.data_ptr() for parameter in parameters] != addresses


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_damped_gradient_is_divided_by_one_plus_staleness(parameters, momentum):
    """It is the gradient: momentum repeats no more of it than was applied at first."""
    copies = [flat_buffers.pack(parameters) for _ in range(3)]
    store = ParameterStore(
        parameters,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum),
        copies=copies,
        is_damped=True,
    )
    ones = [torch.ones_like(parameter) for parameter in parameters]
    store.read(0), store.read(1), store.read(2)
    position, velocity = 1.0, 0.0
    for rank in range(3):
        assert store.write(rank, ones, 1 / 3) == rank
        velocity = momentum * velocity + 1 / (1 + rank)
        position -= 0.1 * velocity
        held = copies[store.read(rank)].tensors[0][0].item()
        assert held == pytest.approx(position), "the share and the damping do not compound"


@pytest.mark.parametrize("period", [1, 2, 4])
def test_workers_in_turns_go_as_far_with_damping_as_without(period):
    """Each gradient has about the staleness of equally fast workers."""
    ends = []
    for is_damped in (False, True):
        parameter = nn.Parameter(torch.zeros(1))
        store = ParameterStore(
            [parameter],
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            copies=[flat_buffers.pack([parameter]) for _ in range(4)],
            period=period,
            is_damped=is_damped,
        )
        for rank in range(4):
            store.read(rank)
        for step in range(400):
            store.write(step % 4, [torch.ones(1)], 1 / 4)
            store.read(step % 4)
        ends.append(store.tensors[0].item())
    assert ends[1] == pytest.approx(ends[0], rel=0.15)


def test_a_compensated_gradient_is_that_of_its_paper(parameters):
    """g + lambda g g (w_now - w_old), each coordinate by itself; none without staleness."""
    ends = {}
    for strength in (0.0, 2.0):
        copies = [flat_buffers.pack(parameters) for _ in range(2)]
        store = ParameterStore(
            parameters,
            lambda p: torch.optim.SGD(p, lr=0.1),
            copies=copies,
            compensation=strength,
        )
        gradient = [torch.tensor([1.0, 2.0, -3.0]), None]
        store.read(0), store.read(1)
        store.write(0, gradient)  # not stale
        fresh = store.tensors[0].clone()
        store.write(1, gradient)  # of the parameters before, which were all 1
        ends[strength] = fresh, store.tensors[0].clone()
    assert torch.equal(ends[0.0][0], ends[2.0][0])
    (now, plain), compensated = ends[0.0], ends[2.0][1]
    g = torch.tensor([1.0, 2.0, -3.0])
    torch.testing.assert_close(plain - compensated, 0.1 * 2.0 * g * g * (now - 1))


def test_gradients_that_are_gathered_are_summed(parameters):
    copies = [flat_buffers.pack(parameters)]
    store = ParameterStore(
        parameters, lambda p: torch.optim.SGD(p, lr=0.1), copies=copies, period=2
    )
    gradient = [torch.ones_like(parameter) for parameter in parameters]
    store.read(0)
    for expected in (1.0, 0.8, 0.8):
        store.write(0, gradient)
        assert copies[store.read(0)].tensors[0][0].item() == pytest.approx(expected)
    store.release(0)
    store.apply()
    assert store.tensors[0][0].item() == pytest.approx(0.7)


def pushed(make, weight: float, num: int, period: int = 1) -> float:
    """Where one parameter, 0 at first, comes to by gradients of (w - 1)^2 / 2."""
    parameter = nn.Parameter(torch.zeros(1))
    store = ParameterStore(
        [parameter], make, copies=[flat_buffers.pack([parameter])], period=period
    )
    for _ in range(num):
        held = store.copies[store.read(0)].tensors[0]
        store.write(0, [held.clone() - 1], weight)
    return store.tensors[0].item()


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("is_gathered", [False, True])
def test_weight_decay_is_the_same_for_any_number_of_workers(num_workers, is_gathered):
    decayed = pushed(
        lambda p: torch.optim.SGD(p, lr=0.2, weight_decay=0.5),
        1 / num_workers,
        200 * num_workers,
        num_workers if is_gathered else 1,
    )
    assert decayed == pytest.approx(1 / 1.5, abs=1e-4)


def test_adam_moves_as_far_in_a_batch_whoever_shares_it():
    alone, shared = (pushed(torch.optim.Adam, 1 / num, num) for num in (1, 4))
    assert shared == pytest.approx(alone, rel=0.01)


def test_a_gradient_is_clipped_as_it_is_not_as_it_is_weighted():
    def clipped(parameters):
        made = torch.optim.SGD(parameters, lr=0.1)
        made.register_step_pre_hook(clip)
        return made

    def clip(optimizer, *_):
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)

    assert pushed(clipped, 0.25, 1) == pytest.approx(0.25 * 0.1 * 0.5)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_step_at_a_share_of_its_rate_leaves_the_rate_as_it_was(is_hooked, rate):
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=rate)

    def warm_up(*_):
        optimizer.param_groups[0]["lr"] = 0.2

    if is_hooked:
        optimizer.register_step_pre_hook(warm_up)
    step = ScaledStep(optimizer)
    parameter.grad = torch.ones(1)
    expected = 0.2 if is_hooked else 0.1
    for fraction, so_far in ((0.5, 0.5), (0.5, 1.0), (0.25, 1.25), (1.0, 2.25), (0.5, 2.75)):
        step(fraction)
        assert parameter.item() == pytest.approx(-so_far * expected)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(expected)


class Derived(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_share_counts_once_where_an_optimizer_calls_its_parents_step(is_hooked):
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch wraps the step of either class
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = Derived([parameter], lr=0.1)
    if is_hooked:
        optimizer.register_step_pre_hook(lambda *_: None)
    step = ScaledStep(optimizer)
    for so_far in (0.25, 0.5):
        parameter.grad = torch.ones(1)
        step(0.25)
        assert parameter.item() == pytest.approx(-so_far * 0.1)
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_parameter_without_a_gradient_is_left_alone(parameters):
    store = make_store(parameters, weight_decay=0.5)
    store.read(0)
    store.write(0, [torch.ones(3), None])
    assert store.tensors[0][0].item() == pytest.approx(1 - 0.1 * 1.5)
    assert store.tensors[1].unique().tolist() == [1]


def test_parameters_do_not_change_while_a_worker_trains_on_them(parameters):
    """Workers push in random order; some leave, and come back."""
    num_workers, chance = 4, random.Random(3)
    store = make_store(parameters, num_workers)
    ones = [torch.ones_like(parameter) for parameter in parameters]
    held: dict[int, tuple[int, list[Tensor]]] = {}
    for _ in range(500):
        rank = chance.randrange(num_workers)
        if rank not in held:
            number = store.read(rank)
        elif chance.random() < 0.1:
            store.release(rank)
            del held[rank]
            continue
        else:
            store.write(rank, ones)
            number = store.read(rank)
        held[rank] = number, [tensor.clone() for tensor in store.copies[number].tensors]
        for number, expected in held.values():
            assert all(map(torch.equal, store.copies[number].tensors, expected))


def test_an_update_is_made_in_place_where_nobody_else_trains_on_the_parameters(parameters):
    store = make_store(parameters, 2)
    ones = [torch.ones_like(parameter) for parameter in parameters]
    assert (store.read(0), store.read(1)) == (0, 0)
    store.write(1, ones)
    assert store.read(1) == 1
    store.write(1, ones)
    assert store.read(1) == 1, "rank 1 alone trains on it"
    store.release(1)
    store.write(0, ones)
    assert store.read(0) == 1, "rank 1 has left it"
    assert store.tensors[0].tolist() == pytest.approx([0.7] * 3)


def test_messages_survive_packing():
    reply = Reply(staleness=3, first_shard=7, num_shards=2, waited_seconds=0.25, copy=1)
    assert Reply(*REPLY.unpack(REPLY.pack(*reply))) == reply
    assert list(reply.shards) == [7, 8]
    request = WorkerRequest(RequestKind.PUSH, 0.5)
    assert WorkerRequest(*REQUEST.unpack(REQUEST.pack(*request))) == request


def test_first_shares_are_dealt_in_turns(parameters):
    server = ParameterServer(
        store=make_store(parameters, 2),
        num_workers=2,
        num_shards=9,
        num_prefetched=2,
        timeout_seconds=5,
    )
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(server.begin, (1, 0)))
    assert [list(reply.shards) for reply in replies] == [[1, 3, 5], [0, 2, 4]]
    ones = [torch.ones_like(parameter) for parameter in parameters]
    assert list(server.push(1, ones).shards) == [6]


def test_a_worker_killed_in_its_wait_does_not_cost_its_successor_the_place(parameters):
    store = ParameterStore(
        parameters,
        lambda p: torch.optim.SGD(p, lr=0.1),
        copies=[flat_buffers.pack(parameters) for _ in range(2)],
        period=WHOLE_ROUND,
    )
    server = ParameterServer(
        store=store,
        num_workers=2,
        num_shards=20,
        bound=0,
        timeout_seconds=20,
    )
    ones = [torch.ones_like(parameter) for parameter in parameters]
    with ThreadPoolExecutor(3) as pool:
        both = [pool.submit(server.begin, rank, rank) for rank in (0, 1)]
        assert [list(each.result(10).shards) for each in both] == [[0], [1]]
        waits = pool.submit(server.push, 1, ones, 0.5, 1)
        while not store._staleness:  # it waits for rank 0
            time.sleep(0.001)
        joined = server.begin(1, "its successor")
        assert list(joined.shards) == [2]
        with pytest.raises(RankLostError, match="Rank 1"):
            waits.result(10)
        server.lose(1, 1)  # a late report of its old connection
        pushes = [
            pool.submit(server.push, rank, ones, 0.5, incarnation)
            for rank, incarnation in ((0, 0), (1, "its successor"))
        ]
        shards = [shard for push in pushes for shard in push.result(10).shards]
        assert sorted(shards) == [3, 4]
    assert server.lost_shards == []
