"""The samples of each step and each worker (ranks).

Each epoch is one permutation of the training split, made from the seed and cut into global batches.
A global batch is split into shards, one for each worker.  The shards of a step together are exactly
the global batch, so every strategy sees the same samples in the same order.

Torch's ``DistributedSampler.set_epoch`` is not needed: the seed of each permutation includes the
epoch.  A data set's own ``set_epoch`` is not called.  ``Join`` is not needed either: every worker
has a shard of each batch, even of an uneven last one, and averaged gradients are weighted by the
shards' sizes.  So all synchronous workers make the same number of steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpnb.protocol.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One worker's part of one global batch."""

    step: int
    part: int
    num_parts: int


def every_step(num_steps: int, *, part: int, num_parts: int) -> Iterator[Shard]:
    """Yield the same part of every global batch: the shards of a synchronous worker."""
    for step in range(num_steps):
        yield Shard(step=step, part=part, num_parts=num_parts)


class BatchSchedule:
    """The global batches of a run; the same on every rank and for every strategy.

    The last batch of an epoch may be smaller.  It is left out only if it has fewer samples than
    there are ranks, so that every shard has at least one.

    Args:
        num_samples: size of the training split.
        batch_size: samples of a global batch.
        num_epochs: passes over the split; a fraction ends inside an epoch.
        num_ranks: ranks of the whole group, even if a strategy uses fewer.
        seed: of the permutations.

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
        """Samples that the whole run trains on, over all workers."""
        return self.num_samples_before(self.num_steps)

    def num_samples_before(self, step: int) -> int:
        """Return how many samples are trained on before a step."""
        num_epochs, num_left = divmod(step, self.steps_per_epoch)
        whole = num_epochs * sum(self.size(step) for step in range(self.steps_per_epoch))
        return whole + sum(self.size(step) for step in range(num_left))

    def check_unfinished(self, num_steps: int) -> None:
        """Refuse to resume after so many steps if none are left.

        Raises:
            UserError: the run is complete.
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
        """Return the samples of a shard: int64 indices into the training split.

        Shards are contiguous parts of the permutation; their sizes differ by one at most.
        """
        epoch, batch = divmod(shard.step, self.steps_per_epoch)
        start = batch * self._batch_size
        whole = self._permutation_of(epoch)[start : start + self._batch_size]
        return whole.tensor_split(shard.num_parts)[shard.part]

    def smallest_shard(self, num_parts: int) -> Shard:
        """Return one of the run's smallest shards."""
        last = min(self.num_steps, self.steps_per_epoch) - 1
        step = min((0, last), key=self.size)
        return Shard(step=step, part=num_parts - 1, num_parts=num_parts)

    def _permutation_of(self, epoch: int) -> Tensor:
        """Return an epoch's permutation; the last one is kept."""
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
            self._permutation = torch.randperm(self._num_samples, generator=generator)
            self._epoch = epoch
        return self._permutation
