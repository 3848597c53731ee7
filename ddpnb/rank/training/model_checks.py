"""Checks that a strategy can train the model with the loss.  Runs on the ranks."""

import contextlib
import math
import textwrap
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from ddpnb.compat.torch_internals import lists_step_hooks
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError, summary_of
from ddpnb.protocol.notation import Choice, parse_strategy
from ddpnb.rank.cancellation import is_consequence
from ddpnb.rank.random_state import preserve_globals, seed_everything
from ddpnb.rank.strategies.fsdp import gathered_layers
from ddpnb.rank.tasks.base import LOSS, STEP_CALL, Supervised, evaluated_loss, split_step
from ddpnb.rank.tasks.batches import shape_of
from ddpnb.rank.training.evaluation import number_of, pair_of
from ddpnb.rank.training.run import TrainingRun
from ddpnb.rank.worker import Batch, Worker, is_switched, state_of

NUM_FEW = 8
"""Number of samples for which ``check_loss`` computes a loss."""
MAX_VALUE_CHARACTERS = 300
"""Maximum length of torch's message in an error."""
SMALLEST = 1e-6
"""Smallest loss that ``check_loss`` checks.  Smaller losses may be only rounding errors."""


def check_model(worker: Worker) -> None:
    """Raise ``UserError`` if the result of ``model()`` is wrapped, or has lazy or reused layers."""
    model = worker.model
    for module in model.modules():
        if isinstance(module, DataParallel | DistributedDataParallel):
            raise UserError(
                f"model() returned a model wrapped in {type(module).__name__}. "
                "Return the plain model, because the strategy wraps the model."
            )
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise UserError(
            "model() returned a model with lazy layers. Give the sizes of all layers, "
            "so that every rank starts from the same weights."
        )
    with attempt("The second call of model() failed"):
        again = worker.make_model()
    held = {id(tensor) for tensor in state_of(again)}
    if any(id(tensor) in held for tensor in state_of(model)):
        raise UserError(
            "Two calls of model() returned the same layers, but each strategy needs a new model. "
            "Make the layers inside model(), or return a copy.deepcopy(...) of them."
        )


def check_step(worker: Worker, batch: Batch, strategy: str) -> None:
    """Take one complete step with a built-in strategy's worker.  Discard the worker afterwards."""
    with attempt("Creating the optimizer failed"):
        optimizer = worker.optimizer(worker.parameters)
    step, is_wrapped = worker.training_step, _wraps_model(strategy)
    if parse_strategy(strategy).name == "dp" or worker.accumulate > 1:
        batch.cut([batch.num_rows])  # raises an error if the batch cannot be cut
    with worker.autocast():
        if isinstance(step, Supervised):
            loss = _supervised_loss(worker.model, step, batch)
        else:
            loss = _own_loss(worker.model, step, batch, is_wrapped=is_wrapped)
    with attempt("The backward pass failed"):
        loss.backward()
    with attempt("optimizer.step() failed"):
        optimizer.step()
    check_strategy(strategy, worker)


def _supervised_loss(model: nn.Module, step: Supervised, batch: Batch) -> Tensor:
    inputs, targets = pair_of(batch.tree)
    where = f"on a batch of {batch.num_samples} samples with inputs of shape {shape_of(inputs)}"
    with attempt(f"model(inputs) failed {where}"):
        outputs = model(inputs)
    is_column = isinstance(outputs, Tensor) and (outputs.ndim == 1 or outputs.shape[1] == 1)
    if is_column and step.loss is nn.functional.cross_entropy:  # the loss would always be 0
        raise UserError(
            f"model(inputs) returned one column, {shape_of(outputs)}. The default loss, "
            "cross-entropy, needs one column for each class, and at least two columns. "
            "Change the model, or define loss(outputs, targets)."
        )
    where = f"for outputs of shape {shape_of(outputs)} and targets of shape {shape_of(targets)}"
    with attempt(f"{LOSS} failed {where}"):
        result = step.loss(outputs, targets)
    return split_step(result, LOSS)[0]


def _own_loss(model: nn.Module, step: Any, batch: Batch, *, is_wrapped: bool) -> Tensor:
    wrapped, tree = WrappedByDdp(model), batch.tree
    with attempt(f"{STEP_CALL} failed on a batch of {batch.num_samples} samples: {shape_of(tree)}"):
        result = step(wrapped if is_wrapped else model, tree)
    if is_wrapped and not wrapped.was_called:
        raise UserError(
            f"{STEP_CALL} never calls model(...), so the ranks would not exchange gradients, and "
            "each rank would train a different model. Call model(...). "
            'Use getattr(model, "module", model) only to read attributes.'
        )
    loss, numbers = split_step(result)
    for name, value in numbers.items():
        number_of(value, f"{STEP_CALL}'s {name!r}")
    return loss


@final
class WrappedByDdp(nn.Module):
    """A wrapper that has only the model's ``forward``, like ``DistributedDataParallel``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.was_called = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self.was_called = True
        return self.module(*args, **kwargs)


@contextlib.contextmanager
def attempt(failed: str, advice: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Convert an error in the user's code into a ``UserError`` that begins with ``failed``.

    ``advice``: sentences to add, by a part of torch's message.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or is_consequence(error):
            raise
        known = [f" {each}" for text, each in advice.items() if text in str(error)]
        most = MAX_VALUE_CHARACTERS // 2 if known else MAX_VALUE_CHARACTERS
        summary = textwrap.shorten(summary_of(error), most, placeholder=" ...")
        dot = "." if known and not summary.endswith(".") else ""
        raise UserError(f"{failed}: {summary}{dot}{''.join(known[:1])}") from error


OF_STRATEGIES = {
    "mark a variable ready only once": "A backward pass reaches a parameter twice, for example "
    "because of reentrant checkpointing. Use checkpoint(..., use_reentrant=False).",
    "ZeroRedundancyOptimizer only supports": "Use one data type for all parameters, or remove "
    "zero.",
    "uniform original parameter dtype": "Use one data type for all parameters of a layer, or "
    "remove fsdp.",
    **dict.fromkeys(
        ("ScriptModule", "TracedModule"),
        "fsdp cannot wrap TorchScript. Return the model without torch.jit, or remove fsdp.",
    ),
    "setStorage": "fsdp releases parameters that a second derivative needs. Remove fsdp.",
}
"""Advice for errors in the first step of a strategy."""
WITHOUT_GRADIENTS = {
    "does not require grad": "ddpnb evaluates without gradients. Where validation_step or metric "
    "needs them, use  with torch.enable_grad():"
}
"""Advice for errors in an evaluation."""


# -- losses -------------------------------------------------------------------------------------


def check_loss(run: TrainingRun, worker: Worker) -> tuple[str, ...]:
    """Raise ``UserError`` if the loss is a sum.  A sum doubles if each sample occurs twice.

    Return a note if a strategy splits batches, and the loss of a batch is not the mean of the
    losses of its halves.

    ddpnb computes the losses in evaluation mode, from the same random seed.  ddpnb does not check a
    loss that depends on the seed, such as the loss of a VAE, or a loss that accepts only a fixed
    number of samples.
    """
    step = worker.training_step
    is_short = isinstance(step, Supervised)
    num_few = min(NUM_FEW, run.schedule.size(0))
    half = num_few // 2

    def loss_of(num: int = num_few, seed: int = 0, **chosen: int) -> float:
        seed_everything(seed)
        batch = run.first_batch(num, **chosen)
        return evaluated_loss(step, worker.model, batch.tree).item()

    worker.model.eval()
    with preserve_globals(worker.device):
        try:
            once, drawn, twice = loss_of(), loss_of(seed=1), loss_of(times=2)
            rest = loss_of(num_few - half, start=half)
            halves = rest + half / num_few * (loss_of(half) - rest) if half else rest
        except Exception:  # noqa: BLE001  the user's code
            return ()
        finally:
            worker.model.train()
    is_certain = once == drawn and math.isfinite(twice) and abs(once) >= SMALLEST
    if is_certain and math.isclose(twice, 2 * once, rel_tol=0.01):
        raise UserError(
            f"{LOSS if is_short else STEP_CALL} is a sum over the samples. Return the mean, "
            "so that the loss does not depend on the size of a worker's shard."
        )
    is_gathered = is_short and parse_strategy(run.spec.strategy).name == "dp"  # one loss of all
    is_split = run.spec.accumulate > 1 or (run.plan.num_workers > 1 and not is_gathered)
    rounding = max((torch.finfo(each.dtype).eps for each in worker.parameters), default=0.0)
    if not (is_split and is_certain) or math.isclose(once, halves, rel_tol=1e-4 + 4 * rounding):
        return ()
    return (
        f"The loss of {num_few} samples is {once:.4g}, but the mean of its halves' losses is "
        f"{halves:.4g}, for example because the loss is a mean over tokens. This strategy splits "
        "batches, so its updates differ from those of single.",
    )


# -- restrictions of single strategies ----------------------------------------------------------


def _wraps_model(strategy: str) -> bool:
    """Return True if the task's step gets the model in a wrapper that has only ``forward``."""
    return parse_strategy(strategy).name in ("ddp", "zero")


def check_strategy(strategy: str, worker: Worker) -> None:
    """After a step, raise ``UserError`` if the built-in strategy cannot train the model."""
    choice = parse_strategy(strategy)
    if worker.device.type != "cpu":
        _check_device(choice)
    if choice.name == "zero" and not lists_step_hooks.works:
        raise UserError(f"{lists_step_hooks.sentence}.")
    if choice.name == "zero" and any(map(is_switched, worker.optimizers)):
        raise UserError(
            "zero cannot call eval() of a schedule-free optimizer, because each rank holds a part "
            "of its state. Compare ddp or fsdp instead."
        )
    finds_unused = choice.options.get("find_unused_parameters")
    in_layers = {each for layer in gathered_layers(worker.model) for each in layer.parameters()}
    for name, parameter in worker.model.named_parameters():
        if not parameter.requires_grad or parameter.grad is not None:
            continue
        if _wraps_model(strategy) and not finds_unused:
            raise UserError(
                f"The parameter {name} does not contribute to the loss, so DDP would wait for "
                "its gradient. Use the parameter, set its requires_grad to False, or compare "
                "ddp:find_unused_parameters=on."
            )
        if choice.name == "fsdp" and parameter in in_layers:
            raise UserError(
                f"A step does not use the parameter {name}. fsdp gathers a layer when the model "
                "calls it, so all ranks must call the same layers. Use every layer, or remove fsdp."
            )


def _check_device(choice: Choice) -> None:
    """Raise ``UserError`` if the strategy cannot run on the GPUs of these ranks."""
    entry = STRATEGIES[choice.name]
    if entry.needs_shared_memory:
        raise UserError(
            f"{choice.name} needs ranks on CPUs, because processes can share only CPU memory. "
            f"Run %ddp_start --device cpu, or compare {entry.across_hosts}."
        )
    if choice.options.get("threads") == "all":
        raise UserError("single:threads=all needs ranks on CPUs. Remove threads=all.")
    # Gloo's gather of a sharded tensor on a GPU ends the process: pytorch/pytorch#152645.
    if choice.name == "fsdp" and dist.get_backend() == "gloo":
        raise UserError(
            "fsdp needs a GPU for each rank, but these ranks share a GPU. Start one rank per GPU "
            "with %ddp_restart -n, or remove fsdp from the comparison."
        )
