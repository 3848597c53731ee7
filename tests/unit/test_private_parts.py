"""Private parts of other libraries are touched in ``ddpnb/compat`` alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTOCOLS = {
    "sys._getframe",
    "sys._current_frames",
    "os._exit",
    "_fields",
    "_asdict",
    "_make",
    "_render_traceback_",
    "_repr_mimebundle_",
}
"""Documented by Python or IPython, underscore or not."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def own_names(trees: list[ast.Module]) -> set[str]:
    """All private names that ddpnb defines: methods, fields, functions, modules' constants."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=attr, ctx=ast.Store()):
                found.add(attr)
    return found


def touches(tree: ast.Module, own: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=attr) if is_private(attr):
                spelled = ast.unparse(node)
                if attr not in own and not {attr, spelled} & PROTOCOLS:
                    yield f"{node.lineno}: {spelled}"
            case ast.ImportFrom(module=str(module), names=names) if not module.startswith("ddpnb"):
                if any(map(is_private, [*module.split("."), *(each.name for each in names)])):
                    yield f"{node.lineno}: {ast.unparse(node)}"


def test_private_parts_are_touched_in_compat_alone():
    files = sorted((ROOT / "ddpnb").glob("**/*.py"))
    trees = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in files}
    own = own_names(list(trees.values()))
    found = [
        f"{path}:{touch}"
        for path, tree in trees.items()
        if path.parts[1] != "compat"
        for touch in touches(tree, own)
    ]
    assert found == []
