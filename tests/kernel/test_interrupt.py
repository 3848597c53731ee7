import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.cluster.rig import ALL_REDUCE, FORKS, wait_until
from tests.kernel.client import Kernel, both

pytestmark = pytest.mark.usefixtures("unharmed")

LOOP = "while True: time.sleep(0.01)"
COLLECTIVE = "dist.all_reduce(torch.ones(1)) if rank == 0 else time.sleep(1000)"

LOADER = """
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 10_000
    def __getitem__(self, index): time.sleep(0.01); return torch.ones(1)
for batch in torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=2):
    dist.all_reduce(batch)
    print("begun", flush=True)
"""
BODIES = {
    "collective": (f"print('begun')\n{COLLECTIVE}", 0),
    "native code": ("print('begun')\nimport ctypes; ctypes.CDLL(None).pause()", 0),
    "child process": ("print('begun')\nimport subprocess; subprocess.run(['sleep', '1000'])", 2),
    "processes that load": pytest.param(LOADER, 4, marks=FORKS),
}
"""Cells, and the number of processes that each cell starts."""


@pytest.mark.parametrize(("body", "num_started"), BODIES.values(), ids=BODIES)
def test_an_interrupt_stops_every_rank_and_what_it_has_started_and_keeps_the_variables(
    kernel: Kernel, body: str, num_started: int
):
    before = kernel.processes

    def started() -> list[psutil.Process]:
        return [process for process in kernel.processes if process not in before]

    cell = kernel.begin(f"%%ddp\n{body}")
    kernel.wait_for_text(cell, "begun")
    wait_until(lambda: len(started()) == num_started, "the cell's processes")
    kernel.interrupt()
    kernel.wait(cell)
    assert cell.status == "error"
    assert cell.error == "KeyboardInterrupt"
    assert len(cell.error_text.splitlines()) == 1
    assert "variables are kept" in cell.error_text
    assert cell.seconds < 15
    wait_until(lambda: not started(), "the end of the cell's processes")


BUSY = """
import time
def reply(parent, metadata, content):
    time.sleep(2)
    return metadata
"""


@pytest.mark.parametrize("group", ["None", "sub"])
def test_a_call_that_one_rank_has_made_ahead_is_not_met_by_the_next_cell(
    kernel: Kernel, group: str
):
    kernel.run("%%ddp\nsub = dist.new_group([0, 1])")
    ahead = f"work = dist.all_reduce(torch.ones(4), group={group}, async_op=True)"
    source = f"%%ddp\nif rank == 0: {ahead}\nprint('begun')\n{LOOP}"
    assert kernel.interrupted(source, "begun").error == "KeyboardInterrupt"
    assert "sub" in kernel.run("%%ddp\n1").stderr


PRESSED = """%%ddp
import pressing, sys
pressing.where = "_issued"
sys.setprofile(pressing.press)
dist.all_reduce(torch.ones(4))
"""
PRESSING = """
import signal, sys
where = "run_code"  # a method of IPython that runs one statement
def press(frame, event, argument):
    if frame.f_code.co_name == where:
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)
"""


def test_an_interrupt_within_a_call_shows_no_code_of_ddpnb(kernel: Kernel):
    (kernel.folder / "pressing.py").write_text(PRESSING)
    cell = kernel.run(PRESSED)
    assert cell.error == "RankError", cell.text
    assert "in all_reduce\n" in cell.error_text
    assert "ddpnb/" not in cell.error_text


WITHIN = """%%ddp
import sys
def stay(frame, event, called):
    if event == "return" and frame.f_code.co_name == "_issued":
        sys.setprofile(None)
        print("begun")
        time.sleep(1000)
if rank == 1: sys.setprofile(stay)
dist.all_reduce(torch.ones(4))
time.sleep(1000)
"""


def test_an_interrupt_within_a_call_does_not_have_the_next_cell_count_it_twice(kernel: Kernel):
    """The interrupt comes after gloo has the call, and before the rank records the call."""
    cell = kernel.interrupted(WITHIN, "begun")
    assert cell.error == "KeyboardInterrupt"


def test_groups_stay_where_an_interrupt_leaves_all_ranks_at_the_same_call(kernel: Kernel):
    kernel.run("%%ddp\nsub = dist.new_group([0, 1])\ndist.all_reduce(torch.ones(1), group=sub)")
    # On a busy machine a rank may end the cell late. With the usual time ddpnb would abort it.
    kernel.run(
        "from dataclasses import replace\nusual = cluster.timeouts\n"
        "cluster.timeouts = replace(usual, abort_after_interrupt_seconds=20)"
    )
    cell = kernel.begin(f"%%ddp\nprint('begun')\n{LOOP}")
    kernel.wait_until(lambda: len(cell.by_rank) == 2)  # both ranks have begun
    kernel.interrupt()
    assert kernel.wait(cell).error == "KeyboardInterrupt"
    kernel.run("cluster.timeouts = usual")
    cell = kernel.run("%%ddp\ndist.all_reduce(torch.ones(1), group=sub)")
    assert (cell.status, cell.stderr) == ("ok", "")


def test_an_impatient_user_loses_nothing(kernel: Kernel):
    """Interrupts also arrive while the error is shown and while the reply is sent."""
    (kernel.folder / "busy.py").write_text(BUSY)  # the reply takes 2 s
    kernel.run("import busy\nget_ipython().kernel.finish_metadata = busy.reply")
    cell = kernel.begin(f"%%ddp\nprint('begun')\n{COLLECTIVE}")
    kernel.wait_for_text(cell, "begun")
    has_replied = threading.Event()
    pid = kernel.manager.provisioner.pid

    def press() -> None:
        while not has_replied.wait(0.0005):
            os.kill(pid, signal.SIGINT)

    with ThreadPoolExecutor() as pool:
        pool.submit(press)
        try:
            kernel.wait(cell, timeout=20)
        finally:
            has_replied.set()
    assert cell.error == "KeyboardInterrupt"
    kernel.run("del get_ipython().kernel.finish_metadata")


def test_an_interrupt_between_two_statements_ends_the_cell(kernel: Kernel):
    (kernel.folder / "pressing.py").write_text(PRESSING)
    source = "import pressing, sys\n%ddp_samples\nsys.setprofile(pressing.press)\nprint('next')"
    assert kernel.run(source).error == "KeyboardInterrupt"


def test_a_timeout_stops_every_rank_and_keeps_the_variables(kernel: Kernel):
    cell = kernel.run(f"%%ddp --timeout 0.5\n{COLLECTIVE}")
    assert cell.error == "CellTimeoutError"
    assert re.search(r"stopped on all ranks \(ranks 0-1 in line \d+\)\.", cell.error_text)
    assert 0.5 <= cell.seconds < 15


HELD = """%%ddp
import weakref
class Loader: pass
class Slow(KeyboardInterrupt):
    def __str__(self):
        print("formatting", flush=True)
        time.sleep(1)
        return "slow"
def train():
    loader = Loader()
    globals()["ended"] = weakref.ref(loader)
    raise Slow
train()"""


def test_a_second_interrupt_hides_neither_the_first_nor_what_it_held(kernel: Kernel):
    """IPython has shown the first interrupt and formats it again for its history."""
    cell = kernel.interrupted(HELD, "formatting")
    assert cell.error == "KeyboardInterrupt"
    assert "(ranks 0-1 had failed: Slow)" in cell.error_text
    assert kernel.run("%%ddp\nprint(ended())").by_rank == {0: ["None"], 1: ["None"]}


def test_a_function_of_another_cell_is_not_looked_into(kernel: Kernel):
    kernel.run("%%ddp\ndef spin():\n\n\n\n    time.sleep(60)")
    cell = kernel.run("%%ddp --timeout 0.5\nif rank == 1: 1 / 0\nspin()")
    assert "(rank 0 in line 3, rank 1 had failed: ZeroDivisionError)." in cell.error_text


def test_the_checks_before_a_comparison_can_be_interrupted(kernel: Kernel):
    cell = kernel.begin(
        "%%ddp_compare ddp\nfrom pathlib import Path\nimport os, time\n"
        "Path(f'checking-{os.getpid()}').touch()\n"
        "while True: time.sleep(.01)\ndef model(): ...\ndef data(split): ..."
    )
    signs = kernel.folder.glob
    wait_until(lambda: len(list(signs("checking-*"))) == 2, "both ranks to check", timeout=60)
    kernel.interrupt()
    kernel.wait(cell)
    assert cell.error == "KeyboardInterrupt"
    assert cell.seconds < 15


JUDGED = """%%ddp_compare ddp --epochs 4 --batch-size 16 --no-baseline --name judged
import time, torch
from pathlib import Path

def model():
    return torch.nn.Linear(4, 2)

def data(split):
    return torch.randn(64, 4), torch.zeros(64).long()

def validation_step(model, batch):
    if len(batch[0]) == 16:  # else it is the check
        Path('judging').touch()
        time.sleep(60)
    return {"one": 1.0}
"""


def test_a_run_that_had_trained_to_its_end_keeps_all_but_its_evaluation(kernel: Kernel):
    sign = kernel.folder / "judging"
    sign.unlink(missing_ok=True)
    cell = kernel.begin(JUDGED)
    wait_until(sign.exists, "the evaluation to begin")
    kernel.interrupt()
    kernel.wait(cell)
    assert cell.error == "KeyboardInterrupt"
    kernel.run("import ddpnb\nresult = ddpnb.load('judged')\nrun = result.comparison.runs[0]")
    assert kernel.value("run.num_samples") == "256"
    assert kernel.value("run.status.value, run.reports[0].evaluation_was_cut") == "finished True"
    rate = "256 / max(report.seconds for report in run.reports)"
    assert kernel.value(f"result.runs().samples_per_second[0] / ({rate})") == "1.0"


COMMANDS = {
    "cell": "get_ipython().run_cell_magic('ddp', '', 'time.sleep(0.3)')",
    "restart": "%ddp_restart --ranks 1",
    "push": "big = 'x' * 50_000_000\n%ddp_push big",
    "pull": "%ddp_pull torch.ones(5_000_000) --as pulled",
    "check": "%ddp_check total",
    "comparison": "%ddp_compare ddp async --task digits --epochs 0.5 --no-baseline",
    "inspection": "%ddp_inspect --task digits",
    "samples": "%ddp_samples",
    "collective": "%ddp_show all_reduce",
    "positions": "%ddp_why\n%ddp_status",
}
BETWEEN = "print('begun', flush=True)\nSOURCE\nimport time; time.sleep(50)"
"""Keeps a cell running until the interrupt: between two cells ipykernel may lose an interrupt, and
an interrupt may lose ipykernel's reply."""
NUM_MOMENTS = int(os.environ.get("DDPNB_NUM_MOMENTS", "2"))
"""The number of interrupts of each command."""


@pytest.mark.parametrize("source", COMMANDS.values(), ids=COMMANDS)
def test_an_interrupt_at_any_moment_of_a_command_keeps_the_session_and_the_variables(
    kernel: Kernel, source: str
):
    assert kernel.run(f"%%ddp\n{ALL_REDUCE}").passed
    usual = kernel.run(source).passed.seconds
    draw, is_restart = random.Random(source), source == COMMANDS["restart"]
    for _ in range(NUM_MOMENTS):
        assert kernel.run("%%ddp\nkept = rank + 10").passed
        cell = kernel.begin(BETWEEN.replace("SOURCE", source))
        kernel.wait_for_text(cell, "begun")
        time.sleep(draw.uniform(0, usual))
        interrupted_at = time.monotonic()
        kernel.interrupt()
        kernel.wait(cell)
        assert cell.error == "KeyboardInterrupt", cell.text
        following = kernel.run(f"%%ddp\n{ALL_REDUCE}\nglobals().get('kept'), total.item()")
        if following.error and is_restart:  # rank 1 had been killed and not yet started
            assert "Run %ddp_restart --ranks 1 to" in following.refusal
            kernel.run("%ddp_restart --ranks 1")
            following = kernel.run(f"%%ddp\n{ALL_REDUCE}\nglobals().get('kept'), total.item()")
        assert time.monotonic() - interrupted_at < 15, "usually less than 3 s"
        others = ["(11, 2.0)"], ["(None, 2.0)"]  # None if rank 1 has been restarted
        assert following.by_rank[0] == ["(10, 2.0)"], following.text
        assert following.by_rank[1] in others[: 1 + is_restart]
        kernel.run("%%ddp\nkept = rank + 10")


def test_a_library_is_imported_whole_although_it_is_interrupted(kernel: Kernel):
    library = kernel.folder / "site-packages/parts"
    library.mkdir(parents=True)
    (library / "part.py").write_text("")
    (library / "__init__.py").write_text(
        "from . import part\nimport time\nprint('begun', flush=True)\ntime.sleep(0.8)"
    )
    cell = kernel.interrupted(
        f"%%ddp\nimport sys; sys.path.append({str(library.parent)!r})\nimport parts\n{LOOP}",
        "begun",
    )
    assert cell.error == "KeyboardInterrupt"
    assert kernel.run("%%ddp\nimport parts; parts.part.__name__").by_rank == both("'parts.part'")


def test_an_interrupted_wait_says_that_the_work_goes_on(kernel: Kernel):
    kernel.run("%%ddp --no-wait\nwhile True: time.sleep(0.01)")
    cell = kernel.begin("print('begun')\n_.wait()")
    kernel.wait_for_text(cell, "begun")
    time.sleep(0.2)
    kernel.interrupt()
    assert kernel.wait(cell).error == "KeyboardInterrupt"
    assert cell.error_text.endswith("still runs. Run %ddp_interrupt to stop it.")
    assert "Interrupted the cell on ranks 0-1" in kernel.run("%ddp_interrupt").text
