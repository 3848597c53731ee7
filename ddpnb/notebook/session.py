"""What does this kernel hold?  One cluster and one store.  (Notebook side.)"""

import atexit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from IPython.core.getipython import get_ipython

from ddpnb.errors import UserError
from ddpnb.notebook.cells import RunningCell, tell_stale
from ddpnb.notebook.cluster.cluster import Cluster
from ddpnb.notebook.cluster.plan import ClusterSpec
from ddpnb.notebook.compare import ComparisonSpec, compare
from ddpnb.notebook.ranks import format_ranks, parse_ranks
from ddpnb.notebook.record.folder import runs_folder
from ddpnb.notebook.record.names import all_names
from ddpnb.notebook.record.recorder import Recorder, new_id
from ddpnb.notebook.record.store import Store
from ddpnb.notebook.show.listing import ranks_table, runs_table
from ddpnb.notebook.show.result import ComparisonResult
from ddpnb.notebook.show.table import Table
from ddpnb.notebook.show.view import EVERYTHING, View
from ddpnb.notebook.status import status_table, tell_where
from ddpnb.notebook.values import pack, unpack
from ddpnb.wire import CellSpec, Failure, OnRank

NOT_STARTED = "No cluster is running: start one with %ddp_start (in Python: ddpnb.start())."


class Session:
    """All that ddpnb does in this kernel; each magic is one call of a method here."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._store: Store | None = None
        self._background: list[RunningCell] = []

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
        self.stop()
        self._cluster = Cluster.start(spec, method=method, progress=progress)
        atexit.register(self.stop)
        return ranks_table(self._cluster.states)

    def stop(self) -> bool:
        """End every process of the cluster; return whether there was one."""
        atexit.unregister(self.stop)
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
        cluster = self._require()
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
        return status_table(self._require(lost_is_fine=True), self._background)

    def interrupt(self) -> None:
        """Stop what runs on the ranks: cells started with ``--no-wait``."""
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
        cluster = self._require()
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
        chosen = parse_ranks(ranks, len(self._require().ranks))
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
        chosen = parse_ranks(ranks, len(self._require().ranks))
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

    def compare(self, spec: ComparisonSpec) -> ComparisonResult:
        """Train strategies one after the other, drawn live."""
        return compare(self._require(), self.store, spec)

    def runs(self) -> Table:
        """Return the table of stored runs."""
        return runs_table(self.store.list())

    def load(self, names: Sequence[str], view: View = EVERYTHING) -> ComparisonResult:
        """Return stored runs as one comparison."""
        if not names:
            raise UserError("Name the runs to draw, as %ddp_runs lists them.")
        return ComparisonResult(self.store.load(*names), view)

    def names(self) -> tuple[str, ...]:
        """Return every name that ``load`` takes."""
        return all_names(self.store.list())

    @property
    def store(self) -> Store:
        """The runs of the project that the notebook lies in."""
        if self._store is None:
            self._store = Store(runs_folder())
        return self._store

    # -- within ----------------------------------------------------------------------

    def _require(self, *, lost_is_fine: bool = False) -> Cluster:
        if self._cluster is None:
            raise UserError(NOT_STARTED)
        if not lost_is_fine:
            self._cluster.require(())
        return self._cluster

    def _gather(self, function: OnRank, *arguments: object, ranks: Sequence[int]) -> list[Any]:
        try:
            return self._require().gather(function, *arguments, ranks=ranks)
        except TimeoutError as error:
            raise UserError(
                f"There was {error}: a cell may still run there; %ddp_why tells where it is, "
                "%ddp_interrupt stops it."
            ) from error

    def _record_cell(self, name: str, spec: CellSpec) -> Recorder:
        recorder = Recorder(self.store, name=name, task="cell", source=spec.source, specs=())
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
        return ranks_table(cluster.states)


@cache
def this_session() -> Session:
    """Return the session of this kernel: the one that magics and Python twins share."""
    return Session()


def this_cell_number() -> int:
    """Return the ``n`` of the notebook cell ``In [n]`` that runs now."""
    shell = get_ipython()
    return 0 if shell is None else shell.execution_count - 1  # counted up before it runs
