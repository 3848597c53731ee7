"""The checks that a model can be trained, made before anything trains (ranks).

Each mistake is one sentence that says what to do about it.
"""

import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from ddpnb.protocol.errors import UserError, summary_of
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.worker import Batch, Worker, state_of
from ddpnb.rank.tasks.base import Supervised, Task
from ddpnb.rank.tasks.batches import Shard, Tree, shape_of
from ddpnb.rank.tasks.samples import DatasetSamples
from ddpnb.rank.training.context import RunContext, prefetching
from ddpnb.rank.training.evaluation import Score, number_of, pair_of, score
from ddpnb.rank.training.fault_injection import measure_compute_seconds
from ddpnb.rank.training.loss_checks import check_inside
from ddpnb.rank.training.requirements import needs_all_gradients, wraps_model

_STEP = "training_step(model, batch)"
_LOSS = "loss(outputs, targets)"

COLLECTIVES_NOTE = (
    "training_step calls collectives and rank 0 evaluates alone, so the trained model has no loss "
    "beside what validation_step and metric measure."
)

Result = TypeVar("Result")


def check_training(worker: Worker, batch: Batch, strategy: str) -> None:
    """Make one whole step with a throwaway worker.

    Raises:
        UserError: the model, the loss or the optimizer is wrong.
    """
    check_model(worker)
    optimizer = worker.optimizer(worker.parameters)
    with worker.autocast():
        loss = _forward(worker, batch, strategy)
    step = worker.training_step
    callers = {"loss": step.loss} if isinstance(step, Supervised) else {"training_step": step}
    check_inside(loss, worker.model, callers)
    attempt("The backward pass failed", loss.backward)
    if needs_all_gradients(strategy):
        _check_gradients(worker.model)
    attempt("optimizer.step() failed", optimizer.step)


def _forward(worker: Worker, batch: Batch, strategy: str) -> Tensor:
    """Return the loss of a batch; check it and, if there are any, the outputs."""
    tree, step, num = batch.tree, worker.training_step, batch.num_samples
    if isinstance(step, Supervised):
        return _supervised(worker.model, step, tree, num)
    model = Wrapped(worker.model) if wraps_model(strategy) else worker.model
    where = f"on a batch of {num} samples, {shape_of(tree)}"
    result = attempt(f"{_STEP} failed {where}", partial(step, model, tree))
    if isinstance(model, Wrapped) and not model.was_called:
        raise UserError(
            f"{_STEP} never calls model(...). What it calls in its place exchanges no gradients, "
            "so each rank would train a model of its own: call model itself. "
            'getattr(model, "module", model) is for its attributes.'
        )
    return _checked_loss(_loss_in(result), _STEP)


def _supervised(model: nn.Module, step: Supervised, tree: Tree, num_samples: int) -> Tensor:
    inputs, targets = pair_of(tree)
    where = f"on a batch of {num_samples} samples, inputs of shape {shape_of(inputs)}"
    outputs = attempt(f"model(inputs) failed {where}", partial(model, inputs))
    if step.loss is nn.functional.cross_entropy:
        _check_outputs(outputs, num_samples)
    where = f"for outputs of shape {shape_of(outputs)} and targets of shape {shape_of(targets)}"
    made = attempt(f"{_LOSS} failed {where}", partial(step.loss, outputs, targets))
    return _checked_loss(made, _LOSS)


@final
class Wrapped(nn.Module):
    """A model as ``DistributedDataParallel`` wraps it: it has the model's ``forward`` alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.was_called = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self.was_called = True
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapper; say where one of the model is found."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not hasattr(self.module, name):
                raise
            raise AttributeError(
                f"DistributedDataParallel hides {name!r} of the model that it wraps; "
                "take it from getattr(model, 'module', model)"
            ) from None


def check_evaluation(worker: Worker, task: Task, num_samples: int, *, has_loss: bool) -> Score:
    """Evaluate the model on a few samples of each split, so that no run fails only at its end.

    The worker's model is in evaluation mode afterwards.

    Returns:
        The score on held-out samples.

    Raises:
        UserError: the evaluation failed.
    """
    worker.model.eval()
    for split, samples in (("train", task.train), ("test", task.held_out)):
        found = attempt(
            f"The model cannot be evaluated on data({split!r})",
            partial(
                score,
                worker.model,
                task,
                samples,
                worker.device,
                max_samples=2 * num_samples,  # two batches, whose outputs a metric needs joined
                batch_size=num_samples,
                is_held_out=split == "test",
                has_loss=has_loss,
            ),
        )
    return found


def collectives_refusal(context: RunContext) -> str:
    """Return why a strategy cannot make steps that call collectives; empty if it can."""
    plan, spec = context.plan, context.spec
    if plan.num_ranks < context.state.world_size:
        reason = "trains on one rank alone, where no other answers"
    elif not plan.synchronous or spec.is_ceiling:
        reason = "has workers that do not make the same steps together"
    else:
        return ""
    return (
        f"training_step calls collectives, and {spec.strategy} {reason}: call them only if "
        f"isinstance(model, DistributedDataParallel), or leave {spec.strategy} out."
    )


def check_alone(num_calls: int) -> None:
    """Refuse an evaluation that has called collectives: rank 0 makes it alone.

    Raises:
        UserError: it has.
    """
    if num_calls > 0:
        raise UserError(
            "validation_step or metric calls collectives, and rank 0 evaluates alone, on samples "
            "of the whole split: compute what they return without the other ranks."
        )


def seconds_per_trained(worker: Worker, batch: Batch) -> float:
    """Return what a forward and backward pass takes a worker, for each sample of its batch."""
    return measure_compute_seconds(worker, batch, min, num_trials=1) / batch.num_samples


def seconds_per_judged(context: RunContext, worker: Worker, *, has_loss: bool) -> float:
    """Return what judging a model takes, for each sample of a usual batch."""
    num = context.usual_batch().num_samples
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        found = score(
            worker.model.eval(),
            context.task,
            context.task.held_out,
            context.device,
            max_samples=num,
            batch_size=num,
            has_loss=has_loss,
        )
        seconds.append((time.perf_counter() - began) / found.num_samples)
    return min(seconds)


def check_own(worker: Worker, batch: Batch, strategy: Strategy) -> None:
    """Have a class of the user's own set up and make one step; takes part: every rank.

    What it does not use of the cell, such as its loss, need not be right.

    Raises:
        UserError: the model cannot be trained, or the step returned no loss.
        Exception: what the class raises.
    """
    check_model(worker)
    if not dist.is_initialized():
        return
    worker.folder.mkdir(mode=0o700, exist_ok=True)
    with closing(strategy):
        strategy.setup(worker)
        strategy.step(batch)


def check_loading(context: RunContext) -> None:
    """Load one sample in another process, as the run will: a forked one cannot use a GPU.

    See "CUDA in multiprocessing" in torch's notes on multiprocessing.

    Raises:
        UserError: the user's data set fails there.
    """
    assert isinstance(context.task.train, DatasetSamples), "it is loaded sample by sample"
    first = Shard(step=0, part=0, num_parts=1)
    one = torch.zeros(1, dtype=torch.int64)
    loading = prefetching(context.task.train, [first], lambda _: one, 1, seed=0)

    def load() -> None:
        with loading as source:
            next(source)

    attempt("A loading process cannot use the GPU; keep the samples on the CPU. It failed", load)


def check_model(worker: Worker) -> None:
    """Refuse a model that is already wrapped, has nothing to train, or is not made anew."""
    model = worker.model
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
    again = attempt("model() failed when it was called again", worker.make_model)
    held = {id(tensor) for tensor in state_of(again)}
    if any(id(tensor) in held for tensor in state_of(model)):
        raise UserError(
            "model() returned layers that it had returned before, and each strategy trains a model "
            "of its own: make them in model(), or return copy.deepcopy(...) of them."
        )


def with_place(error: UserError, cell: int, filename: str) -> UserError:
    """Return an error that names the line of the comparison's cell where it began, if one is known.

    Args:
        error: its cause is what the cell raised.
        cell: the ``n`` of ``In [n]``; 0 if not known.
        filename: what tracebacks call the cell.
    """
    frames = traceback.extract_tb(error.__cause__.__traceback__) if error.__cause__ else []
    lines = [frame.lineno for frame in frames if frame.filename == filename]
    if not cell or not lines:
        return error
    return UserError(f"{error} (In [{cell}], line {lines[-1]})")


def attempt(failed: str, call: Callable[[], Result]) -> Result:
    """Call the user's code.

    Raises:
        UserError: it raised; its exception is the cause, and ``failed`` begins the message.
    """
    try:
        return call()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{failed}: {summary_of(error)}") from error


def _check_outputs(outputs: object, num_samples: int) -> None:
    """Refuse outputs that the default loss, cross-entropy, cannot take."""
    if not isinstance(outputs, Tensor) or outputs.shape[:1] != (num_samples,):
        raise UserError(
            f"model(inputs) returned {shape_of(outputs)} for {num_samples} samples; return one "
            "tensor with a row for each sample, or define loss(outputs, targets)."
        )
    if outputs.ndim == 1 or outputs.shape[1] == 1:  # it would be 0, whatever the model returns
        raise UserError(
            f"model(inputs) returned one column, {shape_of(outputs)}, and the default loss, "
            "cross-entropy, needs one for each of two or more classes: "
            "define loss(outputs, targets)."
        )


def _loss_in(result: object) -> object:
    """Return the loss that a step of the user's own has returned; check what is beside it."""
    if not isinstance(result, Mapping):
        return result
    if "loss" not in result:
        names = ", ".join(map(repr, result)) or "nothing"
        raise UserError(f"{_STEP} returned a dict of {names}; give it the mean loss as 'loss'.")
    if type(result) is dict:
        for name, value in result.items():
            if name != "loss":
                number_of(value, f"{_STEP}'s {name!r}")
    return result["loss"]


def _checked_loss(loss: object, call: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.ndim > 0:
        raise UserError(
            f"{call} returned {shape_of(loss)}; "
            "return the mean over the samples, a tensor of shape ()."
        )
    if not loss.requires_grad:
        raise UserError(
            f"{call} does not depend on the model's parameters; "
            "compute it from the outputs, without detach() or no_grad()."
        )
    return loss


def _check_gradients(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise UserError(
                f"The parameter {name} has no part in the loss, and DistributedDataParallel would "
                "wait for its gradient; use it, set its requires_grad=False, or compare "
                "ddp:find_unused_parameters=on."
            )
