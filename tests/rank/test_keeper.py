"""What of a checkpoint does a rank take that comes into a run which goes on from it?"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpnb.rank.keeper import set_up


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
def test_who_joins_leaves_what_the_others_have_learnt_since(joins):
    model = nn.Linear(2, 1, bias=False)
    stage = SimpleNamespace(
        saved={"strategy": {"model": {"weight": torch.ones(1, 2)}}, "random": {}},
        joining=object() if joins else None,
        device=torch.device("cpu"),
        state=SimpleNamespace(rank=1),
    )
    strategy = Sharing()
    try:
        set_up(stage, strategy, SimpleNamespace(model=model))
    except KeyError:
        assert not joins  # there are no random numbers to take here
    assert torch.equal(strategy.before, torch.ones(1, 2))
    assert strategy.shared.tolist() == ([7.0, 7.0] if joins else [1.0, 1.0])
