"""Sends events to the notebook through a queue, without slowing the training.  Runs on the ranks.

The training thread only appends events.  Twice a second, another thread sends all events in the
queue as one message.
"""

import itertools
import math
import threading
import time
from collections import deque

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
from ddpnb.rank.collectives.intercept import Listener
from ddpnb.rank.collectives.table import CollectiveCall
from ddpnb.rank.engine import RankEngine

FLUSH_SECONDS = 0.5
"""Seconds between two messages.  If the process dies, the events since the last message are lost.
With 0.1 s between two messages, a run that used all cores lost 2 % of its speed."""

NUM_LAST_ATTEMPTS = 3
"""Number of times that ``close`` tries to send the remaining events."""


class Publisher(Listener):
    """Sends a run's events to the notebook, in order, in numbered batches.

    If a message cannot be sent, its events stay in the queue, and the next message contains them.
    The sending thread starts with the first event.  In a cell with a hand-written training loop,
    the publisher listens to collectives, and the first collective starts the clock.  ``run_id`` is
    empty if there is no run.
    """

    def __init__(self, *, rank: int, run_id: str, first_batch: int = 0) -> None:
        self.rank = rank
        self.run_id = run_id
        self.num_batches = first_batch
        self._events: deque[RunHeader | StepEvent | Mark | Evaluating] = deque()
        self.numbers = itertools.count()  # of the steps that ``log`` adds
        self._began_seconds: float | None = None
        self._stop = threading.Event()
        self._starting = threading.Lock()
        self._flushing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None  # of the last message, if it could not be sent

    def begin(self, call: CollectiveCall) -> None:
        """Start the clock if it is not running yet."""
        self.seconds()

    def seconds(self) -> float:
        """Return the seconds since the first call of this method or of ``begin``."""
        now = time.perf_counter()
        self._began_seconds = now if self._began_seconds is None else self._began_seconds
        return now - self._began_seconds

    def publish(self, event: RunHeader | StepEvent | Mark | Evaluating) -> None:
        """Add an event to the queue, in about one microsecond."""
        self._events.append(event)
        if isinstance(event, Mark) and event.kind is MarkKind.KILLED:
            self._flush()  # this process is about to end
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ddpnb-publish", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Send the remaining events and end the sending thread.  May be called twice.

        If the events cannot be sent, raise the error of the last attempt.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            for _ in range(NUM_LAST_ATTEMPTS):
                self._flush()
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        self._flush()  # at once, so that the notebook can show something
        while not self._stop.wait(FLUSH_SECONDS):
            self._flush()

    def _flush(self) -> None:
        with self._flushing:
            events = [self._events[at] for at in range(len(self._events))]  # others may append
            if not events:
                return
            steps = [event for event in events if isinstance(event, StepEvent)]
            evaluating = [event for event in events if isinstance(event, Evaluating)]
            batch = EventBatch(
                run_id=self.run_id,
                rank=self.rank,
                sequence=self.num_batches,
                header=next((event for event in events if isinstance(event, RunHeader)), None),
                rows=b"".join(pack_step(self.rank, step) for step in steps),
                metrics=tuple(
                    (index, name, value)
                    for index, step in enumerate(steps)
                    for name, value in step.metrics.items()
                ),
                marks=tuple(event for event in events if isinstance(event, Mark)),
                evaluating=evaluating[-1] if evaluating else None,
            )
            try:
                publish_data({f"{self.run_id}/{self.num_batches}": batch})
            except Exception as error:  # noqa: BLE001  # the thread's edge
                self._error = error
                return
            self._error = None
            self.num_batches += 1
            for _ in events:
                self._events.popleft()


def log(*, loss: float = math.nan, samples: int = 0, **metrics: float) -> None:
    """Add one step of a hand-written training loop to the run that the cell names.

    Call ``log`` in a ``%%ddp --name mine`` cell, once per step, on every rank that trains.  The
    run's clock starts with the cell's first collective or with the first call of ``log``.

    Args:
        loss: the mean loss over this rank's samples of the step.
        samples: the number of samples that this rank trained on in the step.
        **metrics: further numbers of the step, such as ``accuracy=0.9``.

    Raises:
        UserError: if the cell does not name a run.
    """
    publisher = RankEngine.instance().publisher
    if publisher is None or not publisher.run_id:
        raise UserError("ddpnb.log needs a named run. Start the cell with %%ddp --name NAME.")
    publisher.publish(
        StepEvent(
            step=next(publisher.numbers),
            seconds=publisher.seconds(),
            num_samples=int(samples),
            loss=float(loss),
            metrics={name: float(value) for name, value in metrics.items()},
        )
    )
