"""The magics that look inside: one step, one collective, the replicas, the machine (kernel)."""

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument

from ddpnb import api
from ddpnb.magics.arguments import arguments, magic_arguments
from ddpnb.reports.inside.replicas import ReplicaCheck


@magics_class
class InsideMagics(Magics):
    """Magics that show what happens inside a step, and what would happen with more ranks."""

    shell: InteractiveShell

    @magic_arguments()
    @argument("names", nargs="*", metavar="name", help="a model, optimizer or tensor on the ranks")
    @line_magic
    def ddp_check(self, line: str) -> ReplicaCheck:
        """Compare the replicas of all ranks: ``%ddp_check model optimizer``.

        Parameters, buffers, gradients, the optimizer's state and random state: whether they are
        the same on all ranks, what the first difference is, and what has probably led to it.
        Without names all models and optimizers are compared.  Nothing on the ranks changes.
        """
        return api.check(*arguments(self.ddp_check, line).names)
