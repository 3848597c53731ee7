"""Private parts of other libraries are touched in ``ddpnb/compat`` alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "ddpnb"
DOCUMENTED = {"_getframe", "_current_frames", "_exit", "_fields", "_asdict", "_make"}
"""By Python, underscore or not; so is what IPython calls, ``_repr_mimebundle_``."""


def own_names(tree: ast.Module) -> Iterator[str]:
    """The names that a module defines: methods, fields, functions, constants."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def touched(tree: ast.Module) -> Iterator[str]:
    """The private names that a module takes from anywhere."""
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Attribute(attr=name):
                names = [name]
            case ast.ImportFrom(module=str(module), names=imported):
                names = [*module.split("."), *(each.name for each in imported)]
        yield from (name for name in names if name.startswith("_") and not name.endswith("_"))


def test_private_parts_are_touched_in_compat_alone():
    trees = {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
    known = DOCUMENTED.union(*map(own_names, trees.values()))
    found = {path: {*touched(tree)} - known for path, tree in trees.items()}
    assert not {
        path: names for path, names in found.items() if names and path.parent.name != "compat"
    }
