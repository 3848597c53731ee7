"""The magics that look inside: one step, one collective, the replicas, the machine (kernel)."""

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, magics_class


@magics_class
class InsideMagics(Magics):
    """Magics that show what happens inside a step, and what would happen with more ranks."""

    shell: InteractiveShell
