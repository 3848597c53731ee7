"""What single strategies cannot train, refused before anything trains (ranks).

A strategy itself checks nothing: these checks need a model that has made a step.  Nothing is sent.
"""

from collections.abc import Callable

import torch
from torch import nn

from ddpnb.compat.torch_internals import lists_step_hooks
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import Choice, parse_strategy
from ddpnb.rank.strategies.layers import layers_of, types_of_layers
from ddpnb.rank.strategies.worker import Worker

_WRAPPING = ("ddp", "ddp-shm", "zero")


def wraps_model(strategy: str) -> bool:
    """Return whether the task's step gets a wrapper with a ``forward`` alone, and not the model."""
    return parse_strategy(strategy).name in _WRAPPING


def needs_all_gradients(strategy: str) -> bool:
    """Return whether each parameter must have a part in each loss."""
    options = parse_strategy(strategy).options
    may_miss = options.get("find_unused_parameters") or options.get("static_graph")
    return wraps_model(strategy) and not may_miss


def check_strategy(strategy: str, worker: Worker) -> None:
    """Refuse what a built-in strategy cannot train.

    Args:
        strategy: as the user wrote it.
        worker: a throwaway; its model has made a step.

    Raises:
        UserError: what cannot be trained, and what to do.
    """
    choice = parse_strategy(strategy)
    if STRATEGIES[choice.name].is_dense:
        _check_dense(choice.name, worker.model)
    if choice.name in _CHECKS:
        _CHECKS[choice.name](choice, worker)


def _check_dense(name: str, model: nn.Module) -> None:
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise UserError(
                f"The gradient of {parameter_name} is sparse, and {name} exchanges dense ones: "
                f"make the layer with sparse=False, or leave {name} out of the comparison."
            )


def _check_ddp(choice: Choice, worker: Worker) -> None:
    """Refuse accumulation in a static graph, and gradients that a hook cannot send."""
    hook = choice.options.get("hook", "none")
    for option in ("powersgd_rank", "powersgd_start"):
        if option in choice.options and hook != "powersgd":
            raise UserError(f"ddp:{option} goes with ddp:hook=powersgd; give both, or neither.")
    if choice.options.get("static_graph") and worker.accumulate > 1:
        raise UserError(
            "ddp:static_graph=on cannot accumulate gradients (torch's no_sync fails in it); "
            "leave one of the two out."
        )
    if hook == "powersgd":
        _check_matrices(worker)
    if hook == "bf16" and worker.device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UserError("This GPU cannot add bfloat16; take ddp:hook=fp16 instead.")


def _check_matrices(worker: Worker) -> None:
    """Refuse what has no rows to make a matrix of, and several types on CPUs."""
    for name, parameter in worker.model.named_parameters():
        if parameter.requires_grad and (parameter.ndim == 0 or parameter.numel() == 0):
            raise UserError(
                f"ddp:hook=powersgd makes matrices of gradients, and {name}, of shape "
                f"{tuple(parameter.shape)}, has no rows: give it one, e.g. the shape (1,), "
                "or leave the hook out."
            )
    types = {parameter.dtype for parameter in worker.parameters}
    if worker.device.type == "cpu" and len(types) > 1:
        raise UserError(
            "ddp:hook=powersgd sends one bucket on CPUs, and torch makes one for each "
            "floating-point type: give the model one type, or leave the hook out."
        )


def _check_zero(_: Choice, worker: Worker) -> None:
    if not lists_step_hooks.works:
        raise UserError(f"{lists_step_hooks.sentence}.")
    if len({parameter.dtype for parameter in worker.parameters}) > 1:
        raise UserError(
            "zero wants all parameters in one floating-point type; "
            "give the model one, or leave zero out of the comparison."
        )


def _check_fsdp(_: Choice, worker: Worker) -> None:
    """Refuse parameters without rows to shard, layers of several types, and unused layers."""
    model = worker.model
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0 or parameter.numel() == 0:
            raise UserError(
                f"fsdp cuts parameters between their rows, and {name}, of shape "
                f"{tuple(parameter.shape)}, has none: give it one, e.g. the shape (1,), "
                "or leave fsdp out of the comparison."
            )
    # A rank that calls another layer would gather, at the same time, another one's parameters.
    held = {id(parameter) for layer in layers_of(model) for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None and id(parameter) in held:
            raise UserError(
                "fsdp gathers a layer when it is called, so all ranks must call the same ones, and "
                f"{name} had no part in a step: use every layer, or leave fsdp out."
            )
    if any(len(types) > 1 for types in types_of_layers(model)):
        raise UserError(
            "fsdp wants one floating-point type in what it gathers at once: give the model "
            "one, or each type a layer of its own in a Sequential, or leave fsdp out."
        )


_CHECKS: dict[str, Callable[[Choice, Worker], None]] = {
    "ddp": _check_ddp,
    "zero": _check_zero,
    "fsdp": _check_fsdp,
}
