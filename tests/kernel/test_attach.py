import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddpnb.cluster.run_folder import detached
from tests.kernel.client import Kernel, both

DETACHABLE = "%ddp_start -n 2 --device cpu --detach 600"
FILL = "%%ddp\nimport torch\nkept = torch.randn(1000) + rank"
SUM = "%ddp_pull kept.sum().item()"
ALL_REDUCE = """%%ddp
import torch, torch.distributed as dist
total = torch.ones(1)
dist.all_reduce(total)
print(total.item())
"""
BELOW = "[p.pid for p in __import__('psutil').Process().children(recursive=True)]"


@contextlib.contextmanager
def kernel_in(folder: Path) -> Iterator[Kernel]:
    kernel = Kernel(folder)
    kernel.run("%load_ext ddpnb")
    yield kernel
    kernel.stop()
    for record in detached():
        if record.home == folder:
            psutil.Process(record.server[0]).terminate()


@pytest.fixture
def fresh_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel to end, in a folder where no other cluster was started."""
    with kernel_in(tmp_path) as kernel:
        yield kernel


@pytest.fixture(scope="module")
def own_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """The same for several tests: it has no cluster, or one of ``DETACHABLE``'s."""
    with kernel_in(tmp_path_factory.mktemp("attach")) as kernel:
        yield kernel


def processes_below(kernel: Kernel) -> list[psutil.Process]:
    pids = map(int, re.findall(r"\d+", kernel.value(BELOW)))
    return [psutil.Process(pid) for pid in pids]


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=0)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def name_in(text: str) -> str:
    """The cluster's name, as it stands in the table's note."""
    (name,) = re.findall(r"%ddp_start --attach finds it again \((\w+)\)", text)
    return str(name)


@pytest.mark.parametrize("now", [True, False], ids=["killed", "restarted"])
def test_a_new_kernel_finds_the_ranks_of_the_old_one(own_kernel: Kernel, now: bool):
    kernel = own_kernel
    started = kernel.run(DETACHABLE)
    assert "outlives the kernel by 600 s" in started.text
    kernel.run(FILL)
    before = kernel.run(SUM).text
    processes = processes_below(kernel)
    assert len(processes) >= 4  # fork server, controller with its child, ranks
    loaded = kernel.restart(now=now)
    assert loaded.lines == [
        "Ranks wait for a kernel: %ddp_start --attach takes them over, with all variables."
    ]
    assert set(living(processes)) == set(processes)
    assert kernel.run("%%ddp\n1").error == "UserError"

    attached = kernel.run("%ddp_start --attach").passed
    assert "2 ranks of 2 alive" in attached.text
    assert attached.text.count("idle") == 2
    assert name_in(attached.text) == name_in(started.text)
    assert kernel.run(SUM).text == before
    assert kernel.run(ALL_REDUCE).by_rank == both("2.0")
    assert kernel.run("%%ddp\n1 / rank").error == "RankError"
    assert kernel.run(ALL_REDUCE).by_rank == both("2.0")
    assert "outlives the kernel by 600 s" in kernel.run("%ddp_status").text

    assert kernel.run("%ddp_stop").stdout == "The cluster has stopped.\n"
    assert not living(processes)
    assert not Path(f"/dev/shm/ddpnb-{name_in(started.text)}").exists()
    assert kernel.run("%ddp_start --attach nobody").error_text.startswith(
        "UserError: There is no clus"
    )


def test_a_question_of_an_earlier_kernel_is_over(own_kernel: Kernel):
    kernel = own_kernel
    kernel.run(DETACHABLE)
    asking = "for _ in range(2):\n    try: input('? ')\n    except EOFError: pass"
    kernel.begin(f"%%ddp --debug 1\nkept = rank + 10\n{asking}", allow_stdin=True)
    assert kernel.client.get_stdin_msg(timeout=30)["content"]["prompt"] == "[1] ? "
    kernel.restart(now=True)
    assert kernel.run("%ddp_start --attach").passed
    assert kernel.run(ALL_REDUCE).by_rank == both("2.0")
    assert kernel.run("%%ddp\nkept").by_rank == {0: ["10"], 1: ["11"]}
    kernel.run("%ddp_stop")


def test_without_detach_a_restart_ends_everything(own_kernel: Kernel):
    kernel = own_kernel
    assert "outlives" not in kernel.run("%ddp_start -n 2 --device cpu").text
    processes = processes_below(kernel)
    assert kernel.restart().text == ""
    assert not living(processes)
    assert kernel.run("%ddp_start --attach nobody").error == "UserError"


def test_stop_ends_what_was_left_running_without_another_word(own_kernel: Kernel):
    kernel = own_kernel
    kernel.run(DETACHABLE)
    kernel.run("%%ddp --no-wait\nimport time\ntime.sleep(1000)")
    processes = processes_below(kernel)
    kernel.restart()
    request = kernel.begin("%ddp_start --attach")
    kernel.wait(request)
    stop = kernel.begin("%ddp_stop\nimport time; time.sleep(2)")
    assert kernel.wait(stop).text == "The cluster has stopped.\n"
    assert not kernel.cells[request].stderr
    assert not living(processes)


def test_the_next_cell_waits_for_what_was_left_and_an_interrupt_stops_both(own_kernel: Kernel):
    kernel = own_kernel
    kernel.run(DETACHABLE)
    kernel.run("%%ddp --no-wait\nimport time\nwhile rank: time.sleep(0.1)")
    kernel.restart(now=True)
    kernel.run("%ddp_start --attach")
    cell = kernel.begin("%%ddp\nprint('begun', rank)\ntime.sleep(1000)")
    kernel.wait_for_text(cell, "begun 0")
    kernel.interrupt()
    assert kernel.wait(cell).error == "KeyboardInterrupt"
    assert kernel.run("%%ddp\nrank").by_rank == {0: ["0"], 1: ["1"]}


def test_two_kernels_in_one_folder(fresh_kernel: Kernel):
    first, second = fresh_kernel, Kernel(fresh_kernel.folder)
    try:
        name = name_in(first.run(DETACHABLE).text)
        first.run("%%ddp\nwho = 'first'")
        second.run("%load_ext ddpnb")
        assert second.run(f"%ddp_start --attach {name}").error == "UserError"
        other = name_in(second.run(DETACHABLE).text)
        second.run("%%ddp\nwho = 'second'")
        for kernel in (first, second):
            kernel.restart()
        assert first.run("%ddp_start --attach").error == "UserError"
        assert {name, other} <= set(first.complete("%ddp_start --attach "))
        first.run(f"%ddp_start --attach {other}")
        second.run("import ddpnb; ddpnb.start(attach=True)")
        assert first.run("%%ddp\nwho").stdout == "[0-1] 'second'\n"
        assert second.run("%%ddp\nwho").stdout == "[0-1] 'first'\n"
    finally:
        second.stop()


def test_attach_and_detach_where_a_cluster_runs(kernel: Kernel):
    cell = kernel.run("%ddp_start --attach")
    assert cell.error_text == (
        "UserError: A cluster is already running here: %ddp_stop ends it, "
        "then --attach takes another."
    )
    assert kernel.run("%%ddp\nkept = 3\n").passed
    changed = kernel.run("import ddpnb; ddpnb.start(detach=60)")
    assert "it is used as it is, but for --detach." in changed.stdout
    assert "outlives the kernel by 60 s" in changed.text
    assert kernel.run("%%ddp\nkept").stdout == "[0-1] 3\n"
    assert kernel.run("%ddp_stop").stdout == "The cluster has stopped.\n"
