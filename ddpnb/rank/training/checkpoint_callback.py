"""What a run writes to its checkpoints, and when (ranks)."""

import contextlib
from collections.abc import Callable, Iterator
from typing import final

import torch

from ddpnb.rank.random_state import random_state, set_random_state
from ddpnb.rank.strategies.base import Replica, State, Strategy
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.training.checkpoint import Checkpoints
from ddpnb.rank.training.checkpoint_compat import description
from ddpnb.rank.training.context import RunContext
from ddpnb.rank.training.timing import Clock


def set_up(context: RunContext, strategy: Strategy, replica: Replica) -> None:
    """Set up a strategy, from the start or from a checkpoint."""
    checkpoint = context.checkpoint
    if checkpoint is None:
        strategy.setup(replica)
        return
    if "model" in checkpoint["strategy"]:
        replica.model.load_state_dict(checkpoint["strategy"]["model"])
    strategy.setup(replica)
    if context.rejoin_info is not None:  # by now the others have trained on from the checkpoint
        return
    strategy.load(replica, checkpoint["strategy"])
    if context.checkpoint_part(context.spec.resume).part == context.state.rank:
        set_random_state(checkpoint["random"], context.device)  # else they are another rank's


@final
class CheckpointCallback:
    """Writes the checkpoints of a run, if there are to be any; rank 0 alone in asynchronous runs.

    Args:
        context: the run.
        strategy: provides the state; it has been set up.
        replica: what the strategy was set up with.
        clock: the run's; stands still while synchronous workers write.
        barrier: returns when all ranks have called it; used if each step waits for all.
        warn: takes a few words the first time that the disk refuses.
    """

    def __init__(
        self,
        *,
        context: RunContext,
        strategy: Strategy,
        replica: Replica,
        clock: Clock,
        barrier: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        self._context = context
        self._strategy = strategy
        self._replica = replica
        self._clock = clock
        self._barrier = barrier
        self._checkpoints: Checkpoints | None = None
        spec, rank = context.spec, context.state.rank
        if not (spec.save_every and spec.checkpoints) or (rank and not context.plan.synchronous):
            return
        self._checkpoints = Checkpoints(
            context.checkpoint_part(spec.run_id),
            every=max(1, round(spec.save_every * context.schedule.steps_per_epoch)),
            first_step=context.first_step,
            warn=warn,
        )

    def after(self, shard: Shard) -> None:
        """Write a checkpoint after the step on a shard, if one is due.

        Synchronous workers also write one after the last step; only ``Strategy.finish`` follows.
        """
        context = self._context
        num_steps = context.first_step + shard.step + 1
        is_last = context.plan.synchronous and num_steps == context.schedule.num_steps
        if self._checkpoints is not None and self._checkpoints.is_due(num_steps, is_last=is_last):
            with self._untimed():
                self._checkpoints.after(num_steps, lambda: self._state(num_steps), is_last=is_last)

    def end(self) -> None:
        """Write the last checkpoint of an asynchronous run: rank 0 may have had no late shard."""
        if self._checkpoints is not None and not self._context.plan.synchronous:
            num_steps = self._context.schedule.num_steps
            self._checkpoints.after(num_steps, lambda: self._state(num_steps), is_last=True)

    def finish(self, model: torch.nn.Module) -> None:
        """Write the trained model."""
        if self._checkpoints is not None:
            self._checkpoints.finish(model)

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        """Stop the clock of synchronous workers until the slowest has written.

        Asynchronous workers train on meanwhile, so rank 0's clock runs.
        """
        if not self._context.plan.synchronous:
            yield
            return
        with self._clock.paused():
            yield
            if self._context.plan.num_steps_ahead == 0:
                self._barrier()

    def _state(self, num_steps: int) -> State:
        return {
            "step": num_steps,
            "spec": description(self._context.spec, self._replica.optimizers),
            "strategy": self._strategy.save(self._replica),
            "random": random_state(self._context.device),
        }
