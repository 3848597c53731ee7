"""How a notebook's cell defines what is trained (ranks).

A cell runs in a copy of the rank's namespace.  It sees what earlier cells defined, and overwrites
nothing.
"""

import ast
import linecache
import symtable
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from ddpnb.protocol.errors import UserError, closest, kind_of
from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.tasks.base import Supervised, Task
from ddpnb.rank.tasks.samples import DataCache, Samples, as_samples

_OWN_OPTIMIZER_NOTE = "The cell's optimizer sets the learning rate; --lr is not used."

_EXAMPLES = {
    "model": "def model(): return nn.Sequential(...)",
    "data": "def data(split): return inputs, targets",
}
_FUNCTIONS = (
    *_EXAMPLES,
    "collate_fn",
    "loss",
    "metric",
    "optimizer",
    "training_step",
    "validation_step",
)
"""What a cell may define."""

_CODE = (FunctionType, type, ModuleType)

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
    found = {name: _function(name, defined) for name in _FUNCTIONS}
    if found["optimizer"]:
        _refuse_momentum(spec)

    def load() -> Splits:
        train, held_out = (
            as_samples(found["data"](split), split, found["collate_fn"])
            for split in ("train", "test")
        )
        return train, held_out

    if cache is not None and spec.comparison:
        key = spec.comparison, spec.data_seed
        train, held_out = _loaded_once(load, spec.source, scope, defined, cache, key)
    else:
        train, held_out = load()
    notes = (_OWN_OPTIMIZER_NOTE,) if found["optimizer"] else ()
    return Task(
        model=lambda: _checked_model(found["model"]()),
        train=train,
        held_out=held_out,
        step=found["training_step"] or Supervised(*filter(None, [found["loss"]])),
        validation_step=found["validation_step"],
        metric=found["metric"],
        has_loss=bool(found["training_step"] or found["loss"]),
        optimizer=found["optimizer"],
        notes=(
            *notes,
            *_misspelt(spec.source, defined),
            *dict.fromkeys(train.notes + held_out.notes),
        ),
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
    source: str,
    scope: dict[str, Any],
    defined: Mapping[str, Any],
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
        used = _names_used_by("data", source) & defined.keys()
        left = {
            name: value
            for name, value in scope.items()
            if before.get(name) is not value or (name in used and not isinstance(value, _CODE))
        }
        cache.clear()  # of the comparison before
        cache[key] = made, {name: _held_apart(value) for name, value in left.items()}
        return made
    splits: Splits = kept[0]
    for name, value in kept[1].items():
        mine: Any = scope.get(name)
        if type(mine) is type(value) and isinstance(mine, dict | list | set):
            mine.clear()  # in place, for others may hold it too
            (mine.extend if isinstance(mine, list) else mine.update)(value)
        else:
            scope[name] = _held_apart(value)
    return splits


def _held_apart(value: Any) -> Any:
    """Return a value; of a dict, list or set a copy, which no run changes for the next."""
    return value.copy() if type(value) in (dict, list, set) else value


def _names_used_by(name: str, source: str) -> set[str]:
    """Return the names in the statements of a cell that bind a name, and in theirs in turn."""
    used_with: dict[str, set[str]] = {}
    for statement in ast.parse(source).body:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            bound = {statement.name}
        for each in bound:
            used_with.setdefault(each, set()).update(node.id for node in names)
    found, left = set(), {name}
    while left:
        found |= left
        left = set().union(*(used_with.get(each, set()) for each in left)) - found
    return found


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


def _function(name: str, defined: Mapping[str, Any]) -> Any:
    """Return a function that the cell defines; None if it need not and does not."""
    function, example = defined.get(name), _EXAMPLES.get(name)
    if function is None and example is None:
        return None
    if function is None:
        raise UserError(f"The cell defines no {name}(); add one, e.g.  {example}.")
    if not callable(function):
        raise UserError(f"{name} in the cell is {kind_of(function)}, not a function; define one.")
    if example is not None and isinstance(function, nn.Module):
        raise UserError(
            f"{name} in the cell is a module, and each strategy needs a new one: "
            f"define a function that makes it, e.g.  {example}."
        )
    return function


def _checked_model(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UserError(f"model() returned {kind_of(model)}; return a torch nn.Module instead.")
    return model
