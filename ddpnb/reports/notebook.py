"""Shows output under a notebook cell, also while later cells run.  Runs in the kernel.

A kernel shows all output under the cell that runs now.  For output of background work, ``CELL``
names the cell that started the work.
"""

import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import clear_output, display

Bundle = Mapping[str, Any]

CELL: ContextVar[Bundle | None] = ContextVar("cell", default=None)
"""The request that began the cell of the background work in this thread; otherwise None."""


def current_cell() -> Bundle | None:
    """Return the request of the cell under which output appears; None outside a kernel."""
    kernel = getattr(get_ipython(), "kernel", None)
    return CELL.get() or (None if kernel is None else kernel.get_parent("shell"))


def write(stream: str, text: str) -> None:
    """Write text to the cell's stdout or stderr, and flush it to keep both streams in order."""
    if text and not _send("stream", {"name": stream, "text": text}):
        file = sys.stderr if stream == "stderr" else sys.stdout
        file.write(text)
        file.flush()


def warn(text: str) -> None:
    """Write a line to the cell's stderr."""
    write("stderr", f"{text}\n")


def show(
    data: Bundle, metadata: Bundle | None = None, *, name: str = "", update: bool = False
) -> None:
    """Show a MIME bundle.  If ``update``, replace the content of all displays with this name."""
    options = {"metadata": metadata or {}, "transient": {"display_id": name} if name else {}}
    if not _send("update_display_data" if update else "display_data", {"data": data, **options}):
        display(data, raw=True, update=update, **options)


def show_value(value: object) -> None:
    """Show an object, as a notebook shows the value of a cell."""
    shell: Any = get_ipython()
    if CELL.get() is None:
        display(value)
    else:
        show(*shell.display_formatter.format(value))


def clear(*, wait: bool) -> None:
    """Clear the cell's output.  If ``wait``, clear it when the next output arrives."""
    if not _send("clear_output", {"wait": wait}):
        clear_output(wait=wait)


def _send(kind: str, content: Bundle) -> bool:
    """Send a message from background work.  Return False if this is not background work."""
    if (cell := CELL.get()) is not None:
        kernel = get_ipython().kernel  # type: ignore[union-attr]
        kernel.session.send(kernel.iopub_socket, kind, content, parent=cell, ident=kind.encode())
    return cell is not None
