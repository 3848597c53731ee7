"""Tab and Shift+Tab know the variables of the ranks in cells that run there."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.rig import waits_for
from tests.kernel.client import Kernel

DEFINED = """%%ddp
class Holder:
    'Holds things.'
    def __init__(self): self.weight = rank
held_there = Holder()
table_there = {"first": 1, "second": 2}
if rank == 1: only_on_one = 1
"""


@pytest.fixture
def names(kernel: Kernel) -> Iterator[Kernel]:
    assert not kernel.run(DEFINED).error
    kernel.run("held_here = 1")
    yield kernel
    kernel.run("%ddp_auto off")


@pytest.mark.parametrize("magic", ["%%ddp", "%%rank 0", "\n%%ddp --timeout 9"])
def test_tab_completes_what_the_ranks_hold(names: Kernel, magic: str):
    assert names.complete(f"{magic}\nx = 1\nheld_") == ["held_there"]
    assert names.complete(f"{magic}\n\nheld_there.we") == [".weight"]
    assert names.complete(f"{magic}\ntable_there['fi") == ["first"]
    assert names.complete(f"{magic}\nno_such_name_") == []


def test_tab_asks_the_rank_that_the_cell_names(names: Kernel):
    assert names.complete("%%rank 1\nonly_on_") == ["only_on_one"]
    assert names.complete("%%ddp --ranks 1\nonly_on_") == ["only_on_one"]
    assert names.complete("%%ddp\nonly_on_") == []


def test_tab_completes_what_is_pulled(names: Kernel):
    assert names.complete("%ddp_pull held_") == ["held_there"]
    assert names.complete("x = 1\nmine = %ddp_pull --as mine held_there.we") == [".weight"]
    assert names.complete("%ddp_pull --ranks 1 only_on_") == ["only_on_one"]
    assert "--ranks" in names.complete("%ddp_pull --ra")


def test_other_cells_are_the_notebooks(names: Kernel):
    assert names.complete("held_") == ["held_here"]
    assert names.complete("%%local\nheld_") == ["held_here"]
    assert names.complete("%%time\nheld_") == ["held_here"]
    assert "--timeout" in names.complete("%%ddp --ti")
    names.run("%ddp_auto on")
    assert names.complete("held_") == ["held_there"]
    assert names.complete("%%local\nheld_") == ["held_here"]


def test_shift_tab_describes_what_the_ranks_hold(names: Kernel):
    assert "Holds things." in names.inspect("%%ddp\nheld_there")
    assert names.inspect("held_there") == ""
    assert "int" in names.inspect("held_here")
    assert "int" in names.inspect("%%ddp\nheld_here")  # which no rank knows


def test_nobody_waits_for_busy_ranks(names: Kernel, tmp_path: Path):
    sign = tmp_path / "sign"
    names.run(f"%%ddp --no-wait\nheld_since = 1\n{waits_for(sign)}")
    names.run("handle = _")
    began = time.monotonic()
    for _ in range(10):
        assert names.complete("%%ddp\nheld_") == ["held_here", "held_there"]
        names.inspect("%%ddp\nheld_there")
    assert time.monotonic() - began < 10
    assert names.complete("%%rank 1\nx = 'held_'\nonly_on_") == ["only_on_one"]
    assert names.complete("%%rank 0\nonly_on_") == []
    assert names.complete("%%ddp\nheld_there.only_") == []
    assert "held_there" not in names.complete("held_")
    sign.touch()
    names.run("handle.wait(30)")
    assert names.complete("%%ddp\nheld_") == ["held_since", "held_there"]


def test_an_idle_rank_answers_for_a_busy_one(names: Kernel, tmp_path: Path):
    sign = tmp_path / "sign"
    names.run(f"%%ddp --no-wait --ranks 0\n{waits_for(sign)}")
    names.run("handle = _")
    assert names.complete("%%ddp\nonly_on_") == ["only_on_one"]
    assert names.complete("%%rank 0\nheld_t") == ["held_there"]
    sign.touch()
    names.run("handle.wait(30)")


def test_a_rank_that_does_not_answer_is_not_waited_for(names: Kernel):
    slow = "class Slow:\n    def __dir__(self):\n        time.sleep(2)\n        return []"
    names.run(f"%%ddp\nimport time\n{slow}\nslow = Slow()")
    began = time.monotonic()
    for _ in range(3):
        assert names.complete("%%ddp\nslow.at") == []
    assert time.monotonic() - began < 4
    assert names.run("%%ddp\nworld_size").by_rank == {0: ["2"], 1: ["2"]}


def test_without_ranks_the_notebook_answers(bare_kernel: Kernel):
    bare_kernel.run("held_here = 1")
    assert bare_kernel.complete("%%ddp\nheld_") == ["held_here"]
    assert "int" in bare_kernel.inspect("%%ddp\nheld_here")
