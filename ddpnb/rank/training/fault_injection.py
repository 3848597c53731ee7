"""Slows or kills ranks on purpose, with any strategy.  Runs on the ranks.

    delay of a step  =  (f * (1 + u) - 1) * c + s

Here c is the time of this worker's forward and backward pass.  ddpnb measures c before the run,
without communication, so c never contains waits for other ranks.  The module ``emulation`` defines
f, s and u.  On emulated devices, a fault slows the device's clock instead.
A slow rank sleeps before its first backward pass in a step, so that its parameters are older and
its gradient arrives later.  The sleep counts as a part of the forward pass.

A rank is killed between two steps, before the first step that begins at or after the given time.
Before the kill, the rank reports all finished steps.  The rank's unfinished shard is lost.

If one process runs several workers, as in DataParallel, the slowest worker delays the step.
"""

import os
import signal
import time
from functools import partial
from typing import final

from ddpnb.protocol.devices import Compute
from ddpnb.protocol.messages import Mark, MarkKind
from ddpnb.protocol.notation import parse_kills, parse_slow
from ddpnb.rank.device import synchronize, timed
from ddpnb.rank.emulation import ComputeTimes
from ddpnb.rank.training.run import TrainingRun
from ddpnb.rank.worker import Batch, Worker

KILL_TIMEOUT_SECONDS = 1.0
"""Maximum time in seconds that a rank waits for the kernel to kill the rank."""
NUM_TRIALS = 3


def measure_compute_seconds(worker: Worker, batch: Batch) -> float:
    """Take a few forward and backward passes over a batch.  Return the shortest time in seconds."""
    call = partial(worker.compute_gradients, batch)
    return min(timed(call, worker.device) for _ in range(1 + NUM_TRIALS))  # the first is a warm-up


@final
class FaultInjector:
    """Delays or kills this process during a run.  A restarted process is not killed again."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        spec, workers, is_new = run.spec, run.workers, run.here.rejoin_info is None
        self._slow = [fault for fault in parse_slow(spec.slow) if fault.rank in workers]
        kills = parse_kills(spec.kill).items() if is_new else ()
        self._kill = min(((at, rank) for rank, at in kills if rank in workers), default=None)
        """Seconds of training before the kill, and the rank to kill.  None if there is no kill."""
        self._sleeps = run.emulation is None and bool(self._slow or spec.jitter)
        self._own_seconds = 0.0
        """Seconds that a forward and backward pass takes; 0 if no fault depends on this time."""
        if self._sleeps and (spec.jitter > 0 or any(fault.factor > 1 for fault in self._slow)):
            alone = run.worker("m", num_steps=1)
            self._own_seconds = measure_compute_seconds(alone, run.usual_batch())
        own = Compute(0.0, fixed=self._own_seconds)
        self._times = ComputeTimes(compute=own, slow=self._slow, jitter=spec.jitter, seed=spec.seed)
        self.is_active = self._sleeps or self._kill is not None
        """True if ``begin_step`` and ``delay`` have an effect."""
        self._seconds, self._step = 0.0, 0

    def begin(self) -> None:
        """Publish a mark for each slow rank."""
        for fault in self._slow:
            self._run.publish(Mark(rank=fault.rank, seconds=0.0, text=fault.text))

    def begin_step(self) -> None:
        """Let the kernel kill this process if a kill is due; otherwise set the step's delay."""
        if self._kill is not None and self._run.clock.seconds >= self._kill[0]:
            self._die(self._kill[1])
        if self._sleeps:
            lengths = (self._times.step(worker, self._step, 0) for worker in self._run.workers)
            self._seconds = max(lengths) - self._own_seconds
            self._step += 1

    def delay(self) -> None:
        """Sleep for the step's delay; only the first call in a step sleeps."""
        seconds, self._seconds = self._seconds, 0.0
        if seconds <= 0:
            return
        self._run.clock.enter("forward")
        synchronize(self._run.device)  # otherwise a GPU would continue its queued work
        time.sleep(seconds)

    def _die(self, rank: int) -> None:
        """Ask the kernel to kill this process, and wait for the kill.

        If no kernel answers, the process kills itself.
        """
        run = self._run
        run.add(run.clock.stop())  # waits for steps that a GPU has not finished
        run.publish(Mark(rank=rank, seconds=run.clock.seconds, kind=MarkKind.KILLED))
        time.sleep(KILL_TIMEOUT_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)
