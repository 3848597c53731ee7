"""Is a loss trained alike by one worker and by many?  Checked before anything trains (ranks)."""

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean, stdev
from types import FunctionType

import torch
from torch import Tensor, nn

from ddpnb.protocol.errors import UserError
from ddpnb.rank.random_state import preserve_globals, seed_everything
from ddpnb.rank.strategies.worker import Batch, Worker
from ddpnb.rank.tasks.base import Supervised, split_step
from ddpnb.rank.tasks.batches import twice
from ddpnb.rank.tasks.samples import Items

BATCH_NOTE = (
    "The loss of a batch is not the mean of the losses of its halves: it depends on which samples "
    "are in a batch together, so strategies that split batches differently train different losses."
)
_NUM_TRIALS = 8
"""Seeds that a loss which draws random numbers is computed with."""
_SMALLEST = 1e-6
"""A loss below is rounding alone: nothing is concluded from it."""


def depends_on_batch(worker: Worker, batch: Batch) -> bool:
    """Refuse a loss that is a sum; return whether it depends on which samples are together.

    The model is in evaluation mode, and random numbers are seeded alike for each evaluation.  A sum
    doubles when each sample is there twice.  A mean over samples is the mean of the losses of two
    halves.  The noise of a loss that draws random numbers all the same, such as a VAE's, differs
    with the size of a batch: means over some seeds are compared then, by their standard errors.

    Args:
        worker: its model is in training mode.
        batch: of a few samples.

    Returns:
        False too where the loss cannot be computed for another number of samples.

    Raises:
        UserError: it is a sum.
    """
    content, step = batch.content, worker.training_step
    if isinstance(content, Items):
        doubled = replace(batch, content=content._replace(items=2 * content.items))
    else:
        doubled = replace(batch, content=twice(content))

    def losses(parts: list[Batch], seed: int) -> list[float]:
        seed_everything(seed)
        with torch.set_grad_enabled(not isinstance(step, Supervised)):  # one may need gradients
            return [split_step(step(worker.model, part.tree))[0].item() for part in parts]

    parts = batch.split(2)
    shares = [part.num_samples / batch.num_samples for part in parts]
    worker.model.eval()
    with preserve_globals(worker.device):
        try:
            first, second = (losses([batch], seed)[0] for seed in (0, 1))
            seeds = range(1 if first == second else _NUM_TRIALS)
            once = [losses([batch], seed)[0] for seed in seeds]
            of_twice = [losses([doubled], seed)[0] for seed in seeds]
            halves = [fmean(losses(parts, seed), weights=shares) for seed in seeds]
        except Exception:  # noqa: BLE001  a step that fits one size alone cannot be checked so
            return False
        finally:
            worker.model.train()
    if not all(map(math.isfinite, once + of_twice + halves)) or abs(fmean(once)) < _SMALLEST:
        return False
    if _is_double(of_twice, once):
        is_short = isinstance(step, Supervised)
        call = "loss(outputs, targets)" if is_short else "training_step(model, batch)"
        raise UserError(
            f"{call} is a sum over the samples; return their mean, "
            "so that it does not depend on the size of a worker's shard."
        )
    compared = halves if len(parts) > 1 else of_twice
    differences = [one - other for one, other in zip(once, compared, strict=True)]
    rounding = 0.01 * abs(fmean(once))
    return abs(fmean(differences)) > 6 * _standard_error(differences) + rounding


def _is_double(doubled: list[float], once: list[float]) -> bool:
    """Return whether a mean is twice another, where noise lets that be distinguished from once."""
    noise = 3 * (_standard_error(doubled) + 2 * _standard_error(once)) + 1e-3 * abs(fmean(once))
    is_near = abs(fmean(doubled) - 2 * fmean(once)) <= noise
    return is_near and abs(fmean(doubled) - fmean(once)) > 2 * noise


def _standard_error(values: list[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def check_inside(loss: Tensor, model: nn.Module, callers: Mapping[str, object]) -> None:
    """Refuse a loss that trains parameters which are not the model's: no strategy updates these.

    They are those of a layer that a copied module still calls, for example, in a lambda.

    Args:
        loss: not yet gone backward.
        model: what is trained.
        callers: functions that may hold other modules, by name.

    Raises:
        UserError: it names where the module is found that owns such a parameter.
    """
    inside = {id(parameter) for parameter in model.parameters()}
    for leaf in _leaves_of(loss):
        if isinstance(leaf, nn.Parameter) and id(leaf) not in inside:
            raise UserError(
                f"The loss has a gradient for a parameter of shape {tuple(leaf.shape)} that is not "
                f"the model's{_place_of(leaf, model, callers)}: make its module a part of what "
                "model() returns, or call requires_grad_(False) on it if it is not to be trained."
            )


def _leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a backward pass from a loss accumulates gradients in."""
    left, seen = [loss.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        left += [before for before, _ in node.next_functions]


def _place_of(parameter: nn.Parameter, model: nn.Module, callers: Mapping[str, object]) -> str:
    """Return where the module is found that a parameter belongs to; empty if nowhere."""
    named = [
        (f"{path}.{name}".lstrip("."), value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    ]
    for name, value in (*named, *callers.items()):
        for module in _modules_held_by(value):
            if any(own is parameter for own in module.parameters()):
                return f", but of the {type(module).__name__} that {name} holds"
    return ""


def _modules_held_by(value: object) -> Iterator[nn.Module]:
    """Yield a module, or those that a method, a closure or a function's global names hold."""
    held = [value, getattr(value, "__self__", None)]
    if isinstance(value, FunctionType):
        found = inspect.getclosurevars(value)
        held += [*found.nonlocals.values(), *found.globals.values()]
    yield from (each for each in held if isinstance(each, nn.Module))
