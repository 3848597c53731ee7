"""How a notebook's cell defines what is trained (ranks).

A cell runs in a copy of the rank's namespace.  It sees what earlier cells defined, and overwrites
nothing.
"""

import copy
import inspect
import linecache
import symtable
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.tasks.base import Supervised, Task
from ddpnb.rank.tasks.optimizers import default_optimizer, own_optimizer
from ddpnb.rank.tasks.samples import DataCache, Samples, as_samples

_OWN_OPTIMIZER_NOTE = "The cell's optimizer sets the learning rate; --lr is not used."


def cell_task(
    spec: RunSpec, namespace: Mapping[str, object], filename: str, cache: DataCache | None = None
) -> Task:
    """Run the cell and return the task it defines.

    The cell must define ``model()`` and ``data(split)``, where ``split`` is ``"train"`` or
    ``"test"``; ``docs/your-code.md`` lists what else it may define.

    Args:
        spec: holds the cell.
        namespace: the user's variables on this rank, visible to the cell.
        filename: what tracebacks call the cell.
        cache: keeps the data of the comparison that the run belongs to.

    Raises:
        UserError: a definition is missing or returns something wrong.
        Exception: what the cell itself raises, with its own traceback.
    """
    scope = _run_cell(spec.source, namespace, filename)
    table = symtable.symtable(spec.source, filename, "exec")
    bound = {
        each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()
    }
    # What an earlier cell left, such as ``loss = 0.3`` or an ``optimizer``, is not meant.
    defined = {
        name: value
        for name, value in scope.items()
        if name in bound or name not in namespace or value is not namespace[name]
    }
    make_model = _required(defined, "model()", "def model(): return nn.Sequential(...)")
    data = _required(defined, "data(split)", "def data(split): return inputs, targets")
    collate = _optional(defined, "collate_fn(items)")
    loss = _optional(defined, "loss(outputs, targets)")
    own_step = _optional(defined, "training_step(model, batch)")
    make_optimizer = _optional(defined, "optimizer(params)", is_checked=False)
    key = (spec.comparison, spec.data_seed) if spec.comparison else object()

    def samples(split: str) -> Samples:
        def make() -> Samples:
            return as_samples(data(split), split, collate)

        return make() if cache is None else cache.get(key, split, make)

    train, held_out = samples("train"), samples("test")
    notes = (_OWN_OPTIMIZER_NOTE,) if make_optimizer else ()
    return Task(
        model=lambda: _plain_module(make_model()),
        train=train,
        held_out=held_out,
        step=own_step or (Supervised(loss) if loss else Supervised()),
        validation_step=_optional(defined, "validation_step(model, batch)"),
        metric=_optional(defined, "metric(outputs, targets)"),
        has_loss=bool(own_step or loss),
        optimizer=own_optimizer(make_optimizer)
        if make_optimizer
        else default_optimizer(spec.learning_rate),
        notes=notes + tuple(dict.fromkeys(train.notes + held_out.notes)),
        defined=scope,
    )


def _run_cell(source: str, namespace: Mapping[str, object], filename: str) -> dict[str, Any]:
    """Execute the cell in a copy of the namespace; its tracebacks show its lines."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = dict(namespace)
    exec(compile(source, filename, "exec"), scope)
    return scope


def _required(defined: Mapping[str, Any], call: str, example: str) -> Callable[..., Any]:
    name = call.partition("(")[0]
    if name not in defined:
        raise UserError(f"The cell defines no {name}(); add one, e.g.  {example}.")
    if not callable(defined[name]):
        raise UserError(f"{name} in the cell is not a function; define it, e.g.  {example}.")
    return _called_as(call, defined[name])


def _optional(
    defined: Mapping[str, Any], call: str, *, is_checked: bool = True
) -> Callable[..., Any] | None:
    name = call.partition("(")[0]
    if defined.get(name) is None:
        return None
    if not callable(defined[name]):
        raise UserError(
            f"{name} in the cell is {kind_of(defined[name])}, not a function; "
            f"define {call}, or leave it out."
        )
    function: Callable[..., Any] = defined[name]
    return _called_as(call, function) if is_checked else function


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
