"""A cluster: how it starts, keeps one process group, and ends (kernel)."""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ddpnb.cluster.call import CALL_TIMEOUT_SECONDS, START_TIMEOUT_SECONDS, Call, Timeouts
from ddpnb.cluster.engines import Engines
from ddpnb.cluster.hosts import HostProcesses
from ddpnb.cluster.placement import (
    ClusterSpec,
    asks_for_gpus,
    common_imports,
    controller_arguments,
    place_ranks,
)
from ddpnb.cluster.processes import Processes, wait_for_file
from ddpnb.cluster.run_folder import private_folder
from ddpnb.protocol import calls
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import StaleVariable
from ddpnb.protocol.notation import format_ranks
from ddpnb.protocol.processes import (
    KERNEL_LOCK,
    RankCommand,
    hold,
    num_cores,
    working_folder,
)

FREE_SECONDS = 10.0
"""How long ranks may take to give up forming a group without one that has died."""
FREE_AGAIN_SECONDS = 0.5


@dataclass(kw_only=True, slots=True)
class GroupState:
    """The ranks' process group, as the kernel knows it."""

    generation: int = 0
    """How many groups there were before."""
    is_aborted: bool = False
    """Whether no collective can be called in it any more."""
    is_checked: bool = False
    """Whether torch compares the ranks' collectives at each call."""
    aborts: "dict[int, Future[Any]]" = field(default_factory=dict)
    """The last abort that each rank was sent; done when the rank has carried it out."""

    def wait_for_aborts(self, living: Callable[[], Collection[int]]) -> None:
        """Wait until every abort is done: a late one would end the next group's connections.

        Only ``living`` ranks are waited for.  Raises TimeoutError if an abort takes too long.
        """
        deadline = time.monotonic() + CALL_TIMEOUT_SECONDS
        aborts = dict(self.aborts)
        while pending := {rank for rank in living() if rank in aborts and not aborts[rank].done()}:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {format_ranks(pending)} does not leave its group")
            time.sleep(0.002)
        self.aborts.clear()


class Cluster(Engines):
    """A local cluster of ranks that form a process group; made by ``start``."""

    def __init__(self, spec: ClusterSpec, folder: Path, home: Path) -> None:
        super().__init__(folder, home)
        self._lock: TextIO | None = None
        """Held for as long as this kernel needs the folder."""
        self.spec = spec
        self.timeouts = Timeouts()
        """How calls are supervised; may be replaced at any time, as tests do."""
        self.began = time.time()
        self._group = GroupState()
        self.without_group = ""
        """A sentence on why no process group could be formed, if the last attempt had to fail."""

    @classmethod
    def start(
        cls, spec: ClusterSpec, progress: Callable[[str], None] = lambda _: None
    ) -> "Cluster":
        """Start the processes and return once every rank has finished an all-reduce.

        Args:
            spec: the user's choices.
            progress: called with a few words on each phase of the start.

        Raises:
            UserError: this host cannot run such a cluster.
            RuntimeError: a process failed; the message ends with its log.
        """
        placement = None if spec.is_remote or asks_for_gpus(spec) else place_ranks(spec, 0)
        home = working_folder()
        cluster = cls(spec, private_folder(), home)
        cluster._lock = hold(cluster.folder / KERNEL_LOCK)
        cluster.placement = placement
        if spec.is_remote:
            return cluster._start_on_hosts(progress)
        cluster.processes = Processes.start(
            folder=cluster.folder,
            controller_arguments=controller_arguments(cluster.profile),
            num_threads=placement.num_threads if placement else spec.num_threads or num_cores(),
            method=spec.method or ("fork" if sys.platform == "linux" else "spawn"),
            on_exit=cluster.note_exit,
            preload=common_imports(placement),
        )
        try:
            progress("importing torch")
            cluster._start_ranks(progress)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @property
    def generation(self) -> int:
        """The process group's number."""
        return self._group.generation

    def abort(self, ranks: Sequence[int]) -> None:
        """Free ranks from the collectives they wait in, which ends the process group."""
        self._group.is_aborted = True
        self.processes.list_connections()
        for rank in set(ranks) & set(self.living):
            self._group.aborts[rank] = self.processes.command(rank, RankCommand.ABORT)

    def ensure_group(self, *, is_checked: bool = False) -> dict[StaleVariable, list[int]]:
        """Form a new process group if the old one was aborted, or is of another kind.

        While a rank is dead, or hosts do not reach each other, no group is formed; the ranks go on
        without one.

        Args:
            is_checked: whether torch compares the ranks' collectives at each call.

        Returns:
            The variables that still refer to the old group, each with its ranks.

        Raises:
            UserError: a rank runs a cell, or the ranks could have formed one, and did not.
        """
        self.without_group = ""
        is_fit = not self._group.is_aborted and self._group.is_checked == is_checked
        if is_fit or self.living != self.ranks:
            return {}
        self.require_idle(self.ranks)
        if links := self.processes.unreachable():
            self.without_group = (
                f"There is no process group, for {links}; the first cell after that is mended "
                "forms one. Variables are kept."
            )
            return {}
        self._begin_generation()
        call = self.submit(calls.form_group(self.generation, is_checked), self.ranks)
        try:
            with self._freeing(call):
                stale = call.results()
        except (RuntimeError, TimeoutError) as error:
            if self.living != self.ranks:  # as if one had been dead before
                return {}
            raise UserError(
                f"The ranks formed no process group: {error}. The next cell tries again; "
                "%ddp_restart begins anew."
            ) from error
        self._note_formed(is_checked=is_checked)
        return _ranks_of(dict(zip(self.ranks, stale, strict=True)))

    def require_group(self) -> dict[StaleVariable, list[int]]:
        """Form a group like ``ensure_group``; a UserError says where hosts lack each other."""
        stale = self.ensure_group()
        if self.without_group:
            raise UserError(self.without_group)
        return stale

    def bring_back(self, ranks: Sequence[int]) -> dict[StaleVariable, list[int]]:
        """Start ranks anew in a new process group; the others keep their variables.

        Returns:
            The others' variables that still refer to the old group, each with its ranks.

        Raises:
            UserError: hosts do not reach each other, or another rank runs a cell; then no rank is
                ended.
        """
        others = [rank for rank in self.ranks if rank not in ranks]
        self.require_idle(others)
        if links := self.processes.unreachable():
            raise UserError(f"{links[0].upper()}{links[1:]}: no rank was restarted.")
        self.end_ranks(ranks)
        self._begin_generation()
        for rank in ranks:
            self.start_rank(rank, generation=self.generation)
        call = self.submit(calls.form_group(self.generation, False), others)
        with self._freeing(call):
            self.client.wait_for(len(ranks), self.raise_if_dead)
            stale = call.results()
        self.states = tuple(self.gather(calls.state()))
        self._note_formed(is_checked=False)
        return _ranks_of(dict(zip(others, stale, strict=True)))

    def restart_alone(self, rank: int) -> None:
        """Start a dead rank anew, in no group, and return at once; see ``has_restarted``.

        The next ``ensure_group`` forms a group of all ranks.
        """
        self._group.is_aborted = True
        self._group.aborts.pop(rank, None)
        self.start_rank(rank, generation=None)

    def has_restarted(self, rank: int) -> bool:
        """Return whether a rank that was restarted alone can be called."""
        if not (new := self.client.new_engines):
            return False
        try:
            answers = self.client.identify(new, lambda: self.require([rank]))
        except (RuntimeError, UserError):  # it has died again, which is in ``exits``
            return False
        states = {state.rank: state for state in answers}
        self.states = tuple(states.get(state.rank, state) for state in self.states)
        return True

    def stop(self) -> None:
        """End every process of the cluster; may be called twice."""
        self.disconnect("was ended with the cluster")
        self.processes.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _start_on_hosts(self, progress: Callable[[str], None]) -> "Cluster":
        try:
            self.processes = processes = HostProcesses.start_on_hosts(
                self.spec,
                folder=self.folder,
                home=self.home,
                on_exit=self.note_exit,
                progress=progress,
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._release()
            raise
        try:
            progress("checking the hosts")
            self.placement, self._master_port = processes.place(progress)
            wait_for_file(
                self.profile / "security/ipcontroller-engine.json",
                START_TIMEOUT_SECONDS,
                self.raise_if_dead,
            )
            processes.connect_engines()
            self._start_ranks(progress)
        except BaseException:
            self.stop()
            raise
        return self

    def _start_ranks(self, progress: Callable[[str], None]) -> None:
        if self.placement is None:
            gpus = self.processes.ready.result(START_TIMEOUT_SECONDS)
            self.placement = place_ranks(self.spec, len(gpus))
        ranks = range(self.placement.num_ranks)
        for rank in ranks:
            self.start_rank(rank, generation=self.generation)
        client = self.connect()
        self.processes.ready.result(START_TIMEOUT_SECONDS)
        progress(f"{len(ranks)} ranks form a process group")
        self.states = tuple(client.wait_for(len(ranks), self.raise_if_dead))

    def _begin_generation(self) -> None:
        """Number a new process group, unusable until all ranks have joined it."""
        self._group.wait_for_aborts(lambda: self.living)
        self._group.generation += 1
        self._group.is_aborted = True

    @contextlib.contextmanager
    def _freeing(self, call: Call) -> Iterator[None]:
        """Free the ranks that form a group, and wait for them, where another cannot."""
        try:
            yield
        except BaseException:
            deadline = time.monotonic() + FREE_SECONDS
            while call.running and time.monotonic() < deadline:
                self.abort(self.living)  # again: it may have come before the call itself
                wait_until = time.monotonic() + FREE_AGAIN_SECONDS
                while call.running and time.monotonic() < wait_until:
                    for _ in call.events(FREE_AGAIN_SECONDS):
                        pass
            raise

    def _note_formed(self, *, is_checked: bool) -> None:
        self._group.is_aborted, self._group.is_checked = False, is_checked


def _ranks_of(stale: Mapping[int, Sequence[StaleVariable]]) -> dict[StaleVariable, list[int]]:
    """Turn the stale variables of each rank into the ranks of each stale variable."""
    ranks: dict[StaleVariable, list[int]] = {}
    for rank, found in stale.items():
        for each in found:
            ranks.setdefault(each, []).append(rank)
    return ranks
