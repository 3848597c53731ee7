"""Checks of every training of a comparison before the first one starts (kernel)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.supervision import Watch
from ddpnb.history.query import StoredRun, resolve
from ddpnb.history.store import Store
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Checked, OnRank, RunSpec
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.session.cells import failures_of
from ddpnb.session.errors import CellInterrupt, RankError


def with_checkpoints(
    specs: Sequence[RunSpec], asked: Collection[str], store: Store
) -> tuple[RunSpec, ...]:
    """Complete trainings with the folder of checkpoints and the run that each resumes.

    Args:
        specs: the trainings; ``resume`` is what the user wrote.
        asked: the strategies that the user named.  A baseline that was added to them is left
            out if the resumed comparison did not train it.
        store: the stored runs.

    Raises:
        UserError: there is no such run to resume.
    """
    if not any(spec.save_every or spec.resume for spec in specs):
        return tuple(specs)
    placed = [replace(spec, checkpoints=str(store.checkpoints)) for spec in specs]
    address = placed[0].resume
    if not address:
        return tuple(placed)
    runs = resolve(address, store.list())
    names = {run.name for run in runs}
    if missing := [strategy for strategy in asked if strategy not in names]:
        raise UserError(
            f"{address} has no run of {missing[0]} to resume; it has: {', '.join(sorted(names))}."
        )
    found = [(spec, _resumed_by(spec, runs)) for spec in placed if spec.strategy in names]
    return tuple(replace(spec, resume=run.run_id, resumed=run.address) for spec, run in found)


def _resumed_by(spec: RunSpec, runs: Sequence[StoredRun]) -> StoredRun:
    """Return the run that a training resumes: the same strategy and repeat, else the last one."""
    same = [run for run in runs if run.name == spec.strategy]
    return next((run for run in same if run.repeat == spec.repeat), same[-1])


def check(cluster: Cluster, spec: RunSpec) -> Checked:
    """Check a training on every rank.

    Returns:
        What rank 0 found.

    Raises:
        UserError: a choice does not fit the training.
        RankError: the cell itself failed.
        KeyboardInterrupt: the check was interrupted; the ranks have stopped.
    """
    watch = Watch(
        cluster=cluster,
        call=cluster.submit(OnRank("check"), spec, ranks=cluster.ranks),
        handle=lambda _: None,
        tick=lambda: None,
        free_after_seconds=cluster.timeouts.free_checks_after_seconds,
    )
    try:
        watch.run()
    except KeyboardInterrupt:
        raise CellInterrupt from None
    failures = failures_of(watch)
    for failure in failures:
        if failure.name == UserError.__name__:
            raise UserError(failure.text)
    if failures:
        raise RankError(failures)
    found = {rank: each for rank, each in watch.returned.items() if isinstance(each, Checked)}
    _check_sizes(found)
    return found[0]


def _check_sizes(found: Mapping[int, Checked]) -> None:
    """Refuse a training split whose size differs between ranks."""
    by_size: dict[int, list[int]] = {}
    for rank, checked in sorted(found.items()):
        by_size.setdefault(checked.num_samples, []).append(rank)
    if len(by_size) > 1:
        sizes = [f"{size} samples on {spoken_ranks(on)}" for size, on in by_size.items()]
        raise UserError(
            f"data('train') has {' and '.join(sizes)}; return the same data on every rank, "
            "each rank trains on its own part."
        )
