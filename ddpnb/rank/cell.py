"""How does a notebook cell run on this rank?  As a real IPython cell.  (Rank side.)"""

import re
import time

from ddpnb.rank.engine import RankEngine
from ddpnb.rank.publish import Publisher
from ddpnb.wire import CellReport, CellSpec, Failure

CLOSED_CONNECTION = re.compile(r"Connection (closed|reset) by peer|Broken pipe|Socket closed")
"""What gloo says on a rank whose peer has gone, or whose own sockets were cut."""


def run_cell(spec: CellSpec, engine: RankEngine) -> CellReport:
    """Run the cell in this rank's IPython and report how it ended.

    Output, displayed figures and the last expression's value leave by the engine's
    own output channel while the cell runs.
    """
    shell = engine.kernel.shell
    shell.execution_count = spec.execution_count
    with Publisher(rank=engine.group.rank, run_id=spec.run_id) as publisher:
        engine.publisher = publisher
        result = shell.run_cell(spec.source, store_history=True)
    error = result.error_before_exec or result.error_in_exec
    return CellReport(
        rank=engine.group.rank,
        failure=None if error is None else failure_of(error, engine),
        num_batches_sent=publisher.num_batches,
    )


def failure_of(error: BaseException, engine: RankEngine) -> Failure:
    """Describe an exception that has just been caught, for the notebook."""
    formatter = engine.kernel.shell.InteractiveTB
    lines = formatter.structured_traceback(type(error), error, error.__traceback__)
    return Failure(
        rank=engine.group.rank,
        name=type(error).__name__,
        text=str(error),
        traceback=tuple(lines),
        failed_at=time.time(),
        is_consequence=is_consequence(error),
    )


def is_consequence(error: BaseException) -> bool:
    """Tell whether an exception says only that the connection to another rank is gone."""
    return isinstance(error, RuntimeError) and CLOSED_CONNECTION.search(str(error)) is not None
