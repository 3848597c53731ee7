"""Calls functions on ranks without a notebook."""

import contextlib
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpnb.protocol.messages import RankState

Job = Callable[..., Any]
"""A function that each rank calls as ``job(state, folder, *arguments)``."""


@contextlib.contextmanager
def rank_calls(num_ranks: int) -> Iterator[Callable[..., list[Any]]]:
    """Start ranks with one thread each in a gloo group; yield a function that runs a job on all."""
    folder = Path(tempfile.mkdtemp(prefix="ddpnb-bench-", dir="/dev/shm"))
    rendezvous = Path(tempfile.mkdtemp(prefix="ddpnb-bench-"))
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(rank, num_ranks, folder, rendezvous, theirs))
        process.start()
        theirs.close()  # a rank that dies then ends the wait for its answer
        pipes.append(ours)
        processes.append(process)

    def call(job: Job, *arguments: object) -> list[Any]:
        for pipe in pipes:
            pipe.send((job, arguments))
        return [pipe.recv() for pipe in pipes]

    try:
        yield call
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(folder)
        shutil.rmtree(rendezvous)


def _serve(rank: int, num_ranks: int, folder: Path, rendezvous: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    state = RankState(
        rank=rank,
        world_size=num_ranks,
        local_world_size=num_ranks,
        pid=0,
        host="",
        device="cpu",
        device_name="CPU",
        num_threads=1,
        backend="gloo",
    )
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(rendezvous / "store"), num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=300),
    )
    while True:
        job, arguments = pipe.recv()
        pipe.send(job(state, folder, *arguments))
