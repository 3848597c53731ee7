"""How a notebook's cell defines what is trained (ranks).

A cell runs in a copy of the rank's namespace.  It sees what earlier cells defined, and overwrites
nothing.
"""

import ast
import inspect
import linecache
import symtable
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from ddpnb.protocol.errors import UserError, closest, kind_of
from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.tasks.base import Supervised, Task
from ddpnb.rank.tasks.optimizers import default_optimizer, own_optimizer
from ddpnb.rank.tasks.samples import DataCache, Samples, as_samples

_OWN_OPTIMIZER_NOTE = "The cell's optimizer sets the learning rate; --lr is not used."

_FUNCTIONS = (
    "model",
    "data",
    "collate_fn",
    "loss",
    "metric",
    "optimizer",
    "training_step",
    "validation_step",
)
"""What a cell may define."""

_CODE = (FunctionType, type, ModuleType)
_FILLED = (dict, list, set)
_MISSING = object()

Splits = tuple[Samples, Samples]
"""The samples to train on, and the held-out ones."""


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
    if make_optimizer:
        _refuse_momentum(spec)

    def load() -> Splits:
        train, held_out = (as_samples(data(each), each, collate) for each in ("train", "test"))
        return train, held_out

    if cache is not None and spec.comparison:
        key = spec.comparison, spec.data_seed
        train, held_out = _loaded_once(load, data, scope, namespace, cache, key)
    else:
        train, held_out = load()
    notes = _misspelt(spec.source, defined)
    if make_optimizer:
        notes = (_OWN_OPTIMIZER_NOTE, *notes)
    return Task(
        model=lambda: _checked_model(make_model()),
        train=train,
        held_out=held_out,
        step=own_step or (Supervised(loss) if loss else Supervised()),
        validation_step=_optional(defined, "validation_step(model, batch)"),
        metric=_optional(defined, "metric(outputs, targets)"),
        has_loss=bool(own_step or loss),
        optimizer=own_optimizer(make_optimizer)
        if make_optimizer
        else default_optimizer(spec.learning_rate, spec.used_momentum),
        notes=notes + tuple(dict.fromkeys(train.notes + held_out.notes)),
        defined=scope,
    )


def _run_cell(source: str, namespace: Mapping[str, object], filename: str) -> dict[str, Any]:
    """Execute the cell in a copy of the namespace; its tracebacks show its lines."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = dict(namespace)
    exec(compile(source, filename, "exec"), scope)
    return scope


def _refuse_momentum(spec: RunSpec) -> None:
    own = "" if spec.own_momentum is None else f"{spec.strategy.partition(':')[0]}:momentum"
    if option := own or ("--momentum" if spec.momentum else ""):
        raise UserError(
            f"{option} is for the default optimizer, and the cell defines optimizer(params): "
            "leave one of them out."
        )


def _loaded_once(
    load: Callable[[], Splits],
    data: Callable[..., Any],
    scope: dict[str, Any],
    namespace: Mapping[str, object],
    cache: DataCache,
    key: object,
) -> Splits:
    """Return what ``load`` returns, which is called once for each key; all runs share it.

    What ``data`` has left under names of the cell is put under those of this run's cell: other
    functions use it, such as ``model`` the size of a vocabulary.
    """
    kept = cache.get(key)
    if kept is None:
        before = dict(scope)
        made = load()
        own = {
            name: value
            for name, value in scope.items()
            if namespace.get(name, _MISSING) is not value and not name.startswith("__")
        }
        rebound = {name for name in own if before.get(name, _MISSING) is not own[name]}
        used = {each for each in _mentioned(data, own, scope) if not isinstance(own[each], _CODE)}
        cache.keep(key, (made, {name: _held_apart(own[name]) for name in rebound | used}))
        return made
    made, left = kept
    for name, value in left.items():
        if type(scope.get(name)) is type(value) and type(value) in _FILLED:
            _refill(scope[name], value)  # in place, for others may hold it too
        else:
            scope[name] = _held_apart(value)
    splits: Splits = made
    return splits


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(contents)


def _held_apart(value: Any) -> Any:
    """Return a value; of a dict, list or set a copy, which no run changes for the next."""
    return value.copy() if type(value) in _FILLED else value


def _mentioned(function: Any, own: Mapping[str, Any], scope: Mapping[str, Any]) -> set[str]:
    """Return the cell's own names in a function's code, and in that of what it uses there."""
    found: set[str] = set()
    left = [function]
    while left:
        codes = (each.__code__ for each in _functions_in(left.pop(), scope))
        names = {name for code in codes for name in _names_in(code)}
        new = (names & own.keys()) - found
        found |= new
        left += [own[name] for name in new]
    return found


def _functions_in(value: Any, scope: Mapping[str, Any]) -> Iterator[FunctionType]:
    """Yield the functions of a cell that a call of a value, or of its methods, may run."""
    if isinstance(value, partial):
        value = value.func
    parts = [value, getattr(value, "__dict__", {}).get("__wrapped__")]
    kind = value if isinstance(value, type) else type(value)
    parts += [part for each in kind.__mro__ for part in vars(each).values()]
    for part in parts:
        plain = part.__func__ if isinstance(part, staticmethod | classmethod) else part
        if isinstance(plain, FunctionType) and plain.__globals__ is scope:
            yield plain


def _names_in(code: CodeType) -> set[str]:
    """Return the global names, and attributes, in a code and in the functions it defines."""
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)


def _misspelt(source: str, defined: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note on each function that nothing in the cell uses and whose name is nearly one."""
    nodes = list(ast.walk(ast.parse(source)))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    made = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    missing = [name for name in _FUNCTIONS if name not in defined]
    return tuple(
        f"The cell's {name}() is used by nothing; did you mean {meant}()?"
        for name in sorted(made & defined.keys() - used - set(_FUNCTIONS))
        if (meant := closest(name, missing))
    )


def _required(defined: Mapping[str, Any], call: str, example: str) -> Callable[..., Any]:
    name = call.partition("(")[0]
    if name not in defined:
        raise UserError(f"The cell defines no {name}(); add one, e.g.  {example}.")
    if not callable(defined[name]):
        raise UserError(f"{name} in the cell is not a function; define it, e.g.  {example}.")
    if isinstance(defined[name], nn.Module):
        raise UserError(
            f"{name} in the cell is a module, and each strategy needs a new one: "
            f"define a function that makes it, e.g.  {example}."
        )
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


def _checked_model(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UserError(f"model() returned {kind_of(model)}; return a torch nn.Module instead.")
    return model
