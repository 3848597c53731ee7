"""Steps of DataParallel on the threads of rank 0, with what each device does and holds (rank 0).

They are the strategy's own steps, on a model of their own.  Hooks on the replicas note when each
computes, on its own thread; the strategy's timer, what the first device does for all.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import DataParallelReport, Device, InspectSpec
from ddpnb.protocol.messages import RankState
from ddpnb.protocol.trace import Span
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.meter import Moment, Phase, Timer
from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.strategies.data_parallel import DataParallel
from ddpnb.rank.strategies.device_replicas import ThreadReplicas
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.trace.subject import KeptForBackward, num_rows, state_of, tensors_of
from ddpnb.rank.training.context import build_context, linked

NUM_WARMUP_STEPS: Final = 3
MOST_STEPS, FEWEST_STEPS = 15, 3
MOST_SECONDS: Final = 2.0
"""Of the measured steps, about."""
SENT: Final = ("parameters out", "outputs gathered", "gradients in")
"""What the first device exchanges with the others, in the order of a step."""


def measure(
    spec: InspectSpec,
    state: RankState,
    namespace: Mapping[str, Any],
    *,
    folder: Path,
    cancellation: CancellationToken,
    filename: str,
    cache: Any,
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
    with preserve_globals(torch.device(state.device)), contextlib.ExitStack() as opened:
        built = build_context(
            replace(spec.task, accumulate=1),
            state,
            namespace,
            folder=folder,
            cancellation=cancellation,
            filename=filename,
            cache=cache,
        )
        context = opened.enter_context(linked(built))
        timer = _SpanTimer()
        worker = context.worker("i", num_steps=MOST_STEPS, timer=timer)
        strategy = opened.enter_context(closing(DataParallel()))
        strategy.setup(worker)
        shard = Shard(step=0, part=0, num_parts=1)
        batch = context.batch(shard, context.fetch(shard))
        assert isinstance(strategy.replicas, ThreadReplicas), "on CPUs they are threads"
        models = strategy.replicas.models
        devices = [_Device(number, model) for number, model in enumerate(models)]

        def step() -> tuple[Span, ...]:
            for device in devices:
                device.begin()
            timer.start()
            strategy.step(batch)
            timer.stop()
            return tuple(_spans(timer, devices))

        found = [step() for _ in range(NUM_WARMUP_STEPS)]
        num = int(MOST_SECONDS / max(min(map(_length, found)), 1e-6))
        num = min(max(num, FEWEST_STEPS), MOST_STEPS) // 2 * 2 + 1
        steps = sorted((step() for _ in range(num)), key=_length)
        held = _held(strategy, timer, devices, batch.tree, step)
        median = steps[len(steps) // 2]
        assert statistics.median(map(_length, steps)) == _length(median)
        return DataParallelReport(
            num_samples=batch.num_samples,
            devices=tuple(
                Device(
                    name=f"device {device.number}",
                    num_samples=device.num_samples,
                    held=held[device.number],
                    spans=tuple(span for span in median if span.rank == device.number),
                )
                for device in devices
            ),
            num_steps=len(steps),
        )


def _held(
    strategy: DataParallel, timer: "_SpanTimer", devices: list["_Device"], tree: Any, step: Any
) -> list[dict[str, int]]:
    """Make one more step; return the bytes of each kind that each device holds at its most."""
    gradients = [0] * len(devices)

    def note_gradients() -> None:  # before they are summed, which frees those of the others
        for device in devices:
            found = (p.grad for p in device.cast.parameters() if p.grad is not None)
            gradients[device.number] = num_bytes(found)

    timer.before_sum = note_gradients
    for device in devices:
        device.counts_memory = True
    step()
    outputs = sum(device.output_bytes for device in devices)
    whole = num_bytes(tensors_of(tree))
    optimizer = strategy.memory().optimizer
    return [
        {
            "parameters": num_bytes(state_of(device.cast)),
            "gradients": gradients[device.number],
            "optimizer": 0 if device.number else optimizer,
            "batch": device.input_bytes if device.number else whole,
            "activations": device.kept_bytes,
            "outputs": device.output_bytes if device.number else outputs,
        }
        for device in devices
    ]


def _spans(timer: "_SpanTimer", devices: list["_Device"]) -> Iterator[Span]:
    """Yield what each device did in the last step."""
    sizes = {
        SENT[0]: sum(num_bytes(state_of(each.cast)) for each in devices[1:]),
        SENT[1]: sum(each.output_bytes for each in devices[1:]),
        SENT[2]: sum(
            num_bytes(p for p in each.cast.parameters() if p.requires_grad) for each in devices[1:]
        ),
    }
    everyone = tuple(range(len(devices)))
    names = iter(SENT)
    pairs = list(zip(timer.begun, timer.begun[1:], strict=False))
    for (part, start), (_, end) in pairs:
        if part == "communication":
            name = next(names)
            size = sizes[name]
            yield Span(
                rank=0,
                lane="communication",
                name=name,
                start=start,
                end=end,
                num_bytes=size,
                group=everyone,
            )
        elif part == "optimizer":
            yield Span(rank=0, lane="compute", name="update", start=start, end=end)
    gathered = [start for part, start in timer.begun if part == "forward"][-1]
    first_backward = min((each.backward[0] for each in devices if each.backward), default=gathered)
    if first_backward > gathered:
        yield Span(rank=0, lane="compute", name="loss", start=gathered, end=first_backward)
    for each in devices:
        for name, moments in (("forward", each.forward), ("backward", each.backward)):
            if len(moments) > 1:
                start, end = moments[0], max(moments)
                yield Span(rank=each.number, lane="compute", name=name, start=start, end=end)


def _length(spans: tuple[Span, ...]) -> float:
    return max(span.end for span in spans) - min(span.start for span in spans)


@final
class _SpanTimer(Timer):
    """Notes when each part of a step begins."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, float]] = []
        self.before_sum: Any = None

    def start(self) -> None:
        """Begin a step."""
        self.begun = []

    def stop(self) -> None:
        """End it."""
        self.begun.append(("end", time.monotonic()))

    def begin(self, phase: Phase, at: Moment = None) -> Phase:
        """Note the moment."""
        before: Any = self.begun[-1][0] if self.begun else phase
        if phase == "communication" and before == "backward" and self.before_sum is not None:
            self.before_sum()
        self.begun.append((phase, time.monotonic()))
        return before  # type: ignore[no-any-return]

    def moment(self) -> Moment:
        """Return this moment."""
        return time.monotonic()

    def hide(self, begun: Moment, ended: Moment) -> None:
        """Note nothing: DataParallel hides nothing."""


@final
class _Device:
    """A replica, and when it computes; its hooks are called on its own thread."""

    def __init__(self, number: int, cast: nn.Module) -> None:
        self.number = number
        self.cast = cast
        self.num_samples = self.input_bytes = self.output_bytes = self.kept_bytes = 0
        self.counts_memory = False
        self._counting = contextlib.ExitStack()
        self.begin()
        cast.register_forward_pre_hook(self._begin_forward)
        cast.register_forward_hook(self._end_forward)
        for parameter in cast.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def begin(self) -> None:
        """Begin a step."""
        self.forward: list[float] = []
        self.backward: list[float] = []

    def _begin_forward(self, _: nn.Module, given: tuple[Any, ...]) -> None:
        part = given[-1]
        self.num_samples = num_rows(part) or 0
        self.input_bytes = num_bytes(tensors_of(part))
        if self.counts_memory:
            kept = KeptForBackward([*state_of(self.cast), *tensors_of(part)])
            self._counting.enter_context(kept.counted())
            self._counting.callback(lambda: setattr(self, "kept_bytes", kept.num_bytes))
        self.forward.append(time.monotonic())

    def _end_forward(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self.forward.append(time.monotonic())
        self._counting.close()
        found = list(tensors_of(output))
        self.output_bytes = num_bytes(found)
        for each in found:
            if each.requires_grad:
                each.register_hook(self._begin_backward)

    def _begin_backward(self, _: Tensor) -> None:
        self.backward.append(time.monotonic())

    def _note_gradient(self, _: Tensor) -> None:
        self.backward.append(time.monotonic())
