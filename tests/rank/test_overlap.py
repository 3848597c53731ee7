"""Are gradients sent while the backward pass goes on, in messages that cannot mix?"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpnb.protocol.errors import UserError
from ddpnb.rank.strategies.ddp_overlap_by_hand import DdpOverlapByHand, buckets_of
from tests.rank.fit import Problem, distance, drive


def test_buckets_hold_the_last_parameters_first_and_no_more_than_they_should():
    parameters = [nn.Parameter(torch.zeros(num)) for num in (2**18, 2**17, 2**17, 2**20, 1)]
    sizes = [[p.numel() for p in bucket] for bucket in buckets_of(parameters, 1.0)]
    assert sizes == [[1], [2**20], [2**17, 2**17], [2**18]]  # 1 MB: 2**18 floats
    assert [len(bucket) for bucket in buckets_of(parameters, 0.0)] == [1] * 5
    assert [len(bucket) for bucket in buckets_of(parameters, 100.0)] == [5]


class Branching(nn.Module):
    """Ranks use other layers: gradients come in another order, and some on no rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 3, bias=False) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        one, other = (0, 2) if dist.is_initialized() and dist.get_rank() == 1 else (2, 1)
        return self.layers[one](inputs) + self.layers[other](inputs).tanh()


class BranchingProblem(Problem):
    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return Branching()


def branching_job(state, folder):
    """Train; return the fit, the gradients of the last step, and the hooks that are left."""
    strategy = DdpOverlapByHand()
    fit = drive(strategy, state, folder, BranchingProblem())
    parameters = strategy.worker.parameters
    hooks = [hook for p in parameters for hook in p._post_accumulate_grad_hooks or ()]
    return fit, [p.grad.clone() for p in parameters], hooks


def test_ranks_that_use_other_layers_sum_the_same_gradients(ranks):
    (first, mine, hooks), (second, theirs, _) = ranks(2).call(branching_job)
    assert hooks == []
    assert distance(first, second) == 0
    assert all(map(torch.equal, mine, theirs))
    assert [bool(grad.any()) for grad in mine] == [True, True, True, False]


class CheckpointedProblem(Problem):
    def build(self) -> nn.Module:
        return Checkpointed()


class Checkpointed(nn.Linear):
    """One layer in two checkpoints: with the reentrant ones its gradient comes twice."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.first = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(super().forward, hidden, use_reentrant=True)
        return hidden


def checkpointed_job(state, folder):
    drive(DdpOverlapByHand(), state, folder, CheckpointedProblem())


def test_a_gradient_that_comes_twice_is_refused_and_not_sent_half(ranks):
    failures = ranks(1).attempt(checkpointed_job)
    assert isinstance(failures[0].cause, UserError)
