"""Load the task of a comparison: a built-in task or the task of a cell.  Runs on the ranks."""

from collections.abc import Mapping
from typing import Any

from ddpnb.protocol.catalogue import CELL_TASK, TASKS
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.notation import parse_task
from ddpnb.rank.random_state import computing_settings, restore_settings
from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.cell import cell_task

_loaded: dict[str, tuple[Task, list[Any]]] = {}
"""The id of the current comparison, its task, and the global settings that its cell has made.

All runs train on the same data, with the same settings."""


def load_task(spec: RunSpec, namespace: Mapping[str, object], filename: str) -> Task:
    """Return the task that a spec names. All runs of a comparison share the task and its data.

    Raises:
        UserError: The cell's task is wrong (see ``cell_task``), or the cell and the spec both
            configure an optimizer.
    """
    if spec.comparison_id in _loaded:
        task, settings = _loaded[spec.comparison_id]
        restore_settings(settings)
    else:
        forget()
        choice = parse_task(spec.task)
        if choice.name == CELL_TASK:
            task = cell_task(spec.source, namespace, filename)
        else:
            task = TASKS[choice.name].load()(**choice.options)
        if spec.comparison_id:
            _loaded[spec.comparison_id] = task, computing_settings()
    if task.optimizer and (spec.momentum or spec.own_momentum is not None or spec.rates):
        what = "Several values of --lr need" if spec.rates else "Momentum needs"
        raise UserError(
            f"{what} the default optimizer, but the cell defines optimizer(params). Remove "
            "optimizer() from the cell, or remove the option."
        )
    return task


def forget() -> None:
    """Free the data of the previous comparison."""
    _loaded.clear()
