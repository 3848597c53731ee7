"""Adapts IPython to a rank, because a rank has no frontend.  Runs on the ranks.

A rank can send output to the notebook, but can receive input from it only in the debugger.  So a
rank prints text that would otherwise appear in a pager or a widget.  A rank also prints the output
of forked processes.  Outside the debugger, functions that ask for input raise an error.
"""

import builtins
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, NoReturn

from ipykernel.iostream import OutStream
from ipyparallel.datapub import publish_data
from IPython.core import page
from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.core.debugger import Pdb
from IPython.utils.tokenutil import token_at_cursor

from ddpnb.compat.asyncio_internals import finds_running_loops, run_in_cell
from ddpnb.compat.ipykernel_internals import keep_no_results, name_cells
from ddpnb.protocol.cell_messages import CellSpec, Prompt
from ddpnb.protocol.errors import UserError
from ddpnb.rank.stack import CELL_NUMBERS

CANNOT_ASK = (
    "A rank has no prompt here. For breakpoint() or input() on rank 1, start the cell with "
    "%%ddp --debug 1. To debug rank 1 after an error, run %ddp_debug 1."
)

AROUND = ("IPython.*", "ipykernel.*", "ddpnb.*")
"""Modules in which the debugger does not stop, for example after the last line of a cell."""


def prepare_shell(shell: Any) -> None:
    """Adapt the IPython shell of a rank."""
    name_of_code = shell.compile.get_code_name
    own, common = f"ipykernel_{os.getpid()}", f"ipykernel_{os.getppid()}"

    def common_name(raw_code: str, transformed_code: str, number: int) -> str:
        """Return the same name on every rank, so that equal tracebacks are shown once."""
        name = str(name_of_code(raw_code, transformed_code, number)).replace(own, common)
        CELL_NUMBERS[name] = number
        return name

    shell.compile.get_code_name = common_name
    name_cells(shell, CELL_NUMBERS)
    shell.set_hook("show_in_pager", page.as_hook(page.display_page), 0)
    os.register_at_fork(after_in_child=adapt_child)
    shell.loop_runner, shell.autoawait = run_in_cell, finds_running_loops.works
    shell.Completer.use_jedi = False  # Jedi's first answer takes a second
    shell.Completer.backslash_combining_completions = False  # IPython 7 first lists all characters
    keep_no_results(shell)
    builtins.input = sys.breakpointhook = refuse
    end_cells_with_exit(shell)
    use_text_bars()


def end_cells_with_exit(shell: Any) -> None:
    """Make ``exit()`` and ``quit()`` end the cell.  IPython's own functions would end the rank.

    Python's ``exit`` would close stdin, and the next opened file would get stdin's descriptor.
    """
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    shell.user_ns.update(exit=sys.exit, quit=sys.exit)
    shell.ask_exit = sys.exit  # for IPython's exit(), which %reset restores


def use_text_bars() -> None:
    """Make tqdm draw progress bars as text, because a rank cannot update tqdm's widgets."""
    with contextlib.suppress(ImportError):  # tqdm may be missing
        std = importlib.import_module("tqdm.std")
        for name in ("autonotebook", "notebook"):
            sys.modules[f"tqdm.{name}"] = std
            setattr(sys.modules["tqdm"], name, std)


def refuse(*args: object, **options: object) -> NoReturn:
    """Raise ``UserError``.  This function replaces ``input`` and ``breakpoint``."""
    raise UserError(CANNOT_ASK)


def completions(shell: Any, source: str, offset: int) -> tuple[str, list[tuple[str, str]]]:
    """Return the text that the completions replace, and the completions as (text, kind) pairs."""
    with provisionalcompleter():
        found = list(rectify_completions(source, shell.Completer.completions(source, offset)))
    start = found[0].start if found else offset
    return source[start:offset], [(each.text, each.type or "") for each in found]


def description(shell: Any, source: str, offset: int, detail_level: int) -> dict[str, Any]:
    """Return the help for the name at ``offset``, as text and as the fields that Colab shows.

    If the name is unknown, return an empty MIME bundle.
    """
    name = token_at_cursor(source, offset)
    try:
        text = shell.object_inspect_mime(name, detail_level)["text/plain"]
    except KeyError:
        return {}
    return {"text/plain": text, "application/json": shell.object_inspect(name, detail_level)}


@contextlib.contextmanager
def questions(spec: CellSpec, rank: int, answers: "SimpleQueue[str | None]") -> Iterator[None]:
    """Route the debugged rank's ``input`` and ``breakpoint`` to the notebook during a cell.

    The debugged rank's control thread puts the lines that the user types into ``answers``.  The
    other ranks do not stop at ``breakpoint()``.
    """
    if spec.debug_rank is None:
        yield
        return
    if spec.debug_rank != rank:
        sys.breakpointhook = lambda *args, **options: None
    else:
        while not answers.empty():
            answers.get()
        builtins.input = lambda prompt="": ask_notebook(
            Prompt(rank=rank, text=str(prompt)), answers
        )
        sys.breakpointhook = lambda *args, **options: Pdb(skip=AROUND).set_trace(sys._getframe(1))
    try:
        yield
    finally:
        if spec.debug_rank == rank:
            sys.settrace(None)  # the debugger may have stepped past the end of the cell
        builtins.input = sys.breakpointhook = refuse


def ask_notebook(prompt: Prompt, answers: "SimpleQueue[str | None]") -> str:
    """Show a prompt in the notebook, and return the line that the user types.

    If the kernel is interrupted or another kernel connects, raise ``EOFError``.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    publish_data({"question": prompt})
    answer = answers.get()
    if answer is None:
        answers.put(None)  # also for the next prompt
        raise EOFError("the notebook was interrupted or has no prompt")
    return answer


def adapt_child() -> None:
    """Let a forked process print to its file descriptors.

    The process does not inherit the thread in which IPython's streams print.  The rank reads the
    output from the descriptors.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if isinstance(getattr(sys, name), OutStream):  # else the user replaced it
            stream = os.fdopen(number, "w", buffering=1, errors="backslashreplace", closefd=False)
            setattr(sys, name, stream)
