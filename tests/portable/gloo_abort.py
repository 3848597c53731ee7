"""Tries whether a wait in gloo ends when another thread shuts down the wait's connection.

The exit code is 0 if gloo does what ddpnb's probe says: the wait ends with epoll, and only there.
"""

import multiprocessing
import sys
import tempfile
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ddpnb.compat.torch_internals import gloo_notices_ends
from ddpnb.rank.connections import own_connections, shut_down


def wait(rank: int, path: str) -> None:
    store, timeout = dist.FileStore(path, 2), timedelta(seconds=10)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    if rank == 1:
        time.sleep(60)
    threading.Timer(1, lambda: [shut_down(fd) for fd, _ in own_connections()]).start()
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        print(error)
    is_released = time.monotonic() - began < 5
    print("gloo ended the wait" if is_released else "gloo did not end the wait")
    sys.exit(is_released != gloo_notices_ends.works)


if __name__ == "__main__":
    context, path = multiprocessing.get_context("spawn"), f"{tempfile.mkdtemp()}/store"
    ranks = [context.Process(target=wait, args=(rank, path), daemon=True) for rank in (0, 1)]
    for each in ranks:
        each.start()
    ranks[0].join(60)
    ranks[1].kill()
    sys.exit(ranks[0].exitcode)
