"""What ``%ddp_inspect`` looks into on a rank: a model of its cells, or a task's (ranks).

Only copies of the model and its optimizer make steps: an inspection changes nothing.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpnb.protocol.errors import UserError, kind_of, summary_of
from ddpnb.protocol.inspection import DEFAULT_CAP_MB, Found, InspectSpec, ParameterSize
from ddpnb.protocol.messages import RankState
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.strategies.worker import Memory
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.training.context import build_context
from ddpnb.rank.training.loss_checks import check_inside

_LEARNING_RATE = 0.01
ACCUMULATE_NOTE = "--accumulate is left out: each rank's part of the batch is one pass here."

LossOf = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, its input and its optimizer; only copies of them make steps."""

    title: str
    model: nn.Module
    """Plain."""
    loss_of: LossOf
    """Calls a model, or a wrapper of it, with a batch."""
    batch: Any
    optimizer: torch.optim.Optimizer
    cap_mb: float = DEFAULT_CAP_MB
    options: Mapping[str, Any]
    """Of ``DistributedDataParallel``."""
    num_samples: int | None
    make_another: Callable[[], tuple[nn.Module, torch.optim.Optimizer]] | None = None
    """Makes such a model, and its optimizer; None: they are copied."""
    notes: tuple[str, ...] = ()

    def loss(self, model: nn.Module) -> Tensor:
        """Return the loss of a model on a copy of the batch, which it may change."""
        return self.loss_of(model, batch_copy(self.batch))

    def copied(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return another such model, and an optimizer of its parameters.

        Raises:
            UserError: torch cannot copy it.
        """
        if self.make_another is not None:
            return self.make_another()
        try:
            copied: tuple[nn.Module, torch.optim.Optimizer] = copy.deepcopy(
                (self.model, self.optimizer)
            )
        except Exception as error:
            raise UserError(
                f"{self.title} cannot be copied, and an inspection must not change it: "
                f"{summary_of(error)}."
            ) from error
        copied[0].zero_grad()
        return copied


def find(spec: InspectSpec, state: RankState, namespace: Mapping[str, Any], **task: Any) -> Found:
    """Look at the model on this rank alone: it sends nothing.

    Raises:
        UserError: there is no such model, it does not fit the batch, or it needs no gradient.
    """
    device = torch.device(state.device)
    with preserve_globals(device):
        subject = subject_of(spec, state, namespace, **task)
        model, optimizer = subject.copied()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise UserError(f"{subject.title} has no parameter that needs a gradient.")
        batch = batch_copy(subject.batch)
        kept = KeptForBackward([*state_of(model), *tensors_of(batch)])
        try:
            with kept.counted():
                loss = subject.loss_of(model, batch)
        except UserError:
            raise
        except Exception as error:
            called = f"{spec.model} on the batch {spec.batch}" if spec.model else subject.title
            raise UserError(f"{called} fails: {summary_of(error).rstrip('.')}.") from error
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
                "activations": kept.num_bytes,
            },
        )


def subject_of(
    spec: InspectSpec, state: RankState, namespace: Mapping[str, Any], **task: Any
) -> Subject:
    """Return the model that a spec names, or that of its task."""
    if spec.task is not None:
        return _of_task(spec, state, namespace, **task)
    model = _value(spec.model, namespace)
    if not isinstance(model, nn.Module):
        raise UserError(f"{spec.model} is {kind_of(model)} and no model, an nn.Module.")
    cap_mb, options = DEFAULT_CAP_MB, _options(None)
    notes: tuple[str, ...] = ()
    if isinstance(model, DistributedDataParallel):
        options = _options(model)
        cap_mb = float(f"{model.bucket_bytes_cap / 2**20:.3g}")
        plain = model.module
    else:
        plain = model.module if isinstance(model, nn.DataParallel) else model
        notes = (f"{spec.model} is not DDP: a copy of it is wrapped for this.",)
    batch = _value(spec.batch, namespace)
    optimizer = _optimizer(spec, plain, namespace)
    if not spec.optimizer:
        notes += ("The update is that of plain SGD: --optimizer names another.",)
    return Subject(
        title=spec.model,
        model=plain,
        loss_of=partial(_loss, spec, namespace),
        batch=batch,
        optimizer=optimizer,
        cap_mb=cap_mb,
        options=options,
        num_samples=num_rows(batch),
        notes=notes,
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

    def make_another() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = worker.another_model()
        own = [each for each in model.parameters() if each.requires_grad]
        return model, worker.optimizer(own or [nn.Parameter(torch.zeros(1))])

    # one without parameters is refused, by ``find``
    trained = worker.parameters or [nn.Parameter(torch.zeros(1))]
    return Subject(
        title=spec.task.task if not spec.task.source else "the cell's model",
        model=worker.model,
        loss_of=loss_of,
        batch=batch.tree,
        optimizer=worker.optimizer(trained),
        options=_options(None),
        num_samples=batch.num_samples,
        make_another=make_another,
        notes=(ACCUMULATE_NOTE,) if spec.task.accumulate > 1 else (),
    )


def _value(expression: str, namespace: Mapping[str, Any], **others: Any) -> Any:
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


def _optimizer(
    spec: InspectSpec, model: nn.Module, namespace: Mapping[str, Any]
) -> torch.optim.Optimizer:
    if spec.optimizer:
        optimizer = _value(spec.optimizer, namespace)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(f"{spec.optimizer} is {kind_of(optimizer)} and no torch optimizer.")
        return optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained or [nn.Parameter(torch.zeros(1))], lr=_LEARNING_RATE)


def _loss(spec: InspectSpec, namespace: Mapping[str, Any], model: nn.Module, batch: Any) -> Tensor:
    inputs, rest = (batch[0], batch[1:]) if isinstance(batch, tuple | list) else (batch, ())
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    if spec.loss:
        loss = _value(spec.loss, namespace, output=output)
        loss = loss if isinstance(loss, Tensor) or not callable(loss) else loss(output, *rest)
    else:
        loss = getattr(output, "loss", None)  # such as transformers' models return
        loss = _mean(output) if loss is None else loss
    _check_loss(loss)
    return loss  # type: ignore[no-any-return]


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise UserError(f"The loss is {found or kind_of(loss)}: --loss must give one number.")
    if not loss.requires_grad:
        raise UserError("The loss does not depend on any parameter that needs a gradient.")


def _mean(output: Any) -> Any:
    """Return the mean over all numbers in an output."""
    if isinstance(output, Tensor):
        return output.float().mean()
    values = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, Mapping | tuple | list):
        raise UserError(f"The model returns {kind_of(output)}: name the loss with --loss.")
    found = [_mean(each) for each in values if isinstance(each, Tensor | Mapping | tuple | list)]
    return sum(found)


def batch_copy(batch: Any) -> Any:
    """Return a batch with tensors of its own, which a forward pass may change."""
    match batch:
        case Tensor():
            return batch.detach().clone().requires_grad_(batch.requires_grad)
        case dict():
            return {name: batch_copy(each) for name, each in batch.items()}
        case tuple() | list() if type(batch) in (tuple, list):
            return type(batch)(batch_copy(each) for each in batch)
    return batch


def num_rows(batch: Any) -> int | None:
    """Return the rows of the first tensor in a batch; None: it has none."""
    found = next(tensors_of(batch), None)
    return len(found) if found is not None and found.ndim else None


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in a tree."""
    match batch:
        case Tensor():
            yield batch
        case dict():
            yield from (each for value in batch.values() for each in tensors_of(value))
        case tuple() | list():
            yield from (each for value in batch for each in tensors_of(value))


def state_of(model: nn.Module) -> list[Tensor]:
    """Return a model's parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


@final
class KeptForBackward:
    """Counts the memory that a forward pass keeps for the backward pass, besides other tensors."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        self.num_bytes = 0
        self._seen = {each.untyped_storage().data_ptr() for each in others}

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count what this thread keeps in the body."""
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept):
            yield

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.num_bytes += storage.nbytes()
        return tensor


def _options(ddp: DistributedDataParallel | None) -> dict[str, Any]:
    return {
        "find_unused_parameters": ddp is not None and ddp.find_unused_parameters,
        "static_graph": ddp is not None and ddp.static_graph,
        "gradient_as_bucket_view": ddp is not None and ddp.gradient_as_bucket_view,
    }
