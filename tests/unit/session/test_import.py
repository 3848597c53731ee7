import json
import pkgutil
from pathlib import Path

import pytest

import ddpnb
from ddpnb.compat.probe import LOWEST
from ddpnb.protocol.errors import UserError
from tests.programs import development_package, printed

HEAVY = ("torch", "matplotlib", "pandas", "scipy", "sklearn", "ipyparallel")

SHELL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
"""
LOAD = f"""{SHELL}
shell.run_line_magic("load_ext", "ddpnb")
assert {{"ddp_start", "ddp_stop"}} <= set(shell.magics_manager.magics["line"])
"""


RESULT = "import ddpnb.reports.result, ddpnb.results.store"


@pytest.mark.parametrize("code", ["import ddpnb; dir(ddpnb)", LOAD, RESULT])
def test_importing_and_loading_import_nothing_heavy(code: str):
    code += f"\nimport json, sys\nprint(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    assert json.loads(printed(code).splitlines()[-1]) == []


@pytest.mark.parametrize(
    ("use", "old"),
    [
        ("get_ipython().run_line_magic('load_ext', 'ddpnb')", ["ipykernel"]),
        ("import ddpnb; ddpnb.start()", [*LOWEST]),
    ],
)
def test_a_library_that_is_too_old_is_named(tmp_path: Path, use: str, old: list[str]):
    for name in old:  # the other libraries have versions that are new enough
        folder = tmp_path / f"{name}-1.30.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1.30.0+cpu\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{SHELL}\nshell.run_cell({use!r})"
    needed = " and ".join(f"{name} {LOWEST[name]}" for name in old)
    found = " and ".join(f"{name} 1.30.0+cpu" for name in old)
    command = " ".join(f'"{name}>={LOWEST[name]}"' for name in old)
    assert printed(code) == (
        f"UserError: ddpnb needs {needed} or newer, but this Python has {found}. "
        f"Run %pip install {command}, then restart the kernel.\n"
    )


def test_a_script_without_a_shell_gets_a_sentence_instead_of_magics():
    with pytest.raises(UserError, match=r"In a script, call functions such as ddpnb.start"):
        ddpnb.load_ipython_extension(None)


def test_the_public_names_are_documented_and_no_module_hides_one():
    assert set(dir(ddpnb)) == set(ddpnb.__all__)
    for name in set(ddpnb.__all__) - {"log"}:
        assert getattr(ddpnb, name).__doc__
    assert not {module.name for module in pkgutil.iter_modules(ddpnb.__path__)} & set(dir(ddpnb))


def test_a_name_of_the_ranks_says_where_it_works():
    with pytest.raises(UserError, match=r"only on the ranks. Call it in a %%ddp --name NAME cell"):
        ddpnb.log  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        ddpnb.nope  # noqa: B018


def test_no_module_imports_itself_by_way_of_others():
    graph = development_package("grimp").build_graph("ddpnb", cache_dir=None)
    left = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while leaves := [module for module, imported in left.items() if not imported & left.keys()]:
        for module in leaves:
            del left[module]
    assert not left
