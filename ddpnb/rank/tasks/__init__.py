"""The tasks that a comparison can train (ranks)."""

from collections.abc import Mapping

from ddpnb.protocol.catalogue import CELL_TASK, TASKS
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.notation import parse_task
from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.cell import cell_task

_loaded: dict[str, Task] = {}
"""The task of the comparison in progress, by its id: all its runs train on the same data."""


def load_task(spec: RunSpec, namespace: Mapping[str, object], filename: str) -> Task:
    """Return the task that a spec names, with its data loaded once for all runs of a comparison.

    Raises:
        UserError: as ``cell_task``, or the cell has an optimizer and the spec options for one.
    """
    task = _loaded.get(spec.comparison)
    if task is None:
        forget()
        choice = parse_task(spec.task)
        if choice.name == CELL_TASK:
            task = cell_task(spec.source, namespace, filename)
        else:
            task = TASKS[choice.name].load()(**choice.options)
        if spec.comparison:
            _loaded[spec.comparison] = task
    if task.optimizer and (spec.momentum or spec.own_momentum is not None or spec.rates):
        what = "A choice of --lr" if spec.rates else "Momentum"
        raise UserError(
            f"{what} is for the default optimizer, and the cell defines optimizer(params): leave "
            "one of them out."
        )
    return task


def forget() -> None:
    """Free the data of the comparison that has ended."""
    _loaded.clear()
