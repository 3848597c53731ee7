"""How is something under a cell replaced by something newer?  (Notebook side.)"""

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from ddpnb.notebook.show.table import Table

Bundle = dict[str, str]


class Slot:
    """A place under the cell whose content is replaced; appears with the first content."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._content: Bundle = {}

    def appear(self, bundle: Bundle) -> None:
        """Appear under the current cell too, with the same content in every place.

        Args:
            bundle: the content where there is none yet.
        """
        if self._handle is None:
            self.show(bundle)
        else:
            self._handle.display(self._content, raw=True)

    def show(self, bundle: Bundle) -> None:
        """Show a MIME bundle in this place; outside IPython nothing is replaced, nor shown."""
        if get_ipython() is None:
            return
        self._content = bundle
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def show_text(self, text: str) -> None:
        """Show a text in this place."""
        self.show({"text/plain": text})

    def show_table(self, table: Table) -> None:
        """Show a table in this place."""
        self.show({"text/html": table.html(), "text/plain": table.text()})
