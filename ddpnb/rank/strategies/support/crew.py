"""How do workers on shared memory come together, share out the work, and part?  (Every rank.)

Rank 0 makes two files in the run's folder, which all map: a ``Board``, and memory for the
parameters.  The next share is whose who asks next.  Nobody waits for anybody but to begin and
to end; who dies costs the share it was at, and those being fetched ahead for it.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

from ddpnb.errors import UserError
from ddpnb.rank.order import Share
from ddpnb.rank.strategies.base import Replica
from ddpnb.rank.transport.board import NO_SHARE, Board, Fate, Standing
from ddpnb.rank.transport.meeting import Meeting, this_host
from ddpnb.rank.transport.message import NOBODY, RankLostError, RunOverError
from ddpnb.rank.transport.packed import Packed, create_shared, map_copies, num_bytes

_MEMORY = "memory"
_POLL_SECONDS = 0.002
_LOOK_SECONDS = 0.5
"""How often it is looked whether the others still live."""

Standings = dict[int, Standing]
"""How far each rank is."""


@final
class Crew:
    """The workers of one run, as one of them sees them.

    Args:
        replica: this worker's.
        num_copies: how often the parameters lie in the memory.
        timeout_seconds: how long it may be that no worker at all makes progress.
        elsewhere: what a user reads where the ranks share no memory.
    """

    board: Board
    copies: list[Packed]
    """Of the parameters, in the memory of all; at first each is what rank 0 brought."""

    def __init__(
        self, replica: Replica, *, num_copies: int = 1, timeout_seconds: float, elsewhere: str
    ) -> None:
        self._replica = replica
        self._num_copies = num_copies
        self._timeout = timeout_seconds
        self._elsewhere = elsewhere
        self._absent: Callable[[], int] = lambda: NOBODY
        self._taken: deque[int] = deque()
        """Shares that are this worker's, the one it trains on first."""
        self._looked_at = time.monotonic()
        self._is_in = False
        self._opened = contextlib.ExitStack()

    @property
    def path(self) -> Path:
        """The file of the memory, as long as rank 0 is here."""
        return self._replica.folder / f"{self._replica.name}.w"

    def open(self) -> None:
        """Make the files, or map those that rank 0 has made; takes part: every rank.

        A rank that joins takes part alone.

        Raises:
            UserError: the ranks share no memory.
            RunOverError: there is nothing to join.
        """
        if not self._replica.joins:
            self._meet()
        try:
            self.board = self._map_board()
            self.copies = self._map_copies()
        except (FileNotFoundError, RuntimeError) as error:
            raise RunOverError from error

    def enter(self) -> None:
        """Say that this worker is ready, and wait for all; who joins waits for nobody."""
        self.board.enter(self._replica.rank)
        self._is_in = True
        if not self._replica.joins:
            self._wait(_all_are_here, self._absent)

    def shares(self) -> Iterator[Share]:
        """Yield whatever share is next, until all are handed out."""
        while (number := self.board.take()) != NO_SHARE:
            self._taken.append(number)
            yield self._share_of(number)

    def check(self) -> None:
        """Raise where the run is over, or goes on without this worker."""
        if (failed := self.board.failed_rank) != NOBODY:
            raise RankLostError(failed)
        self._replica.lifeline.check()
        if time.monotonic() - self._looked_at > _LOOK_SECONDS:
            self._looked_at = time.monotonic()
            self._check_needed()

    def settle(self) -> None:
        """Note that this worker has trained on the share it was at."""
        self.board.settle(self._taken.popleft(), Fate.TRAINED)

    def part(self, sum_up: Callable[[], None] | None = None) -> None:
        """Wait until all are done; takes part: every living rank.

        Args:
            sum_up: called by rank 0 when all others are done, before any of them goes on.
        """
        for number in self._taken:  # stopped: nobody trained on it, nobody died
            self.board.settle(number, Fate.RETURNED)
        if sum_up is not None and self._replica.rank == 0:
            self.board.stand(0, Standing.LAST)
            self._wait(_others_are_done)
            sum_up()
            self._check_needed()
        self.board.stand(self._replica.rank, Standing.DONE)
        self._wait(_all_are_done)
        self._check_needed()
        self._is_in = False

    def lost_shares(self) -> list[Share]:
        """Return what was handed out to workers that died."""
        return [self._share_of(number) for number in self.board.lost_shares()]

    def close(self) -> None:
        """Say that this worker failed, if it has not parted; remove the files."""
        if self._is_in:
            self._is_in = False
            self.board.fail(self._replica.rank)
        self._opened.close()

    def _meet(self) -> None:
        """Make the files, or wait until rank 0 has."""
        replica = self._replica
        meeting = Meeting(
            replica.name, replica.rank, replica.folder, self._timeout, replica.lifeline
        )
        self._absent = meeting.absent
        if replica.rank != 0:
            if meeting.read(_MEMORY, of_rank=0) != this_host(replica.folder):
                raise UserError(self._elsewhere)
            return
        self._opened.callback(meeting.forget, _MEMORY)
        for path in (self.path, self._board_path):
            self._opened.callback(path.unlink, missing_ok=True)
        create_shared(self.path, self._num_copies * num_bytes(replica.parameters))
        Board.create(self._board_path, world_size=replica.world_size, num_shares=self._num_shares)
        for copied in self._map_copies():
            for slot, parameter in zip(copied.tensors, replica.parameters, strict=True):
                slot.copy_(parameter.detach())
        meeting.tell(_MEMORY, this_host(replica.folder))

    def _map_board(self) -> Board:
        size = self._replica.world_size
        board = Board(self._board_path, world_size=size, num_shares=self._num_shares)
        return self._opened.enter_context(contextlib.closing(board))

    def _map_copies(self) -> list[Packed]:
        return map_copies(self.path, self._replica.parameters, self._num_copies)

    @property
    def _board_path(self) -> Path:
        return self._replica.folder / f"{self._replica.name}.b"

    @property
    def _num_shares(self) -> int:
        return self._replica.num_steps * self._replica.world_size

    def _share_of(self, number: int) -> Share:
        num_parts = self._replica.world_size
        step, part = divmod(number, num_parts)
        return Share(step=step, part=part, num_parts=num_parts)

    def _standings(self) -> Standings:
        return {rank: self.board.standing(rank) for rank in range(self._replica.world_size)}

    def _check_needed(self) -> None:
        """Raise where rank 0 has died, or where this worker was given up."""
        standings = self._standings()
        for needed in (0, self._replica.rank):
            if standings[needed] is Standing.GONE:
                raise RankLostError(needed)

    def _wait(
        self, is_so: Callable[[Standings], bool], absent: Callable[[], int] = lambda: NOBODY
    ) -> None:
        """Wait for other workers; those without whom nothing moves are given up."""
        seen, progress_at = self._progress(), time.monotonic()
        while not is_so(standings := self._standings()):
            self.check()
            if (rank := absent()) != NOBODY:
                raise RankLostError(rank)
            if (now := self._progress()) != seen:  # else the standings are no older
                seen, progress_at = now, time.monotonic()
            elif time.monotonic() - progress_at > self._timeout:
                self._give_up(standings)
            time.sleep(_POLL_SECONDS)

    def _progress(self) -> tuple[int, list[int]]:
        """Return what changes as long as there is no need to give anybody up."""
        return self.board.num_updates, self.board.living()

    def _give_up(self, standings: Standings) -> None:
        """Count who trains as dead; where nobody does any more, who does not come to an end."""
        others = {rank: at for rank, at in standings.items() if rank != self._replica.rank}
        for rank, standing in others.items():
            if standing is Standing.NOT_HERE:
                raise RankLostError(rank)
        silent = Standing.TRAINING if Standing.TRAINING in others.values() else Standing.LAST
        for rank, standing in others.items():
            if standing is silent:
                self.board.stand(rank, Standing.GONE)


def _all_are_here(standings: Standings) -> bool:
    return Standing.NOT_HERE not in standings.values()


def _all_are_done(standings: Standings) -> bool:
    return set(standings.values()) <= {Standing.DONE, Standing.GONE}


def _others_are_done(standings: Standings) -> bool:
    return set(standings.values()) <= {Standing.DONE, Standing.GONE, Standing.LAST}
