"""DataParallel on threads: what its replicas exchange."""

from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor, nn

from ddpnb.rank.strategies.device_replicas import ThreadReplicas
from ddpnb.rank.worker import Worker


class Experts(nn.Module):
    """Uses the first expert for rows that begin with a negative number, else the second."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 1) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        return self.experts[int(rows[0, 0] >= 0)](rows)


def test_the_gradient_of_an_expert_that_only_a_later_replica_uses_is_kept():
    model, parts = Experts(), [-torch.ones(3, 2), torch.ones(3, 2)]
    sum(model(part).sum() for part in parts).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    worker = Worker(
        model=model,
        make_model=Experts,
        make_optimizer=torch.optim.SGD,
        device=torch.device("cpu"),
        rank=0,
        world_size=2,
        num_parts=1,
        num_steps=1,
        folder=Path(),
        name="here",
    )
    with closing(ThreadReplicas(worker)) as replicas:
        outputs = replicas.run(nn.Module.__call__, parts)
        replicas.gather(outputs).sum().backward()
    assert [parameter.grad.tolist() for parameter in model.parameters()] == [
        each.tolist() for each in expected
    ]
