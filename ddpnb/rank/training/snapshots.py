"""Copies a run's model during training; evaluates the trained model and the copies afterwards.

ddpnb makes a copy in one pass over the parameters.  If every step waits for all ranks, the clocks
of all ranks are paused while the copy is made.  In an asynchronous run, rank 0 makes the copy
between two of its steps, and the other workers continue to train.  In this case, copying counts as
training time.  Rank 0 evaluates the copies after the training, so no worker waits for an
evaluation.  If an evaluation fails or is interrupted, the results of the training are kept.

A copy made after a step is the model that the run would return if the run ended after this step.
If ranks average weights, a copy contains the mean of all ranks' weights.  Otherwise a copy contains
the server's parameters, or rank 0's parameters if there is no server.  Runs on the ranks.
"""

import contextlib
import copy
import io
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from ddpnb.protocol.errors import summary_of
from ddpnb.protocol.messages import Evaluating, Evaluation, RunReport
from ddpnb.protocol.processes import atomic_write
from ddpnb.rank.collectives.flat import FlatBuffer
from ddpnb.rank.strategies.base import State, Strategy
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.training.evaluation import (
    MAX_SAMPLES,
    estimate_batchnorm,
    has_batchnorm,
    score,
)
from ddpnb.rank.training.run import TrainingRun
from ddpnb.rank.worker import Worker, state_of

MAX_COPIES_BYTES = 1_000_000_000
"""Maximum size in bytes of all copies that a rank keeps in the host's memory."""
MAX_ON_THE_WAY = 2_000
"""Default maximum number of held-out samples on which a copy of the model is evaluated."""
LEAST_ESTIMATED = 500
"""Minimum number of samples for BatchNorm's statistics, even if fewer samples are evaluated."""


@final
class Snapshots:
    """Copies the model every few steps.  Every rank calls ``make`` after the same steps.

    Call ``strategy.setup(worker)`` before you create this object.
    """

    def __init__(self, run: TrainingRun, strategy: Strategy, worker: Worker) -> None:
        plan, rank = run.plan, run.state.rank
        self._run = run
        self._strategy = strategy
        self._worker = worker
        self._is_mean = plan.averages_weights and plan.synchronous
        self._is_kept = rank == 0 or self._is_mean
        self.kept: list[tuple[int, float, State]] = []
        """The copies that have not been evaluated yet.  Each copy has the number of samples that
        all workers had trained on when the copy was made, and the seconds of training."""
        self.is_estimated = (
            plan.averages_weights and plan.num_workers > 1 and has_batchnorm(worker.model)
        )
        """True if BatchNorm's statistics are estimated before each evaluation."""
        self._every = self._steps_between()
        self.due_after = self._due_after(0) if plan.synchronous or rank == 0 else math.inf
        """Number of steps after which the next copy is due."""

    def make(self, shard: Shard) -> None:
        """Copy the model after the step on a shard."""
        num_steps = shard.step + 1
        self.due_after = self._due_after(num_steps)
        if num_steps >= self._run.schedule.num_steps:  # the trained model is evaluated anyway
            return
        run, clock = self._run, self._run.clock
        self._run.add(clock.stop())  # waits for steps that a GPU has not finished
        if not run.plan.synchronous:
            self._copy(shard)
            return
        with clock.paused():
            self._worker.switch_optimizers(training=False)
            self._copy(shard)
            self._worker.switch_optimizers(training=True)
            if run.plan.in_lockstep:
                run.barrier()  # wait until the slowest rank has made its copy

    def average(self) -> None:
        """Replace each copy by the mean of all ranks' copies.  Every rank takes part."""
        model = self._worker.model
        places = dict(model.named_parameters(remove_duplicate=False))  # all names of tied weights
        for _, _, state in self.kept if self._is_mean else ():
            names = [name for name in places if name in state]
            buffer = FlatBuffer([places[name] for name in names])
            buffer.average([state[name] for name in names])

    @torch.no_grad()
    def _copy(self, shard: Shard) -> None:
        state = self._strategy.snapshot()
        if self._is_kept:
            seconds = self._run.clock.seconds
            self.kept.append((self._num_samples(shard), seconds, copy_state(state)))

    def _num_samples(self, shard: Shard) -> int:
        """Return the number of samples that all workers have trained on after a step on ``shard``.

        If workers are synchronous, all shards of this step count as done.  If asynchronous workers
        have no work queue, all shards up to this shard count as done.
        """
        run, world_size = self._run, self._worker.world_size
        num_shards = (shard.step + 1) * world_size
        if not run.plan.synchronous:
            queue = self._strategy.queue
            num_shards = shard.step * world_size + 1 if queue is None else queue.num_shards_done
        step, num_in_step = divmod(num_shards, world_size)
        size = run.schedule.size(step)
        return run.schedule.num_samples_before(step) + size * num_in_step // world_size

    def _due_after(self, num_steps: int) -> float:
        return (num_steps // self._every + 1) * self._every if self._every else math.inf

    def _steps_between(self) -> int:
        """Return the number of steps from one copy to the next; 0 if no copies are made.

        All copies together have at most ``MAX_COPIES_BYTES`` bytes.
        """
        spec, schedule = self._run.spec, self._run.schedule
        if spec.is_ceiling or spec.eval_every == 0:
            return 0
        if spec.eval_every is not None:
            every = max(1, round(spec.eval_every * schedule.steps_per_epoch))
        elif spec.num_points > 1:
            every = max(1, round(schedule.num_steps / spec.num_points))
        else:
            return 0
        tensors = state_of(self._worker.model)  # numel counts all shards
        num_copies = MAX_COPIES_BYTES // sum(each.numel() * each.element_size() for each in tensors)
        return max(every, math.ceil(schedule.num_steps / (num_copies + 1)))


def copy_state(state: State) -> State:
    """Copy a model's state to the host's memory, with the attributes that ``state_dict`` sets."""
    result = copy.copy(state)
    for name, value in state.items():
        if isinstance(value, Tensor):
            result[name] = value.detach().to("cpu", copy=True)
    return result


def load_state(model: nn.Module, state: State) -> None:
    """Load a copy of the model's state.  Steps may have added or resized buffers since the copy."""
    if new := dict(model.named_parameters()).keys() - state.keys():
        raise RuntimeError(f"a later step has added the parameter {min(new)}")
    for name, buffer in model.named_buffers():
        if name in state and state[name].shape != buffer.shape:
            path, _, key = name.rpartition(".")
            setattr(model.get_submodule(path), key, state[name].to(buffer.device, copy=True))
    model.load_state_dict(state, strict=False)


# -- the evaluation on rank 0 ----------------------------------------------------------------


def judged(
    model: nn.Module,
    run: TrainingRun,
    snapshots: Snapshots,
    keep: Callable[[nn.Module], None],
    should_stop: Callable[[], bool],
) -> RunReport:
    """Evaluate the model of a run, and return the run's report with the scores.

    ``keep`` is called with the model before the evaluation.  Then each copy is loaded into the
    model, evaluated and dropped.  If ``should_stop`` returns True, later copies are skipped.
    """
    began, num_done, num_all = time.monotonic(), 0, 2 + len(snapshots.kept)

    def evaluate(split: str, max_samples: int = MAX_SAMPLES) -> tuple[dict[str, float], int]:
        """Publish that an evaluation begins, and evaluate the model on a split."""
        nonlocal num_done
        run.publish(Evaluating(num_done, num_all, time.monotonic() - began))
        num_done += 1
        failed = f"could not evaluate the model on {split} samples" if run.is_evaluated else ""
        found: tuple[dict[str, float], int] = ({}, 0)
        with _marked(run, failed):
            found = score(
                model.eval(),
                run.task,
                run.device,
                max_samples=run.spec.eval_samples or max_samples,
                batch_size=run.spec.batch_size,
                is_held_out=split == "held-out",
                has_loss=run.has_loss,
            )
        return found

    if snapshots.is_estimated:
        _estimate_batchnorm(model, run)
    keep(model)
    _save(model, run)
    report = run.report()
    try:
        held_out, num_held_out = evaluate("held-out")
        loss, accuracy = _known(held_out)
        report = replace(
            report,
            held_out_loss=loss,
            held_out_accuracy=accuracy,
            held_out_metrics=held_out,
            num_held_out=num_held_out,
        )
        report = replace(report, final_loss=_known(evaluate("training")[0])[0])
        curve = []
        is_known = not math.isnan(loss) or not math.isnan(accuracy)
        left = snapshots.kept if is_known and not run.was_stopped else []
        with _marked(run, "could not compute the held-out curve"):
            while left and not should_stop():
                num_samples, seconds, state = left.pop(0)
                load_state(model, state)
                if snapshots.is_estimated:
                    _estimate_batchnorm(model, run)
                loss, accuracy = _known(evaluate("held-out", MAX_ON_THE_WAY)[0])
                if math.isnan(loss) and math.isnan(accuracy):
                    break
                curve.append(Evaluation(num_samples, seconds, loss, accuracy))
        report = replace(report, evaluations=tuple(curve))
    except KeyboardInterrupt:
        report = replace(report, evaluation_was_cut=True)
    return report


def _known(measures: dict[str, float]) -> tuple[float, float]:
    """Remove the loss and the accuracy from measures, and return them; NaN if not measured."""
    return measures.pop("loss", math.nan), measures.pop("accuracy", math.nan)


def _estimate_batchnorm(model: nn.Module, run: TrainingRun) -> None:
    spec = run.spec
    with _marked(run, "could not estimate BatchNorm's statistics"):
        estimate_batchnorm(
            model,
            run.task,
            run.device,
            batch_size=spec.batch_size,
            seed=spec.seed,
            max_samples=max(spec.eval_samples or MAX_SAMPLES, LEAST_ESTIMATED),
        )


@contextlib.contextmanager
def _marked(run: TrainingRun, failed: str) -> Iterator[None]:
    """Catch errors of the user's code.  Publish a mark with ``failed`` if it is not empty."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  the user's model, loss or data may raise anything
        if failed:
            run.mark(f"{failed} ({summary_of(error)})")


def _save(model: nn.Module, run: TrainingRun) -> None:
    """Save the trained weights if the user has named a file; publish a mark if saving fails."""
    path = run.spec.model_file
    if path is None:
        return
    content = io.BytesIO()
    torch.save(model.state_dict(), content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, content.getbuffer())
    except OSError as error:
        run.mark(f"could not save the weights ({error.strerror or error})")
