"""The model that ``%ddp_inspect`` inspects, from the rank's variables or from a task.

An inspection has no side effects, because only copies of the model take steps.  Runs on the ranks.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpnb.protocol.errors import UserError, closest, kind_of, summary_of
from ddpnb.protocol.inspection import InspectSpec
from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.strategies.ddp import DEFAULT_CAP_MB
from ddpnb.rank.tasks.base import OptimizerFactory, split_step
from ddpnb.rank.tasks.batches import Shard, copied
from ddpnb.rank.training.model_checks import attempt
from ddpnb.rank.training.run import Surroundings, load_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with its input and its optimizer.  Only copies of the model take steps."""

    make_model: Callable[[], nn.Module]
    """Function that returns an unwrapped copy of the model in the model's current mode."""
    make_optimizer: OptimizerFactory
    loss_of: Callable[[nn.Module, Any], Tensor]
    """Function that returns a model's loss on a batch, and may change the batch."""
    batch: Any
    cap_mb: float = DEFAULT_CAP_MB
    finds_unused: bool = False
    """True if DDP looks for parameters that do not contribute to the loss."""


def find(
    spec: InspectSpec, here: Surroundings
) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """Check the model on this rank without communication.

    Return the shape of each parameter that needs a gradient, and the names of unused parameters.

    Raises:
        UserError: the model does not exist, does not fit the batch, or needs no gradient.
    """
    with preserve_globals(torch.device(here.state.device)):
        subject = subject_of(spec, here)
        with attempt(f"Copying {spec.title} and calling the copy on its batch failed"):
            model = subject.make_model()
            loss = subject.loss_of(model, copied(subject.batch))
        if not loss.requires_grad:
            raise UserError("The loss does not depend on any parameter that needs a gradient.")
        model.zero_grad()
        loss.backward()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        unused = tuple(name for name, p in trained.items() if p.grad is None)
        return {name: tuple(p.shape) for name, p in trained.items()}, unused


def subject_of(spec: InspectSpec, here: Surroundings) -> Subject:
    """Return the subject for the model of the spec's task, or for the model that the spec names."""
    if spec.task is not None:
        return _of_task(spec, spec.task, here)
    namespace = here.namespace
    model = value_of(spec.model, namespace)
    if not isinstance(model, nn.Module):
        raise UserError(f"{spec.model} is {kind_of(model)}, not an nn.Module.")
    ddp = model if isinstance(model, DistributedDataParallel) else None
    return Subject(
        make_model=partial(copy.deepcopy, model if ddp is None else ddp.module),
        make_optimizer=partial(torch.optim.SGD, lr=0.01),
        loss_of=partial(_loss, spec, namespace),
        batch=value_of(spec.batch, namespace),
        cap_mb=float(f"{ddp.bucket_bytes_cap / 2**20:.3g}") if ddp else DEFAULT_CAP_MB,
        finds_unused=spec.finds_unused or (ddp is not None and ddp.find_unused_parameters),
    )


def _of_task(spec: InspectSpec, task: RunSpec, here: Surroundings) -> Subject:
    context, state = load_run(task, here), here.state
    worker = context.worker("i", num_steps=1)
    shard = Shard(step=0, index=state.rank, num_shards=state.world_size)

    def loss_of(model: nn.Module, tree: Any) -> Tensor:
        with worker.autocast():
            return split_step(worker.training_step(model, tree))[0]

    return Subject(
        make_model=lambda: worker.make_model().train(),
        make_optimizer=worker.optimizer,
        loss_of=loss_of,
        batch=context.batch(shard).tree,
        finds_unused=spec.finds_unused,
    )


def value_of(expression: str, namespace: Mapping[str, Any], **others: Any) -> Any:
    """Evaluate the user's expression on this rank.  Raise UserError if the expression fails."""
    try:
        return eval(expression, {**namespace, **others})  # runs the user's code, as a cell does
    except NameError as error:
        near = closest(error.name or "", [name for name in namespace if not name.startswith("_")])
        hint = f"; did you mean {near}?" if near else ". Define it in a %%ddp cell."
        raise UserError(f"{error.name} is not defined{hint}") from None
    except Exception as error:
        raise UserError(f"{expression} raised {summary_of(error).rstrip('.')}.") from error


def _loss(spec: InspectSpec, namespace: Mapping[str, Any], model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    return split_step(value_of(spec.loss or "output.mean()", namespace, output=output), "--loss")[0]
