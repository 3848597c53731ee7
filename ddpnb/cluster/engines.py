"""How are ranks started, called and ended, and who of them lives?  (Notebook side.)

Each rank is a process that runs an ipyparallel engine.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpnb.cluster.call import Call
from ddpnb.cluster.placement import Placement, free_port, rank_settings, torchrun_environment
from ddpnb.cluster.processes import (
    Exit,
    Member,
    Processes,
    Service,
    describe_exit,
    log_tail,
    spoken,
    wait_for_file,
)
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState
from ddpnb.protocol.rank_sets import format_ranks
from ddpnb.protocol.remote_call import OnRank

if TYPE_CHECKING:
    from ddpnb.cluster.client import Dispatcher


START_TIMEOUT_SECONDS = 120.0
CALL_TIMEOUT_SECONDS = 30.0


class EngineRegistry:
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
    def connect(cls, profile: Path, while_waiting: Callable[[], None]) -> "EngineRegistry":
        """Connect to the controller, once it listens.

        Args:
            profile: ipyparallel's profile folder.
            while_waiting: called again and again; ends the wait by raising.
        """
        import ipyparallel as ipp  # noqa: PLC0415  costs 0.3 s: while the fork server works

        from ddpnb.cluster.client import Dispatcher  # noqa: PLC0415  the same

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


class Engines:
    """Ranks that can be called, whatever process group they are in.

    Args:
        folder: the cluster's run folder.
    """

    processes: Processes

    def __init__(self, folder: Path) -> None:
        self.placement: Placement | None = None
        self.folder = folder
        self.profile = folder / "profile"
        self.home = Path.cwd()
        """Where cells run at first, on every rank."""
        self.states: tuple[RankState, ...] = ()
        self.exits: dict[Member, Exit] = {}
        """How processes ended that nobody asked to end."""
        self.is_over = False
        """Whether this kernel has done with it: ended it, or left it to another."""
        self._master_port = free_port()
        self._registry: EngineRegistry | None = None
        self._exit_lock = threading.Lock()

    @property
    def ranks(self) -> tuple[int, ...]:
        """All rank numbers."""
        return tuple(range(len(self.states)))

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks whose process runs; they end with the fork server."""
        if Service.FORK_SERVER in self.exits:
            return ()
        return tuple(rank for rank in self.ranks if rank not in self.exits)

    @property
    def dead(self) -> tuple[int, ...]:
        """The ranks whose process has ended."""
        return tuple(rank for rank in self.ranks if rank not in self.living)

    @property
    def lost(self) -> str | None:
        """Why the cluster as a whole cannot be used any more, if so."""
        for name in (Service.FORK_SERVER, Service.CONTROLLER):
            if (exit_ := self.exits.get(name)) is not None:
                return f"the {name} {describe_exit(exit_)}"
        return None

    @property
    def missing(self) -> tuple[str, ...]:
        """What is off because a library is of another version: one sentence each."""
        here = self._registry.dispatcher.missing if self._registry is not None else ()
        there = (each for state in self.states for each in state.missing)
        return tuple(dict.fromkeys((*here, *there)))

    def submit(self, function: OnRank, *arguments: object, ranks: Sequence[int]) -> Call:
        """Start a call on some ranks and return at once.

        Raises:
            UserError: where one of the ranks has died, or the cluster has.
        """
        self.require(ranks)
        return self.registry.dispatcher.submit(function, *arguments, ranks=ranks)

    def gather(
        self,
        function: OnRank,
        *arguments: object,
        ranks: Sequence[int] | None = None,
        timeout: float = CALL_TIMEOUT_SECONDS,
    ) -> list[Any]:
        """Call a function on some ranks, or all, and return the results in order of ranks."""
        chosen = self.ranks if ranks is None else ranks
        self.require(chosen)
        return self.registry.dispatcher.gather(function, *arguments, ranks=chosen, timeout=timeout)

    def require(self, ranks: Sequence[int]) -> None:
        """Raise a UserError unless all of ``ranks`` live."""
        if (lost := self.lost) is not None:
            raise UserError(f"The cluster is gone: {lost}. Start anew with %ddp_restart.")
        for rank in ranks:
            if (exit_ := self.exits.get(rank)) is not None:
                raise UserError(
                    f"Rank {rank} {describe_exit(exit_)}: %ddp_restart --ranks {rank} brings it "
                    "back, the other ranks keep their variables."
                )

    def interrupt(self, ranks: Sequence[int]) -> None:
        """Send ranks the signal that raises ``KeyboardInterrupt`` in a running cell."""
        self.processes.signal(sorted(set(ranks) & set(self.living)), signal.SIGINT)

    def kill(self, ranks: Sequence[int]) -> None:
        """End ranks at once."""
        self.processes.signal(sorted(set(ranks) & set(self.living)), signal.SIGKILL)

    def log_tail(self, member: Member, num_lines: int = 15) -> str:
        """Return the last lines that a process wrote to its log, a crash from its beginning."""
        return log_tail(self.folder, member, num_lines)

    # -- for the cluster -------------------------------------------------------------

    @property
    def registry(self) -> EngineRegistry:
        """The engines that have come; there are some from the start's middle to the end."""
        assert self._registry is not None
        return self._registry

    def start_rank(self, rank: int, *, generation: int | None) -> None:
        """Start a rank's process and return at once.

        Args:
            rank: which one; its end, if it has ended, is forgotten.
            generation: of the process group that it joins; None for none.
        """
        assert self.placement is not None
        self.exits.pop(rank, None)
        self.processes.start_rank(
            rank,
            environment=torchrun_environment(self.placement, rank, self._master_port),
            settings=rank_settings(
                self.placement, rank, profile=self.profile, home=self.home, generation=generation
            ),
        )

    def end_ranks(self, ranks: Sequence[int]) -> None:
        """Kill those of the ranks that live, and wait until they have ended."""
        self.kill(ranks)
        deadline = time.monotonic() + CALL_TIMEOUT_SECONDS
        while set(ranks) & set(self.living):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {format_ranks(ranks)} did not end")
            time.sleep(0.002)

    def note_exit(self, exit_: Exit) -> None:
        """Remember, from the listening thread, that a process ended."""
        with self._exit_lock:
            self.exits[exit_.member] = exit_
        if (registry := self._registry) is None:
            return
        lost = [exit_.member] if isinstance(exit_.member, int) else list(self.ranks)
        for rank in lost:
            registry.dispatcher.lose(rank, describe_exit(exit_))

    def raise_if_dead(self) -> None:
        """Raise a RuntimeError with the end of its log where a process ended while starting."""
        with self._exit_lock:
            exits = list(self.exits.values())
        if self.processes.ready.done() and (cause := self.processes.ready.exception()):
            raise RuntimeError(f"The ranks could not be prepared: {cause}")
        for exit_ in exits:
            raise RuntimeError(
                f"{spoken(exit_.member)} {describe_exit(exit_)} while starting.\n"
                f"{self.log_tail(exit_.member)}"
            )

    def disconnect(self, why: str) -> None:
        """Reach no rank any more; calls in progress are told ``why``."""
        self.is_over = True
        registry, self._registry = self._registry, None
        if registry is not None:
            registry.close(self.ranks, why)
