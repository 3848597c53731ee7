"""Runs a cell on ranks and shows the cell's output.  Runs in the kernel."""

import signal
import sys
from dataclasses import dataclass
from importlib.util import decode_source
from pathlib import Path

from ddpnb.cluster.call import CallEvent, Lost, Output, OutputEnded
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import ensure_group
from ddpnb.cluster.supervision import Watch
from ddpnb.cluster.wording import say
from ddpnb.output.cell_output import CellOutput
from ddpnb.protocol.calls import calls
from ddpnb.protocol.cell_messages import CellReport, CellSpec, Prompt
from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.messages import EventBatch
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.protocol.options import check_options, option
from ddpnb.protocol.processes import RankCommand
from ddpnb.reports.formatting import counted
from ddpnb.reports.inspection.traces import TraceResult, join_traces
from ddpnb.reports.live import Live, LiveFigureAndTable, live
from ddpnb.reports.notebook import show_value, warn
from ddpnb.reports.result import ComparisonResult
from ddpnb.results.recorder import Recorder
from ddpnb.results.run import Status
from ddpnb.session.background import Background
from ddpnb.session.errors import (
    CellInterrupt,
    CellTimeoutError,
    RankError,
    error_of,
    kept,
    warn_stale,
    where_stopped,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOptions:
    """The options of ``%%ddp`` and ``%ddp_run``."""

    ranks: str | None = option(None, "ranks that run the cell; default: all ranks", example="0,2-3")
    wait: bool = option(True, "return at once and show output as it arrives", flag="--no-wait")
    name: str = option("", "store the values of ddpnb.log as a run of this name", example="NAME")
    timeout: float | None = option(
        None, "interrupt the ranks after this many seconds", above=0, example="SECONDS"
    )
    check: bool = option(
        False, "compare the tensor shapes of all ranks in each collective call; slow"
    )
    debug: int | None = option(
        None, "rank to debug: it stops at breakpoint() and shows a prompt", example="RANK"
    )
    trace: bool = option(False, "record every collective and message, and draw a timeline")

    def __post_init__(self) -> None:
        check_options(self)
        if self.debug is not None and not self.wait:
            raise UserError("--debug needs a cell that the notebook waits for. Remove --no-wait.")


class RunningCell(Background):
    """A cell that runs on ranks; its output appears under the notebook cell that started it.

    ``recorder`` records the values of ``ddpnb.log``.  Without ``--name``, ``recorder`` is None.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: CellSpec,
        ranks: tuple[int, ...],
        options: CellOptions,
        recorder: Recorder | None,
    ) -> None:
        super().__init__(f"cell on {spoken_ranks(ranks)}")
        self.ranks = ranks
        self.trace: TraceResult | None = None
        """The trace, if the cell is traced and has ended; otherwise None."""
        self._spec = spec
        self._cluster = cluster
        self._recorder = recorder
        self._has_prompt = True
        """True if the user can answer prompts of the debugged rank."""
        self._live: Live | None = None
        self._output = CellOutput(ranks, self._appear)
        warn_stale(ensure_group(cluster, is_checked=options.check))
        self._dead = cluster.dead
        """The ranks that were dead when the cell began.  Collectives need these ranks too."""
        self._watch = Watch(
            cluster=cluster,
            call=cluster.submit(calls.run_cell(spec), ranks),
            handle=self._handle,
            tick=self._draw,
            timeout=options.timeout,
            notify=warn,
        )

    def run(self) -> None:
        """Show the cell's output until the cell has ended.

        Raises:
            RankError: the cell failed on a rank.
            CellTimeoutError: the cell took longer than its timeout.
            KeyboardInterrupt: the cell was interrupted, and the ranks have stopped.
        """
        error: BaseException | None = None
        try:
            self._watch.run()
            error = self._ending_error()
        except KeyboardInterrupt:
            where = where_stopped(self._watch.call.returned)
            error = CellInterrupt(kept(self._watch), where)
        finally:
            if self._spec.debug_rank is not None and not self._watch.call.done:
                self._answer(self._spec.debug_rank, None)  # the rank may wait for an answer
            self._output.close()
            self._end_run()
            if self._spec.is_traced:
                self._take_trace(is_value=self._thread is None and error is None)
        if error is not None:
            raise error from None

    def interrupt(self) -> None:
        """Stop the cell on all its ranks."""
        super().interrupt()
        self._watch.stop_requested = True

    def _handle(self, event: CallEvent) -> None:
        if isinstance(event, Output):
            self._output.take(event.rank, event.kind, event.content)
        elif isinstance(event, Prompt):
            self._output.show(at_once=True)
            is_over = self._watch.is_stopping or not self._has_prompt
            answer = None if is_over else ask_user(f"[{event.rank}] {event.text}")
            self._has_prompt = answer is not None
            self._answer(event.rank, answer)
        elif isinstance(event, EventBatch) and self._recorder is not None:
            self._recorder.add(event)
            if self._live is None:
                self._live = live()
                self._live.update(self._recorder.comparison)
        elif isinstance(event, OutputEnded | Lost):
            self._output.finish(event.rank)

    def _answer(self, rank: int, answer: str | None) -> None:
        self._cluster.processes.command(rank, RankCommand.ANSWER, answer)

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
        has_finished = len(self._watch.call.returned) == len(self.ranks)
        status = Status.FINISHED if has_finished else Status.STOPPED
        status = Status.FAILED if self._watch.lost or self._watch.failures else status
        self._recorder.end(self._spec.run_id, status)
        if self._live is not None:
            self._live.finish(ComparisonResult(self._recorder.comparison))

    def _take_trace(self, *, is_value: bool) -> None:
        """Merge the ranks' traces; display the trace unless the notebook cell returns the trace."""
        reports = self._watch.call.returned.values()
        recorded = [r.trace for r in reports if isinstance(r, CellReport) and r.trace is not None]
        script, number = self._spec.script, self._spec.execution_count
        name = Path(script.name).name if script else f"Cell {number or ''}".strip()
        states = self._cluster.states
        self.trace = join_traces(
            f"{name} on {counted(len(self.ranks), 'rank')}",
            recorded,
            hosts=[state.host for state in states],
            ranks=self.ranks,
            backend=states[0].backend,
        )
        if not is_value:
            show_value(self.trace)

    def _ending_error(self) -> BaseException | None:
        watch = self._watch
        where = where_stopped(watch.call.returned)
        if watch.timed_out:
            return CellTimeoutError(watch.timeout or 0.0, where, kept(watch))
        if watch.stop_requested:
            return CellInterrupt(kept(watch), where)
        error = error_of(watch)
        failures = error.failures if isinstance(error, RankError) else ()
        if self._dead and failures and all(each.is_consequence for each in failures):
            ended = f"{say(self._dead, 'has')} ended{where}"
            remedy = self._cluster.remedy(self._dead)
            return UserError(f"Collectives need all ranks, but {ended}. {remedy}")
        return error


def read_script(path: str) -> tuple[str, str]:
    """Return a script's absolute path and text; raise UserError if the script cannot be read."""
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
    """Return ``source``, or the text of a file if ``source`` is a path or ends with ``.py``."""
    text = str(source)
    is_file = isinstance(source, Path) or (text.endswith(".py") and "\n" not in text)
    return read_script(text)[1] if is_file else text


def ask_user(question: str) -> str | None:
    """Return the user's answer at the notebook's prompt, or None if the user cannot answer."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(question)
    except (KeyboardInterrupt, EOFError):
        return None
    except NotImplementedError:  # ipykernel's StdinNotImplementedError
        print("This frontend has no prompt, so you cannot enter the rank's input.", file=sys.stderr)
        return None
    finally:
        signal.signal(signal.SIGINT, handler)
