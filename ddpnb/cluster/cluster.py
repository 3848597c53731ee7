"""How does a cluster begin, keep one process group, and end?  (Notebook side.)"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from ddpnb.cluster.detach import DOOR, ClusterRecord, is_held, read
from ddpnb.cluster.engines import (
    CALL_TIMEOUT_SECONDS,
    START_TIMEOUT_SECONDS,
    EngineRegistry,
    Engines,
)
from ddpnb.cluster.group_state import GroupState, ranks_of
from ddpnb.cluster.placement import (
    ClusterSpec,
    asks_for_gpus,
    controller_arguments,
    num_cores,
    place_ranks,
)
from ddpnb.cluster.processes import HeldError, Processes
from ddpnb.cluster.run_folder import private_folder, write_owners
from ddpnb.cluster.timeouts import Timeouts
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import StaleVariable
from ddpnb.protocol.processes import RankCommand, process_id
from ddpnb.protocol.remote_call import OnRank


class Cluster(Engines):
    """A local cluster of ranks that have formed a process group.

    ``Cluster.start`` returns one, and ``Cluster.attach`` one that another kernel has
    started; ``stop`` ends it and may be called twice.
    """

    def __init__(self, spec: ClusterSpec, method: str, folder: Path) -> None:
        super().__init__(folder)
        self.spec = spec
        self.method = method
        self.timeouts = Timeouts()
        """How calls are supervised; may be replaced between two calls, as tests do."""
        self.began = time.time()
        self._group = GroupState()
        self._is_left = False
        self._save_lock = threading.Lock()

    @classmethod
    def start(
        cls,
        spec: ClusterSpec,
        *,
        method: str | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> "Cluster":
        """Start the processes and return once every rank has finished an all-reduce.

        Args:
            spec: what the user asked for.
            method: ``"fork"`` or ``"spawn"``; by default fork on Linux, spawn elsewhere.
            progress: told in a few words what is being waited for.

        Raises:
            UserError: where the wish cannot be met on this host.
            RuntimeError: where a process failed; carries the end of its log.
        """
        placement = None if asks_for_gpus(spec) else place_ranks(spec, 0)
        method = method or ("fork" if sys.platform == "linux" else "spawn")
        cluster = cls(spec, method, private_folder())
        cluster.placement = placement
        cluster.processes = Processes.start(
            folder=cluster.folder,
            controller_arguments=controller_arguments(cluster.profile),
            num_threads=placement.num_threads if placement else spec.num_threads or num_cores(),
            method=method,
            on_exit=cluster.note_exit,
        )
        try:
            cluster._start_ranks(progress)
            cluster.allow_detach(spec.detach_seconds)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @classmethod
    def attach(cls, record: ClusterRecord) -> "Cluster":
        """Take over ranks that have outlived their kernel, with all their variables.

        Args:
            record: the cluster, as ``detach.find`` returns it.

        Raises:
            UserError: where another kernel holds it, or it has just ended.
        """
        cluster = cls(record.spec, record.method, record.folder)
        try:
            cluster.processes = Processes.attach(
                record.folder / DOOR, record.server, cluster.note_exit
            )
        except HeldError:
            raise is_held(record.name, None) from None
        except (OSError, EOFError) as error:
            raise UserError(
                f"The cluster {record.name} has just ended: start anew with %ddp_start."
            ) from error
        try:
            record = read(record.folder)  # nobody else changes it from now on
            cluster.spec, cluster.placement, cluster.states = (
                record.spec,
                record.placement,
                record.states,
            )
            cluster.home, cluster.began = record.home, record.began
            cluster._master_port = record.master_port
            cluster._group = GroupState(
                generation=record.generation,
                is_aborted=record.group_is_aborted,
                is_checked=record.group_is_checked,
            )
            cluster._registry = EngineRegistry.connect(cluster.profile, cluster.raise_if_dead)
            cluster._registry.take_over(record.engine_of)
            write_owners(cluster.folder, [os.getpid(), cluster.processes.pid])
        except BaseException:
            cluster.detach()
            raise
        return cluster

    @property
    def generation(self) -> int:
        """Of the process group."""
        return self._group.generation

    def abort(self, ranks: Sequence[int]) -> None:
        """Free ranks from the collectives they wait in; the group is dead afterwards."""
        self._group.is_aborted = True
        self._save()
        for rank in set(ranks) & set(self.living):
            self._group.aborts[rank] = self.processes.command(rank, RankCommand.ABORT)

    def ensure_group(self, *, is_checked: bool = False) -> dict[StaleVariable, list[int]]:
        """Have all ranks form a new process group if the old one was cut, or is of another kind.

        Where a rank is dead there is none to form, and the living do without one.

        Args:
            is_checked: whether the group compares collectives over the ranks at each call.

        Returns:
            The variables that are tied to the old group, each with its ranks.
        """
        if self._group.is_fit(is_checked=is_checked) or self.living != self.ranks:
            return {}
        self._begin_generation()
        stale = self.gather(OnRank("rejoin"), self.generation, is_checked)
        self._group.note_formed(is_checked=is_checked)
        self._save()
        return ranks_of(dict(zip(self.ranks, stale, strict=True)))

    def bring_back(self, ranks: Sequence[int]) -> dict[StaleVariable, list[int]]:
        """Start ranks anew, in their places in the group; the others keep their variables.

        Returns:
            The variables of the others that are tied to the old group, with their ranks.
        """
        self.end_ranks(ranks)
        self._begin_generation()
        for rank in ranks:
            self.start_rank(rank, generation=self.generation)
        others = [rank for rank in self.ranks if rank not in ranks]
        call = self.submit(OnRank("rejoin"), self.generation, False, ranks=others)
        self.registry.wait_for(set(ranks), self.raise_if_dead)
        stale = self.registry.dispatcher.collect(call, CALL_TIMEOUT_SECONDS)
        self.states = tuple(self.gather(OnRank("state")))
        self._group.note_formed(is_checked=False)
        self._save()
        return ranks_of(dict(zip(others, stale, strict=True)))

    def start_again(self, rank: int) -> None:
        """Start a dead rank anew, in no group, and return at once; ``has_come`` tells the rest.

        The next ``ensure_group`` forms a group of all.
        """
        self._group.is_aborted = True
        self._group.aborts.pop(rank, None)
        self.start_rank(rank, generation=None)

    def has_come(self, rank: int) -> bool:
        """Tell whether a rank that was started again can be called."""
        if not (new := self.registry.new):
            return False
        try:
            self.registry.welcome(new)
            states = {state.rank: state for state in self.gather(OnRank("state"), ranks=[rank])}
        except (RuntimeError, UserError):  # it has died again, which is told as its exit
            return False
        self.states = tuple(states.get(state.rank, state) for state in self.states)
        return True

    def allow_detach(self, seconds: float) -> None:
        """Have the ranks outlive this kernel that long, so that another can attach to them."""
        self.spec = replace(self.spec, detach_seconds=seconds)
        self._save()
        if seconds:
            self.processes.allow_detach(seconds, self.folder / DOOR)

    def detach(self) -> None:
        """Leave the ranks to another kernel; may be called twice, ``stop`` does nothing then."""
        if self._is_left:
            return
        self._is_left = True
        self.disconnect("was left to another kernel")
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it has ended
            write_owners(self.folder, [self.processes.pid])
        self.processes.detach()

    def stop(self) -> None:
        """End every process of the cluster; may be called twice."""
        if self._is_left:
            return
        self.disconnect("was ended with the cluster")
        self.processes.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _begin_generation(self) -> None:
        """Count up the process groups; the new one is no better than cut until it is formed."""
        self._group.wait_for_aborts(lambda: self.living, CALL_TIMEOUT_SECONDS)
        self._group.begin()
        self._save()

    def _save(self) -> None:
        """Write what another kernel must know, where one may come."""
        if not self.spec.detach_seconds or (registry := self._registry) is None:
            return
        assert self.placement is not None
        server = self.processes.pid
        # Cells in the background cut the group in threads of their own.  Where the fork
        # server has ended, so has the folder.
        with self._save_lock, contextlib.suppress(OSError, psutil.NoSuchProcess):
            ClusterRecord(
                folder=self.folder,
                home=self.home,
                began=self.began,
                server=process_id(server),
                spec=self.spec,
                method=self.method,
                placement=self.placement,
                master_port=self._master_port,
                states=self.states,
                engine_of=registry.of(self.ranks),
                generation=self.generation,
                group_is_aborted=self._group.is_aborted,
                group_is_checked=self._group.is_checked,
            ).write()

    def _start_ranks(self, progress: Callable[[str], None]) -> None:
        progress("importing torch")
        if self.placement is None:
            gpus = self.processes.ready.result(START_TIMEOUT_SECONDS)
            self.placement = place_ranks(self.spec, len(gpus))
        ranks = range(self.placement.num_ranks)
        for rank in ranks:
            self.start_rank(rank, generation=self.generation)
        self._registry = EngineRegistry.connect(self.profile, self.raise_if_dead)
        self.processes.ready.result(START_TIMEOUT_SECONDS)
        write_owners(self.folder, [os.getpid(), self.processes.pid])
        progress(f"{len(ranks)} ranks form a process group")
        self._registry.wait_for(set(ranks), self.raise_if_dead)
        self.states = tuple(
            self._registry.dispatcher.gather(
                OnRank("state"), ranks=ranks, timeout=CALL_TIMEOUT_SECONDS
            )
        )
