"""Supervises calls that neither run a cell nor train a model.  Runs in the kernel."""

from collections.abc import Sequence

from ddpnb.cluster.call import CallEvent, Output
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.supervision import Watch
from ddpnb.output.cell_output import PrintedLines
from ddpnb.protocol.calls import Result
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.session.errors import CellInterrupt, HangError, RankError, error_of, failures_of, kept


def ask(
    cluster: Cluster,
    request: Result,
    ranks: Sequence[int] | None = None,
    *,
    printed: PrintedLines | None = None,
) -> dict[int, Result]:
    """Send a request to ranks and return their answers.  If a rank fails, release the other ranks.

    By default, all ranks get the request.  ``printed`` collects the ranks' output.  If ``printed``
    is None, the output is shown at the end.

    Raises:
        UserError: a rank reported a mistake of the user, or one of the ranks is running a cell.
        RankError: a rank failed in any other way.
        HangError: the ranks waited for each other without end.
        KeyboardInterrupt: the call was interrupted, and the ranks have stopped.
    """
    chosen = cluster.ranks if ranks is None else tuple(ranks)
    cluster.require_idle(chosen)
    lines = PrintedLines() if printed is None else printed
    lines.end()

    def handle(event: CallEvent) -> None:
        if isinstance(event, Output):
            lines.take(event.rank, event.kind, event.content)

    watch = Watch(
        cluster=cluster,
        call=cluster.submit(request, chosen),
        handle=handle,
        abort_after_failure_seconds=cluster.timeouts.abort_validation_after_seconds,
    )
    try:
        watch.run()
    except KeyboardInterrupt:
        raise CellInterrupt(kept(watch)) from None
    finally:
        if printed is None:
            lines.show()
    error = error_of(watch)
    if isinstance(error, UserError):  # the cluster has ended
        raise error
    mistakes: dict[str, list[int]] = {}
    failures = failures_of(watch)
    for failure in failures:
        if failure.name == UserError.__name__:
            mistakes.setdefault(failure.text, []).append(failure.rank)
    if mistakes:
        text, on = min(mistakes.items(), key=lambda item: min(item[1]))
        raise UserError(text if len(on) == len(chosen) else f"Only on {spoken_ranks(on)}: {text}")
    if error is None:
        return watch.call.returned
    own = [each for each in failures if not (each.is_consequence or each.is_death)]
    if isinstance(error, HangError) and own:
        raise RankError(failures, cluster.remedy)  # the other ranks waited for the rank that failed
    raise error
