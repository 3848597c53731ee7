"""The magics that look inside: one step, one collective, the replicas, the machine (kernel)."""

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class

from ddpnb import api
from ddpnb.magics.arguments import no_arguments
from ddpnb.reports.inside.links import LinkMatrix


@magics_class
class InsideMagics(Magics):
    """Magics that show what happens inside a step, and what would happen with more ranks."""

    shell: InteractiveShell

    @line_magic
    def ddp_hosts(self, line: str) -> LinkMatrix:
        """Measure latency and bandwidth between each pair of ranks, and draw them as a matrix.

        One pair at a time, in a few seconds; of more than eight ranks the first of each host.
        """
        no_arguments("%ddp_hosts", line)
        return api.hosts()
