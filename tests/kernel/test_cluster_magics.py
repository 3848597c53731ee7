import re

import psutil
import pytest

from tests.cluster.rig import is_alive
from tests.kernel.client import Kernel, both
from tests.programs import printed
from tests.unit.session.test_import import LOAD


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("%%rank 0\n1", "Start a cluster with %ddp_start"),
        ("%ddp_restart", "Start a cluster with %ddp_start"),
        ("import ddpnb\nddpnb.status()", "Start a cluster with %ddp_start"),
        ("%ddp_start -n 0", "at least 1 and at most 256"),
        ("%ddp_start -n two", "'two'"),
        ("%ddp_start --hosts a:1 b:1", "unexpected argument b:1"),
        ("%ddp_start --detach", "ddp_start has no option --detach"),
    ],
)
def test_a_wrong_start_or_none_is_one_sentence(bare_kernel: Kernel, source: str, named: str):
    assert named in bare_kernel.run(source).refusal
    assert "No cluster was running" in bare_kernel.run("%ddp_stop").stdout


def processes_in(text: str) -> list[psutil.Process]:
    pids = re.findall(r"^\d+ +(\d+) ", text, re.MULTILINE)
    return [psutil.Process(int(pid)) for pid in pids]


def test_start_shows_a_table_and_a_second_start_says_so(bare_kernel: Kernel):
    cell = bare_kernel.run("%ddp_start -n 2 --threads 2 --device cpu")
    assert [each["type"] for each in cell.outputs] == ["display_data"], cell.text  # no warning
    (text,) = cell.bundles("text/plain")
    (html,) = cell.bundles("text/html")
    assert "2 ranks ready" in text
    assert re.search(r"device +threads +backend", text)
    assert "gloo" in text
    assert html.count("<tr") == 3
    processes = processes_in(text)
    assert len(processes) == 2
    assert all(map(is_alive, processes))
    (server,) = {process.parent() for process in processes}
    assert server.num_threads() == 1, "forking is unsafe"

    again = bare_kernel.run("%ddp_start -n 2")
    assert "A cluster of 2 ranks is already running" in again.stdout
    assert processes_in(again.bundles("text/plain")[0]) == processes

    for option, size in (("--hosts a:4,b:4", ""), ("--engines mpi", " -n 2")):
        elsewhere = bare_kernel.run(f"%ddp_start {option}{size}")
        sentence = f"is already running. Run %ddp_stop, then repeat %ddp_start with {option}."
        assert sentence in elsewhere.error_text
    status = bare_kernel.run("%ddp_status")
    assert "2 ranks of 2 alive" in status.text
    assert status.text.count("idle") == 2
    assert processes_in(status.bundles("text/plain")[0]) == processes


def test_a_start_with_other_options_names_the_commands_that_lead_to_them(kernel: Kernel):
    for line in (
        "--devices 2xV100 --as resnet50",
        "--threads 3",
        "-n 2 --backend nccl --threads 5",
    ):
        refused = kernel.run(f"%ddp_start {line}").refusal
        assert f"then repeat %ddp_start with {line.removeprefix('-n 2 ')}." in refused
    for line in ("", "-n 2", "--device cpu --backend gloo", "-n 4 --device cpu"):
        assert "stays unchanged" in kernel.run(f"%ddp_start {line}").stdout
    assert kernel.run("%ddp_stop").passed
    assert "2 ranks ready" in kernel.run("%ddp_start --devices 2xV100 --as resnet50").text
    for line in ("", "--devices 2xV100 --as resnet50"):
        assert "stays unchanged" in kernel.run(f"%ddp_start {line}").stdout


def test_restart_takes_another_number_and_loses_variables(kernel: Kernel):
    old = processes_in(kernel.run("%ddp_status").bundles("text/plain")[0])
    kernel.run("%%ddp\nlost = 1")
    assert "1 rank ready" in kernel.run("%ddp_restart -n 1").text
    assert not any(map(is_alive, old))
    assert kernel.run("%%ddp\nworld_size, 'lost' in globals()").stdout == "[0] (1, False)\n"
    assert "-n must be at least 1 and" in kernel.run("%ddp_restart -n 0").refusal
    assert kernel.run("%%ddp\nworld_size").stdout == "[0] 1\n"  # the error cost no rank


def test_stop_leaves_no_process_ends_a_background_cell_and_may_be_said_twice(kernel: Kernel):
    processes = kernel.processes
    cell = kernel.run("%%ddp --no-wait\nimport time\ntime.sleep(1000)")
    assert kernel.run("%ddp_stop").stdout == "The cluster has stopped.\n"
    assert not any(map(is_alive, processes))
    kernel.wait_for_text(cell, "UserError")
    assert cell.stdout == "UserError: The cluster was stopped before the ranks had finished.\n"
    assert kernel.run("%ddp_stop").stdout == "No cluster was running.\n"
    assert kernel.run("%%ddp\n1").error == "UserError"


FORKS = """
import multiprocessing, os, ddpnb
from concurrent.futures import ProcessPoolExecutor
from torch.utils.data import DataLoader
fork = multiprocessing.get_context("fork")
result = ddpnb.compare("ddp", task="synthetic", epochs=0.2, baseline=False)
calls = {
    "run_cell": lambda: ddpnb.run_cell("1"), "push": lambda: ddpnb.push(a=1),
    "pull": lambda: ddpnb.pull("rank"), "compare": lambda: ddpnb.compare("ddp", task="synthetic"),
    "start": lambda: ddpnb.start(2), "stop": lambda: ddpnb.stop(), "runs": lambda: ddpnb.runs(),
    "status": lambda: ddpnb.status(), "model": lambda: result.model("ddp"),
    "magic": lambda: get_ipython().run_line_magic("ddp_pull", "rank"),
}
def said(name):
    try: return str(calls[name]())
    except ddpnb.UserError as error: return str(error)
class Samples:
    def __len__(self): return 1
    def __getitem__(self, index): return said("pull")
"""
WAYS = {
    "a pool": "with ProcessPoolExecutor(1, mp_context=fork) as pool: print(*pool.map(said, calls))",
    "a loader": "print(next(iter(DataLoader(Samples(), None, num_workers=1, "
    "multiprocessing_context='fork'))))",
    "a fork": """
reader, writer = os.pipe()
if not (pid := os.fork()):
    os.write(writer, said("stop").encode())
    os._exit(0)
os.waitpid(pid, 0)
print(os.read(reader, 999).decode())""",
}


EXITS = f"""
{LOAD}
import os, sys, ddpnb
from ddpnb.cluster.processes import preload
from ddpnb.session.session import this_session
early = preload.server
def fork_and_exit():
    if not (pid := os.fork()):
        sys.exit()
    os.waitpid(pid, 0)
fork_and_exit()
ddpnb.start(2, device="cpu")
used = this_session()._cluster.processes.server
fork_and_exit()
print(used is (early or used), ddpnb.pull("rank"), ddpnb.stop())
"""


def test_the_exit_of_a_forked_process_ends_neither_fork_server_nor_cluster():
    assert printed(EXITS).splitlines()[-1] == "True {0: 0, 1: 1} True"


def test_a_process_forked_from_the_kernel_is_refused(kernel: Kernel):
    kernel.run(FORKS).passed  # noqa: B018
    stored = kernel.run("%ddp_runs").text
    for way, source in WAYS.items():
        cell = kernel.run(source).passed
        num = cell.stdout.count("was forked from the kernel")
        assert num == (10 if way == "a pool" else 1), cell.text
        assert cell.seconds < 5
        assert "{0: 0, 1: 1}" in kernel.run("%ddp_pull rank").text
    assert kernel.run("%ddp_runs").text == stored


def test_a_start_without_free_descriptors_is_refused_and_leaves_no_folder(bare_kernel: Kernel):
    bare_kernel.run(
        "import os, resource, tempfile\nfrom ddpnb.protocol import processes\n"
        "usual, made = resource.getrlimit(resource.RLIMIT_NOFILE), []\n"
        "make = tempfile.mkdtemp\n"
        "def make_noted(**given): made.append(make(**given)); return made[-1]\n"
        "tempfile.mkdtemp = make_noted\n1 / 0"  # imports what shows an error
    )
    for more in (0, 9):
        bare_kernel.run(
            "last, held = max(map(int, os.listdir('/proc/self/fd'))), [os.dup(0)]\n"
            "while held[-1] < last: held.append(os.dup(0))\n"  # the free numbers below the last
            f"limit = held[-1] + 1 + {more}\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (limit, usual[1]))"
        )
        cell = bare_kernel.run("%ddp_start -n 2")
        bare_kernel.run(
            "resource.setrlimit(resource.RLIMIT_NOFILE, usual)\nfor each in held: os.close(each)"
        )
        assert "%ddp_start to try again" in cell.text, cell.text
    assert bare_kernel.value("len(made) == 2, [each for each in made if os.path.exists(each)]") == (
        "True []"
    )
    bare_kernel.run("tempfile.mkdtemp = make")


def test_the_python_twins(bare_kernel: Kernel):
    run = bare_kernel.run
    table = run("import ddpnb\nddpnb.start(2, device='cpu')")
    assert "2 ranks ready" in table.bundles("text/plain")[-1]
    assert "<table" in table.bundles("text/html")[-1]
    assert run("ddpnb.run_cell('x = rank + 1; print(world_size)')").by_rank == both("2")
    assert run("ddpnb.run_cell('rank', ranks='1')").stdout == "[1] 1\n"
    assert run("ddpnb.push(factor=3); print(ddpnb.pull('factor * x'))").stdout == "{0: 3, 1: 6}\n"
    assert run("print(ddpnb.pull('x', ranks='1'))").stdout == "2\n"
    assert "idle" in run("ddpnb.status()").text
    assert "No stored runs" in run("ddpnb.runs()").text or "stored run" in run("ddpnb.runs()").text
    assert "cluster: ranks: 2\n" in run("print(ddpnb.debug_info())").stdout
    assert run("ddpnb.interrupt()").status == "ok"
    assert run("ddpnb.run_cell('1/0')").error == "RankError"
    assert "1 rank ready" in run("ddpnb.restart(1)").text
    assert run("print(ddpnb.stop(), ddpnb.stop())").stdout == "True False\n"
