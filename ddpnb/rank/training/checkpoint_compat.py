"""The check that a checkpoint fits the training that resumes from it (ranks).

What an older checkpoint does not hold is not compared.
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
"""Settings that must be the same for samples and learning rate to continue; with their options."""


def description(spec: RunSpec, optimizers: Sequence[Optimizer]) -> State:
    """Return the part of a checkpoint that is compared before a run is resumed."""
    return {
        "strategy": spec.strategy,
        "task": spec.task,
        "optimizers": [_kind(optimizer) for optimizer in optimizers],
    } | {name: getattr(spec, name) for name in SAME}


def check_spec(old: State, spec: RunSpec) -> None:
    """Refuse a checkpoint of another training.

    Args:
        old: the ``description`` in the checkpoint.
        spec: the training that resumes from it.

    Raises:
        UserError: something is not the same.
    """
    if old["strategy"] != spec.strategy:
        raise UserError(
            f"The run to resume was trained with {old['strategy']}, not {spec.strategy}."
        )
    if old.get("task", spec.task) != spec.task:
        raise UserError(
            f"The run to resume was trained on {_task(old['task'])}, not on {_task(spec.task)}: "
            "train the same."
        )
    for name, option in SAME.items():
        value = getattr(spec, name)
        if old.get(name, value) != value:
            raise UserError(
                f"The run to resume was trained with {option} {_value(old[name])}, "
                f"not {_value(value)}: give the same."
            )


def check_replica(replica: Replica, checkpoint: State) -> None:
    """Refuse a checkpoint of another model or another optimizer.

    Args:
        replica: its optimizer has been made.
        checkpoint: the state to resume from.

    Raises:
        UserError: it does not fit.
    """
    old_model = checkpoint["strategy"].get("model", {})
    if old_model and _shapes(old_model) != _shapes(replica.model.state_dict()):
        raise UserError(
            "The checkpoint to resume from is of another model: let model() return the same one."
        )
    kind = _kind(replica.optimizers[0])
    for old in checkpoint["spec"].get("optimizers", [])[:1]:
        if old != kind:
            raise UserError(
                f"The run to resume was trained with {_spelled(old)}, not {_spelled(kind)}: "
                "let optimizer(params) return the same."
            )


def _task(name: str) -> str:
    return "a cell's own model" if name == CELL_TASK else name


def _value(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}


def _kind(optimizer: Optimizer) -> list[str | int]:
    """Return the class of an optimizer and its number of groups: these must fit its state."""
    return [type(optimizer).__name__, len(optimizer.param_groups)]


def _spelled(kind: list[str | int]) -> str:
    name, num_groups = kind
    return str(name) if num_groups == 1 else f"{name} in {num_groups} groups"
