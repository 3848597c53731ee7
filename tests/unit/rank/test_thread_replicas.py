"""DataParallel on threads: what its replicas exchange."""

from contextlib import closing
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from ddpnb.rank.meter import Meter, NullTimer, Timer
from ddpnb.rank.strategies.device_replicas import ThreadReplicas
from ddpnb.rank.strategies.worker import Worker


class Experts(nn.Module):
    """Uses the first expert for rows that begin with a negative number, else the second."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 1) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        return self.experts[int(rows[0, 0] >= 0)](rows)


def replicas_of(model: nn.Module, timer: Timer) -> ThreadReplicas:
    worker = Worker(
        model=model,
        make_model=Experts,
        make_optimizer=torch.optim.SGD,
        device=torch.device("cpu"),
        rank=0,
        world_size=2,
        num_steps=1,
        folder=Path(),
        name="here",
        meter=Meter(timer),
    )
    return ThreadReplicas(worker)


def test_the_gradient_of_an_expert_that_only_a_later_replica_uses_is_kept():
    model, parts = Experts(), [-torch.ones(3, 2), torch.ones(3, 2)]
    sum(model(part).sum() for part in parts).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with closing(replicas_of(model, NullTimer())) as replicas:
        outputs = replicas.run(lambda each, part: each(part), parts)
        replicas.gather(outputs).sum().backward()
        replicas.reduce()
    assert [parameter.grad.tolist() for parameter in model.parameters()] == [
        each.tolist() for each in expected
    ]


@final
class Parts(Timer):
    """Records what time is counted as."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def begin(self, phase, at=None):
        self.found.append(phase)
        return "forward"

    def moment(self) -> None: ...

    def hide(self, begun, ended) -> None: ...


def test_copies_and_gathered_outputs_count_as_communication():
    timer = Parts()
    with closing(replicas_of(Experts(), timer)) as replicas:
        outputs = replicas.run(lambda each, part: each(part), [torch.ones(3, 2)] * 2)
        assert timer.found == ["communication", "forward"]
        replicas.gather(outputs)
    assert timer.found == ["communication", "forward"] * 2
