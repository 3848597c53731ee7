"""Does what the fork server imports leave CUDA alone?  Forks of who asked cannot use it."""

import subprocess
import sys

ASKED = """
import torch
asked = []
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device",
             "get_device_properties", "get_device_capability"):
    setattr(torch.cuda, name, lambda *_, name=name: asked.append(name) or 0)
torch._C._cuda_getDeviceCount = lambda: asked.append("_cuda_getDeviceCount") or 0
import ddpnb.rank.calls
print(asked)
"""


def test_to_import_what_ranks_need_asks_nothing_of_cuda():
    done = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
