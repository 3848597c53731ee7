"""The magics, which call ``ddpnb.api`` or the session.  Runs in the kernel."""

from argparse import REMAINDER
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, kwds, magic_arguments
from IPython.display import display

from ddpnb import api
from ddpnb.course.checking import check_exercise
from ddpnb.hosts.spec import HostsSpec
from ddpnb.magics.arguments import arguments, catalogue_text, no_arguments, options, with_expression
from ddpnb.magics.completion import Completion
from ddpnb.prediction.predict import Question
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import InspectSpec, SamplerSpec
from ddpnb.protocol.options import options_of, read_options
from ddpnb.protocol.processes import remove_leftovers
from ddpnb.protocol.trace import SHOWN, TRACE, CollectiveSpec
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.formatting import counted
from ddpnb.reports.inspection.replicas import ReplicaCheck
from ddpnb.reports.inspection.samples import Handout
from ddpnb.reports.live import LiveDisplay, LiveFigureAndTable
from ddpnb.reports.style import PlotOptions
from ddpnb.session.cells import CellOptions
from ddpnb.session.comparison_spec import ComparisonSpec, make_comparison
from ddpnb.session.inspection import INSPECTED
from ddpnb.session.session import this_cell_number, this_session
from ddpnb.session.variables import push

if TYPE_CHECKING:
    from ddpnb.magics.panel import Panel

RANKS = "numbers of the ranks to use, such as 0,2-3; default: all ranks"
RUNS = "name of a run or a comparison, as shown by %%ddp_runs"


@magics_class
class DdpMagics(Magics):
    """The magics of ddpnb.  Type ``%ddp_start?`` for the help of ``%ddp_start``."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.completion = Completion(shell, self)
        self.panel: Panel | None = None

    @magic_arguments()
    @options(options_of(HostsSpec))
    @line_magic
    def ddp_start(self, line: str) -> None:
        """Start the ranks and form the process group: ``%ddp_start -n 4``.

        The magic returns once every rank has finished an all-reduce.  If a cluster is already
        running, ddpnb uses that cluster unchanged.

        Emulated devices (docs/emulated-devices.md): ``--devices 8xV100 --as resnet50`` starts eight
        ranks.  All comparisons then emulate these devices, except with ``--devices real``.

        Other hosts (docs/hosts.md): ``--hosts a:4,b:4`` starts four ranks on each of two hosts over
        ssh.  ``--engines slurm -n 16 --ranks-per-host 8`` starts 16 ranks in a Slurm job on two
        hosts.  ``--profile NAME`` starts the ranks with a profile of ipyparallel.
        """
        choices, display = vars(arguments(self.ddp_start, line)), LiveDisplay()
        spec = HostsSpec(**read_options(HostsSpec, choices))
        display.show_table(this_session().start(spec, progress=display.show_text))

    @line_magic
    def ddp_status(self, line: str) -> None:
        """Show the state of every rank: ``%ddp_status``."""
        no_arguments("%ddp_status", line)
        display(api.status())

    @line_magic
    def ddp_stop(self, line: str) -> None:
        """End every process of the cluster: ``%ddp_stop``."""
        no_arguments("%ddp_stop", line)
        was_running = api.stop()
        print("The cluster has stopped." if was_running else "No cluster was running.")

    @magic_arguments()
    @argument("-n", type=int, help="number of ranks; default: the same number as before")
    @argument("--ranks", help="ranks to replace; all other ranks keep their variables")
    @line_magic
    def ddp_restart(self, line: str) -> None:
        """End the ranks and start new ranks without variables: ``%ddp_restart``.

        ``%ddp_restart --ranks 1`` replaces only rank 1, even if rank 1 is alive.
        """
        args, display = arguments(self.ddp_restart, line), LiveDisplay()
        progress = display.show_text
        display.show_table(this_session().restart(args.n, ranks=args.ranks, progress=progress))

    @line_magic
    def ddp_why(self, line: str) -> None:
        """Show the current cell, line, collective and stack of every rank: ``%ddp_why``."""
        no_arguments("%ddp_why", line)
        print(api.why())

    @line_magic
    def ddp_interrupt(self, line: str) -> None:
        """Stop cells and comparisons that run in the background: ``%ddp_interrupt``.

        ``--no-wait`` and ``%ddp_panel`` start background work.  The ranks keep their variables.
        To stop a cell that the notebook waits for, interrupt the kernel (the square button).
        """
        no_arguments("%ddp_interrupt", line)
        print(api.interrupt())

    @magic_arguments()
    @options(options_of(CellOptions))
    @cell_magic
    def ddp(self, line: str, cell: str) -> Any:
        """Run the cell on all ranks, or on some ranks: ``%%ddp --ranks 0,2-3``.

        The cell can use ``rank``, ``local_rank``, ``world_size`` and ``device``.  Each line of
        output has a label with its rank.  If several ranks print the same line, ddpnb shows the
        line once, with a label like [0-3].
        """
        source = with_magic_line(f"%%ddp {line}", cell)
        return api.run_cell(source, **vars(arguments(self.ddp, line)))

    @magic_arguments()
    @argument("script", help="path of the script; with -m, the name of a module")
    @argument("arguments", nargs=REMAINDER, help="arguments of the script")
    @argument("-m", dest="module", action="store_true", help="run a module, like torchrun -m")
    @argument("-i", dest="keep", action="store_true", help="keep script variables for later cells")
    @options(options_of(CellOptions))
    @line_magic
    def ddp_run(self, line: str) -> Any:
        """Run a ``torchrun`` script on the ranks: ``%ddp_run train.py --epochs 3``.

        The script runs unchanged, in a new ``__main__``, and uses the cluster's process group.
        Write the options of ``%ddp_run`` before the script: ``%ddp_run --timeout 60 train.py``.
        """
        if not line.strip():
            raise UserError("%ddp_run needs a script: %ddp_run train.py --epochs 3.")
        return api.run_script(**vars(arguments(self.ddp_run, line)))

    @magic_arguments()
    @argument("ranks", nargs="*", help="numbers of the ranks to use, such as 0,2-3")
    @cell_magic
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some ranks: ``%%rank 0`` or ``%%rank 0,2-3``."""
        if not (ranks := " ".join(arguments(self.rank, line).ranks)):
            raise UserError("%%rank needs the ranks to run on: %%rank 0, or %%rank 0,2-3.")
        api.run_cell(with_magic_line(f"%%rank {line}", cell), ranks=ranks)

    @magic_arguments()
    @argument("number", nargs="?", default="", help="number of the exercise, such as 3.2")
    @line_magic
    def ddp_exercise(self, line: str) -> None:
        """Check your answer to an exercise, or show a hint: ``%ddp_exercise 3.2``."""
        print(check_exercise(arguments(self.ddp_exercise, line).number, self.shell.user_ns))

    @magic_arguments()
    @argument("rank", type=int, help="rank to debug; all ranks keep their variables")
    @line_magic
    def ddp_debug(self, line: str) -> None:
        """Open IPython's debugger at a rank's last error in a cell: ``%ddp_debug 1``.

        To stop at a line, insert ``breakpoint()`` and run the cell with ``%%ddp --debug 1``.
        """
        api.debug(arguments(self.ddp_debug, line).rank)

    @magic_arguments()
    @argument("names", nargs="+", metavar="variable", help="name of a variable of the notebook")
    @argument("--ranks", help=RANKS)
    @line_magic
    def ddp_push(self, line: str) -> None:
        """Copy variables of the notebook to the ranks: ``%ddp_push a b``."""
        args = arguments(self.ddp_push, line)
        here = self.shell.user_ns
        if missing := [name for name in args.names if name not in here]:
            raise UserError(f"The notebook has no variable {', '.join(missing)}. Define it first.")
        push(this_session().free_cluster(), {name: here[name] for name in args.names}, args.ranks)

    @magic_arguments()
    @argument("expression", help="a variable or an expression to evaluate on the ranks, as typed")
    @argument("--ranks", help=RANKS)
    @argument("--as", dest="name", metavar="NAME", help="notebook variable that gets the result")
    @line_magic
    def ddp_pull(self, line: str) -> Any:
        """Copy a value from the ranks: ``%ddp_pull loss --ranks 0 --as loss``.

        The result is a dict with a value for each rank.  If ``--ranks`` names only one rank, the
        result is the value of this rank.
        """
        args = arguments(self.ddp_pull, with_expression(line))
        value = api.pull(args.expression, ranks=args.ranks)
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
        """Train strategies on one task and compare them live: ``%ddp_compare ddp --task digits``.

        Without a cell, ``--task`` names a built-in task.  A ``%%ddp_compare`` cell defines your
        task: ``model()`` and ``data(split)``, where split is "train" or "test".  The cell can also
        define ``loss(outputs, targets)``, ``training_step(model, batch)``, ``optimizer(params)``
        and ``metric(outputs, targets)``, see docs/your-code.md.  A strategy can have options, such
        as ``ddp:hook=fp16``, and can be a class in the cell, such as ``Averaging:every=2``.
        """
        return this_session().compare(comparison_of(line, cell))

    @line_magic
    def ddp_panel(self, line: str) -> None:
        """Show controls that start and stop comparisons in the background: ``%ddp_panel``.

        The panel also offers the task of the latest ``%%ddp_compare`` cell.
        """
        no_arguments("%ddp_panel", line)
        if self.panel is None:
            from ddpnb.magics.panel import Panel  # noqa: PLC0415  matplotlib: 0.3 s

            self.panel = Panel(self.shell, comparison_of)
        self.panel.show()

    @magic_arguments()
    @argument("names", metavar="name", nargs="*", help=RUNS)
    @options(options_of(PlotOptions))
    @line_magic
    def ddp_plot(self, line: str) -> Any:
        """Draw stored runs in one figure: ``%ddp_plot mine ddp --log --target 0.3``.

        Without a name, the magic shows the comparison that is training, for example after you
        reload the page.  If no comparison is training, the magic shows the latest comparison.
        """
        choices = vars(arguments(self.ddp_plot, line))
        names = choices.pop("names")
        if not names and this_session().show_live():
            return None
        result = api.plot(*names, **choices)
        LiveFigureAndTable().show(result)
        return result

    @magic_arguments()
    @argument("name", help=RUNS)
    @argument("path", help="name of the file; its ending determines the content")
    @line_magic
    def ddp_export(self, line: str) -> None:
        """Write stored runs to a file: ``%ddp_export race race.csv``.

        A ``.csv`` has all steps, and a ``.runs.csv`` has one line per run.  Other files contain the
        report (``.html``), the figure (``.png``), or a script for torchrun without ddpnb (``.py``).
        """
        args = arguments(self.ddp_export, line)
        print(api.export(args.name, args.path))

    @magic_arguments()
    @argument("text", nargs="*", help="list only runs with this text in name, task or state")
    @argument("--last", metavar="N", type=int, help="maximum number of lines; newest runs first")
    @argument("--show", metavar="NAME", help="show everything needed to repeat this comparison")
    @argument("--delete", metavar="NAME", help="delete these runs and their weights")
    @line_magic
    def ddp_runs(self, line: str) -> None:
        """List stored runs: ``%ddp_runs ddp --last 9``.

        Show a comparison: ``%ddp_runs --show race``.  Delete runs: ``%ddp_runs --delete race/ddp``.
        """
        args = arguments(self.ddp_runs, line)
        if args.delete is not None:
            print(f"Deleted {', '.join(api.delete(args.delete))}.")
        elif args.show is not None:
            display(api.details(args.show))
        else:
            display(api.runs(" ".join(args.text), last=args.last))

    @magic_arguments()
    @argument("strategy", metavar="NAME", help="name of a strategy, such as ddp-by-hand")
    @line_magic
    def ddp_source(self, line: str) -> None:
        """Show the source of a strategy: ``%ddp_source ddp-by-hand``.

        To change the strategy, paste its class into a comparison's cell and rename the class.
        """
        display(api.source(arguments(self.ddp_source, line).strategy))

    # -- looking inside --------------------------------------------------------------

    @magic_arguments()
    @argument("names", nargs="*", metavar="name", help="name of a model, optimizer or tensor")
    @line_magic
    def ddp_check(self, line: str) -> ReplicaCheck:
        """Compare the replicas of all ranks: ``%ddp_check model optimizer``.

        ddpnb compares parameters, buffers, gradients and the optimizer's state.  The result names
        the first difference and its probable cause.  Without names, ddpnb compares all models and
        optimizers.  The check changes nothing on the ranks.
        """
        return api.check(*arguments(self.ddp_check, line, python=True).names)

    @magic_arguments()
    @argument("name", nargs="?", default="", help="name of a sampler or DataLoader on the ranks")
    @options(options_of(SamplerSpec))
    @line_magic
    def ddp_samples(self, line: str) -> Handout:
        """Show which rank gets which samples: ``%ddp_samples -n 30 --shuffle --no-set-epoch``.

        Without a name, torch's ``DistributedSampler`` on the ranks chooses the samples.
        ``%ddp_samples loader`` reads a sampler or a ``DataLoader`` of the ranks without consuming
        it.  If you name a sampler, ddpnb ignores ``-n``, ``--drop-last`` and ``--shuffle``.
        """
        return api.samples(**vars(arguments(self.ddp_samples, line, python=True)))

    @magic_arguments()
    @argument("name", metavar="collective", help=" | ".join((*SHOWN, TRACE)))
    @argument("--ranks", help="ranks that take part, e.g. 0,2-3; default: all ranks")
    @options(options_of(CollectiveSpec))
    @argument("--save", metavar="FILE", default="", help="file for a trace: .json, .png or .svg")
    @line_magic
    def ddp_show(self, line: str) -> Any:
        """Run a collective on the ranks and draw its effect: ``%ddp_show all_reduce``.

        The result shows each rank's tensor before and after the call, the time, the bytes sent, and
        the algorithm's formula.  ``%ddp_show trace`` draws the trace of the last ``%%ddp --trace``
        cell again.  ``%ddp_show trace --save FILE`` saves the trace, for example for Perfetto.
        """
        choices = vars(arguments(self.ddp_show, line))
        path = choices.pop("save")
        if choices["name"] == TRACE:
            trace = api.last_trace()
            return trace.save(path) if path else trace
        if path:
            raise UserError("--save works only with a trace: %ddp_show trace --save FILE.")
        return api.show_collective(**choices)

    @magic_arguments()
    @argument("model", nargs="?", default="", help="name of a model or DDP module on the ranks")
    @options(options_of(InspectSpec))
    @argument("--run", metavar="NAME", default="", help="show parameter versions of an async run")
    @options(options_of(TrainingSpec, *INSPECTED))
    @line_cell_magic
    def ddp_inspect(self, line: str, cell: str = "") -> Any:
        """Measure a step of DDP: ``%ddp_inspect model --batch x --loss "f(output, y)"``.

        The result shows DDP's buckets, and each rank's forward pass, backward pass, all-reduces and
        update on one timeline.  ddpnb measures a copy, so the model, its gradients and the random
        numbers stay unchanged.  Without a model, ddpnb inspects ``--task``, the cell's task or the
        task of the last comparison.  ``--run race`` shows which versions of the parameters the
        workers of a stored ``async`` run read and updated.
        """
        choices = vars(arguments(self.ddp_inspect, line, python=True))
        source = f"# %%ddp_inspect {line}\n{cell}" if cell.strip() else ""
        return api.inspect(source=source, **choices)

    # -- scaling ---------------------------------------------------------------------

    @magic_arguments()
    @options(options_of(Question))
    @argument("--run", metavar="NAME", default="", help="stored comparison for the calibration")
    @line_magic
    def ddp_predict(self, line: str) -> Any:
        """Predict throughput for other numbers of ranks and other networks.

        Example: ``%ddp_predict --ranks 1,8,1024 --link 100GbE``.  ddpnb calibrates on the latest
        stored comparison with ``single`` and ``no-comm``, or on ``--run``.  All formulas are in
        docs/prediction-error.md.
        """
        return api.predict(**vars(arguments(self.ddp_predict, line)))

    @line_magic
    def ddp_advise(self, line: str) -> Any:
        """Recommend a strategy for this machine, with the reason: ``%ddp_advise``."""
        no_arguments("%ddp_advise", line)
        return api.advise()


def with_magic_line(magic: str, cell: str) -> str:
    """Add a magic's line above a cell, as a comment, so that line numbers stay correct."""
    return cell if cell.startswith("%%") else f"# {magic}\n{cell}"


def comparison_of(line: str, cell: str) -> ComparisonSpec:
    """Return the comparison that a line of ``%%ddp_compare`` and its cell describe."""
    choices = vars(arguments(DdpMagics.ddp_compare, line))
    source = with_magic_line(f"%%ddp_compare {line}", cell) if cell.strip() else ""
    cell_number = this_cell_number()
    return make_comparison(choices["strategies"], choices, source=source, cell=cell_number)


def load(shell: InteractiveShell) -> None:
    """Register the magics and their completion, and create the kernel's session."""
    this_session()
    magics = DdpMagics(shell)
    shell.register_magics(magics)
    magics.completion.install()
    if removed := remove_leftovers():
        print(f"Removed files of {counted(len(removed), 'crashed cluster')}: {removed[0].name} ...")


def unload(shell: InteractiveShell) -> None:
    """Stop the cluster and remove the completion."""
    magics = shell.magics_manager.registry["DdpMagics"]
    magics.completion.remove()
    if magics.panel is not None:
        magics.panel.close()
    this_session().stop()
