"""What does one worker of ``gossip`` do, who waits for nobody?  (Every rank, of one host, on CPUs.)

Its weights lie in memory that all ranks share, where others average theirs with them at any
time.  It trains on a copy, as they were at one moment; its optimizer's step is made in the
memory itself.  ``gossip`` says what is computed.
"""

import contextlib
from collections.abc import Iterator, Sequence
from random import Random
from typing import final

import torch
from torch import nn

from ddpnb.rank.order import Share
from ddpnb.rank.strategies.base import Batch, Memory, Plan, Replica, State, StepReport, Strategy
from ddpnb.rank.strategies.support.crew import Crew
from ddpnb.rank.strategies.support.flat import num_bytes
from ddpnb.rank.transport.master import Access, Log, no_log
from ddpnb.rank.transport.message import RunOverError
from ddpnb.rank.transport.weights import Weights
from ddpnb.wire import RankState


@final
class Neighbours(Strategy):
    """Averages with one neighbour at a time, whenever a gradient is ready.

    Args:
        timeout_seconds: how long it may be that no worker at all makes progress.
        log: is told of every read and update of this worker.
    """

    def __init__(self, *, timeout_seconds: float = 60.0, log: Log = no_log) -> None:
        self._timeout = timeout_seconds
        self._log = log
        self._crew: Crew | None = None
        self._opened = contextlib.ExitStack()

    def plan(self, state: RankState) -> Plan:
        """Every rank trains."""
        num = state.world_size
        return Plan(num_ranks=num, num_workers=num, synchronous=False, survives_deaths=True)

    def setup(self, replica: Replica) -> None:
        """Put all weights into shared memory and wait for all; takes part: every rank.

        A rank that joins takes part alone, and begins with the mean of the living.

        Raises:
            UserError: the ranks share no memory.
            RunOverError: there is nothing to join.
        """
        self._replica = replica
        self._num_steps = 0
        self._has_ended = False
        self._crew = Crew(
            replica,
            num_copies=replica.world_size + 1,  # the last one for what all end with
            timeout_seconds=self._timeout,
            elsewhere="gossip needs all ranks on one host; compare gossip:together=on.",
        )
        self._opened.callback(self._crew.close)
        self._crew.open()
        self._weights = self._open_weights(self._crew)
        if replica.joins:
            self._weights.write(replica.rank, self._mean())
        self._mine = [nn.Parameter(slot) for slot in self._crew.copies[replica.rank].tensors]
        self._optimizer = replica.optimizer(self._mine)
        self._crew.enter()

    def shares(self) -> Iterator[Share]:
        """Whatever share is next, until all are handed out."""
        return self._here.shares()

    def step(self, batch: Batch) -> StepReport:
        """Train on one share; average with whoever is chosen, at whatever it is."""
        replica, board = self._replica, self._here.board
        self._here.check()
        # read: the weights that the gradient is of, while nobody changes them
        replica.timer.begin("communication")
        read = board.num_updates
        self._weights.read(replica.rank, replica.parameters)
        self._log(Access(rank=replica.rank, is_write=False, version=read))
        # forward, backward
        loss = replica.compute_gradients(batch)
        self._here.check()
        # agree: takes part: this worker alone, in its own memory and the neighbour's
        replica.timer.begin("communication")
        neighbour = chosen_by(replica.rank, self._num_steps, board.living())
        with self._weights.averaged(replica.rank, neighbour):
            self._update()
            version = board.count_update()
        self._log(Access(rank=replica.rank, is_write=True, version=version))
        self._here.settle()
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
        self._here.part(self._sum_up)
        self._take(self._here.copies[-1].tensors)
        self._has_ended = True
        return self._replica.model

    def save(self, replica: Replica) -> State:
        """Return the mean of all weights now, and rank 0's optimizer."""
        if not self._has_ended:  # the next step reads its own weights anew
            self._take(self._mean())
        return super().save(replica)

    def lost_shares(self) -> Sequence[Share]:
        """Return, on rank 0, what was handed out to workers that died."""
        if self._crew is None or self._replica.rank != 0:
            return ()
        return self._crew.lost_shares()

    def close(self) -> None:
        """Say that this worker failed, if it has not finished; remove the files."""
        self._opened.close()
        self._crew = None

    @property
    def _here(self) -> Crew:
        assert self._crew is not None
        return self._crew

    def _open_weights(self, crew: Crew) -> Weights:
        try:
            weights = Weights(crew.path, crew.copies, self._timeout, self._replica.lifeline)
        except FileNotFoundError as error:
            raise RunOverError from error
        return self._opened.enter_context(contextlib.closing(weights))

    def _update(self) -> None:
        """Make the optimizer's step on the weights in shared memory."""
        for slot, parameter in zip(self._mine, self._replica.parameters, strict=True):
            slot.grad = parameter.grad
        self._replica.update(self._optimizer)
        for slot in self._mine:
            slot.grad = None

    def _sum_up(self) -> None:
        """Leave the mean of all weights where the others find it."""
        for slot, mean in zip(self._here.copies[-1].tensors, self._mean(), strict=True):
            slot.copy_(mean)

    def _mean(self) -> list[torch.Tensor]:
        """Return the mean of the weights of all who live."""
        living = self._here.board.living()
        if not living:
            raise RunOverError
        return self._weights.mean(living)

    @torch.no_grad()
    def _take(self, values: Sequence[torch.Tensor]) -> None:
        """Have the model hold these."""
        for parameter, value in zip(self._replica.parameters, values, strict=True):
            parameter.copy_(value)


def chosen_by(rank: int, step: int, living: Sequence[int]) -> int | None:
    """Return whom a rank averages with in its step: of the living any other, all as likely.

    The same at any time, whatever the run's seed; None where there is no other.
    """
    others = [other for other in living if other != rank]
    return Random(f"{rank} {step}").choice(others) if others else None
