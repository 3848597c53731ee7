"""Can a training be made?  Found out before anything trains (ranks).

Each mistake is one sentence that says what to do about it.
"""

import math
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Checked, RankState, RunSpec
from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.strategies.worker import Batch, Worker
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.training.context import CHECK, UNNAMED, RunContext, build_context
from ddpnb.rank.training.evaluation import Score, score
from ddpnb.rank.training.fault_injection import measure_compute_seconds
from ddpnb.rank.training.loss_checks import BATCH_NOTE, depends_on_batch
from ddpnb.rank.training.model_checks import attempt, check_model, check_step

CHECKS = "checks"
"""The folder, in that of a run, of the files that a class of the user's own makes in its check."""

MIN_SECONDS_MARGIN = 1.1
"""By how much a run is planned longer than ``--min-seconds``."""

NUM_FEW = 8
"""Samples that a loss is looked at with."""

COLLECTIVES_NOTE = (
    "training_step calls collectives and rank 0 evaluates alone, so the trained model has no loss "
    "beside what validation_step and metric measure."
)


def validate(
    spec: RunSpec,
    *,
    state: RankState,
    namespace: Mapping[str, object],
    folder: Path = Path(),
    filename: str = UNNAMED,
    num_calls: Callable[[], int] = int,
) -> Checked:
    """Check a training before anything trains.

    Each rank may call it alone, as it sends nothing; only the user's own code may, such as a class
    or a step, and takes part with every rank of the group.  A class has its files in a folder of
    ``CHECKS``, which is removed once all ranks have checked.

    The arguments are those of ``loop.run``; ``num_calls`` returns how many collectives this rank
    has called.

    Raises:
        UserError: one sentence that says what is wrong and what to do.
        Exception: whatever the cell itself raises, with its own traceback.
    """
    with preserve_globals(torch.device(state.device)):
        try:
            checks = folder / CHECKS
            context = build_context(spec, state, namespace, folder=checks, filename=filename)
            return _checked(context, num_calls)
        except UserError as error:
            raise _with_place(error, spec.cell, filename) from error.__cause__


def _checked(context: RunContext, num_calls: Callable[[], int]) -> Checked:
    worker = context.worker(CHECK, num_steps=1, is_grouped=False)
    check_model(worker)
    if context.device.type == "cuda" and context.num_data_workers:
        _check_loading(context)
    notes: tuple[str, ...] = ()
    refusal, skips_loss, seconds, num_epochs = "", False, 0.0, 0.0
    if context.is_own:
        batch = _own_batch(context)
        _check_own(context, worker, batch)
    else:
        batch, num_before = _smallest_batch(context), num_calls()
        check_step(worker, batch, context.spec.strategy)
        if (
            depends_on_batch(worker, context.first_batch(NUM_FEW, can_be_split=True))
            and context.plan.num_workers > 1
        ):
            notes = (BATCH_NOTE,)
        if skips_loss := num_calls() > num_before:
            notes += (COLLECTIVES_NOTE,)
            refusal = _collectives_refusal(context)
        usual = context.usual_batch()  # on all ranks at once, as they train
        num_trials = 1 if context.spec.min_seconds is None else 3
        seconds = measure_compute_seconds(worker, usual, min, num_trials=num_trials)
        if context.spec.min_seconds is not None:  # updates and exchanges only make a run longer
            num_steps = MIN_SECONDS_MARGIN * context.spec.min_seconds / seconds
            num_epochs = num_steps / context.schedule.steps_per_epoch
        seconds /= usual.num_samples
    found, judged = Score(), 0.0
    if context.is_evaluated and not refusal:
        num_before = num_calls()
        found, judged = _evaluated(
            context, worker, batch, has_loss=context.has_loss and not skips_loss
        )
        if num_calls() > num_before:
            raise UserError(
                "validation_step or metric calls collectives, and rank 0 evaluates alone, on "
                "samples of the whole split: compute what they return without the other ranks."
            )
    return Checked(
        num_samples=len(context.task.train),
        survives_deaths=context.plan.survives_deaths,
        has_accuracy=not math.isnan(found.accuracy),
        num_epochs=num_epochs,
        notes=notes,
        num_held_out=len(context.task.held_out),
        seconds_per_judged=judged,
        seconds_per_trained=seconds,
        skips_loss=skips_loss,
        refusal=refusal,
    )


def _check_loading(context: RunContext) -> None:
    """Load a batch in other processes, as the run will: a forked one cannot use a GPU.

    See "CUDA in multiprocessing" in torch's notes on multiprocessing.
    """

    def load() -> None:
        with context.source([Shard(step=0, part=0, num_parts=context.plan.num_workers)]) as source:
            next(source)

    attempt("A loading process failed; it cannot use the GPU, so keep samples on the CPU", load)


def _smallest_batch(context: RunContext) -> Batch:
    """Fetch as few samples as the model will ever be called with, which may be too few."""
    schedule, plan, accumulate = context.schedule, context.plan, context.spec.accumulate
    fewest = []
    for size in {schedule.size(0), schedule.size(schedule.smallest_shard(1).step)}:
        if plan.num_ranks > 1 or plan.num_workers == 1:
            share = size // plan.num_workers
            fewest.append(share // min(accumulate, share))
            continue
        num = min(accumulate, size)  # dp splits each micro-batch among the replicas
        for part in (size // num, -(-size // num)):
            fewest.append((part - 1) % -(-part // plan.num_workers) + 1)  # 7 as 3, 3, 1
    # BatchNorm's statistics that include the other ranks' samples need two here.
    return context.first_batch(max(min(fewest), 2 if context.syncs_batchnorm else 1))


def _own_batch(context: RunContext) -> Batch:
    """Fetch this rank's shard of the smallest global batch, with its weight in a real run."""
    num = context.state.world_size
    step = context.schedule.smallest_shard(num).step
    shard = Shard(step=step, part=context.state.rank, num_parts=num)
    return context.batch(shard, context.fetch(shard))


def _check_own(context: RunContext, worker: Worker, batch: Batch) -> None:
    """Have a class of the user's own set up and make one step; takes part: every rank.

    What it does not use of the cell, such as its loss, need not be right.
    """
    strategy = context.strategy()
    if not dist.is_initialized():
        return
    worker.folder.mkdir(mode=0o700, exist_ok=True)
    with closing(strategy):
        strategy.setup(worker)
        strategy.step(batch)


def _collectives_refusal(context: RunContext) -> str:
    """Return why a strategy cannot make steps that call collectives; empty if it can."""
    plan, spec = context.plan, context.spec
    if plan.num_ranks < context.state.world_size:
        reason = "trains on one rank alone, where no other answers"
    elif not plan.synchronous or spec.is_ceiling:
        reason = "has workers that do not make the same steps together"
    else:
        return ""
    return (
        f"training_step calls collectives, and {spec.strategy} {reason}: call them only if "
        f"isinstance(model, DistributedDataParallel), or leave {spec.strategy} out."
    )


def _evaluated(
    context: RunContext, worker: Worker, batch: Batch, *, has_loss: bool
) -> tuple[Score, float]:
    """Evaluate the model on a few samples of each split, so that no run fails only at its end.

    The worker's model is in evaluation mode afterwards.

    Returns:
        The score on held-out samples, and the seconds that a sample takes in a usual batch.
    """
    model, task, device = worker.model.eval(), context.task, worker.device

    def judge(split: str, batch_size: int, max_samples: int) -> Score:
        return score(
            model,
            task,
            device,
            batch_size=batch_size,
            max_samples=max_samples,
            is_held_out=split == "test",
            has_loss=has_loss,
        )

    for split in ("train", "test"):  # two batches, whose outputs a metric needs joined
        failed = f"The model cannot be evaluated on data({split!r})"
        found = attempt(failed, partial(judge, split, batch.num_samples, 2 * batch.num_samples))
    num, seconds = context.usual_batch().num_samples, []
    for _ in range(2):
        began = time.perf_counter()
        num_judged = judge("test", num, num).num_samples
        seconds.append((time.perf_counter() - began) / num_judged)
    return found, min(seconds)


def _with_place(error: UserError, cell: int, filename: str) -> UserError:
    """Return an error that names the line of the comparison's cell where it began, if one is known.

    Args:
        error: its cause is what the cell raised.
        cell: the ``n`` of ``In [n]``; 0 if not known.
        filename: what tracebacks call the cell.
    """
    frames = traceback.extract_tb(error.__cause__.__traceback__) if error.__cause__ else []
    lines = [frame.lineno for frame in frames if frame.filename == filename]
    if not cell or not lines:
        return error
    return UserError(f"{error} (In [{cell}], line {lines[-1]})")
