"""In cells for the ranks, Tab and Shift+Tab know the ranks' variables."""

import time
from pathlib import Path

import IPython
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
# Before IPython 9, a completion repeats the object of an attribute.
WEIGHT = ".weight" if IPython.version_info >= (9,) else "held_there.weight"
COMPLETED = {
    "%%ddp\nx = 1\nheld_": ["held_there"],
    "%%rank 0\n\nheld_there.we": [WEIGHT],
    "%%ddp\nno_such_name_": [],
    "%%rank 1\nonly_on_": ["only_on_one"],
    "%%ddp --ranks 1\nonly_on_": ["only_on_one"],
    "%%ddp\nonly_on_": [],
    "%ddp_pull held_": ["held_there"],
    "x = 1\nmine = %ddp_pull --as mine held_there.we": [WEIGHT],
    "%ddp_pull --ranks 1 only_on_": ["only_on_one"],
    "%ddp_inspect held_there --batch tab": ["table_there"],
    "held_": ["held_here"],
    "%%time\nheld_": ["held_here"],
}


@pytest.fixture
def names(kernel: Kernel) -> Kernel:
    assert kernel.run(DEFINED).passed
    kernel.run("held_here = 1")
    return kernel


def test_tab_completes_what_the_rank_holds_that_runs_the_cell(names: Kernel):
    assert {cell: names.complete(cell) for cell in COMPLETED} == COMPLETED
    assert "first" in names.complete("\n%%ddp --timeout 9\ntable_there['fi")
    assert "--ranks" in names.complete("%ddp_pull --ra")
    assert "--timeout" in names.complete("%%ddp --ti")


def test_shift_tab_describes_what_the_ranks_hold(names: Kernel):
    assert "Holds things." in names.inspect("%%ddp\nheld_there")
    assert names.inspect("held_there") == ""
    assert "int" in names.inspect("held_here")
    assert "int" in names.inspect("%%ddp\nheld_here")  # a variable of the notebook only


def test_colab_gets_the_fields_that_its_own_kernel_sends(names: Kernel):
    names.run("import sys\nsys.modules['google.colab'] = sys")
    (data,) = names.described("%%ddp\nheld_there").values()
    assert data["found"]
    assert data["type_name"] == "Holder"
    assert data["docstring"] == "Holds things."
    names.run("del sys.modules['google.colab']")


def test_nobody_waits_for_busy_ranks_and_an_idle_one_answers(names: Kernel, tmp_path: Path):
    sign = tmp_path / "sign"
    names.run(f"%%ddp --no-wait --ranks 0\n{waits_for(sign)}")
    names.run("first = _")
    assert names.complete("%%ddp\nonly_on_") == ["only_on_one"]
    names.run(f"%%ddp --no-wait --ranks 1\n{waits_for(sign)}")
    names.run("second = _")
    began = time.monotonic()
    for _ in range(10):
        assert names.complete("%%ddp\nheld_") == ["held_here"]
        names.inspect("%%ddp\nheld_there")
    assert time.monotonic() - began < 10
    sign.touch()
    names.run("first.wait(30), second.wait(30)")


def test_a_rank_that_does_not_answer_is_not_waited_for(names: Kernel):
    slow = "class Slow:\n    def __dir__(self):\n        time.sleep(2)\n        return []"
    names.run(f"%%ddp\nimport time\n{slow}\nslow = Slow()")
    began = time.monotonic()
    for _ in range(3):
        assert names.complete("%%ddp\nslow.at") == []
    assert time.monotonic() - began < 4
