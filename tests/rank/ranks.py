"""Real ranks for tests, as processes in a real process group."""

import multiprocessing
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ddpnb.protocol.messages import RankState
from ddpnb.protocol.processes import parent_folder, portable
from ddpnb.rank.collectives.mismatch import MismatchCheck
from ddpnb.rank.training import loop

TIMEOUT_SECONDS = 60.0

# One process imports torch and forks all ranks, so that a group starts in a fraction of a second.
# Without this preload, each rank imports torch._dynamo and the optimizer of zero for over a second.
CONTEXT = multiprocessing.get_context("spawn" if portable() else "forkserver")
PRELOADED = ["ddpnb.rank.training.loop", "ddpnb.rank.tasks.digits", "torch._dynamo"]
CONTEXT.set_forkserver_preload([*PRELOADED, "torch.distributed.optim"])
PINNED = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Environment variables that fix the order of sums on every processor."""


def begin(target: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """Run a function in a new process. Its last argument is the other end of the pipe."""
    with patch.dict(os.environ, PINNED):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=target, args=(*args, theirs), daemon=True)
        process.start()
    theirs.close()
    return process, ours


class RankFailedError(Exception):
    """A job failed on a rank. ``cause`` is the job's exception, or None if the rank died."""

    def __init__(self, rank: int, text: str, cause: BaseException | None) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.cause = cause


class Ranks:
    """Processes in one gloo group that run jobs. A job is a ``job(state, folder, *args)``."""

    def __init__(self, world_size: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ddpnb-test-", dir=parent_folder()))
        self._rendezvous = Path(tempfile.mkdtemp(prefix="ddpnb-test-"))
        states = [make_state(rank, world_size) for rank in range(world_size)]
        self.ranks = [Rank(state, self.folder, self._rendezvous) for state in states]

    def call(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a job on every rank. Return the results, or raise the first rank's failure."""
        results = self.attempt(job, *args)
        for result in results:
            if isinstance(result, RankFailedError):
                raise result
        return results

    def attempt(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a job on every rank. Return each rank's result or failure."""
        self.begin(job, *args)
        return [rank.end() for rank in self.ranks]

    def begin(self, job: Callable[..., Any], *args: Any) -> None:
        for rank in self.ranks:
            rank.begin(job, *args)

    def outside(self, rank: int) -> "Rank":
        """Return a new process outside the group that replaces a rank."""
        return Rank(make_state(rank, len(self.ranks)), self.folder, None)

    def close(self) -> None:
        for rank in self.ranks:
            rank.process.terminate()  # unlike a kill, it lets `make coverage` save its data
            rank.process.join(5)
            rank.process.kill()
            rank.process.join()
        shutil.rmtree(self.folder)
        shutil.rmtree(self._rendezvous)


class Rank:
    """A process that runs one job after the other."""

    def __init__(self, state: RankState, folder: Path, rendezvous: Path | None) -> None:
        self.number = state.rank
        self.process, self._pipe = begin(serve, state, folder, rendezvous)

    def begin(self, job: Callable[..., Any], *args: Any) -> None:
        """Start a job. ``end`` waits for the job's end."""
        self._pipe.send((job, args))

    def end(self) -> Any:
        """Wait for the job that was started, and return its result or its failure."""
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
    """Run jobs until the test closes the pipe. With a ``rendezvous``, first join the group."""
    torch.set_num_threads(1)
    loop.SERVER_LOCK = ""  # no fork server locks a file in the folder
    multiprocessing.current_process()._config["daemon"] = False  # jobs may start loading processes
    if rendezvous is not None:
        MismatchCheck().start(rendezvous, 0)  # as in a cluster; must accept all strategies
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
        except Exception as error:  # noqa: BLE001  # the test checks it
            answer = False, (traceback.format_exc(), error)
        pipe.send(answer)
