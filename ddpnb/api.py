"""The magics' twins in plain Python (kernel)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpnb.cluster.placement import ClusterSpec
from ddpnb.history.query import Search
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Script
from ddpnb.protocol.notation import parse_target
from ddpnb.protocol.options import typed
from ddpnb.protocol.replicas import SamplerSpec
from ddpnb.protocol.training_options import make_training_spec, takes_training_options
from ddpnb.reports.inside.advice import AdviceResult
from ddpnb.reports.inside.collective import CollectiveResult
from ddpnb.reports.inside.links import LinkMatrix
from ddpnb.reports.inside.prediction import PredictionResult
from ddpnb.reports.inside.replicas import ReplicaCheck
from ddpnb.reports.inside.samples import Handout
from ddpnb.reports.inside.traces import TraceResult
from ddpnb.reports.listing import Details, runs_table
from ddpnb.reports.result import ComparisonResult
from ddpnb.reports.result import export as write_export
from ddpnb.reports.style import PlotOptions
from ddpnb.reports.table import Table
from ddpnb.scaling.predict import Question, parse_numbers
from ddpnb.session.background import RunningComparison
from ddpnb.session.cells import RunningCell, read_script
from ddpnb.session.comparison import ComparisonSpec
from ddpnb.session.inspection import Inspection, InspectionRequest
from ddpnb.session.session import this_cell_number, this_session


@typed
def start(
    n: int | None = None,
    *,
    device: str = "auto",
    backend: str = "auto",
    threads: int | None = None,
    method: str | None = None,
    detach: float = 0.0,
    attach: bool | str = False,
    hosts: str = "",
    interface: str = "",
    python: str = "",
) -> Table:
    """Start the ranks and form the process group; the twin of ``%ddp_start``.

    Returns once every rank has finished an all-reduce.  A cluster that is already running
    is used as it is.

    Args:
        n: number of ranks; by default one per GPU, or up to four on the CPU's cores.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        backend: ``"auto"``, ``"gloo"`` or ``"nccl"``.
        threads: CPU threads of each rank; by default the cores divided by the ranks.
        method: ``"fork"`` or ``"spawn"``; by default fork on Linux, spawn elsewhere.
        detach: seconds that the ranks outlive the kernel, so that another one can attach.
        attach: whether to take over ranks that have outlived their kernel, with their
            variables; the cluster's name if there are several.
        hosts: hosts that ssh reaches, each with its number of ranks: ``"a:4,b:4"``.
        interface: the network interface between them; by default the one that ssh came by.
        python: the Python on them; by default this one's path if it exists, else ``python3``.

    Returns:
        The table of ranks.

    Raises:
        UserError: this machine, or a host, does not offer it.
    """
    spec = ClusterSpec(
        num_ranks=n,
        device=device,
        backend=backend,
        num_threads=threads,
        method=method,
        detach_seconds=detach,
        hosts=hosts,
        interface=interface,
        python=python,
    )
    if attach is False:
        return this_session().start(spec)
    return this_session().attach(spec, "" if attach is True else attach)


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
def hosts() -> LinkMatrix:
    """Measure latency and bandwidth between the ranks; the twin of ``%ddp_hosts``.

    Returns:
        A matrix, with ``.table()``, ``.plot()``, ``.latencies`` and ``.rates`` by pairs of ranks.
    """
    return this_session().links()


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
        trace: whether to record every collective, message and call of the store.

    Returns:
        The running cell if ``wait`` is false; else the trace of a cell that is traced, with
        ``.plot()``, ``.text()``, ``.store()``, ``.save("trace.json")``.

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
        trace: whether to record every collective, message and call of the store.

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
    source: str = "",
    repeats: int = 1,
    name: str = "",
    baseline: bool = True,
    wait: bool = True,
    y: str = "",
    log: bool = False,
    target: float | str | None = None,
    **choices: Any,
) -> ComparisonResult | RunningComparison:
    """Train strategies on the same task and compare them live; the twin of ``%%ddp_compare``.

    Args:
        *strategies: ``"ddp"``, with options ``"ddp:hook=fp16"``, or the name of a class in
            ``source``.
        source: a cell that defines ``model()`` and ``data(split)``, optionally
            what docs/your-code.md lists, and a strategy of your own.
        repeats: how often each strategy is trained; the strategies take turns.
        name: the name of the stored comparison; by default made from the task.
        baseline: whether to train ``single`` too, as the reference of the speed-up, and
            ``no-comm``, as its ceiling.
        wait: whether to wait until everything is trained.
        y: draw this further number of ``training_step`` in place of the loss.
        log: whether losses are drawn on a logarithmic axis.
        target: a training loss, or ``"accuracy=0.95"`` on held-out samples; when each strategy
            reaches it is in the table.
        **choices: as listed.

    Returns:
        The result, with ``.table()``, ``.plot()``, ``.to_frame()``, ``.save(folder)``.  If ``wait``
        is false, the running comparison, with ``.wait()``, ``.interrupt()``, ``.result``.

    Raises:
        UserError: something cannot be trained; nothing has been trained then.
        RankError: a strategy failed; the others have been trained.
    """
    training = make_training_spec(choices, in_python=True, source=source)
    spec = ComparisonSpec(
        strategies=strategies,
        training=training,
        num_repeats=repeats,
        name=name,
        baseline=baseline,
        options=PlotOptions(y=y, log=log, target=parse_target(target)),
    )
    return this_session().compare(spec, wait=wait)


@typed
def runs(
    text: str = "", *, task: str = "", strategy: str = "", since: str = "", last: int | None = None
) -> Table:
    """Return the table of stored runs; the twin of ``%ddp_runs``.

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
    *names: str, x: str = "", y: str = "", log: bool = False, target: float | str | None = None
) -> ComparisonResult:
    """Return stored runs as one comparison that a notebook draws; the twin of ``%ddp_plot``.

    Args:
        *names: as ``runs`` lists them; ``"ddp"`` is the latest run of that strategy.
        x: draw losses against only ``"samples"``, ``"seconds"`` or ``"updates"``.
        y: draw this further number, which steps or ``ddpnb.log`` measured, in place of the loss.
        log: whether losses are drawn on a logarithmic axis.
        target: a training loss, or ``"accuracy=0.95"`` on held-out samples; when each run reaches
            it is in the table.
    """
    return this_session().load(names, PlotOptions(x=x, y=y, log=log, target=parse_target(target)))


@typed
def load(*names: str) -> ComparisonResult:
    """Return stored runs as one comparison: ``load("race").steps()`` is a DataFrame.

    Args:
        *names: as ``runs`` lists them.
    """
    return this_session().load(names)


@typed
def export(name: str, path: Path | str, *, strategy: str = "", sbatch: bool = False) -> str:
    """Write stored runs to a file; the twin of ``%ddp_export``.

    Args:
        name: a run or a comparison, as ``runs`` lists them.
        path: the ending chooses the content.  ``.csv``: one row per step of each worker;
            ``.runs.csv``: one row per run; ``.json``: everything; ``.html``: the report;
            ``.png``: the figure; ``.py``: the comparison's cell as a script for torchrun.
            Without an ending: a folder for TensorBoard.
        strategy: which one a script trains with; by default ddp, if it was compared.
        sbatch: whether to write a job file for Slurm beside a script.

    Returns:
        A sentence about what was written; after that of a script, the lines that run it.
    """
    return write_export(this_session().load([name]), path, strategy=strategy, sbatch=sbatch)


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


# -- inside --------------------------------------------------------------------------------


@typed
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
    return this_session().check(names)


@typed
def samples(
    name: str = "",
    *,
    n: int = 30,
    epochs: int = 3,
    set_epoch: bool = True,
    drop_last: bool = False,
    shuffle: bool = False,
) -> Handout:
    """Show which rank gets which samples; the twin of ``%ddp_samples``.

    Args:
        name: a sampler or a ``DataLoader`` on the ranks, which is read and not consumed; or a
            stored asynchronous run.  By default torch's ``DistributedSampler`` is made there.
        n: samples of the data set for which it is made.
        epochs: how many are drawn.
        set_epoch: whether ``set_epoch`` is called before each.
        drop_last: whether it leaves samples out, in place of handing some out twice.
        shuffle: whether it shuffles.

    Returns:
        The result: ``.plot()``, ``.table()``, ``.text()``, and ``.rows``, an epoch each.
    """
    spec = SamplerSpec(
        expression=name,
        num_samples=n,
        shuffle=shuffle,
        drop_last=drop_last,
        num_epochs=epochs,
        sets_epoch=set_epoch,
    )
    return this_session().samples(spec)


@typed
def show_collective(
    name: str,
    *,
    size: str | int = "",
    root: int | None = None,
    op: str = "",
    ranks: str | None = None,
) -> CollectiveResult:
    """Run one collective on the ranks and show what it does; the twin of ``%ddp_show``.

    Args:
        name: ``"all_reduce"``, ``"broadcast"``, ``"reduce"``, ``"scatter"``, ``"gather"``,
            ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"barrier"``, ``"send"`` or
            ``"recv"``.
        size: of the tensor that a rank gives: ``"4MB"``; by default a few numbers.
        root: the rank that gives, or gets, everything; by default the first.
        op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"`` or ``"product"``; by default the sum.
        ranks: those that take part, e.g. ``"0,2-3"``; by default all.

    Returns:
        The result, with ``.plot()`` and ``.text()``.

    Raises:
        UserError: there is no such collective, or an option does not suit it.
    """
    return this_session().show_collective(name, size=size, root=root, op=op, ranks=ranks)


@typed
def last_trace() -> TraceResult:
    """Return the trace of the latest cell of ``%%ddp --trace``.

    Returns:
        With ``.plot()``, ``.text()``, ``.store()``, ``.save("trace.json")`` for Perfetto.

    Raises:
        UserError: no cell has been traced.
    """
    if (trace := this_session().last_trace) is None:
        raise UserError("No cell has been traced: begin one with %%ddp --trace.")
    return trace


@typed
def inspect(
    model: str = "",
    *,
    batch: str = "",
    loss: str = "",
    optimizer: str = "",
    task: str = "",
    source: str = "",
    strategy: str = "ddp",
    bucket_cap: float | str = "",
    batch_size: int | str | None = None,
    link: str = "",
    slow: str = "",
    kill: str = "",
    run: str = "",
) -> Inspection:
    """Return what happens in a training step; the twin of ``%ddp_inspect``.

    All is measured on a copy: models, gradients, optimizers and random numbers stay as they are.

    Args:
        model: a model, or a DDP, of the ranks' cells; by default a task is inspected.
        batch: an expression on the ranks for its input: a tensor; a tuple, the first of which the
            model is called with; or a dict of its arguments.
        loss: a scalar made of ``output`` on the ranks, or a function of the output and the rest of
            the batch; by default the mean of the output.
        optimizer: an optimizer on the ranks; by default plain SGD.
        task: such as ``"digits"``; by default that of ``source``, or of the last comparison.
        source: a cell that defines ``model()`` and ``data(split)``.
        strategy: ``"ddp"``, ``"dp"``, or ``"async"``, which may have options.
        bucket_cap: further values of DDP's ``bucket_cap_mb``, ``"0.01,1,25"``.
        batch_size: the task's global batch.
        link: an emulated network, ``"1Gbit,0.5ms"``.
        slow: a straggler of an asynchronous run, ``"1:2x"``.
        kill: a death in an asynchronous run, ``"1@1s"``.
        run: a stored asynchronous run to draw.

    Returns:
        The result, with ``.figures()``, ``.table()`` and the numbers in ``.result``.

    Raises:
        UserError: there is nothing to inspect, or the model does not fit the batch.
        RankError: the user's code failed on a rank.
    """
    named = {"batch_size": batch_size, "link": link, "slow": slow, "kill": kill}
    given = {name: value for name, value in named.items() if value}
    task_or_any = {} if source else {"task": task or "digits"}
    training = make_training_spec(
        given | task_or_any, source=source, cell=this_cell_number() if source else 0
    )
    request = InspectionRequest(
        strategy=strategy,
        model=model,
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        bucket_caps=f"{bucket_cap}",
        training=training,
        has_task=bool(task or source),
        given=tuple(given),
        run=run,
    )
    return this_session().inspect(request)


@typed
def predict(
    ranks: str | Sequence[int] = "1,2,4,8",
    *,
    link: str = "",
    strategies: str | Sequence[str] = (),
    hosts: int | None = None,
    inside: str = "",
    cores: int | None = None,
    algorithm: str = "",
    batch_per_worker: int | None = None,
    samples: float | None = None,
    critical_batch: float | None = None,
    run: str = "",
) -> PredictionResult:
    """Predict throughput on other numbers of ranks; the twin of ``%ddp_predict``.

    Args:
        ranks: numbers of ranks, ``[1, 2, 64]`` or ``"1,2,64"``.
        link: between the ranks, or with ``hosts`` between hosts: ``"100GbE"`` or ``"1Gbit,0.5ms"``.
            By default this machine, as it was measured.
        strategies: ``"ddp,async,async-shards=4"``, or a list; by default those compared.
        hosts: ranks on each host.
        inside: the link between the ranks of a host.
        cores: that the ranks of a host share; by default each has a device of its own.
        algorithm: of all-reduces: ``"ring"``, ``"double-tree"``, ``"best"`` ...
        batch_per_worker: samples of each rank in a step; by default as in the comparison.
        samples: that the smallest batches need to the target; with ``critical_batch``.
        critical_batch: the batch size that needs twice as many.
        run: the comparison to calibrate on; by default the last that can be used.

    Returns:
        The result, with ``.table()``, ``.plot()``, ``.save(path)``, ``.prediction``.

    Raises:
        UserError: there is nothing to calibrate on, or the question makes no sense.
    """
    names = strategies.split(",") if isinstance(strategies, str) else strategies
    question = Question(
        ranks=parse_numbers(ranks if isinstance(ranks, str) else ",".join(map(str, ranks))),
        strategies=tuple(name.strip() for name in names if name.strip()),
        link=link,
        ranks_per_host=hosts,
        inside=inside,
        cores=cores,
        algorithm=algorithm,
        batch_per_worker=batch_per_worker,
        samples=samples,
        critical_batch=critical_batch,
    )
    return this_session().predict(question, run)


@typed
def advise(*, model: str = "", input: str = "") -> AdviceResult:
    """Measure this machine and recommend a strategy; the twin of ``%ddp_advise``.

    It takes some seconds: compute, memory, all-reduces, and what connects GPUs.

    Args:
        model: a model on the ranks, by the name of its variable; its forward and backward pass are
            measured on a copy.
        input: the tensor on the ranks that it is called with; by default one is made up.

    Returns:
        The result, with ``.table()``, ``.measures()``, ``.advice``.

    Raises:
        UserError: no cluster is running, or the ranks have no such model.
    """
    return this_session().advise(model, input)
