"""The ranks of a cluster: how they start, are called, keep one process group, and end (kernel)."""

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
from ddpnb.protocol import calls
from ddpnb.protocol.calls import Request, Result
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState, StaleVariable
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.protocol.processes import RankCommand, private_folder, working_folder

if TYPE_CHECKING:
    from ddpnb.cluster.client import EngineClient

SIGNAL_SECONDS = 1.0
"""How long a call waits until earlier interrupts have been sent."""
FREE_SECONDS = 10.0
"""How long ranks may take to give up forming a group without one that has died."""
FREE_AGAIN_SECONDS = 0.5


class Cluster:
    """Ranks that form a process group, on one host or several; made by ``start``."""

    processes: Processes
    placement: Placement

    def __init__(self, spec: ClusterSpec, folder: Path, home: Path) -> None:
        self.spec = spec
        self.folder = folder
        self.profile = folder / "profile"
        self.home = home
        """The working folder in which cells start, on every rank."""
        self.work_folder = home
        """The notebook's working folder now, to which ranks change with the next call."""
        self.timeouts = Timeouts()
        """How calls are supervised; may be replaced at any time, as tests do."""
        self.states: tuple[RankState, ...] = ()
        self.exits: dict[Member, Exit] = {}
        """Processes that ended without being asked to."""
        self.is_over = False
        """Whether this kernel has ended the cluster."""
        self.supervised: list[Call] = []
        """Calls in progress for which a ``Watch`` waits."""
        self.generation = 0
        """How many process groups there were before this one."""
        self._is_aborted = False
        """Whether no collective can be called in the process group any more."""
        self._is_checked = False
        """Whether torch compares the ranks' collectives at each call."""
        self._aborts: dict[int, Future[Any]] = {}
        """The last abort that each rank was sent; done when the rank has carried it out."""
        self._client: EngineClient | None = None
        self._interrupts: list[Future[Any]] = []
        """Interrupts that may be on their way to the ranks."""

    @classmethod
    def start(
        cls,
        spec: ClusterSpec,
        progress: Callable[[str], None] = lambda _: None,
        start_processes: StartProcesses = LocalProcesses,
    ) -> "Cluster":
        """Start the processes and return once every rank has finished an all-reduce.

        ``progress`` is called with a few words on each phase; ``start_processes`` starts them on
        the hosts that the spec names.

        Raises:
            UserError: the hosts cannot run such a cluster.
            RuntimeError: a process failed; the message ends with its log.
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

    # -- which ranks there are, and how they are -------------------------------------

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
        return not self.placement.hosts[0].name

    @property
    def spans_hosts(self) -> bool:
        """Whether there are ranks on more than one host."""
        return len(self.placement.hosts) > 1

    @property
    def lost(self) -> str | None:
        """Why the cluster as a whole is unusable, if it is."""
        for name in (Service.FORK_SERVER, Service.CONTROLLER):
            if (exit_ := self.exits.get(name)) is not None:
                return f"the {name} {exit_}"
        return None

    @property
    def missing(self) -> tuple[str, ...]:
        """A sentence for each feature that is off because a library is of another version."""
        there = (each for state in self.states for each in state.missing)
        return tuple(dict.fromkeys((*missing_features(), *there)))

    # -- calls -----------------------------------------------------------------------

    def submit(self, request: Request[Any], ranks: Sequence[int]) -> Call:
        """Start a call on some ranks and return at once.

        Raises a UserError if one of the ranks has died, or the whole cluster.
        """
        self.require(ranks)
        sent, self._interrupts = self._interrupts, []
        wait(sent, SIGNAL_SECONDS)  # a late one would end the call that begins now
        return self.client.submit(replace(request, folder=str(self.work_folder)), ranks)

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
                raise UserError(f"Rank {rank} {exit_}: {remedy(self.dead)}.")

    def interrupt(self, ranks: Collection[int]) -> None:
        """Send ranks SIGINT, which raises ``KeyboardInterrupt`` in a running cell."""
        self._interrupts += self.processes.signal(ranks, signal.SIGINT)

    def kill(self, ranks: Collection[int]) -> None:
        """Kill ranks."""
        self.processes.signal(ranks, signal.SIGKILL)

    # -- the process group -----------------------------------------------------------

    def abort(self, ranks: Collection[int]) -> None:
        """Free ranks from the collectives they wait in, which ends the process group."""
        self._is_aborted = True
        for rank in set(ranks) & set(self.living):
            neighbours = self.placement.ranks_of(self.placement.host_of[rank])
            peers = [self.states[each].pid for each in neighbours if each != rank]
            self._aborts[rank] = self.processes.command(rank, RankCommand.ABORT, peers)

    def ensure_group(self, *, is_checked: bool = False) -> dict[StaleVariable, list[int]]:
        """Form a new process group if the old one was aborted, or is of another kind.

        While a rank is dead, no group is formed; the ranks go on without one.  In one that
        ``is_checked`` torch compares the ranks' collectives at each call.

        Returns:
            The variables that still refer to the old group, each with its ranks.

        Raises:
            UserError: a rank runs a cell, or the ranks could have formed one, and did not.
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
            if self.living != self.ranks:  # as if one had been dead before
                return {}
            raise UserError(
                f"The ranks formed no process group: {error}. The next cell tries again; "
                "%ddp_restart begins anew."
            ) from error
        self._is_aborted, self._is_checked = False, is_checked
        stale: dict[StaleVariable, list[int]] = {}
        for rank, variables in zip(self.ranks, found, strict=True):
            for each in variables:
                stale.setdefault(each, []).append(rank)
        return stale

    def bring_back(self, ranks: Sequence[int]) -> dict[StaleVariable, list[int]]:
        """Start ranks anew in a new process group; the others keep their variables.

        Returns what ``ensure_group`` does.  Raises a UserError, and ends no rank, if another one
        runs a cell.
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
        """Start a dead rank anew, in no group, and return at once; see ``has_restarted``.

        The next ``ensure_group`` forms a group of all ranks.
        """
        self._is_aborted = True
        self._aborts.pop(rank, None)
        self.start_rank(rank, generation=None)

    def has_restarted(self, rank: int) -> bool:
        """Return whether a rank that was restarted alone can be called."""
        if not (new := self.client.new_engines):
            return False
        try:
            self._note(self.client.identify(new, lambda: self.require([rank])))
        except (RuntimeError, UserError):  # it has died again, which is in ``exits``
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
        """Sends calls to the ranks, once the controller has been reached."""
        assert self._client is not None
        return self._client

    def start_rank(self, rank: int, *, generation: int | None) -> None:
        """Start a rank's process and return at once; its earlier exit is forgotten.

        ``generation`` is that of the process group to join; None: join none.
        """
        self.processes.prepare(rank)  # where it fails, the rank is dead
        self.exits.pop(rank, None)
        settings = rank_settings(self.placement, rank, home=self.home, generation=generation)
        self.processes.link_of(rank).start_rank(rank, settings)

    def note_exit(self, exit_: Exit) -> None:
        """Note, from the listening thread, that a process has ended."""
        self.exits[exit_.member] = exit_
        if (client := self._client) is None:
            return
        lost = [exit_.member] if isinstance(exit_.member, int) else list(self.ranks)
        for rank in lost:
            client.lose(rank, str(exit_))

    def raise_if_dead(self) -> None:
        """Raise a RuntimeError, with the end of the log, if a process ended while starting."""
        prepared = self.processes.prepared
        if prepared.done() and (cause := prepared.exception()):
            raise RuntimeError(f"The ranks could not be prepared: {cause}")
        if exits := list(self.exits.values()):
            first, member = exits[0], exits[0].member
            name = f"Rank {member}" if isinstance(member, int) else f"The {member}"
            raise RuntimeError(f"{name} {first} while starting.\n{first.last_words}")

    def _start_ranks(self, progress: Callable[[str], None]) -> None:
        from ddpnb.cluster.client import EngineClient  # noqa: PLC0415  takes 0.3 s: see there

        self.placement = self.processes.place(progress)
        num_ranks = self.placement.num_ranks
        for rank in range(num_ranks):
            self.start_rank(rank, generation=self.generation)
        self._client = client = EngineClient(self.profile, self.raise_if_dead)
        self.processes.prepared.result(START_TIMEOUT_SECONDS)
        progress(f"{num_ranks} ranks form a process group")
        self.states = tuple(client.wait_for(num_ranks, self.raise_if_dead))

    def _begin_generation(self) -> None:
        """Number a new process group, unusable until all ranks have joined it.

        Every abort must be done: a late one would end the next group's connections.
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
        """Free the ranks that form a group, and wait for them, where another cannot."""
        deadline = time.monotonic() + FREE_SECONDS
        while call.running and time.monotonic() < deadline:
            self.abort(self.living)  # again: it may have come before the call itself
            with contextlib.suppress(RuntimeError, TimeoutError):
                call.results(FREE_AGAIN_SECONDS)
