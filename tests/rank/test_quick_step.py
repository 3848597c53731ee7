"""Is an optimizer's step the same without torch's wrapper, and is nobody else's left out?"""

import functools

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from ddpnb.rank.transport.quick_step import make_step
from tests.rank.fit import OPTIMIZERS


def made(make, make_its_step) -> torch.Tensor:
    parameter = nn.Parameter(torch.linspace(-1, 1, 5))
    optimizer = make([parameter])
    for scale in (1.0, -0.5, 2.0):
        parameter.grad = scale * torch.arange(5.0)
        make_its_step(optimizer)
    return parameter.detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_parameters_come_out_the_same(name):
    make = OPTIMIZERS[name]
    assert torch.equal(made(make, make_step), made(make, lambda optimizer: optimizer.step()))


def test_a_profiler_sees_no_step_where_nothing_hangs_on_it():
    with torch.profiler.profile() as profile:
        made(OPTIMIZERS["sgd"], make_step)
    assert not [event for event in profile.events() if "Optimizer.step" in event.name]


@pytest.mark.parametrize("is_enabled", [False, True])
def test_the_gradient_mode_is_left_as_it_was(is_enabled):
    with torch.set_grad_enabled(is_enabled):
        made(OPTIMIZERS["sgd"], make_step)
        assert torch.is_grad_enabled() is is_enabled


def test_a_step_that_fails_leaves_the_gradient_mode_as_it_was():
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    optimizer.param_groups[0]["lr"] = "wrong"
    with pytest.raises(TypeError):
        make_step(optimizer)
    assert torch.is_grad_enabled()


def test_a_step_that_is_differentiable_stays_so():
    initial = nn.Parameter(torch.ones(1))
    parameter = initial.clone()
    optimizer = torch.optim.SGD([parameter], lr=0.1, differentiable=True)
    parameter.grad = torch.ones(1)
    parameter.retain_grad()
    make_step(optimizer)
    assert parameter.grad_fn is not None


def count(calls: list) -> object:
    return lambda *_: calls.append(1)


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_are_called(when):
    calls: list[int] = []

    def make(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        getattr(optimizer, f"register_step_{when}_hook")(count(calls))
        return optimizer

    made(make, make_step)
    assert len(calls) == 3


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_of_all_optimizers_are_called(when):
    calls: list[int] = []
    hook = getattr(torch_optimizer, f"register_optimizer_step_{when}_hook")(count(calls))
    try:
        made(OPTIMIZERS["sgd"], make_step)
    finally:
        hook.remove()
    assert len(calls) == 3


def test_a_step_that_somebody_else_has_wrapped_is_made_whole():
    calls: list[int] = []
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # by now torch has wrapped its step

    class Counted(torch.optim.SGD):
        @functools.wraps(torch.optim.SGD.step)
        def step(self, closure=None):
            calls.append(1)
            return super().step(closure)

    made(lambda parameters: Counted(parameters, lr=0.1), make_step)
    assert len(calls) == 3


def test_a_learning_rate_schedule_sees_that_steps_are_made(recwarn):
    def make(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return optimizer

    def step(optimizer):
        make_step(optimizer)
        optimizer.schedule.step()

    made(make, step)
    assert not [warning for warning in recwarn if "lr_scheduler.step" in str(warning.message)]
