"""The tasks that a comparison can train (ranks)."""

from collections.abc import Callable, Mapping

from ddpnb.protocol.catalogue import CELL_TASK, TASKS
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.notation import parse_task
from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.cell import cell_task


def load_task(spec: RunSpec, namespace: Mapping[str, object], filename: str) -> Task:
    """Return the task that a spec names, with its data loaded; ``cell_task`` says what it takes."""
    choice = parse_task(spec.task)
    if choice.name == CELL_TASK:
        return cell_task(spec, namespace, filename)
    build: Callable[..., Task] = TASKS[choice.name].load()
    return build(**choice.options)
