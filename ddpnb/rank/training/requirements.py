"""What single strategies cannot train, refused before anything trains (ranks).

A strategy itself checks nothing: these checks need a model that has made a step.  Nothing is sent.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from ddpnb.compat.torch_internals import lists_step_hooks
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import Choice, parse_strategy
from ddpnb.rank.strategies.fsdp import layers_of
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
    if worker.device.type != "cpu":
        _check_device(choice)
    for name, parameter in worker.model.named_parameters():
        is_sparse = parameter.grad is not None and parameter.grad.is_sparse
        if is_sparse and STRATEGIES[choice.name].is_dense:
            raise UserError(
                f"The gradient of {name} is sparse, and {choice.name} exchanges dense ones: "
                f"make the layer with sparse=False, or leave {choice.name} out of the comparison."
            )
    if choice.name == "ddp":
        _check_ddp(choice, worker)
    if choice.name == "zero":
        if not lists_step_hooks.works:
            raise UserError(f"{lists_step_hooks.sentence}.")
        _check_types("zero", [{parameter.dtype for parameter in worker.parameters}])
    if choice.name == "fsdp":
        _check_rows("fsdp", worker.model)
        _check_layers(worker.model)


def _check_device(choice: Choice) -> None:
    """Refuse what ranks on GPUs cannot do, or not where they share one."""
    entry = STRATEGIES[choice.name]
    if entry.needs_shared_memory:
        raise UserError(
            f"{choice.name} needs ranks on CPUs, whose memory processes can share: "
            f"%ddp_start --device cpu, or compare {entry.across_hosts}."
        )
    if choice.options.get("threads") == "all":
        raise UserError("single:threads=all is for ranks on CPUs: leave it out.")
    # Gloo's gather of a sharded tensor on a GPU ends the process: pytorch/pytorch#152645.
    if choice.name == "fsdp" and dist.get_backend() == "gloo":
        raise UserError(
            "fsdp needs a GPU for each rank, and these ranks share one: start as many ranks "
            "as GPUs (%ddp_restart -n), or leave fsdp out of the comparison."
        )


def _check_ddp(choice: Choice, worker: Worker) -> None:
    """Refuse accumulation in a static graph, and gradients that a hook cannot send."""
    hook = choice.options.get("hook", "none")
    if "powersgd_rank" in choice.options and hook != "powersgd":
        raise UserError("ddp:powersgd_rank goes with ddp:hook=powersgd; give both, or neither.")
    if choice.options.get("static_graph") and worker.accumulate > 1:
        raise UserError(
            "ddp:static_graph=on cannot accumulate gradients (torch's no_sync fails in it); "
            "leave one of the two out."
        )
    if hook == "bf16" and worker.device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UserError("This GPU cannot add bfloat16; take ddp:hook=fp16 instead.")
    if hook == "powersgd":  # it makes matrices of gradients, of one bucket on CPUs
        _check_rows("ddp:hook=powersgd", worker.model)
        if worker.device.type == "cpu":
            _check_types("ddp:hook=powersgd", [{each.dtype for each in worker.parameters}])


def _check_rows(name: str, model: nn.Module) -> None:
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 0 or parameter.numel() == 0:
            raise UserError(
                f"{name} cuts parameters between their rows, and {parameter_name}, of shape "
                f"{tuple(parameter.shape)}, has none: give it one, e.g. the shape (1,), "
                f"or leave {name} out of the comparison."
            )


def _check_types(name: str, types_at_once: Iterable[set[torch.dtype]]) -> None:
    if any(len(types) > 1 for types in types_at_once):
        raise UserError(
            f"{name} wants one floating-point type in what it exchanges at once: give the model "
            f"one (or, for fsdp, each type a layer of its own in a Sequential), or leave {name} "
            "out of the comparison."
        )


def _check_layers(model: nn.Module) -> None:
    """Refuse layers of two types, and unused ones: ranks might gather different ones at once."""
    layers = [list(layer.parameters()) for layer in layers_of(model)]
    in_layers = {parameter for layer in layers for parameter in layer}
    rest = [parameter for parameter in model.parameters() if parameter not in in_layers]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None and parameter in in_layers:
            raise UserError(
                "fsdp gathers a layer when it is called, so all ranks must call the same ones, and "
                f"{name} had no part in a step: use every layer, or leave fsdp out."
            )
    _check_types("fsdp", ({p.dtype for p in held if p.requires_grad} for held in (*layers, rest)))
