"""The twins in plain Python of the magics that look inside (kernel)."""

from collections.abc import Sequence

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.options import typed
from ddpnb.protocol.replicas import SamplerSpec
from ddpnb.protocol.training_options import make_training_spec
from ddpnb.reports.inside.advice import Advice
from ddpnb.reports.inside.buckets import DdpInspection
from ddpnb.reports.inside.collective import CollectiveResult
from ddpnb.reports.inside.prediction import PredictionResult
from ddpnb.reports.inside.replicas import ReplicaCheck
from ddpnb.reports.inside.samples import Handout, handout_of_run
from ddpnb.reports.inside.traces import TraceResult
from ddpnb.reports.inside.versions import AsyncInspection, async_inspection
from ddpnb.scaling.predict import Question, parse_numbers
from ddpnb.session.inside import (
    check_replicas,
    collective_spec,
    run_collective,
    samples_of_sampler,
)
from ddpnb.session.inspection import InspectionRequest
from ddpnb.session.inspection import inspect as inspect_step
from ddpnb.session.scaling import predicted
from ddpnb.session.session import this_cell_number, this_session


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
    return check_replicas(this_session().idle_cluster(), names)


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
    session = this_session()
    if name and name in session.names():
        return handout_of_run(name, session.store.load(name))
    return samples_of_sampler(session.idle_cluster(), spec)


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
            ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"`` or ``"barrier"``.
        size: of the tensor that a rank gives: ``"4MB"``; by default a few numbers.
        root: the rank that gives, or gets, everything; by default the first.
        op: ``"sum"``, ``"max"``, ``"min"`` or ``"product"``; by default the sum.
        ranks: those that take part, e.g. ``"0,2-3"``; by default all.

    Returns:
        The result, with ``.plot()`` and ``.text()``.

    Raises:
        UserError: there is no such collective, or an option does not suit it.
    """
    cluster = this_session().free_cluster()
    return run_collective(
        cluster, collective_spec(name, len(cluster.ranks), size=size, root=root, op=op, ranks=ranks)
    )


@typed
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


@typed
def inspect(
    model: str = "",
    *,
    batch: str = "",
    loss: str = "",
    task: str = "",
    source: str = "",
    strategy: str = "ddp",
    bucket_cap: float | str = "",
    batch_size: int | str | None = None,
    devices: str = "",
    as_: str = "",
    link: str = "",
    slow: str = "",
    kill: str = "",
    run: str = "",
) -> DdpInspection | AsyncInspection:
    """Return what happens in a training step; the twin of ``%ddp_inspect``.

    All is measured on a copy: models, gradients, optimizers and random numbers stay as they are.

    Args:
        model: a model, or a DDP, of the ranks' cells; by default a task is inspected.
        batch: an expression on the ranks for its input: a tensor, or a tuple or a dict of its
            arguments.
        loss: a scalar made of ``output`` on the ranks; by default the mean of the output.
        task: such as ``"digits"``; by default that of ``source``, or of the last comparison.
        source: a cell that defines ``model()`` and ``data(split)``.
        strategy: ``"ddp"``, or ``"async"``, which may have options.
        bucket_cap: further values of DDP's ``bucket_cap_mb``, ``"0.01,1,25"``.
        batch_size: the task's global batch.
        devices: emulated ones, ``"8xV100"``: the time of a step is computed.
        as_: ``"resnet50"``: whose published figures they have.
        link: the network between emulated devices, ``"1Gbit,0.5ms"``.
        slow: a straggler of an asynchronous run, ``"1:2x"``.
        kill: a death in an asynchronous run, ``"1@1s"``.
        run: a stored asynchronous run to draw.

    Returns:
        The numbers, with ``.pictures()``, ``.text()`` and ``.save(path)``.

    Raises:
        UserError: there is nothing to inspect, or the model does not fit the batch.
        RankError: the user's code failed on a rank.
    """
    named = {
        "batch_size": batch_size,
        "devices": devices,
        "as_": as_,
        "link": link,
        "slow": slow,
        "kill": kill,
    }
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
        bucket_caps=f"{bucket_cap}",
        training=training,
        has_task=bool(task or source),
        given=tuple(given),
        run=run,
    )
    session = this_session()
    if run:
        return async_inspection(session.load([run]).comparison)
    return inspect_step(session.idle_cluster(), request, session.last_training)


@typed
def predict(
    ranks: str | Sequence[int] = "1,2,4,8",
    *,
    link: str = "",
    strategies: str | Sequence[str] = (),
    hosts: int | None = None,
    inside: str = "",
    step: str = "",
    accumulate: int | None = None,
    batch_per_worker: int | None = None,
    run: str = "",
) -> PredictionResult:
    """Predict throughput on other numbers of ranks; the twin of ``%ddp_predict``.

    Args:
        ranks: numbers of ranks, ``[1, 2, 64]`` or ``"1,2,64"``.
        link: between the ranks, or with ``hosts`` between hosts: ``"100GbE"`` or ``"1Gbit,0.5ms"``.
            By default this machine, as it was measured, or the devices that were emulated.
        strategies: ``"ddp,async"``, or a list; by default those compared.
        hosts: ranks on each host.
        inside: the link between the ranks of a host.
        step: a published or measured step of another device, ``"178ms/64"``, in place of this
            machine's: the seconds for so many samples.
        accumulate: micro-batches of ``step``; by default 1.
        batch_per_worker: samples of each rank in a step; by default as in the comparison, or as in
            ``step``.
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
        step=step,
        accumulate=accumulate,
        batch_per_worker=batch_per_worker,
    )
    return predicted(this_session().store, question, run)


@typed
def advise() -> Advice:
    """Recommend a strategy for where the ranks live; the twin of ``%ddp_advise``.

    Returns:
        The result, with ``.table()``, ``.choice`` and ``.reason``.

    Raises:
        UserError: no cluster is running.
    """
    return Advice.of(this_session().idle_cluster().states)
