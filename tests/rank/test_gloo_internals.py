"""Exceptions of C++ that nobody catches: gloo's leave the process alive, others end it."""

import signal
import subprocess
import sys

import pytest

from ddpnb.compat import gloo_internals

pytestmark = pytest.mark.skipif(
    not gloo_internals.replaces_handler.works, reason="needs GCC's C++ library"
)

LONG = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from ddpnb.compat import gloo_internals

def rank_of(rank, file):
    gloo_internals.survive_long_messages()
    gloo_internals.survive_long_messages()
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    work = dist.all_reduce(torch.ones(1000 * (rank + 1)), async_op=True)
    try:
        work.wait(timedelta(seconds=1))
    except RuntimeError:
        print(f"alive, {gloo_internals.num_stopped_threads()}\\n", end="", flush=True)  # one write
    gloo_internals.os._exit(0)

if __name__ == "__main__":
    torch.multiprocessing.start_processes(rank_of, (sys.argv[1],), nprocs=2)
"""

UNREAD = """
import os, sys, time
import torch, torch.distributed as dist
from ddpnb.compat import gloo_internals
from ddpnb.protocol.connections import established, own_connections
from ddpnb.rank.process_group import shut_down

def rank_of(rank, file):
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    if rank == 0:
        dist.irecv(torch.empty(1000), 1)  # and let go of
    dist.barrier()
    if rank == 1:
        dist.isend(torch.ones(1000), 0)
        time.sleep(600)
    before, deadline = time.process_time(), time.monotonic() + 60
    while (is_idle := time.process_time() < before + 0.5) and time.monotonic() < deadline:
        time.sleep(0.1)
    print(is_idle, flush=True)  # else there is nothing to mend any more
    ours = list(own_connections())
    for each in ours:
        shut_down(each.fd)
    inodes = {each.inode for each in ours}
    assert not inodes & established()
    print(gloo_internals.leave_unread(inodes) > 0, flush=True)
    time.sleep(0.5)
    before = time.process_time()
    time.sleep(1)
    print(time.process_time() < before + 0.1, flush=True)
    dist.destroy_process_group()
    print("left", flush=True)
    os.killpg(0, 9)

if __name__ == "__main__":
    torch.multiprocessing.start_processes(rank_of, (sys.argv[1],), nprocs=2)
"""

OTHER = """
import ctypes
from ddpnb.compat import gloo_internals
gloo_internals.survive_long_messages()
print(gloo_internals.thrown_class(), flush=True)
ctypes.CDLL(gloo_internals.LIBRARY)._ZSt9terminatev()
"""


def test_a_longer_message_than_expected_leaves_both_processes_alive(tmp_path):
    script = tmp_path / "long.py"
    script.write_text(LONG)
    command = [sys.executable, str(script), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["alive, 0", "alive, 1"]
    assert "longer than this rank expects" in done.stderr


def test_a_message_that_nobody_awaits_takes_no_core(tmp_path):
    script = tmp_path / "unread.py"
    script.write_text(UNREAD)
    command = [sys.executable, str(script), str(tmp_path / "store")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, start_new_session=True
    )
    assert done.stdout.splitlines() == ["False", "True", "True", "left"], done.stderr


def test_another_exception_ends_the_process_as_before():
    command = [sys.executable, "-c", OTHER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "b''\n"
    assert done.returncode == -signal.SIGABRT
    assert "terminate called without an active exception" in done.stderr
