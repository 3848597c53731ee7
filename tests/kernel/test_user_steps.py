"""A user's first hour on one kernel, in about 70 steps that build on each other.

The steps need no package that Colab lacks, so they also run with the versions of other platforms.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.kernel.client import Kernel, kernel_in

CELL = """
import torch
from torch import nn
def model(): return nn.Linear(4, 3)
def data(split): return torch.randn(200, 4), torch.randint(3, (200,))
"""
DRAWING = "from IPython.display import HTML, display\ndisplay(HTML('<b>all</b>'))"
BROKEN = "x = 1\n\ndef broken():\n    return 1 / 0\n\nbroken()"


@dataclass(frozen=True)
class Step:
    """A cell, and the text that its outputs must contain."""

    source: str
    shows: str = ""
    """A regular expression. It also matches the text of an error, which begins with its class."""
    kind: str = ""
    """The MIME type of an output that must be there."""
    warns: str = ""
    """A regular expression for stderr, which must be empty by default."""


STEPS = {
    "a cell without ranks": Step("%%ddp\n1", "UserError: No cluster is running. Start a cluster"),
    "start": Step("%ddp_start -n 2 --device cpu", "2 ranks ready", "text/html"),
    "status": Step("%ddp_status", "2 ranks of 2 alive"),
    "environment": Step("import ddpnb\nprint(ddpnb.debug_info())", "ipykernel"),
    "print": Step("%%ddp\nprint('rank', rank)\nprint('ready')", r"\[1\] rank 1\n\[0-1\] ready"),
    "last value": Step("%%ddp\nrank * 10", r"\[1\] 10"),
    "one rank": Step("%%rank 1\nprint(rank)", r"^\[1\] 1$"),
    "all-reduce": Step(
        "%%ddp\nimport time, torch, torch.distributed as dist\nt = torch.ones(2) * (rank + 1)\n"
        "dist.all_reduce(t)\nt.tolist()",
        r"\[0-1\] \[3.0, 3.0\]",
    ),
    "shell command": Step("%%ddp\n!echo rank $RANK", r"\[0\] rank 0\n\[1\] rank 1"),
    "child process": Step("%%ddp\n%%bash\necho here", r"\[0-1\] here"),
    "progress bar": Step("%%ddp\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(5)): 0", "5/5"),
    "display": Step(f"%%ddp\n{DRAWING}", r"\[0-1\]", "text/html"),
    "plot": Step("%%rank 0\nimport matplotlib.pyplot as p\np.plot([1, 3]);", "", "image/png"),
    "data frame": Step("%%rank 0\nimport pandas as p\np.DataFrame({'a': [1]})", "", "text/html"),
    "widget": Step("%%rank 0\nimport ipywidgets\nipywidgets.IntSlider(value=3)", "IntSlider"),
    "warning": Step("%%ddp\nimport warnings\nwarnings.warn('careful')", warns=r"\[0-1\].*careful"),
    "help of an object": Step("%%rank 0\nlen?", "Return the number of items"),
    "syntax error": Step("%%ddp\nx = = 1", r"RankError: ranks 0-1 failed: SyntaxError"),
    "error": Step(f"%%ddp\n{BROKEN}", r"RankError: .*ZeroDivisionError[^$]*Cell In\[\d+\], line 7"),
    "one rank fails": Step(
        "%%ddp\nif rank == 1:\n    raise ValueError('bad')\ndist.barrier()",
        r"RankError: rank 1 failed: ValueError: bad[^$]*line 3[^$]*rank 0 was released",
    ),
    "calls that differ": Step(
        "%%ddp\n(dist.all_reduce(t) if rank else dist.broadcast(t, 0))",
        "RankError: .*CollectiveMismatchError: the calls of the ranks do not match",
    ),
    "hang": Step(
        "%%ddp\nif rank == 0:\n    dist.barrier()",
        r"HangError: rank 0 waits in barrier \(line 3\); rank 1 finished the cell",
    ),
    "work after a hang": Step("%%ddp\ndist.all_reduce(t)\nprint('works')", r"\[0-1\] works"),
    "timeout": Step("%%ddp --timeout 1\ntime.sleep(30)", "CellTimeoutError: .* longer than 1 s"),
    "check of shapes": Step("%%ddp --check\ndist.all_reduce(t)"),
    "trace": Step("%%ddp --trace\ndist.all_reduce(t)", "rank 1 all_reduce.*line 2", "image/png"),
    "saved trace": Step("%ddp_show trace --save trace.json", "perfetto"),
    "exit": Step("%%ddp\nimport sys\nsys.exit(0)"),
    "killed rank": Step(
        "%%ddp\nimport os, signal\nif rank: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()",
        "RankError: rank 1 was killed by SIGKILL",
    ),
    "why": Step("%ddp_why", "rank 0 is idle\nrank 1 is dead"),
    "restart of one rank": Step("%ddp_restart --ranks 1", "2 ranks ready"),
    "work after a restart": Step(
        f"%%ddp\nimport time, torch.distributed as dist\n{CELL}t = torch.ones(2)\n"
        "dist.all_reduce(t)\nt.tolist()",
        r"\[0-1\] \[2.0, 2.0\]",
    ),
    "push": Step("a, b = 3, list(range(10))\n%ddp_push a b"),
    "pushed": Step("%%ddp\nprint(a, b[-1])", r"\[0-1\] 3 9"),
    "pull": Step("%ddp_pull a+rank --as xs\nprint(xs)", "{0: 3, 1: 4}"),
    "push of 24 MB": Step("import numpy as np\nbig = np.ones(3_000_000)\n%ddp_push big"),
    "pull of 24 MB": Step("%ddp_pull big --ranks 1 --as back\nprint(len(back))", "3000000"),
    "script": Step(
        "%%writefile train.py\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nprint('script', dist.get_rank())",
        "Writing train.py",
    ),
    "run of a script": Step("%ddp_run train.py", r"\[0\] script 0\n\[1\] script 1"),
    "log": Step(
        "%%ddp --name mine\nimport ddpnb\nfor i in range(20):\n    dist.all_reduce(t)\n"
        "    ddpnb.log(loss=1 / (i + 1), samples=8)",
        "mine ran at .* samples/s",
        "image/png",
    ),
    "samples": Step("%ddp_samples -n 10", "rank 1   1 3 5 7 9", "image/png"),
    "collective": Step("%ddp_show all_reduce --size 1MB", "sends 1.0 MB", "image/png"),
    "replicas": Step("%%ddp\ntorch.manual_seed(0)\nnet, x = model(), torch.randn(8, 4)"),
    "check of replicas": Step("%ddp_check net", "replicas are the same on ranks 0-1"),
    "step from inside": Step(
        "%ddp_inspect net --batch x --loss output.sum()", "time when full", "image/png"
    ),
    "interrupt": Step("%ddp_interrupt", "Nothing runs in the background"),
    "comparison": Step(
        "result = %ddp_compare dp ddp async --task digits --epochs 1 --name real\nresult",
        r"reaches .*\n[^$]*real: digits, global batch 256, 2 workers on cpu",
        "image/png",
    ),
    "result as a frame": Step("result.runs()", "strategy", "text/html"),
    "own model": Step(
        f"%%ddp_compare ddp local-sgd --epochs 2 --batch-size 64 --name own\n{CELL}",
        "own: own cell, global batch 64",
        "image/png",
    ),
    "mistake in a cell": Step(
        "%%ddp_compare ddp\ndef model(): 3\ndef data(split): 0",
        r"UserError: (model|data)\(.*\) returned None\.",
    ),
    "straggler": Step(
        "%ddp_compare ddp async --task digits --epochs 1 --slow 1:3x", "reaches", "image/png"
    ),
    "runs": Step("%ddp_runs", r"stored runs, newest first[^$]*real/async"),
    "stored runs": Step("%ddp_plot real/ddp real/async", "samples/s of ddp", "image/png"),
    "rows": Step("%ddp_export real real.csv", "one row per step"),
    "report": Step("%ddp_export real real.html", "the report in a single file"),
    "exported script": Step("%ddp_export real ddp.py", "torchrun that trains"),
    "prediction": Step("%ddp_predict --ranks 1,8 --link 100GbE", "Predicted, not", "image/png"),
    "advice": Step("%ddp_advise", "Use ddp"),
    "source": Step("%ddp_source ddp-by-hand", "Synchronous data parallelism"),
    "versions": Step("%ddp_inspect --run real/async", "staleness", "image/png"),
    "panel": Step("%ddp_panel", "", "application/vnd.jupyter.widget-view+json"),
    "exercise": Step("%ddp_exercise 3.1", "UserError: Exercise 3.1 is not solved yet.*Hint: "),
    "in Python": Step("import ddpnb\nddpnb.run_cell('print(rank)')", r"\[0\] 0\n\[1\] 1"),
    "wrong option": Step("%ddp_start --nn 3", "UserError: ddp_start has no option --nn"),
    "wrong strategy": Step(
        "%ddp_compare dpp --task text", "UserError: .*'dpp'; did you mean dp or ddp"
    ),
    "stop": Step("%ddp_stop", "The cluster has stopped"),
    "emulated devices": Step("%ddp_start --devices 4xV100 --as resnet50", "4 ranks ready"),
    "emulated comparison": Step(
        "%ddp_compare dp ddp async --task digits --epochs 1 --batch-size 256 --name emulated",
        r"async reaches 3\.[78]\d×, ddp reaches 3\.7\d× and dp reaches 3\.4\d×.*"
        "times are computed for 4 emulated V100 running resnet50",
        "image/png",
    ),
    "second stop": Step("%ddp_stop\n%ddp_stop", "No cluster was running"),
    "reload": Step("%reload_ext ddpnb\n%ddp_plot real/ddp", "Held-out accuracy", "image/png"),
}


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel_in(tmp_path_factory.mktemp("user")) as kernel:
        yield kernel


@pytest.mark.parametrize("name", STEPS)
def test_step(user: Kernel, name: str):
    step = STEPS[name]
    cell = user.run(step.source, timeout=120)
    text = cell.text
    assert re.search(step.shows, text, re.MULTILINE), text
    expected = re.match(r"\w+Error(?=:)|", step.shows)
    assert cell.error == (expected and expected.group()), text
    found = cell.pictures if step.kind == "image/png" else cell.bundles(step.kind)
    assert not step.kind or found, cell.outputs
    assert re.search(step.warns or r"\A\Z", cell.stderr), cell.stderr


def test_tab_and_shift_tab_know_magics_and_the_ranks_variables(user: Kernel):
    assert user.run("%ddp_start -n 2 --device cpu").passed
    assert user.run("%%ddp\nimport time\nlearning_rate = 0.25").passed
    assert user.kinds("%%ddp --tr") == {"--trace": "option"}
    assert user.kinds("%ddp_compare loc") == {"local-sgd": "strategy"}
    assert user.complete("%%ddp\nlearn") == ["learning_rate"]
    assert "0.25" in user.inspect("%%ddp\nlearning_rate")
    assert "--batch-size N" in user.inspect("%ddp_compare")


def test_output_of_a_background_cell_appears_under_its_own_cell(user: Kernel):
    cell = user.run("%%ddp --no-wait\ntime.sleep(1)\nprint('late')").passed
    later = user.run("print('later')")
    user.wait_for_text(cell, "late")
    assert later.text == "later\n"


def test_an_interrupt_keeps_the_variables(user: Kernel):
    cell = user.interrupted("%%ddp\nprint('sleeps')\ntime.sleep(60)", "sleeps")
    assert cell.error == "KeyboardInterrupt"
    assert user.run("%%ddp\nprint(learning_rate)").text == "[0-1] 0.25\n"


def test_a_debugger_opens_in_the_notebook(user: Kernel):
    user.run("%%ddp\ndef half(x):\n    return x / 0\n\nhalf(8)")
    cell, prompts = user.answer("%ddp_debug 1", "p x * 100", "q")
    assert "800" in cell.passed.by_rank[1]
    assert prompts == ["[1] ipdb> "] * 2
