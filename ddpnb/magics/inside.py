"""The magics that look inside: one step, one collective, the replicas, the machine (kernel)."""

from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument

from ddpnb import inside
from ddpnb.magics.arguments import arguments, magic_arguments, no_arguments, options
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.options import options_of
from ddpnb.protocol.replicas import SamplerSpec
from ddpnb.protocol.trace import SHOWN, TRACE, CollectiveSpec
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.inside.replicas import ReplicaCheck
from ddpnb.reports.inside.samples import Handout
from ddpnb.scaling.predict import Question
from ddpnb.session.inside import INSPECTED, InspectionRequest


@magics_class
class InsideMagics(Magics):
    """Magics that show what happens inside a step, and what would happen with more ranks."""

    shell: InteractiveShell

    @magic_arguments()
    @argument("names", nargs="*", metavar="name", help="a model, optimizer or tensor on the ranks")
    @line_magic
    def ddp_check(self, line: str) -> ReplicaCheck:
        """Compare the replicas of all ranks: ``%ddp_check model optimizer``.

        Parameters, buffers, gradients and the optimizer's state: whether they are the same on all
        ranks, what the first difference is, and what has probably led to it.
        Without names all models and optimizers are compared.  Nothing on the ranks changes.
        """
        return inside.check(*arguments(self.ddp_check, line).names)

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
        return inside.samples(**vars(arguments(self.ddp_samples, line)))

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
            trace = inside.last_trace()
            return trace.save(path) if path else trace
        if path:
            raise UserError("--save belongs to %ddp_show trace.")
        return inside.show_collective(**choices)

    @magic_arguments()
    @argument("model", nargs="?", default="", help="a model, or a DDP, of the ranks' cells")
    @options(options_of(InspectionRequest))
    @options(options_of(TrainingSpec, "task", *INSPECTED))
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
        return inside.inspect(source=source, **choices)

    # -- scaling ---------------------------------------------------------------------

    @magic_arguments()
    @options(options_of(Question))
    @argument("--run", metavar="NAME", default="", help="to calibrate on; by default the last")
    @line_magic
    def ddp_predict(self, line: str) -> Any:
        """Predict throughput on other numbers of ranks, and over other networks.

        ``%ddp_predict --ranks 1,2,4,8,64,1024 --link 100GbE``.  Calibrated on a stored comparison
        that has ``single`` and ``no-comm``; docs/prediction-method.md has every formula.
        """
        return inside.predict(**vars(arguments(self.ddp_predict, line)))

    @line_magic
    def ddp_advise(self, line: str) -> Any:
        """Mark this machine in the table of strategies by topology, with the reason."""
        no_arguments("%ddp_advise", line)
        return inside.advise()
