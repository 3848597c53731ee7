"""The cluster: starts, calls, restarts and ends the ranks.  Runs in the kernel."""

import contextlib
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpnb.cluster.call import CALL_TIMEOUT_SECONDS, Call, Timeouts
from ddpnb.cluster.interrupts import Interrupted, noted_interrupts
from ddpnb.cluster.link import Exit, Member, Service
from ddpnb.cluster.placement import ClusterSpec, Placement, rank_settings
from ddpnb.cluster.processes import LocalProcesses, Processes, StartProcesses
from ddpnb.cluster.wording import deaths, restart_command, say, them, to_sentence
from ddpnb.compat.probe import missing_features
from ddpnb.protocol.calls import Result
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.protocol.processes import (
    SERVER_LOCK,
    RankCommand,
    private_folder,
    remove_folder,
    working_folder,
)

if TYPE_CHECKING:
    from ddpnb.cluster.client import EngineClient

SIGNAL_SECONDS = 1.0
"""Maximum time that a new call waits until earlier interrupts have been sent."""


class Cluster:
    """Ranks that form a process group, on one or several hosts.  ``start`` creates a cluster."""

    processes: Processes
    placement: Placement

    def __init__(self, spec: ClusterSpec, home: Path) -> None:
        self.spec = spec
        self.home = home
        """The working folder in which cells start, on every rank."""
        self.work_folder = home
        """The notebook's working folder.  The ranks change to this folder before the next call."""
        self.timeouts = Timeouts()
        """The timeouts of supervised calls.  Tests may replace the timeouts at any time."""
        self.exits: dict[Member, Exit] = {}
        """The exit of each process that ended unexpectedly."""
        self.is_over = False
        """True if this kernel has ended the cluster."""
        self.supervised: list[Call] = []
        """Calls in progress that a ``Watch`` supervises."""
        self.survivors: set[int] = set()
        """Ranks that ddpnb has killed.  While one of them lives, the cluster is unusable."""
        self.generation = 0
        """The number of the current process group.  The first group has number 0."""
        self.is_aborted = False
        """True if the process group is aborted, so collectives cannot be called."""
        self.is_checked = False
        """True if torch compares the ranks' collectives at each call."""
        self.aborts: dict[int, Future[Any]] = {}
        """Maps each rank to a future that is done once the rank has aborted its process group."""
        self._client: EngineClient | None = None
        self._interrupts: list[Future[Any]] = []
        """The futures of interrupts that may not have reached the ranks yet."""
        self._states: dict[int, RankState] = {}
        self._starting: dict[int, Future[Any]] = {}
        """Maps each started rank that has not answered yet to a future with its process id."""
        self._lock = threading.Lock()
        """Protects ``_starting``: a background thread may restart ranks too."""

    @classmethod
    def start(
        cls,
        spec: ClusterSpec,
        progress: Callable[[str], None] = lambda _: None,
        start_processes: StartProcesses = LocalProcesses,
    ) -> "Cluster":
        """Start a cluster, and return it once every rank has finished an all-reduce.

        ``progress`` is called with a short description of each phase.  ``start_processes`` starts
        the processes on the hosts in ``spec``.

        Raises UserError if the hosts cannot run this cluster, or if a process failed.
        """
        home = working_folder()
        with noted_interrupts(), contextlib.ExitStack() as undo:
            cluster, folder = cls(spec, home), private_folder()
            undo.callback(remove_folder, folder)
            try:
                cluster.processes = start_processes(spec, folder, cluster.note_exit)
                undo.callback(cluster.stop)
                if cluster.folder != folder:  # the fork server was there already
                    remove_folder(folder)
                cluster._start_ranks(progress)
            except UserError:
                raise
            except Exception as error:  # such as TimeoutError, or too many open files
                why = getattr(error, "strerror", None) or error
                raise UserError(
                    f"The ranks could not start: {why}. Run %ddp_start to try again."
                ) from error
            undo.pop_all()
        return cluster

    # -- the ranks and their state ---------------------------------------------------

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.processes.server.folder

    @property
    def states(self) -> tuple[RankState, ...]:
        """The states of all ranks, in the order of the ranks."""
        return tuple(self._states[rank] for rank in sorted(self._states))

    @property
    def ranks(self) -> tuple[int, ...]:
        """All rank numbers."""
        return tuple(range(len(self._states)))

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks that are alive.  If the fork server has ended, no rank is alive."""
        if Service.FORK_SERVER in self.exits:
            return ()
        return tuple(rank for rank in self.ranks if rank not in self.exits)

    @property
    def ready(self) -> tuple[int, ...]:
        """The living ranks that can take calls at once."""
        starting = self.starting
        return tuple(rank for rank in self.living if rank not in starting)

    @property
    def dead(self) -> tuple[int, ...]:
        """The ranks that have ended."""
        return tuple(rank for rank in self.ranks if rank not in self.living)

    @property
    def busy(self) -> set[int]:
        """The ranks on which supervised calls run."""
        return {rank for call in self.supervised for rank in call.ranks}

    def require_idle(self, ranks: Collection[int]) -> None:
        """Raise UserError if a supervised call runs on one of the ranks."""
        if busy := self.busy & set(ranks):
            raise UserError(
                f"A cell is still running on {spoken_ranks(busy)}. Wait until it ends, or run "
                "%ddp_interrupt to stop it."
            )

    @property
    def is_local(self) -> bool:
        """True if the ranks run on the kernel's host and share the run folder with the kernel."""
        return not self.placement.hosts[0].name

    @property
    def spans_hosts(self) -> bool:
        """True if the ranks run on more than one host."""
        return len(self.placement.hosts) > 1

    @property
    def lost(self) -> str | None:
        """The reason why the whole cluster is unusable, or None."""
        for name in (Service.FORK_SERVER, Service.CONTROLLER):
            if (exit_ := self.exits.get(name)) is not None:
                return f"the {name} {exit_}"
        if not self.is_over and not (self.folder / SERVER_LOCK).exists():
            return f"its folder {self.folder} was removed or emptied"
        if late := self.survivors & set(self.living):
            return f"{say(late, 'does')} not end, although ddpnb has killed {them(late)}"
        return None

    @property
    def missing(self) -> tuple[str, ...]:
        """One sentence for each feature that is disabled because of a library or the system."""
        there = (each for state in self.states for each in state.missing)
        return tuple(dict.fromkeys((*missing_features(), *there)))

    @property
    def can_release(self) -> bool:
        """True if ddpnb can end waits in collectives without killing the ranks."""
        return all(state.can_be_released for state in self.states)

    # -- calls -----------------------------------------------------------------------

    def submit(self, request: Any, ranks: Sequence[int]) -> Call:
        """Start a call on some ranks and return at once.

        Raises UserError if one of the ranks has died, or if the cluster is unusable.
        """
        self.require(ranks)
        self._wait_until_ready(ranks)
        sent, self._interrupts = self._interrupts, []
        wait(sent, SIGNAL_SECONDS)  # a late interrupt would end the new call
        call = self.client.submit(replace(request, folder=str(self.work_folder)), ranks)
        for exit_ in list(self.exits.values()):  # a rank may have died since ``require``
            self.note_exit(exit_)
        return call

    def gather(
        self,
        request: Result,
        ranks: Sequence[int] | None = None,
        timeout: float = CALL_TIMEOUT_SECONDS,
    ) -> list[Result]:
        """Make a call on ``ranks`` (default: all ranks); return the results in the ranks' order."""
        chosen = self.ranks if ranks is None else ranks
        return self.submit(request, chosen).results(timeout)

    def require(self, ranks: Collection[int]) -> None:
        """Raise UserError unless all of ``ranks`` are alive."""
        if self.lost is not None:
            raise UserError(self.remedy())
        if dead := {rank: str(self.exits[rank]) for rank in ranks if rank in self.exits}:
            raise UserError(f"{to_sentence(deaths(dead))} {self.remedy(dead)}")

    def remedy(self, died: Collection[int] = ()) -> str:
        """Return the sentences that say how to continue now, after ranks have ``died``."""
        if self.lost is not None:
            return f"The cluster has ended: {self.lost}. Run %ddp_restart to start new ranks."
        if not self.dead:
            return f"ddpnb has restarted {them(died)} without variables."
        others = " The other ranks keep their variables." if self.living else ""
        return f"Run {restart_command(self.dead)} to restart {them(self.dead)}.{others}"

    def interrupt(self, ranks: Collection[int]) -> None:
        """Send SIGINT to ranks, to raise ``KeyboardInterrupt`` in a running cell."""
        self._interrupts += self.processes.signal(ranks, signal.SIGINT)

    def kill(self, ranks: Collection[int]) -> None:
        """Kill ranks."""
        self.processes.signal(ranks, signal.SIGKILL)

    def abort(self, ranks: Collection[int]) -> None:
        """Release ranks from the collectives that they wait in, and abort the process group."""
        self.is_aborted = True
        for rank in set(ranks) & set(self.living):
            neighbours = self.placement.ranks_of(self.placement.host_of[rank])
            peers = [self.states[each].pid for each in neighbours if each != rank]
            self.aborts[rank] = self.processes.command(rank, RankCommand.ABORT, peers)

    def restart_alone(self, rank: int) -> None:
        """Restart a dead rank without a process group, and return at once.

        Once the rank is no longer ``starting``, ``ensure_group`` can form a new group.
        """
        self.is_aborted = True
        self.survivors.discard(rank)
        self.aborts.pop(rank, None)
        self.start_rank(rank, generation=None)

    @property
    def starting(self) -> set[int]:
        """The living ranks that have been started and are not ready for calls yet."""
        with self._lock:
            num = len(self._starting)
            for engine, state in self.client.new_states(num).items() if num else ():
                started = self._starting.get(state.rank)
                if started is not None and started.result(CALL_TIMEOUT_SECONDS) == state.pid:
                    self.client.assign(state.rank, engine)
                    self._states[state.rank] = state
                    del self._starting[state.rank]
            return {rank for rank in self._starting if rank not in self.exits}

    def _wait_until_ready(self, ranks: Collection[int]) -> None:
        """Wait until none of the ranks is ``starting``.  Raise UserError if one of them dies."""

        def is_ready() -> bool:
            self.require(ranks)
            return not self.starting & set(ranks)

        try:
            if self._starting:
                self.client.wait_for(is_ready)
        except (TimeoutError, KeyboardInterrupt) as error:
            late = self.starting & set(ranks)
            again = f"Run {restart_command(late)} to restart {them(late)} again"
            advice = f"{again}, or %ddp_restart to restart all"
            text = to_sentence(f"{say(late, 'is')} still starting. {advice}")
            kind = Interrupted if isinstance(error, KeyboardInterrupt) else UserError
            raise kind(text) from None

    # -- starting and ending ---------------------------------------------------------

    def stop(self) -> None:
        """End every process of the cluster; may be called twice."""
        self.is_over = True
        client, self._client = self._client, None
        if client is not None:
            client.close(self.ranks, "was ended with the cluster")
        try:
            self.processes.stop()
        finally:
            remove_folder(self.folder)

    @property
    def client(self) -> "EngineClient":
        """The client that sends calls to the ranks; available once the controller is connected."""
        assert self._client is not None
        return self._client

    def start_rank(self, rank: int, *, generation: int | None) -> None:
        """Start a rank's process and return at once; forget the rank's earlier exit.

        ``generation`` is the number of the process group to join, or None to join no group.
        """
        self.processes.prepare(rank)  # if this fails, the rank stays dead
        settings = rank_settings(self.placement, rank, home=self.home, generation=generation)
        with self._lock:
            self.exits.pop(rank, None)
            self._starting[rank] = self.processes.link_of(rank).start_rank(rank, settings)

    def note_exit(self, exit_: Exit) -> None:
        """Record that a process has ended.  The link's reading thread calls this method."""
        self.exits.setdefault(exit_.member, exit_)
        if (client := self._client) is None:
            return
        lost = [exit_.member] if isinstance(exit_.member, int) else list(self.ranks)
        for rank in lost:
            client.lose(rank, str(exit_))

    def _require_started(self) -> None:
        """Raise UserError if a process of a new cluster has ended, with the reason."""
        prepared = self.processes.prepared
        is_up = Service.FORK_SERVER not in self.exits
        if is_up and prepared.done() and (cause := prepared.exception()):
            is_users = isinstance(cause, UserError)
            raise cause if is_users else UserError(f"The ranks could not be prepared: {cause}")
        if is_up and not self.folder.exists():
            raise UserError(f"The folder {self.folder} was removed. Run %ddp_start to try again.")
        if exits := list(self.exits.values()):
            first, member = exits[0], exits[0].member
            name = f"Rank {member}" if isinstance(member, int) else f"The {member}"
            was_killed = first.code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
            advice = "Run %ddp_start to try again."
            log = "" if was_killed else f"\n{first.last_words}"
            raise UserError(f"{name} {first} while starting. {advice}{log}")

    def _start_ranks(self, progress: Callable[[str], None]) -> None:
        from ddpnb.cluster.client import EngineClient  # noqa: PLC0415  takes 0.3 s

        self.placement = self.processes.place(progress)
        num_ranks = self.placement.num_ranks
        for rank in range(num_ranks):
            self.start_rank(rank, generation=self.generation)
        self._client = client = EngineClient(self.folder / "profile", self._require_started)

        def is_ready() -> bool:
            self._require_started()
            return self.processes.prepared.done() and not self.starting

        progress(f"{num_ranks} ranks are forming a process group")
        client.wait_for(is_ready)
