"""Which engine is which rank's, and who is new?  (Notebook side.)"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ddpnb.notebook.cluster.processes import wait_for_file
from ddpnb.remote_call import OnRank

if TYPE_CHECKING:
    from ddpnb.notebook.cluster.dispatch import Dispatcher

START_TIMEOUT_SECONDS = 120.0
CALL_TIMEOUT_SECONDS = 30.0


class Roster:
    """The engines that have come, each with its rank.

    A rank asks for its own number as its engine's id; where a dead one has it still, it
    gets another, and is asked whose it is.

    Args:
        dispatcher: reaches the engines.
    """

    def __init__(self, dispatcher: "Dispatcher") -> None:
        self.dispatcher = dispatcher
        self._known: set[int] = set()

    @classmethod
    def connect(cls, profile: Path, while_waiting: Callable[[], None]) -> "Roster":
        """Connect to the controller, once it listens.

        Args:
            profile: ipyparallel's profile folder.
            while_waiting: called again and again; ends the wait by raising.
        """
        import ipyparallel as ipp  # noqa: PLC0415  costs 0.3 s: while the fork server works

        from ddpnb.notebook.cluster.dispatch import Dispatcher  # noqa: PLC0415  the same

        path = profile / "security/ipcontroller-client.json"
        wait_for_file(path, START_TIMEOUT_SECONDS, while_waiting)
        return cls(Dispatcher(ipp.Client(str(path))))

    @property
    def new(self) -> set[int]:
        """The engines that have come and are nobody's yet."""
        return set(self.dispatcher.client.ids) - self._known

    def of(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return the engine of each rank."""
        return {rank: self.dispatcher.engine_of.get(rank, rank) for rank in ranks}

    def take_over(self, engine_of: Mapping[int, int]) -> None:
        """Know all engines that are there, as another kernel knew them."""
        self.dispatcher.engine_of.update(engine_of)
        self._known = set(self.dispatcher.client.ids)

    def wait_for(self, ranks: set[int], while_waiting: Callable[[], None]) -> None:
        """Wait until the engines of ranks are there, and note which is whose.

        Args:
            ranks: those that were started.
            while_waiting: called again and again; ends the wait by raising.

        Raises:
            TimeoutError: where some do not come.
        """
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while len(new := self.new) < len(ranks):
            while_waiting()
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {len(new)} of {len(ranks)} ranks came")
            time.sleep(0.002)
        if new == ranks:
            self._known |= new
            self.dispatcher.engine_of.update((rank, rank) for rank in ranks)
            return
        self.welcome(new)

    def welcome(self, engines: set[int]) -> None:
        """Note which engine is whose, by asking."""
        self._known |= engines
        for engine in engines:
            self.dispatcher.engine_of[-1] = engine  # no rank's number: ask whose it is
            (state,) = self.dispatcher.gather(
                OnRank("state"), ranks=[-1], timeout=CALL_TIMEOUT_SECONDS
            )
            self.dispatcher.engine_of[state.rank] = engine

    def close(self, ranks: Iterable[int], why: str) -> None:
        """Reach no rank any more; calls in progress are told ``why``."""
        for rank in ranks:
            self.dispatcher.lose(rank, why)
        self.dispatcher.client.close()
