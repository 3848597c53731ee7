"""The queue through which events reach the notebook without slowing the training (ranks).

The training thread only appends.  Another thread sends the content twice a second, as one message.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping

from ipyparallel.datapub import publish_data

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import (
    Evaluating,
    EventBatch,
    Mark,
    MarkKind,
    RunHeader,
    StepEvent,
    pack_step,
)
from ddpnb.rank.engine import RankEngine

FLUSH_SECONDS = 0.5
"""How long an event may wait, and is lost if the process dies.  At a fifth of it, a training that
kept all cores busy lost 2 % of its speed."""

Logged = tuple[float, float, int, Mapping[str, float]]
"""One call of ``ddpnb.log``: seconds, loss, samples, metrics."""


class Publisher:
    """Sends a run's events to the notebook, in order, in numbered batches.

    The thread starts with the first event.

    Args:
        rank: this rank.
        run_id: the run that the events belong to; empty if there is none.
        first_batch: the number of the first batch.
    """

    def __init__(self, *, rank: int, run_id: str, first_batch: int = 0) -> None:
        self.rank = rank
        self.run_id = run_id
        self.num_batches = first_batch
        self._header: RunHeader | None = None
        self._evaluating: Evaluating | None = None
        self._rows: deque[bytes] = deque()
        self._step_metrics: deque[tuple[int, Mapping[str, float]]] = deque()
        """Each with the number of its row, counted over all batches."""
        self._num_rows = 0
        self._num_rows_sent = 0
        self._marks: deque[Mark] = deque()
        self._logged: deque[Logged] = deque()
        self._num_logged = 0
        self._started_seconds = time.perf_counter()
        self._stop = threading.Event()
        self._starting = threading.Lock()
        self._flushing = threading.Lock()
        self._thread: threading.Thread | None = None

    def publish(self, event: RunHeader | StepEvent | Mark | Evaluating) -> None:
        """Add an event to the queue; takes two microseconds."""
        if isinstance(event, RunHeader):
            self._header = event
        elif isinstance(event, Evaluating):
            self._evaluating = event
        elif isinstance(event, Mark):
            self._marks.append(event)
            if event.kind is MarkKind.KILLED:
                self._flush()  # this process is about to end
        else:
            if event.metrics:  # before its row, so that no row is sent without them
                self._step_metrics.append((self._num_rows, event.metrics))
            self._rows.append(pack_step(self.rank, event))
            self._num_rows += 1
        if self._thread is None:
            self._start()

    def log(self, loss: float, samples: int, metrics: Mapping[str, float]) -> None:
        """Publish one call of ``ddpnb.log``; the event is made only when it is sent."""
        self._logged.append((time.perf_counter() - self._started_seconds, loss, samples, metrics))
        if self._thread is None:
            self._start()

    def close(self) -> None:
        """Send the rest of the queue and end the thread; may be called twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._flush()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:  # else another thread published the first event meanwhile
                thread = threading.Thread(target=self._run, name="ddpnb-publish", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        self._flush()  # at once, so that the notebook has something to show
        while not self._stop.wait(FLUSH_SECONDS):
            self._flush()

    def _flush(self) -> None:
        with self._flushing:
            self._send()

    def _send(self) -> None:
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        logged = [self._logged.popleft() for _ in range(len(self._logged))]
        marks = [self._marks.popleft() for _ in range(len(self._marks))]
        header, self._header = self._header, None
        evaluating, self._evaluating = self._evaluating, None
        if header is None and evaluating is None and not rows and not logged and not marks:
            return
        num_rows = len(rows)
        found = list(self._take_step_metrics(num_rows))
        for seconds, loss, samples, _ in logged:
            event = StepEvent(
                step=self._num_logged, seconds=seconds, num_samples=samples, loss=loss
            )
            rows.append(pack_step(self.rank, event))
            self._num_logged += 1
        batch = EventBatch(
            run_id=self.run_id,
            rank=self.rank,
            sequence=self.num_batches,
            header=header,
            rows=b"".join(rows),
            metrics=tuple(
                (index, name, value)
                for index, metrics in [
                    *found,
                    *((n, metrics) for n, (*_, metrics) in enumerate(logged, start=num_rows)),
                ]
                for name, value in metrics.items()
            ),
            marks=tuple(marks),
            evaluating=evaluating,
        )
        publish_data({f"{self.run_id}/{self.num_batches}": batch})
        self.num_batches += 1

    def _take_step_metrics(self, num_rows: int) -> Iterator[tuple[int, Mapping[str, float]]]:
        """Yield the metrics of the next rows, each with the index of its row in this batch."""
        first, self._num_rows_sent = self._num_rows_sent, self._num_rows_sent + num_rows
        while self._step_metrics and self._step_metrics[0][0] < self._num_rows_sent:
            number, metrics = self._step_metrics.popleft()
            yield number - first, metrics


def log(*, loss: float = math.nan, samples: int = 0, **metrics: float) -> None:
    """Add one step of a hand-written training loop to the run that the cell names.

    Call it in a ``%%ddp --name mine`` cell, once per step, on every rank that trains.

    Args:
        loss: mean loss over this rank's samples of the step.
        samples: how many samples this rank trained on in the step.
        **metrics: more numbers to store with the step.

    Raises:
        UserError: the cell names no run.
    """
    publisher = RankEngine.instance().publisher
    if publisher is None or not publisher.run_id:
        raise UserError("ddpnb.log needs a run to add to: name one with %%ddp --name NAME.")
    numbers = {name: float(value) for name, value in metrics.items()}
    publisher.log(float(loss), int(samples), numbers)
