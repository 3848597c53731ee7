"""Which magics are there, and what does each call?  (Notebook side.)

Every magic parses its line, builds a spec and makes one call of the session.
"""

import re
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import (
    Magics,
    cell_magic,
    line_cell_magic,
    line_magic,
    magics_class,
)
from IPython.core.magic_arguments import argument, kwds
from IPython.display import display

from ddpnb.cluster.detach import waits
from ddpnb.cluster.placement import BACKENDS, DEVICES, ClusterSpec
from ddpnb.cluster.run_folder import remove_leftovers
from ddpnb.magics.arguments import (
    arguments,
    catalogue_text,
    magic_arguments,
    no_arguments,
    training_arguments,
)
from ddpnb.magics.completion import complete_magics
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.reports.display import LiveDisplay
from ddpnb.reports.exports.export import export
from ddpnb.reports.listing import Details
from ddpnb.reports.live import show_result
from ddpnb.reports.plot_options import ACROSS, PlotOptions
from ddpnb.runs.query import Search
from ddpnb.session.choices import make_training_spec
from ddpnb.session.comparison import ComparisonSpec
from ddpnb.session.session import this_cell_number, this_session

if TYPE_CHECKING:
    from ddpnb.magics.panel import Panel


OWN = re.compile(r"^%(%ddp|%rank|ddp_|load_ext|reload_ext|unload_ext)", re.MULTILINE)
"""Magics that stay in the notebook wherever they stand in a cell."""

LOCAL = re.compile(r"^%%local[ \t]*$")


class AutoCells:
    """Puts ``%%ddp`` before every cell while it is on, and takes ``%%local`` away at any time.

    Args:
        shell: the notebook's IPython.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._is_on = False
        self._redirected = ""

    def switch(self, on: bool) -> None:
        """Switch it on or off; again is no harm."""
        self._is_on = on
        self._redirected = ""

    def install(self) -> None:
        """Have every cell pass through ``redirect``."""
        self._shell.input_transformers_cleanup.append(self.redirect)

    def remove(self) -> None:
        """Leave the cells alone; again is no harm."""
        if self.redirect in self._shell.input_transformers_cleanup:
            self._shell.input_transformers_cleanup.remove(self.redirect)

    def redirect(self, lines: list[str]) -> list[str]:
        """Return the cell's lines, sent to the ranks unless they are to stay here."""
        source = "".join(lines)
        if lines and LOCAL.match(lines[0].rstrip("\n")):
            return ["\n", *lines[1:]]  # numbers of lines and cell stay as the notebook's
        if not self._is_on or not source.strip() or OWN.search(source):
            return lines
        self._redirected = source.rstrip("\n")
        return ["%%ddp\n", *lines]

    def has_redirected(self, cell: str) -> bool:
        """Tell whether ``cell`` stood in the notebook without a ``%%ddp`` line before it."""
        return bool(self._redirected) and cell.rstrip("\n") == self._redirected


@magics_class
class DdpMagics(Magics):
    """The magics of ddpnb; ``%ddp_start?`` tells of one."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.auto = AutoCells(shell)
        self.panel: Panel | None = None
        self._own_cell = ""

    @magic_arguments()
    @argument("-n", type=int, default=None, help="number of ranks")
    @argument("--device", default="auto", help=" | ".join(DEVICES))
    @argument("--backend", default="auto", help=" | ".join(BACKENDS))
    @argument("--threads", type=int, default=None, help="CPU threads of each rank")
    @argument("--detach", type=float, default=0.0, help="seconds that the ranks outlive the kernel")
    @argument("--attach", nargs="?", const="", help="take over ranks that outlived their kernel")
    @line_magic
    def ddp_start(self, line: str) -> None:
        """Start the ranks and form the process group.

        One rank per GPU, or ranks on the CPU with gloo where there is none.  Returns
        once every rank has finished an all-reduce.  A cluster that runs already is
        used as it is.

        Ranks started with ``--detach 600`` live on for ten minutes when the kernel ends or
        restarts; ``%ddp_start --attach`` finds them again, with all their variables.
        """
        args = arguments(self.ddp_start, line)
        spec = ClusterSpec(
            num_ranks=args.n,
            device=args.device,
            backend=args.backend,
            num_threads=args.threads,
            detach_seconds=args.detach,
        )
        display, session = LiveDisplay(), this_session()
        if args.attach is None:
            display.show_table(session.start(spec, progress=display.show_text))
        else:
            display.show_table(session.attach(spec, args.attach))

    @line_magic
    def ddp_status(self, line: str) -> None:
        """Show the state of every rank."""
        no_arguments("%ddp_status", line)
        display(this_session().status())

    @line_magic
    def ddp_stop(self, line: str) -> None:
        """End every process of the cluster; nothing happens where none runs."""
        no_arguments("%ddp_stop", line)
        stopped = this_session().stop()
        print("The cluster has stopped." if stopped else "No cluster was running.")

    @magic_arguments()
    @argument("-n", type=int, default=None, help="number of ranks; by default as many as before")
    @argument("--ranks", default=None, help="restart only these, e.g. 1; the others keep all")
    @line_magic
    def ddp_restart(self, line: str) -> None:
        """End the ranks and start them anew; their variables are lost.

        ``%ddp_restart --ranks 1`` brings back one that died, or gives it a fresh start.
        """
        args = arguments(self.ddp_restart, line)
        display, session = LiveDisplay(), this_session()
        if args.ranks is None:
            table = session.restart(args.n, progress=display.show_text)
        else:
            table = session.bring_back(args.ranks, progress=display.show_text)
        display.show_table(table)

    @line_magic
    def ddp_why(self, line: str) -> None:
        """Tell where every rank is right now: cell, line, the collective it waits in, stack."""
        no_arguments("%ddp_why", line)
        print(this_session().why())

    @line_magic
    def ddp_interrupt(self, line: str) -> None:
        """Stop what runs on the ranks in the background; variables are kept.

        That is a cell started with ``%%ddp --no-wait``, or a comparison.

        A cell that the notebook waits for is stopped by the notebook's own interrupt,
        the square button.
        """
        no_arguments("%ddp_interrupt", line)
        print(this_session().interrupt())

    @magic_arguments()
    @argument("--ranks", default=None, help="which ranks, e.g. 0,2-3; by default all")
    @argument("--no-wait", action="store_true", help="go on at once; output follows as it comes")
    @argument("--name", default="", help="the run that ddpnb.log in the cell adds to")
    @argument("--timeout", type=float, default=None, help="seconds before the ranks are stopped")
    @argument("--check", action="store_true", help="compare exact shapes too, and over hosts; slow")
    @cell_magic
    def ddp(self, line: str, cell: str) -> Any:
        """Run the cell on the ranks.

        ``rank``, ``local_rank``, ``world_size`` and ``device`` are defined there.  Each
        line of output is labelled with its rank; equal lines are shown once, as [0-3].
        """
        args = arguments(self.ddp, line)
        return this_session().run_cell(
            cell if self.auto.has_redirected(cell) else below_magic(f"%%ddp {line}", cell),
            ranks=args.ranks,
            wait=not args.no_wait,
            name=args.name,
            timeout=args.timeout,
            check=args.check,
        )

    @cell_magic
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some ranks: ``%%rank 0``, ``%%rank 0,2-3``."""
        if not line.strip():
            raise UserError("Say which ranks: %%rank 0, or %%rank 0,2-3.")
        this_session().run_cell(below_magic(f"%%rank {line}", cell), ranks=line.strip())

    @line_magic
    def ddp_auto(self, line: str) -> None:
        """Send every cell to the ranks: ``%ddp_auto on``, ``%ddp_auto off``.

        While it is on, ``%%local`` keeps a cell in the notebook; so do ddpnb's own magics.
        """
        if line.strip() not in ("on", "off"):
            raise UserError("Say %ddp_auto on, or %ddp_auto off.")
        self.auto.switch(line.strip() == "on")
        print(
            "Every cell runs on the ranks; %%local keeps one here."
            if line.strip() == "on"
            else "Cells run in the notebook again."
        )

    @cell_magic
    def local(self, line: str, cell: str) -> None:
        """Run the cell in the notebook, also while ``%ddp_auto`` is on."""
        no_arguments("%%local", line)
        self.shell.run_cell(below_magic("%%local", cell)).raise_error()

    @magic_arguments()
    @argument("names", nargs="+", help="variables of the notebook")
    @argument("--ranks", default=None, help="which ranks, e.g. 0,2-3; by default all")
    @line_magic
    def ddp_push(self, line: str) -> None:
        """Copy variables of the notebook to the ranks: ``%ddp_push a b``."""
        args = arguments(self.ddp_push, line)
        here = self.shell.user_ns
        if missing := [name for name in args.names if name not in here]:
            raise UserError(f"The notebook has no variable {', '.join(missing)}.")
        this_session().push({name: here[name] for name in args.names}, args.ranks)

    @magic_arguments()
    @argument("expression", nargs="+", help="a variable of the ranks, or an expression")
    @argument("--ranks", default=None, help="which ranks, e.g. 0; by default all")
    @argument("--as", dest="name", default="", help="the notebook's variable that takes it")
    @line_magic
    def ddp_pull(self, line: str) -> Any:
        """Bring a value from the ranks: ``%ddp_pull loss --ranks 0 --as loss``.

        A dict from rank to value; the value itself where ``--ranks`` names one rank.
        """
        args = arguments(self.ddp_pull, line)
        value = this_session().pull(" ".join(args.expression), args.ranks)
        if not args.name:
            return value
        self.shell.user_ns[args.name] = value
        return None

    @magic_arguments()
    @argument("strategies", nargs="*", help=" | ".join(STRATEGIES), metavar="strategy")
    @argument("--repeats", type=int, default=1, help="how often each strategy is trained [1]")
    @argument("--name", default="", help="what the comparison is stored as")
    @argument("--no-baseline", action="store_true", help="do not train `single` as well")
    @argument("--log", action="store_true", help="draw losses on a logarithmic axis")
    @argument("--target", type=float, default=None, help="mark and time when a loss is reached")
    @argument("--no-wait", action="store_true", help="go on at once; the figure follows")
    @training_arguments()
    @kwds(epilog=catalogue_text())
    @line_cell_magic
    def ddp_compare(self, line: str, cell: str = "") -> Any:
        """Train strategies on the same task and compare them, drawn live.

        The cell defines ``model()`` and ``data(split)``, with split "train" or "test",
        and if wanted ``loss(output, target)`` and ``optimizer(params)``.  Without a
        cell, ``--task`` names a built-in task.  A strategy may have options,
        ``ddp:hook=fp16``, and may be a class of your own, ``Averaging:every=2``.
        """
        args = arguments(self.ddp_compare, line)
        if cell.strip():
            self._own_cell = cell
        return this_session().compare(comparison_of(args, line, cell), wait=not args.no_wait)

    @line_magic
    def ddp_panel(self, line: str) -> None:
        """Show controls that do what ``%ddp_compare`` does, while other cells run.

        Its task may be the last ``%%ddp_compare`` cell's.  Shown again, it is the same panel.
        """
        no_arguments("%ddp_panel", line)
        if self.panel is None:
            from ddpnb.magics.panel import Panel  # noqa: PLC0415  matplotlib: 0.3 s

            self.panel = Panel(
                self.shell,
                parse=lambda line, cell: comparison_of(
                    arguments(self.ddp_compare, line), line, cell
                ),
                own_cell=lambda: self._own_cell,
            )
        self.panel.show()

    @magic_arguments()
    @argument("names", nargs="*", help="runs or comparisons, as %%ddp_runs lists them")
    @argument("--x", default="", help=f"{' | '.join(ACROSS)}: draw losses against this alone")
    @argument("--log", action="store_true", help="draw losses on a logarithmic axis")
    @argument("--target", type=float, default=None, help="mark and time when a loss is reached")
    @line_magic
    def ddp_plot(self, line: str) -> Any:
        """Draw stored runs together: ``%ddp_plot mine ddp --log --target 0.3``."""
        args = arguments(self.ddp_plot, line)
        options = PlotOptions(x=args.x, log=args.log, target=args.target)
        result = this_session().load(args.names, options)
        show_result(result)
        return result

    @magic_arguments()
    @argument("name", help="runs or a comparison, as %%ddp_runs lists them")
    @argument("path", help="ends with .csv .runs.csv .json .html .png or .py; a folder else")
    @line_magic
    def ddp_export(self, line: str) -> None:
        """Write stored runs to a file, by its ending.

        ``.csv`` steps, ``.runs.csv`` runs, ``.json`` all of it, ``.html`` the report, ``.png``
        the figure, ``.py`` the comparison's cell as a torchrun script; a folder for TensorBoard.
        """
        args = arguments(self.ddp_export, line)
        print(export(this_session().load([args.name]), args.path))

    @magic_arguments()
    @argument("text", nargs="*", help="stands in the name, the task or the state")
    @argument("--task", default="", help="only runs of this task")
    @argument("--strategy", default="", help="only runs of this strategy")
    @argument("--since", default="", help="only runs begun within 90m, 12h, 2d or 1w")
    @argument("--last", type=int, default=None, help="only so many lines, the newest")
    @argument("--show", metavar="NAME", default="", help="what is needed to repeat it")
    @argument("--rename", metavar=("OLD", "NEW"), nargs=2, help="give a comparison another name")
    @argument("--delete", metavar="NAME", default="", help="forget these runs, for good")
    @line_magic
    def ddp_runs(self, line: str) -> None:
        """List the stored runs, tell all of one, rename or delete some.

        ``%ddp_runs --strategy ddp --since 2d``, ``%ddp_runs --show race``,
        ``%ddp_runs --rename race old-race``, ``%ddp_runs --delete race/async``.
        """
        args, session = arguments(self.ddp_runs, line), this_session()
        if args.rename:
            old, new = args.rename
            print(f"{old} is now called {session.store.rename(old, new)}.")
        elif args.delete:
            print(f"Deleted {', '.join(session.store.delete(args.delete))}.")
        elif args.show:
            display(Details(session.store.load(args.show)))
        else:
            search = Search(
                text=" ".join(args.text),
                task=args.task,
                strategy=args.strategy,
                since=args.since,
                last=args.last,
            )
            display(session.runs(search))


def comparison_of(args: Namespace, line: str, cell: str) -> ComparisonSpec:
    """Return the comparison that a parsed line of ``%%ddp_compare`` and its cell ask for."""
    source = below_magic(f"%%ddp_compare {line}", cell) if cell.strip() else ""
    return ComparisonSpec(
        strategies=tuple(args.strategies),
        training=make_training_spec(vars(args), source=source, cell=this_cell_number()),
        num_repeats=args.repeats,
        name=args.name,
        baseline=not args.no_baseline,
        options=PlotOptions(log=args.log, target=args.target),
    )


def below_magic(magic: str, cell: str) -> str:
    """Return a cell's body under a comment for its first line: line numbers stay right."""
    return cell if cell.startswith("%%") else f"# {magic}\n{cell}"


def load(shell: InteractiveShell) -> None:
    """Register the magics and their completions."""
    magics = DdpMagics(shell)
    magics.auto.install()
    shell.register_magics(magics)
    complete_magics(shell, magics)
    if removed := remove_leftovers():
        print(f"Removed what {len(removed)} crashed cluster(s) had left: {removed[0].name} ...")
    if waits(Path.cwd()):
        print("Ranks wait here for a kernel: %ddp_start --attach takes them, with all variables.")


def unload(shell: InteractiveShell) -> None:
    """End the cluster; cells run in the notebook again."""
    magics = shell.magics_manager.registry["DdpMagics"]
    magics.auto.remove()
    if magics.panel is not None:
        magics.panel.close()
    this_session().stop()
