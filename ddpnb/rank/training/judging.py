"""On rank 0, evaluates a run's trained model and the copies made during training.

If an evaluation fails or is interrupted, the results of the training are kept.  Runs on the ranks.
"""

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import final

import torch
from torch import nn

from ddpnb.protocol.errors import summary_of
from ddpnb.protocol.messages import Evaluating, Evaluation, RunReport
from ddpnb.protocol.processes import atomic_write
from ddpnb.rank.training.evaluation import MAX_SAMPLES, Score, estimate_batchnorm, score
from ddpnb.rank.training.run import Run
from ddpnb.rank.training.snapshots import Snapshots, load_state

MAX_ON_THE_WAY = 2_000
"""Default maximum number of held-out samples on which a copy of the model is evaluated."""
LEAST_ESTIMATED = 500
"""Minimum number of samples for BatchNorm's statistics, even if fewer samples are evaluated."""


def judged(
    model: nn.Module,
    run: Run,
    snapshots: Snapshots,
    keep: Callable[[nn.Module], None],
    should_stop: Callable[[], bool],
) -> RunReport:
    """Evaluate the model of a run, and return the run's report with the scores.

    ``keep`` is called with the model before the evaluation.  Then each copy is loaded into the
    model, evaluated and dropped.  If ``should_stop`` returns True, later copies are skipped.
    """
    judge = _Judge(model, run, snapshots)
    judge.estimate_batchnorm()
    keep(model)
    _save(model, run)
    report = run.report()
    try:
        held_out = judge.score(is_held_out=True)
        report = replace(
            report,
            held_out_loss=held_out.loss,
            held_out_accuracy=held_out.accuracy,
            held_out_metrics=held_out.metrics,
            num_held_out=held_out.num_samples,
        )
        report = replace(report, final_loss=judge.score(is_held_out=False).loss)
        if held_out.is_known and not run.was_stopped:
            report = replace(report, evaluations=judge.curve(should_stop))
    except KeyboardInterrupt:
        report = replace(report, evaluation_was_cut=True)
    return report


@final
class _Judge:
    def __init__(self, model: nn.Module, run: Run, snapshots: Snapshots) -> None:
        self._model = model
        self._run = run
        self._snapshots = snapshots
        self._num_all = 2 + len(snapshots.kept)
        self._num_done = 0
        self._began = time.monotonic()

    def estimate_batchnorm(self) -> None:
        """Estimate BatchNorm's statistics again if the weights are means over ranks."""
        if not self._snapshots.is_estimated:
            return
        run = self._run
        spec = run.spec
        with self.marked("could not estimate BatchNorm's statistics"):
            estimate_batchnorm(
                self._model,
                run.task,
                run.device,
                batch_size=spec.batch_size,
                seed=spec.seed,
                max_samples=max(spec.eval_samples or MAX_SAMPLES, LEAST_ESTIMATED),
            )

    def score(self, *, is_held_out: bool, max_samples: int = MAX_SAMPLES) -> Score:
        """Publish that an evaluation begins, and evaluate the model on a split."""
        seconds = time.monotonic() - self._began
        self._run.publish(Evaluating(self._num_done, self._num_all, seconds))
        self._num_done += 1
        run = self._run
        split = "held-out" if is_held_out else "training"
        failed = f"could not evaluate the model on {split} samples" if run.is_evaluated else ""
        found = Score()
        with self.marked(failed):
            found = score(
                self._model.eval(),
                run.task,
                run.device,
                max_samples=run.spec.eval_samples or max_samples,
                batch_size=run.spec.batch_size,
                is_held_out=is_held_out,
                has_loss=run.has_loss,
            )
        return found

    def curve(self, should_stop: Callable[[], bool]) -> tuple[Evaluation, ...]:
        """Evaluate all copies, and return the scores.  The model has the last copy's weights."""
        found = []
        left = self._snapshots.kept
        with self.marked("could not compute the held-out curve"):
            while left and not should_stop():
                num_samples, seconds, state = left.pop(0)
                load_state(self._model, state)
                self.estimate_batchnorm()
                point = self.score(is_held_out=True, max_samples=MAX_ON_THE_WAY)
                if not point.is_known:
                    break
                found.append(Evaluation(num_samples, seconds, point.loss, point.accuracy))
        left.clear()
        return tuple(found)

    @contextlib.contextmanager
    def marked(self, failed: str) -> Iterator[None]:
        """Catch errors of the user's code.  Publish a mark with ``failed`` if it is not empty."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  the user's model, loss or data may raise anything
            if failed:
                self._run.mark(f"{failed} ({summary_of(error)})")


def _save(model: nn.Module, run: Run) -> None:
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
