"""DataParallel on threads: what its replicas exchange."""

from contextlib import closing, nullcontext
from typing import final

import torch
from torch import Tensor, nn

from ddpnb.rank.strategies.data_parallel import ThreadReplicas
from ddpnb.rank.strategies.replica import Timer


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
    with closing(ThreadReplicas(model, 2, nullcontext)) as replicas:
        outputs = replicas.run(lambda each, part: each(part), parts)
        replicas.gather(outputs).sum().backward()
        replicas.backward()
        replicas.reduce()
    assert [parameter.grad.tolist() for parameter in model.parameters()] == [
        each.tolist() for each in expected
    ]


@final
class Parts(Timer):
    """Records what time is counted as."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def begin(self, part, at=None):
        self.found.append(part)
        return part

    def moment(self, seconds_ago: float = 0.0) -> None: ...

    def hide(self, begun, ended) -> None: ...


def test_copies_and_gathered_outputs_count_as_communication():
    timer = Parts()
    with closing(ThreadReplicas(Experts(), 2, nullcontext, timer)) as replicas:
        outputs = replicas.run(lambda each, part: each(part), [torch.ones(3, 2)] * 2)
        assert timer.found == ["communication", "forward"]
        replicas.gather(outputs)
    assert timer.found == ["communication", "forward"] * 2
