"""Create a task from a notebook's cell.  Runs on the ranks.

The cell runs in a copy of the rank's namespace, once for all runs of a comparison. The cell can use
the names of earlier cells, but does not overwrite them.
"""

import ast
import linecache
import symtable
from collections.abc import Mapping
from typing import Any

from torch import nn

from ddpnb.protocol.errors import UserError, closest, kind_of
from ddpnb.rank.tasks.base import Supervised, Task
from ddpnb.rank.tasks.samples import as_samples

_OWN_OPTIMIZER_NOTE = "The cell's optimizer sets the learning rate. ddpnb ignores --lr."

_EXAMPLES = {
    "model": "def model(): return nn.Sequential(...)",
    "data": "def data(split): return inputs, targets",
}
"""Functions that a cell must define, with an example of each."""
_FUNCTIONS = (
    *_EXAMPLES,
    "collate_fn",
    "loss",
    "metric",
    "optimizer",
    "training_step",
    "validation_step",
)
"""All functions that a cell may define."""


def cell_task(source: str, namespace: Mapping[str, object], filename: str) -> Task:
    """Run the cell and return the task that the cell defines.

    The cell must define ``model()`` and ``data(split)``. ``split`` is ``"train"`` or ``"test"``.
    ``docs/your-code.md`` lists the other functions that a cell may define. The cell can use all
    names in ``namespace``. Tracebacks show ``filename`` as the cell's file.

    Raises:
        UserError: A function is missing or returns a wrong value.
        Exception: Any exception that the cell's code raises, with its traceback.
    """
    scope = dict(namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), scope)
    table = symtable.symtable(source, filename, "exec")
    bound = {
        each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()
    }
    # Leave out names from earlier cells, such as ``loss = 0.3`` or an ``optimizer``.
    defined = {
        name: value
        for name, value in scope.items()
        if name in bound or name not in namespace or value is not namespace[name]
    }
    found = {name: _function(name, defined) for name in _FUNCTIONS}
    train, held_out = (
        as_samples(found["data"](split), split, found["collate_fn"]) for split in ("train", "test")
    )
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
            *((_OWN_OPTIMIZER_NOTE,) if found["optimizer"] else ()),
            *dict.fromkeys((*train.notes, *held_out.notes)),
            *_misspelt(source, defined),
        ),
        defined=scope,
    )


def _function(name: str, defined: Mapping[str, Any]) -> Any:
    function, example = defined.get(name), _EXAMPLES.get(name)
    if function is None and example is not None:
        raise UserError(f"The cell does not define {name}(). Add it:  {example}.")
    is_module = example is not None and isinstance(function, nn.Module)  # shared by all runs
    if function is not None and (is_module or not callable(function)):
        raise UserError(
            f"{name} must be a function, but the cell defines it as {kind_of(function)}. "
            f"Define the function with def {name}(...)."
        )
    return function


def _checked_model(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UserError(f"model() returned {kind_of(model)}. Return a torch nn.Module instead.")
    return model


def _misspelt(source: str, defined: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note for each function that the cell defines under a misspelt name."""
    nodes = list(ast.walk(ast.parse(source)))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    made = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    missing = [name for name in _FUNCTIONS if name not in defined]
    return tuple(
        f"The cell defines {name}(), but does not use it. Did you mean {meant}()?"
        for name in sorted(made & defined.keys() - used - set(_FUNCTIONS))
        if (meant := closest(name, missing))
    )
