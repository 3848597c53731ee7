"""Two public functions, classes or constants of ddpnb never share a name."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import ddpnb

SAME_ON_PURPOSE = ("api.py", "demo.py", "course/", "rank/script/", "rank/tasks/")
"""The public functions, the checks of the lessons, the parts of scripts, and the tasks."""
PROCESSES = {"main", "run"}  # each program has them


def names_of(node: ast.stmt) -> Iterator[str]:
    """Yield the functions, classes and constants that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    for each in ast.walk(node) if isinstance(node, ast.Assign | ast.AnnAssign) else ():
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id.isupper():
            yield each.id


def test_no_two_public_names_are_the_same():
    folder = Path(ddpnb.__file__).parent
    files: dict[str, list[str]] = defaultdict(list)
    for file in sorted(folder.rglob("*.py")):
        name = str(file.relative_to(folder))
        if name.startswith(SAME_ON_PURPOSE):
            continue
        for node in ast.parse(file.read_text()).body:
            for each in names_of(node):
                files[each].append(name)
    twice = {name: found for name, found in files.items() if len(found) > 1 and name[0] != "_"}
    assert twice.keys() <= PROCESSES, twice
