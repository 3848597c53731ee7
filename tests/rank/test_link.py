"""Do exchanges last as long as over the link, in every strategy, and is it all else the same?"""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from ddpnb.rank.cancellation import CancellationToken, ConsequenceError
from ddpnb.rank.collectives import link as emulated_link
from ddpnb.rank.collectives.link import is_exchanging
from tests.rank.runs import FEATURED, header_of, spec_of, steps_of, train_job

LINK = "1Mbit,3ms"
CELL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 2, bias=False))

def data(split):
    x = torch.randn(96, 4)
    return x, (x.sum(dim=1) > 0).long()
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
    ("ddp", 2): ALL_REDUCE[2],
    ("ddp:hook=fp16", 2): 2 * LATENCY + TRANSFER / 2,
    ("ddp-overlap-by-hand", 3): ALL_REDUCE[3],
    ("ring-by-hand", 3): ALL_REDUCE[3],
    ("central", 3): 4 * (LATENCY + TRANSFER),
    ("diloco:every=3", 2): ALL_REDUCE[2] / 3,
    ("gossip", 2): LATENCY + TRANSFER,
    ("zero", 2): ALL_REDUCE[2] + TRANSFER,
    ("dp", 3): 4 * TRANSFER,
}
"""Seconds that a step takes at least, by the messages that each strategy's file lists."""


def trained(ranks, strategy: str, num_ranks: int, **changes):
    """Return each rank's report with all that it published."""
    changes = {"source": CELL, "num_epochs": 2, "num_warmup_steps": 0, "link": LINK} | changes
    return ranks(num_ranks).call(train_job, spec_of(strategy, **changes))


@pytest.mark.parametrize(("strategy", "num_ranks"), PER_STEP)
def test_a_step_takes_as_long_as_its_messages(ranks, strategy, num_ranks):
    first = trained(ranks, strategy, num_ranks)[0]
    expected = first[0].num_steps * PER_STEP[strategy, num_ranks]
    assert first[0].seconds >= 0.99 * expected
    assert first[0].seconds < 1.5 * expected + 2.0  # on a machine that does much else
    assert any("emulated" in note for note in header_of(first).notes)


@pytest.mark.parametrize("strategy", FEATURED)
def test_only_the_time_differs(ranks, strategy):
    over, without = (
        [report for report, _ in trained(ranks, strategy, 2, link=link, num_epochs=1)]
        for link in ("20Mbit,1ms", "")
    )
    assert sum(each.num_samples for each in over) == sum(each.num_samples for each in without)
    if strategy != "async":  # there the order of updates differs from run to run
        assert over[0].final_loss == without[0].final_loss


def test_the_link_of_a_server_is_shared_by_its_clients(ranks):
    slow = ("0:300ms",)  # rank 0 reaches its own server without a link
    means = {}
    for num_ranks in (2, 4):  # with two clients, one can push while the other pulls
        first, *others = trained(ranks, "async", num_ranks, slow=slow, num_epochs=4)
        exchanges = [step.parts.communication for each in others for step in steps_of(each)]
        means[num_ranks] = sum(exchanges) / len(exchanges)
        assert any("Rank 0" in note for note in header_of(first).notes)
    assert means[2] >= 0.99 * 2 * (TRANSFER + LATENCY)
    assert means[4] > 1.2 * means[2]


def linked_job(state, folder, call):
    """Make a call over a link; return the seconds it took."""
    cancellation = CancellationToken()
    with emulated_link.opened(LINK, cancellation):
        dist.barrier()
        began = time.monotonic()
        result = call(cancellation)
        return time.monotonic() - began, result


def exchange_in_the_background(_):
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


def freed(cancellation):
    """Wait a minute for a message, and be freed."""
    threading.Timer(0.1, cancellation.abort).start()
    with pytest.raises(ConsequenceError):
        dist.all_reduce(torch.ones(1_875_000))


def test_an_abort_frees_ranks_that_wait_for_the_link(fresh_ranks):
    for seconds, _ in fresh_ranks(2).call(linked_job, freed):
        assert seconds < 30
