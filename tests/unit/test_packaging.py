"""The files that describe ddpnb's installation and structure agree with the code."""

import ast
import re
import tomllib
from pathlib import Path

import yaml

from tests.lessons import SOLUTIONS, code_of

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
MODULES = {"ipython": "IPython", "scikit-learn": "sklearn"}
"""The module that each of these packages installs.  Other modules have their package's name."""


def floors(*extras: str) -> dict[str, str]:
    """Return the lowest version of each requirement, with the requirements of extras."""
    lines = [*PROJECT["dependencies"]]
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return dict(line.split(">=") for line in lines)


def test_conda_and_pip_install_the_same():
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    packages = [entry for entry in listed if isinstance(entry, str) and ">=" in entry]
    expected = {CONDA_NAMES.get(name, name): least for name, least in floors("lab").items()}
    assert dict(entry.split(">=") for entry in packages) == expected


def test_ddpnb_or_a_cell_for_readers_imports_each_requirement():
    cells = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    cells += [cell.source for path in SOLUTIONS for cell in code_of(path)]
    found = set(re.findall(r"^(?:import|from) (\w+)", "\n".join(cells), re.MULTILINE))
    for path in (ROOT / "ddpnb").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).partition(".")[0])
    assert {MODULES.get(name, name) for name in floors()} <= found


def test_every_requirement_is_pinned_within_its_range():
    lines = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    for name, bound in floors(*PROJECT["optional-dependencies"]).items():
        least = [int(part) for part in bound.split(".")]
        pinned = [int(part) for part in re.findall(r"\d+", pins[name])]
        assert pinned >= least, f"{name} {pins[name]} is older than {bound}"


def test_every_file_and_room_that_the_architecture_names_is_there():
    named = re.findall(r"`([a-z_/]+(?:/|\.py))`", (ROOT / "ARCHITECTURE.md").read_text())
    assert len(named) > 60
    for place in named:
        assert (ROOT / place).exists() or [*(ROOT / "ddpnb").glob(f"**/{place}")], place
