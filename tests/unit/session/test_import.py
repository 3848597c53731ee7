import json
import pkgutil

import pytest

import ddpnb
from ddpnb.protocol.errors import UserError
from tests.programs import development_package, printed

HEAVY = ("torch", "matplotlib", "pandas", "scipy", "sklearn", "ipyparallel")

LOAD = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "ddpnb")
assert {"ddp_start", "ddp_stop"} <= set(shell.magics_manager.magics["line"])
"""


RESULT = "import ddpnb.reports.result, ddpnb.history.store"


@pytest.mark.parametrize("code", ["import ddpnb; dir(ddpnb)", LOAD, RESULT])
def test_importing_and_loading_import_nothing_heavy(code: str):
    code += f"\nimport json, sys\nprint(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    assert json.loads(printed(code).splitlines()[-1]) == []


def test_the_public_names_are_the_twins_of_the_magics():
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
