"""Variables can be sent between the notebook and the ranks."""

import json
import re
from pathlib import Path

import pytest

from tests.cluster.rig import wait_until
from tests.kernel.client import Kernel, both


def files_left(kernel: Kernel) -> list[str]:
    return [path.name for path in kernel.run_folder.glob("variables-*")]


def test_push_and_pull(kernel: Kernel):
    kernel.run(
        "import numpy as np\na, arr, twice = {'n': [1, 2]}, np.zeros(3), lambda x: 2 * x\n"
        "%ddp_push a arr twice"
    )
    cell = kernel.run("%%ddp\narr += rank + 1\nprint(a, twice(4), arr.sum())")
    assert cell.by_rank == {0: ["{'n': [1, 2]} 8 3.0"], 1: ["{'n': [1, 2]} 8 6.0"]}
    kernel.run("just_1 = 5\n%ddp_push just_1 --ranks 1")
    assert kernel.run("%%ddp\n'just_1' in globals()").by_rank == {0: ["False"], 1: ["True"]}
    assert kernel.run("%ddp_pull rank + 1").text == "{0: 1, 1: 2}"
    assert kernel.run("%ddp_pull arr.sum() --ranks 1 --as got\nprint(got)").stdout == "6.0\n"
    assert kernel.run("%ddp_pull arr --ranks 0 --as got\ngot += 1\nprint(got)").stdout == (
        "[2. 2. 2.]\n"
    )
    assert kernel.run("%ddp_pull {1: 'a', 'b': None} --ranks 0").text == "{1: 'a', 'b': None}"


def test_classes_and_functions_of_cells_cross_with_what_they_use(kernel: Kernel):
    kernel.run(
        """
import ddpnb
factor = 2
def doubled(x): return factor * x
def counter():
    count = 0
    def add(n):
        nonlocal count
        count += doubled(n)
        return count
    return add
class Base:
    def get(self): return doubled(self.value)
class Held(Base):
    def __init__(self, value): self.value = value
add, held, on_rank = counter(), Held(3), lambda x: doubled(x) + rank + later
%ddp_push add held on_rank
"""
    )
    cell = kernel.run("%%ddp\nlater = 100\nprint(add(1), add(1), held.get(), on_rank(1))")
    assert cell.by_rank == {0: ["2 4 6 102"], 1: ["2 4 6 103"]}
    kernel.run("%%ddp\nheld.value += rank\nclass Theirs:\n    def get(self): return later")
    kernel.run("got, theirs = ddpnb.pull('held', ranks='1'), ddpnb.pull('Theirs()', ranks='0')")
    assert kernel.run("print(isinstance(got, Held), got.get())").stdout == "True 8\n"
    kernel.run("def doubled(x): return 100 * x")  # the class still uses the notebook's functions
    assert kernel.run("print(got.get(), Held(1).get())").stdout == "400 100\n"
    assert kernel.run("print(theirs.get(), 'later' in globals())").stdout == "100 False\n"
    kernel.run("%%ddp\nclass Base: pass\nbase = Base()")  # a class on both sides
    assert kernel.value("isinstance(ddpnb.pull('base', ranks='0'), Base)") == "True"


def test_a_pushed_function_brings_its_helpers_and_replaces_no_state_of_the_ranks(kernel: Kernel):
    kernel.run("%%ddp\nmine = ['of the rank']\ndef helper(): return 'of the rank'")
    kernel.run(
        "mine, constant, state = ['of the notebook'], 1, [0]\ndef helper(): return 'old'\n"
        "large = 'old' * 10**5\n"
        "def f(): return helper(), mine, constant, state, large[:3]\n%ddp_push f"
    )
    kernel.run("%%ddp\nstate[0] = rank + 1")  # changed in place, like by a training
    kernel.run("def helper(): return 'new'\nconstant, large = 2, 'new' * 10**5\n%ddp_push f")
    assert kernel.run("%%ddp\nprint(f())").by_rank == {
        rank: [f"('new', ['of the rank'], 2, [{rank + 1}], 'new')"] for rank in (0, 1)
    }


def test_what_cannot_be_sent_is_named_and_nothing_is_sent(kernel: Kernel):
    kernel.run(
        """
import threading
fine, lock, lines = 1, threading.Lock(), (n for n in range(3))
file = open(threading.__file__)
state = {"deep": [lock]}
class Holder: pass
holder = Holder()
holder.lock = lock
def uses(): return lock
%ddp_push fine
fine = 2
"""
    )
    for name, part in {
        "lines": "generator",
        "file": "an open file",
        "state": "lock",
        "holder": "lock",
        "uses": "lock",
    }.items():
        cell = kernel.run(f"%ddp_push fine {name}")
        assert cell.error == "UserError", name
        assert f"{name} cannot be sent" in cell.error_text
        assert part in cell.error_text
    assert kernel.run("%ddp_pull fine").text == "{0: 1, 1: 1}"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("zigzag", "cannot pickle '_thread"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_a_rank_cannot_give_is_named(kernel: Kernel, expression: str, expected: str):
    # An unusual name, because the ranks still have the variables of other test files.
    kernel.run("%%ddp\nimport threading\nzigzag = {'lock': threading.Lock()}")
    cell = kernel.run(f"%ddp_pull {expression}", timeout=20)
    assert cell.error == "UserError"
    assert expected in cell.error_text
    assert kernel.run("%ddp_pull rank", timeout=20).text == "{0: 0, 1: 1}"


def test_what_the_other_side_cannot_read_is_a_sentence_and_changes_nothing(
    kernel: Kernel, project: Path
):
    (project / "only_here.py").write_text("def f(): pass")
    kernel.run("import only_here, os\nos.remove('only_here.py')\nnew, f = 1, only_here.f")
    cell = kernel.run("%ddp_push new f", timeout=20)
    assert "Rank 0 cannot read new, f: ModuleNotFoundError: No module" in cell.error_text
    assert kernel.run("%%ddp\nprint('new' in globals())").by_rank == both("False")


def test_large_arrays_are_each_ranks_own_and_no_file_stays(kernel: Kernel):
    kernel.run(
        "import ddpnb, numpy as np\nbig = np.arange(3_000_000.)\n"
        "both = {'all': big, 'half': big[::2]}\n%ddp_push both"
    )
    cell = kernel.run(
        "%%ddp\nboth['all'][0] = rank + 1\nprint(both['half'][0], both['half'].sum())"
    )
    half = sum(range(0, 3_000_000, 2))
    assert cell.by_rank == both(f"0.0 {float(half)}")
    kernel.run("got = ddpnb.pull('both[\"all\"]')\ngot[0][1] = -1")
    found = kernel.run("print([[*map(float, got[rank][:2])] for rank in (0, 1)])").stdout
    assert json.loads(found) == [[1.0, -1.0], [2.0, 1.0]]
    assert kernel.run("%ddp_pull both['all'][:2].tolist()").text == "{0: [1.0, 1.0], 1: [2.0, 1.0]}"
    assert kernel.run("print(float(both['all'][0]), len(got[1]))").stdout == "0.0 3000000\n"
    assert files_left(kernel) == []


def test_tensors_arrive_as_they_are(kernel: Kernel):
    kernel.run(
        """%%ddp
import torch
whole = torch.arange(6_000_000.).reshape(2000, 3000)
tensors = {
    "transposed": whole.t(), "part": whole[:, ::3], "bfloat16": whole.bfloat16(),
    "wide": torch.ones(1).expand(5_000_000), "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3), "complex": torch.ones(3, dtype=torch.complex64).conj(),
    "grad": whole.clone().requires_grad_(), "computed": torch.ones(3, requires_grad=True) * 2,
    "parameter": torch.nn.Parameter(torch.ones(2)), "sparse": torch.eye(3).to_sparse(),
}
def facts(tensors):
    return [
        (type(x).__name__, str(x.dtype), [*x.shape], x.requires_grad,
         float(x.detach().to_dense().double().sum() if not x.is_complex() else x.sum().real))
        for x in tensors.values()
    ]
"""
    )
    kernel.run("import ddpnb\ntensors, facts = ddpnb.pull('(tensors, facts)', ranks='0')")
    same = kernel.run("print(facts(tensors), ddpnb.pull('facts(tensors)', ranks='0'), sep='\\n')")
    assert same.lines[0] == same.lines[1]
    kernel.run("sent = tensors\n%ddp_push sent")
    cell = kernel.run(
        "%%ddp\nprint(facts(sent) == facts(tensors), all(x.is_leaf for x in sent.values()))"
    )
    assert cell.by_rank == both("True True")


def test_an_interrupted_pull_leaves_no_file_and_frees_the_ranks(kernel: Kernel, tmp_path: Path):
    kernel.run(
        "%%ddp\nimport pathlib, time\ndef slow():\n"
        f"    pathlib.Path({str(tmp_path)!r}, str(rank)).touch()\n    time.sleep(60)"
    )
    cell = kernel.begin("%ddp_pull slow()")
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks have begun")
    kernel.interrupt()
    assert kernel.wait(cell).error == "KeyboardInterrupt"
    assert "variables are kept" in cell.error_text
    assert kernel.run("%ddp_pull rank", timeout=20).text == "{0: 0, 1: 1}"
    assert files_left(kernel) == []


def test_a_pull_that_waits_without_end_is_a_hang_and_costs_no_variable(kernel: Kernel):
    kernel.run("%%ddp\nimport torch, torch.distributed as dist\nx = torch.ones(1)")
    cell = kernel.run("%ddp_pull dist.all_reduce(x) if rank else rank")
    assert cell.error == "HangError"
    assert "rank 1 waits in all_reduce" in cell.error_text
    assert kernel.run("%ddp_pull x.item()", timeout=20).text == "{0: 1.0, 1: 1.0}"


def test_a_rank_that_dies_during_a_pull_is_named_and_no_file_stays(kernel: Kernel):
    cell = kernel.run("%ddp_pull __import__('os')._exit(3) if rank else bytes(10**6)", timeout=20)
    assert cell.error == "RankError"
    assert "rank 1 " in cell.error_text
    assert "%ddp_restart --ranks 1" in cell.error_text
    assert files_left(kernel) == []
    assert kernel.run("%ddp_pull rank --ranks 0", timeout=20).text == "0"


def test_a_pull_that_loses_the_run_folder_says_how_to_go_on(kernel: Kernel):
    remove = f"__import__('shutil').rmtree({str(kernel.run_folder)!r}, True)"
    cell = kernel.run(f"%ddp_pull [{remove}, torch.ones(10**6)]")
    assert re.search(
        r"The cluster has ended: .* was removed or emptied\. Run %ddp_restart", cell.refusal
    )
    assert kernel.run("%ddp_restart\n%ddp_pull rank").passed
