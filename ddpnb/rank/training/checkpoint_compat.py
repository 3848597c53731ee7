"""Is a checkpoint one of this very training?  (Every rank, before anything trains.)

What a checkpoint does not tell, as an older one may not, is not compared.
"""

from collections.abc import Sequence

from torch.optim import Optimizer

from ddpnb.protocol.catalogue import CELL_TASK
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.strategies.base import Replica, State

SAME = {
    "batch_size": "--batch-size",
    "seed": "--seed",
    "learning_rate": "--lr",
    "lr_scaling": "--lr-scaling",
    "num_lr_warmup_epochs": "--lr-warmup",
}
"""What must be as it was, for samples and learning rate to go on where they were."""


def description(spec: RunSpec, optimizers: Sequence[Optimizer]) -> State:
    """Return what is compared before a run is resumed."""
    return {
        "strategy": spec.strategy,
        "task": spec.task,
        "optimizers": [_kind(optimizer) for optimizer in optimizers],
    } | {name: getattr(spec, name) for name in SAME}


def check_spec(told: State, spec: RunSpec) -> None:
    """Refuse a checkpoint of another training.

    Args:
        told: its ``description``.
        spec: the training that is to go on from it.

    Raises:
        UserError: what is not the same.
    """
    if told["strategy"] != spec.strategy:
        raise UserError(
            f"The run to resume was trained with {told['strategy']}, not {spec.strategy}."
        )
    if told.get("task", spec.task) != spec.task:
        raise UserError(
            f"The run to resume was trained on {_task(told['task'])}, not on {_task(spec.task)}: "
            "train the same."
        )
    for name, option in SAME.items():
        if told.get(name, getattr(spec, name)) != getattr(spec, name):
            raise UserError(
                f"The run to resume was trained with {option} {told[name]}, "
                f"not {getattr(spec, name)}: give the same."
            )


def check_replica(replica: Replica, saved: State) -> None:
    """Refuse a checkpoint of another model or another optimizer.

    Args:
        replica: has made its optimizer.
        saved: the checkpoint.

    Raises:
        UserError: it does not fit.
    """
    theirs = saved["strategy"].get("model", {})
    mine = replica.model.state_dict()
    shapes = [{name: tuple(value.shape) for name, value in s.items()} for s in (mine, theirs)]
    if theirs and shapes[0] != shapes[1]:
        raise UserError(
            "The checkpoint to resume from is of another model: let model() return the same one."
        )
    kind = _kind(replica.optimizers[0])
    for other in saved["spec"].get("optimizers", [])[:1]:
        if other != kind:
            raise UserError(
                f"The run to resume was trained with {_told(other)}, not {_told(kind)}: "
                "let optimizer(params) return the same."
            )


def _task(word: str) -> str:
    return "a cell's own model" if word == CELL_TASK else word


def _kind(optimizer: Optimizer) -> list[str | int]:
    """Return by what an optimizer whose state fits is known: its class, its number of groups."""
    return [type(optimizer).__name__, len(optimizer.param_groups)]


def _told(kind: list[str | int]) -> str:
    name, num_groups = kind
    return str(name) if num_groups == 1 else f"{name} in {num_groups} groups"
