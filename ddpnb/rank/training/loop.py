"""The training loop, which trains and evaluates a run of any strategy.  Runs on the ranks.

A run has these phases, in this order.  The clock runs during ``train``.  The clock also runs during
``finish`` if the strategy's plan counts that phase as training.

- build: Load the task and its data, and find out which ranks take part.
- rehearse: Train a warm-up model for a few steps and discard the model.
- prepare: Set up the strategy, fault injection and the source of samples.
- barrier: Let all ranks that take part start together.
- train: Take the measured steps.
- finish: Let the strategy return the trained model.
- evaluate: On rank 0, save the model if the user asked for it. Evaluate the model on training and
  held-out samples. Evaluate the copies that were made during training on held-out samples.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, final

import torch
from torch import nn

from ddpnb.compat.torch_internals import group_store
from ddpnb.protocol.messages import RunReport, RunSpec, StepEvent
from ddpnb.protocol.processes import SERVER_LOCK
from ddpnb.rank.cancellation import RunCancelledError
from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.strategies.asynchronous import RunOverError
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.tasks.batches import Shard, Tree, every_step
from ddpnb.rank.training.agreement import disagreement
from ddpnb.rank.training.evaluation import BATCHNORM_NOTE
from ddpnb.rank.training.fault_injection import FaultInjector
from ddpnb.rank.training.header import header_of
from ddpnb.rank.training.run import Publish, Surroundings, TrainingRun, load_run
from ddpnb.rank.training.snapshots import Snapshots, judged
from ddpnb.rank.worker import Activations, Worker, is_switched

CEILING_SECONDS = 4.0
"""Maximum training time, in seconds, of a ``no-comm`` run that ddpnb adds by itself."""
CEILING_STEPS = 30
"""Maximum number of steps of an added ``no-comm`` run on emulated devices (equally long steps)."""
REHEARSED_STEPS = 3
_NOT_SWITCHED = (
    "The optimizer averages weights (schedule-free). This strategy cannot call the optimizer's "
    "eval() during a run, so the scores are those of the training weights."
)

STEPS_BETWEEN_LOOKS = 8
"""Number of steps between two reads of the target on several hosts, because a read is a message.
On one host the store is a file that a rank reads in about 10 us before each step."""
PAUSE_SECONDS = 0.03
"""Minimum time that a rank waits for a rank that may be blocked."""
POLLS_PER_PAUSE = 16
STEPS_PER_PAUSE = 4
"""Minimum time that a rank waits, in steps of this rank, because other ranks may be slower."""
PATIENCE = 20
"""Factor of the pause after all ranks have read the target, because then no rank is blocked."""


def train(
    spec: RunSpec,
    here: Surroundings,
    *,
    publish: Publish,
    should_stop: Callable[[], bool],
    keep: Callable[[nn.Module], None] = lambda _: None,
) -> RunReport:
    """Train and evaluate one run.  Every rank of the default group takes part.

    On ranks that the strategy does not use, this function returns at once.

    Args:
        spec: the settings of the run.
        here: the rank's surroundings.  The run leaves no files in ``here.folder``.
        publish: called with the header (on rank 0, before the first step) and with each step.
        should_stop: called before each step.  If ``should_stop`` returns True on one rank, the run
            ends on all ranks.  Workers that never wait for each other stop independently.
        keep: called with the trained model, on rank 0, before the evaluation.

    Raises:
        UserError: if there is a mistake that ``validate`` would have found.
        RuntimeError: if another rank ended during the run.
    """
    state = here.state
    with preserve_globals(torch.device(state.device), is_measured=True):
        # -- build ------------------------------------------------------------------------
        run = load_run(spec, here, publish)
        no_part = RunReport(run_id=spec.run_id, rank=state.rank)
        if state.rank >= run.plan.num_ranks:
            return no_part
        run.prepare_clock()
        # -- rehearse ... finish ----------------------------------------------------------
        try:
            model, snapshots = _trained(run, should_stop)
        except RunOverError:
            return no_part
        # -- evaluate ---------------------------------------------------------------------
        if state.rank != 0 or spec.is_ceiling:
            return run.report()
        return judged(model, run, snapshots, keep, should_stop)


def _trained(run: TrainingRun, should_stop: Callable[[], bool]) -> tuple[nn.Module, Snapshots]:
    """Train a run; return the trained model and the copies made during training."""
    with contextlib.ExitStack() as opened:
        # -- rehearse ---------------------------------------------------------------------
        activations = Activations(is_due=True)
        if not run.spec.is_emulated and run.here.rejoin_info is None:
            rehearse(run, activations)
        # -- prepare ----------------------------------------------------------------------
        faults = FaultInjector(run)
        strategy = opened.enter_context(closing(run.strategy()))
        stop = Stop(run, should_stop)
        worker = run.worker(
            "t",
            num_steps=run.schedule.num_steps,
            clock=run.clock,
        )
        worker.activations = activations
        strategy.setup(worker)
        frozen = {n: p for n, p in worker.model.named_parameters() if not p.requires_grad}
        held, switched = {*worker.model.parameters()}, filter(is_switched, worker.optimizers)
        updated = {p for each in switched for group in each.param_groups for p in group["params"]}
        if updated and not (run.plan.synchronous and updated <= held):
            worker.notes.append(_NOT_SWITCHED)
        snapshots = Snapshots(run, strategy, worker)
        if run.state.rank == 0:
            if snapshots.is_estimated:
                worker.notes.append(BATCHNORM_NOTE)
            run.publish(header_of(run, worker))
        source = opened.enter_context(run.source(strategy.shards()))
        # -- barrier ----------------------------------------------------------------------
        run.barrier()
        # -- train ------------------------------------------------------------------------
        with opened.enter_context(closing(run.clock)).running():
            _train(run, strategy, worker, source, stop, faults, snapshots)
            run.note_memory(strategy.memory())
            # -- finish -------------------------------------------------------------------
            is_timed = run.plan.finish_is_timed
            if run.plan.synchronous:
                worker.switch_optimizers(training=False)
            with contextlib.nullcontext() if is_timed else run.clock.paused():
                model = strategy.finish()
            if is_timed:
                run.clock.end()
        plan = run.plan
        if plan.synchronous and plan.num_ranks > 1 and not run.spec.is_ceiling:
            run.warnings = disagreement(model, strategy, frozen)
        if not run.was_stopped:
            snapshots.average()
        lost = [] if strategy.queue is None else map(worker.shard, strategy.queue.lost_shards)
        run.num_lost_samples = sum(map(run.schedule.num_in, lost))
    return model, snapshots


def rehearse(run: TrainingRun, activations: Activations) -> None:
    """Train a warm-up model for a few steps and discard it.  Every rank of the plan takes part.

    The warm-up steps load code, start threads, fill the memory allocator and compile the user's
    model if needed, for every batch size.  The warm-up steps have no other lasting effect.
    """
    num_steps = min(REHEARSED_STEPS, run.schedule.num_steps)
    with preserve_globals(run.device), closing(run.strategy()) as strategy:
        worker = run.worker("r", num_steps=num_steps)
        worker.activations = activations
        strategy.setup(worker)
        for shard in _rehearsed(run, num_steps):
            strategy.step(run.batch(shard))
        strategy.finish()
    del strategy, worker
    release_memory(run.device)


def release_memory(device: torch.device) -> None:
    """Return a GPU's unused memory to the driver, because other ranks and runs may need it."""
    if device.type == "cuda":
        gc.collect()  # DDP and its hooks refer to each other
        torch.cuda.empty_cache()


def _rehearsed(run: TrainingRun, num_steps: int) -> Iterator[Shard]:
    """Yield this rank's shards of the first batches, then a shard of each size not among them.

    Every rank of the plan gets the same number of shards, without using the work queue.
    """
    plan, schedule = run.plan, run.schedule
    rank, num_shards = run.state.rank, plan.num_ranks
    yield from every_step(num_steps, index=rank, num_shards=num_shards)
    smallest = schedule.smallest_shard(1).step
    if plan.synchronous:
        if schedule.size(smallest) != schedule.size(0):
            yield Shard(step=smallest, index=rank, num_shards=num_shards)
        return
    # Workers may get any shard of a step: the first shard is the largest, the last the smallest.
    slices = [
        Shard(step=step, index=each, num_shards=num_shards)
        for step in (0, smallest)
        for each in (0, num_shards - 1)
    ]
    yield from {schedule.num_in(shard): shard for shard in slices}.values()


def _train(
    run: TrainingRun,
    strategy: Strategy,
    worker: Worker,
    source: Iterator[tuple[Shard, Tree]],
    stop: Stop,
    faults: FaultInjector,
    snapshots: Snapshots,
) -> None:
    clock = run.clock
    is_short, is_emulated = run.spec.is_ceiling, run.spec.is_emulated
    most_seconds = CEILING_SECONDS if is_short and not is_emulated else math.inf
    most_steps = CEILING_STEPS if is_short and is_emulated else math.inf
    run.start()
    faults.begin()
    if faults.is_active:
        clock.before_backward = faults.delay
    for step, (shard, tree) in enumerate(source):
        if stop.before(step):
            run.was_stopped = True
            break
        if run.here.cancellation.is_aborted:  # a strategy may never wait for other ranks
            raise RunCancelledError("ddpnb ended this rank's run because another rank failed.")
        batch = run.batch(shard, tree)
        run.num_items += batch.num_samples
        run.num_rows += batch.num_rows
        if faults.is_active:
            faults.begin_step()
        clock.begin_step(batch.num_samples)
        loss = strategy.step(batch)
        if faults.is_active:
            faults.delay()  # if the step had no backward pass
        sent, received = clock.take()
        made = StepEvent(
            num_samples=batch.num_samples,
            staleness=worker.staleness,
            version=worker.version,
            num_bytes_sent=sent,
            num_bytes_received=received,
        )
        run.add(clock.timing(made, {"loss": loss, **worker.metrics}))
        worker.metrics = {}
        if shard.step + 1 >= snapshots.due_after:
            snapshots.make(shard)
        # each rank may end a ceiling by itself, because no-comm has no communication
        if clock.seconds >= most_seconds or step + 1 >= most_steps:
            break
    run.add(clock.stop())


@final
class Stop:
    """Stops all ranks of a run before the same step, however rarely they communicate.

    The ranks agree on a target step in the process group's store:

    - A rank that is asked to stop sets the target to the step after its next step.
    - Every rank reads the target before each step.  A rank before the target goes on at once.  A
      rank beyond the target raises the target to its own step.
    - A rank at the target waits.  If all ranks wait there, all ranks stop.
    - A rank that has not read the target may be blocked in a step that needs a waiting rank.  So,
      after a pause, a waiting rank raises the target by 1, and after later pauses by 2, 4, 8, ...

    Each change of the target is one ``compare_set``, so all ranks see the same changes.  If a rank
    has taken its last step, the target passes the last step, so all ranks take all their steps.
    Workers that never wait for each other stop independently.  ``wanted`` returns True if this rank
    has been asked to stop.
    """

    def __init__(self, run: TrainingRun, wanted: Callable[[], bool]) -> None:
        plan, state = run.plan, run.state
        self._wanted = wanted
        self._key = run.name("stop")
        self._check = run.here.cancellation.check
        self._num_ranks = plan.num_ranks
        self._is_alone = plan.num_ranks == 1 or plan.stops_alone or plan.survives_deaths
        is_on_one_host = state.local_world_size == state.world_size
        self._every = 1 if is_on_one_host else STEPS_BETWEEN_LOOKS
        self._store: Any = None if self._is_alone else group_store()
        self._sign = run.here.folder / SERVER_LOCK if is_on_one_host else os.sep
        self._has_read = False
        self._begun_at = math.nan
        self._shortest = math.inf
        """Seconds of the fastest steps between two reads of the target; infinity if unknown."""

    def before(self, step: int) -> bool:
        """Return True if this rank must stop before ``step``, which has not begun yet."""
        if self._is_alone:
            return self._wanted()
        if step % self._every:
            return False
        if not os.path.exists(self._sign):  # the store would wait a minute for its file
            raise RunCancelledError("The run folder was removed.")
        self._shortest = min(self._shortest, time.monotonic() - self._begun_at)
        if not self._has_read:
            if self._wanted():  # the value is the target, and the number of steps of the next raise
                self._store.compare_set(self._key, "", f"{step + self._every} {self._every}")
            self._has_read = self._store.check([self._key])
            if self._has_read:
                self._store.add(f"{self._key}-read", 1)
        must_stop = self._has_read and self._meets(step)
        self._begun_at = time.monotonic()
        return must_stop

    def _meets(self, step: int) -> bool:
        """Return True if all ranks wait before ``step``; False if the target is a later step."""
        store, key = self._store, self._key
        store.add(f"{key}-steps", 1)
        pause = max(PAUSE_SECONDS, STEPS_PER_PAUSE * self._shortest)
        num_steps, since, is_here = 0, math.nan, False
        while True:
            self._check()
            value = store.get(key).decode()
            target, num_more = map(int, value.split())
            if step < target or num_more == 0:
                return step == target
            changed = f"{step} {self._every}"
            if step == target:
                if not is_here:
                    store.add(f"{key}-{step}", 1)
                    is_here = True
                num_here, num_read, found = (
                    int(store.get(f"{key}-{name}")) for name in (step, "read", "steps")
                )
                if found != num_steps:  # another rank takes steps
                    num_steps, since = found, time.monotonic()
                patience = PATIENCE if num_read == self._num_ranks else 1
                if num_here == self._num_ranks:
                    changed = f"{step} 0"
                elif time.monotonic() - since > patience * pause:
                    changed = f"{step + num_more} {2 * num_more}"
                else:
                    time.sleep(min(pause / POLLS_PER_PAUSE, PAUSE_SECONDS))
                    continue
            store.compare_set(key, value, changed)
