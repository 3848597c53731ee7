"""The public functions, which also declare the magics.  Runs in the kernel.

If an argument is wrong or no cluster is running, a function raises a ``UserError``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from IPython.display import Code, display

from ddpnb.cluster.group import ensure_group
from ddpnb.declaration import magic, public
from ddpnb.hosts.spec import HostsSpec
from ddpnb.prediction.predict import Question
from ddpnb.protocol.calls import calls
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.cell_messages import Script
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.inspection import InspectSpec, SamplerSpec
from ddpnb.protocol.notation import parse_ranks
from ddpnb.protocol.options import options_of, read_options
from ddpnb.protocol.trace import TRACE, CollectiveSpec
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.inspection.advice import advice_table
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
from ddpnb.session.status import describe_positions, status_table
from ddpnb.session.training import RunningComparison
from ddpnb.session.variables import FUNCTIONS, NotebookFunctions
from ddpnb.session.variables import pull as pull_from
from ddpnb.session.variables import push as push_to


@magic("ddp_start", options_of(HostsSpec))
def start(n: int | None = None, **choices: Any) -> Table:
    """Start the ranks and form the process group: ``%ddp_start -n 4`` or ``ddpnb.start(4)``.

    The call returns once every rank has finished an all-reduce.  If a cluster is already running,
    ddpnb uses that cluster unchanged.

    Emulated devices (docs/emulated-devices.md): ``--devices 8xV100 --as resnet50`` starts eight
    ranks.  All comparisons then emulate these devices, except with ``--devices real``.

    Other hosts (docs/hosts.md): ``--hosts a:4,b:4`` starts four ranks on each of two hosts over
    ssh.  ``--engines slurm -n 16 --ranks-per-host 8`` starts 16 ranks in a Slurm job on two
    hosts.  ``--profile NAME`` starts the ranks with a profile of ipyparallel.

    Args:
        n: number of ranks.  Default: one rank per GPU; without GPUs, up to four ranks on the CPU.
        **choices: as listed.

    Raises:
        UserError: this machine or a host cannot start these ranks.
    """
    chosen = read_options(HostsSpec, {"n": n} | choices)
    return this_session().start(HostsSpec(**chosen))


@magic("ddp_stop")
def stop() -> bool:
    """End every process of the cluster: ``%ddp_stop`` or ``ddpnb.stop()``.

    Returns:
        True if a cluster was running.
    """
    return this_session().stop()


@magic("ddp_restart")
def restart(n: int | None = None, *, ranks: str | None = None) -> Table:
    """End ranks and start new ranks without variables: ``%ddp_restart`` or ``ddpnb.restart()``.

    ``%ddp_restart --ranks 1`` replaces only rank 1, even if rank 1 is alive.

    Args:
        n: number of new ranks; default: the same number as before.
        ranks: ranks to replace, e.g. 1; all other ranks keep their variables.
    """
    return this_session().restart(n, ranks=ranks)


@magic("ddp_why", show=print)
def why() -> str:
    """Show the current cell, line, collective and stack of every rank: ``%ddp_why``."""
    return describe_positions(this_session().cluster())


@magic("ddp_status", show=display)
def status() -> Table:
    """Show a table with the state of every rank: ``%ddp_status`` or ``ddpnb.status()``."""
    session = this_session()
    cluster, running = session.cluster(allow_lost=True), session.comparison
    if running is None:
        return status_table(cluster, cluster.busy)
    progress = progress_of(running.recorder.comparison)
    return status_table(cluster, cluster.ranks, [f"a comparison is running: {progress}"])


@magic("ddp_interrupt", show=print)
def interrupt() -> str:
    """Stop cells and comparisons that run in the background: ``%ddp_interrupt``.

    ``--no-wait`` and ``%ddp_panel`` start background work.  The ranks keep their variables.
    To stop a cell that the notebook waits for, interrupt the kernel (the square button).  The
    result is a sentence that names the stopped cells and comparisons.
    """
    return this_session().interrupt()


@magic("ddp", options_of(CellOptions))
def run_cell(source: str, **choices: Any) -> RunningCell | TraceResult | None:
    """Run a cell on ranks: ``%%ddp --ranks 0,2-3`` or ``ddpnb.run_cell("print(rank)")``.

    The cell can use ``rank``, ``local_rank``, ``world_size`` and ``device``.  Each line of output
    has a label with its rank.  If several ranks print the same line, ddpnb shows the line once,
    with a label like [0-3].

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


@magic("ddp_debug")
def debug(rank: int) -> None:
    """Open IPython's debugger at a rank's last error: ``%ddp_debug 1`` or ``ddpnb.debug(1)``.

    To stop at a line, insert ``breakpoint()`` and run the cell with ``%%ddp --debug 1``.

    Args:
        rank: rank to debug; all ranks keep their variables.
    """
    this_session().run_cell("%debug", CellOptions(ranks=str(rank), debug=rank))


@magic("ddp_run", options_of(CellOptions), module="-m", keep="-i")
def run_script(
    script: Path | str,
    arguments: Sequence[object] = (),
    *,
    module: bool = False,
    keep: bool = False,
    **choices: Any,
) -> RunningCell | TraceResult | None:
    """Run a ``torchrun`` script on the ranks: ``%ddp_run train.py --epochs 3``.

    In Python: ``ddpnb.run_script("train.py", ["--epochs", "3"])``.  The script runs unchanged, in
    a new ``__main__``.  If it forms a process group, ddpnb provides the cluster's process group.
    Write the options of ``%ddp_run`` before the script: ``%ddp_run --timeout 60 train.py``.

    Args:
        script: path of the script; with ``-m``, the name of a module.
        arguments: arguments of the script (``sys.argv[1:]``); in Python, a list of strings.
        module: run a module, like ``torchrun -m``.
        keep: keep the script's variables for later cells.
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


@magic("ddp_push", ranks="--ranks")
def push(ranks: str | None = None, **variables: object) -> None:
    """Copy variables to the ranks: ``%ddp_push a b`` or ``ddpnb.push(a=1, b=2)``.

    Args:
        ranks: numbers of the ranks to use, e.g. 0,2-3; default: all ranks.
        **variables: name of a variable; in Python, ``name=value``.
    """
    push_to(this_session().free_cluster(), variables, ranks)


@magic("ddp_pull", words="expression")
def pull(expression: str, *, ranks: str | None = None) -> Any:
    """Copy a value from the ranks: ``%ddp_pull loss --ranks 0 --as x`` or ``ddpnb.pull("loss")``.

    The result is a dict with a value for each rank.  If ``ranks`` names only one rank, the result
    is the value of this rank.

    Args:
        expression: a variable or an expression to evaluate on the ranks.
        ranks: numbers of the ranks to use, e.g. 0,2-3; default: all ranks.
    """
    cluster = this_session().free_cluster()
    chosen = parse_ranks(ranks, len(cluster.ranks))
    values = pull_from(cluster, expression, chosen)
    if ranks is not None and len(chosen) == 1:
        return values[0]
    return dict(zip(chosen, values, strict=True))


@magic(
    "ddp_compare",
    FUNCTIONS,
    options_of(ComparisonSpec),
    options_of(PlotOptions, "log", "target", "panels"),
    options_of(TrainingSpec),
)
def compare(
    *strategies: str, source: Path | str = "", **choices: Any
) -> ComparisonResult | RunningComparison:
    """Train strategies on one task and compare them live: ``%ddp_compare ddp --task digits``.

    Without a cell, ``--task`` names a built-in task.  A ``%%ddp_compare`` cell defines your task:
    ``model()`` and ``data(split)``, where split is "train" or "test".  The cell can also define
    ``loss(outputs, targets)``, ``training_step(model, batch)``, ``optimizer(params)`` and
    ``metric(outputs, targets)``, see docs/your-code.md.  A strategy can have options, such as
    ``ddp:hook=fp16``, and can be a class in the cell, such as ``Averaging:every=2``.

    In Python: ``ddpnb.compare("ddp", "async", task="digits")``.  To train another model, pass your
    functions: ``model=Net, data=load``.  ddpnb also sends everything that these functions use.

    Args:
        *strategies: name of a strategy, with options after a colon.
        source: the text of a cell, or a file such as ``"cell.py"``.
        **choices: as listed.

    Returns:
        The result, with ``.table()``, ``.plot()``, ``.runs()``, ``.save(path)`` and the
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


@magic("ddp_source", show=display)
def source(strategy: str) -> Code:
    """Show the source of a strategy: ``%ddp_source ddp-by-hand``.

    To change the strategy, paste its class into a comparison's cell and rename the class.
    ``ddpnb.source("ddp-by-hand").data`` is the code as a string.

    Args:
        strategy: name of a strategy without options, such as ddp-by-hand.
    """
    if strategy not in STRATEGIES:
        raise one_of("strategy", strategy, STRATEGIES)
    return Code(STRATEGIES[strategy].file.read_text(), language="python")


@magic("ddp_runs")
def runs(text: str = "", *, last: int | None = None) -> Table:
    """List stored runs: ``%ddp_runs ddp --last 9`` or ``ddpnb.runs("ddp", last=9).to_frame()``.

    ``%ddp_runs --show race`` shows a comparison, as ``ddpnb.details("race")`` does.
    ``%ddp_runs --delete race/ddp`` deletes runs, as ``ddpnb.delete("race/ddp")`` does.

    Args:
        text: list only runs with this text in the name, task or state.
        last: maximum number of lines; newest runs first.
    """
    return runs_table(matching(this_session().store.list(), text, last))


@public()
def details(name: str) -> Details:
    """Return everything needed to repeat a comparison.  Same as ``%ddp_runs --show``."""
    return Details(this_session().store.load(name))


@public()
def delete(name: str) -> tuple[str, ...]:
    """Delete stored runs and return their names.  Same as ``%ddp_runs --delete``."""
    return this_session().store.delete(name)


@magic("ddp_plot", options_of(PlotOptions))
def plot(*names: str, **choices: Any) -> ComparisonResult:
    """Draw stored runs in one figure: ``%ddp_plot mine ddp --log`` or ``ddpnb.plot("mine")``.

    Without a name, ``%ddp_plot`` shows the comparison that is training, for example after you
    reload the page.  If no comparison is training, ddpnb shows the latest comparison.

    Args:
        *names: name of a run or a comparison, as shown by ``%ddp_runs``; a strategy's name, such as
            ddp, means its latest run.
        **choices: as listed.
    """
    return this_session().load(names, PlotOptions(**read_options(PlotOptions, choices)))


@public()
def load(*names: str) -> ComparisonResult:
    """Return stored runs as one comparison: ``ddpnb.load("race").steps()`` is a DataFrame.

    Args:
        *names: names that ``ddpnb.runs()`` shows.  Default: the latest comparison.
    """
    return this_session().load(names)


@magic("ddp_export", show=print)
def export(name: str, path: Path | str) -> str:
    """Write stored runs to a file: ``%ddp_export race race.csv``.

    A ``.csv`` has one row per step of each worker, and a ``.runs.csv`` has one row per run.  Other
    files contain the report (``.html``), the figure (``.png``), or a script for torchrun without
    ddpnb (``.py``).  The result names the file.  For a script, it also says how to run the script.

    Args:
        name: name of a run or a comparison, as shown by ``%ddp_runs``.
        path: name of the file; its ending determines the content.
    """
    return this_session().load([name]).save(path)


# -- looking inside -------------------------------------------------------------------------


@magic("ddp_check", words="python")
def check(*names: str) -> ReplicaCheck:
    """Compare the replicas of all ranks: ``%ddp_check model`` or ``ddpnb.check("model")``.

    ddpnb compares parameters, buffers, gradients and the optimizer's state.  The result names the
    first difference and its probable cause.  Without names, ddpnb compares all models and
    optimizers.  The check changes nothing on the ranks and calls no collective.  The result has
    ``.is_same``, ``.sentence()`` and ``.table()``.

    Args:
        *names: name or expression of a model, an optimizer, a tensor or a dict of tensors.

    Raises:
        UserError: the ranks have nothing to compare, or a rank is busy.
    """
    return check_replicas(this_session().idle_cluster(), names)


@magic("ddp_samples", options_of(SamplerSpec), words="python")
def samples(name: str = "", **choices: Any) -> Handout:
    """Show which rank gets which samples: ``%ddp_samples -n 30 --shuffle --no-set-epoch``.

    Without a name, torch's ``DistributedSampler`` on the ranks chooses the samples.
    ``%ddp_samples loader`` reads a sampler or a ``DataLoader`` of the ranks without consuming it.
    If you name a sampler, ddpnb ignores ``-n``, ``--drop-last`` and ``--shuffle``.  The result has
    ``.plot()``, ``.table()``, ``.text()`` and one row per epoch in ``.rows``.

    Args:
        name: name of a sampler or ``DataLoader`` on the ranks.
        **choices: as listed.
    """
    spec = SamplerSpec(expression=name, **read_options(SamplerSpec, choices))
    cluster = this_session().idle_cluster()
    found = ask(cluster, calls.samples(spec))
    return handout_of(spec, [found[rank] for rank in cluster.ranks])


@magic("ddp_show", options_of(CollectiveSpec), save="--save FILE")
def show_collective(
    name: str, *, ranks: str | None = None, save: str = "", **choices: Any
) -> CollectiveResult | TraceResult | str:
    """Run a collective on the ranks and show its effect: ``%ddp_show all_reduce``.

    The result shows each rank's tensor before and after the call, the time, the bytes sent, and
    the algorithm's formula.  The result has ``.plot()`` and ``.text()``.

    ``%ddp_show trace`` draws the trace of the last ``%%ddp --trace`` cell again.
    ``%ddp_show trace --save FILE`` saves the trace, for example for Perfetto.

    Args:
        name: ``all_reduce``, ``broadcast``, ``reduce``, ``scatter``, ``gather``, ``all_gather``,
            ``reduce_scatter``, ``all_to_all``, ``barrier`` or ``trace``.
        ranks: ranks that take part, e.g. 0,2-3; default: all ranks.
        save: file for a trace: .json, .png or .svg.
        **choices: as listed.
    """
    if name == TRACE:
        return last_trace().save(save) if save else last_trace()
    if save:
        raise UserError("--save works only with a trace: %ddp_show trace --save FILE.")
    cluster, chosen = this_session().free_cluster(), read_options(CollectiveSpec, choices)
    spec = CollectiveSpec(name=name, ranks=parse_ranks(ranks, len(cluster.ranks)), **chosen)
    ensure_group(cluster)
    found = ask(cluster, calls.show_collective(spec))
    return CollectiveResult(spec, [each for rank in spec.ranks if (each := found[rank])])


@public()
def last_trace() -> TraceResult:
    """Return the trace of the latest ``%%ddp --trace`` cell.

    The trace has ``.plot()``, ``.text()``, and ``.save("trace.json")`` for Perfetto.  If no cell
    has been traced, a ``UserError`` is raised.
    """
    if (trace := this_session().last_trace) is None:
        raise UserError("No cell has been traced. Begin a cell with %%ddp --trace.")
    return trace


@magic("ddp_inspect", options_of(InspectSpec), options_of(TrainingSpec, *INSPECTED), words="python")
def inspect(
    model: str = "", *, source: str = "", run: str = "", **choices: Any
) -> DdpInspection | AsyncInspection:
    """Measure a step of DDP: ``%ddp_inspect model --batch x --loss "f(output, y)"``.

    In Python: ``ddpnb.inspect("model", batch="x", loss="f(output, y)")``.  The result shows DDP's
    buckets, and each rank's forward pass, backward pass, all-reduces and update on one timeline.
    The result has ``.pictures()``, ``.text()`` and ``.save(path)``.

    ddpnb measures a copy, so the model, its gradients, the optimizer and
    the random numbers stay unchanged.  Without a model, ddpnb inspects ``--task``, the cell's task
    or the task of the last comparison.  ``--run race`` shows which versions of the parameters the
    workers of a stored ``async`` run read and updated.

    Args:
        model: name of a model or DDP module on the ranks.
        source: a cell that defines ``model()`` and ``data(split)``.
        run: show parameter versions of a stored ``async`` run.
        **choices: as listed.

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
    spec = InspectSpec(model=model, **own)
    return inspect_step(session.idle_cluster(), spec, training)


@magic("ddp_predict", options_of(Question))
def predict(
    ranks: str | Sequence[int] = "1,2,4,8", *, run: str = "", **choices: Any
) -> PredictionResult:
    """Predict throughput for other numbers of ranks and other networks.

    Example: ``%ddp_predict --ranks 1,8,1024 --link 100GbE``.  ddpnb calibrates on the latest stored
    comparison with ``single`` and ``no-comm``, or on ``run``.  All formulas are in
    docs/prediction-error.md.  The result has ``.table()``, ``.plot()``, ``.save(path)`` and
    ``.prediction``.

    Args:
        ranks: numbers of ranks, such as ``[1, 2, 64]`` or ``"1,2,64"``.
        run: stored comparison for the calibration.
        **choices: as listed.

    Raises:
        UserError: no comparison is suitable for calibration, or the options contradict each other.
    """
    question = Question(**read_options(Question, {"ranks": ranks} | choices))
    return predicted(this_session().store, question, run)


@magic("ddp_advise")
def advise() -> Table:
    """Recommend a strategy for this machine, with the reason: ``%ddp_advise``.

    The table recommends strategies for different machines, and marks this machine.
    """
    return advice_table(this_session().idle_cluster().states)
