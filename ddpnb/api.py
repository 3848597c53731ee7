"""The Python functions that do the same as the magics.  Runs in the kernel."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from IPython.display import Code

from ddpnb.hosts.spec import HostsSpec
from ddpnb.prediction.predict import Question
from ddpnb.protocol.calls import calls
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.cell_messages import Script
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.inspection import InspectSpec, SamplerSpec
from ddpnb.protocol.notation import parse_ranks
from ddpnb.protocol.options import options_of, read_options
from ddpnb.protocol.trace import CollectiveSpec
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.inspection.advice import advice
from ddpnb.reports.inspection.buckets import DdpInspection
from ddpnb.reports.inspection.collective import CollectiveResult
from ddpnb.reports.inspection.prediction import PredictionResult
from ddpnb.reports.inspection.replicas import ReplicaCheck
from ddpnb.reports.inspection.samples import Handout, handout_of
from ddpnb.reports.inspection.traces import TraceResult
from ddpnb.reports.inspection.versions import AsyncInspection, async_inspection
from ddpnb.reports.listing import Details, runs_table
from ddpnb.reports.progress import progress_of
from ddpnb.reports.result import ComparisonResult
from ddpnb.reports.style import PlotOptions
from ddpnb.reports.table import Table
from ddpnb.results.query import matching
from ddpnb.session.asking import ask
from ddpnb.session.cells import CellOptions, RunningCell, cell_in, read_script
from ddpnb.session.comparison_spec import ComparisonSpec, make_comparison
from ddpnb.session.inspection import INSPECTED, check_replicas, inspect_step, training_to_inspect
from ddpnb.session.prediction import predicted
from ddpnb.session.session import this_cell_number, this_session
from ddpnb.session.status import describe_ranks, status_table
from ddpnb.session.training import RunningComparison
from ddpnb.session.variables import FUNCTIONS, NotebookFunctions
from ddpnb.session.variables import pull as pull_from
from ddpnb.session.variables import push as push_to
from ddpnb.twins import twin


@twin(options_of(HostsSpec))
def start(n: int | None = None, **choices: Any) -> Table:
    """Start the ranks and form the process group.  Same as ``%ddp_start``.

    ``ddpnb.start(4)`` returns once every rank has finished an all-reduce.  If a cluster is
    already running, ddpnb uses that cluster unchanged.

    Args:
        n: number of ranks.  Default: one rank per GPU; without GPUs, up to four ranks on the CPU.
        **choices: as listed.

    Returns:
        The table of ranks.

    Raises:
        UserError: this machine or a host cannot start these ranks.
    """
    chosen = read_options(HostsSpec, {"n": n} | choices)
    return this_session().start(HostsSpec(**chosen))


@twin()
def stop() -> bool:
    """End every process of the cluster.  Same as ``%ddp_stop``.

    Returns:
        True if a cluster was running.
    """
    return this_session().stop()


@twin()
def restart(n: int | None = None, *, ranks: str | None = None) -> Table:
    """End ranks and start new ranks without variables.  Same as ``%ddp_restart``.

    Args:
        n: number of new ranks.  Default: the same number as before.
        ranks: the ranks to replace, e.g. ``"1"``.  All other ranks keep their variables.
    """
    return this_session().restart(n, ranks=ranks)


@twin()
def why() -> str:
    """Return the current position and stack of every rank.  Same as ``%ddp_why``."""
    return describe_ranks(this_session().cluster())


@twin()
def status() -> Table:
    """Return a table of the ranks with the state of each rank.  Same as ``%ddp_status``."""
    session = this_session()
    cluster, running = session.cluster(allow_lost=True), session.comparison
    if running is None:
        return status_table(cluster, cluster.busy)
    progress = progress_of(running.recorder.comparison)
    return status_table(cluster, cluster.ranks, [f"a comparison is running: {progress}"])


@twin()
def interrupt() -> str:
    """Stop cells and comparisons in the background.  Same as ``%ddp_interrupt``.

    Returns:
        A sentence that names the stopped cells and comparisons.  The ranks keep their variables.
    """
    return this_session().interrupt()


@twin(options_of(CellOptions))
def run_cell(source: str, **choices: Any) -> RunningCell | TraceResult | None:
    """Run a cell on ranks, e.g. ``ddpnb.run_cell("print(rank)")``.  Same as ``%%ddp``.

    Args:
        source: the cell's text.  The text can contain magics and ``!commands``.
        **choices: as listed.

    Returns:
        The running cell if ``wait`` is false, the trace if ``trace`` is true, and otherwise None.
        The trace has ``.plot()``, ``.text()`` and ``.save("trace.json")``.

    Raises:
        RankError: the cell failed on a rank.
        TimeoutError: the cell took longer than ``timeout``.
    """
    options = CellOptions(**read_options(CellOptions, choices))
    return this_session().run_cell(source, options)


@twin()
def debug(rank: int) -> None:
    """Open IPython's debugger at a rank's last error.  Same as ``%ddp_debug``."""
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
    """Run a ``torchrun`` script on the ranks.  Same as ``%ddp_run``.

    Example: ``ddpnb.run_script("train.py", ["--epochs", "3"])``.  The script runs in a new
    ``__main__``.  If the script forms a process group, ddpnb provides the cluster's process group.

    Args:
        script: path of the script, or the name of a module if ``module`` is true.
        arguments: the script's ``sys.argv[1:]``, such as ``["--epochs", "3"]``.
        module: if true, ``script`` is the name of a module, as with ``torchrun -m``.
        keep: if true, later cells can use the script's variables.
        **choices: as listed.

    Returns:
        The running script if ``wait`` is false, the trace if ``trace`` is true, otherwise None.

    Raises:
        RankError: the script failed on a rank, or ended with an exit code other than 0.
        TimeoutError: the script took longer than ``timeout``.
    """
    if isinstance(arguments, str) or not isinstance(arguments, Sequence):
        raise UserError("arguments must be a list of strings, such as ['--epochs', '3'].")
    path, source = ("", "") if module else read_script(str(script))
    options = CellOptions(**read_options(CellOptions, choices))
    ran = Script(
        name=str(script), path=path, arguments=tuple(map(str, arguments)), keeps_variables=keep
    )
    return this_session().run_cell(source, options, ran)


@twin()
def push(ranks: str | None = None, **variables: object) -> None:
    """Copy variables to the ranks: ``ddpnb.push(a=1, b=2)``.  Same as ``%ddp_push``."""
    push_to(this_session().free_cluster(), variables, ranks)


@twin()
def pull(expression: str, *, ranks: str | None = None) -> Any:
    """Copy a value from the ranks: ``ddpnb.pull("loss")``.  Same as ``%ddp_pull``.

    Returns:
        A dict with the value on each rank, or only the value if ``ranks`` names one rank.
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
    """Train strategies on the same task and compare them live.  Same as ``%%ddp_compare``.

    Example: ``ddpnb.compare("ddp", "async", task="digits")``.  To train another model, pass your
    functions: ``model=Net, data=load``.  ddpnb also sends everything that these functions use.

    Args:
        *strategies: names of strategies, such as ``"ddp"``, or ``"ddp:hook=fp16"`` with an option.
            ``source`` can define strategies as classes.
        source: the text of a cell, or a file such as ``"cell.py"``.  The code defines ``model()``,
            ``data(split)`` and any of the other functions in docs/your-code.md.
        **choices: as listed.

    Returns:
        The result, with ``.table()``, ``.plot()``, ``.to_frame()``, ``.save(path)`` and the
        trained ``.model("ddp")``.  If ``wait`` is false, the return value is the running
        comparison, with ``.wait()``, ``.interrupt()`` and ``.result``.

    Raises:
        UserError: a choice is not possible, so ddpnb has not trained any strategy.
        RankError: a strategy failed.  ddpnb has trained the other strategies.
    """
    functions = NotebookFunctions.of(choices)
    if functions is not None and source:
        raise UserError("compare: source= and model= both define the training. Remove one of them.")
    cell = functions.source if functions else cell_in(source)
    spec = make_comparison(strategies, choices, source=cell, functions=functions)
    return this_session().compare(spec)


@twin()
def source(strategy: str) -> Code:
    """Return the source of a built-in strategy.  Same as ``%ddp_source``.

    To change the strategy, paste its class into a comparison's cell and rename the class.

    Args:
        strategy: a name without options, such as ``"ddp-by-hand"``.

    Returns:
        An object that a notebook shows as highlighted code.  ``.data`` is the code as a string.

    Raises:
        UserError: the strategy does not exist.
    """
    if strategy not in STRATEGIES:
        raise one_of("strategy", strategy, STRATEGIES)
    return Code(STRATEGIES[strategy].file.read_text(), language="python")


@twin()
def runs(text: str = "", *, last: int | None = None) -> Table:
    """Return the table of stored runs, with ``.to_frame()``.  Same as ``%ddp_runs``.

    Args:
        text: list only runs that have this text in the name, task or state.
        last: maximum number of lines.  The newest runs come first.
    """
    return runs_table(matching(this_session().store.list(), text, last))


@twin()
def details(name: str) -> Details:
    """Return everything needed to repeat a comparison.  Same as ``%ddp_runs --show``."""
    return Details(this_session().store.load(name))


@twin()
def delete(name: str) -> tuple[str, ...]:
    """Delete stored runs and return their names.  Same as ``%ddp_runs --delete``."""
    return this_session().store.delete(name)


@twin(options_of(PlotOptions))
def plot(*names: str, **choices: Any) -> ComparisonResult:
    """Draw stored runs in one figure: ``ddpnb.plot("race")``.  Same as ``%ddp_plot``.

    Args:
        *names: names of runs or comparisons, as shown by ``ddpnb.runs()``.  A strategy's name, such
            as ``"ddp"``, means its latest run.  Default: the latest comparison.
        **choices: as listed.
    """
    return this_session().load(names, PlotOptions(**read_options(PlotOptions, choices)))


@twin()
def load(*names: str) -> ComparisonResult:
    """Return stored runs as one comparison: ``ddpnb.load("race").steps()`` is a DataFrame.

    Args:
        *names: names that ``ddpnb.runs()`` shows.  Default: the latest comparison.
    """
    return this_session().load(names)


@twin()
def export(name: str, path: Path | str) -> str:
    """Write stored runs to a file: ``export("race", "race.csv")``.  Same as ``%ddp_export``.

    Args:
        name: name of a run or a comparison, as shown by ``ddpnb.runs()``.
        path: name of the file.  A ``.csv`` has one row per step of each worker, and a ``.runs.csv``
            has one row per run.  Other files contain the report (``.html``), the figure (``.png``),
            or a script for torchrun (``.py``).

    Returns:
        A text that names the file.  For a script, the text also says how to run the script.
    """
    return this_session().load([name]).save(path)


# -- looking inside -------------------------------------------------------------------------


@twin()
def check(*names: str) -> ReplicaCheck:
    """Compare the replicas of all ranks: ``ddpnb.check("model")``.  Same as ``%ddp_check``.

    The check changes nothing on the ranks and calls no collective.

    Args:
        *names: names or expressions of models, optimizers, tensors or dicts of tensors.
            Default: all models and optimizers among the ranks' variables.

    Returns:
        The result, with ``.is_same``, ``.sentence()`` and ``.table()``.

    Raises:
        UserError: the ranks have nothing to compare, or a rank is busy.
    """
    return check_replicas(this_session().idle_cluster(), names)


@twin(options_of(SamplerSpec))
def samples(name: str = "", **choices: Any) -> Handout:
    """Show which rank gets which samples: ``ddpnb.samples(n=30)``.  Same as ``%ddp_samples``.

    Args:
        name: a sampler or a ``DataLoader`` on the ranks, which ddpnb reads without consuming it.
            Default: ddpnb creates torch's ``DistributedSampler`` on the ranks.
        **choices: as listed.

    Returns:
        The result, with ``.plot()``, ``.table()``, ``.text()`` and one row per epoch in ``.rows``.
    """
    spec = SamplerSpec(expression=name, **read_options(SamplerSpec, choices))
    cluster = this_session().idle_cluster()
    found = ask(cluster, calls.samples(spec))
    return handout_of(spec, [found[rank] for rank in cluster.ranks])


@twin(options_of(CollectiveSpec))
def show_collective(name: str, *, ranks: str | None = None, **choices: Any) -> CollectiveResult:
    """Run one collective on the ranks and show its effect.  Same as ``%ddp_show``.

    Args:
        name: ``"all_reduce"``, ``"broadcast"``, ``"reduce"``, ``"scatter"``, ``"gather"``,
            ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"`` or ``"barrier"``.
        ranks: the ranks that take part, e.g. ``"0,2-3"``.  Default: all ranks.
        **choices: as listed.

    Returns:
        The result, with ``.plot()`` and ``.text()``.

    Raises:
        UserError: the collective does not exist, or does not have an option that you gave.
    """
    cluster, chosen = this_session().free_cluster(), read_options(CollectiveSpec, choices)
    spec = CollectiveSpec(name=name, ranks=parse_ranks(ranks, len(cluster.ranks)), **chosen)
    cluster.ensure_group()
    found = ask(cluster, calls.show_collective(spec))
    return CollectiveResult(spec, [each for rank in spec.ranks if (each := found[rank])])


@twin()
def last_trace() -> TraceResult:
    """Return the trace of the latest ``%%ddp --trace`` cell.

    Returns:
        The trace, with ``.plot()``, ``.text()``, and ``.save("trace.json")`` for Perfetto.

    Raises:
        UserError: no cell has been traced.
    """
    if (trace := this_session().last_trace) is None:
        raise UserError("No cell has been traced. Begin a cell with %%ddp --trace.")
    return trace


@twin(options_of(InspectSpec), options_of(TrainingSpec, *INSPECTED))
def inspect(
    model: str = "", *, source: str = "", run: str = "", **choices: Any
) -> DdpInspection | AsyncInspection:
    """Measure each part of a DDP training step.  Same as ``%ddp_inspect``.

    Example: ``ddpnb.inspect("model", batch="x", loss="f(output, y)")``.  ddpnb measures copies, so
    models, gradients, optimizers and random numbers stay unchanged.

    Args:
        model: a model or a DDP module that a cell created on the ranks.  Default: a task's model.
        source: a cell that defines ``model()`` and ``data(split)``.
        run: name of a stored ``async`` run, to show its parameter versions instead of a step.
        **choices: as listed.

    Returns:
        The measurements, with ``.pictures()``, ``.text()`` and ``.save(path)``.

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
            raise UserError(f"--run {run} draws a stored run. Remove the other options.")
        return async_inspection(session.load([run]).comparison)
    training = training_to_inspect(model, given, session.last_training)
    return inspect_step(session.idle_cluster(), InspectSpec(model=model, **own), training)


@twin(options_of(Question))
def predict(
    ranks: str | Sequence[int] = "1,2,4,8", *, run: str = "", **choices: Any
) -> PredictionResult:
    """Predict throughput on other numbers of ranks.  Same as ``%ddp_predict``.

    Args:
        ranks: numbers of ranks, such as ``[1, 2, 64]`` or ``"1,2,64"``.
        run: name of the comparison for calibration.  Default: the latest suitable comparison.
        **choices: as listed.

    Returns:
        The result, with ``.table()``, ``.plot()``, ``.save(path)``, ``.prediction``.

    Raises:
        UserError: no comparison is suitable for calibration, or the options contradict each other.
    """
    question = Question(**read_options(Question, {"ranks": ranks} | choices))
    return predicted(this_session().store, question, run)


@twin()
def advise() -> Table:
    """Recommend a strategy for the ranks' hosts and devices.  Same as ``%ddp_advise``.

    Returns:
        A table that recommends strategies for different machines, and marks this machine.

    Raises:
        UserError: no cluster is running.
    """
    return advice(this_session().idle_cluster().states)
