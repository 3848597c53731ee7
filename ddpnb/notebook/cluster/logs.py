"""What did a process write last, and before it crashed?  (Notebook side.)"""

from pathlib import Path

CRASH = "Fatal Python error"
"""How faulthandler begins what it writes."""
BEFORE_CRASH = 3
"""Lines of a log shown before that."""


def log_tail(folder: Path, name: str, num_lines: int) -> str:
    """Return the last lines that a process wrote to its log, a crash from its beginning.

    With a few lines before a crash: native code often says there why it gives up.

    Args:
        folder: the cluster's run folder.
        name: ``"controller"``, or the rank's number.
        num_lines: how many, at most.
    """
    path = folder / ("controller.log" if name == "controller" else f"rank-{name}.log")
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    crash = next((n for n, line in enumerate(lines) if line.startswith(CRASH)), -num_lines)
    crash = max(0, crash - BEFORE_CRASH) if crash >= 0 else crash
    return "\n".join(lines[crash:][:num_lines])
