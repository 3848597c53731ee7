"""Which kind of file does a name ask for?  (Notebook side.)

race.csv        one row per step of each worker
race.runs.csv   one row per run
race.json       all of it; the layout stands in ``export.document``
race.html       the report: figure, table, sentence, code, environment; needs no other file
race.png        the figure
train.py        the comparison's cell as a script for torchrun
logs/race/      a folder that TensorBoard reads
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from ddpnb.protocol.errors import UserError
from ddpnb.reports.exports.document import write_json
from ddpnb.reports.exports.html_report import page
from ddpnb.reports.exports.script import write_script
from ddpnb.reports.exports.tensorboard import write_events
from ddpnb.reports.result import PAGE_DPI, ComparisonResult


def export(result: ComparisonResult, path: Path | str) -> str:
    """Write a comparison to a file whose ending says what it becomes, or to a folder.

    Args:
        result: the comparison.
        path: see above; folders on the way are made, a file that is there is replaced.

    Returns:
        What was written, in one sentence.

    Raises:
        UserError: that ending means nothing here, or it cannot be written.
    """
    target = Path(path)
    write = _writer(str(path), target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return f"{target}: {write(result, target)}."
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error}.") from error


def _writer(given: str, target: Path) -> "Writer":
    if target.suffix == "" or given.endswith("/"):
        return write_events
    if target.name.endswith(".runs.csv"):
        return write_runs
    if target.suffix not in WRITERS:
        endings = ", ".join((*WRITERS, ".runs.csv"))
        raise UserError(
            f"{target.name} ends with nothing that can be written; the endings are: {endings}; "
            "a name without one is a folder for TensorBoard."
        )
    return WRITERS[target.suffix]


def write_steps(result: ComparisonResult, path: Path) -> str:
    """Write one row per step of each worker."""
    frame = result.steps()
    frame.to_csv(path, index=False)
    return f"{len(frame):,} rows, one per step of each worker"


def write_runs(result: ComparisonResult, path: Path) -> str:
    """Write one row per run."""
    frame = result.to_frame()
    frame.to_csv(path, index=False)
    return f"{len(frame):,} rows, one per run"


def write_report(result: ComparisonResult, path: Path) -> str:
    """Write a page that needs no other file."""
    path.write_text(page(result.comparison, result.plot().png(PAGE_DPI)), encoding="utf-8")
    return "a page that needs no other file"


def write_figure(result: ComparisonResult, path: Path) -> str:
    """Write the figure alone."""
    path.write_bytes(result.plot().png(PAGE_DPI))
    return "the figure"


Writer = Callable[[ComparisonResult, Path], str]

WRITERS: Mapping[str, Writer] = {
    ".csv": write_steps,
    ".json": write_json,
    ".html": write_report,
    ".png": write_figure,
    ".py": write_script,
}
"""What writes which kind of file, and says what it wrote."""
