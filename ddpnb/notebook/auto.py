"""How does every cell go to the ranks without being told to?  ``%ddp_auto on``  (Notebook side.)"""

import re

from IPython.core.interactiveshell import InteractiveShell

OWN = re.compile(r"^%(%ddp|%rank|ddp_|load_ext|reload_ext|unload_ext)", re.MULTILINE)
"""Magics that stay in the notebook wherever they stand in a cell."""

LOCAL = re.compile(r"^%%local[ \t]*$")


class AutoCells:
    """Puts ``%%ddp`` before every cell while it is on, and takes ``%%local`` away at any time.

    Args:
        shell: the notebook's IPython.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._is_on = False
        self._redirected = ""

    def switch(self, on: bool) -> None:
        """Switch it on or off; again is no harm."""
        self._is_on = on
        self._redirected = ""

    def install(self) -> None:
        """Have every cell pass through ``redirect``."""
        self._shell.input_transformers_cleanup.append(self.redirect)

    def remove(self) -> None:
        """Leave the cells alone; again is no harm."""
        if self.redirect in self._shell.input_transformers_cleanup:
            self._shell.input_transformers_cleanup.remove(self.redirect)

    def redirect(self, lines: list[str]) -> list[str]:
        """Return the cell's lines, sent to the ranks unless they are to stay here."""
        source = "".join(lines)
        if lines and LOCAL.match(lines[0].rstrip("\n")):
            return ["\n", *lines[1:]]  # numbers of lines and cell stay as the notebook's
        if not self._is_on or not source.strip() or OWN.search(source):
            return lines
        self._redirected = source.rstrip("\n")
        return ["%%ddp\n", *lines]

    def has_redirected(self, cell: str) -> bool:
        """Tell whether ``cell`` stood in the notebook without a ``%%ddp`` line before it."""
        return bool(self._redirected) and cell.rstrip("\n") == self._redirected
