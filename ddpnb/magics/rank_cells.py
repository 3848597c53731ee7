"""Which cells run on the ranks (kernel)."""

import re

from IPython.core.interactiveshell import InteractiveShell

NOTEBOOK_MAGICS = re.compile(r"^%(%ddp|%rank|ddp_|load_ext|reload_ext|unload_ext)", re.MULTILINE)
"""A cell with one of these runs in the notebook."""

LOCAL = re.compile(r"^%%local[ \t]*$")


class AutoCells:
    """Puts ``%%ddp`` before every cell while it is on, and always removes ``%%local``."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._is_on = False
        self._redirected = ""

    def switch(self, on: bool) -> None:
        """Switch it on or off; may be called twice."""
        self._is_on = on
        self._redirected = ""

    def install(self) -> None:
        """Pass every cell through ``redirect``."""
        self._shell.input_transformers_cleanup.append(self.redirect)

    def remove(self) -> None:
        """Leave cells as they are; may be called twice."""
        if self.redirect in self._shell.input_transformers_cleanup:
            self._shell.input_transformers_cleanup.remove(self.redirect)

    def redirect(self, lines: list[str]) -> list[str]:
        """Return the lines of a cell, with ``%%ddp`` before them if it should run on the ranks."""
        source = "".join(lines)
        if lines and LOCAL.match(lines[0].rstrip("\n")):
            return ["\n", *lines[1:]]  # so that line numbers stay those of the notebook
        if not self.redirects(source):
            return lines
        self._redirected = source.rstrip("\n")
        return ["%%ddp\n", *lines]

    def redirects(self, source: str) -> bool:
        """Return whether a cell runs on the ranks although it does not say so."""
        is_local = LOCAL.match(source.partition("\n")[0]) or NOTEBOOK_MAGICS.search(source)
        return self._is_on and bool(source.strip()) and not is_local

    def has_redirected(self, cell: str) -> bool:
        """Return whether ``redirect`` added the ``%%ddp`` line above this cell."""
        return bool(self._redirected) and cell.rstrip("\n") == self._redirected
