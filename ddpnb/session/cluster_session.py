"""How does this kernel come to a cluster, and part with it?  (Notebook side.)"""

import atexit
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.detach import find
from ddpnb.cluster.placement import ClusterSpec
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.rank_sets import format_ranks, parse_ranks
from ddpnb.reports.listing import ranks_table
from ddpnb.reports.table import Table
from ddpnb.session.background import Jobs, orphaned_call
from ddpnb.session.cells import tell_stale
from ddpnb.session.status import status_table, tell_running, tell_where, with_notes

NOT_STARTED = "No cluster is running: start one with %ddp_start (in Python: ddpnb.start())."


class ClusterSession:
    """The cluster of this kernel, from its start to its end, one at a time."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._jobs = Jobs()

    @property
    def num_ranks(self) -> int | None:
        """How many ranks run; None where no cluster does."""
        cluster = self._cluster
        return None if cluster is None or cluster.lost else len(cluster.ranks)

    def start(
        self,
        spec: ClusterSpec,
        *,
        method: str | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> Table:
        """Start the ranks, or say that they run; return the table of ranks."""
        if self._cluster is not None and self._cluster.lost is None:
            return self._running(spec)
        if self._cluster is None:
            self._jobs.refuse_if_training()  # the panel may be starting one
        self.stop()
        cluster = self._launch(spec, method, progress)
        return with_notes(ranks_table(cluster.states), cluster)

    def attach(self, spec: ClusterSpec, name: str = "", *, method: str | None = None) -> Table:
        """Take over ranks that have outlived their kernel; return their states.

        Args:
            spec: nothing but how long they outlive this kernel; 0 leaves it as it was.
            name: of the cluster; empty where there is no doubt.
            method: nothing; it is as it was.

        Raises:
            UserError: where there is none to take over, or it is not clear which.
        """
        if method is not None or replace(spec, detach_seconds=0.0) != ClusterSpec():
            raise UserError(
                "--attach takes a cluster as it was started: leave out the other options, "
                "%ddp_restart -n changes the number of ranks afterwards."
            )
        if self._cluster is not None and self._cluster.lost is None:
            raise UserError(
                "A cluster is running here already: %ddp_stop ends it, then --attach takes another."
            )
        self.stop()
        self._cluster = cluster = Cluster.attach(find(name, Path.cwd()))
        atexit.register(self.leave)
        if spec.detach_seconds:
            cluster.allow_detach(spec.detach_seconds)
        if (cell := orphaned_call(cluster)) is not None:
            self._jobs.add(cell)
        return self.status()

    def leave(self) -> None:
        """At the kernel's end: end every process of the cluster, unless it is to linger."""
        cluster = self._cluster
        if cluster is not None and cluster.spec.detach_seconds and cluster.lost is None:
            cluster.detach()
        else:
            self.stop()

    def stop(self) -> bool:
        """End every process of the cluster; return whether there was one."""
        self._jobs.stop()
        atexit.unregister(self.leave)
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()
        return cluster is not None

    def restart(
        self, num_ranks: int | None = None, *, progress: Callable[[str], None] = lambda _: None
    ) -> Table:
        """End the ranks and start as many anew, or ``num_ranks``; variables are lost."""
        cluster = self._require(lost_is_fine=True)
        spec = cluster.spec if num_ranks is None else replace(cluster.spec, num_ranks=num_ranks)
        self.stop()
        return self.start(spec, method=cluster.method, progress=progress)

    def bring_back(self, ranks: str, *, progress: Callable[[str], None] = lambda _: None) -> Table:
        """Start some ranks anew in their places; the other ranks keep their variables."""
        cluster = self._require_free()
        chosen = parse_ranks(ranks, len(cluster.ranks))
        dead = set(cluster.dead) - set(chosen)
        if dead:
            everyone = format_ranks(dead | set(chosen))
            raise UserError(f"Rank {format_ranks(dead)} is dead too: use --ranks {everyone}.")
        progress(f"rank {format_ranks(chosen)} joins the group")
        tell_stale(cluster.bring_back(chosen))
        return ranks_table(cluster.states)

    def why(self) -> str:
        """Tell where every rank stands right now, with stacks."""
        return tell_where(self._require())

    def status(self) -> Table:
        """Return the state of every rank."""
        cluster = self._require(lost_is_fine=True)
        table = status_table(cluster, self._jobs.running, self._jobs.notes())
        return with_notes(table, cluster)

    def interrupt(self) -> str:
        """Stop what runs on the ranks in the background, and say what it was."""
        if self._jobs.comparison is None:
            self._require()
        return self._jobs.interrupt()

    # -- within ----------------------------------------------------------------------

    def _launch(
        self,
        spec: ClusterSpec,
        method: str | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> Cluster:
        self._cluster = cluster = Cluster.start(spec, method=method, progress=progress)
        atexit.register(self.leave)
        return cluster

    def _require(self, *, lost_is_fine: bool = False) -> Cluster:
        if self._cluster is None:
            raise UserError(NOT_STARTED)
        if not lost_is_fine:
            self._cluster.require(())
        return self._cluster

    def _require_free(self) -> Cluster:
        """Return the cluster, unless a comparison trains on it."""
        self._jobs.refuse_if_training()
        return self._require()

    def _require_idle(self) -> Cluster:
        """Return the cluster, unless a comparison or a cell runs on it."""
        cluster = self._require_free()
        self._jobs.refuse_if_cells_run()
        return cluster

    def _running(self, spec: ClusterSpec) -> Table:
        cluster = self._require()
        print(tell_running(cluster, spec.num_ranks))
        if spec.detach_seconds:
            cluster.allow_detach(spec.detach_seconds)
        return with_notes(ranks_table(cluster.states), cluster)
