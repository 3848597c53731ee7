"""What does this kernel hold?  One cluster and one store.  (Notebook side.)"""

import atexit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from IPython.core.getipython import get_ipython

from ddpnb.errors import UserError
from ddpnb.notebook.background import RunningComparison
from ddpnb.notebook.cells import RunningCell, tell_stale
from ddpnb.notebook.cluster.cluster import Cluster
from ddpnb.notebook.cluster.linger import find, name_of
from ddpnb.notebook.cluster.plan import ClusterSpec
from ddpnb.notebook.compare import ComparisonSpec, Training, prepare
from ddpnb.notebook.left import LeftCell, left_cell
from ddpnb.notebook.ranks import format_ranks, parse_ranks
from ddpnb.notebook.record.folder import runs_folder
from ddpnb.notebook.record.names import all_names
from ddpnb.notebook.record.recorder import Recorder, new_id
from ddpnb.notebook.record.search import Search
from ddpnb.notebook.record.store import Store
from ddpnb.notebook.show.listing import ranks_table, runs_table
from ddpnb.notebook.show.live import Live
from ddpnb.notebook.show.result import ComparisonResult
from ddpnb.notebook.show.table import Table
from ddpnb.notebook.show.view import EVERYTHING, View
from ddpnb.notebook.status import Running, status_table, tell_where
from ddpnb.notebook.values import pack, unpack
from ddpnb.wire import CellSpec, Failure, OnRank

NOT_STARTED = "No cluster is running: start one with %ddp_start (in Python: ddpnb.start())."


class Session:
    """All that ddpnb does in this kernel; each magic is one call of a method here."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._store: Store | None = None
        self._background: list[RunningCell | LeftCell] = []
        self._comparison: RunningComparison | None = None

    # -- the cluster -----------------------------------------------------------------

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
            self._refuse_if_training()  # the panel may be starting one
        self.stop()
        cluster = self._launch(spec, method, progress)
        return with_linger(ranks_table(cluster.states), cluster)

    def attach(self, spec: ClusterSpec, name: str = "", *, method: str | None = None) -> Table:
        """Take over ranks that have outlived their kernel; return their states.

        Args:
            spec: nothing but how long they outlive this kernel; 0 leaves it as it was.
            name: of the cluster; empty where there is no doubt.
            method: nothing; it is as it was.

        Raises:
            UserError: where there is none to take over, or it is not clear which.
        """
        if method is not None or replace(spec, linger_seconds=0.0) != ClusterSpec():
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
        if spec.linger_seconds:
            cluster.linger(spec.linger_seconds)
        if (cell := left_cell(cluster)) is not None:
            self._background.append(cell)
        return self.status()

    def leave(self) -> None:
        """At the kernel's end: end every process of the cluster, unless it is to linger."""
        cluster = self._cluster
        if cluster is not None and cluster.spec.linger_seconds and cluster.lost is None:
            cluster.detach()
        else:
            self.stop()

    def stop(self) -> bool:
        """End every process of the cluster; return whether there was one."""
        if (comparison := self.comparison) is not None:
            comparison.stop()
        atexit.unregister(self.leave)
        cluster, self._cluster = self._cluster, None
        self._background.clear()
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
        dead = set(cluster.ranks) - set(cluster.living) - set(chosen)
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
        cluster, comparison = self._require(lost_is_fine=True), self.comparison
        running: list[Running] = [*self._background]
        notes = []
        if comparison is not None:
            running.append(comparison)
            told = comparison.progress() or "it is being checked"
            notes.append(f"a comparison trains: {told}")
        return with_linger(status_table(cluster, running, notes), cluster)

    def interrupt(self) -> None:
        """Stop what runs on the ranks in the background: cells, a comparison, or left cells."""
        if self.comparison is not None:
            return self.comparison.interrupt()
        self._require()
        for cell in self._background:
            if not cell.done:
                cell.interrupt()

    # -- cells -----------------------------------------------------------------------

    def run_cell(
        self,
        source: str,
        *,
        ranks: str | None = None,
        wait: bool = True,
        name: str = "",
        timeout: float | None = None,
        check: bool = False,
    ) -> RunningCell | None:
        """Run a cell on ranks; see ``ddpnb.run_cell``."""
        cluster = self._require_free()
        chosen = parse_ranks(ranks, len(cluster.ranks))
        if timeout is not None and timeout <= 0:
            raise UserError(f"--timeout must be greater than 0 seconds, not {timeout:g}.")
        cluster.require(chosen)
        spec = CellSpec(
            source=source,
            execution_count=this_cell_number(),
            run_id=new_id() if name else "",
        )
        recorder = self._record_cell(name, spec) if name else None
        cell = RunningCell(
            cluster, spec, chosen, recorder=recorder, timeout=timeout, is_checked=check
        )
        if wait:
            cell.run()
            return None
        self._background = [other for other in self._background if not other.done] + [cell]
        cell.run_in_background()
        return cell

    def push(self, variables: Mapping[str, object], ranks: str | None = None) -> None:
        """Put variables into the namespaces of ranks."""
        chosen = parse_ranks(ranks, len(self._require_free().ranks))
        names = ", ".join(variables)
        try:
            packed = pack(variables)
        except Exception as error:
            raise UserError(f"{names} cannot be sent to the ranks: {error}.") from error
        for failure in self._gather(OnRank("push"), packed, ranks=chosen):
            if failure is not None:
                told = f"{failure.name}: {failure.text}"
                raise UserError(f"{names} cannot be read on rank {failure.rank}: {told}.")

    def pull(self, expression: str, ranks: str | None = None) -> Any:
        """Return the value of an expression: a dict by rank, or one value for one rank named."""
        chosen = parse_ranks(ranks, len(self._require_free().ranks))
        found = self._gather(OnRank("pull"), expression, ranks=chosen)
        for value in found:
            if isinstance(value, Failure):
                told = f"{value.name}: {value.text}"
                raise UserError(f"Rank {value.rank} cannot give {expression}: {told}.")
        try:
            values = [unpack(value) for value in found]
        except Exception as error:
            raise UserError(f"{expression} cannot be read in the notebook: {error}.") from error
        is_single = ranks is not None and len(chosen) == 1
        return values[0] if is_single else dict(zip(chosen, values, strict=True))

    # -- comparisons -----------------------------------------------------------------

    @property
    def comparison(self) -> RunningComparison | None:
        """The comparison that trains in the background, if one does."""
        running = self._comparison
        return None if running is None or running.done else running

    def compare(
        self, spec: ComparisonSpec, *, wait: bool = True
    ) -> ComparisonResult | RunningComparison:
        """Train strategies one after the other, drawn live; see ``ddpnb.compare``."""
        training = prepare(self._require_idle(), self.store, spec)
        if wait:
            return training.run()
        training.live.update(training.recorder.comparison)  # here and now: under this cell
        return self._begin(RunningComparison(lambda: training, training.cluster.ranks))

    def compare_in_background(
        self,
        spec: ComparisonSpec,
        *,
        cluster: ClusterSpec,
        shown_by: Live,
        ended: Callable[[RunningComparison], None],
    ) -> RunningComparison:
        """Start the ranks if none run, check and train: all of it in the background.

        Args:
            spec: what is compared.
            cluster: what is started where no cluster runs.
            shown_by: shows it.
            ended: called, in another thread, once all is over.
        """
        if self._cluster is not None:
            self._require_idle()

        def ready() -> Training:
            if self._cluster is None:
                self._launch(cluster)
            return prepare(self._require(), self.store, spec, shown_by)

        ranks = () if self._cluster is None else self._cluster.ranks
        return self._begin(RunningComparison(ready, ranks, ended=ended))

    @property
    def num_ranks(self) -> int | None:
        """How many ranks run; None where no cluster does."""
        cluster = self._cluster
        return None if cluster is None or cluster.lost else len(cluster.ranks)

    def runs(self, search: Search) -> Table:
        """Return the table of those stored runs that are asked for."""
        return runs_table(search.among(self.store.list()))

    def load(self, names: Sequence[str], view: View = EVERYTHING) -> ComparisonResult:
        """Return stored runs as one comparison."""
        if not names:
            raise UserError("Name the runs to draw, as %ddp_runs lists them.")
        return ComparisonResult(self.store.load(*names), view)

    def names(self) -> tuple[str, ...]:
        """Return every name that ``load`` takes."""
        return all_names(self.store.list())

    def pairs(self) -> tuple[str, ...]:
        """Return the name of every strategy of every stored comparison, newest first."""
        newest_first = sorted(self.store.list(), key=lambda run: -run.created)
        return tuple(dict.fromkeys(f"{run.comparison}/{run.name}" for run in newest_first))

    @property
    def store(self) -> Store:
        """The runs of the project that the notebook lies in."""
        if self._store is None:
            self._store = Store(runs_folder())
        return self._store

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
        self._refuse_if_training()
        return self._require()

    def _refuse_if_training(self) -> None:
        if self.comparison is not None:
            raise UserError(
                "A comparison trains on the ranks: %ddp_interrupt stops it, "
                "%ddp_status tells how far it is."
            )

    def _require_idle(self) -> Cluster:
        """Return the cluster, unless a comparison or a cell runs on it."""
        cluster = self._require_free()
        if busy := [cell for cell in self._background if not cell.done]:
            raise UserError(
                f"A cell still runs on rank {format_ranks(busy[0].ranks)}: wait for it, "
                "or stop it with %ddp_interrupt."
            )
        return cluster

    def _begin(self, comparison: RunningComparison) -> RunningComparison:
        self._comparison = comparison
        comparison.begin()
        return comparison

    def _gather(self, function: OnRank, *arguments: object, ranks: Sequence[int]) -> list[Any]:
        try:
            return self._require().gather(function, *arguments, ranks=ranks)
        except TimeoutError as error:
            raise UserError(
                f"There was {error}: a cell may still run there; %ddp_why tells where it is, "
                "%ddp_interrupt stops it."
            ) from error

    def _record_cell(self, name: str, spec: CellSpec) -> Recorder:
        recorder = Recorder(
            self.store,
            name=name,
            task="cell",
            source=spec.source,
            specs=(),
            ranks=self._require().states,
        )
        recorder.begin(spec.run_id, name)
        return recorder

    def _running(self, spec: ClusterSpec) -> Table:
        cluster = self._require()
        dead = sorted(set(cluster.ranks) - set(cluster.living))
        if dead:
            print(
                f"A cluster is running already, but rank {format_ranks(dead)} of it is dead: "
                "%ddp_restart brings the ranks back."
            )
        elif spec.num_ranks not in (None, len(cluster.ranks)):
            print(
                f"A cluster of {len(cluster.ranks)} ranks is running already: "
                f"%ddp_restart -n {spec.num_ranks} changes that."
            )
        else:
            ranks = format_ranks(cluster.ranks)
            print(f"The cluster is running already, with ranks {ranks}: it is used as it is.")
        if spec.linger_seconds:
            cluster.linger(spec.linger_seconds)
        return with_linger(ranks_table(cluster.states), cluster)


def with_linger(table: Table, cluster: Cluster) -> Table:
    """Return a table that tells, too, where the cluster outlives the kernel."""
    if not cluster.spec.linger_seconds or cluster.lost is not None:
        return table
    note = (
        f"outlives the kernel by {cluster.spec.linger_seconds:g} s: "
        f"%ddp_start --attach finds it again ({name_of(cluster.folder)})"
    )
    return replace(table, notes=(*table.notes, note))


@cache
def this_session() -> Session:
    """Return the session of this kernel: the one that magics and Python twins share."""
    return Session()


def this_cell_number() -> int:
    """Return the ``n`` of the notebook cell ``In [n]`` that runs now."""
    shell = get_ipython()
    return 0 if shell is None else shell.execution_count - 1  # counted up before it runs
