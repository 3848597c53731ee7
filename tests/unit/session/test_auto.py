import pytest
from IPython.core.interactiveshell import InteractiveShell

from ddpnb.magics.rank_cells import AutoCells


@pytest.fixture
def auto() -> AutoCells:
    return AutoCells(InteractiveShell())


def redirected(auto: AutoCells, cell: str) -> str:
    return "".join(auto.redirect(cell.splitlines(keepends=True)))


@pytest.mark.parametrize("cell", ["x = 1\n", "!ls\n", "%%time\nx\n", "%time x\n", "# %%ddp no\n"])
def test_while_on_a_cell_goes_to_the_ranks_unchanged(auto: AutoCells, cell: str):
    assert redirected(auto, cell) == cell
    auto.switch(True)
    assert redirected(auto, cell) == "%%ddp\n" + cell
    assert auto.has_redirected(cell)
    auto.switch(False)
    assert redirected(auto, cell) == cell


@pytest.mark.parametrize(
    "cell",
    [
        "%%ddp --ranks 0\nx\n",
        "%%rank 0\nx\n",
        "%%ddp_compare ddp\nx\n",
        "a = 1\n%ddp_push a\n",
        "%load_ext ddpnb\n",
        "",
        "\n",
    ],
)
def test_ddpnbs_own_magics_and_empty_cells_stay(auto: AutoCells, cell: str):
    auto.switch(True)
    assert redirected(auto, cell) == cell
    assert not auto.has_redirected(cell)


def test_local_is_removed_and_line_numbers_stay(auto: AutoCells):
    for is_on in (True, False):
        auto.switch(is_on)
        assert redirected(auto, "%%local  \nx = 1\n1/0\n") == "\nx = 1\n1/0\n"


def test_installed_and_removed_it_leaves_no_trace():
    shell = InteractiveShell()
    before = list(shell.input_transformers_cleanup)
    auto = AutoCells(shell)
    auto.install()
    auto.switch(True)
    assert shell.transform_cell("x = 1") == "get_ipython().run_cell_magic('ddp', '', 'x = 1\\n')\n"
    auto.remove()
    auto.remove()
    assert shell.input_transformers_cleanup == before
