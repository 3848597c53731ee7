"""Which steps of the workers are one update, and in what order?  (Kernel.)

Synchronous workers make step k together: one update.  Each step of an asynchronous worker, and
each call of ``ddpnb.log``, is an update of its own; these are ordered by time.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from ddpnb.history.database import EVENT, Floats, Records
from ddpnb.protocol.messages import RunHeader, RunSpec

StepIndices = NDArray[np.int64]

MAX_LAG_STEPS = 20_000
"""A synchronous worker that is so far behind another is not waited for."""

MAX_SILENT_SECONDS = 2.0
"""An asynchronous worker that has reported nothing for so long is not waited for."""

MAX_PENDING_EVENTS = 50_000
"""No asynchronous worker is waited for while so many events are pending."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AlignedUpdates:
    """Complete updates in order; arrays of equal length, except ``rows``."""

    loss: Floats
    """Mean over the update's samples."""
    seconds: Floats
    """Training seconds at its end: of the slowest worker."""
    weight: Floats
    """Samples of this update alone."""
    rows: Records
    """Their events, each rank's in the order of its steps, with waiting and communication apart."""


class StepAligner(ABC):
    """Takes each rank's events as they arrive, and returns the updates that are complete."""

    is_in_order = True
    """Whether the updates are the same as if all events had arrived at once."""

    @abstractmethod
    def add(self, rows: Records) -> AlignedUpdates:
        """Add events of one rank; return the updates that are complete now."""

    @abstractmethod
    def end(self) -> AlignedUpdates:
        """Return the rest, complete or not; from now on, ``add`` returns what it is given."""


def make_aligner(header: RunHeader | None, spec: RunSpec | None, num_ranks: int = 1) -> StepAligner:
    """Return the aligner for a run.

    Args:
        header: of the run; None for a hand-written loop.
        spec: what is trained.
        num_ranks: how many ranks may log from a hand-written loop.
    """
    if header is None or not header.synchronous:
        return AsynchronousAligner(header.num_workers if header else num_ranks)
    if spec is None:
        return SynchronousAligner(header.num_workers, None)
    batch_size = spec.global_batch(header.num_workers)
    return SynchronousAligner(header.num_workers, batch_size, is_ceiling=spec.is_ceiling)


@final
class AsynchronousAligner(StepAligner):
    """Orders steps by time, up to the time that every worker has reported.

    An event that arrives after a later one has been returned is out of order.

    Args:
        num_workers: how many workers to wait for.
        now: a monotonic clock.
    """

    def __init__(self, num_workers: int, now: Callable[[], float] = time.monotonic) -> None:
        self._num_workers = num_workers
        self._now = now
        self._began_at = now()
        self._reported_seconds: dict[int, float] = {}
        """Each rank's latest training second."""
        self._arrived_at: dict[int, float] = {}
        self._pending: list[Records] = []
        self._released_until = -math.inf
        self._has_ended = False

    def add(self, rows: Records) -> AlignedUpdates:
        """Add events of one rank; return those that no other event can precede any more."""
        if len(rows):
            rank = int(rows["rank"][0])
            latest = float(rows["seconds"].max())
            self._reported_seconds[rank] = max(self._reported_seconds.get(rank, 0.0), latest)
            self._arrived_at[rank] = self._now()
            self._pending.append(rows)
        return self._release(math.inf if self._has_ended else self._complete_until())

    def end(self) -> AlignedUpdates:
        """Return all that is pending."""
        self._has_ended = True
        return self._release(math.inf)

    def _complete_until(self) -> float:
        """Return the training second that all workers which are waited for have reached."""
        if sum(map(len, self._pending)) > MAX_PENDING_EVENTS:
            return math.inf
        oldest = self._now() - MAX_SILENT_SECONDS
        if len(self._reported_seconds) < self._num_workers and self._began_at > oldest:
            return -math.inf
        return min(
            (
                seconds
                for rank, seconds in self._reported_seconds.items()
                if self._arrived_at[rank] > oldest
            ),
            default=math.inf,
        )

    def _release(self, until: float) -> AlignedUpdates:
        rows = _concatenated(self._pending)
        is_complete = rows["seconds"] <= until
        self._pending = [] if is_complete.all() else [rows[~is_complete]]
        rows = rows[is_complete]
        rows = rows[np.argsort(rows["seconds"], kind="stable")]
        if len(rows):
            self.is_in_order &= bool(rows["seconds"][0] >= self._released_until)
            self._released_until = max(self._released_until, float(rows["seconds"][-1]))
        return AlignedUpdates(
            loss=rows["loss"].astype(np.float64),
            seconds=rows["seconds"].astype(np.float64),
            weight=rows["num_samples"].astype(np.float64),
            rows=rows,
        )


@final
class SynchronousAligner(StepAligner):
    """Joins the workers' shares of each step, in the order of steps.

    Args:
        num_workers: how many workers there are.
        batch_size: over all workers together; None if not known.
        is_ceiling: whether the ranks stop after the same time, and not after the same step.
            Steps that a slower rank did not make are none then.
    """

    def __init__(
        self, num_workers: int, batch_size: int | None, *, is_ceiling: bool = False
    ) -> None:
        self._num_workers = num_workers
        self._batch_size = batch_size
        self._is_ceiling = is_ceiling
        self._ranks: set[int] = set()
        self._first_share = 0
        self._pending: list[Records] = []
        self._next_step = 0
        self._has_ended = False

    def add(self, rows: Records) -> AlignedUpdates:
        """Add events of one rank; return the steps that every rank has reported."""
        if len(rows):
            self._first_share = self._first_share or int(rows["num_samples"][0])
            self._ranks.add(int(rows["rank"][0]))
            self._pending.append(rows)
        return self._release(0 if self._has_ended else self._num_reports())

    def end(self) -> AlignedUpdates:
        """Return the steps that not every rank has reported."""
        if self._is_ceiling:
            return self._release(self._num_reports())
        self._has_ended = True
        return self._release(0)

    def _num_reports(self) -> int:
        """Return how many ranks report each step.

        A process that drives several replicas (``dp``) reports whole batches: its first step
        is larger than one worker's share.
        """
        if self._batch_size is None or len(self._ranks) != 1:
            return self._num_workers
        largest_share = math.ceil(self._batch_size / self._num_workers)
        return 1 if self._first_share > largest_share else self._num_workers

    def _release(self, num_reports: int) -> AlignedUpdates:
        rows = _concatenated(self._pending)
        # A late share of a step that has been returned counts as one of the next step.
        step = np.maximum(rows["step"] - self._next_step, 0)
        counts = np.bincount(step) if len(rows) else np.zeros(0, dtype=np.int64)
        is_incomplete = counts < num_reports
        num_steps = int(np.argmax(is_incomplete)) if is_incomplete.any() else len(counts)
        num_steps = max(num_steps, len(counts) - MAX_LAG_STEPS)
        is_complete = step < num_steps
        self._pending = [] if is_complete.all() else [rows[~is_complete]]
        self._next_step += num_steps
        return _joined(rows[is_complete], step[is_complete], num_steps)


def _joined(rows: Records, step: StepIndices, num_steps: int) -> AlignedUpdates:
    """Return one update for each of ``num_steps`` steps that any rank has reported."""
    samples = rows["num_samples"].astype(np.float64)
    weight: Floats = np.bincount(step, samples, num_steps).astype(np.float64)
    weighted = np.where(samples > 0, rows["loss"], 0.0) * samples
    with np.errstate(invalid="ignore", divide="ignore"):
        loss = np.bincount(step, weighted, num_steps) / weight
    seconds = np.full(num_steps, -np.inf)
    np.maximum.at(seconds, step, rows["seconds"])
    is_reported = np.bincount(step, minlength=num_steps) > 0
    return AlignedUpdates(
        loss=loss[is_reported],
        seconds=seconds[is_reported],
        weight=weight[is_reported],
        rows=_with_waiting(rows, step, num_steps),
    )


def _with_waiting(rows: Records, step: StepIndices, num_steps: int) -> Records:
    """Return the rows with waiting taken out of communication, by when the ranks arrived.

    A rank arrives when it begins to communicate, and waits for the last rank to arrive.  Where
    a strategy reports its waiting itself, nothing is changed.

        arrival_i = seconds_i - optimizer_i - communication_i
        waiting_i = max over ranks j of arrival_j - arrival_i, at most communication_i

    Args:
        rows: events of whole steps.
        step: the step of each row, from 0.
        num_steps: how many there are.
    """
    if len(rows) == 0 or rows["waiting"].any() or not rows["communication"].any():
        return rows
    arrival = rows["seconds"] - rows["optimizer"] - rows["communication"]
    last = np.full(num_steps, -np.inf)
    np.maximum.at(last, step, arrival)
    changed = rows.copy()
    changed["waiting"] = np.clip(last[step] - arrival, 0.0, rows["communication"])
    changed["communication"] = rows["communication"] - changed["waiting"]
    return changed


def _concatenated(pending: list[Records]) -> Records:
    if len(pending) == 1:
        return pending[0]
    return np.concatenate(pending) if pending else np.empty(0, dtype=EVENT)
