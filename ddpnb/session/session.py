"""The session of one notebook, which magics and functions use.  Runs in the kernel."""

import atexit
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property

from IPython.core.getipython import get_ipython

from ddpnb.cluster.call import Call
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import bring_back
from ddpnb.cluster.interrupts import noted_interrupts
from ddpnb.cluster.placement import ClusterSpec
from ddpnb.cluster.processes import preload
from ddpnb.cluster.wording import say, them, to_sentence
from ddpnb.hosts.processes import start_cluster
from ddpnb.protocol.calls import Result
from ddpnb.protocol.cell_messages import CellSpec, Failure, Script
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import parse_ranks, spoken_ranks
from ddpnb.protocol.processes import refuse_fork, working_folder
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.inspection.traces import TraceResult
from ddpnb.reports.listing import ranks_table
from ddpnb.reports.live import Live, LiveFigureAndTable, live
from ddpnb.reports.notebook import warn
from ddpnb.reports.result import ComparisonResult
from ddpnb.reports.style import EVERYTHING, PlotOptions
from ddpnb.reports.table import Table
from ddpnb.results.opening import open_store
from ddpnb.results.query import all_names
from ddpnb.results.recorder import Recorder, new_id
from ddpnb.results.run import Status
from ddpnb.results.store import Store
from ddpnb.session.background import Background
from ddpnb.session.cells import CellOptions, RunningCell
from ddpnb.session.comparison import prepare
from ddpnb.session.comparison_spec import ComparisonSpec
from ddpnb.session.errors import warn_stale
from ddpnb.session.status import describe_running, with_notes
from ddpnb.session.training import RunningComparison

OnProgress = Callable[[str], None]
"""Function that is called with a line of text at each stage of a cluster's start."""

STATES_SECONDS = 0.3
"""Maximum time that Tab completion waits for a rank."""

THREAD_SECONDS = 5.0
"""``interrupt`` waits at most this time for the work to end and for the ranks to become idle."""

TRAINING_END_SECONDS = 30.0
"""Maximum time that ``stop`` waits for a comparison before it stops the cluster."""


class Session:
    """The cluster, cells, comparisons and stored runs of this kernel."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._cluster: Cluster | None = None
        self._background: list[Background] = []
        """Cells and comparisons started in the background; some may have ended."""
        self.last_training: TrainingSpec | None = None
        """The training of the latest comparison, which ``inspect`` uses by default."""
        self._asked: Call | None = None
        """The latest call that ``answer_now`` has sent."""
        self._traced: RunningCell | None = None
        """The latest traced cell."""

    # -- the cluster -----------------------------------------------------------------

    @property
    def num_ranks(self) -> int | None:
        """The number of ranks, or None if no cluster is running."""
        cluster = self._cluster
        return None if cluster is None or cluster.lost else len(cluster.ranks)

    def cluster(self, *, allow_lost: bool = False) -> Cluster:
        """Return the cluster; raise UserError if no cluster is running or its ranks are lost."""
        if self._cluster is None:
            raise UserError(
                "No cluster is running. Start a cluster with %ddp_start, or with ddpnb.start()."
            )
        if not allow_lost:
            self._cluster.require(())
        return self._cluster

    def free_cluster(self) -> Cluster:
        """Return the cluster with an updated work folder; raise UserError during a comparison."""
        self._refuse_if_training()
        cluster = self.cluster()
        with contextlib.suppress(UserError):  # the folder has been removed
            cluster.work_folder = working_folder()
        return cluster

    def idle_cluster(self) -> Cluster:
        """Return the cluster; raise UserError while a comparison or a cell is running."""
        cluster = self.free_cluster()
        cluster.require_idle(cluster.ranks)
        return cluster

    @noted_interrupts()
    def start(self, spec: ClusterSpec, *, progress: OnProgress = lambda _: None) -> Table:
        """Start the ranks if no cluster is running; return the table of ranks."""
        cluster = self._cluster
        if cluster is not None and cluster.lost is None:
            print(describe_running(cluster, spec))
        else:
            if cluster is not None:
                self.stop()
            self._cluster = cluster = start_cluster(spec, progress)
            atexit.register(self.stop)
        return with_notes(ranks_table(cluster.states), cluster)

    @noted_interrupts()
    def stop(self) -> bool:
        """End every process of the cluster; return True if a cluster was running."""
        if os.getpid() != self.pid:  # a forked process ends
            return False
        if (training := self.comparison) is not None:
            training.interrupt()
            training.join(TRAINING_END_SECONDS)
        self._background.clear()
        atexit.unregister(self.stop)
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()
        preload.stop()
        return cluster is not None

    @noted_interrupts()
    def restart(
        self,
        num_ranks: int | None = None,
        *,
        ranks: str | None = None,
        progress: OnProgress = lambda _: None,
    ) -> Table:
        """End ranks and start new ranks without variables.  See ``ddpnb.restart``."""
        if ranks is not None:
            return self._replace(ranks, progress)
        cluster = self.cluster(allow_lost=True)
        spec = cluster.spec
        if num_ranks is not None:
            spec = replace(spec, num_ranks=num_ranks, devices="", as_="")
        self.stop()
        return self.start(spec, progress=progress)

    def interrupt(self) -> str:
        """Stop all background work on the ranks; return a sentence that names the work."""
        self.cluster(allow_lost=True)
        running = self._running
        for each in running:
            each.interrupt()
        for each in running:
            each.join(THREAD_SECONDS)
        if late := " and the ".join(each.what for each in running if not each.done):
            return f"The {late} is still stopping. Run %ddp_interrupt again to wait longer."
        stopped = " and ".join(f"the {each.what}" for each in running)
        return f"Interrupted {stopped}." if running else "Nothing runs in the background."

    # -- cells -----------------------------------------------------------------------

    @noted_interrupts()
    def run_cell(
        self, source: str, options: CellOptions, script: Script | None = None
    ) -> RunningCell | TraceResult | None:
        """Run a cell, or a script, on ranks; see ``ddpnb.run_cell`` and ``ddpnb.run_script``."""
        cluster = self.free_cluster()
        chosen = parse_ranks(options.ranks, len(cluster.ranks))
        if options.debug is not None and options.debug not in chosen:
            raise UserError(f"--debug: rank {options.debug} does not run the cell. Check --ranks.")
        cluster.require(chosen)
        spec = CellSpec(
            source=source,
            execution_count=this_cell_number(),
            run_id=new_id() if options.name else "",
            script=script,
            debug_rank=options.debug,
            is_traced=options.trace,
        )
        recorder = self._record_cell(options.name, spec) if options.name else None
        cell = RunningCell(cluster, spec, chosen, options, recorder)
        self._traced = cell if options.trace else self._traced
        if not options.wait:
            self._keep(cell)
            return cell.begin()
        cell.run()
        return cell.trace

    @property
    def last_trace(self) -> TraceResult | None:
        """The trace of the latest traced cell, or None if there is no trace yet."""
        return None if self._traced is None else self._traced.trace

    def answer_now(self, request: Result, rank: int | None = None) -> Result | None:
        """Return a rank's immediate answer, or None if the rank is busy, dead or slow.

        By default, the first idle rank is asked.
        """
        cluster, asked = self._cluster, self._asked
        if cluster is None or self.comparison is not None:
            return None
        busy = cluster.busy
        if asked is not None:
            list(asked.events(0.0))  # the last call may have ended late
            busy |= asked.running
        idle = [each for each in cluster.ready if each not in busy]
        rank = next(iter(idle), None) if rank is None else rank
        if rank not in idle:
            return None
        try:
            self._asked = cluster.submit(request, [rank])
            (answer,) = self._asked.results(STATES_SECONDS)
        except (UserError, TimeoutError, RuntimeError, KeyError):
            return None
        return None if isinstance(answer, Failure) else answer

    # -- comparisons -----------------------------------------------------------------

    @property
    def comparison(self) -> RunningComparison | None:
        """The comparison that is training in the background, or None."""
        return next((each for each in self._running if isinstance(each, RunningComparison)), None)

    @noted_interrupts()
    def compare(
        self,
        spec: ComparisonSpec,
        shown: Live | None = None,
        on_end: Callable[[RunningComparison], None] | None = None,
    ) -> ComparisonResult | RunningComparison:
        """Train strategies and compare them live; see ``ddpnb.compare``.

        ``shown`` is the display (default: under this cell).  A background thread calls ``on_end``.
        """
        working_folder()  # torch needs a folder that exists
        self.last_training = spec.training
        running = prepare(self.idle_cluster(), self.store, spec, shown or live(spec.options))
        if spec.wait:
            return running.run()
        self._keep(running)
        return running.begin(on_end)

    def show_live(self) -> bool:
        """Show the running comparison under this cell too; return False if no comparison runs."""
        if self.comparison is None or not isinstance(self.comparison.live, LiveFigureAndTable):
            return False
        self.comparison.live.appear()
        return True

    # -- stored runs -----------------------------------------------------------------

    def load(self, names: Sequence[str], options: PlotOptions = EVERYTHING) -> ComparisonResult:
        """Return stored runs as one comparison; by default the latest comparison."""
        if not names:
            runs = [run for run in self.store.list() if run.status is not Status.UNREADABLE]
            if not runs:
                raise UserError("No runs are stored here yet. Run %ddp_compare ddp first.")
            names = [runs[-1].comparison_id]
        return ComparisonResult(self.store.load(*names), options)

    def names(self) -> tuple[str, ...]:
        """Return all names that ``load`` accepts."""
        return all_names(self._opened_store[0].list())

    @property
    def store(self) -> Store:
        """The stored runs.  If they are in an unexpected folder, a note says so once."""
        store, note = self._opened_store
        if note:
            self._opened_store = store, ""
            print(note)
        return store

    @cached_property
    def _opened_store(self) -> tuple[Store, str]:
        return open_store()

    @property
    def _running(self) -> list[Background]:
        """The background work that has not ended."""
        return [each for each in self._background if not each.done]

    def _keep(self, begun: Background) -> None:
        self._background = [*self._running, begun]

    def _replace(self, ranks: str, progress: OnProgress) -> Table:
        cluster = self.free_cluster()
        asked, before = parse_ranks(ranks, len(cluster.ranks)), cluster.states
        chosen = sorted({*asked, *cluster.dead})
        progress(f"restarting {spoken_ranks(chosen)}")
        warn_stale(bring_back(cluster, chosen))
        new = [
            now.rank for was, now in zip(before, cluster.states, strict=True) if was.pid != now.pid
        ]
        if more := {*new} - {*asked}:
            again = f"ddpnb has restarted {them(more)}, too, without variables."
            warn(f"{to_sentence(say(more, 'has ended'))} {again}")
        return with_notes(ranks_table(cluster.states), cluster)

    def _refuse_if_training(self) -> None:
        if self.comparison is not None:
            raise UserError(
                "A comparison is training on the ranks. Run %ddp_interrupt to stop it, or "
                "%ddp_status to see its progress."
            )

    def _record_cell(self, name: str, spec: CellSpec) -> Recorder:
        recorder = Recorder(
            self.store,
            name=name,
            task="cell",
            source=spec.source,
            specs=(),
            ranks=self.cluster().states,
            notify=warn,
        )
        recorder.begin(spec.run_id, name)
        return recorder


only_session = cache(Session)


def this_session() -> Session:
    """Return this kernel's only session; raise UserError in a process forked from the kernel."""
    session = only_session()
    refuse_fork(session.pid)
    return session


def this_cell_number() -> int:
    """Return the number ``n`` of the running notebook cell ``In [n]``."""
    shell = get_ipython()
    return 0 if shell is None else shell.displayhook.prompt_count
