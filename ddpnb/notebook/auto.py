"""How does every cell go to the ranks without being told to?  ``%ddp_auto on``  (Notebook side.)"""

import re

from IPython.core.interactiveshell import InteractiveShell

OWN = re.compile(r"^%(%ddp|%rank|ddp_|load_ext|reload_ext|unload_ext)", re.MULTILINE)
"""Magics that stay in the notebook wherever they stand in a cell."""

LOCAL = re.compile(r"^%%local[ \t]*$")


class AutoCells:
    """Puts ``%%ddp`` before every cell while it is on.

    Args:
        shell: the notebook's IPython.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._redirected = ""

    def switch(self, on: bool) -> None:
        """Switch it on or off; again is no harm."""
        transforms = self._shell.input_transformers_cleanup
        if on and self.redirect not in transforms:
            transforms.append(self.redirect)
        self._redirected = ""
        if not on and self.redirect in transforms:
            transforms.remove(self.redirect)

    def redirect(self, lines: list[str]) -> list[str]:
        """Return the cell's lines, sent to the ranks unless they are to stay here."""
        source = "".join(lines)
        if not source.strip() or OWN.search(source):
            return lines
        if LOCAL.match(lines[0].rstrip("\n")):
            return ["\n", *lines[1:]]
        self._redirected = source.rstrip("\n")
        return ["%%ddp\n", *lines]

    def has_redirected(self, cell: str) -> bool:
        """Tell whether ``cell`` stood in the notebook without a ``%%ddp`` line before it."""
        return bool(self._redirected) and cell.rstrip("\n") == self._redirected
