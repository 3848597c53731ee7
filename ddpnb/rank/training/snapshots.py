"""The held-out curve of a run: its model is copied while it trains, and judged afterwards (ranks).

A copy is one pass over the parameters.  Where each step waits for all, every rank's clock stands
still meanwhile.  Asynchronous workers train on: rank 0 makes the copy between two of its own steps,
and the pass counts as its time.  Nothing is evaluated before training has ended, so the curve costs
no strategy anything, and no worker waits for it.

What is judged is what the run would end with if it ended there: the server's parameters, the mean
of all ranks' weights where ranks average them, else rank 0's model.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from ddpnb.protocol.errors import summary_of
from ddpnb.protocol.messages import Evaluation
from ddpnb.rank.collectives.flat import FlatBuffer
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.worker import Worker
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.training.run_metrics import RunMetrics

MAX_BYTES = 1_000_000_000
"""The most that the copies of a run take, in the memory of the host."""
MAX_SAMPLES = 2_000
"""How many held-out samples a copy is judged on by default, spread evenly over the split."""


class Snapshot(NamedTuple):
    """The model at one moment."""

    num_samples: int
    """Seen by all workers until then."""
    seconds: float
    state: dict[str, Any]


@final
class Snapshots:
    """Copies the model every few steps; all ranks have one, and call it after each step.

    Args:
        metrics: of this rank; drained before each copy, so that its clock is right.
        strategy: has been set up.
        worker: what it was set up with.
    """

    def __init__(self, metrics: RunMetrics, strategy: Strategy, worker: Worker) -> None:
        context = metrics.context
        self._metrics = metrics
        self._strategy = strategy
        self._worker = worker
        self._num_steps = context.schedule.num_steps
        self._is_mean = context.plan.averages_weights and context.plan.synchronous
        self._is_kept = context.state.rank == 0 or self._is_mean
        self._kept: list[Snapshot] = []
        self.notes: tuple[str, ...] = ()
        """Where there is no memory for all points of the curve."""
        self._every = self._affordable_steps()
        takes_part = context.plan.synchronous or context.state.rank == 0
        self._next = self._due_after(0) if takes_part else math.inf

    def after(self, shard: Shard) -> None:
        """Copy the model after the step on a shard, if that is due."""
        num_steps = shard.step + 1
        if num_steps < self._next:
            return
        self._next = self._due_after(num_steps)
        if num_steps < self._num_steps:  # the trained model is judged anyway
            metrics = self._metrics
            metrics.add(metrics.clock.stop())  # steps that a GPU has yet to finish
            with self._untimed():
                self._copy(shard)

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        """Stop the clock of synchronous workers until the slowest has left the context.

        Asynchronous workers train on meanwhile, so rank 0's clock runs.
        """
        context, plan = self._metrics.context, self._metrics.context.plan
        if not plan.synchronous:
            yield
            return
        with self._metrics.clock.paused():
            yield
            if plan.num_steps_ahead == 0:
                context.barrier()

    @property
    def num_kept(self) -> int:
        """Copies that wait to be judged."""
        return len(self._kept)

    def average(self) -> None:
        """Replace the copies by their means over all ranks; takes part: every rank."""
        names = {name for name, _ in self._worker.model.named_parameters()}
        for snapshot in self._kept if self._is_mean else ():
            mine = [snapshot.state[name] for name in snapshot.state if name in names]
            there = [tensor.to(self._worker.device) for tensor in mine]
            FlatBuffer(there).average(there)
            for tensor, mean in zip(mine, there, strict=True):
                tensor.copy_(mean)

    def evaluations(
        self, model: nn.Module, should_stop: Callable[[], bool]
    ) -> tuple[Evaluation, ...]:
        """Return the scores of all copies, which go; the model ends with the weights of the last.

        Where one cannot be judged, and where the user stops the run meanwhile, it is kept all the
        same, without the rest of its curve.

        Args:
            model: takes the weights of one copy after the other.
            should_stop: is asked before each.
        """
        found = []
        while self._kept and not should_stop():
            snapshot = self._kept.pop(0)
            try:
                model.load_state_dict(snapshot.state)
            except Exception as error:  # noqa: BLE001  the user's model may be another one by now
                self._metrics.mark(f"has no held-out curve ({summary_of(error)})")
                break
            if self._metrics.is_estimated:
                self._metrics.estimate_batchnorm(model)
            score = self._metrics.score(model, is_held_out=True, max_samples=MAX_SAMPLES)
            if math.isnan(score.loss) and math.isnan(score.accuracy):
                break
            found.append(
                Evaluation(snapshot.num_samples, snapshot.seconds, score.loss, score.accuracy)
            )
        self._kept.clear()
        return tuple(found)

    @torch.no_grad()
    def _copy(self, shard: Shard) -> None:
        state = self._strategy.snapshot()
        if self._is_kept:
            seconds = self._metrics.clock.seconds
            self._kept.append(Snapshot(self._num_samples(shard), seconds, _copied(state)))

    def _num_samples(self, shard: Shard) -> int:
        """Return how many samples all workers have seen, after this one's step on a shard.

        Of synchronous workers all have made the step, or are about to.  Where it is not known how
        many shards others have trained on, it is all before this one.
        """
        context, world_size = self._metrics.context, self._worker.world_size
        step, part = shard.step + 1, 0
        if not context.plan.synchronous:
            done = self._strategy.num_shards_done()
            step, part = divmod(shard.step * world_size + 1 if done is None else done, world_size)
        in_part = context.schedule.size(step) * part // world_size
        return context.schedule.num_samples_before(step) + in_part

    def _due_after(self, num_steps: int) -> float:
        return (num_steps // self._every + 1) * self._every if self._every else math.inf

    def _affordable_steps(self) -> int:
        """Return the steps between two copies, as many as have room in memory; 0: none."""
        spec, schedule = self._metrics.context.spec, self._metrics.context.schedule
        every = 0.0 if spec.is_ceiling else spec.eval_every
        if every is None:
            num = spec.num_points
            wanted = max(1, round(self._num_steps / num)) if num > 1 else 0
        else:
            wanted = max(1, round(every * schedule.steps_per_epoch)) if every else 0
        num_wanted = max(self._num_steps - 1, 0) // wanted if wanted else 0
        size = _num_bytes(self._worker.model.state_dict()) if num_wanted else 0
        copies = self._worker.world_size if self._is_mean else 1
        num = min(num_wanted, MAX_BYTES // max(copies * size, 1))
        if num == num_wanted:
            return wanted
        self.notes = (
            f"Held-out scores at {num + 1} moments, not {num_wanted + 1}: "
            "more copies of the model would take over 1 GB.",
        )
        return -(-self._num_steps // (num + 1)) if num else 0


def _num_bytes(state: Mapping[str, Any]) -> int:
    """Return the bytes of all tensors; of a sharded one, those of all ranks."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }
