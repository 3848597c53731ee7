"""Which events together are one update, and in what order were they made?  (Notebook side.)

Synchronous workers make step k together: one update.  Asynchronous and logged steps are
each an update of their own, ordered by time.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from ddpnb.protocol.messages import RunHeader, RunSpec
from ddpnb.runs.rows import EVENT, Floats, Records

Steps = NDArray[np.int64]

MAX_BEHIND_STEPS = 20_000
"""A worker that has not told of a step while another is so far ahead is not waited for."""

MAX_SILENT_SECONDS = 2.0
"""Nor is one whose steps are its own, and that has told of nothing for so long."""

MAX_HELD = 50_000
"""Nor is anyone, when so many events are held back."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Updates:
    """Updates in order; arrays of equal length, but for ``rows``."""

    loss: Floats
    """Mean over the update's samples."""
    seconds: Floats
    """Training seconds at its end: of the slowest worker."""
    weight: Floats
    """Samples of this update alone."""
    rows: Records
    """The events, each rank's in the order of its steps; waiting told from communication."""


class StepAligner(ABC):
    """Is given each rank's events as they come; gives back what is complete."""

    @property
    @abstractmethod
    def is_in_order(self) -> bool:
        """Whether what was given back is what it would be, had all events come at once."""

    @abstractmethod
    def add(self, rows: Records) -> Updates:
        """Take in events of one rank; return the updates that are complete by now."""

    @abstractmethod
    def end(self) -> Updates:
        """Return the rest, complete or not; from now on, ``add`` holds nothing back."""


def aligner_of(header: RunHeader | None, spec: RunSpec | None, num_ranks: int = 1) -> StepAligner:
    """Return how the events of a run are joined; without a header, each is an update.

    Args:
        header: what the run turned out to be; a hand-written loop tells of none.
        spec: what is trained.
        num_ranks: how many ranks may tell of a run without a header.
    """
    if header is None or not header.synchronous:
        return InTurns(header.num_workers if header else num_ranks)
    return Together(header.num_workers, spec.batch_size if spec else None)


@final
class InTurns(StepAligner):
    """Orders by time, as far as every worker has told.

    Args:
        num_workers: who must have told before anything is given back.
        now: a clock, for whoever falls silent.
    """

    def __init__(self, num_workers: int, now: Callable[[], float] = time.monotonic) -> None:
        self._num_workers = num_workers
        self._now = now
        self._told: dict[int, float] = {}
        self._heard: dict[int, float] = {}
        self._held: list[Records] = []
        self._first_seconds = now()
        self._given_until = -math.inf
        self._is_in_order = True
        self._is_over = False

    @property
    def is_in_order(self) -> bool:
        """Whether nobody told of an earlier event than one that was given back before."""
        return self._is_in_order

    def add(self, rows: Records) -> Updates:
        """Take in events of one rank; return those that nobody can precede any more."""
        if len(rows):
            rank = int(rows["rank"][0])
            self._told[rank] = max(self._told.get(rank, 0.0), float(rows["seconds"].max()))
            self._heard[rank] = self._now()
            self._held.append(rows)
        return self._give(math.inf if self._is_over else self._known_until())

    def _known_until(self) -> float:
        """Return up to when all who are waited for have told."""
        if sum(map(len, self._held)) > MAX_HELD:
            return math.inf
        oldest = self._now() - MAX_SILENT_SECONDS
        if len(self._told) < self._num_workers and self._first_seconds > oldest:
            return -math.inf
        return min(
            (told for rank, told in self._told.items() if self._heard[rank] > oldest),
            default=math.inf,
        )

    def end(self) -> Updates:
        """Return all that is held."""
        self._is_over = True
        return self._give(math.inf)

    def _give(self, until: float) -> Updates:
        rows = _joined(self._held)
        if len(rows) and float(rows["seconds"].max()) > until:
            is_known = rows["seconds"] <= until
            rows, rest = rows[is_known], rows[~is_known]
            self._held = [rest]
        else:
            self._held = []
        rows = rows[np.argsort(rows["seconds"], kind="stable")]
        if len(rows):
            self._is_in_order &= bool(rows["seconds"][0] >= self._given_until)
            self._given_until = max(self._given_until, float(rows["seconds"][-1]))
        return Updates(
            loss=rows["loss"].astype(np.float64),
            seconds=rows["seconds"].astype(np.float64),
            weight=rows["num_samples"].astype(np.float64),
            rows=rows,
        )


@final
class Together(StepAligner):
    """Joins the workers' shares of each step, in the order of steps.

    Args:
        num_workers: how many tell of each step, or one in the place of all.
        batch_size: over all workers together; None: not known.
    """

    def __init__(self, num_workers: int, batch_size: int | None) -> None:
        self._num_workers = num_workers
        self._batch_size = batch_size
        self._ranks: set[int] = set()
        self._first_share = 0
        self._held: list[Records] = []
        self._next_step = 0
        self._is_over = False

    @property
    def is_in_order(self) -> bool:
        """Always: steps are numbered."""
        return True

    def add(self, rows: Records) -> Updates:
        """Take in events of one rank; return the steps that all have told of."""
        if len(rows):
            self._first_share = self._first_share or int(rows["num_samples"][0])
            self._ranks.add(int(rows["rank"][0]))
            self._held.append(rows)
        return self._give(0 if self._is_over else self._num_tellers())

    def end(self) -> Updates:
        """Return the steps that not all have told of; some may lie behind steps of nobody."""
        self._is_over = True
        return self._give(0)

    def _num_tellers(self) -> int:
        """Return how many ranks tell of each step.

        A process that drives several replicas (``dp``) tells of whole batches; it is
        known by a first step larger than one worker's share.
        """
        if self._batch_size is None or len(self._ranks) != 1:
            return self._num_workers
        largest_share = math.ceil(self._batch_size / self._num_workers)
        return 1 if self._first_share > largest_share else self._num_workers

    def _give(self, num_tellers: int) -> Updates:
        rows = _joined(self._held)
        # of a step that is over already, a late share counts to the next
        step = np.maximum(rows["step"] - self._next_step, 0)
        counts = np.bincount(step) if len(rows) else np.zeros(0, dtype=np.int64)
        is_incomplete = counts < num_tellers
        kept = int(np.argmax(is_incomplete)) if is_incomplete.any() else len(counts)
        kept = max(kept, len(counts) - MAX_BEHIND_STEPS)
        if kept == len(counts):
            self._held = []
        else:
            self._held = [rows[step >= kept]]
            rows, step = rows[step < kept], step[step < kept]
        self._next_step += kept
        return _together(rows, step, kept)


def _together(rows: Records, step: Steps, num_steps: int) -> Updates:
    samples = rows["num_samples"].astype(np.float64)
    weight: Floats = np.bincount(step, samples, num_steps).astype(np.float64)
    weighted = np.where(samples > 0, rows["loss"], 0.0) * samples
    with np.errstate(invalid="ignore", divide="ignore"):
        loss = np.bincount(step, weighted, num_steps) / weight
    seconds = np.full(num_steps, -np.inf)
    np.maximum.at(seconds, step, rows["seconds"])
    told = np.bincount(step, minlength=num_steps) > 0
    return Updates(
        loss=loss[told],
        seconds=seconds[told],
        weight=weight[told],
        rows=waiting_told(rows, step, num_steps),
    )


def waiting_told(rows: Records, step: Steps, num_steps: int) -> Records:
    """Return the rows with waiting told from communication, by when the ranks arrived.

    A rank arrives when it begins to communicate; it waits for the last to arrive.  Where a
    strategy tells its waiting itself, nothing is changed.

        arrival_i = seconds_i - optimizer_i - communication_i
        waiting_i = max over ranks j of arrival_j - arrival_i, at most communication_i

    Args:
        rows: events of whole steps.
        step: of each row, which step, from 0.
        num_steps: how many there are.
    """
    if len(rows) == 0 or rows["waiting"].any() or not rows["communication"].any():
        return rows
    arrival = rows["seconds"] - rows["optimizer"] - rows["communication"]
    last = np.full(num_steps, -np.inf)
    np.maximum.at(last, step, arrival)
    told = rows.copy()
    told["waiting"] = np.clip(last[step] - arrival, 0.0, rows["communication"])
    told["communication"] = rows["communication"] - told["waiting"]
    return told


def _joined(held: list[Records]) -> Records:
    if len(held) == 1:
        return held[0]
    return np.concatenate(held) if held else np.empty(0, dtype=EVENT)
