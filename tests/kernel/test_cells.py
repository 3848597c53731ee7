import random
import re
from pathlib import Path

import pytest

from tests.cluster.rig import waits_for
from tests.kernel.client import Kernel, both


@pytest.mark.parametrize(
    "source",
    [
        "import os; _ = os.write(1, b'here\\n')",
        "import ctypes; c = ctypes.CDLL(None); _ = c.puts(b'here'), c.fflush(None)",
        "import subprocess; _ = subprocess.run(['echo', 'here'])",
    ],
)
def test_what_is_printed_past_python_at_a_cells_end_is_not_lost(kernel: Kernel, source: str):
    found = [kernel.run(f"%%ddp\n{source}").by_rank for _ in range(20)]
    assert found == [both("here")] * 20


def test_bars_redraw_in_one_place_and_their_last_state_stays(kernel: Kernel):
    cell = kernel.run(
        "%%ddp\nimport time\nfrom tqdm import tqdm\n"
        "for _ in tqdm(range(12), desc=f'rank {rank}'):\n    time.sleep(0.05)\nprint('done')"
    )
    (bars,) = cell.bundles("text/plain")
    assert "[0] rank 0: 100%" in bars
    assert "[1] rank 1: 100%" in bars
    assert bars.count("12/12") == 2
    assert cell.num_updates >= 1
    assert cell.by_rank == both("done")
    assert cell.stderr == ""


def test_displays_and_figures_appear_under_a_label(kernel: Kernel):
    cell = kernel.run(
        "%%ddp\nfrom IPython.display import HTML, display\n"
        "display(HTML('<b>all</b>'))\ndisplay(HTML(f'<i>{rank}</i>'))"
    )
    assert set(cell.bundles("text/html")) == {"<b>all</b>", "<i>0</i>", "<i>1</i>"}
    assert cell.by_rank == both("", "")  # a label above each display
    cell = kernel.run("%%rank 1\nimport matplotlib.pyplot as plt\nplt.plot([1, 3, 2]);")
    assert len(cell.pictures) == 1
    assert cell.lines == ["[1]"]


def test_a_display_can_be_replaced_by_its_rank(kernel: Kernel):
    cell = kernel.run(
        "%%rank 0\nfrom IPython.display import display\n"
        "shown = display('old', display_id=True)\nshown.update('new')"
    )
    assert cell.bundles("text/plain") == ["[0]", "'new'"]


def test_the_last_value_is_shown(kernel: Kernel):
    assert kernel.run("%%ddp\n1 + 1").by_rank == both("2")
    assert kernel.run("%%ddp\nrank * 10").by_rank == {0: ["0"], 1: ["10"]}
    assert kernel.run("%%ddp\n1 + 1;").outputs == []
    assert kernel.run("%%ddp\nx = 3").outputs == []
    table = kernel.run("%%rank 0\nimport pandas as pd\npd.DataFrame({'a': [1]})")
    assert "<table" in table.bundles("text/html")[0]


def test_commands_and_magics_work_on_the_ranks(kernel: Kernel):
    echoed = kernel.run("%%ddp\n!echo rank $RANK of $WORLD_SIZE")
    assert echoed.by_rank == {0: ["rank 0 of 2"], 1: ["rank 1 of 2"]}
    assert "Wall time" in kernel.run("%%ddp\n%time sum(range(10))").stdout
    assert kernel.run("%%ddp\n%pwd").by_rank == both(repr(str(kernel.folder)))
    assert kernel.run("%%ddp\n%%bash\necho $RANK").by_rank == {0: ["0"], 1: ["1"]}


def test_an_error_makes_the_cell_fail_and_names_cell_and_line(kernel: Kernel):
    cell = kernel.run("%%ddp\nx = 1\n\ndef broken():\n    return 1 / 0\n\nbroken()")
    assert cell.status == "error"
    assert cell.error == "RankError"
    assert cell.error_text.startswith(
        "RankError: ranks 0-1 failed: ZeroDivisionError: division by zero"
    )
    assert f"Cell In[{cell.number}], line 7\n" in cell.error_text
    assert f"Cell In[{cell.number}], line 5, in broken()" in cell.error_text
    assert "ddpnb/" not in cell.error_text
    assert cell.error_text.count("Traceback") == 1


UNUSED = """%%ddp
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(3, 3), nn.Linear(3, 3)
    def forward(self, x):
        return self.used(x)
net = nn.parallel.DistributedDataParallel(Net())
for step in range(2):
    net(torch.ones(2, 3)).sum().backward()
"""


def test_a_parameter_that_no_loss_uses_is_named_in_a_few_lines(kernel: Kernel):
    cell = kernel.run(UNUSED)
    assert "UserError: spare.weight, spare.bias did not contribute" in cell.error_text
    assert "find_unused_parameters=True" in cell.error_text
    assert cell.error_text.count("\n") < 25


def test_an_exception_that_cannot_be_printed_is_named(kernel: Kernel):
    source = "class Odd(Exception):\n    def __str__(self):\n        return 1 / 0\nraise Odd"
    text = kernel.run(f"%%rank 0\n{source}").error_text
    assert "Odd: (its text could not be made: ZeroDivisionError)" in text


def test_a_rank_keeps_no_traceback(kernel: Kernel):
    kernel.run("%%rank 0\n1 / 0")
    # IPython stores exceptions since version 9.
    kept = "'traceback' in str(getattr(get_ipython().history_manager, 'exceptions', ''))"
    assert kernel.run(f"%%rank 0\nprint({kept})").by_rank == {0: ["False"]}


def test_a_syntax_error_shows_the_line(kernel: Kernel):
    cell = kernel.run("%%ddp\nx = 1\nfor i in range(3: pass")
    assert cell.error == "RankError"
    assert "SyntaxError" in cell.error_text
    assert f"Cell In[{cell.number}], line 3" in cell.error_text
    assert "for i in range(3: pass" in cell.error_text


@pytest.mark.parametrize(
    ("leave", "status"),
    [("sys.exit()", "ok"), ("sys.exit(0)", "ok"), ("quit()", "ok"), ("quit(3)", "error")],
)
def test_a_cell_may_end_early_and_no_rank_ends(kernel: Kernel, leave: str, status: str):
    cell = kernel.run(f"%%ddp\nimport sys\nkept = rank\nprint('before')\n{leave}\nprint('after')")
    assert cell.status == status
    assert cell.by_rank == both("before")
    assert cell.stderr == ""
    assert ("SystemExit: 3" in cell.error_text) == (status == "error")
    assert kernel.run("%%ddp\nimport time; time.sleep(0.3); kept").by_rank == {0: ["0"], 1: ["1"]}


ASYNC = """import asyncio, contextlib, torch, torch.distributed as dist
async def summed(x):
    await asyncio.sleep(0.01)
    dist.all_reduce(total := torch.ones(1) * x)
    return total.item()
async def nested(x): return asyncio.run(summed(x))
async def count():
    for each in range(2): yield each
@contextlib.asynccontextmanager
async def opened(): yield 1
"""


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("asyncio.run(summed(1))", "2.0"),
        ("await summed(1)", "2.0"),
        ("await summed(1), asyncio.run(summed(2)), await nested(3)", "(2.0, 4.0, 6.0)"),
        ("await asyncio.gather(asyncio.to_thread(int), nested(1))", "[0, 2.0]"),
        ("async with opened() as one: _ = one\n[each + one async for each in count()]", "[1, 2]"),
        ("asyncio.get_event_loop().run_until_complete(summed(1))", "2.0"),
        ("asyncio.new_event_loop().run_until_complete(summed(1))", "2.0"),
        ("with asyncio.Runner() as runner: made = runner.run(summed(1))\nmade", "2.0"),
        ("task, lock = asyncio.create_task(summed(1)), asyncio.Lock()\ntask.done()", "False"),
        ("async with lock: print(await task)", "2.0"),  # of the cell before
    ],
)
def test_coroutines_run_as_in_a_notebook(kernel: Kernel, source: str, shown: str):
    assert kernel.run(f"%%ddp\n{ASYNC}{source}").passed.by_rank == both(shown)


WAITS = """%%ddp --timeout {}
import asyncio
async def wait(seconds):
    try:
        print("begun", flush=True)
        while True: await asyncio.sleep(seconds)
    finally: print("cleaned up", flush=True)
"""


@pytest.mark.parametrize("source", ["await wait(100)", "asyncio.run(wait(100))", "await wait(0)"])
def test_coroutines_can_be_stopped(unharmed: Kernel, source: str):
    cell = unharmed.interrupted(WAITS.format(60) + source, "begun")
    assert (cell.error, cell.by_rank) == ("KeyboardInterrupt", both("begun", "cleaned up"))
    cell = unharmed.run(WAITS.format(0.5) + source)
    assert (cell.error, cell.by_rank) == ("CellTimeoutError", both("begun", "cleaned up"))


def test_a_coroutine_that_waits_has_a_place(unharmed: Kernel):
    cell = unharmed.run(f"%%ddp --no-wait\n{WAITS.partition(chr(10))[2]}await wait(100)")
    unharmed.run("handle = _")
    unharmed.wait_for_text(cell, "begun")
    place = f"at line 6 of In [{cell.number}], not in a collective"
    assert unharmed.run("%ddp_why").text.count(place) == 2
    unharmed.run("%ddp_interrupt")
    assert unharmed.run("handle.wait(20)").error == "KeyboardInterrupt"


@pytest.mark.parametrize("call", ["await meet()", "asyncio.run(meet())"])
def test_a_hang_in_a_coroutine_is_released(unharmed: Kernel, call: str):
    meet = "async def meet():\n    if rank: dist.all_reduce(torch.ones(1))"
    cell = unharmed.run(f"%%ddp\nimport asyncio\n{meet}\n{call}")
    assert "HangError: rank 1 waits in all_reduce (line 4, Float [1]); rank 0" in cell.error_text


FAILING = (
    "import os, torch, torch.distributed as dist\ndef broken():\n    1 / 0\n"
    "if os.environ['RANK'] == '1': broken()\ndist.all_reduce(torch.ones(1))\n"
)
IN_A_SCRIPT = "import sys; sys.path.insert(0, '')\n%run -m failing"


@pytest.mark.parametrize("source", [FAILING, IN_A_SCRIPT], ids=["cell", "script"])
def test_the_root_cause_comes_first_and_the_others_are_folded(unharmed: Kernel, source: str):
    (unharmed.folder / "failing.py").write_text(FAILING)
    cell = unharmed.run(f"%%ddp\n{source}")
    assert cell.error == "RankError"
    assert cell.error_text.startswith(
        "RankError: rank 1 failed: ZeroDivisionError: division by zero"
    )
    assert "in broken()" in cell.error_text
    assert "rank 0 was released from a collective" in cell.error_text.splitlines()[-1]
    assert not any(word in cell.error_text for word in ("gloo", "safe_execfile"))
    assert cell.seconds < 15


def test_what_cannot_be_shown_fails_the_cell(kernel: Kernel):
    source = "class Odd:\n    def _repr_html_(self): return 1 / 0\nOdd();\n"
    assert kernel.run(f"%%ddp\n{source}").status == "ok"
    cell = kernel.run(f"%%ddp\n{source}Odd()")
    assert cell.error_text.startswith("RankError: ranks 0-1 failed: ZeroDivisionError")
    assert kernel.run("%%ddp\n%tb").status == "ok"  # showing the error again is not a failure


def test_some_ranks_only(kernel: Kernel):
    assert kernel.run("%%ddp --ranks 1\nrank").stdout == "[1] 1\n"
    assert kernel.run("%%rank 0\nrank").stdout == "[0] 0\n"
    assert kernel.run("%%rank 0,1\nrank").by_rank == {0: ["0"], 1: ["1"]}
    failed = kernel.run("%%rank 0\n1/0")
    assert f"Cell In[{failed.number}], line 2" in failed.error_text


def test_bad_input_is_one_sentence_and_loses_nothing(unharmed: Kernel):
    for source, named in {
        "%%ddp --ranks 0-5\n1": "2-5",
        "%%rank\n1": "%%rank 0",
        "%%ddp --timeout 0\n1": "--timeout",
        "%%ddp --speed 9\n1": "--speed",
        "%%ddp --name ddp\n1": "'ddp' is a strategy",
        "%ddp_push nothing": "variable nothing",
        "%ddp_pull 1 +": "SyntaxError",
        "%ddp_export out": "%ddp_export race race.csv. Type %ddp_export? for help.",
        "%ddp_run": "Write for example %ddp_run train.py --epochs 3.",
        "%ddp_push": "%ddp_push needs the names of variables",
        "%ddp_status all": "%ddp_status takes no arguments. Remove 'all'.",
        "%ddp_export nobody x.csv": "There is no run 'nobody'",
        "%ddp_show all_reduce --save x.json": "--save works only with a trace",
        "import ddpnb\nddpnb.log(loss=1)": "ddpnb.log works only on the ranks",
    }.items():
        assert named in unharmed.run(source).refusal


def test_a_cell_can_go_on_in_the_background(kernel: Kernel, tmp_path: Path):
    sign = tmp_path / "sign"
    cell = kernel.run(
        f"%%ddp --no-wait --trace\n{waits_for(sign)}for i in range(4):\n    print('tick', i)\n"
        "import sys\nfrom IPython.display import HTML, display\n"
        "print('aside', file=sys.stderr)\ndisplay(HTML('<b>all</b>'))"
    )
    shown = r"<cell on ranks 0-1, started \d\d:\d\d:\d\d; %ddp_status shows its state>"
    assert re.search(shown, cell.text)
    kernel.run("handle = _")
    assert kernel.run("%ddp_status").text.count("busy") == 2
    assert kernel.run("1 + 1").text == "2"  # the notebook runs other cells
    assert "tick" not in cell.text
    sign.touch()
    assert kernel.run("handle.wait(30)").outputs == []
    kernel.wait_for_text(cell, "No rank used a collective")  # the trace, under its own cell
    assert "aside" in cell.stderr
    assert "<b>all</b>" in cell.bundles("text/html")
    kernel.run("handle")
    assert cell.by_rank == both(*(f"tick {i}" for i in range(4)), "")
    assert kernel.run("handle").text == "<cell on ranks 0-1: finished>"


def test_a_background_cell_that_fails_says_so_and_wait_raises(kernel: Kernel):
    cell = kernel.run("%%ddp --no-wait\n1/0")
    kernel.wait_for_text(cell, "RankError")
    assert kernel.run("Out[max(Out)].wait(30)").error == "RankError"


def test_a_background_cell_can_be_interrupted(unharmed: Kernel):
    cell = unharmed.run("%%ddp --no-wait\nwhile True: time.sleep(.01)")
    unharmed.run("handle = _")
    assert unharmed.run("%ddp_interrupt").text == "Interrupted the cell on ranks 0-1.\n"
    assert unharmed.run("handle.wait(20)").error == "KeyboardInterrupt"
    assert unharmed.run("handle").text == "<cell on ranks 0-1: stopped>"
    assert unharmed.run("%ddp_interrupt").text == "Nothing runs in the background.\n"
    assert "Traceback" not in cell.text


def test_waiting_may_have_a_timeout_and_the_cell_goes_on(kernel: Kernel, tmp_path: Path):
    sign = tmp_path / "sign"
    kernel.run(f"%%ddp --no-wait\n{waits_for(sign)}late = 1")
    kernel.run("handle = _")
    assert kernel.run("handle.wait(0.1)").error == "TimeoutError"
    sign.touch()
    assert kernel.run("handle.wait(20)").passed
    assert kernel.run("%%ddp\nlate").by_rank == both("1")


def test_what_needs_a_rank_that_runs_a_cell_is_refused_at_once(kernel: Kernel, tmp_path: Path):
    sign = tmp_path / "sign"
    kernel.run(f"import ddpnb\nhandle = ddpnb.run_cell({waits_for(sign)!r}, ranks='0', wait=False)")
    for source in (
        "%ddp_restart --ranks 1",
        "%%ddp --check --ranks 1\n1",
        "%ddp_pull rank",
        "ddpnb.push(x=1)",
        "%ddp_compare ddp --task digits",
        "%ddp_show all_reduce",
    ):
        cell = kernel.run(source)
        assert "on rank 0. Wait until it ends" in cell.refusal
        assert cell.seconds < 5
    sign.touch()
    assert kernel.run("handle.wait(20)").passed
    assert kernel.run("%ddp_pull rank").text == "{0: 0, 1: 1}"


def test_a_dead_rank_is_named_and_the_others_keep_their_variables(kernel: Kernel):
    kernel.run("%%ddp\nimport os, signal\nkept = rank + 10")
    cell = kernel.run("%%ddp\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert cell.error == "RankError"
    assert "rank 1" in cell.error_text.splitlines()[0]
    assert "SIGKILL" in cell.error_text.splitlines()[0]
    assert "SIGKILL" in kernel.run("%ddp_status").text
    assert "rank 1" in kernel.run("%ddp_start").stdout
    message = kernel.run("%%ddp\n1").error_text
    assert "Rank 1 was killed by SIGKILL" in message
    assert "%ddp_restart" in message
    assert kernel.run("%%rank 0\nkept").stdout == "[0] 10\n"
    assert kernel.run("%ddp_pull kept --ranks 0").text == "10"


def test_a_collective_among_the_survivors_of_a_dead_rank_says_whom_it_lacks(kernel: Kernel):
    kernel.run("%%ddp\nimport os, torch, torch.distributed as dist\nkept = rank + 10")
    kernel.run("%%rank 1\nos._exit(3)")
    cell = kernel.run("%%rank 0\n\ndist.all_reduce(torch.ones(1))")
    assert cell.error == "UserError"
    assert "rank 1 has ended (rank 0 in line 3). Run %ddp_restart --ranks 1" in cell.error_text
    assert kernel.run("%%rank 0\nkept").stdout == "[0] 10\n"


def test_a_rank_that_a_stop_has_cost_is_named_with_what_brings_it_back(kernel: Kernel):
    kernel.run("%%ddp\nimport os, time\nkept = rank + 10")
    cell = kernel.run(
        "%%ddp --timeout 1\ntry:\n    time.sleep(1000)\nexcept KeyboardInterrupt:\n"
        "    if rank == 1: os._exit(2)"
    )
    assert cell.error == "CellTimeoutError"
    assert "rank 1 has ended. Run %ddp_restart --ranks 1" in cell.error_text
    kernel.run("%ddp_restart --ranks 1")
    assert kernel.run("%ddp_pull kept --ranks 0").text == "10"


STALE = """%%ddp
import torch, torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer as Zero
from torch.nn.parallel import DistributedDataParallel as DDP
class Trainer:
    def __init__(self): self.model = DDP(torch.nn.Linear(2, 1))
    def fit(self): step(self.model)
def step(model): model(torch.ones(1, 2)).sum().backward()
trainer, held, net = Trainer(), [DDP(torch.nn.Linear(2, 1))], DDP(torch.nn.Linear(2, 1))
pair, optimizer = dist.new_group([0, 1]), Zero(net.parameters(), torch.optim.SGD, lr=0.1)
if rank == 0: dist.all_reduce(torch.ones(1))
"""


def test_an_error_about_an_aborted_group_says_how_to_fix_it(unharmed: Kernel):
    assert "HangError" in unharmed.run(STALE).error_text
    for line, remedy in {
        "step(net)": "wrap the model again: DistributedDataParallel(net.module).",
        "step(held[0])": "wrap the model again: DistributedDataParallel(held[0].module).",
        "trainer.fit()": "wrap the model again: DistributedDataParallel(trainer.model.module).",
        "dist.all_reduce(torch.ones(1), group=pair)": "create the group again with dist.new_group.",
        "optimizer.step()": "create the optimizer again.",
    }.items():
        cell = unharmed.run(f"%%ddp\n{line}")
        assert f"belongs to an aborted process group. To fix this, {remedy}\n" in cell.error_text
        assert "gloo" not in cell.error_text
    assert unharmed.run("%%ddp\nnet = DDP(net.module)\nstep(net)").status == "ok"


def test_a_stop_calls_the_functions_of_atexit(kernel: Kernel, tmp_path: Path):
    begins = f"import atexit, os, tempfile, threading\nos.chdir({str(tmp_path)!r})\n"
    (kernel.folder / "keeps.py").write_text(f"{begins}atexit.register(os.mkdir, str(os.getpid()))")
    kernel.run("%ddp_run -i keeps.py")
    kernel.run(
        f"%%ddp\n{begins}folder = tempfile.TemporaryDirectory()\n"
        "os.symlink(folder.name, f'to {rank}')\n"
        "threading.Timer(0.3, os.mkdir, [f'of thread {rank}']).start()\n"
        "atexit.register(os.mkdir, f'of cell {rank}'); atexit.register(max)"
    )
    assert kernel.run("%ddp_stop").seconds < 2
    assert len([*tmp_path.iterdir()]) == 8
    assert not any(path.exists() for path in tmp_path.glob("to *"))


HOSTILE = (
    "def __str__(self): raise ValueError('no str')",
    "def __str__(self): return 5",
    "def __str__(self): return str(self)",
    "def __str__(self): raise SystemExit(3)",
    "def __str__(self): return 'x' * 100_000_000",
    "def __str__(self): return '\\udc80' * 3",
    "def __repr__(self): raise ValueError('no repr')",
    "def __reduce_ex__(self, version): raise ValueError('no pickle')",
    "def __getattribute__(self, name): raise ValueError(name)",
    "def __bool__(self): raise ValueError('no bool')",
    "__class__ = property(lambda self: int)",
    "__class__ = property(lambda self: 1 / 0)",
    "__cause__ = __context__ = __suppress_context__ = __notes__ = property(lambda self: 1 / 0)",
    "__name__ = 'Lie'",
    "__hash__ = None",
)
RAISES = (
    "raise Own('why')",
    "try: raise Own('why')\nexcept BaseException: raise KeyError('later')",
    "raise ExceptionGroup('all', [ValueError('a'), ExceptionGroup('inner', [Own('why')])])",
)


@pytest.mark.parametrize("seed", range(15))
def test_whatever_an_exception_does_it_is_named_and_the_ranks_live(kernel: Kernel, seed: int):
    draw = random.Random(seed)
    pids = kernel.run("%%ddp\nimport os\nprint(os.getpid())").by_rank
    for _ in range(2):
        members = {HOSTILE[seed], draw.choice(HOSTILE)}
        base = draw.choice(["Exception", "SystemExit", "KeyboardInterrupt", "GeneratorExit"])
        kind, way = draw.choice(["Exception", base]), draw.choice(RAISES)
        kind = "Exception" if "Group" in way else kind
        body = "".join(f"    {member}\n" for member in sorted(members))
        cell = kernel.run(f"%%ddp\nclass Own({kind}):\n{body}{way}")
        name = next(each for each in ("KeyError", "ExceptionGroup", "Own") if each in way)
        assert f"RankError: ranks 0-1 failed: {name}: " in cell.error_text, cell.text
        assert len(cell.error_text) < 100_000
    assert kernel.run("%%ddp\nprint(os.getpid())").by_rank == pids


def test_a_mistake_of_ddpnb_in_a_cell_costs_no_rank(kernel: Kernel):
    swap = "run, cells.run_source = cells.run_source, None"
    kernel.run(f"%%ddp\nfrom ddpnb.rank import cells\n{swap}")
    cell = kernel.run("%%ddp\nprint('never')")
    assert "RankError: ranks 0-1 failed: TypeError: 'NoneType'" in cell.error_text
    assert "restart" not in cell.error_text
    assert kernel.run("%ddp_pull setattr(cells, 'run_source', run)").passed
    assert kernel.run("%%ddp\nprint(run is cells.run_source)").by_rank == both("True")
