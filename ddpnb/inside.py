"""The twins in plain Python of the magics that look inside (kernel)."""

from collections.abc import Sequence
from typing import Any

from ddpnb.protocol import calls
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import parse_ranks
from ddpnb.protocol.options import options_of, read_options
from ddpnb.protocol.replicas import SamplerSpec
from ddpnb.protocol.trace import CollectiveSpec
from ddpnb.protocol.training_options import TrainingSpec, make_training_spec
from ddpnb.reports.inside.advice import advice
from ddpnb.reports.inside.buckets import DdpInspection
from ddpnb.reports.inside.collective import CollectiveResult
from ddpnb.reports.inside.prediction import PredictionResult
from ddpnb.reports.inside.replicas import ReplicaCheck
from ddpnb.reports.inside.samples import Handout, handout_of
from ddpnb.reports.inside.traces import TraceResult
from ddpnb.reports.inside.versions import AsyncInspection, async_inspection
from ddpnb.reports.table import Table
from ddpnb.scaling.predict import Question
from ddpnb.session.asking import ask
from ddpnb.session.inside import INSPECTED, InspectionRequest, check_replicas, inspect_step
from ddpnb.session.scaling import predicted
from ddpnb.session.session import this_cell_number, this_session
from ddpnb.twins import twin


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


@twin(options_of(InspectionRequest), options_of(TrainingSpec, "task", *INSPECTED))
def inspect(
    model: str = "", *, source: str = "", **choices: Any
) -> DdpInspection | AsyncInspection:
    """Return what happens in a training step; the twin of ``%ddp_inspect``.

    All is measured on a copy: models, gradients, optimizers and random numbers stay as they are.

    Args:
        model: a model, or a DDP, of the ranks' cells; by default a task is inspected.
        source: a cell that defines ``model()`` and ``data(split)``.
        **choices: as listed.

    Returns:
        The numbers, with ``.pictures()``, ``.text()`` and ``.save(path)``.

    Raises:
        UserError: there is nothing to inspect, or the model does not fit the batch.
        RankError: the user's code failed on a rank.
    """
    given = {name: choices[name] for name in INSPECTED if choices.get(name)}
    task = choices.get("task") or ("" if source else "digits")
    training = make_training_spec(
        given | ({"task": task} if task else {}),
        source=source,
        cell=this_cell_number() if source else 0,
    )
    request = InspectionRequest(
        model=model,
        training=training,
        has_task=bool(choices.get("task") or source),
        given=tuple(given),
        **read_options(InspectionRequest, choices),
    )
    session = this_session()
    if request.run:
        return async_inspection(session.load([request.run]).comparison)
    return inspect_step(session.idle_cluster(), request, session.last_training)


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
