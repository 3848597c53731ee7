"""The magics: each parses its line, and calls its twin in ``ddpnb.api`` or the session (kernel)."""

from argparse import REMAINDER
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, kwds, magic_arguments
from IPython.display import display

from ddpnb import api
from ddpnb.course.checking import check_exercise
from ddpnb.hosts.spec import HostsSpec
from ddpnb.magics.arguments import arguments, catalogue_text, no_arguments, options
from ddpnb.magics.completion import Completion
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import InspectSpec
from ddpnb.protocol.options import options_of, read_options
from ddpnb.protocol.processes import remove_leftovers
from ddpnb.protocol.replicas import SamplerSpec
from ddpnb.protocol.trace import SHOWN, TRACE, CollectiveSpec
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.formatting import counted
from ddpnb.reports.inside.replicas import ReplicaCheck
from ddpnb.reports.inside.samples import Handout
from ddpnb.reports.live import LiveDisplay, LiveFigureAndTable
from ddpnb.reports.style import PlotOptions
from ddpnb.scaling.predict import Question
from ddpnb.session.cells import CellOptions
from ddpnb.session.comparison_spec import ComparisonSpec, make_comparison
from ddpnb.session.inside import INSPECTED
from ddpnb.session.session import this_cell_number, this_session
from ddpnb.session.variables import push

if TYPE_CHECKING:
    from ddpnb.magics.panel import Panel

RANKS = "the ranks, such as 0,2-3; by default all"
RUNS = "as %%ddp_runs lists them"


@magics_class
class DdpMagics(Magics):
    """The magics of ddpnb; ``%ddp_start?`` explains one."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.completion = Completion(shell, self)
        self.panel: Panel | None = None

    @magic_arguments()
    @options(options_of(HostsSpec))
    @line_magic
    def ddp_start(self, line: str) -> None:
        """Start the ranks and form the process group.

        It returns once every rank has finished an all-reduce.  A cluster that is already
        running is used as it is.

        ``--devices 8xV100 --as resnet50`` starts eight ranks, and has all comparisons compute the
        time of such devices, unless they say ``--devices real``: docs/emulated-devices.md.

        ``--hosts a:4,b:4`` starts four ranks on each of two hosts that ssh reaches,
        ``--engines slurm -n 16 --ranks-per-host 8`` sixteen in a job of two, ``--profile NAME``
        as a profile of ipyparallel says: docs/hosts.md.
        """
        choices, display = vars(arguments(self.ddp_start, line)), LiveDisplay()
        spec = HostsSpec(**read_options(HostsSpec, choices))
        display.show_table(this_session().start(spec, progress=display.show_text))

    @line_magic
    def ddp_status(self, line: str) -> None:
        """Show what every rank is doing."""
        no_arguments("%ddp_status", line)
        display(api.status())

    @line_magic
    def ddp_stop(self, line: str) -> None:
        """End every process of the cluster."""
        no_arguments("%ddp_stop", line)
        was_running = api.stop()
        print("The cluster has stopped." if was_running else "No cluster was running.")

    @magic_arguments()
    @argument("-n", type=int, help="number of ranks; by default as before")
    @argument("--ranks", help="replace only these; the others keep their variables")
    @line_magic
    def ddp_restart(self, line: str) -> None:
        """End the ranks and start new ones; their variables are lost.

        ``%ddp_restart --ranks 1`` replaces one rank, dead or alive.
        """
        args, display = arguments(self.ddp_restart, line), LiveDisplay()
        progress = display.show_text
        display.show_table(this_session().restart(args.n, ranks=args.ranks, progress=progress))

    @line_magic
    def ddp_why(self, line: str) -> None:
        """Show where every rank is right now: cell, line, collective, stack."""
        no_arguments("%ddp_why", line)
        print(api.why())

    @line_magic
    def ddp_interrupt(self, line: str) -> None:
        """Stop what runs on the ranks in the background; variables are kept.

        In the background run cells and comparisons started with ``--no-wait`` or by the panel.
        To stop a cell that the notebook waits for, interrupt the kernel (the square button).
        """
        no_arguments("%ddp_interrupt", line)
        print(api.interrupt())

    @magic_arguments()
    @options(options_of(CellOptions))
    @cell_magic
    def ddp(self, line: str, cell: str) -> Any:
        """Run the cell on the ranks.

        ``rank``, ``local_rank``, ``world_size`` and ``device`` are defined there.  Each
        line of output is labelled with its rank; equal lines are shown once, as [0-3].
        """
        source = with_magic_line(f"%%ddp {line}", cell)
        return api.run_cell(source, **vars(arguments(self.ddp, line)))

    @magic_arguments()
    @argument("script", help="its path, from the notebook's folder; with -m a module's name")
    @argument("arguments", nargs=REMAINDER, help="its own arguments")
    @argument("-m", dest="module", action="store_true", help="run a module, as torchrun -m does")
    @argument("-i", dest="keep", action="store_true", help="keep its variables for later cells")
    @options(options_of(CellOptions))
    @line_magic
    def ddp_run(self, line: str) -> Any:
        """Run a script for torchrun on the ranks: ``%ddp_run train.py --epochs 3``.

        It runs unchanged, in a ``__main__`` of its own; where it forms a process group, it has the
        cluster's.  Options of ``%ddp_run`` stand before it: ``%ddp_run --timeout 60 train.py``.
        """
        if not line.strip():
            raise UserError("Name the script: %ddp_run train.py --epochs 3.")
        return api.run_script(**vars(arguments(self.ddp_run, line, unquote=True)))

    @cell_magic
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some ranks: ``%%rank 0`` or ``%%rank 0,2-3``."""
        if not line.strip():
            raise UserError("Name the ranks: %%rank 0, or %%rank 0,2-3.")
        api.run_cell(with_magic_line(f"%%rank {line}", cell), ranks=line.strip())

    @line_magic
    def ddp_exercise(self, line: str) -> None:
        """Check an exercise of the lessons, and give a hint: ``%ddp_exercise 3.2``."""
        print(check_exercise(line.strip(), self.shell.user_ns))

    @magic_arguments()
    @argument("rank", type=int, help="one rank; the others keep their variables")
    @line_magic
    def ddp_debug(self, line: str) -> None:
        """Look into a rank's last error in a cell with IPython's debugger: ``%ddp_debug 1``.

        To stop at a line, write ``breakpoint()`` there and run the cell with ``%%ddp --debug 1``.
        """
        api.debug(arguments(self.ddp_debug, line).rank)

    @magic_arguments()
    @argument("names", nargs="+", metavar="variable", help="a variable of the notebook")
    @argument("--ranks", help=RANKS)
    @line_magic
    def ddp_push(self, line: str) -> None:
        """Copy variables of the notebook to the ranks: ``%ddp_push a b``."""
        args = arguments(self.ddp_push, line)
        here = self.shell.user_ns
        if missing := [name for name in args.names if name not in here]:
            raise UserError(f"The notebook has no variable {', '.join(missing)}.")
        push(this_session().free_cluster(), {name: here[name] for name in args.names}, args.ranks)

    @magic_arguments()
    @argument("expression", nargs="+", help="evaluated on the ranks; usually a variable")
    @argument("--ranks", help=RANKS)
    @argument("--as", dest="name", metavar="NAME", help="assign it to this notebook variable")
    @line_magic
    def ddp_pull(self, line: str) -> Any:
        """Copy a value from the ranks: ``%ddp_pull loss --ranks 0 --as loss``.

        The result is a dict from rank to value; if ``--ranks`` names one rank, its value.
        """
        args = arguments(self.ddp_pull, line)
        value = api.pull(" ".join(args.expression), ranks=args.ranks)
        if not args.name:
            return value
        self.shell.user_ns[args.name] = value
        return None

    @magic_arguments()
    @argument("strategies", nargs="*", help=" | ".join(STRATEGIES), metavar="strategy")
    @options(options_of(ComparisonSpec))
    @options(options_of(PlotOptions, "log", "target", "panels"))
    @options(options_of(TrainingSpec))
    @kwds(epilog=catalogue_text())
    @line_cell_magic
    def ddp_compare(self, line: str, cell: str = "") -> Any:
        """Train strategies on the same task and compare them, drawn live.

        The cell defines ``model()`` and ``data(split)``, where split is "train" or "test".
        It may also define ``loss(outputs, targets)``, ``training_step(model, batch)``,
        ``metric(outputs, targets)``, ``optimizer(params)``: docs/your-code.md.  Without a
        cell, ``--task`` names a built-in task.  A strategy may have options, as in
        ``ddp:hook=fp16``, and may be a class in the cell, as in ``Averaging:every=2``.
        """
        return this_session().compare(comparison_of(line, cell))

    @line_magic
    def ddp_panel(self, line: str) -> None:
        """Show controls for ``%ddp_compare``; it trains in the background.

        The task may also be that of the latest ``%%ddp_compare`` cell.
        """
        no_arguments("%ddp_panel", line)
        if self.panel is None:
            from ddpnb.magics.panel import Panel  # noqa: PLC0415  matplotlib: 0.3 s

            self.panel = Panel(self.shell, comparison_of)
        self.panel.show()

    @magic_arguments()
    @argument("names", metavar="name", nargs="*", help=f"a run or a comparison, {RUNS}")
    @options(options_of(PlotOptions))
    @line_magic
    def ddp_plot(self, line: str) -> Any:
        """Draw stored runs in one figure: ``%ddp_plot mine ddp --log --target 0.3``.

        Without a name: the comparison that trains, as after the page was loaded anew, or else the
        latest one.
        """
        choices = vars(arguments(self.ddp_plot, line))
        names = choices.pop("names")
        if not names and this_session().show_live():
            return None
        result = api.plot(*names, **choices)
        LiveFigureAndTable().show(result)
        return result

    @magic_arguments()
    @argument("name", help=f"a run or a comparison, {RUNS}")
    @argument("path", help="the file")
    @line_magic
    def ddp_export(self, line: str) -> None:
        """Write stored runs to a file; its ending chooses what.

        ``.csv``: every step; ``.runs.csv``: a line per run; ``.html``: the report; ``.png``: the
        figure; ``.py``: the comparison as a script for torchrun, which needs only torch.
        """
        args = arguments(self.ddp_export, line)
        print(api.export(args.name, args.path))

    @magic_arguments()
    @argument("text", nargs="*", help="only runs whose name, task or state contains this")
    @argument("--last", metavar="N", type=int, help="only this many lines, the newest")
    @argument("--show", metavar="NAME", help="show all that is needed to repeat a comparison")
    @argument("--delete", metavar="NAME", help="delete runs and their weights")
    @line_magic
    def ddp_runs(self, line: str) -> None:
        """List stored runs; show or delete some.

        ``%ddp_runs ddp --last 9``, ``%ddp_runs --show race``, ``%ddp_runs --delete race/async``.
        """
        args = arguments(self.ddp_runs, line)
        if args.delete:
            print(f"Deleted {', '.join(api.delete(args.delete))}.")
        elif args.show:
            display(api.details(args.show))
        else:
            display(api.runs(" ".join(args.text), last=args.last))

    @magic_arguments()
    @argument("strategy", metavar="NAME", help="a strategy, such as ddp-by-hand")
    @line_magic
    def ddp_source(self, line: str) -> None:
        """Show the source of a strategy: ``%ddp_source ddp-by-hand``.

        Pasted into a comparison's cell under another name, its class trains like any of your own.
        """
        display(api.source(arguments(self.ddp_source, line).strategy))

    # -- looking inside --------------------------------------------------------------

    @magic_arguments()
    @argument("names", nargs="*", metavar="name", help="a model, optimizer or tensor on the ranks")
    @line_magic
    def ddp_check(self, line: str) -> ReplicaCheck:
        """Compare the replicas of all ranks: ``%ddp_check model optimizer``.

        Parameters, buffers, gradients and the optimizer's state: whether they are the same on all
        ranks, what the first difference is, and what has probably led to it.
        Without names all models and optimizers are compared.  Nothing on the ranks changes.
        """
        return api.check(*arguments(self.ddp_check, line).names)

    @magic_arguments()
    @argument("name", nargs="?", default="", help="a sampler or a DataLoader")
    @options(options_of(SamplerSpec))
    @line_magic
    def ddp_samples(self, line: str) -> Handout:
        """Show which rank gets which samples: ``%ddp_samples -n 30 --shuffle --no-set-epoch``.

        Torch's own ``DistributedSampler`` hands them out, on the ranks.  ``%ddp_samples loader``
        reads a sampler or a ``DataLoader`` of the ranks without consuming it; ``-n``,
        ``--drop-last`` and ``--shuffle`` are its own then.
        """
        return api.samples(**vars(arguments(self.ddp_samples, line)))

    @magic_arguments()
    @argument("name", metavar="collective", help=" | ".join((*SHOWN, TRACE)))
    @argument("--ranks", help="those that take part, e.g. 0,2-3; by default all")
    @options(options_of(CollectiveSpec))
    @argument("--save", metavar="FILE", default="", help="trace: .json for Perfetto, .png, .svg")
    @line_magic
    def ddp_show(self, line: str) -> Any:
        """Run a collective on the ranks and draw what it does: ``%ddp_show all_reduce``.

        Each rank's tensor before and after, time and bytes sent, beside the algorithm's formula.
        ``%ddp_show trace`` draws the latest cell of ``%%ddp --trace`` again, ``--save FILE`` saves
        it.
        """
        choices = vars(arguments(self.ddp_show, line))
        path = choices.pop("save")
        if choices["name"] == TRACE:
            trace = api.last_trace()
            return trace.save(path) if path else trace
        if path:
            raise UserError("--save belongs to %ddp_show trace.")
        return api.show_collective(**choices)

    @magic_arguments()
    @argument("model", nargs="?", default="", help="a model, or a DDP, of the ranks' cells")
    @options(options_of(InspectSpec))
    @argument("--run", metavar="NAME", default="", help="in place of a step: a stored run of async")
    @options(options_of(TrainingSpec, *INSPECTED))
    @line_cell_magic
    def ddp_inspect(self, line: str, cell: str = "") -> Any:
        """Show what happens in a step: ``%ddp_inspect model --batch x --loss "f(output, y)"``.

        DDP's buckets, and forward, backward, all-reduces and update of each rank on one time line.
        All is measured on a copy: the model, its gradients and random numbers stay as they are.
        Without a model: a task, the cell's own, or that of the last comparison.  ``--run race``
        shows which versions the workers of a stored run of async read and wrote.
        """
        choices = vars(arguments(self.ddp_inspect, line, unquote=True))
        source = f"# %%ddp_inspect {line}\n{cell}" if cell.strip() else ""
        return api.inspect(source=source, **choices)

    # -- scaling ---------------------------------------------------------------------

    @magic_arguments()
    @options(options_of(Question))
    @argument("--run", metavar="NAME", default="", help="to calibrate on; by default the last")
    @line_magic
    def ddp_predict(self, line: str) -> Any:
        """Predict throughput on other numbers of ranks, and over other networks.

        ``%ddp_predict --ranks 1,2,4,8,64,1024 --link 100GbE``.  Calibrated on a stored comparison
        that has ``single`` and ``no-comm``; docs/prediction-error.md has every formula.
        """
        return api.predict(**vars(arguments(self.ddp_predict, line)))

    @line_magic
    def ddp_advise(self, line: str) -> Any:
        """Mark this machine in the table of strategies by topology, with the reason."""
        no_arguments("%ddp_advise", line)
        return api.advise()


def with_magic_line(magic: str, cell: str) -> str:
    """Return a cell with its magic as a comment above it, so that line numbers stay right."""
    return cell if cell.startswith("%%") else f"# {magic}\n{cell}"


def comparison_of(line: str, cell: str) -> ComparisonSpec:
    """Return the comparison of a line of ``%%ddp_compare`` and its cell."""
    choices = vars(arguments(DdpMagics.ddp_compare, line))
    source = with_magic_line(f"%%ddp_compare {line}", cell) if cell.strip() else ""
    cell_number = this_cell_number()
    return make_comparison(choices["strategies"], choices, source=source, cell=cell_number)


def load(shell: InteractiveShell) -> None:
    """Register the magics and their completion."""
    magics = DdpMagics(shell)
    shell.register_magics(magics)
    magics.completion.install()
    if removed := remove_leftovers():
        print(f"Removed files of {counted(len(removed), 'crashed cluster')}: {removed[0].name} ...")


def unload(shell: InteractiveShell) -> None:
    """Stop the cluster, and take no part in completion any more."""
    magics = shell.magics_manager.registry["DdpMagics"]
    magics.completion.remove()
    if magics.panel is not None:
        magics.panel.close()
    this_session().stop()
