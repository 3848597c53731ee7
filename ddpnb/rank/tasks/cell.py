"""How a notebook's cell defines what is trained (ranks).

A cell runs in a copy of the rank's namespace, once for all runs of a comparison.  It sees what
earlier cells defined, and overwrites nothing.
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

_OWN_OPTIMIZER_NOTE = "The cell's optimizer sets the learning rate; --lr is not used."

_EXAMPLES = {
    "model": "def model(): return nn.Sequential(...)",
    "data": "def data(split): return inputs, targets",
}
"""What a cell must define."""
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


def cell_task(source: str, namespace: Mapping[str, object], filename: str) -> Task:
    """Run the cell and return the task it defines.

    The cell must define ``model()`` and ``data(split)``, where ``split`` is ``"train"`` or
    ``"test"``; ``docs/your-code.md`` lists what else it may define.  It sees the names of the
    namespace, and tracebacks call it by the file name.

    Raises:
        UserError: a definition is missing or returns something wrong.
        Exception: what the cell itself raises, with its own traceback.
    """
    scope = dict(namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), scope)
    table = symtable.symtable(source, filename, "exec")
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
            *_misspelt(source, defined),
        ),
        defined=scope,
    )


def _function(name: str, defined: Mapping[str, Any]) -> Any:
    """Return a function that the cell defines; None if it need not and does not."""
    function, example = defined.get(name), _EXAMPLES.get(name)
    if function is None and example is not None:
        raise UserError(f"The cell defines no {name}(); add one, e.g.  {example}.")
    is_module = example is not None and isinstance(function, nn.Module)  # one for all strategies
    if function is not None and (is_module or not callable(function)):
        raise UserError(f"{name} in the cell is {kind_of(function)}, not a function; define one.")
    return function


def _checked_model(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UserError(f"model() returned {kind_of(model)}; return a torch nn.Module instead.")
    return model


def _misspelt(source: str, defined: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note on each function that nothing in the cell uses, with nearly a known name."""
    nodes = list(ast.walk(ast.parse(source)))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    made = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    missing = [name for name in _FUNCTIONS if name not in defined]
    return tuple(
        f"The cell's {name}() is used by nothing; did you mean {meant}()?"
        for name in sorted(made & defined.keys() - used - set(_FUNCTIONS))
        if (meant := closest(name, missing))
    )
