"""The ranks as processes that can be started, called and ended (kernel)."""

import signal
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpnb.cluster.call import CALL_TIMEOUT_SECONDS, Call
from ddpnb.cluster.placement import Placement, free_port, rank_settings, torchrun_environment
from ddpnb.cluster.processes import (
    Exit,
    Member,
    Processes,
    Service,
    describe_exit,
    log_tail,
    spoken,
)
from ddpnb.cluster.wording import remedy
from ddpnb.protocol.calls import Request, Result
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState
from ddpnb.protocol.notation import format_ranks, spoken_ranks

if TYPE_CHECKING:
    from ddpnb.cluster.client import EngineClient

SIGNAL_SECONDS = 1.0
"""How long a call waits until earlier interrupts have been sent."""


class Engines:
    """Ranks that can be called, in whichever process group they are."""

    processes: Processes

    def __init__(self, folder: Path, home: Path) -> None:
        self.placement: Placement | None = None
        self.folder = folder
        self.profile = folder / "profile"
        self.home = home
        """The working folder in which cells start, on every rank."""
        self.work_folder = home
        """The notebook's working folder now, to which ranks change with the next call."""
        self.states: tuple[RankState, ...] = ()
        self.exits: dict[Member, Exit] = {}
        """Processes that ended without being asked to."""
        self.names: dict[int, tuple[str, ...]] = {}
        """The variables that each rank had after its last cell."""
        self.is_over = False
        """Whether this kernel has ended the cluster, or has detached from it."""
        self.supervised: list[Call] = []
        """Calls in progress for which a ``Watch`` waits."""
        self._master_port = free_port()
        self._client: EngineClient | None = None
        self._exit_lock = threading.Lock()
        self._interrupts: list[Future[Any]] = []
        """Interrupts that may be on their way to the ranks."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All rank numbers."""
        return tuple(range(len(self.states)))

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks that run; none does without the fork server."""
        if Service.FORK_SERVER in self.exits:
            return ()
        return tuple(rank for rank in self.ranks if rank not in self.exits)

    @property
    def dead(self) -> tuple[int, ...]:
        """The ranks that have ended."""
        return tuple(rank for rank in self.ranks if rank not in self.living)

    @property
    def busy(self) -> set[int]:
        """The ranks on which supervised calls run."""
        return {rank for call in self.supervised for rank in call.ranks}

    def require_idle(self, ranks: Collection[int]) -> None:
        """Raise a UserError if a supervised call runs on one of the ranks."""
        if busy := self.busy & set(ranks):
            raise UserError(
                f"A cell is still running on {spoken_ranks(busy)}: wait for it, or stop it with "
                "%ddp_interrupt."
            )

    @property
    def is_local(self) -> bool:
        """Whether the ranks are on the kernel's own host and share the run folder with it."""
        return self.placement is None or not self.placement.hosts

    @property
    def spans_hosts(self) -> bool:
        """Whether there are ranks on more than one host."""
        return self.placement is not None and len(self.placement.hosts) > 1

    @property
    def lost(self) -> str | None:
        """Why the cluster as a whole is unusable, if it is."""
        for name in (Service.FORK_SERVER, Service.CONTROLLER):
            if (exit_ := self.exits.get(name)) is not None:
                return f"the {name} {describe_exit(exit_)}"
        return None

    @property
    def missing(self) -> tuple[str, ...]:
        """A sentence for each feature that is off because a library is of another version."""
        here = self._client.missing if self._client is not None else ()
        there = (each for state in self.states for each in state.missing)
        return tuple(dict.fromkeys((*here, *there)))

    def submit(self, request: Request[Any], ranks: Sequence[int]) -> Call:
        """Start a call on some ranks and return at once.

        Raises a UserError if one of the ranks has died, or the whole cluster.
        """
        self.require(ranks)
        sent, self._interrupts = self._interrupts, []
        wait(sent, SIGNAL_SECONDS)  # a late one would end the call that begins now
        return self.client.submit(request.in_folder(str(self.work_folder)), ranks)

    def gather(
        self,
        request: Request[Result],
        ranks: Sequence[int] | None = None,
        timeout: float = CALL_TIMEOUT_SECONDS,
    ) -> list[Result]:
        """Make a call on ranks, by default all; return the results in order of ranks."""
        chosen = self.ranks if ranks is None else ranks
        return self.submit(request, chosen).results(timeout)

    def require(self, ranks: Sequence[int]) -> None:
        """Raise a UserError unless all of ``ranks`` are alive."""
        if (lost := self.lost) is not None:
            raise UserError(f"The cluster is gone: {lost}. Start anew with %ddp_restart.")
        for rank in ranks:
            if (exit_ := self.exits.get(rank)) is not None:
                raise UserError(f"Rank {rank} {describe_exit(exit_)}: {remedy(self.dead)}.")

    def interrupt(self, ranks: Sequence[int]) -> None:
        """Send ranks SIGINT, which raises ``KeyboardInterrupt`` in a running cell."""
        living = sorted(set(ranks) & set(self.living))
        self._interrupts += self.processes.signal(living, signal.SIGINT)

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill ranks."""
        self.processes.signal(sorted(set(ranks) & set(self.living)), signal.SIGKILL)

    def log_tail(self, member: Member, num_lines: int = 15) -> str:
        """Return the last lines of a process's log, or a crash from its first line."""
        return log_tail(self.folder, member, num_lines)

    # -- for the cluster -------------------------------------------------------------

    @property
    def client(self) -> "EngineClient":
        """Sends calls to the ranks; defined once the controller has been reached."""
        assert self._client is not None
        return self._client

    def start_rank(self, rank: int, *, generation: int | None) -> None:
        """Start a rank's process and return at once; its earlier exit is forgotten.

        ``generation`` is that of the process group to join; None: join none.
        """
        assert self.placement is not None
        profile = self.processes.profile_of(rank, self.profile)  # where it fails, the rank is dead
        self.exits.pop(rank, None)
        self.names.pop(rank, None)
        self.processes.start_rank(
            rank,
            environment=torchrun_environment(self.placement, rank, self._master_port),
            settings=rank_settings(
                self.placement,
                rank,
                profile=profile,
                home=self.home,
                generation=generation,
            ),
        )

    def end_ranks(self, ranks: Sequence[int]) -> None:
        """Kill ranks, and wait until they have ended."""
        self.kill(ranks)
        deadline = time.monotonic() + CALL_TIMEOUT_SECONDS
        while set(ranks) & set(self.living):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {format_ranks(ranks)} did not end")
            time.sleep(0.002)

    def note_exit(self, exit_: Exit) -> None:
        """Note, from the listening thread, that a process has ended."""
        with self._exit_lock:
            self.exits[exit_.member] = exit_
        if (client := self._client) is None:
            return
        lost = [exit_.member] if isinstance(exit_.member, int) else list(self.ranks)
        for rank in lost:
            client.lose(rank, describe_exit(exit_))

    def raise_if_dead(self) -> None:
        """Raise a RuntimeError, with the end of the log, if a process ended while starting."""
        with self._exit_lock:
            exits = list(self.exits.values())
        if self.processes.ready.done() and (cause := self.processes.ready.exception()):
            raise RuntimeError(f"The ranks could not be prepared: {cause}")
        for exit_ in exits:
            raise RuntimeError(
                f"{spoken(exit_.member)} {describe_exit(exit_)} while starting.\n"
                f"{self.log_tail(exit_.member)}"
            )

    def connect(self) -> "EngineClient":
        """Connect to the controller, once it listens; the engines may register later."""
        from ddpnb.cluster.client import EngineClient  # noqa: PLC0415  takes 0.3 s: see there

        self._client = EngineClient(self.profile, self.raise_if_dead)
        return self._client

    def disconnect(self, cause: str) -> None:
        """Disconnect from the ranks; calls in progress end with ``cause``."""
        self.is_over = True
        client, self._client = self._client, None
        if client is not None:
            client.close(self.ranks, cause)
