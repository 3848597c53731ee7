"""Whatever the ranks call works as without listeners, whoever listens."""

import contextlib

import pytest
import torch.distributed as dist

from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.collectives import link as emulated_link
from ddpnb.rank.collectives.account import Account
from ddpnb.rank.collectives.intercept import listening
from ddpnb.rank.collectives.trace import recording
from ddpnb.rank.meter import Meter, NullTimer
from tests.faults.test_collective_checks import RIGHT, SETUP

ALONE = "the group, destroyed and formed again"
"""A cell's, where the cluster's group takes the place of the user's."""


LISTENERS = {
    "account": lambda _: listening(Account(Meter(NullTimer()))),
    "trace": recording,
    "link": lambda _: emulated_link.opened("10Gbit,0.01ms", CancellationToken()),
}


def in_a_cell(state, folder, source, names):
    namespace = {"rank": state.rank, "world_size": state.world_size}
    with contextlib.ExitStack() as opened:
        for name in names:
            opened.enter_context(LISTENERS[name](state.rank))
        exec(SETUP + source, namespace)
        backend = dist.get_backend(), dist.get_backend(dist.new_group())
        dist.barrier()
    return backend, namespace["x"].tolist(), namespace.get("found")


@pytest.mark.parametrize("case", [case for case in RIGHT if case != ALONE])
def test_calls_do_what_they_do_without_listeners(ranks, case):
    usual = ranks(3).call(in_a_cell, RIGHT[case], ())
    assert usual[0][0] == ("gloo", "gloo")
    assert ranks(3).call(in_a_cell, RIGHT[case], tuple(LISTENERS)) == usual


def compiled(state, folder):
    import torch

    @torch.compile(backend="eager")
    def double(value):
        dist.all_reduce(value)
        return 2 * value

    with listening(Account(Meter(NullTimer()))):
        return double(torch.ones(3)).tolist()


def test_compiled_code_calls_as_usual(ranks):
    assert ranks(2).call(compiled) == [[4.0] * 3] * 2
