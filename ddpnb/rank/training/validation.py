"""The checks that a model can be trained, made before anything trains (ranks).

Each mistake is one sentence that says what to do about it.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.choices import parse_strategy
from ddpnb.protocol.errors import UserError, summary_of
from ddpnb.rank.strategies.base import Batch, Replica
from ddpnb.rank.tasks.base import Task
from ddpnb.rank.training.run_metrics import score

Result = TypeVar("Result")


def check_training(replica: Replica, batch: Batch) -> None:
    """Make one whole step with a throwaway replica.

    Raises:
        UserError: the model, the loss or the optimizer is wrong.
    """
    check_model(replica.model)
    optimizer = replica.optimizer(replica.parameters)
    with replica.autocast():
        loss = _forward(replica, batch)
    attempt("The backward pass failed", loss.backward)
    _check_gradients(replica.model)
    attempt("optimizer.step() failed", optimizer.step)


def _forward(replica: Replica, batch: Batch) -> Tensor:
    """Return the loss of a batch; check it and the outputs."""
    where = f"on a batch of {batch.num_samples} samples, inputs of shape {_shape(batch.inputs)}"
    outputs = attempt(f"model(inputs) failed {where}", partial(replica.model, batch.inputs))
    _check_outputs(outputs, batch)
    _check_classes(outputs, replica.loss)
    where = f"for outputs of shape {_shape(outputs)} and targets of shape {_shape(batch.targets)}"
    compute_loss = partial(replica.loss, outputs, batch.targets)
    loss = attempt(f"loss(outputs, targets) failed {where}", compute_loss)
    _check_loss(loss)
    _check_mean(loss, replica, outputs, batch)
    return loss


def check_evaluation(replica: Replica, task: Task, num_samples: int) -> None:
    """Evaluate the model on a few samples of each split, so that no run fails only at its end.

    The replica is in evaluation mode afterwards.

    Raises:
        UserError: the evaluation failed.
    """
    replica.model.eval()
    for split, samples in (("train", task.train), ("test", task.held_out)):
        attempt(
            f"The model cannot be evaluated on data({split!r})",
            partial(score, replica.model, task.loss, samples, replica.device, num_samples),
        )


def check_dense(replica: Replica, strategy: str) -> None:
    """Refuse sparse gradients if a strategy cannot exchange them; call it after a step.

    Raises:
        UserError: a gradient is sparse.
    """
    name = parse_strategy(strategy).name
    if name not in STRATEGIES or not STRATEGIES[name].is_dense:
        return
    for parameter_name, parameter in replica.model.named_parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise UserError(
                f"The gradient of {parameter_name} is sparse, and {name} exchanges dense ones: "
                f"make the layer with sparse=False, or leave {name} out of the comparison."
            )


def check_model(model: nn.Module) -> None:
    """Refuse a model that is already wrapped, or that has nothing to train."""
    for module in model.modules():
        if isinstance(module, DataParallel | DistributedDataParallel):
            raise UserError(
                f"model() returned a model wrapped in {type(module).__name__}; "
                "return the plain model, the strategy wraps it."
            )
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise UserError(
            "model() returned a model with lazy layers; give their sizes, "
            "so that every rank starts from the same weights."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            "model() returned a model without trainable parameters; "
            "add a layer that has some, or set requires_grad=True."
        )


def attempt(failed: str, call: Callable[[], Result]) -> Result:
    """Call the user's code.

    Raises:
        UserError: it raised; its exception is the cause, and ``failed`` begins the message.
    """
    try:
        return call()
    except Exception as error:
        raise UserError(f"{failed}: {summary_of(error)}") from error


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _check_outputs(outputs: object, batch: Batch) -> None:
    if isinstance(outputs, Tensor) and outputs.shape[:1] == (batch.num_samples,):
        return
    raise UserError(
        f"model(inputs) returned {_shape(outputs)} for {batch.num_samples} samples; "
        "return one tensor with a row for each sample."
    )


def _check_classes(outputs: Tensor, loss: object) -> None:
    """Refuse cross-entropy over one class, which is 0 whatever the model returns."""
    if loss is nn.functional.cross_entropy and (outputs.ndim == 1 or outputs.shape[1] == 1):
        raise UserError(
            f"model(inputs) returned one column, {_shape(outputs)}, and the default loss, "
            "cross-entropy, needs one for each of two or more classes: "
            "define loss(outputs, targets)."
        )


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.ndim > 0:
        raise UserError(
            f"loss(outputs, targets) returned {_shape(loss)}; "
            "return the mean over the samples, a tensor of shape ()."
        )
    if not loss.requires_grad:
        raise UserError(
            "loss(outputs, targets) does not depend on the model's parameters; "
            "compute it from the outputs, without detach() or no_grad()."
        )


@torch.no_grad()
def _check_mean(loss: Tensor, replica: Replica, outputs: Tensor, batch: Batch) -> None:
    """Refuse a sum: split over several workers, it would train at another rate than on one."""
    twice = replica.loss(torch.cat([outputs, outputs]), torch.cat([batch.targets, batch.targets]))
    if loss.item() != 0 and loss.isfinite() and torch.isclose(twice, 2 * loss):
        raise UserError(
            "loss(outputs, targets) is a sum over the samples; return their mean, "
            "so that it does not depend on the size of a worker's shard."
        )


def _check_gradients(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise UserError(
                f"The parameter {name} has no part in the loss, and DistributedDataParallel would "
                "wait for its gradient; use it, or set its requires_grad=False."
            )
