"""The cluster: starts, calls, restarts and ends the ranks.  Runs in the kernel."""

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpnb.cluster.call import CALL_TIMEOUT_SECONDS, START_TIMEOUT_SECONDS, Call, Timeouts
from ddpnb.cluster.link import Exit, Member, Service
from ddpnb.cluster.placement import ClusterSpec, Placement, rank_settings
from ddpnb.cluster.processes import LocalProcesses, Processes, StartProcesses, wait_until
from ddpnb.cluster.wording import remedy
from ddpnb.compat.probe import missing_features
from ddpnb.protocol.calls import Result, calls
from ddpnb.protocol.cell_messages import StaleVariable
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.protocol.processes import RankCommand, private_folder, working_folder

if TYPE_CHECKING:
    from ddpnb.cluster.client import EngineClient

SIGNAL_SECONDS = 1.0
"""Maximum time that a new call waits until earlier interrupts have been sent."""
FREE_SECONDS = 10.0
"""Maximum time to wait until ranks stop forming a group, for example because a rank has died."""
FREE_AGAIN_SECONDS = 0.5


class Cluster:
    """Ranks that form a process group, on one or several hosts.  ``start`` creates a cluster."""

    processes: Processes
    placement: Placement

    def __init__(self, spec: ClusterSpec, folder: Path, home: Path) -> None:
        self.spec = spec
        self.folder = folder
        self.profile = folder / "profile"
        self.home = home
        """The working folder in which cells start, on every rank."""
        self.work_folder = home
        """The notebook's working folder.  The ranks change to this folder before the next call."""
        self.timeouts = Timeouts()
        """The timeouts of supervised calls.  Tests may replace the timeouts at any time."""
        self.states: tuple[RankState, ...] = ()
        self.exits: dict[Member, Exit] = {}
        """The exit of each process that ended unexpectedly."""
        self.is_over = False
        """True if this kernel has ended the cluster."""
        self.supervised: list[Call] = []
        """Calls in progress that a ``Watch`` supervises."""
        self.generation = 0
        """The number of the current process group.  The first group has number 0."""
        self._is_aborted = False
        """True if the process group is aborted, so collectives cannot be called."""
        self._is_checked = False
        """True if torch compares the ranks' collectives at each call."""
        self._aborts: dict[int, Future[Any]] = {}
        """Maps each rank to a future that is done once the rank has aborted its process group."""
        self._client: EngineClient | None = None
        self._interrupts: list[Future[Any]] = []
        """The futures of interrupts that may not have reached the ranks yet."""

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

        Raises:
            UserError: the hosts cannot run this cluster.
            RuntimeError: a process failed.  The error's message ends with the log of the process.
        """
        home = working_folder()
        cluster = cls(spec, private_folder(), home)
        try:
            cluster.processes = start_processes(spec, cluster.folder, cluster.note_exit)
        except BaseException:
            shutil.rmtree(cluster.folder, ignore_errors=True)
            raise
        try:
            cluster._start_ranks(progress)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    # -- the ranks and their state ---------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """All rank numbers."""
        return tuple(range(len(self.states)))

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks that are alive.  If the fork server has ended, no rank is alive."""
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
        sent, self._interrupts = self._interrupts, []
        wait(sent, SIGNAL_SECONDS)  # a late interrupt would end the new call
        return self.client.submit(replace(request, folder=str(self.work_folder)), ranks)

    def gather(
        self,
        request: Result,
        ranks: Sequence[int] | None = None,
        timeout: float = CALL_TIMEOUT_SECONDS,
    ) -> list[Result]:
        """Make a call on ``ranks`` (default: all ranks); return the results in the ranks' order."""
        chosen = self.ranks if ranks is None else ranks
        return self.submit(request, chosen).results(timeout)

    def require(self, ranks: Sequence[int]) -> None:
        """Raise UserError unless all of ``ranks`` are alive."""
        if (lost := self.lost) is not None:
            raise UserError(f"The cluster has ended: {lost}. Run %ddp_restart to start new ranks.")
        for rank in ranks:
            if (exit_ := self.exits.get(rank)) is not None:
                raise UserError(f"Rank {rank} {exit_}. {remedy(self.dead)}")

    def interrupt(self, ranks: Collection[int]) -> None:
        """Send SIGINT to ranks, to raise ``KeyboardInterrupt`` in a running cell."""
        self._interrupts += self.processes.signal(ranks, signal.SIGINT)

    def kill(self, ranks: Collection[int]) -> None:
        """Kill ranks."""
        self.processes.signal(ranks, signal.SIGKILL)

    # -- the process group -----------------------------------------------------------

    def abort(self, ranks: Collection[int]) -> None:
        """Release ranks from the collectives that they wait in, and abort the process group."""
        self._is_aborted = True
        for rank in set(ranks) & set(self.living):
            neighbours = self.placement.ranks_of(self.placement.host_of[rank])
            peers = [self.states[each].pid for each in neighbours if each != rank]
            self._aborts[rank] = self.processes.command(rank, RankCommand.ABORT, peers)

    def ensure_group(self, *, is_checked: bool = False) -> dict[StaleVariable, list[int]]:
        """Form a new process group unless the old group is usable and has the same ``is_checked``.

        While a rank is dead, no group is formed, and the ranks continue without a group.  If
        ``is_checked``, torch compares the ranks' collectives at each call.

        Returns:
            Each variable that still refers to the old group, with the ranks that have the variable.

        Raises:
            UserError: a rank runs a cell, or no group could be formed although all ranks are alive.
        """
        is_fit = not self._is_aborted and self._is_checked == is_checked
        if is_fit or self.living != self.ranks:
            return {}
        self.require_idle(self.ranks)
        self._begin_generation()
        call = self.submit(calls.form_group(self.generation, is_checked), self.ranks)
        try:
            found = call.results()
        except BaseException as error:
            self._free(call)
            if not isinstance(error, RuntimeError | TimeoutError):
                raise
            if self.living != self.ranks:  # a rank died: continue without a group
                return {}
            raise UserError(
                f"The ranks could not form a process group: {error}. Run the cell again to retry, "
                "or run %ddp_restart to start new ranks."
            ) from error
        self._is_aborted, self._is_checked = False, is_checked
        stale: dict[StaleVariable, list[int]] = {}
        for rank, variables in zip(self.ranks, found, strict=True):
            for each in variables:
                stale.setdefault(each, []).append(rank)
        return stale

    def bring_back(self, ranks: Sequence[int]) -> dict[StaleVariable, list[int]]:
        """Restart ranks in a new process group; the other ranks keep their variables.

        Returns the result of ``ensure_group``.  If another rank runs a cell, this method raises
        UserError and does not end any rank.
        """
        self.require_idle(set(self.ranks) - set(ranks))
        self.kill(ranks)
        ended = f"{spoken_ranks(ranks)} did not end"
        wait_until(lambda: not set(ranks) & set(self.living), CALL_TIMEOUT_SECONDS, ended)
        for rank in ranks:
            self.restart_alone(rank)
        self._note(self.client.wait_for(len(ranks), self.raise_if_dead))
        return self.ensure_group()

    def restart_alone(self, rank: int) -> None:
        """Restart a dead rank without a process group, and return at once.

        Once ``has_restarted`` returns True, ``ensure_group`` can form a new group.
        """
        self._is_aborted = True
        self._aborts.pop(rank, None)
        self.start_rank(rank, generation=None)

    def has_restarted(self, rank: int) -> bool:
        """Return True if a rank that ``restart_alone`` has restarted is ready for calls."""
        if not (new := self.client.new_engines):
            return False
        try:
            self._note(self.client.identify(new, lambda: self.require([rank])))
        except (RuntimeError, UserError):  # dead again; its exit is in `exits`
            return False
        return True

    def _note(self, new: Sequence[RankState]) -> None:
        states = {state.rank: state for state in new}
        self.states = tuple(states.get(state.rank, state) for state in self.states)

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
            shutil.rmtree(self.folder, ignore_errors=True)

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
        self.exits.pop(rank, None)
        settings = rank_settings(self.placement, rank, home=self.home, generation=generation)
        self.processes.link_of(rank).start_rank(rank, settings)

    def note_exit(self, exit_: Exit) -> None:
        """Record that a process has ended.  The link's reading thread calls this method."""
        self.exits[exit_.member] = exit_
        if (client := self._client) is None:
            return
        lost = [exit_.member] if isinstance(exit_.member, int) else list(self.ranks)
        for rank in lost:
            client.lose(rank, str(exit_))

    def raise_if_dead(self) -> None:
        """Raise RuntimeError with the end of a process's log if this process exited at startup."""
        prepared = self.processes.prepared
        if prepared.done() and (cause := prepared.exception()):
            is_users = isinstance(cause, UserError)
            raise cause if is_users else RuntimeError(f"The ranks could not be prepared: {cause}")
        if exits := list(self.exits.values()):
            first, member = exits[0], exits[0].member
            name = f"Rank {member}" if isinstance(member, int) else f"The {member}"
            raise RuntimeError(f"{name} {first} while starting.\n{first.last_words}")

    def _start_ranks(self, progress: Callable[[str], None]) -> None:
        from ddpnb.cluster.client import EngineClient  # noqa: PLC0415  takes 0.3 s

        self.placement = self.processes.place(progress)
        num_ranks = self.placement.num_ranks
        for rank in range(num_ranks):
            self.start_rank(rank, generation=self.generation)
        self._client = client = EngineClient(self.profile, self.raise_if_dead)
        self.processes.prepared.result(START_TIMEOUT_SECONDS)
        progress(f"{num_ranks} ranks are forming a process group")
        self.states = tuple(client.wait_for(num_ranks, self.raise_if_dead))

    def _begin_generation(self) -> None:
        """Choose the number of a new process group.  The group is unusable until all ranks join.

        First, wait for all aborts, because a late abort would close the new group's connections.
        """
        aborts = self._aborts
        wait_until(
            lambda: all(aborts[rank].done() for rank in self.living if rank in aborts),
            CALL_TIMEOUT_SECONDS,
            "a rank did not leave its group",
        )
        aborts.clear()
        self.generation += 1
        self._is_aborted = True

    def _free(self, call: Call) -> None:
        """Release the ranks that wait to form a group, and wait until all ranks return."""
        deadline = time.monotonic() + FREE_SECONDS
        while call.running and time.monotonic() < deadline:
            self.abort(self.living)  # repeated, because an abort may arrive before the call
            with contextlib.suppress(RuntimeError, TimeoutError):
                call.results(FREE_AGAIN_SECONDS)
