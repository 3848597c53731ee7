"""How does a cell run on ranks, from its source to its last output?  (Notebook side.)"""

import contextvars
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from ddpnb.cluster.call import CallEvent, Events, Output, Silent
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.supervision import Watch, failure_in
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import CellSpec, EventBatch, Failure, StaleVariable
from ddpnb.protocol.rank_sets import format_ranks, spoken_ranks
from ddpnb.protocol.remote_call import OnRank
from ddpnb.reports.cell_output import CellOutput
from ddpnb.reports.live import Live, live
from ddpnb.reports.result import ComparisonResult
from ddpnb.runs.model import Status
from ddpnb.runs.recorder import Recorder
from ddpnb.session.errors import (
    CellInterrupt,
    CellTimeoutError,
    RankError,
    StuckError,
    told,
)


class RunningCell:
    """A cell that runs on ranks: its output appears where it was started.

    Args:
        cluster: where it runs.
        spec: the cell.
        ranks: the ranks that run it.
        recorder: keeps what ``ddpnb.log`` publishes; None where the cell names no run.
        timeout: seconds after which the ranks are interrupted.
        is_checked: whether collectives that do not match are named at the call.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: CellSpec,
        ranks: tuple[int, ...],
        *,
        recorder: Recorder | None = None,
        timeout: float | None = None,
        is_checked: bool = False,
    ) -> None:
        self.ranks = ranks
        self.error: BaseException | None = None
        """Why it failed, once it has."""
        self._spec = spec
        self._cluster = cluster
        self._recorder = recorder
        self._live: Live | None = None
        self._output = CellOutput(ranks)
        self._thread: threading.Thread | None = None
        self._begun = time.strftime("%H:%M:%S")
        tell_stale(cluster.ensure_group(is_checked=is_checked))
        self._watch = Watch(
            cluster=cluster,
            call=cluster.submit(OnRank("run_cell"), spec, ranks=ranks),
            handle=self._handle,
            tick=self._draw,
            timeout=timeout,
        )

    @property
    def done(self) -> bool:
        """Whether every rank has ended the cell."""
        return self._watch.call.done

    def run(self) -> None:
        """Attend to the cell until it has ended, showing its output.

        Raises:
            RankError: where it failed on a rank.
            CellTimeoutError: where it took longer than its timeout.
            KeyboardInterrupt: where it was interrupted; the ranks have stopped.
        """
        try:
            self._watch.run()
        except KeyboardInterrupt:
            raise CellInterrupt from None
        finally:
            self._output.close()
            self._end_run()
        self._raise()

    def run_in_background(self) -> None:
        """Attend to the cell in a thread, so that the notebook goes on."""
        here = contextvars.copy_context()  # knows which cell output belongs to
        self._thread = threading.Thread(target=here.run, args=(self._run_quietly,), daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for a cell started with ``--no-wait``; raise what it failed with.

        Args:
            timeout: in seconds; the cell goes on after it.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the cell still runs after {timeout} s")
        if self.error is not None:
            raise self.error

    def interrupt(self) -> None:
        """Stop the cell on all its ranks."""
        self._watch.stop_requested = True

    def __repr__(self) -> str:
        """Say what stays right under the cell that showed it: how it ended, or when it began."""
        cell = f"cell on {spoken_ranks(self.ranks)}"
        if not self.done or (self._thread is not None and self._thread.is_alive()):
            return f"<{cell}, begun {self._begun}; %ddp_status tells how it is>"
        is_stopped = isinstance(self.error, CellInterrupt)
        return f"<{cell}: {'stopped' if is_stopped else 'failed' if self.error else 'finished'}>"

    def _run_quietly(self) -> None:
        try:
            self.run()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  for wait(), shown now
            self.error = error
            print(told(error))

    def _handle(self, event: CallEvent) -> None:
        if isinstance(event, Output):
            self._output.take(event.rank, event.kind, event.content)
        elif isinstance(event, Events):
            self._record(event.batch)
        elif isinstance(event, Silent):
            self._output.finish(event.rank)

    def _record(self, batch: EventBatch) -> None:
        if self._recorder is None:
            return
        self._recorder.add(batch)
        if self._live is None:
            self._live = live()
            self._live.begin(self._recorder.comparison)

    def _draw(self) -> None:
        self._output.show()
        if self._live is not None and self._recorder is not None and self._live.is_due():
            self._live.update(self._recorder.comparison)

    def _end_run(self) -> None:
        if self._recorder is None:
            return
        failed = self._watch.lost or any(map(failure_in, self._watch.returned.values()))
        finished = not failed and len(self._watch.returned) == len(self.ranks)
        status = Status.FAILED if failed else Status.FINISHED if finished else Status.STOPPED
        self._recorder.end(self._spec.run_id, status)
        if self._live is not None:
            self._live.finish(ComparisonResult(self._recorder.comparison))

    def _raise(self) -> None:
        if self._watch.timed_out:
            raise CellTimeoutError(self._watch.timeout or 0.0)
        if self._watch.stop_requested:
            raise CellInterrupt
        if (error := error_of(self._watch)) is not None:
            raise error


MAKE_AGAIN = {
    "DistributedDataParallel": "wrap it again, DistributedDataParallel({name}.module)",
    "FullyShardedDataParallel": "build the model again, and wrap it",
    "FSDPModule": "build the model again, and shard it",
    "ZeroRedundancyOptimizer": "make it again",
    "DeviceMesh": "make it again, with init_device_mesh",
    "ProcessGroup": "form it again, with dist.new_group",
}
"""What to do about an object that is tied to a group that was cut."""


def tell_stale(stale: Mapping[StaleVariable, Sequence[int]]) -> None:
    """Say which of the ranks' variables are tied to a process group that is no more."""
    for tied, ranks in stale.items():
        what = MAKE_AGAIN[tied.kind].format(name=tied.name)
        article = "an" if tied.kind.startswith("FSDP") else "a"
        print(
            f"`{tied.name}` on rank {format_ranks(ranks)} is {article} {tied.kind} of the process "
            f"group that was cut: {what}.",
            file=sys.stderr,
        )


def error_of(watch: Watch) -> StuckError | RankError | UserError | None:
    """Return what a call that has ended failed with, if it did."""
    if watch.cluster.is_over and watch.lost:
        return UserError("The cluster was ended, or left to another kernel, while this ran.")
    if watch.stuck:
        return StuckError(watch.stuck, watch.lost)
    failures = failures_of(watch)
    return RankError(failures) if failures else None


def failures_of(watch: Watch) -> list[Failure]:
    """Return how the call failed, on whichever ranks it did."""
    failures = [f for f in map(failure_in, watch.returned.values()) if f is not None]
    for rank, cause in watch.lost.items():
        log = watch.cluster.log_tail(rank)
        lost = Failure(
            rank=rank, name="RankLost", text=cause, traceback=(log,), failed_at=0.0, is_death=True
        )
        failures.append(lost)
    return failures
