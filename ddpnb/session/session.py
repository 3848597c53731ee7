"""All that ddpnb can do in one notebook; magics and their Python twins call it (kernel)."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from IPython.core.getipython import get_ipython

from ddpnb.cluster.placement import ClusterSpec
from ddpnb.history.query import Search, all_names
from ddpnb.history.recorder import Recorder, new_id
from ddpnb.history.store import Store, runs_folder
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import CellSpec
from ddpnb.protocol.rank_sets import parse_ranks
from ddpnb.reports.listing import runs_table
from ddpnb.reports.live import Live
from ddpnb.reports.result import ComparisonResult
from ddpnb.reports.style import EVERYTHING, PlotOptions
from ddpnb.reports.table import Table
from ddpnb.session.background import RunningComparison
from ddpnb.session.cells import RunningCell
from ddpnb.session.cluster_session import ClusterSession
from ddpnb.session.comparison import ComparisonSpec, Training, prepare
from ddpnb.session.variables import pull, push


class Session(ClusterSession):
    """The cluster, cells, comparisons and stored runs of this kernel."""

    def __init__(self) -> None:
        super().__init__()
        self._store: Store | None = None

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
        recorder = self._record_cell(name, spec, len(chosen)) if name else None
        cell = RunningCell(
            cluster, spec, chosen, recorder=recorder, timeout=timeout, is_checked=check
        )
        if wait:
            cell.run()
            return None
        self._jobs.add(cell)
        cell.run_in_background()
        return cell

    def push(self, variables: Mapping[str, object], ranks: str | None = None) -> None:
        """Copy variables to ranks."""
        cluster = self._require_free()
        push(cluster, variables, parse_ranks(ranks, len(cluster.ranks)))

    def pull(self, expression: str, ranks: str | None = None) -> Any:
        """Return the value of an expression on ranks; see ``ddpnb.pull``."""
        cluster = self._require_free()
        chosen = parse_ranks(ranks, len(cluster.ranks))
        values = pull(cluster, expression, chosen)
        if ranks is not None and len(chosen) == 1:
            return values[0]
        return dict(zip(chosen, values, strict=True))

    # -- comparisons -----------------------------------------------------------------

    @property
    def comparison(self) -> RunningComparison | None:
        """The comparison that is training in the background; None if there is none."""
        return self._jobs.comparison

    def compare(
        self, spec: ComparisonSpec, *, wait: bool = True
    ) -> ComparisonResult | RunningComparison:
        """Train strategies and compare them live; see ``ddpnb.compare``."""
        training = prepare(self._require_idle(), self.store, spec)
        if wait:
            return training.run()
        return self._jobs.begin(RunningComparison(lambda: training, training.cluster.ranks))

    def compare_in_background(
        self,
        spec: ComparisonSpec,
        *,
        cluster: ClusterSpec,
        shown_by: Live,
        on_end: Callable[[RunningComparison], None],
    ) -> RunningComparison:
        """Start the ranks if there are none, check and train: all in the background.

        Args:
            spec: what to compare.
            cluster: what to start if no cluster is running.
            shown_by: shows the comparison while it trains.
            on_end: called, in another thread, once the comparison has ended.
        """
        if self._cluster is not None:
            self._require_idle()

        def start_and_prepare() -> Training:
            if self._cluster is None:
                self._launch(cluster)
            return prepare(self._require(), self.store, spec, shown_by)

        ranks = () if self._cluster is None else self._cluster.ranks
        return self._jobs.begin(RunningComparison(start_and_prepare, ranks, on_end=on_end))

    # -- stored runs -----------------------------------------------------------------

    def runs(self, search: Search) -> Table:
        """Return the table of the stored runs that a search finds."""
        return runs_table(search.among(self.store.list()))

    def load(self, names: Sequence[str], options: PlotOptions = EVERYTHING) -> ComparisonResult:
        """Return stored runs as one comparison."""
        if not names:
            raise UserError("Name the runs to draw, as %ddp_runs lists them.")
        return ComparisonResult(self.store.load(*names), options)

    def names(self) -> tuple[str, ...]:
        """Return every name that ``load`` takes."""
        return all_names(self.store.list())

    def addresses(self) -> tuple[str, ...]:
        """Return ``comparison/strategy`` of all stored runs, newest first."""
        newest_first = sorted(self.store.list(), key=lambda run: -run.created)
        return tuple(dict.fromkeys(f"{run.comparison}/{run.name}" for run in newest_first))

    @property
    def store(self) -> Store:
        """The stored runs of the notebook's project."""
        if self._store is None:
            self._store = Store(runs_folder())
        return self._store

    # -- private ---------------------------------------------------------------------

    def _record_cell(self, name: str, spec: CellSpec, num_ranks: int) -> Recorder:
        recorder = Recorder(
            self.store,
            name=name,
            task="cell",
            source=spec.source,
            specs=(),
            ranks=self._require().states,
        )
        recorder.begin(spec.run_id, name, num_ranks=num_ranks)
        return recorder


@cache
def this_session() -> Session:
    """Return the session of this kernel; there is one."""
    return Session()


def this_cell_number() -> int:
    """Return the ``n`` of the notebook cell ``In [n]`` that is running."""
    shell = get_ipython()
    return 0 if shell is None else shell.execution_count - 1  # counted up before it runs
