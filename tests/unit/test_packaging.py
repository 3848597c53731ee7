"""The files that describe ddpnb's installation and structure agree with the code."""

import ast
import importlib.util
import itertools
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

from ddpnb.compat.probe import LOWEST
from ddpnb.protocol.processes import VERSION
from tests.lessons import SOLUTIONS, code_of
from tests.programs import printed, skip_or_fail

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
HOME = PROJECT["urls"]["Repository"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
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


def test_a_sentence_about_old_versions_names_the_requirements():
    assert {name: floors()[name] for name in LOWEST} == LOWEST


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


def pins(path: Path) -> dict[str, str]:
    """Return the versions that a file of requirements names, by the package's name."""
    lines = [line for line in path.read_text().splitlines() if re.match(r"[\w-]+==", line)]
    return dict(line.lower().replace("_", "-").split("==") for line in lines)


def numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


CONSTRAINTS = pins(ROOT / "constraints.txt")
STACKS = {path.stem: pins(path) for path in sorted((ROOT / "tests" / "stacks").glob("*.txt"))}


def test_every_requirement_is_pinned_within_its_range():
    for name, least in floors(*PROJECT["optional-dependencies"]).items():
        assert numbers(CONSTRAINTS[name]) >= numbers(least), f"{name} is older than {least}"


@pytest.mark.parametrize("stack", STACKS)
def test_a_stack_pins_every_requirement_within_its_range(stack: str):
    for name, least in floors().items():
        assert numbers(STACKS[stack][name]) >= numbers(least), f"{name} is older than {least}"
    text = (ROOT / "tests" / "stacks" / f"{stack}.txt").read_text()
    tools = text.partition("# The tests' tools, with the versions of constraints.txt.\n")[2]
    assert len(tools.splitlines()) > 4
    for line in tools.lower().replace("_", "-").splitlines():
        name, version = line.split("==")
        assert version == CONSTRAINTS[name], line


def test_the_lowest_stack_has_the_lowest_versions():
    lowest = floors() | {"pandas": "2.2.2"}  # 2.2.0 and 2.2.1 exclude numpy 2
    for name, least in lowest.items():
        pinned, least_numbers = numbers(STACKS["lowest"][name]), numbers(least)
        assert pinned[: len(least_numbers)] == least_numbers, name
        assert not any(pinned[len(least_numbers) :]), name


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and the sdist, without a package index."""
    if not all(map(importlib.util.find_spec, ("hatchling", "hatch_fancy_pypi_readme"))):
        skip_or_fail("building a wheel needs hatchling: remove .venv/.installed and run make check")
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_pip_installs_nothing_but_ddpnb_on_these_versions(built: Path):
    """``make colab`` runs this test in an environment with Colab's versions."""
    (wheel,) = built.glob("*.whl")
    line = ["install", "--dry-run", "--quiet", "--no-index", "--report", "-"]
    pip = [sys.executable, "-m", "pip", "--isolated", *line, str(wheel)]
    ended = subprocess.run(pip, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = [each["metadata"]["name"] for each in json.loads(ended.stdout)["install"]]
    assert found == ["ddpnb"]


def test_the_built_files_are_small_and_their_page_has_absolute_links(built: Path):
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert max(path.stat().st_size for path in (wheel, source)) < 1_000_000
    with tarfile.open(source) as archive:
        folder = f"ddpnb-{PROJECT['version']}"
        inside = {name.removeprefix(f"{folder}/") for name in archive.getnames()}
    assert inside >= {"LICENSE", "CITATION.cff", "ddpnb/py.typed", "ddpnb/rank/tasks/digits.npz"}
    assert not [name for name in inside if name.endswith(".sqlite3")]
    with zipfile.ZipFile(wheel) as archive:
        assert {name.partition("/")[0] for name in archive.namelist()} == {
            "ddpnb",
            f"{folder}.dist-info",
        }
        page = message_from_bytes(archive.read(f"{folder}.dist-info/METADATA")).get_payload()
    raw = HOME.replace("//github.com", "//raw.githubusercontent.com")
    links = re.findall(r"\]\(([^)#]*)[^)]*\)", str(page))
    assert len(links) > 10
    for link in links:
        assert link.startswith("https://"), link
        for home in (f"{raw}/v{PROJECT['version']}/", f"{HOME}/blob/v{PROJECT['version']}/"):
            if link.startswith(home):
                assert (ROOT / link.removeprefix(home)).exists(), link


def test_every_file_names_the_same_home_and_the_same_version():
    pages = [ROOT / "pyproject.toml", *ROOT.glob("*.md"), *ROOT.glob("*.cff")]
    for folder, kind in itertools.product(("docs", "notebooks", ".github"), ("md", "ipynb", "yml")):
        pages += (ROOT / folder).rglob(f"*.{kind}")
    named = re.compile(r"(?:github|raw\.githubusercontent)\.com/([\w-]+/ddpnb)\b")
    homes = {home for page in pages for home in named.findall(page.read_text())}
    assert homes == {HOME.removeprefix("https://github.com/")}
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert {cited["version"], newest, VERSION} == {PROJECT["version"]}


def test_the_hooks_have_the_versions_of_the_constraints():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    names = {"ruff-pre-commit": "ruff", "check-jsonschema": "check-jsonschema"}
    for each in hooks:
        if each["repo"] == "local":
            for line in each["hooks"][0]["additional_dependencies"]:
                name, version = line.split("==")
                assert version == CONSTRAINTS[name]
        else:
            name = names[each["repo"].rpartition("/")[2]]
            assert each["rev"].removeprefix("v") == CONSTRAINTS[name]


def runs_of(job: dict) -> Iterator[str]:
    """Yield the commands of a workflow's job, once for each entry of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for entry in matrix.get("include", [{}]):
        for step in job.get("steps", []):
            text = step.get("run", "")
            for name, value in entry.items():
                text = text.replace(f"${{{{ matrix.{name} }}}}", value)
            yield text


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_limited_pinned_and_names_what_exists(path: Path):
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"].startswith(path.stem)
    used = re.findall(r"uses: (.*)", text)
    assert used
    for each in used:
        assert each.startswith("./") or re.fullmatch(r"\S+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)
    makefile = (ROOT / "Makefile").read_text()
    stacks = re.search(r"^STACKS := (.*)", makefile, re.MULTILINE)[1].split()
    assert set(stacks) == set(STACKS)
    targets = {*stacks, *re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)}
    for job in workflow["jobs"].values():
        assert "timeout-minutes" in job or "uses" in job
        for command in runs_of(job):
            assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= targets, command
            for place in re.findall(r"(?:\.ci|docs|tests|benchmarks)/[\w/.-]+", command):
                assert (ROOT / place).exists(), place


def test_a_bug_report_names_versions_and_devices_but_nobody(tmp_path: Path):
    for card in ("0", "1"):
        file = tmp_path / f"root/proc/driver/nvidia/gpus/{card}/information"
        file.parent.mkdir(parents=True)
        file.write_text("Model: \t\t Tesla T4\nIRQ:   \t\t 33\n")
    version = "NVRM version: NVIDIA UNIX Kernel Module  580.82.07  Wed\nGCC version: gcc 12.2.0 \n"
    (tmp_path / "root/proc/driver/nvidia/version").write_text(version)
    home = tmp_path / "home-of-alice" / "thesis"
    home.mkdir(parents=True)
    code = f"""import os, sys
sys.modules["IPython"] = None
os.environ |= dict(HOME={str(home.parent)!r}, USER="alice", KAGGLE_KERNEL_RUN_TYPE="Batch")
import ddpnb
os.chdir({str(home)!r})
print(ddpnb.debug_info(root=__import__("pathlib").Path({str(tmp_path / "root")!r})))
assert "torch" not in sys.modules"""
    text = printed(code)
    facts = dict(line.split(": ", 1) for line in text.splitlines())
    assert facts.keys() >= {"ddpnb", "torch", "ipython", "ipykernel", "ipyparallel", "ipywidgets"}
    assert facts["GPUs"] == "Tesla T4, Tesla T4"
    assert facts["GPU driver"] == "580.82.07"
    assert facts["frontend"] == "KAGGLE"
    assert facts["stored runs"] == "data/runs"
    for name in ("alice", "thesis", str(tmp_path)):
        assert name not in text.lower(), text


def test_every_file_and_room_that_the_architecture_names_is_there():
    named = re.findall(r"`([a-z_/]+(?:/|\.py))`", (ROOT / "ARCHITECTURE.md").read_text())
    assert len(named) > 60
    for place in named:
        assert (ROOT / place).exists() or [*(ROOT / "ddpnb").glob(f"**/{place}")], place
