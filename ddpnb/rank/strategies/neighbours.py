"""What does one worker of ``gossip`` do, who waits for nobody?  (Every rank, of one host, on CPUs.)

Its weights lie in memory that all ranks share, where others average theirs with them at any
time.  It trains on a copy, as they were at one moment; its optimizer's step is made in the
memory itself.  ``gossip`` says what is computed.
"""

import contextlib
from collections.abc import Iterable, Sequence
from random import Random
from typing import final

import torch
from torch import nn

from ddpnb.rank.strategies.base import Batch, Memory, Replica, State, StepReport
from ddpnb.rank.strategies.support.crew import Crew
from ddpnb.rank.strategies.support.flat import num_bytes
from ddpnb.rank.transport.message import RunOverError
from ddpnb.rank.transport.weights import Weights


@final
class Neighbours(Crew):
    """Averages with one neighbour at a time, whenever a gradient is ready."""

    def setup(self, replica: Replica) -> None:
        """Put all weights into shared memory and wait for all; takes part: every rank.

        A rank that joins takes part alone, and begins with the mean of the living.

        Raises:
            UserError: the ranks share no memory.
            RunOverError: there is nothing to join.
        """
        self._num_steps = 0
        self._has_ended = False
        self.open(
            replica,
            num_copies=replica.world_size + 1,  # the last one for what all end with
            elsewhere="gossip needs all ranks on one host; compare gossip:together=on.",
        )
        weights = Weights(self.path, self.copies, self._timeout, replica.lifeline)
        self._weights = self._opened.enter_context(contextlib.closing(weights))
        self._mine = [nn.Parameter(slot) for slot in self.copies[replica.rank].tensors]
        if replica.joins:
            mean = self._mean()
            with weights.locked(replica.rank):
                _copy(mean, self._mine)
        self._optimizer = replica.optimizer(self._mine)
        self.enter()

    def step(self, batch: Batch) -> StepReport:
        """Train on one share; average with whoever is chosen, at whatever it is."""
        replica, board = self._replica, self.board
        board.check()
        # read: the weights that the gradient is of, while nobody changes them
        replica.timer.begin("communication")
        read = board.num_updates
        with self._weights.locked(replica.rank):
            _copy(self._mine, replica.parameters)
        self.note(is_write=False, version=read)
        # forward, backward
        loss = replica.compute_gradients(batch)
        board.check()
        # agree: takes part: this worker alone, in its own memory and the neighbour's
        replica.timer.begin("communication")
        neighbour = chosen_by(replica.rank, self._num_steps, board.living())
        with self._weights.averaged(replica.rank, neighbour):
            self._update()
            version = board.count_update()
        self.note(is_write=True, version=version)
        board.settle()
        self._num_steps += 1
        return StepReport(
            loss=loss,
            num_samples=batch.num_samples,
            staleness=version - 1 - read,
            num_bytes_sent=0 if neighbour is None else num_bytes(replica.parameters),
        )

    def memory(self) -> Memory:
        """The copy that is trained on, the weights that others see, and the optimizer's state."""
        return Memory.of([*self._replica.model.parameters(), *self._mine], self._optimizer)

    def finish(self) -> nn.Module:
        """Wait until all are done, and take the mean; takes part: every living rank."""
        shared = self.copies[-1].tensors
        self.board.part(lambda: _copy(self._mean(), shared))
        _copy(shared, self._replica.parameters)
        self._has_ended = True
        return self._replica.model

    def save(self, replica: Replica) -> State:
        """Return the mean of all weights now, and rank 0's optimizer."""
        if not self._has_ended:  # the next step reads its own weights anew
            _copy(self._mean(), replica.parameters)
        return super().save(replica)

    def _update(self) -> None:
        """Make the optimizer's step on the weights in shared memory."""
        for slot, parameter in zip(self._mine, self._replica.parameters, strict=True):
            slot.grad = parameter.grad
        self._replica.update(self._optimizer)
        for slot in self._mine:
            slot.grad = None

    def _mean(self) -> list[torch.Tensor]:
        """Return the mean of the weights of all who live."""
        living = self.board.living()
        if not living:
            raise RunOverError
        return self._weights.mean(living)


def chosen_by(rank: int, step: int, living: Sequence[int]) -> int | None:
    """Return whom a rank averages with in its step: of the living any other, all as likely.

    The same at any time, whatever the run's seed; None where there is no other.
    """
    others = [other for other in living if other != rank]
    return Random(f"{rank} {step}").choice(others) if others else None


@torch.no_grad()
def _copy(values: Iterable[torch.Tensor], into: Iterable[torch.Tensor]) -> None:
    for value, tensor in zip(values, into, strict=True):
        tensor.copy_(value)
