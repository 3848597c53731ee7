"""The cluster of this kernel: start, attach, restart, status, stop (kernel)."""

import atexit
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.placement import ClusterSpec
from ddpnb.cluster.run_folder import find
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import format_ranks, parse_ranks
from ddpnb.reports.listing import ranks_table
from ddpnb.reports.table import Table
from ddpnb.session.background import Jobs, orphaned_call
from ddpnb.session.cells import warn_stale
from ddpnb.session.status import describe_ranks, describe_running, status_table, with_notes

OnProgress = Callable[[str], None]
"""Is called with a line of text at each stage of a start."""

NOT_STARTED = "No cluster is running: start one with %ddp_start (in Python: ddpnb.start())."


class ClusterSession:
    """Starts and ends the cluster of this kernel; there is one at a time."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._jobs = Jobs()

    @property
    def num_ranks(self) -> int | None:
        """The number of ranks; None if no cluster is running."""
        cluster = self._cluster
        return None if cluster is None or cluster.lost else len(cluster.ranks)

    def start(
        self,
        spec: ClusterSpec,
        *,
        method: str | None = None,
        progress: OnProgress = lambda _: None,
    ) -> Table:
        """Start the ranks unless a cluster is running; return the table of ranks."""
        if self._cluster is not None and self._cluster.lost is None:
            return self._keep_running(spec)
        if self._cluster is None:
            self._jobs.refuse_if_training()  # the panel may be starting a cluster
        self.stop()
        cluster = self._launch(spec, method, progress)
        return with_notes(ranks_table(cluster.states), cluster)

    def attach(self, spec: ClusterSpec, name: str = "", *, method: str | None = None) -> Table:
        """Take over ranks that have outlived their kernel; return the table of ranks.

        Args:
            spec: how long they outlive this kernel, where 0 changes nothing; no other field.
            name: the cluster's name; may be empty if there is one only.
            method: must be None; the method cannot change.

        Raises:
            UserError: there is no such cluster, or more than one.
        """
        if method is not None or replace(spec, detach_seconds=0.0) != ClusterSpec():
            raise UserError(
                "--attach takes a cluster as it was started: leave out the other options, "
                "%ddp_restart -n changes the number of ranks afterwards."
            )
        if self._cluster is not None and self._cluster.lost is None:
            raise UserError(
                "A cluster is already running here: %ddp_stop ends it, then --attach takes another."
            )
        self.stop()
        self._cluster = cluster = Cluster.attach(find(name, Path.cwd()))
        atexit.register(self._at_exit)
        if spec.detach_seconds:
            cluster.allow_detach(spec.detach_seconds)
        if (cell := orphaned_call(cluster)) is not None:
            self._jobs.add(cell)
        return self.status()

    def stop(self) -> bool:
        """End every process of the cluster; return whether there was one."""
        self._jobs.stop()
        atexit.unregister(self._at_exit)
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()
        return cluster is not None

    def restart(
        self,
        num_ranks: int | None = None,
        *,
        ranks: str | None = None,
        progress: OnProgress = lambda _: None,
    ) -> Table:
        """End ranks and start new ones; their variables are lost.

        Args:
            num_ranks: the number of ranks from now on; by default as before.
            ranks: only these are replaced; the others keep their variables.
            progress: receives what happens.
        """
        if ranks is not None:
            return self._replace(ranks, progress)
        cluster = self._require(allow_lost=True)
        spec = cluster.spec if num_ranks is None else replace(cluster.spec, num_ranks=num_ranks)
        self.stop()
        return self.start(spec, method=cluster.method, progress=progress)

    def why(self) -> str:
        """Say where every rank is at this moment, with stacks."""
        return describe_ranks(self._require())

    def status(self) -> Table:
        """Return the table of what every rank is doing."""
        cluster = self._require(allow_lost=True)
        table = status_table(cluster, self._jobs.running, self._jobs.notes())
        return with_notes(table, cluster)

    def interrupt(self) -> str:
        """Stop what runs on the ranks in the background; return a sentence about it."""
        if self._jobs.comparison is None:
            self._require()
        return self._jobs.interrupt()

    # -- private ---------------------------------------------------------------------

    def _launch(
        self,
        spec: ClusterSpec,
        method: str | None = None,
        progress: OnProgress = lambda _: None,
    ) -> Cluster:
        self._cluster = cluster = Cluster.start(spec, method=method, progress=progress)
        atexit.register(self._at_exit)
        return cluster

    def _replace(self, ranks: str, progress: OnProgress) -> Table:
        cluster = self._require_free()
        chosen = parse_ranks(ranks, len(cluster.ranks))
        if dead := set(cluster.dead) - set(chosen):
            both = format_ranks(dead | set(chosen))
            raise UserError(f"Rank {format_ranks(dead)} is dead too: use --ranks {both}.")
        progress(f"rank {format_ranks(chosen)} joins the group")
        warn_stale(cluster.bring_back(chosen))
        return ranks_table(cluster.states)

    def _require(self, *, allow_lost: bool = False) -> Cluster:
        if self._cluster is None:
            raise UserError(NOT_STARTED)
        if not allow_lost:
            self._cluster.require(())
        return self._cluster

    def _require_free(self) -> Cluster:
        """Return the cluster; refuse while a comparison is training."""
        self._jobs.refuse_if_training()
        return self._require()

    def _require_idle(self) -> Cluster:
        """Return the cluster; refuse while a comparison or a cell is running."""
        cluster = self._require_free()
        self._jobs.refuse_if_cells_run()
        return cluster

    def _at_exit(self) -> None:
        """End every process of the cluster, or detach from it, when the kernel ends."""
        cluster = self._cluster
        if cluster is not None and cluster.spec.detach_seconds and cluster.lost is None:
            cluster.detach()
        else:
            self.stop()

    def _keep_running(self, spec: ClusterSpec) -> Table:
        cluster = self._require()
        print(describe_running(cluster, spec.num_ranks))
        if spec.detach_seconds:
            cluster.allow_detach(spec.detach_seconds)
        return with_notes(ranks_table(cluster.states), cluster)
