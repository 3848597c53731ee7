"""Checks a run's settings and code before any strategy trains.  Runs on the ranks.

For each mistake, ddpnb raises an error that says what to do.
"""

import math
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from ddpnb.protocol.devices import Compute
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Checked, RunSpec
from ddpnb.rank.device import timed
from ddpnb.rank.emulation import measured
from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.training.evaluation import score
from ddpnb.rank.training.fault_injection import measure_compute_seconds
from ddpnb.rank.training.model_checks import (
    OF_STRATEGIES,
    WITHOUT_GRADIENTS,
    attempt,
    check_loss,
    check_model,
    check_step,
)
from ddpnb.rank.training.run import Surroundings, TrainingRun, load_run
from ddpnb.rank.worker import Batch, Worker

CHECKS_FOLDER = "checks"
"""Name of a folder in the run folder for files that a user's strategy creates during a check."""

MIN_SECONDS_MARGIN = 1.1
"""The planned duration of a run, divided by ``--min-seconds``."""


def validate(spec: RunSpec, here: Surroundings, *, num_calls: Callable[[], int] = int) -> Checked:
    """Check a run's settings and code before any strategy trains.

    If this rank is in a process group, every rank of the group must call this function, because
    the strategy takes one step.  Strategies create files in ``CHECKS_FOLDER``, and ddpnb removes
    this folder after all checks.  ``num_calls`` returns the number of collectives that this rank
    has called.

    Raises:
        UserError: if the run cannot be trained.  The message says what to do.
        Exception: any exception that the cell's code raises, with its traceback.
    """
    with preserve_globals(torch.device(here.state.device), is_measured=True):
        try:
            run = load_run(spec, replace(here, folder=here.folder / CHECKS_FOLDER))
            return _checked(run, num_calls)
        except UserError as error:
            raise _with_place(error, spec.cell, here.filename) from error.__cause__


def _checked(run: TrainingRun, num_calls: Callable[[], int]) -> Checked:
    worker = run.worker("check", num_steps=1)
    check_model(worker)
    if run.is_own:
        batch = _take_step(run, worker)
    else:  # a batch that is as small as the smallest micro-batch of the run
        shard = run.schedule.smallest_shard(run.plan.num_workers)
        share = run.schedule.num_in(shard)
        batch = run.first_batch(share // min(run.spec.accumulate, share))
    num_before = num_calls()

    def refuse_collectives() -> None:
        if num_calls() > num_before:
            raise UserError(
                "The cell's functions call collectives, but only rank 0 evaluates the model. Call "
                "them only in training_step, if isinstance(model, DistributedDataParallel)."
            )

    notes: tuple[str, ...] = ()
    num_epochs = seconds_per_trained = seconds_per_judged = 0.0
    measures: dict[str, float] = {}
    if not run.is_own:
        check_step(worker, batch, run.spec.strategy)
        notes = check_loss(run, worker)
        refuse_collectives()  # before single ranks compute
        if not run.spec.is_emulated and run.state.rank < run.plan.num_ranks:
            usual = run.usual_batch()  # the same ranks compute at once in the training
            seconds = measure_compute_seconds(worker, usual)
            seconds_per_trained = seconds / usual.num_samples
            # updates and communication only make a run longer
            num_steps = MIN_SECONDS_MARGIN * (run.spec.min_seconds or 0.0) / seconds
            num_epochs = num_steps / run.schedule.steps_per_epoch
    if run.is_evaluated:
        measures, seconds_per_judged = _evaluated(run, worker, batch)
    refuse_collectives()
    if not run.is_own and run.plan.synchronous:
        worker.model.train()
        worker.optimizers.clear()
        with attempt(f"{run.spec.strategy} cannot train this model", OF_STRATEGIES):
            _take_step(run, worker)
    return Checked(
        num_samples=len(run.task.train),
        num_held_out=len(run.task.held_out),
        survives_deaths=run.plan.survives_deaths,
        has_accuracy=not math.isnan(measures.get("accuracy", math.nan)),
        num_epochs=num_epochs,
        seconds_per_judged=seconds_per_judged,
        seconds_per_trained=seconds_per_trained,
        notes=notes,
    )


def measure_compute(spec: RunSpec, here: Surroundings) -> Compute:
    """Measure the time of steps on one core: a device's share, and the whole batch of ``single``.

    One rank takes part.
    """
    with preserve_globals(torch.device(here.state.device), is_measured=True):
        run = load_run(spec, here)
        torch.set_num_threads(1)
        worker = run.worker("check", num_steps=1)
        optimizer = worker.optimizer(worker.parameters)
        whole = spec.batch_per_worker or run.schedule.size(0)
        share = max(1, whole // run.state.world_size)

        def take_step(num_samples: int) -> None:
            worker.compute_gradients(run.first_batch(num_samples))
            worker.update(optimizer)

        found = measured(take_step, [whole] if spec.batch_per_worker else [share, whole])
        return found._replace(fixed=found.fixed / min(spec.accumulate, share))  # of one pass


def _take_step(run: TrainingRun, worker: Worker) -> Batch:
    """Set up the strategy and let it take one step.  Every rank takes part.

    Parts of the cell that a user's strategy does not use, such as the loss, are not checked.  The
    returned batch is this rank's shard of the smallest global batch, with the shard's weight.
    """
    num_shards = run.plan.num_ranks
    smallest = run.schedule.smallest_shard(num_shards)
    shard = replace(smallest, index=min(run.state.rank, num_shards - 1))
    batch, strategy = run.batch(shard), run.strategy()
    if dist.is_initialized() and run.state.rank < num_shards:
        worker.folder.mkdir(mode=0o700, exist_ok=True)
        with closing(strategy):
            strategy.setup(worker)
            strategy.step(batch)
            if not (run.is_own and run.plan.synchronous):
                strategy.finish()  # removes hooks; asynchronous ranks wait for each other
    return batch


def _evaluated(run: TrainingRun, worker: Worker, batch: Batch) -> tuple[dict[str, float], float]:
    """Evaluate the model on a few samples of each split, to find errors before the training.

    Return the measures of held-out samples, and the seconds per sample in a usual batch.  Emulated
    runs need no measured times, so their seconds are 0.  Afterwards the worker's model is in
    evaluation mode.
    """
    has_loss = run.has_loss
    judge = partial(score, worker.model.eval(), run.task, worker.device, has_loss=has_loss)
    num = batch.num_samples
    for is_held_out in (False, True):  # two batches, to test joining their outputs
        split = "test" if is_held_out else "train"
        with attempt(f"Evaluating the model on data({split!r}) failed", WITHOUT_GRADIENTS):
            found, _ = judge(batch_size=num, max_samples=2 * num, is_held_out=is_held_out)
    if run.spec.is_emulated:
        return found, 0.0
    usual = min(run.usual_batch().num_samples, len(run.task.held_out))
    again = partial(judge, batch_size=usual, max_samples=usual)
    return found, min(timed(again, worker.device) for _ in range(2)) / usual


def _with_place(error: UserError, cell: int, filename: str) -> UserError:
    """Add the line of the comparison's cell to an error's message, if the line is known.

    ``cell`` is the ``n`` of ``In [n]``, or 0 if unknown.  ``error.__cause__`` has the traceback.
    """
    frames = traceback.extract_tb(error.__cause__.__traceback__) if error.__cause__ else []
    lines = [frame.lineno for frame in frames if frame.filename == filename]
    if not cell or not lines:
        return error
    return UserError(f"{error} (In [{cell}], line {lines[-1]})")
