"""Private parts of other libraries are touched in ``ddpnb/compat`` alone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "ddpnb"
DEFINED = re.compile(r"(?:def |class |self\.|^ *)(_[A-Za-z]\w*)(?=[(:=,]| [:=+|])", re.MULTILINE)
"""A private name that ddpnb defines: a method, a field, a function, a constant."""
PROTOCOLS = {
    *("sys._getframe", "sys._current_frames", "os._exit", "_fields", "_asdict", "_make"),
    *("_render_traceback_", "_repr_mimebundle_"),
}
"""Documented by Python or IPython, underscore or not."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


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
    texts = {path: path.read_text() for path in sorted(ROOT.glob("**/*.py"))}
    own = {name for text in texts.values() for name in DEFINED.findall(text)}
    found = [
        f"{path}:{touch}"
        for path, text in texts.items()
        if path.parent.name != "compat"
        for touch in touches(ast.parse(text), own)
    ]
    assert found == []
