"""A cell that runs on ranks, from its source to its last output; a training's check (kernel)."""

import contextvars
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import decode_source
from pathlib import Path
from typing import Any

from IPython.display import display

from ddpnb.cluster.call import Asked, CallEvent, Events, Output, Silent
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.supervision import Watch, failure_in
from ddpnb.history.model import Status
from ddpnb.history.recorder import Recorder
from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.messages import (
    CellReport,
    CellSpec,
    Checked,
    EventBatch,
    Failure,
    OnRank,
    RunSpec,
    StaleVariable,
)
from ddpnb.protocol.notation import format_ranks, spoken_ranks
from ddpnb.protocol.processes import RankCommand
from ddpnb.reports.cell_output import CellOutput, PrintedLines
from ddpnb.reports.formatting import counted
from ddpnb.reports.inside.traces import TraceResult, joined
from ddpnb.reports.live import Live, LiveFigureAndTable, live
from ddpnb.reports.result import ComparisonResult
from ddpnb.session.errors import (
    CellInterrupt,
    CellTimeoutError,
    HangError,
    LackingRankError,
    RankError,
    render_error,
    where_stopped,
)


class SupervisedCall:
    """A call on ranks that a thread may supervise while the notebook runs other cells."""

    _watch: Watch

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.error: BaseException | None = None
        """Why it failed, once it has."""
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether every rank has ended it, and the group is left as the next cell needs it."""
        return self._watch.is_settled

    def run_in_background(self) -> None:
        """Supervise it in a thread, so that the notebook can run other cells."""
        self._thread = cell_thread(self._run_in_thread)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for a cell started with ``--no-wait``; raise its error if it failed.

        After ``timeout`` seconds the cell continues, and a TimeoutError is raised.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the cell is still running after {timeout} s")
        if self.error is not None:
            raise self.error

    def interrupt(self) -> None:
        """Stop it on all its ranks."""
        self._watch.stop_requested = True

    def _run_in_thread(self) -> None:
        raise NotImplementedError


class RunningCell(SupervisedCall):
    """A cell that runs on ranks; its output appears under the notebook cell that started it.

    Args:
        recorder: records what ``ddpnb.log`` publishes; None if the cell names no run.
        timeout: seconds after which the ranks are interrupted.
        is_checked: whether torch compares every collective across the ranks.
        on_trace: takes the trace of a cell that is traced, once it has ended.
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
        on_trace: Callable[[TraceResult], None] = lambda _: None,
    ) -> None:
        super().__init__(ranks)
        self.trace: TraceResult | None = None
        """Of a cell that is traced, once it has ended."""
        self._on_trace = on_trace
        self._spec = spec
        self._cluster = cluster
        self._recorder = recorder
        self._prompt = None if spec.debug_rank is None else Prompt(cluster, spec.debug_rank)
        self._live: Live | None = None
        self._output = CellOutput(ranks, self._appear)
        self._started = time.strftime("%H:%M:%S")
        warn_stale(cluster.ensure_group(is_checked=is_checked))
        if cluster.without_group:
            print(cluster.without_group, file=sys.stderr)
        self._dead = cluster.dead
        """The ranks that had ended before; then the others are in a group with them."""
        self._watch = Watch(
            cluster=cluster,
            call=cluster.submit(OnRank("run_cell"), spec, ranks=ranks),
            handle=self._handle,
            tick=self._draw,
            timeout=timeout,
        )

    def run(self) -> None:
        """Show the cell's output until it has ended.

        Raises:
            RankError: it failed on a rank.
            CellTimeoutError: it took longer than its timeout.
            KeyboardInterrupt: it was interrupted; the ranks have stopped.
        """
        try:
            self._watch.run()
        except KeyboardInterrupt:
            raise CellInterrupt(self._where(), self._lost) from None
        finally:
            if self._prompt is not None and not self._watch.call.done:
                self._prompt.close()
            self._output.close()
            self._note_names()
            self._end_run()
            self._take_trace()
        self._raise()

    def __repr__(self) -> str:
        """Describe the cell in words that stay true in a saved notebook."""
        cell = f"cell on {spoken_ranks(self.ranks)}"
        if not self.done or (self._thread is not None and self._thread.is_alive()):
            return f"<{cell}, started {self._started}; %ddp_status shows its state>"
        is_stopped = isinstance(self.error, CellInterrupt)
        return f"<{cell}: {'stopped' if is_stopped else 'failed' if self.error else 'finished'}>"

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  wait() raises it
            self.error = error
            print(render_error(error))

    def _handle(self, event: CallEvent) -> None:
        if isinstance(event, Output):
            self._output.take(event.rank, event.kind, event.content)
        elif isinstance(event, Asked):
            self._output.show(at_once=True)
            if self._prompt is not None:
                self._prompt.answer(event.text, is_over=self._watch.is_stopping)
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
            self._live.update(self._recorder.comparison)

    def _draw(self) -> None:
        self._output.show()
        if self._live is not None and self._recorder is not None and self._live.is_due():
            self._live.update(self._recorder.comparison)

    def _appear(self) -> None:
        if isinstance(self._live, LiveFigureAndTable):
            self._live.appear("")

    def _end_run(self) -> None:
        if self._recorder is None:
            return
        has_failed = self._watch.lost or any(map(failure_in, self._watch.returned.values()))
        has_finished = len(self._watch.returned) == len(self.ranks)
        ending = Status.FINISHED if has_finished else Status.STOPPED
        status = Status.FAILED if has_failed else ending
        self._recorder.end(self._spec.run_id, status)
        if self._live is not None:
            self._live.finish(ComparisonResult(self._recorder.comparison))

    def _take_trace(self) -> None:
        if not self._spec.is_traced:
            return
        reports = self._watch.returned.values()
        recorded = [r.trace for r in reports if isinstance(r, CellReport) and r.trace is not None]
        number = self._spec.execution_count
        name = (
            Path(self._spec.script.name).name
            if self._spec.script
            else f"Cell {number or ''}".strip()
        )
        title = f"{name} on {counted(len(self.ranks), 'rank')}"
        states = self._cluster.states
        hosts, backend = [state.host for state in states], states[0].backend
        trace = joined(title, recorded, hosts=hosts, ranks=self.ranks, backend=backend)
        self.trace = TraceResult(trace)
        self._on_trace(self.trace)
        if self._thread is not None or self._ending_error() is not None:
            display(self.trace)  # else it is the value of the notebook's cell

    def _note_names(self) -> None:
        for rank, report in self._watch.returned.items():
            if isinstance(report, CellReport):
                self._cluster.names[rank] = report.names

    def _raise(self) -> None:
        if (error := self._ending_error()) is not None:
            raise error

    def _ending_error(self) -> BaseException | None:
        if self._watch.timed_out:
            return CellTimeoutError(self._watch.timeout or 0.0, self._where(), self._lost)
        if self._watch.stop_requested:
            return CellInterrupt(self._where(), self._lost)
        error = error_of(self._watch)
        failures = error.failures if isinstance(error, RankError) else ()
        if self._dead and failures and all(each.is_consequence for each in failures):
            return LackingRankError(self._dead, self._where())
        return error

    @property
    def _lost(self) -> Collection[int]:
        """The ranks that the cell has cost, and that can be brought back."""
        return () if self._cluster.is_over else self._watch.lost

    def _where(self) -> str:
        reports = [r for r in self._watch.returned.values() if isinstance(r, CellReport)]
        return where_stopped({report.rank: report.failure for report in reports})


def read_script(path: str) -> tuple[str, str]:
    """Return a script's absolute path and its text.

    Raises:
        UserError: there is none, or it is not a text.
    """
    script = Path(path).expanduser().absolute()
    try:
        return str(script), decode_source(script.read_bytes())
    except FileNotFoundError:
        near = closest(script.stem, [each.stem for each in script.parent.glob("*.py")])
        advice = f"; did you mean {near.replace(' or ', '.py or ')}.py?" if near else "."
        raise UserError(f"There is no script {script.name} in {script.parent}{advice}") from None
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a script: {error}.") from None


def cell_in(source: Path | str) -> str:
    """Return a cell: the text itself, or that of a file if it is a path, or a name with ``.py``.

    Raises:
        UserError: there is no such file, or it is not a text.
    """
    text = str(source)
    is_file = isinstance(source, Path) or (text.endswith(".py") and "\n" not in text)
    return read_script(text)[1] if is_file else text


class Prompt:
    """Asks the user what a rank asks, with the notebook's own ``input``.

    Args:
        cluster: of the rank.
        rank: the one that asks.
    """

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self._cluster = cluster
        self._rank = rank
        self._is_over = False

    def answer(self, question: str, *, is_over: bool = False) -> None:
        """Ask the user; send the answer, or that there will be none any more."""
        self._is_over |= is_over
        answer = None if self._is_over else self._ask(f"[{self._rank}] {question}")
        self._cluster.processes.command(self._rank, RankCommand.ANSWER, answer)

    def close(self) -> None:
        """End the rank's wait for an answer, if there is one."""
        self._cluster.processes.command(self._rank, RankCommand.ANSWER, None)

    def _ask(self, question: str) -> str | None:
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return input(question)
        except (KeyboardInterrupt, EOFError):
            self._is_over = True
        except NotImplementedError:  # ipykernel's StdinNotImplementedError
            self._is_over = True
            print("This frontend has no prompt: the rank gets no answer.", file=sys.stderr)
        finally:
            signal.signal(signal.SIGINT, handler)
        return None


def cell_thread(function: Callable[[], None]) -> threading.Thread:
    """Return a thread whose output appears under the notebook cell that is running now."""
    context = contextvars.copy_context()  # holds the cell that output belongs to
    return threading.Thread(target=context.run, args=(function,), daemon=True)


REMEDIES = {
    "DistributedDataParallel": "wrap it again, DistributedDataParallel({name}.module)",
    "FullyShardedDataParallel": "build the model again, and wrap it",
    "FSDPModule": "build the model again, and shard it",
    "ZeroRedundancyOptimizer": "make it again",
    "DeviceMesh": "make it again, with init_device_mesh",
    "ProcessGroup": "form it again, with dist.new_group",
}
"""What to do about an object that belongs to an aborted process group."""


def warn_stale(stale: Mapping[StaleVariable, Sequence[int]]) -> None:
    """Print which variables of the ranks belong to a process group that was aborted."""
    for variable, ranks in stale.items():
        remedy = REMEDIES[variable.kind].format(name=variable.name)
        article = "an" if variable.kind.startswith("FSDP") else "a"
        where = f"rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}"
        print(
            f"`{variable.name}` on {where} is {article} {variable.kind} of a process group that "
            f"was aborted: {remedy}.",
            file=sys.stderr,
        )


def error_of(watch: Watch) -> HangError | RankError | UserError | None:
    """Return the error of a call that has ended; None if it succeeded."""
    if watch.cluster.is_over and watch.lost:
        return UserError("The cluster was stopped, or handed to another kernel, while this ran.")
    if watch.hang:
        return HangError(watch.hang, watch.lost)
    failures = failures_of(watch)
    return RankError(failures) if failures else None


def failures_of(watch: Watch) -> list[Failure]:
    """Return the failures of a call, those of dead ranks among them."""
    failures = [f for f in map(failure_in, watch.returned.values()) if f is not None]
    for rank, cause in watch.lost.items():
        log = watch.cluster.log_tail(rank)
        lost = Failure(
            rank=rank, name="RankLost", text=cause, traceback=(log,), failed_at=0.0, is_death=True
        )
        failures.append(lost)
    return failures


def check_on_ranks(cluster: Cluster, spec: RunSpec, printed: PrintedLines) -> Checked:
    """Check a training on every rank; return what rank 0 found, and add what was ``printed``.

    Raises:
        UserError: a choice does not fit the training.
        RankError: the cell itself failed.
        KeyboardInterrupt: the check was interrupted; the ranks have stopped.
    """
    found: dict[int, Checked] = ask(cluster, OnRank("validate"), spec, printed=printed)
    _check_sizes(found)
    return found[0]


def ask(
    cluster: Cluster, function: OnRank, *arguments: Any, printed: PrintedLines | None = None
) -> dict[int, Any]:
    """Return what each rank answers; a failure on one frees the others.

    Args:
        cluster: idle.
        function: takes part: every rank.
        arguments: of the function.
        printed: takes what the ranks print; None: it is shown at the end.

    Raises:
        UserError: a mistake that a rank has found.
        RankError: anything else that has failed on a rank.
        HangError: the ranks waited for each other without end.
        KeyboardInterrupt: it was interrupted; the ranks have stopped.
    """
    lines = PrintedLines() if printed is None else printed

    def handle(event: CallEvent) -> None:
        if isinstance(event, Output):
            lines.take(event.rank, event.kind, event.content)

    lines.begin(cluster.ranks)
    watch = Watch(
        cluster=cluster,
        call=cluster.submit(function, *arguments, ranks=cluster.ranks),
        handle=handle,
        tick=lambda: None,
        abort_after_failure_seconds=cluster.timeouts.abort_validation_after_seconds,
    )
    try:
        watch.run()
    except KeyboardInterrupt:
        raise CellInterrupt(lost=watch.lost) from None
    finally:
        if printed is None:
            lines.show()
    failures = failures_of(watch)
    by_text: dict[str, list[int]] = {}
    for failure in failures:
        if failure.name == UserError.__name__:
            by_text.setdefault(failure.text, []).append(failure.rank)
    if by_text:
        text, ranks = min(by_text.items(), key=lambda item: min(item[1]))
        on_all = len(ranks) == len(cluster.ranks)
        raise UserError(text if on_all else f"On {spoken_ranks(ranks)} alone: {text}")
    if (error := error_of(watch)) is None:
        return watch.returned
    own = [each for each in failures if not (each.is_consequence or each.is_death)]
    if isinstance(error, HangError) and own:
        raise RankError(failures)  # the others waited for the rank that failed
    raise error


def _check_sizes(found: Mapping[int, Checked]) -> None:
    """Refuse a training split whose size differs between ranks."""
    by_size: dict[int, list[int]] = {}
    for rank, checked in sorted(found.items()):
        by_size.setdefault(checked.num_samples, []).append(rank)
    if len(by_size) > 1:
        sizes = [f"{size} samples on {spoken_ranks(on)}" for size, on in by_size.items()]
        raise UserError(
            f"data('train') has {' and '.join(sizes)}; return the same data on every rank, "
            "each rank trains on its own part."
        )
