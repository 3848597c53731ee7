"""What can be done in this kernel?  (Notebook side.)"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from IPython.core.getipython import get_ipython

from ddpnb.cluster.placement import ClusterSpec
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import CellSpec
from ddpnb.protocol.rank_sets import parse_ranks
from ddpnb.reports.listing import runs_table
from ddpnb.reports.live import Live
from ddpnb.reports.plot_options import EVERYTHING, PlotOptions
from ddpnb.reports.result import ComparisonResult
from ddpnb.reports.table import Table
from ddpnb.runs.query import Search, all_names
from ddpnb.runs.recorder import Recorder, new_id
from ddpnb.runs.store import Store, runs_folder
from ddpnb.session.background import RunningComparison
from ddpnb.session.cells import RunningCell
from ddpnb.session.cluster_session import ClusterSession
from ddpnb.session.comparison import ComparisonSpec, Training, prepare
from ddpnb.session.variables import pull, push


class Session(ClusterSession):
    """All that ddpnb does in this kernel; each magic is one call of a method here."""

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
        """Put variables into the namespaces of ranks."""
        cluster = self._require_free()
        push(cluster, variables, parse_ranks(ranks, len(cluster.ranks)))

    def pull(self, expression: str, ranks: str | None = None) -> Any:
        """Return the value of an expression: a dict by rank, or one value for one rank named."""
        cluster = self._require_free()
        chosen = parse_ranks(ranks, len(cluster.ranks))
        values = pull(cluster, expression, chosen)
        is_single = ranks is not None and len(chosen) == 1
        return values[0] if is_single else dict(zip(chosen, values, strict=True))

    # -- comparisons -----------------------------------------------------------------

    @property
    def comparison(self) -> RunningComparison | None:
        """The comparison that trains in the background, if one does."""
        return self._jobs.comparison

    def compare(
        self, spec: ComparisonSpec, *, wait: bool = True
    ) -> ComparisonResult | RunningComparison:
        """Train strategies one after the other, drawn live; see ``ddpnb.compare``."""
        training = prepare(self._require_idle(), self.store, spec)
        if wait:
            return training.run()
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

    # -- stored runs -----------------------------------------------------------------

    def runs(self, search: Search) -> Table:
        """Return the table of those stored runs that are asked for."""
        return runs_table(search.among(self.store.list()))

    def load(self, names: Sequence[str], options: PlotOptions = EVERYTHING) -> ComparisonResult:
        """Return stored runs as one comparison."""
        if not names:
            raise UserError("Name the runs to draw, as %ddp_runs lists them.")
        return ComparisonResult(self.store.load(*names), options)

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

    def _begin(self, comparison: RunningComparison) -> RunningComparison:
        self._jobs.begin(comparison)
        return comparison

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
    """Return the session of this kernel: the one that magics and Python twins share."""
    return Session()


def this_cell_number() -> int:
    """Return the ``n`` of the notebook cell ``In [n]`` that runs now."""
    shell = get_ipython()
    return 0 if shell is None else shell.execution_count - 1  # counted up before it runs
