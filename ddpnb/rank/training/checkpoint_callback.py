"""What of a run goes into its checkpoints, and when?  (Every rank.)"""

import contextlib
from collections.abc import Callable, Iterator
from typing import final

import torch

from ddpnb.rank.strategies.base import Replica, State, Strategy
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.training.checkpoint import (
    Checkpoints,
    random_numbers,
    set_random_numbers,
)
from ddpnb.rank.training.checkpoint_compat import description
from ddpnb.rank.training.context import RunContext
from ddpnb.rank.training.timing import Clock

Tell = Callable[[str], None]


def set_up(context: RunContext, strategy: Strategy, replica: Replica) -> None:
    """Have the strategy get ready, from the start or from a checkpoint."""
    saved = context.saved
    if saved is None:
        strategy.setup(replica)
        return
    if "model" in saved["strategy"]:
        replica.model.load_state_dict(saved["strategy"]["model"])
    strategy.setup(replica)
    if context.rejoin_info is not None:  # what the others train on by now is not the checkpoint's
        return
    strategy.load(replica, saved["strategy"])
    if context.place(context.spec.resume).part == context.state.rank:  # else it is another rank's
        set_random_numbers(saved["random"], context.device)


@final
class CheckpointCallback:
    """Keeps checkpoints of a run, where any are wished for; of asynchronous workers rank 0's.

    Args:
        stage: the run.
        strategy: whose state is kept; set up.
        replica: what it was set up with.
        clock: the run's; stands still while synchronous workers write.
        meet: returns when all ranks have called it, where each step waits for all.
        tell: takes a few words, the first time that the disk refuses.
    """

    def __init__(
        self,
        *,
        context: RunContext,
        strategy: Strategy,
        replica: Replica,
        clock: Clock,
        meet: Callable[[], None],
        tell: Tell,
    ) -> None:
        self._context = context
        self._strategy = strategy
        self._replica = replica
        self._clock = clock
        self._meet = meet
        self._checkpoints: Checkpoints | None = None
        spec, rank = context.spec, context.state.rank
        if not (spec.save_every and spec.checkpoints) or (rank and not context.plan.synchronous):
            return
        every = max(1, round(spec.save_every * context.order.steps_per_epoch))
        place = context.place(spec.run_id)
        self._checkpoints = Checkpoints(place, every=every, tell=tell)
        self._checkpoints.begin_at(context.first_step)

    def after(self, shard: Shard) -> None:
        """Keep a checkpoint of the run after its step on a share, if it is time to.

        Workers in step also keep one after the last: then only ``Strategy.finish`` is left.
        """
        num_steps = self._context.first_step + shard.step + 1
        is_last = self._context.plan.synchronous and num_steps == self._context.order.num_steps
        if self._checkpoints is not None and self._checkpoints.is_due(num_steps, is_last=is_last):
            with self._untimed():
                self._checkpoints.after(num_steps, lambda: self._state(num_steps), is_last=is_last)

    def end(self) -> None:
        """Keep a last checkpoint of asynchronous workers: rank 0 may have had no late share."""
        if self._checkpoints is not None and not self._context.plan.synchronous:
            num_steps = self._context.order.num_steps
            self._checkpoints.after(num_steps, lambda: self._state(num_steps), is_last=True)

    def finish(self, model: torch.nn.Module) -> None:
        """Keep the trained model."""
        if self._checkpoints is not None:
            self._checkpoints.finish(model)

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        """Stop the clock, until the slowest has written where the next step would wait for it.

        Of asynchronous workers the others train on: there it runs.
        """
        if not self._context.plan.synchronous:
            yield
            return
        with self._clock.paused():
            yield
            if self._context.plan.num_steps_ahead == 0:
                self._meet()

    def _state(self, num_steps: int) -> State:
        return {
            "step": num_steps,
            "spec": description(self._context.spec, self._replica.optimizers),
            "strategy": self._strategy.save(self._replica),
            "random": random_numbers(self._context.device),
        }
