"""Can one worker train a model?  Tried with a throwaway, before anything trains (ranks)."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, final

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from ddpnb.protocol.errors import UserError, summary_of
from ddpnb.rank.strategies.worker import Batch, Worker, state_of
from ddpnb.rank.tasks.base import LOSS, STEP, Supervised, split_step
from ddpnb.rank.tasks.batches import shape_of
from ddpnb.rank.training.evaluation import number_of, pair_of
from ddpnb.rank.training.loss_checks import check_inside
from ddpnb.rank.training.requirements import check_strategy, needs_all_gradients, wraps_model

Result = TypeVar("Result")


def check_model(worker: Worker) -> None:
    """Refuse a model that is already wrapped, is made lazily, or is not made anew."""
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
    again = attempt("model() failed when it was called again", worker.make_model)
    held = {id(tensor) for tensor in state_of(again)}
    if any(id(tensor) in held for tensor in state_of(model)):
        raise UserError(
            "model() returned layers that it had returned before, and each strategy trains a model "
            "of its own: make them in model(), or return copy.deepcopy(...) of them."
        )


def check_step(worker: Worker, batch: Batch, strategy: str) -> None:
    """Make one whole step of a built-in strategy's worker, which is a throwaway."""
    optimizer = attempt(
        "The optimizer cannot be made", partial(worker.optimizer, worker.parameters)
    )
    step = worker.training_step
    with worker.autocast():
        if isinstance(step, Supervised):
            loss = _supervised_loss(worker.model, step, batch)
        else:
            loss = _own_loss(worker.model, step, batch, is_wrapped=wraps_model(strategy))
    callers = {"loss": step.loss} if isinstance(step, Supervised) else {"training_step": step}
    check_inside(loss, worker.model, callers)
    attempt("The backward pass failed", loss.backward)
    for name, parameter in worker.model.named_parameters():
        is_missed = parameter.requires_grad and parameter.grad is None
        if is_missed and needs_all_gradients(strategy):
            raise UserError(
                f"The parameter {name} has no part in the loss, and DistributedDataParallel would "
                "wait for its gradient; use it, set its requires_grad=False, or compare "
                "ddp:find_unused_parameters=on."
            )
    attempt("optimizer.step() failed", optimizer.step)
    check_strategy(strategy, worker)


def _supervised_loss(model: nn.Module, step: Supervised, batch: Batch) -> Tensor:
    inputs, targets = pair_of(batch.tree)
    where = f"on a batch of {batch.num_samples} samples, inputs of shape {shape_of(inputs)}"
    outputs = attempt(f"model(inputs) failed {where}", partial(model, inputs))
    is_column = isinstance(outputs, Tensor) and (outputs.ndim == 1 or outputs.shape[1] == 1)
    if is_column and step.loss is nn.functional.cross_entropy:  # it would be 0, whatever it is
        raise UserError(
            f"model(inputs) returned one column, {shape_of(outputs)}, and the default loss, "
            "cross-entropy, needs one for each of two or more classes: "
            "define loss(outputs, targets)."
        )
    where = f"for outputs of shape {shape_of(outputs)} and targets of shape {shape_of(targets)}"
    loss, _ = split_step(
        attempt(f"{LOSS} failed {where}", partial(step.loss, outputs, targets)), LOSS
    )
    return loss


def _own_loss(model: nn.Module, step: Any, batch: Batch, *, is_wrapped: bool) -> Tensor:
    wrapped, tree = Wrapped(model), batch.tree
    result = attempt(
        f"{STEP} failed on a batch of {batch.num_samples} samples, {shape_of(tree)}",
        partial(step, wrapped if is_wrapped else model, tree),
    )
    if is_wrapped and not wrapped.was_called:
        raise UserError(
            f"{STEP} never calls model(...). What it calls in its place exchanges no gradients, "
            "so each rank would train a model of its own: call model itself. "
            'getattr(model, "module", model) is for its attributes.'
        )
    loss, numbers = split_step(result)
    for name, value in numbers.items():
        number_of(value, f"{STEP}'s {name!r}")
    return loss


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


def attempt(failed: str, call: Callable[[], Result]) -> Result:
    """Call the user's code; if it raises, raise one sentence that begins with ``failed``."""
    try:
        return call()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{failed}: {summary_of(error)}") from error
