"""A kernel's end leaves no process and no run folder, and keeps all stored runs.

``tests/cluster/test_orphans.py`` tests how a cluster ends with a killed kernel.
"""

from pathlib import Path

from ddpnb.results.store import Store
from tests.cluster.rig import DYNAMO, wait_until, wait_until_gone
from tests.kernel.client import kernel_in

LINE = "%ddp_compare ddp --task digits --epochs 100000"
"""A comparison that would train for hours."""
CHILD = "%%ddp\nimport subprocess\nchild = subprocess.Popen(['sleep', '1000'])"
WAITING = """%%ddp --no-wait
import time, torch.distributed as dist
dist.barrier() if rank else time.sleep(1000)
"""


def test_nothing_of_a_cluster_outlives_its_kernel(tmp_path: Path):
    with kernel_in(tmp_path) as kernel:
        for source in ("%ddp_start -n 2 --device cpu", CHILD, WAITING):
            assert kernel.run(source).passed
        folder, processes = kernel.run_folder, kernel.processes
        assert len(processes) >= 6
        assert folder.exists()
    wait_until_gone(processes, timeout=10)
    wait_until(lambda: not folder.exists(), "the end of the run folder")


def num_stored(project: Path) -> int:
    """Return the number of steps in the project's store, as another process reads it."""
    store = Store(project / "data" / "runs")
    try:
        return sum(len(run.events) for run in store.load("cut").runs)
    finally:
        store.close()


def test_a_run_is_readable_up_to_its_last_flush_after_a_sigkill(tmp_path: Path):
    with kernel_in(tmp_path, DYNAMO) as kernel:
        kernel.run("%ddp_start -n 2 --device cpu")
        kernel.run(f"running = {LINE} --slow 0:5ms,1:5ms --no-baseline --no-wait --name cut")
        kernel.wait_for_value("len(running.result.steps()) >= 100", "True")
        seen = int(kernel.value("len(running.result.steps())"))
        wait_until(lambda: num_stored(tmp_path) >= seen, "the steps in the store", timeout=60)
        processes = kernel.processes
        kernel.kill_and_restart()
        wait_until_gone(processes)
        listed = kernel.run("%ddp_runs").text
        assert "cut/ddp" in listed
        assert "stopped: the kernel ended; unsaved steps are lost" in listed
        kernel.run("import ddpnb")
        assert int(kernel.value("len(ddpnb.load('cut').steps())")) >= seen
        assert len(kernel.run("%ddp_plot cut").pictures) == 1
        assert LINE in kernel.run("%ddp_runs --show cut").text
