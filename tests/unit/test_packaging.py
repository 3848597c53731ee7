"""The files that describe ddpnb's installation and structure agree with the code."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


def requirements() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {}
    for requirement in project["dependencies"]:
        name, version = re.fullmatch(r"([a-z-]+)(.*)", requirement).groups()
        found[name] = version
    return found


def conda_packages() -> dict[str, str]:
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    names = [entry for entry in listed if isinstance(entry, str) and entry != "pip"]
    return dict(re.fullmatch(r"([a-z-]+)(.*)", name).groups() for name in names)


def test_conda_and_pip_install_the_same():
    expected = {CONDA_NAMES.get(name, name): version for name, version in requirements().items()}
    assert conda_packages() == expected | {"python": "=3.11"}


def test_every_requirement_is_pinned_within_its_range():
    lines = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    for name, bound in requirements().items():
        least = [int(part) for part in bound.removeprefix(">=").split(".")]
        pinned = [int(part) for part in re.findall(r"\d+", pins[name])]
        assert pinned >= least, f"{name} {pins[name]} is older than {bound}"


def test_every_file_and_room_that_the_architecture_names_is_there():
    named = re.findall(r"`([a-z_/]+(?:/|\.py))`", (ROOT / "ARCHITECTURE.md").read_text())
    assert len(named) > 60
    for place in named:
        assert (ROOT / place).exists() or [*(ROOT / "ddpnb").glob(f"**/{place}")], place
