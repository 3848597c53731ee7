"""What is trained, a model, its loss, its optimizer and its samples; how a cell defines it (ranks).

A cell runs in a copy of the rank's namespace.  It sees what earlier cells defined, and overwrites
nothing.
"""

import copy
import inspect
import linecache
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.protocol.messages import RunSpec

_DEFINITIONS = ("model", "data", "loss", "optimizer")
"""Names that have a meaning in a cell."""
_OWN_OPTIMIZER_NOTE = "The cell's optimizer sets the learning rate; --lr is not used."

ModelFactory = Callable[[], nn.Module]
"""Makes the plain model, with weights from torch's global random numbers."""

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Takes outputs and targets; returns the *mean* loss over the samples, a tensor of shape ()."""

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of the parameters that it is given."""


class Pair(NamedTuple):
    """Inputs and targets of some samples on the CPU, one row per sample."""

    inputs: Tensor
    targets: Tensor


class Samples(ABC):
    """A split of a data set, fetched by sample numbers."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def fetch(self, indices: Tensor) -> Pair:
        """Return the samples with these numbers (int64), stacked."""


class TensorSamples(Samples):
    """Samples held in two tensors."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self._inputs = inputs
        self._targets = targets

    def __len__(self) -> int:
        return len(self._inputs)

    def fetch(self, indices: Tensor) -> Pair:
        """Index both tensors at once."""
        return Pair(self._inputs[indices], self._targets[indices])


class DatasetSamples(Samples):
    """Samples of a map-style torch ``Dataset`` whose items are (input, target)."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # checked: it has a length

    def fetch(self, indices: Tensor) -> Pair:
        """Fetch the items as torch's ``DataLoader`` does, and stack them."""
        numbers, dataset = indices.tolist(), self.dataset
        if hasattr(dataset, "__getitems__"):
            items = dataset.__getitems__(numbers)
        else:
            items = [dataset[number] for number in numbers]
        inputs, targets = default_collate(items)
        return Pair(inputs.cpu(), targets.cpu())


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to train, whether built in or written in a cell."""

    model: ModelFactory
    train: Samples
    held_out: Samples
    optimizer: OptimizerFactory
    loss: LossFunction = nn.functional.cross_entropy
    notes: tuple[str, ...] = ()
    """Shown beside every result, e.g. that the data are synthetic."""
    defined: Mapping[str, object] = field(default_factory=dict)
    """All names that the task's cell defines; empty for a built-in task."""


def default_optimizer(learning_rate: float) -> OptimizerFactory:
    """Return the factory of the default optimizer: SGD with momentum 0.9."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)

    return make


def cell_task(spec: RunSpec, namespace: Mapping[str, object], filename: str) -> Task:
    """Run the cell and return the task it defines.

    The cell must define ``model()`` and ``data(split)``, where ``split`` is ``"train"`` or
    ``"test"``; it may define ``loss(outputs, targets)`` and ``optimizer(params)``.

    Raises:
        UserError: a definition is missing or returns something wrong.
        Exception: what the cell itself raises, with its own traceback.
    """
    defined = _run_cell(spec.source, namespace, filename)
    make_model = _required(defined, "model()", "def model(): return nn.Sequential(...)")
    data = _required(defined, "data(split)", "def data(split): return inputs, targets")
    own_optimizer = _optional(defined, "optimizer(params)")
    return Task(
        model=lambda: _plain_module(make_model()),
        train=as_samples(data("train"), "train"),
        held_out=as_samples(data("test"), "test"),
        loss=_optional(defined, "loss(outputs, targets)") or nn.functional.cross_entropy,
        optimizer=_checked(own_optimizer)
        if own_optimizer
        else default_optimizer(spec.learning_rate),
        notes=(_OWN_OPTIMIZER_NOTE,) if own_optimizer else (),
        defined=defined,
    )


def _run_cell(source: str, namespace: Mapping[str, object], filename: str) -> dict[str, Any]:
    """Execute the cell in a copy of the namespace; its tracebacks show its lines.

    ``_DEFINITIONS`` must come from this cell.  A ``loss = 0.3`` or an ``optimizer`` left from an
    earlier cell is not what the user means.
    """
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = {key: value for key, value in namespace.items() if key not in _DEFINITIONS}
    exec(compile(source, filename, "exec"), scope)
    return scope


def _required(defined: Mapping[str, Any], call: str, example: str) -> Callable[..., Any]:
    name = call.partition("(")[0]
    if name not in defined:
        raise UserError(f"The cell defines no {name}(); add one, e.g.  {example}.")
    if not callable(defined[name]):
        raise UserError(f"{name} in the cell is not a function; define it, e.g.  {example}.")
    return _called_as(call, defined[name])


def _optional(defined: Mapping[str, Any], call: str) -> Callable[..., Any] | None:
    name = call.partition("(")[0]
    if defined.get(name) is None:
        return None
    if not callable(defined[name]):
        raise UserError(
            f"{name} in the cell is {kind_of(defined[name])}, not a function; "
            f"define {call}, or leave it out."
        )
    return _called_as(call, defined[name])


def _called_as(call: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function; refuse it if it does not take these arguments."""
    name, _, arguments = call.rstrip(")").partition("(")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C has no signature
        return function
    try:
        signature.bind(*filter(None, arguments.split(", ")))
    except TypeError:
        raise UserError(f"{name}{signature} in the cell is called as {call}.") from None
    return function


def _plain_module(model: object) -> nn.Module:
    """Return a copy of a model: training must not change one that the user holds."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model() returned {kind_of(model)}; return a torch nn.Module instead.")
    return copy.deepcopy(model)


def _checked(optimizer: Callable[..., Any]) -> OptimizerFactory:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = optimizer(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise UserError(
                f"optimizer(params) returned {kind_of(made)}; return a "
                "torch.optim.Optimizer, e.g.  torch.optim.SGD(params, lr=0.05)."
            )
        return made

    return make


def as_samples(data: object, split: str) -> Samples:
    """Return the result of ``data(split)`` as ``Samples``.

    Args:
        data: a map-style ``Dataset`` of (input, target) items, or a tuple (inputs, targets) of
            tensors or arrays of equal length.
        split: ``"train"`` or ``"test"``, for the error message.

    Raises:
        UserError: it is neither of these, or it is empty.
    """
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    if isinstance(data, tuple):
        samples = _from_pair(data, split)
    elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        samples = _from_dataset(data, split)
    else:
        raise _wrong(split, kind_of(data))
    if len(samples) == 0:
        raise UserError(f"data({split!r}) returned no samples; return at least one.")
    return samples


def _from_pair(pair: tuple[object, ...], split: str) -> Samples:
    if len(pair) != 2:
        raise _wrong(split, f"a tuple of {len(pair)}")
    inputs, targets = (_as_tensor(part, split) for part in pair)
    if len(inputs) != len(targets):
        raise UserError(
            f"data({split!r}) returned {len(inputs)} inputs but {len(targets)} targets; "
            "return one target for each input."
        )
    return TensorSamples(inputs, targets)


def _as_tensor(part: object, split: str) -> Tensor:
    if isinstance(part, np.ndarray) and part.dtype.kind in "fiub":
        # Torch warns about arrays that cannot be written to, so these are copied.
        part = torch.from_numpy(part if part.flags.writeable else part.copy())
    if not isinstance(part, Tensor):
        raise _wrong(split, f"a tuple with {kind_of(part)} in it")
    if part.ndim == 0:
        raise _wrong(split, "a tuple with a single number in it")
    return part.detach().cpu()


def _from_dataset(dataset: Dataset[Any], split: str) -> Samples:
    if not hasattr(dataset, "__len__"):
        raise _wrong(split, "a Dataset without a length")
    if len(dataset) == 0:
        return DatasetSamples(dataset)
    item = dataset[0]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise _wrong(
            split, f"a Dataset whose items are not pairs, but the first is {kind_of(item)}"
        )
    try:
        parts = default_collate([item])
    except (TypeError, RuntimeError) as error:
        raise UserError(
            f"data({split!r}) gives items that cannot be stacked: {type(error).__name__}; "
            "let each be a pair of tensors, arrays or numbers."
        ) from error
    if not all(isinstance(part, Tensor) for part in parts):
        raise _wrong(split, "a Dataset whose items do not stack into two tensors")
    return DatasetSamples(dataset)


def _wrong(split: str, what: str) -> UserError:
    return UserError(
        f"data({split!r}) returned {what}; return a torch Dataset of (input, target) pairs, "
        "or a tuple (inputs, targets) of tensors or arrays."
    )
