"""The magics' twins in plain Python (kernel)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from IPython.display import Code

from ddpnb.history.query import matching
from ddpnb.hosts.spec import HostsSpec
from ddpnb.protocol import calls
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.inspection import InspectSpec
from ddpnb.protocol.messages import Script
from ddpnb.protocol.notation import parse_ranks
from ddpnb.protocol.options import options_of, read_options
from ddpnb.protocol.replicas import SamplerSpec
from ddpnb.protocol.trace import CollectiveSpec
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.inside.advice import advice
from ddpnb.reports.inside.buckets import DdpInspection
from ddpnb.reports.inside.collective import CollectiveResult
from ddpnb.reports.inside.prediction import PredictionResult
from ddpnb.reports.inside.replicas import ReplicaCheck
from ddpnb.reports.inside.samples import Handout, handout_of
from ddpnb.reports.inside.traces import TraceResult
from ddpnb.reports.inside.versions import AsyncInspection, async_inspection
from ddpnb.reports.listing import Details, runs_table
from ddpnb.reports.progress import progress_of
from ddpnb.reports.result import ComparisonResult
from ddpnb.reports.style import PlotOptions
from ddpnb.reports.table import Table
from ddpnb.scaling.predict import Question
from ddpnb.session.asking import ask
from ddpnb.session.cells import CellOptions, RunningCell, cell_in, read_script
from ddpnb.session.comparison_spec import ComparisonSpec, make_comparison
from ddpnb.session.inside import INSPECTED, check_replicas, inspect_step, training_to_inspect
from ddpnb.session.scaling import predicted
from ddpnb.session.session import this_cell_number, this_session
from ddpnb.session.status import describe_ranks, status_table
from ddpnb.session.training import RunningComparison
from ddpnb.session.variables import FUNCTIONS, NotebookFunctions
from ddpnb.session.variables import pull as pull_from
from ddpnb.session.variables import push as push_to
from ddpnb.twins import twin


@twin(options_of(HostsSpec))
def start(n: int | None = None, **choices: Any) -> Table:
    """Start the ranks and form the process group; the twin of ``%ddp_start``.

    Returns once every rank has finished an all-reduce.  A cluster that is already running
    is used as it is.

    Args:
        n: number of ranks; by default one per GPU, or up to four on the CPU's cores.
        **choices: as listed.

    Returns:
        The table of ranks.

    Raises:
        UserError: this machine, or a host, does not offer it.
    """
    chosen = read_options(HostsSpec, {"n": n} | choices)
    return this_session().start(HostsSpec(**chosen))


@twin()
def stop() -> bool:
    """End every process of the cluster; the twin of ``%ddp_stop``.

    Returns:
        Whether a cluster was running.
    """
    return this_session().stop()


@twin()
def restart(n: int | None = None, *, ranks: str | None = None) -> Table:
    """End ranks and start new ones; their variables are lost.  The twin of ``%ddp_restart``.

    Args:
        n: number of ranks; by default as many as before.
        ranks: only these, e.g. ``"1"``; the others keep their variables.
    """
    return this_session().restart(n, ranks=ranks)


@twin()
def why() -> str:
    """Say where every rank is at this moment, with stacks; the twin of ``%ddp_why``."""
    return describe_ranks(this_session().cluster())


@twin()
def status() -> Table:
    """Return the table of what every rank is doing; the twin of ``%ddp_status``."""
    session = this_session()
    cluster, running = session.cluster(allow_lost=True), session.comparison
    if running is None:
        return status_table(cluster, cluster.busy)
    progress = progress_of(running.recorder.comparison)
    return status_table(cluster, cluster.ranks, [f"a comparison is training: {progress}"])


@twin()
def interrupt() -> str:
    """Stop what runs in the background, keep variables; the twin of ``%ddp_interrupt``.

    Returns:
        A sentence about what was stopped.
    """
    return this_session().interrupt()


@twin(options_of(CellOptions))
def run_cell(source: str, **choices: Any) -> RunningCell | TraceResult | None:
    """Run a cell on ranks; the twin of ``%%ddp``.

    Args:
        source: the cell's text; magics, ``!commands`` and ``await`` work.
        **choices: as listed.

    Returns:
        The running cell if ``wait`` is false; else the trace of a cell that is traced, with
        ``.plot()``, ``.text()``, ``.save("trace.json")``.

    Raises:
        RankError: it failed on a rank.
        TimeoutError: it took longer than ``timeout``.
    """
    options = CellOptions(**read_options(CellOptions, choices))
    return this_session().run_cell(source, options)


@twin()
def debug(rank: int) -> None:
    """Look into a rank's last error with IPython's debugger; the twin of ``%ddp_debug``."""
    this_session().run_cell("%debug", CellOptions(ranks=str(rank), debug=rank))


@twin(options_of(CellOptions))
def run_script(
    script: Path | str,
    arguments: Sequence[object] = (),
    *,
    module: bool = False,
    keep: bool = False,
    **choices: Any,
) -> RunningCell | TraceResult | None:
    """Run a script that was written for ``torchrun`` on the ranks; the twin of ``%ddp_run``.

    It runs in a ``__main__`` of its own.  Where it forms a process group, it has the cluster's.

    Args:
        script: its path, from the notebook's folder; the name of a module if ``module`` is true.
        arguments: its ``sys.argv[1:]``, such as ``["--epochs", "3"]``.
        module: whether it is a module, as ``torchrun -m`` takes one.
        keep: whether its variables are those of later cells.
        **choices: as listed.

    Returns:
        The running script if ``wait`` is false; else the trace of a script that is traced.

    Raises:
        RankError: it failed on a rank, or ended with an exit code other than 0.
        TimeoutError: it took longer than ``timeout``.
    """
    if isinstance(arguments, str) or not isinstance(arguments, Sequence):
        raise UserError("arguments takes a list of texts, such as ['--epochs', '3'].")
    path, source = ("", "") if module else read_script(str(script))
    options = CellOptions(**read_options(CellOptions, choices))
    ran = Script(
        name=str(script), path=path, arguments=tuple(map(str, arguments)), keeps_variables=keep
    )
    return this_session().run_cell(source, options, ran)


@twin()
def push(ranks: str | None = None, **variables: object) -> None:
    """Copy variables to the ranks: ``push(a=1, b=2)``; the twin of ``%ddp_push``."""
    push_to(this_session().free_cluster(), variables, ranks)


@twin()
def pull(expression: str, *, ranks: str | None = None) -> Any:
    """Return the value of an expression on the ranks; the twin of ``%ddp_pull``.

    Returns:
        A dict from rank to value; if ``ranks`` names one rank, its value.
    """
    cluster = this_session().free_cluster()
    chosen = parse_ranks(ranks, len(cluster.ranks))
    values = pull_from(cluster, expression, chosen)
    if ranks is not None and len(chosen) == 1:
        return values[0]
    return dict(zip(chosen, values, strict=True))


@twin(
    FUNCTIONS,
    options_of(ComparisonSpec),
    options_of(PlotOptions, "log", "target", "panels"),
    options_of(TrainingSpec),
)
def compare(
    *strategies: str, source: Path | str = "", **choices: Any
) -> ComparisonResult | RunningComparison:
    """Train strategies on the same task and compare them live; the twin of ``%%ddp_compare``.

    Functions and classes of the notebook travel with the names that they use.

    Args:
        *strategies: ``"ddp"``, with options ``"ddp:hook=fp16"``, or the name of a class in
            ``source``.
        source: a cell that defines ``model()`` and ``data(split)``, optionally
            what docs/your-code.md lists, and a strategy of your own; or a file,
            ``"cell.py"``.
        **choices: as listed.

    Returns:
        The result, with ``.table()``, ``.plot()``, ``.to_frame()``, ``.save(path)``, and the
        trained ``.model("ddp")``.  If ``wait``
        is false, the running comparison, with ``.wait()``, ``.interrupt()``, ``.result``.

    Raises:
        UserError: something cannot be trained; nothing has been trained then.
        RankError: a strategy failed; the others have been trained.
    """
    functions = NotebookFunctions.of(choices)
    if functions is not None and source:
        raise UserError("compare: source= and model= say what is trained: leave one out.")
    cell = functions.source if functions else cell_in(source)
    spec = make_comparison(strategies, choices, source=cell, functions=functions)
    return this_session().compare(spec)


@twin()
def source(strategy: str) -> Code:
    """Return the source of a built-in strategy; the twin of ``%ddp_source``.

    A notebook highlights it.  Pasted into a comparison's cell under another name, its class trains
    like any of your own.

    Args:
        strategy: a name without options, such as ``"ddp-by-hand"``.

    Returns:
        The file, as ``.data``.

    Raises:
        UserError: there is no such strategy.
    """
    if strategy not in STRATEGIES:
        raise one_of("strategy", strategy, STRATEGIES)
    return Code(STRATEGIES[strategy].file.read_text(), language="python")


@twin()
def runs(text: str = "", *, last: int | None = None) -> Table:
    """Return the table of stored runs, with ``.to_frame()``; the twin of ``%ddp_runs``.

    Args:
        text: only runs whose name, task or state contains this.
        last: only this many lines, the newest.
    """
    return runs_table(matching(this_session().store.list(), text, last))


@twin()
def details(name: str) -> Details:
    """Return all that is needed to repeat a comparison; the twin of ``%ddp_runs --show``."""
    return Details(this_session().store.load(name))


@twin()
def delete(name: str) -> tuple[str, ...]:
    """Delete stored runs; return their names.  The twin of ``%ddp_runs --delete``."""
    return this_session().store.delete(name)


@twin(options_of(PlotOptions))
def plot(*names: str, **choices: Any) -> ComparisonResult:
    """Return stored runs as one comparison that a notebook draws; the twin of ``%ddp_plot``.

    Args:
        *names: as ``runs`` lists them; ``"ddp"`` is the latest run of that strategy.  Without
            names, the latest comparison.
        **choices: as listed.
    """
    return this_session().load(names, PlotOptions(**read_options(PlotOptions, choices)))


@twin()
def load(*names: str) -> ComparisonResult:
    """Return stored runs as one comparison: ``load("race").steps()`` is a DataFrame.

    Args:
        *names: as ``runs`` lists them.
    """
    return this_session().load(names)


@twin()
def export(name: str, path: Path | str) -> str:
    """Write stored runs to a file; the twin of ``%ddp_export``.

    Args:
        name: a run or a comparison, as ``runs`` lists them.
        path: the ending chooses the content.  ``.csv``: one row per step of each worker;
            ``.runs.csv``: one row per run; ``.html``: the report; ``.png``: the figure;
            ``.py``: the comparison as a script for torchrun.

    Returns:
        A sentence about what was written; after that of a script, the lines that run it.
    """
    return this_session().load([name]).save(path)


# -- looking inside -------------------------------------------------------------------------


@twin()
def check(*names: str) -> ReplicaCheck:
    """Compare the replicas of all ranks; the twin of ``%ddp_check``.

    Nothing on the ranks changes, and no collective is called.

    Args:
        *names: models, optimizers, tensors, dicts of tensors, or expressions that lead to one;
            by default all models and optimizers among the ranks' variables.

    Returns:
        The result: ``.is_same``, ``.sentence()``, ``.table()``.

    Raises:
        UserError: there is nothing to compare, or a rank is busy.
    """
    return check_replicas(this_session().idle_cluster(), names)


@twin(options_of(SamplerSpec))
def samples(name: str = "", **choices: Any) -> Handout:
    """Show which rank gets which samples; the twin of ``%ddp_samples``.

    Args:
        name: a sampler or a ``DataLoader`` on the ranks, which is read and not consumed.  By
            default torch's ``DistributedSampler`` is made there.
        **choices: as listed.

    Returns:
        The result: ``.plot()``, ``.table()``, ``.text()``, and ``.rows``, an epoch each.
    """
    spec = SamplerSpec(expression=name, **read_options(SamplerSpec, choices))
    cluster = this_session().idle_cluster()
    found = ask(cluster, calls.samples(spec))
    return handout_of(spec, [found[rank] for rank in cluster.ranks])


@twin(options_of(CollectiveSpec))
def show_collective(name: str, *, ranks: str | None = None, **choices: Any) -> CollectiveResult:
    """Run one collective on the ranks and show what it does; the twin of ``%ddp_show``.

    Args:
        name: ``"all_reduce"``, ``"broadcast"``, ``"reduce"``, ``"scatter"``, ``"gather"``,
            ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"`` or ``"barrier"``.
        ranks: those that take part, e.g. ``"0,2-3"``; by default all.
        **choices: as listed.

    Returns:
        The result, with ``.plot()`` and ``.text()``.

    Raises:
        UserError: there is no such collective, or an option does not suit it.
    """
    cluster, chosen = this_session().free_cluster(), read_options(CollectiveSpec, choices)
    spec = CollectiveSpec(name=name, ranks=parse_ranks(ranks, len(cluster.ranks)), **chosen)
    cluster.ensure_group()
    found = ask(cluster, calls.show_collective(spec))
    return CollectiveResult(spec, [each for rank in spec.ranks if (each := found[rank])])


@twin()
def last_trace() -> TraceResult:
    """Return the trace of the latest cell of ``%%ddp --trace``.

    Returns:
        With ``.plot()``, ``.text()``, and ``.save("trace.json")`` for Perfetto.

    Raises:
        UserError: no cell has been traced.
    """
    if (trace := this_session().last_trace) is None:
        raise UserError("No cell has been traced: begin one with %%ddp --trace.")
    return trace


@twin(options_of(InspectSpec), options_of(TrainingSpec, *INSPECTED))
def inspect(
    model: str = "", *, source: str = "", run: str = "", **choices: Any
) -> DdpInspection | AsyncInspection:
    """Return what happens in a training step; the twin of ``%ddp_inspect``.

    All is measured on a copy: models, gradients, optimizers and random numbers stay as they are.

    Args:
        model: a model, or a DDP, of the ranks' cells; by default a task is inspected.
        source: a cell that defines ``model()`` and ``data(split)``.
        run: in place of a step: versions in a stored run of async.
        **choices: as listed.

    Returns:
        The numbers, with ``.pictures()``, ``.text()`` and ``.save(path)``.

    Raises:
        UserError: there is nothing to inspect, or the model does not fit the batch.
        RankError: the user's code failed on a rank.
    """
    session, own = this_session(), read_options(InspectSpec, choices)
    given = read_options(TrainingSpec, choices)
    if source:
        given |= {"source": source, "cell": this_cell_number()}
    if run:
        if model or given or own:
            raise UserError(f"--run {run} draws what is stored: leave the other options out.")
        return async_inspection(session.load([run]).comparison)
    training = training_to_inspect(model, given, session.last_training)
    return inspect_step(session.idle_cluster(), InspectSpec(model=model, **own), training)


@twin(options_of(Question))
def predict(
    ranks: str | Sequence[int] = "1,2,4,8", *, run: str = "", **choices: Any
) -> PredictionResult:
    """Predict throughput on other numbers of ranks; the twin of ``%ddp_predict``.

    Args:
        ranks: numbers of ranks, ``[1, 2, 64]`` or ``"1,2,64"``.
        run: the comparison to calibrate on; by default the last that can be used.
        **choices: as listed.

    Returns:
        The result, with ``.table()``, ``.plot()``, ``.save(path)``, ``.prediction``.

    Raises:
        UserError: there is nothing to calibrate on, or the question makes no sense.
    """
    question = Question(**read_options(Question, {"ranks": ranks} | choices))
    return predicted(this_session().store, question, run)


@twin()
def advise() -> Table:
    """Recommend a strategy for where the ranks live; the twin of ``%ddp_advise``.

    Returns:
        The known table, in which this machine is marked.

    Raises:
        UserError: no cluster is running.
    """
    return advice(this_session().idle_cluster().states)
