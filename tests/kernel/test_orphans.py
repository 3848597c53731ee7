"""A kernel that shuts down leaves no process and no file of its cluster.

How a cluster ends with a kernel that is killed: ``tests/cluster/test_orphans.py``.
"""

from pathlib import Path

from tests.cluster.rig import wait_until, wait_until_gone
from tests.kernel.client import Kernel

START = """%load_ext ddpnb
%ddp_start -n 2 --device cpu
"""
CHILD = "%%ddp\nimport subprocess\nchild = subprocess.Popen(['sleep', '1000'])"
WAITING = """%%ddp --no-wait
import time, torch.distributed as dist
dist.barrier() if rank else time.sleep(1000)
"""


def test_nothing_of_a_cluster_outlives_its_kernel(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    try:
        for source in (START, CHILD, WAITING):
            assert kernel.run(source).passed
        folder, processes = kernel.run_folder, kernel.processes
        assert len(processes) >= 6
        assert folder.exists()
        kernel.manager.shutdown_kernel(now=False)
        wait_until_gone(processes, timeout=10)
        wait_until(lambda: not folder.exists(), "the end of the run folder")
    finally:
        kernel.manager.shutdown_kernel(now=True)
