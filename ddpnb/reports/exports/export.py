"""Export of a comparison; the ending of the file name chooses the format (kernel).

race.csv        one row per step of each worker
race.runs.csv   one row per run
race.json       everything; for its layout see ``exports/document.py``
race.html       the report: figure, table, sentence, code, environment; self-contained
race.png        the figure
train.py        the comparison's cell as a script for torchrun
logs/race/      a folder that TensorBoard reads
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from ddpnb.protocol.errors import UserError
from ddpnb.reports.exports.document import write_json
from ddpnb.reports.exports.html_report import report_html
from ddpnb.reports.exports.script import write_script
from ddpnb.reports.exports.tensorboard import write_events
from ddpnb.reports.result import PAGE_DPI, ComparisonResult


def export(result: ComparisonResult, path: Path | str) -> str:
    """Write a comparison to a file, in the format that its ending names, or to a folder.

    Args:
        result: the comparison.
        path: see above; missing folders are created, an existing file is replaced.

    Returns:
        One sentence about what was written.

    Raises:
        UserError: the ending is unknown, or the file cannot be written.
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
            f"{target.name} has no ending that can be written.  Choose one of {endings}, "
            "or a name without an ending for a TensorBoard folder."
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
    """Write the self-contained report."""
    path.write_text(report_html(result.comparison, result.plot().png(PAGE_DPI)), encoding="utf-8")
    return "a self-contained report"


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
"""The writer of each ending; it returns what it wrote."""
