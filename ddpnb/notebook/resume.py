"""Where do the checkpoints of runs lie, and from which do new ones begin?  (Notebook side.)"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from ddpnb.errors import UserError
from ddpnb.notebook.record.query import StoredRun, resolve
from ddpnb.notebook.record.store import Store
from ddpnb.wire import RunSpec


def with_checkpoints(
    specs: Sequence[RunSpec], asked: Collection[str], store: Store
) -> tuple[RunSpec, ...]:
    """Return trainings that know where checkpoints lie, and which run they are to resume.

    Args:
        specs: the trainings; what they resume is as the user wrote it.
        asked: the strategies that the user named: of the others, those that were not
            trained in what is resumed are left out.
        store: keeps the runs.

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
    found = [(spec, _of(spec, runs)) for spec in placed if spec.strategy in names]
    return tuple(replace(spec, resume=run.run_id, resumed=run.address) for spec, run in found)


def _of(spec: RunSpec, runs: Sequence[StoredRun]) -> StoredRun:
    """Return the run that a training resumes: of its strategy and repeat, else the last one."""
    same = [run for run in runs if run.name == spec.strategy]
    return next((run for run in same if run.repeat == spec.repeat), same[-1])
