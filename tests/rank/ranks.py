"""Real ranks for tests: processes in a real process group."""

import multiprocessing
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ddpnb.protocol.messages import RankState
from ddpnb.rank.collectives.mismatch import MismatchCheck

TIMEOUT_SECONDS = 60.0

# One process imports torch, and forks all others: a group starts in a fraction of a second.
# torch._dynamo is what any rank's first optimizer step imports, for over a second.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["ddpnb.rank.training.loop", "ddpnb.rank.tasks.digits", "torch._dynamo"]
)
PINNED = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Environment in which sums have one order, on whatever processor."""


def begin(target: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """Run a function in a process of its own; its last argument is the pipe's other end."""
    with patch.dict(os.environ, PINNED):
        forkserver.ensure_running()
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


class RankFailedError(Exception):
    """A job raised on a rank, or the rank died; ``cause`` is its exception, if there is one."""

    def __init__(self, rank: int, text: str, cause: BaseException | None) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.cause = cause


class Ranks:
    """Processes in one gloo group, which carry out jobs: ``job(state, folder, *args)``."""

    def __init__(self, world_size: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ddpnb-test-", dir="/dev/shm"))
        self._rendezvous = Path(tempfile.mkdtemp(prefix="ddpnb-test-"))
        states = [make_state(rank, world_size) for rank in range(world_size)]
        self.ranks = [Rank(state, self.folder, self._rendezvous) for state in states]

    def call(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a job on every rank; return the results, or raise what a rank raised."""
        results = self.attempt(job, *args)
        for result in results:
            if isinstance(result, RankFailedError):
                raise result
        return results

    def attempt(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a job on every rank; return its result or its failure for each."""
        self.begin(job, *args)
        return [rank.end() for rank in self.ranks]

    def begin(self, job: Callable[..., Any], *args: Any) -> None:
        """Start a job on every rank."""
        for rank in self.ranks:
            rank.begin(job, *args)

    def outside(self, rank: int) -> "Rank":
        """Return a new process that is in no group, and takes a rank's place."""
        return Rank(make_state(rank, len(self.ranks)), self.folder, None)

    def close(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.join()
        shutil.rmtree(self.folder)
        shutil.rmtree(self._rendezvous)


class Rank:
    """A process that carries out one job after the other."""

    def __init__(self, state: RankState, folder: Path, rendezvous: Path | None) -> None:
        self.number = state.rank
        self.process, self._pipe = begin(serve, state, folder, rendezvous)

    def begin(self, job: Callable[..., Any], *args: Any) -> None:
        """Start a job; ``end`` waits for it."""
        self._pipe.send((job, args))

    def end(self) -> Any:
        """Return the result of the job that was begun, or its failure."""
        if not self._pipe.poll(TIMEOUT_SECONDS):
            raise TimeoutError(f"rank {self.number} hangs")
        try:
            is_right, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return RankFailedError(self.number, "died", None)
        return value if is_right else RankFailedError(self.number, *value)


def make_state(rank: int, world_size: int) -> RankState:
    return RankState(
        rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        pid=0,
        host="here",
        device="cpu",
        device_name="",
        num_threads=1,
        backend="gloo",
    )


def serve(state: RankState, folder: Path, rendezvous: Path | None, pipe: Connection) -> None:
    """Carry out jobs until the test's end of the pipe is closed; in a group, if one meets."""
    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = False  # it may have processes that load
    if rendezvous is not None:
        MismatchCheck().start(rendezvous, 0)  # as in a cluster: no strategy may be refused
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(rendezvous / "store"), state.world_size),
            rank=state.rank,
            world_size=state.world_size,
            timeout=timedelta(seconds=30),
        )
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, job(state, folder, *args)
        except Exception as error:  # noqa: BLE001  # the test judges it
            answer = False, (traceback.format_exc(), error)
        pipe.send(answer)
