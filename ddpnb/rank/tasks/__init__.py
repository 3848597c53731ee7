"""The tasks that a comparison can train (ranks)."""

from collections.abc import Callable, Mapping

from ddpnb.protocol.catalogue import CELL_TASK, TASKS
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.notation import parse_task
from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.cell import cell_task
from ddpnb.rank.tasks.samples import DataCache


def load_task(
    spec: RunSpec, namespace: Mapping[str, object], filename: str, cache: DataCache | None = None
) -> Task:
    """Return the task that a spec names, with its data loaded.

    Args:
        spec: names the task, or holds the cell that defines it.
        namespace: the user's variables on this rank, visible to the cell.
        filename: what tracebacks call the cell.
        cache: keeps the data of a comparison's cell.

    Raises:
        UserError: a definition is missing in the cell or returns something wrong.
    """
    choice = parse_task(spec.task)
    if choice.name == CELL_TASK:
        return cell_task(spec, namespace, filename, cache)
    build: Callable[..., Task] = TASKS[choice.name].load()
    return build(**choice.options)
