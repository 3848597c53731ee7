"""The magics that look inside: one step, one collective, the replicas, the machine (kernel)."""

from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument

from ddpnb import inside
from ddpnb.magics.arguments import arguments, magic_arguments, no_arguments
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.trace import COLLECTIVES, REDUCTIONS, TRACE
from ddpnb.reports.inside.replicas import ReplicaCheck
from ddpnb.reports.inside.samples import Handout


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
    @argument("name", nargs="?", default="", help="a sampler, a DataLoader, or a stored run")
    @argument("-n", type=int, default=30, help="samples of the data set [30]")
    @argument("--epochs", metavar="N", type=int, default=3, help="epochs to draw [3]")
    @argument("--no-set-epoch", action="store_true", help="do not call set_epoch(epoch)")
    @argument("--drop-last", action="store_true", help="leave samples out, repeat none")
    @argument("--shuffle", action="store_true", help="shuffle, as DistributedSampler does it")
    @line_magic
    def ddp_samples(self, line: str) -> Handout:
        """Show which rank gets which samples: ``%ddp_samples -n 30 --shuffle --no-set-epoch``.

        Torch's own ``DistributedSampler`` hands them out, on the ranks.  ``%ddp_samples loader``
        reads a sampler or a ``DataLoader`` of the ranks without consuming it; ``-n``,
        ``--drop-last`` and ``--shuffle`` are its own then.  ``%ddp_samples race/async`` shows which
        worker got which shards in a stored asynchronous run.
        """
        args = arguments(self.ddp_samples, line)
        return inside.samples(
            args.name,
            n=args.n,
            epochs=args.epochs,
            set_epoch=not args.no_set_epoch,
            drop_last=args.drop_last,
            shuffle=args.shuffle,
        )

    @magic_arguments()
    @argument("what", metavar="collective", help=" | ".join((*COLLECTIVES, TRACE)))
    @argument("--size", default="", help="of the tensor that a rank gives: 4MB [a few numbers]")
    @argument("--root", metavar="RANK", type=int, help="the rank that gives, or gets, everything")
    @argument("--op", default="", help=" | ".join(REDUCTIONS))
    @argument("--ranks", help="those that take part, e.g. 0,2-3")
    @argument("--save", metavar="FILE", default="", help="trace: .json for Perfetto, .png, .svg")
    @line_magic
    def ddp_show(self, line: str) -> Any:
        """Run a collective on the ranks and draw what it does: ``%ddp_show all_reduce``.

        Each rank's tensor before and after, time and bytes sent, beside the algorithm's formula.
        ``%ddp_show trace`` draws the latest cell of ``%%ddp --trace`` again, ``--save FILE`` saves
        it.
        """
        args = arguments(self.ddp_show, line)
        options = {"size": args.size, "root": args.root, "op": args.op, "ranks": args.ranks}
        if args.what != TRACE:
            if args.save:
                raise UserError("--save belongs to %ddp_show trace.")
            return inside.show_collective(args.what, **options)
        if any(each not in ("", None) for each in options.values()):
            raise UserError("%ddp_show trace takes no option of a collective.")
        trace = inside.last_trace()
        return trace.save(args.save) if args.save else trace

    @magic_arguments()
    @argument("model", nargs="?", default="", help="a model, or a DDP, of the ranks' cells")
    @argument("--batch", metavar="EXPR", default="", help="its input on the ranks")
    @argument("--loss", metavar="EXPR", default="", help="of `output`; by default its mean")
    @argument("--task", default="", help="a task in place of a model: digits")
    @argument("--strategy", default="ddp", help="ddp | async, with options as async:bound=1")
    @argument("--bucket-cap", metavar="MB,MB", default="", help="also with these bucket_cap_mb")
    @argument("--batch-size", metavar="N", help="the task's global batch")
    @argument("--devices", metavar="8xV100", default="", help="on emulated devices")
    @argument("--as", dest="as_", metavar="MODEL", default="", help="with its published figures")
    @argument("--link", default="", help="over such a network between them: 1Gbit,0.5ms")
    @argument("--slow", metavar="1:2x", default="", help="async: rank 1 takes twice as long")
    @argument("--kill", metavar="1@1s", default="", help="async: rank 1 is killed after a second")
    @argument("--run", metavar="NAME", default="", help="async: draw this stored run")
    @line_cell_magic
    def ddp_inspect(self, line: str, cell: str = "") -> Any:
        """Show what happens in a step: ``%ddp_inspect model --batch x --loss "f(output, y)"``.

        DDP's buckets, and forward, backward, all-reduces and update of each rank on one time line.
        All is measured on a copy: the model, its gradients and random numbers stay as they are.
        Without a model: a task, the cell's own, or that of the last comparison.
        """
        args = arguments(self.ddp_inspect, line, unquote=True)
        return inside.inspect(
            args.model,
            batch=args.batch,
            loss=args.loss,
            task=args.task,
            source=f"# %%ddp_inspect {line}\n{cell}" if cell.strip() else "",
            strategy=args.strategy,
            bucket_cap=args.bucket_cap,
            batch_size=args.batch_size,
            devices=args.devices,
            as_=args.as_,
            link=args.link,
            slow=args.slow,
            kill=args.kill,
            run=args.run,
        )

    # -- scaling ---------------------------------------------------------------------

    @magic_arguments()
    @argument("--ranks", default="1,2,4,8", help="numbers of ranks, such as 1,2,4,8,64,1024")
    @argument("--link", default="", help="between the ranks: 100GbE, or 1Gbit,0.5ms; else as here")
    @argument("--strategies", default="", help="such as ddp,async; else those compared")
    @argument("--hosts", metavar="N", type=int, help="ranks on each host; --link is between hosts")
    @argument("--inside", default="", help="the link between the ranks of a host, such as pcie4")
    @argument("--step", default="", help="of another device: 178ms/64 is 178 ms for 64 samples")
    @argument("--accumulate", metavar="N", type=int, help="micro-batches of --step")
    @argument("--batch-per-worker", metavar="N", type=int, help="samples of each rank in a step")
    @argument("--run", default="", help="the comparison to calibrate on; else the last")
    @line_magic
    def ddp_predict(self, line: str) -> Any:
        """Predict throughput on other numbers of ranks, and over other networks.

        ``%ddp_predict --ranks 1,2,4,8,64,1024 --link 100GbE``.  Calibrated on a stored comparison
        that has ``single`` and ``no-comm``; docs/prediction.md has every formula.
        """
        return inside.predict(**vars(arguments(self.ddp_predict, line)))

    @line_magic
    def ddp_advise(self, line: str) -> Any:
        """Mark this machine in the table of strategies by topology, with the reason."""
        no_arguments("%ddp_advise", line)
        return inside.advise()
