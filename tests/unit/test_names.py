"""Two public functions or classes of ddpnb never share a name."""

import ast
from collections import defaultdict
from pathlib import Path

import ddpnb

SAME_ON_PURPOSE = ("api.py", "demo.py", "course/", "rank/script/", "rank/tasks/")
"""The public functions, the checks of the lessons, the parts of scripts, and the tasks."""
PROCESSES = {"main", "run"}  # each program has them


def test_no_two_public_functions_or_classes_share_a_name():
    folder = Path(ddpnb.__file__).parent
    files: dict[str, list[str]] = defaultdict(list)
    for file in sorted(folder.rglob("*.py")):
        name = str(file.relative_to(folder))
        if name.startswith(SAME_ON_PURPOSE):
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                files[node.name].append(name)
    twice = {name: found for name, found in files.items() if len(found) > 1 and name[0] != "_"}
    assert twice.keys() <= PROCESSES, twice
