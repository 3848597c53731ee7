"""The magics' twins in plain Python (kernel)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from IPython.display import Code

from ddpnb.cluster.placement import ClusterSpec
from ddpnb.history.query import Search
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.messages import Script
from ddpnb.protocol.notation import parse_target
from ddpnb.protocol.options import typed
from ddpnb.protocol.training_options import make_training_spec, takes_training_options
from ddpnb.reports.inside.traces import TraceResult
from ddpnb.reports.listing import Details, runs_table
from ddpnb.reports.result import ComparisonResult
from ddpnb.reports.style import PlotOptions
from ddpnb.reports.table import Table
from ddpnb.session.background import RunningComparison
from ddpnb.session.cells import RunningCell, cell_in, read_script
from ddpnb.session.comparison_spec import ComparisonSpec
from ddpnb.session.functions import NotebookFunctions
from ddpnb.session.session import this_session


@typed
def start(
    n: int | None = None,
    *,
    devices: str = "",
    as_: str = "",
    device: str = "auto",
    backend: str = "auto",
    threads: int | None = None,
    method: str | None = None,
    hosts: str = "",
    interface: str = "",
    python: str = "",
    engines: str = "",
    profile: str = "",
    ranks_per_host: int | None = None,
    slurm: str = "",
    timeout: float | None = None,
) -> Table:
    """Start the ranks and form the process group; the twin of ``%ddp_start``.

    Returns once every rank has finished an all-reduce.  A cluster that is already running
    is used as it is.

    Args:
        n: number of ranks; by default one per GPU, or up to four on the CPU's cores.
        devices: ``"8xV100"``: a rank for each of these, which all comparisons emulate.
        as_: ``"resnet50"``: whose published figures they have.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        backend: ``"auto"``, ``"gloo"`` or ``"nccl"``.
        threads: CPU threads of each rank; by default the cores divided by the ranks.
        method: ``"fork"`` or ``"spawn"``; by default fork on Linux, spawn elsewhere.
        hosts: hosts that ssh reaches, each with its number of ranks: ``"a:4,b:4"``.
        interface: the network interface between them; by default the one that ssh came by.
        python: the Python on them; by default this one's path if it exists, else ``python3``.
        engines: ``"slurm"`` or ``"mpi"`` to have that start the ranks; by default ssh does.
        profile: of ipyparallel, to have its launcher (PBS, LSF, SGE, ...) start the ranks.
        ranks_per_host: of ``n``, with ``engines`` or ``profile``; by default all on one host.
        slurm: options of Slurm's job: ``"partition=gpu time=1:00:00"``.
        timeout: seconds in the queue; 600 by default.

    Returns:
        The table of ranks.

    Raises:
        UserError: this machine, or a host, does not offer it.
    """
    spec = ClusterSpec(
        num_ranks=n,
        devices=devices,
        as_=as_,
        device=device,
        backend=backend,
        num_threads=threads,
        method=method,
        hosts=hosts,
        interface=interface,
        python=python,
        engines=engines,
        profile=profile,
        ranks_per_host=ranks_per_host,
        slurm=slurm,
        timeout=timeout,
    )
    return this_session().start(spec)


@typed
def stop() -> bool:
    """End every process of the cluster; the twin of ``%ddp_stop``.

    Returns:
        Whether a cluster was running.
    """
    return this_session().stop()


@typed
def restart(n: int | None = None, *, ranks: str | None = None) -> Table:
    """End ranks and start new ones; their variables are lost.  The twin of ``%ddp_restart``.

    Args:
        n: number of ranks; by default as many as before.
        ranks: only these, e.g. ``"1"``; the others keep their variables.
    """
    return this_session().restart(n, ranks=ranks)


@typed
def why() -> str:
    """Say where every rank is at this moment, with stacks; the twin of ``%ddp_why``."""
    return this_session().why()


@typed
def status() -> Table:
    """Return the table of what every rank is doing; the twin of ``%ddp_status``."""
    return this_session().status()


@typed
def interrupt() -> str:
    """Stop what runs in the background, keep variables; the twin of ``%ddp_interrupt``.

    Returns:
        A sentence about what was stopped.
    """
    return this_session().interrupt()


@typed
def run_cell(
    source: str,
    *,
    ranks: str | None = None,
    wait: bool = True,
    name: str = "",
    timeout: float | None = None,
    check: bool = False,
    debug: int | None = None,
    trace: bool = False,
) -> RunningCell | TraceResult | None:
    """Run a cell on ranks; the twin of ``%%ddp``.

    Args:
        source: the cell's text; magics, ``!commands`` and ``await`` work.
        ranks: the ranks that run it, e.g. ``"0,2-3"``; by default all.
        wait: whether to wait until every rank has ended it.
        name: the run that ``ddpnb.log`` in the cell adds to.
        timeout: seconds after which the ranks are interrupted.
        check: whether torch compares the exact shapes of collectives across the ranks, which
            is slow.  The first checked cell has a new process group.
        debug: the rank that stops at ``breakpoint()``, with the notebook's prompt.
        trace: whether to record every collective and message.

    Returns:
        The running cell if ``wait`` is false; else the trace of a cell that is traced, with
        ``.plot()``, ``.text()``, ``.save("trace.json")``.

    Raises:
        RankError: it failed on a rank.
        TimeoutError: it took longer than ``timeout``.
    """
    return this_session().run_cell(
        source,
        ranks=ranks,
        wait=wait,
        name=name,
        timeout=timeout,
        check=check,
        debug=debug,
        trace=trace,
    )


@typed
def debug(rank: int) -> None:
    """Look into a rank's last error with IPython's debugger; the twin of ``%ddp_debug``."""
    this_session().run_cell("%debug", ranks=str(rank), debug=rank)


@typed
def run_script(
    script: Path | str,
    arguments: Sequence[object] = (),
    *,
    module: bool = False,
    keep: bool = False,
    ranks: str | None = None,
    wait: bool = True,
    name: str = "",
    timeout: float | None = None,
    check: bool = False,
    debug: int | None = None,
    trace: bool = False,
) -> RunningCell | TraceResult | None:
    """Run a script that was written for ``torchrun`` on the ranks; the twin of ``%ddp_run``.

    It runs in a ``__main__`` of its own.  Where it forms a process group, it has the cluster's.

    Args:
        script: its path, from the notebook's folder; the name of a module if ``module`` is true.
        arguments: its ``sys.argv[1:]``, such as ``["--epochs", "3"]``.
        module: whether it is a module, as ``torchrun -m`` takes one.
        keep: whether its variables are those of later cells.
        ranks: and the rest: as ``run_cell`` takes them.
        wait: whether to wait until every rank has ended it.
        name: the run that ``ddpnb.log`` in the script adds to.
        timeout: seconds after which the ranks are interrupted.
        check: whether torch compares the exact shapes of collectives across the ranks.
        debug: the rank that stops at ``breakpoint()``, with the notebook's prompt.
        trace: whether to record every collective and message.

    Returns:
        The running script if ``wait`` is false; else the trace of a script that is traced.

    Raises:
        RankError: it failed on a rank, or ended with an exit code other than 0.
        TimeoutError: it took longer than ``timeout``.
    """
    if isinstance(arguments, str) or not isinstance(arguments, Sequence):
        raise UserError("arguments takes a list of texts, such as ['--epochs', '3'].")
    path, source = ("", "") if module else read_script(str(script))
    return this_session().run_cell(
        source,
        ranks=ranks,
        wait=wait,
        name=name,
        timeout=timeout,
        check=check,
        debug=debug,
        trace=trace,
        script=Script(
            name=str(script),
            path=path,
            arguments=tuple(map(str, arguments)),
            keeps_variables=keep,
        ),
    )


@typed
def push(ranks: str | None = None, **variables: object) -> None:
    """Copy variables to the ranks: ``push(a=1, b=2)``; the twin of ``%ddp_push``."""
    this_session().push(variables, ranks)


@typed
def pull(expression: str, *, ranks: str | None = None) -> Any:
    """Return the value of an expression on the ranks; the twin of ``%ddp_pull``.

    Returns:
        A dict from rank to value; if ``ranks`` names one rank, its value.
    """
    return this_session().pull(expression, ranks)


@typed
@takes_training_options
def compare(
    *strategies: str,
    source: Path | str = "",
    model: object = None,
    data: object = None,
    loss: object = None,
    metric: object = None,
    training_step: object = None,
    validation_step: object = None,
    optimizer: object = None,
    collate_fn: object = None,
    repeats: int = 1,
    name: str = "",
    baseline: bool = True,
    wait: bool = True,
    y: str = "",
    log: bool = False,
    target: float | str | None = None,
    panels: str = "",
    **choices: Any,
) -> ComparisonResult | RunningComparison:
    """Train strategies on the same task and compare them live; the twin of ``%%ddp_compare``.

    Args:
        *strategies: ``"ddp"``, with options ``"ddp:hook=fp16"``, or the name of a class in
            ``source``.
        source: a cell that defines ``model()`` and ``data(split)``, optionally
            what docs/your-code.md lists, and a strategy of your own; or a file,
            ``"cell.py"``.
        model: in place of ``source``: a function that returns a new model.  Functions and
            classes of the notebook travel with the names that they use.
        data: with ``model``: a function of ``"train"`` or ``"test"`` that returns samples.
        loss: and the following, with ``model``: functions as a cell defines them.
        metric: of all held-out outputs and their targets.
        training_step: of model and batch.
        validation_step: likewise, on held-out samples.
        optimizer: of the parameters.
        collate_fn: of the items of a batch.
        repeats: how often each strategy is trained; the strategies take turns.
        name: the name of the stored comparison; by default made from the task.
        baseline: whether to train ``single`` too, as the reference of the speed-up, and
            ``no-comm``, as its ceiling.
        wait: whether to wait until everything is trained.
        y: draw this further number of ``training_step`` in place of the loss.
        log: whether losses are drawn on a logarithmic axis.
        target: a training loss, or ``"accuracy=0.95"`` on held-out samples; when each strategy
            reaches it is in the table.
        panels: ``"all"``: draw every panel.
        **choices: as listed.

    Returns:
        The result, with ``.table()``, ``.plot()``, ``.to_frame()``, ``.save(path)``, and the
        trained ``.model("ddp")``.  If ``wait``
        is false, the running comparison, with ``.wait()``, ``.interrupt()``, ``.result``.

    Raises:
        UserError: something cannot be trained; nothing has been trained then.
        RankError: a strategy failed; the others have been trained.
    """
    functions = NotebookFunctions.of(
        {
            "model": model,
            "data": data,
            "loss": loss,
            "metric": metric,
            "training_step": training_step,
            "validation_step": validation_step,
            "optimizer": optimizer,
            "collate_fn": collate_fn,
        }
    )
    if functions is not None and (source or "task" in choices):
        other = "source" if source else "task"
        raise UserError(
            f"compare: {other}= says what is trained, and so does model=: leave one of them out."
        )
    cell = functions.source if functions else cell_in(source)
    training = make_training_spec(choices, in_python=True, source=cell)
    spec = ComparisonSpec(
        strategies=strategies,
        training=training,
        num_repeats=repeats,
        name=name,
        baseline=baseline,
        options=PlotOptions(y=y, log=log, target=parse_target(target), panels=panels),
        functions=functions,
    )
    return this_session().compare(spec, wait=wait)


@typed
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
        near = closest(strategy, STRATEGIES)
        advice = f"did you mean {near}?" if near else f"there are {', '.join(STRATEGIES)}."
        raise UserError(f"There is no strategy {strategy!r} with a file; {advice}")
    return Code(STRATEGIES[strategy].file.read_text(), language="python")


@typed
def runs(
    text: str = "", *, task: str = "", strategy: str = "", since: str = "", last: int | None = None
) -> Table:
    """Return the table of stored runs, with ``.to_frame()``; the twin of ``%ddp_runs``.

    Args:
        text: only runs whose name, task or state contains this.
        task: only runs of this task.
        strategy: only runs of this strategy.
        since: only runs started within the last ``"90m"``, ``"12h"``, ``"2d"`` or ``"1w"``.
        last: only this many lines, the newest.
    """
    search = Search(text=text, task=task, strategy=strategy, since=since, last=last)
    return runs_table(search.among(this_session().store.list()))


@typed
def details(name: str) -> Details:
    """Return all that is needed to repeat a comparison; the twin of ``%ddp_runs --show``."""
    return Details(this_session().store.load(name))


@typed
def rename(name: str, new_name: str) -> str:
    """Rename a stored comparison; return its new name.  The twin of ``%ddp_runs --rename``."""
    return this_session().store.rename(name, new_name)


@typed
def delete(name: str) -> tuple[str, ...]:
    """Delete stored runs; return their names.  The twin of ``%ddp_runs --delete``."""
    return this_session().store.delete(name)


@typed
def plot(
    *names: str,
    x: str = "",
    y: str = "",
    log: bool = False,
    target: float | str | None = None,
    panels: str = "",
) -> ComparisonResult:
    """Return stored runs as one comparison that a notebook draws; the twin of ``%ddp_plot``.

    Args:
        *names: as ``runs`` lists them; ``"ddp"`` is the latest run of that strategy.
        x: draw losses against only ``"samples"``, ``"seconds"`` or ``"updates"``.
        y: draw this further number, which steps or ``ddpnb.log`` measured, in place of the loss.
        log: whether losses are drawn on a logarithmic axis.
        target: a training loss, or ``"accuracy=0.95"`` on held-out samples; when each run reaches
            it is in the table.
        panels: ``"all"``: draw every panel.
    """
    goal = parse_target(target)
    options = PlotOptions(x=x, y=y, log=log, target=goal, panels=panels)
    return this_session().load(names, options)


@typed
def load(*names: str) -> ComparisonResult:
    """Return stored runs as one comparison: ``load("race").steps()`` is a DataFrame.

    Args:
        *names: as ``runs`` lists them.
    """
    return this_session().load(names)


@typed
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


@typed
def report(name: str, path: Path | str) -> Path:
    """Write a page that needs no other file: figure, table, code, environment.

    Args:
        name: a run or a comparison, as ``runs`` lists them.
        path: must end with ``.html``.

    Returns:
        The path.
    """
    target = Path(path)
    if target.suffix != ".html":
        raise UserError(f"The name of a report ends with .html, unlike {target.name}.")
    export(name, target)
    return target
