"""How do workers train on the same memory, without locks?  (Every rank, of one host, on CPUs.)

    worker i:  w  <-  w - (b_i / B) * lr * g_i(w_old)     w: the one copy, in shared memory

Each worker reads the parameters while others write them, and updates them without asking;
w_old may be a mixture of states.  Each has its own optimizer: momentum is local.  Staleness is
told by a shared counter of updates: those of others between the forward pass and the update.
The weight b_i / B, a share of the global batch of B, is that of ``async``.

Reference: Niu, Recht, Re and Wright, "Hogwild!: A Lock-Free Approach to Parallelizing
Stochastic Gradient Descent", NeurIPS 2011.

Messages per step: none.  The next share, and the counter, are taken from shared memory under a
file lock: a faster worker takes more shares.  Bytes sent: P for parameters of P bytes, written
to the memory of all.

A worker that dies costs the share it was at, and those being fetched ahead for it; it may
join anew.  GPUs cannot share such memory: hogwild needs ranks on CPUs.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import final

from torch import nn

from ddpnb.errors import UserError
from ddpnb.rank.order import Share
from ddpnb.rank.strategies.base import Batch, Plan, Replica, StepReport, Strategy
from ddpnb.rank.transport.board import NO_SHARE, Board, Fate, Standing
from ddpnb.rank.transport.master import Access, Log, no_log
from ddpnb.rank.transport.meeting import Meeting, this_host
from ddpnb.rank.transport.message import NOBODY, RankLostError, RunOverError
from ddpnb.rank.transport.packed import create_shared, map_shared, num_bytes
from ddpnb.rank.transport.quick_step import ScaledStep
from ddpnb.wire import RankState

_MEMORY = "memory"
_POLL_SECONDS = 0.002
_LOOK_SECONDS = 0.5
"""How often it is looked whether rank 0 still lives, which judges the model in the end."""


@final
class Hogwild(Strategy):
    """Asynchronous SGD on shared memory.

    Args:
        timeout_seconds: how long it may be that no worker at all makes progress.
        log: is told of every read and update of this worker.
    """

    def __init__(self, *, timeout_seconds: float = 60.0, log: Log = no_log) -> None:
        self._timeout = timeout_seconds
        self._log = log
        self._board: Board | None = None
        self._is_over = True
        self._opened = contextlib.ExitStack()

    def plan(self, state: RankState) -> Plan:
        """Every rank trains.

        Raises:
            UserError: the ranks are on GPUs.
        """
        if not state.device.startswith("cpu"):
            raise UserError(
                "hogwild needs ranks on CPUs, whose memory processes can share: "
                "%ddp_start --device cpu, or compare async."
            )
        num = state.world_size
        return Plan(num_ranks=num, num_workers=num, synchronous=False, survives_deaths=True)

    def setup(self, replica: Replica) -> None:
        """Move the parameters to shared memory and wait for all; takes part: every rank.

        A rank that joins takes part alone.

        Raises:
            UserError: the ranks share no memory.
            RunOverError: there is nothing to join.
        """
        self._replica = replica
        self._num_bytes = sum(p.numel() * p.element_size() for p in replica.parameters)
        meeting = None if replica.joins else self._meet(replica)
        self._map(replica)
        self._make_step = ScaledStep(replica.optimizer(replica.parameters))
        self._taken: deque[int] = deque()
        """Shares that are this worker's, the one it trains on first."""
        self._is_over = False
        self._here.enter(replica.rank)
        self._looked_at = time.monotonic()
        if meeting is not None:
            self._wait(self._all_are_here, meeting.absent)

    def shares(self) -> Iterator[Share]:
        """Whatever share is next, until all are handed out."""
        while (number := self._here.take()) != NO_SHARE:
            self._taken.append(number)
            yield self._share_of(number)

    def step(self, batch: Batch) -> StepReport:
        """Train on one share, on parameters that others change meanwhile."""
        self._check()
        read = self._here.num_updates
        self._log(Access(rank=self._replica.rank, is_write=False, version=read))
        # forward; backward
        loss = self._replica.compute_gradients(batch)
        # agree: with nobody
        # update: in the memory of all, while others do the same
        self._replica.timer.begin("optimizer")
        self._make_step(batch.weight)
        version = self._here.count_update()
        self._here.settle(self._taken.popleft(), Fate.TRAINED)
        self._log(Access(rank=self._replica.rank, is_write=True, version=version))
        return StepReport(
            loss=loss,
            num_samples=batch.num_samples,
            staleness=version - 1 - read,
            num_bytes_sent=self._num_bytes,
        )

    def finish(self) -> nn.Module:
        """Wait until all are done, and copy the parameters; takes part: every living rank."""
        for number in self._taken:  # stopped: nobody trained on it, nobody died
            self._here.settle(number, Fate.RETURNED)
        self._here.stand(self._replica.rank, Standing.DONE)
        self._wait(self._all_are_done, lambda: NOBODY)
        self._check_needed()
        self._is_over = True
        self._leave()
        return self._replica.model

    def lost_shares(self) -> Sequence[Share]:
        """Return, on rank 0, what was handed out to workers that died."""
        if self._board is None or self._replica.rank != 0:
            return ()
        return [self._share_of(number) for number in self._board.lost_shares()]

    def close(self) -> None:
        """Say that this worker failed, if it has not finished; remove the files."""
        if not self._is_over:
            self._is_over = True
            self._here.fail(self._replica.rank)
            self._leave()
        self._opened.close()
        self._board = None

    @property
    def _here(self) -> Board:
        assert self._board is not None
        return self._board

    def _meet(self, replica: Replica) -> Meeting:
        """Make the files, or wait until rank 0 has."""
        meeting = Meeting(
            replica.name, replica.rank, replica.folder, self._timeout, replica.lifeline
        )
        if replica.rank != 0:
            if meeting.read(_MEMORY, of_rank=0) != this_host(replica.folder):
                raise UserError("hogwild needs all ranks on one host; compare async.")
            return meeting
        self._opened.callback(meeting.forget, _MEMORY)
        for path in self._paths():
            self._opened.callback(path.unlink, missing_ok=True)
        memory, board = self._paths()
        create_shared(memory, num_bytes(replica.parameters))
        Board.create(board, world_size=replica.world_size, num_shares=self._num_shares)
        first = map_shared(memory, replica.parameters)
        for slot, parameter in zip(first.tensors, replica.parameters, strict=True):
            slot.copy_(parameter.detach())
        meeting.tell(_MEMORY, this_host(replica.folder))
        return meeting

    def _map(self, replica: Replica) -> None:
        memory, board = self._paths()
        try:
            self._board = Board(board, world_size=replica.world_size, num_shares=self._num_shares)
            shared = map_shared(memory, replica.parameters)
        except (FileNotFoundError, RuntimeError) as error:
            raise RunOverError from error
        self._opened.enter_context(contextlib.closing(self._board))
        for slot, parameter in zip(shared.tensors, replica.parameters, strict=True):
            parameter.data = slot

    def _leave(self) -> None:
        """Give the model's parameters memory of their own."""
        for parameter in self._replica.parameters:
            parameter.data = parameter.data.clone()

    def _paths(self) -> tuple[Path, Path]:
        folder, name = self._replica.folder, self._replica.name
        return folder / f"{name}.w", folder / f"{name}.b"

    @property
    def _num_shares(self) -> int:
        return self._replica.num_steps * self._replica.world_size

    def _share_of(self, number: int) -> Share:
        num_parts = self._replica.world_size
        step, part = divmod(number, num_parts)
        return Share(step=step, part=part, num_parts=num_parts)

    def _standings(self) -> dict[int, Standing]:
        return {rank: self._here.standing(rank) for rank in range(self._replica.world_size)}

    def _all_are_here(self) -> bool:
        return Standing.NOT_HERE not in self._standings().values()

    def _all_are_done(self) -> bool:
        return not {Standing.NOT_HERE, Standing.TRAINING} & set(self._standings().values())

    def _check(self) -> None:
        """Raise where the run is over, or goes on without this worker."""
        if (failed := self._here.failed_rank) != NOBODY:
            raise RankLostError(failed)
        self._replica.lifeline.check()
        if time.monotonic() - self._looked_at > _LOOK_SECONDS:
            self._looked_at = time.monotonic()
            self._check_needed()

    def _check_needed(self) -> None:
        """Raise where rank 0 has died, or where this worker was given up."""
        for needed in (0, self._replica.rank):
            if self._here.standing(needed) is Standing.GONE:
                raise RankLostError(needed)

    def _wait(self, is_so: Callable[[], bool], absent: Callable[[], int]) -> None:
        """Wait for other workers; those without whom nothing moves are given up."""
        num_updates, progress_at = self._here.num_updates, time.monotonic()
        while not is_so():
            self._check()
            if (rank := absent()) != NOBODY:
                raise RankLostError(rank)
            if (now := self._here.num_updates) != num_updates:
                num_updates, progress_at = now, time.monotonic()
            if time.monotonic() - progress_at > self._timeout:
                self._give_up()
            time.sleep(_POLL_SECONDS)

    def _give_up(self) -> None:
        for rank, standing in self._standings().items():
            if standing is Standing.NOT_HERE:
                raise RankLostError(rank)
            if standing is Standing.TRAINING and rank != self._replica.rank:
                self._here.stand(rank, Standing.GONE)
