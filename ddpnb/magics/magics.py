"""Loads the magics, and adapts those that do more than their function.  Runs in the kernel."""

import atexit
import functools
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from ddpnb import api
from ddpnb.cluster.processes import preload
from ddpnb.course.checking import check_exercise
from ddpnb.declaration import MAGICS, adapter, magic
from ddpnb.hosts.spec import HostsSpec
from ddpnb.magics.arguments import arguments, function_of
from ddpnb.magics.completion import Completion
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.options import Option, read_options
from ddpnb.protocol.processes import remove_leftovers
from ddpnb.reports.formatting import counted
from ddpnb.reports.live import LiveDisplay, LiveFigureAndTable
from ddpnb.reports.result import ComparisonResult
from ddpnb.session.comparison_spec import ComparisonSpec, make_comparison
from ddpnb.session.session import this_cell_number, this_session
from ddpnb.session.variables import push

if TYPE_CHECKING:
    from ddpnb.magics.panel import Panel

_named = functools.partial(Option, default="", example="NAME")


@adapter("ddp_start")
def _start(**choices: Any) -> None:
    shown, spec = LiveDisplay(), HostsSpec(**read_options(HostsSpec, choices))
    shown.show_table(this_session().start(spec, progress=shown.show_text))


@adapter("ddp_restart")
def _restart(n: int | None = None, *, ranks: str | None = None) -> None:
    shown = LiveDisplay()
    shown.show_table(this_session().restart(n, ranks=ranks, progress=shown.show_text))


@adapter("ddp_stop")
def _stop() -> None:
    print("The cluster has stopped." if api.stop() else "No cluster was running.")


@magic("rank")
def _rank(*ranks: str, source: str) -> None:
    """Run the cell on some ranks: ``%%rank 0`` or ``%%rank 0,2-3``.

    Args:
        *ranks: numbers of the ranks to use, such as 0,2-3.
        source: the cell.
    """
    if not ranks:
        raise UserError("%%rank needs the ranks to run on: %%rank 0, or %%rank 0,2-3.")
    api.run_cell(source, ranks=" ".join(ranks))


@adapter("ddp_push")
def _push(*variables: str, ranks: str | None = None) -> None:
    here = InteractiveShell.instance().user_ns
    if not variables:
        raise UserError("%ddp_push needs the names of variables: %ddp_push a b.")
    if missing := [name for name in variables if name not in here]:
        raise UserError(f"The notebook has no variable {', '.join(missing)}. Define it first.")
    push(this_session().free_cluster(), {name: here[name] for name in variables}, ranks)


@adapter("ddp_pull", as_=_named(flag="--as", about="notebook variable that gets the result"))
def _pull(as_: str = "", **choices: Any) -> Any:
    value = api.pull(**choices)
    if not as_:
        return value
    InteractiveShell.instance().user_ns[as_] = value
    return None


@adapter("ddp_compare")
def _compare(*strategies: str, **choices: Any) -> Any:
    return this_session().compare(_spec_of(*strategies, **choices))


def _spec_of(*strategies: str, source: str, **choices: Any) -> ComparisonSpec:
    return make_comparison(strategies, choices, source=source, cell=this_cell_number())


def comparison_of(line: str, cell: str) -> ComparisonSpec:
    """Return the comparison that a line of ``%%ddp_compare`` and its cell describe."""
    strategies, choices = arguments("ddp_compare", line, cell)
    return _spec_of(*strategies, **choices)


@functools.cache
def the_panel() -> "Panel":
    """Return the kernel's only panel."""
    from ddpnb.magics.panel import Panel  # noqa: PLC0415  matplotlib: 0.3 s

    return Panel(InteractiveShell.instance(), comparison_of)


@magic("ddp_panel")
def _panel() -> None:
    """Show controls that start and stop comparisons in the background: ``%ddp_panel``.

    The panel also offers the task of the latest ``%%ddp_compare`` cell.
    """
    the_panel().show()


@adapter("ddp_plot")
def _plot(*names: str, **choices: Any) -> ComparisonResult | None:
    if not names and this_session().show_live():
        return None
    result = api.plot(*names, **choices)
    LiveFigureAndTable().show(result)
    return result


@adapter(
    "ddp_runs",
    show=_named(flag="--show", about="show everything needed to repeat this comparison"),
    delete=_named(flag="--delete", about="delete these runs and their weights"),
)
def _runs(*text: str, show: str = "", delete: str = "", **choices: Any) -> None:
    if delete:
        print(f"Deleted {', '.join(api.delete(delete))}.")
    else:
        display(api.details(show) if show else api.runs(" ".join(text), **choices))


@magic("ddp_exercise", show=print)
def _exercise(number: str = "") -> str:
    """Check your answer to an exercise, or show a hint: ``%ddp_exercise 3.2``.

    Args:
        number: number of the exercise, such as 3.2.
    """
    return check_exercise(number, InteractiveShell.instance().user_ns)


def load(shell: InteractiveShell) -> None:
    """Register the magics and their completion, and start to import torch for the ranks."""
    for each in MAGICS.values():
        shell.magics_manager.register_function(function_of(each), each.kind, each.name)
    Completion(shell).install()
    if removed := remove_leftovers():
        print(f"Removed files of {counted(len(removed), 'crashed cluster')}: {removed[0].name} ...")
    if this_session().num_ranks is None:
        preload.start()
        atexit.register(this_session().stop)


def unload(shell: InteractiveShell) -> None:
    """Stop the cluster and remove the completion."""
    Completion(shell).remove()
    if the_panel.cache_info().currsize:
        the_panel().close()
        the_panel.cache_clear()
    this_session().stop()
