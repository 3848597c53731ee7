"""Importing the ranks' modules does not touch CUDA."""

import subprocess
import sys

SOURCE = """
import torch
called = []
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device",
             "get_device_properties", "get_device_capability"):
    setattr(torch.cuda, name, lambda *_, name=name: called.append(name) or 0)
torch._C._cuda_getDeviceCount = lambda: called.append("_cuda_getDeviceCount") or 0
import ddpnb.rank.calls
print(called)
"""


def test_importing_what_ranks_need_calls_nothing_of_cuda():
    done = subprocess.run(
        [sys.executable, "-c", SOURCE], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
