"""How is a rank made slow, uneven or dead on purpose, whatever the strategy?  (Every rank.)

    delay of a step  =  (f * (1 + u) - 1) * c + s

c: what this worker's own forward and backward pass take, measured before the run without
any exchange, so that waiting for others is never multiplied; f and s: how slow it was
wished to be; u: a new random share of up to the jitter.  The rank sleeps between its forward
and its backward pass: what it has read grows so much older, what it sends comes so much later.
The sleep counts as forward.

A rank is killed between two steps, at the first that begins at or after its time: all the steps
that it has finished are sent first, and it holds a share that is lost with it.

Where one process holds several workers, as in DataParallel, the slowest holds up its step.
"""

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn, final

import torch

from ddpnb.protocol.faults import Kill, Slow, parse_kill, parse_slow
from ddpnb.protocol.messages import Mark, MarkKind, RunSpec
from ddpnb.rank.strategies.base import Batch, Plan, Replica
from ddpnb.rank.strategies.timer import Timer

KILL_TIMEOUT_SECONDS = 1.0
"""How long the notebook may take to kill a rank on purpose."""
_NUM_TRIALS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What is to befall the workers of one process."""

    workers: tuple[int, ...]
    """Those that this process holds."""
    slow: tuple[Slow, ...] = ()
    kill: tuple[Kill, ...] = ()
    jitter: float = 0.0
    seed: int = 0

    @property
    def need_compute_seconds(self) -> bool:
        """Whether a delay depends on how long computing takes."""
        return self.jitter > 0 or any(fault.factor > 1 for fault in self.slow)


def faults_of(spec: RunSpec, workers: Collection[int], *, is_new: bool = True) -> Faults:
    """Return what the spec has in store for some workers; those that came back have died."""
    return Faults(
        workers=tuple(workers),
        slow=tuple(fault for fault in map(parse_slow, spec.slow) if fault.rank in workers),
        kill=tuple(f for f in map(parse_kill, spec.kill) if f.rank in workers and is_new),
        jitter=spec.jitter,
        seed=spec.seed,
    )


def notes(spec: RunSpec, plan: Plan) -> tuple[str, ...]:
    """Return what must stand beside the results of a run with faults."""
    num_workers = plan.num_workers
    slow = [(text, parse_slow(text)) for text in spec.slow]
    kill = [(text, parse_kill(text)) for text in spec.kill]
    told = [f"Rank {f.rank} is {f.text} on purpose." for _, f in slow if f.rank < num_workers]
    if spec.jitter:
        told.append(f"Steps take up to {100 * spec.jitter:g} % longer at random, on purpose.")
    told += _told_of_kills([fault for _, fault in kill if fault.rank < num_workers], plan)
    away = [(f"--slow {text}", fault.rank) for text, fault in slow if fault.rank >= num_workers]
    away += [(f"--kill {text}", fault.rank) for text, fault in kill if fault.rank >= num_workers]
    told += [f"{given} has no effect: rank {rank} takes no part." for given, rank in away]
    return tuple(told)


def _told_of_kills(kills: Sequence[Kill], plan: Plan) -> list[str]:
    if plan.num_ranks == 1 and kills:
        kills = [_first(kills)]  # all workers die in one process
    return [_told_of_kill(fault, plan) for fault in kills]


def _told_of_kill(fault: Kill, plan: Plan) -> str:
    told = f"Rank {fault.rank} is to be killed after {fault.seconds:g} s of training, on purpose"
    if fault.rank >= plan.num_ranks:
        return f"{told}; here it is a thread of rank 0, whose process dies with it."
    return f"{told}."


def _first(kills: Sequence[Kill]) -> Kill:
    return min(kills, key=lambda fault: fault.seconds)


def measure(replica: Replica, batch: Batch) -> float:
    """Return how many seconds a forward and backward pass over a batch takes here."""
    return statistics.median(_seconds_of(replica, batch) for _ in range(_NUM_TRIALS))


@final
class FaultInjector:
    """Lets faults strike while a run is trained.

    Args:
        faults: what is to befall this process.
        compute_seconds: what a worker's own computing takes in one step.
        device: whose work must be done before a rank can be late.
        timer: is told of the sleep.
        publish: takes a mark when something strikes.
    """

    def __init__(
        self,
        faults: Faults,
        *,
        compute_seconds: float,
        device: torch.device,
        timer: Timer,
        publish: Callable[[Mark], None],
    ) -> None:
        self._faults = faults
        self._compute_seconds = compute_seconds
        self._device = device
        self._timer = timer
        self._publish = publish
        self._random = {r: random.Random(f"{faults.seed} {r}") for r in faults.workers}
        self._seconds = 0.0
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Mark what is slow from now on, and count the time until a kill."""
        for fault in self._faults.slow:
            self._publish(Mark(rank=fault.rank, seconds=0.0, text=fault.text))
        self._began = time.perf_counter()

    @property
    def is_kill_due(self) -> bool:
        """Whether this process is to die before its next step."""
        kills = self._faults.kill
        return bool(kills) and time.perf_counter() - self._began >= _first(kills).seconds

    def kill(self) -> NoReturn:
        """Publish when this process is killed, and wait for it: the notebook kills it.

        By then all of its steps have arrived there.  Where nobody listens, it kills itself.
        """
        seconds = time.perf_counter() - self._began
        rank = _first(self._faults.kill).rank
        self._publish(Mark(rank=rank, seconds=seconds, kind=MarkKind.KILLED))
        time.sleep(KILL_TIMEOUT_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def begin_step(self) -> None:
        """Find out how much longer the next step is to take."""
        self._seconds = max((self._delay(worker) for worker in self._faults.workers), default=0.0)

    def delay(self) -> None:
        """Sleep for as long; once a step, however often it is called."""
        seconds, self._seconds = self._seconds, 0.0
        if seconds <= 0:
            return
        self._timer.begin("forward")
        if self._device.type == "cuda":  # else the GPU would go on with what it has
            torch.cuda.synchronize(self._device)
        time.sleep(seconds)

    def _delay(self, worker: int) -> float:
        mine: Sequence[Slow] = [fault for fault in self._faults.slow if fault.rank == worker]
        factor = 1 + self._faults.jitter * self._random[worker].random()
        for fault in mine:
            factor *= fault.factor
        return (factor - 1) * self._compute_seconds + sum(fault.seconds for fault in mine)


def _seconds_of(replica: Replica, batch: Batch) -> float:
    _finish(replica.device)
    began = time.perf_counter()
    replica.compute_gradients(batch)
    _finish(replica.device)
    return time.perf_counter() - began


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
