"""Steps of DataParallel on the threads of rank 0, with what each device does and holds (rank 0).

They are the strategy's own steps, on a model of their own.  Hooks on the replicas note when each
computes, on its own thread; the worker's timer notes what the first device does for all.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import DataParallelReport, Device, InspectSpec
from ddpnb.protocol.messages import RankState
from ddpnb.protocol.trace import Span
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.inspect.subject import (
    MOST_STEPS,
    NUM_WARMUP_STEPS,
    kept_for_backward,
    num_rows,
    num_steps,
)
from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.strategies.data_parallel import DataParallel
from ddpnb.rank.strategies.device_replicas import ThreadReplicas
from ddpnb.rank.strategies.worker import state_of
from ddpnb.rank.tasks.base import Supervised
from ddpnb.rank.tasks.batches import Shard, tensors_of
from ddpnb.rank.training.context import build_context, linked
from ddpnb.rank.training.timing import StepTimer

SENT: Final = {
    "parameters out": "parameters",
    "outputs gathered": "outputs",
    "gradients in": "gradients",
}
"""What the first device exchanges with the others, and of what kind: in the order of a step."""


def measure(
    spec: InspectSpec, state: RankState, namespace: Mapping[str, Any], **task: Any
) -> DataParallelReport:
    """Make steps with a task's first global batch.

    Raises:
        UserError: on GPUs, where the replicas' work ends later than the host's calls.
    """
    if state.device != "cpu":
        raise UserError(
            "--strategy dp is shown on CPUs, where it is emulated: %ddp_start --device cpu."
        )
    assert spec.task is not None, "a model alone has no optimizer and no step"
    cpu = torch.device(state.device)
    with preserve_globals(cpu), contextlib.ExitStack() as opened:
        built = build_context(replace(spec.task, accumulate=1), state, namespace, **task)
        context = opened.enter_context(linked(built))
        timer = StepTimer(cpu)
        strategy = opened.enter_context(closing(DataParallel()))
        strategy.setup(context.worker("i", num_steps=MOST_STEPS, timer=timer))
        shard = Shard(step=0, part=0, num_parts=1)
        batch = context.batch(shard, context.fetch(shard))
        assert isinstance(strategy.replicas, ThreadReplicas), "on CPUs they are threads"
        devices = [_Device(number, each) for number, each in enumerate(strategy.replicas.models)]

        def step(*, counts_memory: bool = False) -> tuple[Span, ...]:
            for each in devices:
                each.begin(counts_memory)
            timer.start()
            strategy.step(batch)
            return tuple(_spans(timer, devices))

        step(counts_memory=True)
        if not isinstance(context.task.step, Supervised):
            for each in devices:
                each.held["outputs"] = 4  # its loss alone is gathered, a float32
        fastest = min(_seconds(step()) for _ in range(NUM_WARMUP_STEPS - 1))
        steps = sorted((step() for _ in range(num_steps(fastest))), key=_seconds)
        first = {
            "optimizer": strategy.memory().optimizer,
            "batch": num_bytes(tensors_of(batch.tree)),
            "outputs": sum(each.held["outputs"] for each in devices),
        }
    return DataParallelReport(
        num_samples=batch.num_samples,
        devices=tuple(
            Device(
                name=f"device {each.number}",
                num_samples=each.num_samples,
                held=each.held if each.number else each.held | first,
                spans=tuple(s for s in steps[len(steps) // 2] if s.rank == each.number),
            )
            for each in devices
        ),
        num_steps=len(steps),
    )


def _seconds(spans: tuple[Span, ...]) -> float:
    return max(span.end for span in spans) - min(span.start for span in spans)


def _spans(timer: StepTimer, devices: list["_Device"]) -> Iterator[Span]:
    """Yield what each device did in the step that ends now."""
    facts: Any = {"lane": "communication", "group": tuple(range(len(devices)))}
    kinds, phases = iter(SENT.items()), timer.phases()
    for phase, start, end in phases:
        if phase == "communication":
            name, kind = next(kinds)
            size = sum(each.held[kind] for each in devices[1:])
            yield Span(rank=0, name=name, start=start, end=end, num_bytes=size, **facts)
        elif phase == "optimizer":
            yield Span(rank=0, lane="compute", name="update", start=start, end=end)
    gathered = max(start for phase, start, _ in phases if phase == "forward")
    first_backward = min((each.backward[0] for each in devices if each.backward), default=gathered)
    if first_backward > gathered:
        yield Span(rank=0, lane="compute", name="loss", start=gathered, end=first_backward)
    for each in devices:
        for name, moments in (("forward", each.forward), ("backward", each.backward)):
            if len(moments) > 1:
                start, end = moments[0], max(moments)
                yield Span(rank=each.number, lane="compute", name=name, start=start, end=end)


@final
class _Device:
    """A replica: when it computes, and what it holds; its hooks are called on its own thread."""

    def __init__(self, number: int, model: nn.Module) -> None:
        self.number, self.model = number, model
        self.num_samples = 0
        trained = [each for each in model.parameters() if each.requires_grad]
        self.held = {
            **{"parameters": num_bytes(state_of(model)), "gradients": num_bytes(trained)},
            **dict.fromkeys(("optimizer", "batch", "activations", "outputs"), 0),
        }
        """Bytes by kind."""
        self._saving = contextlib.ExitStack()
        self.begin(counts_memory=False)
        model.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
        model.register_forward_hook(self._end_forward)
        for each in trained:
            each.register_post_accumulate_grad_hook(self._note_backward)

    def begin(self, counts_memory: bool) -> None:
        """Begin a step."""
        self._counts_memory = counts_memory
        self.forward: list[float] = []
        self.backward: list[float] = []

    def _begin_forward(self, _: nn.Module, *given: Any) -> None:
        tensors = list(tensors_of(given))
        self.num_samples, self.held["batch"] = num_rows(given) or 0, num_bytes(tensors)
        if self._counts_memory:
            kept = self._saving.enter_context(kept_for_backward([*state_of(self.model), *tensors]))
            self._saving.callback(lambda: self._count("activations", sum(kept.values())))
        self.forward.append(time.perf_counter())

    def _end_forward(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self.forward.append(time.perf_counter())
        self._saving.close()
        found = list(tensors_of(output))
        if self._counts_memory:
            self._count("outputs", num_bytes(found))
        for each in found:
            if each.requires_grad:
                each.register_hook(self._note_backward)

    def _count(self, kind: str, size: int) -> None:
        self.held[kind] += size

    def _note_backward(self, _: Tensor) -> None:
        self.backward.append(time.perf_counter())
