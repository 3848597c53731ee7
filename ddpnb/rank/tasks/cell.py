"""The task that a notebook cell defines (ranks).

The cell runs in a copy of the rank's namespace.  It sees what earlier cells defined, and overwrites
nothing.
"""

import copy
import inspect
import linecache
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.tasks.base import OptimizerFactory, Task, as_samples, default_optimizer

_DEFINITIONS = ("model", "data", "loss", "optimizer")
"""Names that have a meaning here."""
_OWN_OPTIMIZER_NOTE = "The cell's optimizer sets the learning rate; --lr is not used."


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
