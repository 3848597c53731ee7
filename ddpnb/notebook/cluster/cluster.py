"""What is a running cluster?  Its processes, its client, its ranks.  (Notebook side.)"""

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ddpnb.errors import UserError
from ddpnb.notebook.cluster.call import Call
from ddpnb.notebook.cluster.exits import Exit, describe_exit, spoken
from ddpnb.notebook.cluster.folder import private_folder, write_owners
from ddpnb.notebook.cluster.linger import DOOR, Saved, is_held, read
from ddpnb.notebook.cluster.plan import (
    ClusterSpec,
    Plan,
    free_port,
    make_plan,
    may_have_gpus,
    num_cores,
    torchrun_environment,
)
from ddpnb.notebook.cluster.processes import HeldError, Processes, wait_for_file
from ddpnb.notebook.ranks import format_ranks
from ddpnb.wire import OnRank, RankState

if TYPE_CHECKING:
    from ddpnb.notebook.cluster.dispatch import Dispatcher

START_TIMEOUT_SECONDS = 120.0
CALL_TIMEOUT_SECONDS = 30.0

CRASH = "Fatal Python error"
"""How faulthandler begins what it writes."""
BEFORE_CRASH = 3
"""Lines of a log shown before that."""

CONTROLLER = (
    "--ip=127.0.0.1",
    "--location=127.0.0.1",
    "--log-level=ERROR",
    "--IPController.enable_curve=True",
    "--IPController.use_threads=True",  # two processes in place of nine
    "--IPController.db_class=ipyparallel.controller.dictdb.NoDB",  # else it keeps every result
    "--HeartMonitor.period=100",  # ms; ranks are registered on a heartbeat
    "--HeartMonitor.max_heartmonitor_misses=864000",  # a day: ends are seen by the fork server
)
ENGINE = (
    "--log-level=ERROR",
    "--IPEngine.enable_nanny=False",  # the fork server sees to signals and deaths
    "--IPEngine.max_heartbeat_misses=0",
)


class Cluster:
    """A local cluster of ranks that have formed a process group.

    ``Cluster.start`` returns one, and ``Cluster.attach`` one that another kernel has
    started; ``stop`` ends it and may be called twice.
    """

    processes: Processes

    def __init__(self, spec: ClusterSpec, method: str, folder: Path) -> None:
        self.spec = spec
        self.method = method
        self.plan: Plan | None = None
        self.folder = folder
        self.profile = self.folder / "profile"
        self.home = Path.cwd()
        """Where cells run at first, on every rank."""
        self.began = time.time()
        self.generation = 0
        self._group_is_cut = False
        self._group_is_checked = False
        self._master_port = free_port()
        self.states: tuple[RankState, ...] = ()
        self.exits: dict[str, Exit] = {}
        """How processes ended that nobody asked to end: by rank number or name."""
        self._known_engines: set[int] = set()
        self._exit_lock = threading.Lock()
        self._dispatcher: Dispatcher | None = None
        self.is_over = False
        """Whether this kernel has done with it: ended it, or left it to another."""
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
        plan = None if asks_for_gpus(spec) else make_plan(spec, 0)
        method = method or ("fork" if sys.platform == "linux" else "spawn")
        cluster = cls(spec, method, private_folder())
        cluster.plan = plan
        cluster.processes = Processes.start(
            folder=cluster.folder,
            controller_arguments=[f"--profile-dir={cluster.profile}", *CONTROLLER],
            num_threads=plan.num_threads if plan else spec.num_threads or num_cores(),
            method=method,
            on_exit=cluster._note_exit,
        )
        try:
            cluster._start_ranks(progress)
            cluster.linger(spec.linger_seconds)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @classmethod
    def attach(cls, saved: Saved) -> "Cluster":
        """Take over ranks that have outlived their kernel, with all their variables.

        Args:
            saved: the cluster, as ``linger.find`` returns it.

        Raises:
            UserError: where another kernel holds it, or it has just ended.
        """
        cluster = cls(saved.spec, saved.method, saved.folder)
        try:
            cluster.processes = Processes.attach(
                saved.folder / DOOR, saved.server, cluster._note_exit
            )
        except HeldError:
            raise is_held(saved.name, None) from None
        except (OSError, EOFError) as error:
            raise UserError(
                f"The cluster {saved.name} has just ended: start anew with %ddp_start."
            ) from error
        try:
            saved = read(saved.folder)  # nobody else changes it from now on
            cluster.spec, cluster.plan, cluster.states = saved.spec, saved.plan, saved.states
            cluster.home, cluster.began = saved.home, saved.began
            cluster._master_port = saved.master_port
            cluster.generation = saved.generation
            cluster._group_is_cut = saved.group_is_cut
            cluster._group_is_checked = saved.group_is_checked
            cluster._dispatcher = cluster._connect()
            cluster._dispatcher.engine_of.update(saved.engine_of)
            cluster._known_engines = set(cluster._dispatcher.client.ids)
            write_owners(cluster.folder, [os.getpid(), cluster.processes.pid])
        except BaseException:
            cluster.detach()
            raise
        return cluster

    @property
    def ranks(self) -> tuple[int, ...]:
        """All rank numbers."""
        return tuple(range(len(self.states)))

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks whose process runs; they end with the fork server."""
        if "fork server" in self.exits:
            return ()
        return tuple(rank for rank in self.ranks if str(rank) not in self.exits)

    @property
    def lost(self) -> str | None:
        """Why the cluster as a whole cannot be used any more, if so."""
        for name in ("fork server", "controller"):
            if (exit_ := self.exits.get(name)) is not None:
                return f"the {name} {describe_exit(exit_)}"
        return None

    def submit(self, function: OnRank, *arguments: object, ranks: Sequence[int]) -> Call:
        """Start a call on some ranks and return at once.

        Raises:
            UserError: where one of the ranks has died, or the cluster has.
        """
        self.require(ranks)
        assert self._dispatcher is not None
        return self._dispatcher.submit(function, *arguments, ranks=ranks)

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
        assert self._dispatcher is not None
        return self._dispatcher.gather(function, *arguments, ranks=chosen, timeout=timeout)

    def require(self, ranks: Sequence[int]) -> None:
        """Raise a UserError unless all of ``ranks`` live."""
        if (lost := self.lost) is not None:
            raise UserError(f"The cluster is gone: {lost}. Start anew with %ddp_restart.")
        for rank in ranks:
            if (exit_ := self.exits.get(str(rank))) is not None:
                raise UserError(
                    f"Rank {rank} {describe_exit(exit_)}: %ddp_restart --ranks {rank} brings it "
                    "back, the other ranks keep their variables."
                )

    def cut(self, ranks: Sequence[int]) -> None:
        """Free ranks from the collectives they wait in; the group is dead afterwards."""
        self._group_is_cut = True
        self._save()
        for rank in set(ranks) & set(self.living):
            self.processes.order(rank, "cut")

    def interrupt(self, ranks: Sequence[int]) -> None:
        """Send ranks the signal that raises ``KeyboardInterrupt`` in a running cell."""
        self.processes.signal(sorted(set(ranks) & set(self.living)), signal.SIGINT)

    def ensure_group(self, *, is_checked: bool = False) -> dict[str, list[int]]:
        """Have all ranks form a new process group if the old one was cut, or is of another kind.

        Where a rank is dead there is none to form, and the living do without one.

        Args:
            is_checked: whether the group compares collectives over the ranks at each call.

        Returns:
            The variables that are tied to the old group, each with its ranks.
        """
        is_fit = not self._group_is_cut and self._group_is_checked == is_checked
        if is_fit or self.living != self.ranks:
            return {}
        self._begin_generation()
        stale = self.gather(OnRank("rejoin"), self.generation, is_checked)
        self._group_is_cut, self._group_is_checked = False, is_checked
        self._save()
        return by_name(dict(zip(self.ranks, stale, strict=True)))

    def bring_back(self, ranks: Sequence[int]) -> dict[str, list[int]]:
        """Start ranks anew, in their places in the group; the others keep their variables.

        Returns:
            The variables of the others that are tied to the old group, with their ranks.
        """
        assert self.plan is not None
        assert self._dispatcher is not None
        self._end(ranks)
        self._begin_generation()
        for rank in ranks:
            del self.exits[str(rank)]
            self._start_rank(self.plan, rank)
        others = [rank for rank in self.ranks if rank not in ranks]
        call = self.submit(OnRank("rejoin"), self.generation, False, ranks=others)
        self._wait_for_engines(set(ranks))
        stale = self._dispatcher.collect(call, CALL_TIMEOUT_SECONDS)
        self.states = tuple(self.gather(OnRank("state")))
        self._group_is_cut = self._group_is_checked = False
        self._save()
        return by_name(dict(zip(others, stale, strict=True)))

    def kill(self, ranks: Sequence[int]) -> None:
        """End ranks at once."""
        self.processes.signal(sorted(set(ranks) & set(self.living)), signal.SIGKILL)

    def start_again(self, rank: int) -> None:
        """Start a dead rank anew, in no group, and return at once; ``has_come`` tells the rest.

        The next ``ensure_group`` forms a group of all.
        """
        assert self.plan is not None
        self._group_is_cut = True
        del self.exits[str(rank)]
        self._start_rank(self.plan, rank, is_grouped=False)

    def has_come(self, rank: int) -> bool:
        """Tell whether a rank that was started again can be called."""
        assert self._dispatcher is not None
        new = set(self._dispatcher.client.ids) - self._known_engines
        if not new:
            return False
        try:
            self._welcome(new)
            states = {state.rank: state for state in self.gather(OnRank("state"), ranks=[rank])}
        except (RuntimeError, UserError):  # it has died again, which is told as its exit
            return False
        self.states = tuple(states.get(state.rank, state) for state in self.states)
        return True

    def _end(self, ranks: Sequence[int]) -> None:
        """Kill those of the ranks that live, and wait until they have ended."""
        self.processes.signal(sorted(set(ranks) & set(self.living)), signal.SIGKILL)
        deadline = time.monotonic() + CALL_TIMEOUT_SECONDS
        while set(ranks) & set(self.living):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {format_ranks(ranks)} did not end")
            time.sleep(0.002)

    def linger(self, seconds: float) -> None:
        """Have the ranks outlive this kernel that long, so that another can attach to them."""
        self.spec = replace(self.spec, linger_seconds=seconds)
        self._save()
        if seconds:
            self.processes.linger(seconds, self.folder / DOOR)

    def detach(self) -> None:
        """Leave the ranks to another kernel; may be called twice, ``stop`` does nothing then."""
        if self._is_left:
            return
        self._is_left = True
        self._disconnect("was left to another kernel")
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it has ended
            write_owners(self.folder, [self.processes.pid])
        self.processes.detach()

    def stop(self) -> None:
        """End every process of the cluster; may be called twice."""
        if self._is_left:
            return
        self._disconnect("was ended with the cluster")
        self.processes.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _disconnect(self, why: str) -> None:
        """Reach no rank any more; calls in progress are told ``why``."""
        self.is_over = True
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            for rank in self.ranks:
                dispatcher.lose(rank, why)
            dispatcher.client.close()

    def _begin_generation(self) -> None:
        """Count up the process groups; the new one is no better than cut until it is formed."""
        self.generation += 1
        self._group_is_cut = True
        self._save()

    def _save(self) -> None:
        """Write what another kernel must know, where one may come."""
        if not self.spec.linger_seconds or self._dispatcher is None:
            return
        assert self.plan is not None
        server = self.processes.pid
        # Cells in the background cut the group in threads of their own.  Where the fork
        # server has ended, so has the folder.
        with self._save_lock, contextlib.suppress(OSError, psutil.NoSuchProcess):
            Saved(
                folder=self.folder,
                home=self.home,
                began=self.began,
                server=(server, psutil.Process(server).create_time()),
                spec=self.spec,
                method=self.method,
                plan=self.plan,
                master_port=self._master_port,
                states=self.states,
                engine_of={r: self._dispatcher.engine_of.get(r, r) for r in self.ranks},
                generation=self.generation,
                group_is_cut=self._group_is_cut,
                group_is_checked=self._group_is_checked,
            ).write()

    def _start_ranks(self, progress: Callable[[str], None]) -> None:
        progress("importing torch")
        if self.plan is None:
            gpus = self.processes.ready.result(START_TIMEOUT_SECONDS)
            self.plan = make_plan(self.spec, len(gpus))
        plan = self.plan
        for rank in range(plan.num_ranks):
            self._start_rank(plan, rank)
        self._dispatcher = self._connect()
        self.processes.ready.result(START_TIMEOUT_SECONDS)
        write_owners(self.folder, [os.getpid(), self.processes.pid])
        progress(f"{plan.num_ranks} ranks form a process group")
        self._wait_for_engines(set(range(plan.num_ranks)))
        self.states = tuple(
            self._dispatcher.gather(
                OnRank("state"),
                ranks=range(plan.num_ranks),
                timeout=CALL_TIMEOUT_SECONDS,
            )
        )

    def _start_rank(self, plan: Plan, rank: int, *, is_grouped: bool = True) -> None:
        self.processes.start_rank(
            rank,
            environment=torchrun_environment(plan, rank, self._master_port),
            settings={
                "device": plan.devices[rank],
                "shares_device": plan.shares_device(rank),
                "backend": plan.backend,
                "num_threads": plan.num_threads,
                "generation": self.generation if is_grouped else None,
                "cells_folder": str(self.home),
                "engine_arguments": [
                    f"--profile-dir={self.profile}",
                    f"--IPEngine.url_file={self.profile / 'security/ipcontroller-engine.json'}",
                    f"--IPEngine.id={rank}",
                    *ENGINE,
                ],
            },
        )

    def _connect(self) -> "Dispatcher":
        import ipyparallel as ipp  # noqa: PLC0415  costs 0.3 s: while the fork server works

        from ddpnb.notebook.cluster.dispatch import Dispatcher  # noqa: PLC0415  the same

        path = self.profile / "security/ipcontroller-client.json"
        wait_for_file(path, START_TIMEOUT_SECONDS, self._raise_if_dead)
        return Dispatcher(ipp.Client(str(path)))

    def _wait_for_engines(self, ranks: set[int]) -> None:
        """Wait until the engines of ranks are there, and note which is whose.

        A rank asks for its own number as its engine's id; where a dead one has it
        still, it gets another.
        """
        assert self._dispatcher is not None
        client, deadline = self._dispatcher.client, time.monotonic() + START_TIMEOUT_SECONDS
        while len(new := set(client.ids) - self._known_engines) < len(ranks):
            self._raise_if_dead()
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {len(new)} of {len(ranks)} ranks came")
            time.sleep(0.002)
        if new == ranks:
            self._known_engines |= new
            self._dispatcher.engine_of.update((rank, rank) for rank in ranks)
            return
        self._welcome(new)

    def _welcome(self, engines: set[int]) -> None:
        """Note which engine is whose, by asking."""
        assert self._dispatcher is not None
        self._known_engines |= engines
        for engine in engines:
            self._dispatcher.engine_of[-1] = engine  # no rank's number: ask whose it is
            (state,) = self._dispatcher.gather(
                OnRank("state"), ranks=[-1], timeout=CALL_TIMEOUT_SECONDS
            )
            self._dispatcher.engine_of[state.rank] = engine

    def _raise_if_dead(self) -> None:
        with self._exit_lock:
            exits = list(self.exits.values())
        if self.processes.ready.done() and (cause := self.processes.ready.exception()):
            raise RuntimeError(f"The ranks could not be prepared: {cause}")
        for exit_ in exits:
            raise RuntimeError(
                f"{spoken(exit_.name)} {describe_exit(exit_)} while starting.\n"
                f"{self.log_tail(exit_.name)}"
            )

    def log_tail(self, name: str, num_lines: int = 15) -> str:
        """Return the last lines that a process wrote to its log, a crash from its beginning.

        With a few lines before a crash: native code often says there why it gives up.
        """
        path = self.folder / ("controller.log" if name == "controller" else f"rank-{name}.log")
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        crash = next((n for n, line in enumerate(lines) if line.startswith(CRASH)), -num_lines)
        crash = max(0, crash - BEFORE_CRASH) if crash >= 0 else crash
        return "\n".join(lines[crash:][:num_lines])

    def _note_exit(self, exit_: Exit) -> None:
        """Remember, from the listening thread, that a process ended."""
        with self._exit_lock:
            self.exits[exit_.name] = exit_
        if self._dispatcher is None:
            return
        lost = [int(exit_.name)] if exit_.name.isdigit() else list(self.ranks)
        for rank in lost:
            self._dispatcher.lose(rank, describe_exit(exit_))


def asks_for_gpus(spec: ClusterSpec) -> bool:
    """Tell whether the fork server must say which GPUs there are before there is a plan."""
    return spec.device == "cuda" or (spec.device == "auto" and may_have_gpus())


def by_name(names: Mapping[int, Sequence[str]]) -> dict[str, list[int]]:
    """Turn the names on each rank into the ranks of each name."""
    ranks: dict[str, list[int]] = {}
    for rank, found in names.items():
        for name in found:
            ranks.setdefault(name, []).append(rank)
    return ranks
