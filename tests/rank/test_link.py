"""Do exchanges last as long as over the link, in every strategy, and is it all else the same?"""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.messages import RunHeader, StepEvent
from ddpnb.protocol.notation import parse_link
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.collectives import link as emulated_link
from ddpnb.rank.collectives.link import EmulatedLink, is_exchanging
from tests.rank.test_loop import run_job, spec_of, unzip

LINK = "1Mbit,3ms"
CELL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 2, bias=False))

def data(split):
    x = torch.randn(96, 4)
    return x, (x.sum(dim=1) > 0).long()

def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
"""
S = 4 * (5 * 300 + 2 * 300)
TRANSFER = S * 8 / 1e6
"""Seconds of all parameters over the link: 67 ms."""
LATENCY = 0.003

ALL_REDUCE = {
    2: 2 * LATENCY + TRANSFER,
    3: 4 * LATENCY + TRANSFER * 4 / 3,
}
PER_STEP = {
    "ddp": ALL_REDUCE,
    "ddp:hook=fp16": {2: 2 * LATENCY + TRANSFER / 2},
    "ddp-by-hand": ALL_REDUCE,
    "ddp-overlap-by-hand": ALL_REDUCE,
    "ring-by-hand": ALL_REDUCE,
    "central": {2: 2 * (LATENCY + TRANSFER), 3: 4 * (LATENCY + TRANSFER)},
    "local-sgd:every=2": {2: ALL_REDUCE[2] / 2},
    "diloco:every=3": {2: ALL_REDUCE[2] / 3},
    "gossip": {2: LATENCY + TRANSFER},
    "zero": {2: ALL_REDUCE[2] + TRANSFER},
    "dp": {2: 2 * TRANSFER, 3: 4 * TRANSFER},
}
"""Seconds that a step takes at least, by the messages that each strategy's file lists."""
LINKED = [name for name, entry in STRATEGIES.items() if not entry.needs_shared_memory]


def trained(ranks, strategy: str, num_ranks: int, **changes):
    """Return each rank's report and steps, and the header."""
    changes = {"source": CELL, "num_epochs": 2, "num_warmup_steps": 0, "link": LINK} | changes
    reports, events = unzip(ranks(num_ranks).call(run_job, spec_of(strategy, **changes)))
    steps = [[event for event in rank if isinstance(event, StepEvent)] for rank in events]
    (header,) = (event for rank in events for event in rank if isinstance(event, RunHeader))
    return reports, steps, header


CASES = [(name, num) for name, expected in PER_STEP.items() for num in expected]


@pytest.mark.parametrize(("strategy", "num_ranks"), CASES)
def test_a_step_takes_as_long_as_its_messages(ranks, strategy, num_ranks):
    reports, _, header = trained(ranks, strategy, num_ranks)
    expected = reports[0].num_steps * PER_STEP[strategy][num_ranks]
    assert reports[0].seconds >= 0.99 * expected
    assert reports[0].seconds < 1.5 * expected + 2.0  # on a machine that does much else
    assert "The network is emulated: exchanges last as over 1 Mbit/s and 3 ms." in header.notes


@pytest.mark.parametrize("strategy", LINKED)
def test_only_the_time_differs(ranks, strategy):
    over, without = (
        trained(ranks, strategy, 2, link=link, num_epochs=1) for link in ("20Mbit,1ms", "")
    )
    assert sum(r.num_samples for r in over[0]) == sum(r.num_samples for r in without[0])
    if over[2].synchronous:  # else the order of updates differs from run to run
        assert over[0][0].final_loss == without[0][0].final_loss


def test_the_link_of_a_server_is_shared_by_its_clients(ranks):
    slow = ("0:300ms",)  # rank 0 reaches its own server without a link
    means = {}
    for num_ranks in (2, 4):  # with two clients, one can push while the other pulls
        _, steps, header = trained(ranks, "async", num_ranks, slow=slow, num_epochs=4)
        exchanges = [step.parts.communication for rank in steps[1:] for step in rank]
        means[num_ranks] = sum(exchanges) / len(exchanges)
        assert any("Rank 0 trains beside the server" in note for note in header.notes)
    assert means[2] >= 0.99 * 2 * (TRANSFER + LATENCY)
    assert means[4] > 1.2 * means[2]


def test_buckets_are_on_their_way_while_the_backward_pass_works(ranks):
    """Six buckets of 25 ms, behind a backward pass that is made slow."""
    source = CELL.replace("nn.Linear(4, 300)", "*[Slow() for _ in range(6)], nn.Linear(4, 300)")
    source += """
import time

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(0.03)
        return gradient

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4).repeat(40, 1))

    def forward(self, x):
        return Sleep.apply(x) @ self.weight[:4]
"""
    chosen = {"source": source, "link": "1Mbit,0ms", "num_epochs": 1}
    _, steps, _ = trained(ranks, "ddp:bucket_cap_mb=0.002", 2, **chosen)
    last = steps[0][-1].parts  # DDP forms its final buckets after the first step
    assert last.hidden > 0.1
    assert last.communication < 0.5 * (TRANSFER + 6 * 4 * 160 * 8 / 1e6 * 4)


def linked_job(state, folder, call, text=LINK):
    """Make a call over a link; return the seconds it took."""
    cancellation = CancellationToken()
    link = EmulatedLink(parse_link(text), folder / "a.link", state.world_size)
    with emulated_link.over(link, cancellation):
        dist.barrier()
        began = time.monotonic()
        result = call(state, cancellation)
        seconds = time.monotonic() - began
    dist.barrier()
    assert list(folder.iterdir()) == []
    return seconds, result


def exchange_in_the_background(state, _):
    work = dist.all_reduce(torch.ones(2500), async_op=True)
    began = time.monotonic()
    is_known_at_once = work.is_completed()
    while not is_exchanging() and time.monotonic() < began + 10:
        time.sleep(0.001)
    was_exchanging = is_exchanging()
    work.wait()
    return is_known_at_once, was_exchanging


def test_an_exchange_in_the_background_is_not_waited_for(ranks):
    for seconds, result in ranks(2).call(linked_job, exchange_in_the_background):
        assert result == (False, True)
        assert seconds >= 0.08


def send_in_turn(state, _):
    mine = torch.full((1250,), float(state.rank))
    if state.rank == 0:
        dist.send(mine, 1)
    elif state.rank == 1:
        dist.recv(mine, 0)
    return mine[0].item()


def test_a_message_takes_latency_and_transfer(ranks):
    sender, receiver = ranks(2).call(linked_job, send_in_turn)
    assert receiver[1] == 0
    assert sender[0] >= 0.99 * 0.04
    assert receiver[0] >= 0.99 * (0.04 + LATENCY)


def freed(state, cancellation):
    """Wait a minute for a message, and be freed."""
    threading.Timer(0.1, cancellation.abort).start()
    try:
        dist.all_reduce(torch.ones(1_875_000))
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_abort_frees_ranks_that_wait_for_the_link(fresh_ranks):
    for result in fresh_ranks(2).attempt(freed_job):
        seconds, text = result
        assert seconds < 30
        assert "freed from its wait" in text


def freed_job(state, folder):
    cancellation = CancellationToken()
    link = EmulatedLink(parse_link(LINK), folder / "a.link", state.world_size)
    with emulated_link.over(link, cancellation):
        began = time.monotonic()
        text = freed(state, cancellation)
    return time.monotonic() - began, text


def in_halves(state, _):
    """An all-reduce of two ranks of three; the third makes none."""
    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    began = time.monotonic()
    value = torch.ones(1250)
    dist.all_reduce(value, group=halves[state.rank // 2])
    dist.barrier(group=halves[state.rank // 2], async_op=True).wait(timedelta(seconds=20))
    return value[0].item(), time.monotonic() - began


def test_a_part_of_the_ranks_forms_a_group_of_its_own(ranks):
    results = [result for _, result in ranks(3).call(linked_job, in_halves)]
    assert [value for value, _ in results] == [2, 2, 1]
    assert min(results[0][1], results[1][1]) >= 0.04


def in_many_groups(state, _):
    """Each half of the ranks works in groups of its own, at its own pace."""
    groups = [dist.new_group([0, 1] if n % 2 else [2, 3]) for n in range(24)]
    value = torch.ones(1)
    for group in groups:
        if dist.get_rank(group) >= 0:
            dist.all_reduce(value, group=group)
    dist.barrier()
    return value.item()


def test_groups_that_share_no_rank_do_not_wait_for_each_other(fresh_ranks):
    results = fresh_ranks(4).call(linked_job, in_many_groups, "1Gbit,0ms")
    assert [value for _, value in results] == [2**12] * 4
