"""Is lock-free training on shared memory right, and refused where there is no such memory?"""

from dataclasses import replace

import pytest
import torch

from ddpnb.protocol.errors import UserError
from ddpnb.rank.servers.rendezvous import announce_failure
from ddpnb.rank.strategies.hogwild import Hogwild
from tests.rank.fit import Problem, optimum
from tests.rank.ranks import make_state
from tests.rank.test_async import fit_async
from tests.rank.test_deaths import unhurried


def test_it_finds_the_known_optimum_of_a_convex_problem(ranks):
    problem = Problem(model="linear", learning_rate=0.1, num_epochs=90, batch_size=16)
    fit, _ = ranks(2).call(fit_async, problem, {}, "host", unhurried, Hogwild)[0]
    torch.testing.assert_close(tuple(fit.parameters), optimum(problem), atol=1e-3, rtol=0)


def test_ranks_of_several_hosts_are_refused(ranks):
    first, second = ranks(2).attempt(fit_apart)
    assert isinstance(first.cause, UserError)
    assert second.cause.rank == 0


def fit_apart(state, folder):
    with announce_failure("apart", state.rank):
        fit_async(state, folder, Problem(), {}, "hosts", None, Hogwild, name="apart")


@pytest.mark.parametrize("device", ["cuda:0", "mps"])
def test_gpus_are_refused(device):
    with pytest.raises(UserError, match="compare async"):
        Hogwild().plan(replace(make_state(0, 2), device=device))
