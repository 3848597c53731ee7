"""Is a loss trained alike by one worker and by many?  Checked before anything trains (ranks)."""

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean, stdev

import torch
from torch import Tensor, nn

from ddpnb.protocol.errors import UserError
from ddpnb.rank.random_state import preserve_globals, seed_everything
from ddpnb.rank.strategies.worker import Batch, Worker
from ddpnb.rank.tasks.base import LOSS, STEP, Supervised, split_step
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
    """
    content, step = batch.content, worker.training_step
    is_short = isinstance(step, Supervised)
    of_items = isinstance(content, Items)
    content = content._replace(items=2 * content.items) if of_items else twice(content)
    doubled, parts = replace(batch, content=content), batch.split(2)
    shares = [part.num_samples / batch.num_samples for part in parts]

    def loss_of(part: Batch, seed: int) -> float:
        seed_everything(seed)
        with torch.set_grad_enabled(not is_short):  # a step may need gradients
            return split_step(step(worker.model, part.tree))[0].item()

    worker.model.eval()
    with preserve_globals(worker.device):
        try:
            is_noisy = loss_of(batch, 0) != loss_of(batch, 1)
            seeds = range(_NUM_TRIALS if is_noisy else 1)
            once = [loss_of(batch, seed) for seed in seeds]
            of_twice = [loss_of(doubled, seed) for seed in seeds]
            halves = [fmean([loss_of(part, s) for part in parts], weights=shares) for s in seeds]
        except Exception:  # noqa: BLE001  a step that fits one size alone cannot be checked so
            return False
        finally:
            worker.model.train()
    if not all(map(math.isfinite, once + of_twice + halves)) or abs(fmean(once)) < _SMALLEST:
        return False
    if _are_same(of_twice, [2 * each for each in once]) and not _are_same(of_twice, once):
        raise UserError(
            f"{LOSS if is_short else STEP} is a sum over the samples; return their mean, "
            "so that it does not depend on the size of a worker's shard."
        )
    return not _are_same(halves if len(parts) > 1 else of_twice, once)


def _are_same(values: list[float], others: list[float]) -> bool:
    """Return whether two means differ by noise or rounding alone."""
    differences = [one - other for one, other in zip(values, others, strict=True)]
    num = len(differences)
    noise = stdev(differences) / math.sqrt(num) if num > 1 else 0.0
    return abs(fmean(differences)) <= 6 * noise + 0.01 * abs(fmean(others))


def check_inside(loss: Tensor, model: nn.Module) -> None:
    """Refuse a loss that trains parameters which are not the model's: no strategy updates these.

    They are those of a layer that a copied module still calls, for example, in a lambda.
    """
    inside = {id(parameter) for parameter in model.parameters()}
    for leaf in _leaves_of(loss):
        if isinstance(leaf, nn.Parameter) and id(leaf) not in inside:
            raise UserError(
                f"The loss has a gradient for a parameter of shape {tuple(leaf.shape)} that is not "
                "the model's: make its module a part of what model() returns, or call "
                "requires_grad_(False) on it if it is not to be trained."
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
