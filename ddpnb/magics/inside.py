"""The magics that look inside: one step, one collective, the replicas, the machine (kernel)."""

from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument

from ddpnb import api
from ddpnb.magics.arguments import arguments, magic_arguments
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.trace import COLLECTIVES, REDUCTIONS, SHOWN


@magics_class
class InsideMagics(Magics):
    """Magics that show what happens inside a step, and what would happen with more ranks."""

    shell: InteractiveShell

    @magic_arguments()
    @argument("what", metavar="collective", help=" | ".join((*COLLECTIVES, *SHOWN)))
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
        it, and ``%ddp_show store`` lists what was asked of the process group's store there.
        """
        args = arguments(self.ddp_show, line)
        options = {"size": args.size, "root": args.root, "op": args.op, "ranks": args.ranks}
        if args.what not in SHOWN:
            if args.save:
                raise UserError("--save belongs to %ddp_show trace.")
            return api.show_collective(args.what, **options)
        if any(each not in ("", None) for each in options.values()):
            raise UserError(f"%ddp_show {args.what} takes no option of a collective.")
        trace = api.last_trace()
        if args.save:
            return trace.save(args.save)
        return trace.store() if args.what == "store" else trace
