"""What ``%ddp_inspect`` looks into on a rank: a model of its cells, or a task's (ranks).

Only copies of the model and its optimizer make steps: an inspection changes nothing.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpnb.protocol.errors import UserError, kind_of, summary_of
from ddpnb.protocol.inspection import DEFAULT_CAP_MB, Found, InspectSpec, ParameterSize
from ddpnb.protocol.messages import RankState
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.strategies.worker import Memory, state_of
from ddpnb.rank.tasks.batches import Shard, copied, tensors_of
from ddpnb.rank.training.context import build_context
from ddpnb.rank.training.loss_checks import check_inside

ACCUMULATE_NOTE = "--accumulate is left out: each rank's part of the batch is one pass here."
NUM_WARMUP_STEPS: Final = 3
"""DDP forms its final buckets after the first; memory that is new is slow."""
MOST_STEPS, FEWEST_STEPS = 15, 3
MOST_SECONDS: Final = 2.0
"""Of the measured steps, about."""
OPTIONS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
"""Of the user's DDP, which its copy has too."""

Made = tuple[nn.Module, torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, its input and its optimizer; only copies of them make steps."""

    title: str
    make: Callable[[], Made]
    """Makes a plain model, in training mode or not as the user's is, and its optimizer."""
    loss_of: Callable[[nn.Module, Any], Tensor]
    """Calls a model, or a wrapper of it, with a batch, which it may change."""
    batch: Any
    cap_mb: float = DEFAULT_CAP_MB
    options: dict[str, Any]
    """Of ``DistributedDataParallel``."""
    num_samples: int | None
    notes: tuple[str, ...] = ()


def find(spec: InspectSpec, state: RankState, namespace: Mapping[str, Any], **task: Any) -> Found:
    """Look at the model on this rank alone: it sends nothing.

    Raises:
        UserError: there is no such model, it does not fit the batch, or it needs no gradient.
    """
    with preserve_globals(torch.device(state.device)):
        subject = subject_of(spec, state, namespace, **task)
        model, optimizer = subject.make()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise UserError(f"{subject.title} has no parameter that needs a gradient.")
        batch = copied(subject.batch)
        try:
            with kept_for_backward([*state_of(model), *tensors_of(batch)]) as kept:
                loss = subject.loss_of(model, batch)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{subject.title} fails on its batch: {summary_of(error).rstrip('.')}."
            ) from error
        _check_loss(loss)
        check_inside(loss, model, {})
        loss.backward()
        unused = tuple(name for name, p in trained.items() if p.grad is None)
        gradients = num_bytes(trained.values())
        optimizer.step()
        return Found(
            rank=state.rank,
            title=subject.title,
            parameters=tuple(
                ParameterSize(name=name, shape=tuple(p.shape), num_bytes=num_bytes([p]))
                for name, p in trained.items()
            ),
            unused=unused,
            num_samples=subject.num_samples,
            held={
                "parameters": num_bytes(state_of(model)),
                "gradients": gradients,
                "buckets": 0 if subject.options["gradient_as_bucket_view"] else gradients,
                "optimizer": Memory.of((), optimizer).optimizer,
                "batch": num_bytes(tensors_of(batch)),
                "activations": sum(kept.values()),
            },
        )


def num_steps(seconds: float) -> int:
    """Return how many steps of so many seconds to measure, an odd number."""
    num = int(MOST_SECONDS / max(seconds, 1e-6))
    return min(max(num, FEWEST_STEPS), MOST_STEPS) // 2 * 2 + 1


# -- a model of the user's, or a task's ----------------------------------------------------


def subject_of(
    spec: InspectSpec, state: RankState, namespace: Mapping[str, Any], **task: Any
) -> Subject:
    """Return the model that a spec names, or that of its task."""
    if spec.task is not None:
        return _of_task(spec, state, namespace, **task)
    model = value_of(spec.model, namespace)
    if not isinstance(model, nn.Module):
        raise UserError(f"{spec.model} is {kind_of(model)} and no model, an nn.Module.")
    ddp = model if isinstance(model, DistributedDataParallel) else None
    plain = model.module if isinstance(model, DistributedDataParallel | nn.DataParallel) else model
    batch = value_of(spec.batch, namespace)
    notes = [] if ddp else [f"{spec.model} is not DDP: a copy of it is wrapped for this."]
    if spec.optimizer:
        optimizer = value_of(spec.optimizer, namespace)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(f"{spec.optimizer} is {kind_of(optimizer)} and no torch optimizer.")
    else:
        optimizer = torch.optim.SGD(_trained(plain), lr=0.01)
        notes.append("The update is that of plain SGD: --optimizer names another.")
    return Subject(
        title=spec.model,
        make=partial(_another, spec.model, plain, optimizer),
        loss_of=partial(_loss, spec, namespace),
        batch=batch,
        cap_mb=float(f"{ddp.bucket_bytes_cap / 2**20:.3g}") if ddp else DEFAULT_CAP_MB,
        options={name: bool(getattr(ddp, name, False)) for name in OPTIONS},
        num_samples=num_rows(batch),
        notes=tuple(notes),
    )


def _of_task(
    spec: InspectSpec, state: RankState, namespace: Mapping[str, Any], **task: Any
) -> Subject:
    assert spec.task is not None
    context = build_context(spec.task, state, namespace, **task)
    worker = context.worker("i", num_steps=1, is_grouped=False)
    shard = Shard(step=0, part=state.rank, num_parts=state.world_size)
    batch = context.batch(shard, context.fetch(shard))

    def loss_of(model: nn.Module, tree: Any) -> Tensor:
        with worker.autocast():
            return worker.loss_in(worker.training_step(model, tree))

    def make() -> Made:
        model = worker.make_model().train()
        return model, worker.optimizer(_trained(model))

    return Subject(
        title=spec.task.task if not spec.task.source else "the cell's model",
        make=make,
        loss_of=loss_of,
        batch=batch.tree,
        options=dict.fromkeys(OPTIONS, False),
        num_samples=batch.num_samples,
        notes=(ACCUMULATE_NOTE,) if spec.task.accumulate > 1 else (),
    )


def _trained(model: nn.Module) -> list[nn.Parameter]:
    """Return what an optimizer takes; a model without parameters is refused later, by ``find``."""
    return [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))]


def _another(title: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Made:
    try:
        made: Made = copy.deepcopy((model, optimizer))
    except Exception as error:
        raise UserError(
            f"{title} cannot be copied, and an inspection must not change it: {summary_of(error)}."
        ) from error
    made[0].zero_grad()
    return made


def value_of(expression: str, namespace: Mapping[str, Any], **others: Any) -> Any:
    """Return what the user's expression is on this rank.

    Raises:
        UserError: it cannot be computed.
    """
    try:
        return eval(expression, {**namespace, **others})  # the user's code, as a cell is
    except NameError as error:
        raise UserError(f"{error.name} is not defined: define it in a %%ddp cell.") from None
    except Exception as error:
        raise UserError(f"{expression} fails: {summary_of(error).rstrip('.')}.") from error


def _loss(spec: InspectSpec, namespace: Mapping[str, Any], model: nn.Module, batch: Any) -> Tensor:
    inputs, rest = (batch[0], batch[1:]) if isinstance(batch, tuple | list) else (batch, ())
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    if spec.loss:
        loss = value_of(spec.loss, namespace, output=output)
        loss = loss if isinstance(loss, Tensor) or not callable(loss) else loss(output, *rest)
    elif (loss := getattr(output, "loss", None)) is None:  # which transformers' models return
        means = [each.float().mean() for each in tensors_of(output)]
        if not means:
            raise UserError(f"The model returns {kind_of(output)}: name the loss with --loss.")
        loss = sum(means)
    _check_loss(loss)
    return loss  # type: ignore[no-any-return]


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise UserError(f"The loss is {found or kind_of(loss)}: --loss must give one number.")
    if not loss.requires_grad:
        raise UserError("The loss does not depend on any parameter that needs a gradient.")


# -- tensors -------------------------------------------------------------------------------


def num_rows(batch: Any) -> int | None:
    """Return the rows of the first tensor in a batch; None: it has none."""
    found = next(tensors_of(batch), None)
    return len(found) if found is not None and found.ndim else None


@contextlib.contextmanager
def kept_for_backward(others: Iterable[Tensor]) -> Iterator[dict[int, int]]:
    """Yield the bytes of each storage that this thread keeps for a backward pass, by its address.

    Those of other tensors are left out.
    """
    known = {each.untyped_storage().data_ptr() for each in others}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        yield kept
