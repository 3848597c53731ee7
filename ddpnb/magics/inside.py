"""The magics that look inside: one step, one collective, the replicas, the machine (kernel)."""

from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument

from ddpnb import api
from ddpnb.magics.arguments import arguments, magic_arguments


@magics_class
class InsideMagics(Magics):
    """Magics that show what happens inside a step, and what would happen with more ranks."""

    shell: InteractiveShell

    # -- scaling ---------------------------------------------------------------------

    @magic_arguments()
    @argument("--ranks", default="1,2,4,8", help="numbers of ranks, such as 1,2,4,8,64,1024")
    @argument("--link", default="", help="between the ranks: 100GbE, or 1Gbit,0.5ms; else as here")
    @argument(
        "--strategies", default="", help="such as ddp,async,async-shards=4; else those compared"
    )
    @argument("--hosts", metavar="N", type=int, help="ranks on each host; --link is between hosts")
    @argument("--inside", default="", help="the link between the ranks of a host, such as pcie4")
    @argument("--cores", metavar="N", type=int, help="cores that the ranks of a host share")
    @argument("--algorithm", default="", help="of all-reduces: ring, tree, double-tree, best ...")
    @argument("--batch-per-worker", metavar="N", type=int, help="samples of each rank in a step")
    @argument("--samples", metavar="N", type=float, help="to the target, with the smallest batches")
    @argument("--critical-batch", metavar="N", type=float, help="that doubles these samples")
    @argument("--run", default="", help="the comparison to calibrate on; else the last")
    @line_magic
    def ddp_predict(self, line: str) -> Any:
        """Predict throughput on other numbers of ranks, and over other networks.

        ``%ddp_predict --ranks 1,2,4,8,64,1024 --link 100GbE``.  Calibrated on a stored comparison
        that has ``single`` and ``no-comm``; docs/prediction.md has every formula.
        """
        return api.predict(**vars(arguments(self.ddp_predict, line)))

    @magic_arguments()
    @argument("--model", metavar="NAME", default="", help="a model on the ranks, measured too")
    @argument("--input", metavar="NAME", default="", help="the tensor that it is called with")
    @line_magic
    def ddp_advise(self, line: str) -> Any:
        """Measure this machine, and recommend a strategy with its reasons.

        ``%ddp_advise --model model --input x`` measures a model of the ranks too, on a copy.
        """
        args = arguments(self.ddp_advise, line)
        return api.advise(model=args.model, input=args.input)
