"""What a rank takes from a checkpoint, at the start of a run or when it joins later."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.strategies.replica import NullTimer
from ddpnb.rank.training.checkpoint import resumed, set_up
from ddpnb.rank.training.context import build_context
from tests.rank.ranks import make_state
from tests.rank.test_checkpoint import spec_of
from tests.rank.test_options import train_job


class Sharing:
    """Trains on memory that others train on, as ``async`` and ``hogwild`` do."""

    def __init__(self) -> None:
        self.shared = torch.full((2,), 7.0)
        self.loaded: list[object] = []

    def setup(self, replica) -> None:
        self.before = replica.model.weight.detach().clone()
        replica.model.weight.data = self.shared.view(1, 2)

    def load(self, replica, state) -> None:
        self.loaded.append(state)
        replica.model.load_state_dict(state["model"])


@pytest.mark.parametrize("joins", [False, True])
def test_a_rank_that_joins_keeps_what_the_others_have_learnt_since(joins):
    model = nn.Linear(2, 1, bias=False)
    context = SimpleNamespace(
        spec=SimpleNamespace(resume="old", checkpoints="kept"),
        checkpoint={"strategy": {"model": {"weight": torch.ones(1, 2)}}},
        rejoin_info=object() if joins else None,
        plan=SimpleNamespace(synchronous=False),
        state=SimpleNamespace(rank=1),
    )
    strategy = Sharing()
    set_up(context, strategy, SimpleNamespace(model=model))
    assert torch.equal(strategy.before, torch.ones(1, 2))
    assert strategy.shared.tolist() == ([7.0, 7.0] if joins else [1.0, 1.0])


def next_number(tmp_path, rank: int) -> float:
    """Get ready to go on as one rank; return its next random number."""
    spec = spec_of("async", tmp_path, run_id="new", resume="old", num_epochs=4)
    with preserve_globals(torch.device("cpu")):
        context = resumed(build_context(spec, make_state(rank, 2), {}, filename="here"))
        idle = SimpleNamespace(setup=lambda _: None, load=lambda *_: None)
        set_up(context, idle, context.replica("t", num_steps=1, timer=NullTimer()))
        return torch.rand(1).item()


def test_asynchronous_workers_go_on_with_random_numbers_of_their_own(ranks, tmp_path):
    ranks(2).call(train_job, spec_of("async", tmp_path))
    assert next_number(tmp_path, 0) != next_number(tmp_path, 1)
