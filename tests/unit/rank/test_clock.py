"""Clocks divide a step of any kind into the same phases, from outside."""

import random
import threading
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpnb.protocol.devices import Compute, Devices
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Parts, StepEvent
from ddpnb.protocol.notation import parse_link
from ddpnb.rank.clock import MeasuredClock, length_outside, name_gaps
from ddpnb.rank.collectives.table import METHODS, CollectiveCall
from ddpnb.rank.emulation import ComputeTimes, Emulation
from ddpnb.rank.emulation.clock import VirtualClock

CPU = torch.device("cpu")


class CountedClock(MeasuredClock):
    """A clock on which only the models and optimizers below take time."""

    now = 0.0

    def moment(self) -> float:
        return CountedClock.now


def passes(seconds: float) -> None:
    CountedClock.now += seconds


class Slowly(torch.autograd.Function):
    """A function whose forward pass takes 1 s, and whose backward pass takes 10 s."""

    @staticmethod
    def forward(ctx, inputs):
        passes(1)
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        passes(10)
        return gradient.clone()


class SlowSGD(torch.optim.SGD):
    """SGD whose update takes 100 s."""

    def step(self, closure=None):
        passes(100)
        return super().step(closure)


def communicate(clock: CountedClock) -> None:
    with clock.communicating():
        passes(1000)


def plain(clock, x, optimizer):
    Slowly.apply(x).sum().backward()
    communicate(clock)
    optimizer.step()


def gan(clock, x, optimizer):
    for _ in range(2):
        Slowly.apply(x).sum().backward()
        communicate(clock)
        optimizer.step()


def accumulating(clock, x, optimizer):
    for _ in range(3):
        Slowly.apply(x).sum().backward()
    optimizer.step()
    communicate(clock)


def penalized(clock, x, optimizer):
    """The norm of the gradient is a part of the loss, as in WGAN-GP."""
    y = Slowly.apply(x).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    (y + slope.norm()).backward()
    optimizer.step()


def with_closure(clock, x, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = Slowly.apply(x).sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


def checkpointed(clock, x, optimizer):
    torch.utils.checkpoint.checkpoint(Slowly.apply, x, use_reentrant=True).sum().backward()
    optimizer.step()


def without_gradients(clock, x, optimizer):
    """An evolution strategy, which has no backward pass."""
    with torch.no_grad():
        Slowly.apply(x)
        communicate(clock)
        x += 1


def in_a_thread(clock, x, optimizer):
    """Another thread's backward pass is not a phase of the step."""
    thread = threading.Thread(target=lambda: Slowly.apply(x).sum().backward())
    thread.start()
    thread.join()


STEPS = {
    plain: Parts(forward=1, backward=10, communication=1000, optimizer=100),
    gan: Parts(forward=2, backward=20, communication=2000, optimizer=200),
    accumulating: Parts(forward=3, backward=30, communication=1000, optimizer=100),
    penalized: Parts(forward=1, backward=20, optimizer=100),
    with_closure: Parts(forward=2, backward=20, optimizer=200),
    checkpointed: Parts(forward=1, backward=11, optimizer=100),  # computes the forward pass again
    without_gradients: Parts(forward=1, communication=1000),
    in_a_thread: Parts(forward=11),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_step_without_any_of_our_calls_is_divided_into_its_phases(step, num_steps):
    x = nn.Parameter(torch.ones(3))
    optimizer = SlowSGD([x], lr=0.1)
    clock, events = CountedClock(CPU), []
    clock.start()
    with clock.running():
        for _ in range(num_steps):
            passes(0.5)  # fetching the batch
            clock.begin_step(3)
            step(clock, x, optimizer)
            events += clock.timing(StepEvent(num_samples=1), {"loss": torch.zeros(())})
    assert {event.parts for event in events} == {STEPS[step]._replace(data=0.5)}
    assert clock.seconds == pytest.approx(num_steps * (sum(STEPS[step]) + 0.5))


def test_gaps_belong_to_the_pass_that_follows_or_to_the_phase_before():
    assert name_gaps([None, "backward", None, "communication", None, "optimizer", None]) == [
        *("forward", "backward", "backward", "communication", "backward", "optimizer", "optimizer")
    ]
    assert name_gaps(["data", None, "communication", None]) == [
        *("data", "forward", "communication", "forward")
    ]


@pytest.mark.parametrize("seed", range(8))
def test_the_length_of_spans_outside_holes_is_what_counting_seconds_gives(seed):
    draw = random.Random(seed)
    spans, holes = (
        [
            (begin, begin + draw.randrange(9))
            for begin in draw.choices(range(40), k=draw.randrange(8))
        ]
        for _ in range(2)
    )
    counted = sum(
        any(a <= t < b for a, b in spans) and not any(a <= t < b for a, b in holes)
        for t in range(60)
    )
    assert length_outside(spans, holes) == counted


# -- the measured clock and the clock of emulated devices -----------------------------------


@dataclass(frozen=True)
class Group:
    """A group of two ranks that do the same at the same time."""

    group_name: str = "world"

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@dataclass
class Both:
    """A virtual clock, and a measured clock that reads the virtual clock's time."""

    virtual: VirtualClock
    measured: MeasuredClock = field(init=False)

    def __post_init__(self) -> None:
        self.measured = MeasuredClock(CPU)
        self.measured.moment = lambda: self.virtual.seconds

    def call(self, num_bytes: int, *, is_blocking: bool) -> CollectiveCall:
        """Make a call that the other rank makes too."""
        arguments = [torch.empty(num_bytes, dtype=torch.uint8)], None
        call = CollectiveCall(METHODS["allreduce"], Group(), arguments, -1, is_blocking=is_blocking)
        self.virtual.begin(call)
        self.measured.begin(call)
        (board,) = self.virtual._boards.values()
        number = self.virtual._calls[-1].number
        board.post(number, 1, board.read(number, 0))
        if is_blocking:
            self.wait(call)
        return call

    def wait(self, call: CollectiveCall) -> None:
        with self.measured.waiting(call), self.virtual.waiting(call):
            pass


def both(folder: Path) -> Both:
    devices = Devices(num=2, device_link=parse_link("1Mbit,1ms"))
    times = ComputeTimes(compute=Compute(0.002, 0.01))
    emulation = Emulation(devices=devices, times=times, num_bytes=3000)
    return Both(VirtualClock(emulation, range(1), folder / "c", lambda: None))


@pytest.mark.parametrize("seed", range(8))
def test_both_clocks_agree_on_asynchronous_calls(tmp_path, seed):
    """Calls may begin in a backward pass, end in a later step, and end in another order."""
    draw, under_way, events = random.Random(seed), [], []
    two = both(tmp_path)
    clocks = two.virtual, two.measured
    x = torch.ones(1, requires_grad=True)

    def some_calls(most: int) -> None:
        for _ in range(draw.randrange(most)):
            action = draw.random()
            if action < 0.5:
                under_way.append(two.call(draw.randrange(1, 3000), is_blocking=False))
            elif action < 0.6:
                two.call(draw.randrange(1, 3000), is_blocking=True)
            elif under_way:
                two.wait(under_way.pop(draw.randrange(len(under_way))))

    x.register_hook(lambda _: some_calls(5))
    for clock in clocks:
        clock.start()
    with closing(two.virtual), two.measured.running(), two.virtual.running():
        for _ in range(draw.randrange(1, 6)):
            for clock in clocks:
                clock.begin_step(8)
            if draw.random() < 0.3:
                some_calls(3)
            for _ in range(draw.randrange(3)):
                (2 * x).backward()
                some_calls(4)
            event = StepEvent(num_samples=8)
            events.append([clock.timing(event, {"loss": torch.zeros(())})[0] for clock in clocks])
    for computed, measured in events:
        assert measured.seconds == pytest.approx(computed.seconds)
        assert min(measured.parts) >= 0
        assert min(computed.parts) >= 0
        assert measured.parts.communication == pytest.approx(computed.parts.communication)
        assert sum(measured.parts[:4]) == pytest.approx(sum(computed.parts[:4]))
        assert measured.parts.hidden <= sum(each.seconds for _, each in events)
    # the measured clock cannot see when a call ends before the wait
    hidden = [sum(pair[which].parts.hidden for pair in events) for which in (0, 1)]
    assert hidden[0] <= hidden[1] + 1e-9 or under_way


def test_one_wait_more_changes_nothing(tmp_path):
    two = both(tmp_path)
    with closing(two.virtual):
        call = two.call(1000, is_blocking=False)
        two.wait(call)
        seconds = two.virtual.seconds
        two.wait(call)
    assert two.virtual.seconds == seconds > 0


def test_a_thread_cannot_use_emulated_links(tmp_path):
    two, failures = both(tmp_path), []

    def use() -> None:
        with pytest.raises(UserError, match="remove --devices") as caught:
            two.call(1000, is_blocking=False)
        failures.append(caught)

    with closing(two.virtual):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert failures


def test_calls_of_a_thread_are_counted_but_are_no_phase():
    clock = MeasuredClock(CPU)
    clock.start()
    arguments = [torch.empty(1000, dtype=torch.uint8)], None
    call = CollectiveCall(METHODS["allreduce"], Group(), arguments, -1, is_blocking=False)

    def use() -> None:
        clock.begin(call)
        with clock.waiting(call):
            pass

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    (event,) = clock.timing(StepEvent(num_samples=1), {"loss": torch.zeros(())})
    assert clock.take() == (1000, 1000)
    assert event.parts.communication == event.parts.hidden == 0
