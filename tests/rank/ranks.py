"""Real ranks for tests: processes in a real process group."""

import multiprocessing
import shutil
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
        self._pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = CONTEXT.Pipe()
            state = make_state(rank, world_size)
            process = CONTEXT.Process(
                target=serve, args=(state, self.folder, self._rendezvous, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

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
        return self.end()

    def start_outside(self, job: Callable[..., Any], rank: int, *args: Any) -> "Outside":
        """Run a job as a rank, in a new process that is in no group."""
        ours, theirs = CONTEXT.Pipe()
        state = make_state(rank, len(self.processes))
        process = CONTEXT.Process(
            target=carry_out, args=(job, state, self.folder, args, theirs), daemon=True
        )
        process.start()
        theirs.close()
        return Outside(process, ours)

    def begin(self, job: Callable[..., Any], *args: Any) -> None:
        """Start a job on every rank; ``end`` waits for it."""
        for pipe in self._pipes:
            pipe.send((job, args))

    def end(self) -> list[Any]:
        """Return the results of a job that was begun, or its failures."""
        return [self._result(rank) for rank in range(len(self._pipes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        shutil.rmtree(self.folder)
        shutil.rmtree(self._rendezvous)

    def _result(self, rank: int) -> Any:
        if not self._pipes[rank].poll(TIMEOUT_SECONDS):
            raise TimeoutError(f"rank {rank} hangs")
        try:
            is_right, value = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return RankFailedError(rank, "died", None)
        return value if is_right else RankFailedError(rank, *value)


class Outside:
    """A process of its own, which carries out one job."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process = process
        self._pipe = pipe

    def result(self) -> Any:
        """Wait for the job and the process to end; raises its error."""
        assert self._pipe.poll(TIMEOUT_SECONDS), "hangs"
        is_right, value = self._pipe.recv()
        self._pipe.close()
        self.process.join(TIMEOUT_SECONDS)
        if not is_right:
            raise RankFailedError(-1, *value)
        return value


def carry_out(
    job: Callable[..., Any], state: RankState, folder: Path, args: Any, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    pipe.send(answer_of(job, state, folder, args))
    pipe.poll(TIMEOUT_SECONDS)  # tensors go with the process: until the other end has them


def make_state(rank: int, world_size: int) -> RankState:
    return RankState(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        pid=0,
        host="here",
        device="cpu",
        device_name="CPU",
        num_threads=1,
        backend="gloo",
    )


def serve(state: RankState, folder: Path, rendezvous: Path, pipe: Connection) -> None:
    """Carry out jobs until the test's end of the pipe is closed."""
    torch.set_num_threads(1)
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
        pipe.send(answer_of(job, state, folder, args))


def answer_of(job: Callable[..., Any], state: RankState, folder: Path, args: Any) -> Any:
    try:
        return True, job(state, folder, *args)
    except Exception as error:  # noqa: BLE001  # the test judges it
        return False, (traceback.format_exc(), error)
