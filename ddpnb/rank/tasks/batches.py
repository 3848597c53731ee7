"""Which samples are trained on at which step, and by which worker?  (Every rank.)

Each epoch is one permutation of the training split, made from the seed and cut
into global batches.  A global batch is split into parts, one for each worker;
the parts of a step together are exactly the global batch, so that every strategy
sees the same samples in the same order.

In place of torch's ``DistributedSampler.set_epoch`` the epoch is part of each permutation's
seed; a data set's own ``set_epoch`` is not called.  Nor is ``Join`` needed: also of an uneven
last batch every worker has a part, whose size its gradient is weighted by where gradients are
averaged, and all who train in step make the same number of steps.
Where shares go to whoever asks next, nobody waits for another's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpnb.protocol.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One worker's part of one global batch: part ``part`` of ``num_parts``."""

    step: int
    part: int
    num_parts: int


def every_step(num_steps: int, *, part: int, num_parts: int) -> Iterator[Shard]:
    """Yield the same part of every global batch: what a synchronous worker trains on."""
    for step in range(num_steps):
        yield Shard(step=step, part=part, num_parts=num_parts)


class BatchSchedule:
    """The global batches of a run; the same on every rank and for every strategy.

    The last batch of an epoch may be smaller.  It is left out only where it would be
    smaller than the number of ranks, so that nobody ever trains on nothing.

    Args:
        num_samples: size of the training split.
        batch_size: samples of a global batch.
        num_epochs: passes over the split; a fraction ends inside an epoch.
        num_ranks: ranks of the whole group, also where a strategy uses fewer.
        seed: what the permutations are made from.

    Raises:
        UserError: the batch is smaller than the number of ranks or larger than the split.
    """

    def __init__(
        self, num_samples: int, *, batch_size: int, num_epochs: float, num_ranks: int, seed: int
    ) -> None:
        if batch_size < num_ranks:
            raise UserError(
                f"A global batch of {batch_size} cannot be shared by {num_ranks} ranks; "
                f"give --batch-size {num_ranks} or more."
            )
        if batch_size > num_samples:
            raise UserError(
                f"A global batch of {batch_size} is larger than the training split "
                f"({num_samples} samples); give --batch-size {num_samples} or less."
            )
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._seed = seed
        num_full, rest = divmod(num_samples, batch_size)
        self.steps_per_epoch = num_full + (rest >= num_ranks)
        self.num_steps = max(1, round(num_epochs * self.steps_per_epoch))
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.int64)

    @property
    def num_samples(self) -> int:
        """Samples the whole run trains on, over all workers."""
        return self.num_samples_before(self.num_steps)

    def num_samples_before(self, step: int) -> int:
        """Return how many samples all global batches before a step have."""
        num_epochs, num_left = divmod(step, self.steps_per_epoch)
        whole = num_epochs * sum(self.size(step) for step in range(self.steps_per_epoch))
        return whole + sum(self.size(step) for step in range(num_left))

    def check_begun(self, num_steps: int) -> None:
        """Refuse to go on where nothing is left.

        Raises:
            UserError: so many steps are the whole run already.
        """
        if num_steps >= self.num_steps:
            num_epochs = num_steps / self.steps_per_epoch
            raise UserError(
                f"The run to resume has been trained for {num_epochs:g} epochs already: "
                "give more with --epochs."
            )

    def size(self, step: int) -> int:
        """Return how many samples the global batch of a step has."""
        start = step % self.steps_per_epoch * self._batch_size
        return min(self._batch_size, self._num_samples - start)

    def indices(self, shard: Shard) -> Tensor:
        """Return which samples a share holds: int64 indices into the training split.

        Parts are contiguous and differ by one sample at most.
        """
        epoch, batch = divmod(shard.step, self.steps_per_epoch)
        self._turn_to(epoch)
        start = batch * self._batch_size
        whole = self._permutation[start : start + self._batch_size]
        return whole.tensor_split(shard.num_parts)[shard.part]

    def smallest_shard(self, num_parts: int) -> Shard:
        """Return a share with the fewest samples that the run will meet."""
        last = min(self.num_steps, self.steps_per_epoch) - 1
        step = min((0, last), key=self.size)
        return Shard(step=step, part=num_parts - 1, num_parts=num_parts)

    def _turn_to(self, epoch: int) -> None:
        """Make the epoch's permutation, unless it is the one at hand."""
        if epoch == self._epoch:
            return
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
        self._permutation = torch.randperm(self._num_samples, generator=generator)
        self._epoch = epoch
