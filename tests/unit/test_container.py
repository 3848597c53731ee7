"""The files for docker and for development containers fit the project.  Docker is not needed."""

import fnmatch
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINES = re.findall(r"^([A-Z]+) (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
CONTAINER = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
PIP_LINES = [text for _, text in LINES if text.startswith("pip ")]
PIP_LINES.append(CONTAINER["postCreateCommand"])


def arguments(instruction: str) -> list[list[str]]:
    return [shlex.split(text) for name, text in LINES if name == instruction]


def is_sent(path: str) -> bool:
    """Return True if docker sends a file of the project to the build: the last pattern counts."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    found = [line for line in lines if fnmatch.fnmatch(path, line.lstrip("!").replace("**", "*"))]
    return not found or found[-1].startswith("!")


def test_all_that_is_copied_is_there_and_all_that_pip_needs_is_copied():
    copied = set()
    for words in arguments("COPY"):
        *sources, target = [word for word in words if not word.startswith("--")]
        copied |= {*sources}
        assert target == "./" or Path(target).name == sources[-1]
    assert all((ROOT / source).exists() and is_sent(source) for source in copied)
    assert copied >= {"pyproject.toml", "constraints.txt", "README.md", "ddpnb"}
    assert copied >= {*PROJECT["license-files"]}
    for path in (".git", ".venv", "tests", "build", "data/runs", "ddpnb/rank/__pycache__"):
        assert not is_sent(path)


@pytest.mark.parametrize("line", PIP_LINES)
def test_pip_gets_options_extras_and_files_that_exist(line: str):
    flag = "--no-cache-dir|--no-deps|--user|--editable|--extra-index-url https://\\S+"
    found = re.fullmatch(
        rf"pip install(?: (?:{flag}|--constraint (\S+)))* '?\.(?:\[(\w+)\])?'?", line
    )
    assert found[1] is None or (ROOT / found[1]).is_file()
    assert found[2] is None or found[2] in PROJECT["optional-dependencies"]


def test_the_server_runs_without_rights_and_the_other_files_agree():
    [user], start = arguments("USER")[-1], json.loads(dict(LINES)["CMD"])
    assert ["useradd", user] == [arguments("RUN")[-1][0], arguments("RUN")[-1][-1]]
    assert start[:2] == ["jupyter", "lab"]
    [lesson] = [word.rpartition("/tree/")[2] for word in start if "/tree/" in word]
    assert (ROOT / lesson).is_file()
    assert CONTAINER["remoteUser"] == user
    dockerfile = ROOT / ".devcontainer" / CONTAINER["build"]["dockerfile"]
    assert dockerfile.resolve() == ROOT / "Dockerfile"
    assert (ROOT / ".devcontainer" / CONTAINER["build"]["context"]).resolve() == ROOT
    assert PIP_LINES[0] in (ROOT / ".binder/postBuild").read_text()
    version = (ROOT / ".binder/runtime.txt").read_text().strip().removeprefix("python-")
    assert arguments("FROM") == [[f"python:{version}-slim"]]
