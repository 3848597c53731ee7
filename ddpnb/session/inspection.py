"""What ``%ddp_inspect`` asks of the ranks: steps of DDP, DataParallel and async (kernel)."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ddpnb.cluster.call import CallEvent, Output
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.supervision import Watch
from ddpnb.history.recorder import new_id
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import DdpReport, Found, InspectSpec
from ddpnb.protocol.messages import OnRank, RunSpec
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.cell_output import PrintedLines
from ddpnb.reports.inside.buckets import DdpInspection
from ddpnb.session.cells import error_of, failures_of, warn_stale
from ddpnb.session.errors import CellInterrupt, RankError

ONE_RANK = "One rank alone sends nothing: start more with %ddp_start -n 2, then inspect again."


def spec_of(
    training: TrainingSpec | None,
    *,
    strategy: str = "ddp",
    model: str = "",
    batch: str = "",
    loss: str = "",
    optimizer: str = "",
    bucket_caps: tuple[float, ...] = (),
    link: str = "",
) -> InspectSpec:
    """Return what to ask of the ranks; without a model, the task of a training is inspected."""
    task = None
    inspection_id = new_id()
    if training is not None:
        chosen = asdict(training) | {"data_seed": training.seed}
        task = RunSpec(run_id=inspection_id, strategy=strategy, **chosen)
    return InspectSpec(
        inspection_id=inspection_id,
        task=task,
        model=model,
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        bucket_caps=bucket_caps,
        link=link,
    )


def inspect_ddp(cluster: Cluster, spec: InspectSpec) -> DdpInspection:
    """Make steps of DDP on all ranks; return what happened in them.

    Raises:
        UserError: there is nothing to inspect; nothing has been sent then.
        RankError: the user's code failed in a step.
    """
    found = find(cluster, spec)
    unused = {name for each in found.values() for name in each.unused}
    returned = ask(cluster, OnRank("inspect_ddp"), spec, bool(unused))
    reports = [returned[rank] for rank in sorted(returned)]
    assert all(isinstance(report, DdpReport) for report in reports)
    first = found[0]
    return DdpInspection(
        title=first.title,
        parameters=first.parameters,
        unused={name: ranks_of(name, found) for name in first_order(first, unused)},
        reports=tuple(reports),
        link=spec.link,
        num_samples=first.num_samples,
    )


def find(cluster: Cluster, spec: InspectSpec) -> dict[int, Found]:
    """Have every rank look at the model on its own; return what each has found.

    Raises:
        UserError: there is no such model on some ranks, or it differs, or does not fit the batch.
    """
    if len(cluster.ranks) == 1:
        raise UserError(ONE_RANK)
    warn_stale(cluster.ensure_group())
    returned = ask(cluster, OnRank("find_inspected"), spec)
    found = {rank: each for rank, each in sorted(returned.items()) if isinstance(each, Found)}
    shapes = {rank: [(p.name, p.shape) for p in each.parameters] for rank, each in found.items()}
    others = [rank for rank, each in shapes.items() if each != shapes[0]]
    if others:
        raise UserError(
            f"{found[0].title} has other parameters on {spoken_ranks(others)} than on rank 0: "
            "DDP needs the same on every rank."
        )
    return found


def ask(cluster: Cluster, function: OnRank, *arguments: Any) -> dict[int, Any]:
    """Return what each rank answers; a failure on one frees the others.

    Raises:
        UserError: a mistake that a rank has found.
        RankError: anything else that has failed on a rank.
        KeyboardInterrupt: it was interrupted; the ranks have stopped.
    """
    printed = PrintedLines()

    def handle(event: CallEvent) -> None:
        if isinstance(event, Output):
            printed.take(event.rank, event.kind, event.content)

    printed.begin(cluster.ranks)
    watch = Watch(
        cluster=cluster,
        call=cluster.submit(function, *arguments, ranks=cluster.ranks),
        handle=handle,
        tick=lambda: None,
        abort_after_failure_seconds=cluster.timeouts.abort_validation_after_seconds,
    )
    try:
        watch.run()
    except KeyboardInterrupt:
        raise CellInterrupt from None
    finally:
        printed.show()
    failures = failures_of(watch)
    by_text: dict[str, list[int]] = {}
    for failure in failures:
        if failure.name == UserError.__name__:
            by_text.setdefault(failure.text, []).append(failure.rank)
    if by_text:
        text, ranks = min(by_text.items(), key=lambda item: min(item[1]))
        on_all = len(ranks) == len(cluster.ranks)
        raise UserError(text if on_all else f"On {spoken_ranks(ranks)} alone: {text}")
    if failures:
        raise RankError(failures)
    if (error := error_of(watch)) is not None:
        raise error
    return watch.returned


def first_order(found: Found, names: set[str]) -> list[str]:
    """Return some of the parameters, in the model's order."""
    return [each.name for each in found.parameters if each.name in names]


def ranks_of(name: str, found: Mapping[int, Found]) -> tuple[int, ...]:
    """Return the ranks where a parameter had no part in the loss."""
    return tuple(rank for rank, each in found.items() if name in each.unused)
