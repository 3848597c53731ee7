"""The magics that look inside: one step, one collective, the replicas, the machine (kernel)."""

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument

from ddpnb import api
from ddpnb.magics.arguments import arguments, magic_arguments
from ddpnb.session.inspection import Inspection


@magics_class
class InsideMagics(Magics):
    """Magics that show what happens inside a step, and what would happen with more ranks."""

    shell: InteractiveShell

    @magic_arguments()
    @argument("model", nargs="?", default="", help="a model, or a DDP, of the ranks' cells")
    @argument("--batch", metavar="EXPR", default="", help='its input on the ranks: "x, y"')
    @argument("--loss", metavar="EXPR", default="", help="of `output`; by default its mean")
    @argument("--optimizer", metavar="EXPR", default="", help="by default plain SGD")
    @argument("--task", default="", help="a task in place of a model: digits")
    @argument("--strategy", default="ddp", help="ddp | dp | async, with options as async:bound=1")
    @argument("--bucket-cap", metavar="MB,MB", default="", help="also with these bucket_cap_mb")
    @argument("--batch-size", metavar="N", help="the task's global batch")
    @argument("--link", default="", help="exchanges last as over such a network: 1Gbit,0.5ms")
    @argument("--slow", metavar="1:2x", default="", help="async: rank 1 takes twice as long")
    @argument("--kill", metavar="1@1s", default="", help="async: rank 1 is killed after a second")
    @argument("--run", metavar="NAME", default="", help="async: draw this stored run")
    @line_cell_magic
    def ddp_inspect(self, line: str, cell: str = "") -> Inspection:
        """Show what happens in a step: ``%ddp_inspect model --batch "x, y" --loss "f(output, y)"``.

        DDP's buckets, and forward, backward, all-reduces and update of each rank on one time line.
        All is measured on a copy: the model, its gradients and random numbers stay as they are.
        Without a model: a task, the cell's own, or that of the last comparison.
        """
        args = arguments(self.ddp_inspect, line, unquote=True)
        return api.inspect(
            args.model,
            batch=args.batch,
            loss=args.loss,
            optimizer=args.optimizer,
            task=args.task,
            source=f"# %%ddp_inspect {line}\n{cell}" if cell.strip() else "",
            strategy=args.strategy,
            bucket_cap=args.bucket_cap,
            batch_size=args.batch_size,
            link=args.link,
            slow=args.slow,
            kill=args.kill,
            run=args.run,
        )
