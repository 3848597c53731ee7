"""Displays under a cell whose content can be replaced (kernel)."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from ddpnb.reports.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Bundle = dict[str, str]


class LiveDisplay:
    """A display whose content can be replaced; it appears with its first content."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._content: Bundle = {}

    def appear(self, bundle: Bundle) -> None:
        """Appear under the current cell too; all copies show the same content.

        Args:
            bundle: the first content, used if there is none yet.
        """
        if self._handle is None:
            self.show(bundle)
        else:
            self._handle.display(self._content, raw=True)

    def show(self, bundle: Bundle) -> None:
        """Show a MIME bundle in place of the last one; outside IPython, do nothing."""
        if get_ipython() is None:
            return
        self._content = bundle
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def show_text(self, text: str) -> None:
        """Show a text in place of the last content."""
        self.show({"text/plain": text})

    def show_table(self, table: Table) -> None:
        """Show a table in place of the last content."""
        self.show({"text/html": table.html(), "text/plain": table.text()})


WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

WIDTH_PIXELS = 900
"""The width of the canvas, which, unlike a picture, does not shrink to fit its cell."""

BACKENDS = ("ipympl", "widget", "module://ipympl.backend_nbagg")
"""The names of the backend that ``%matplotlib widget`` chooses."""


def is_chosen() -> bool:
    """Return whether the user chose ipympl's canvas; neither chooses a backend nor loads pyplot."""
    import matplotlib  # noqa: PLC0415 - takes 0.1 s

    chosen = matplotlib.get_backend(auto_select=False)
    in_kernel = hasattr(get_ipython(), "kernel")
    return in_kernel and chosen in BACKENDS and find_spec("ipympl") is not None


def show_canvas(figure: "Figure", name: str) -> None:
    """Show a figure on ipympl's canvas under the current cell.

    Args:
        figure: a figure shown nowhere else; from now on it belongs to the canvas.
        name: the file name of a download.
    """
    from ipympl.backend_nbagg import Canvas, FigureManager  # noqa: PLC0415 - may not be there

    figure.set_dpi(WIDTH_PIXELS / figure.get_figwidth())
    _clip(figure)
    canvas = Canvas(figure)
    canvas.header_visible = False
    FigureManager(canvas, 0).set_window_title(name)
    text = "The same figure, to zoom and pan in while its kernel runs."
    options = canvas._repr_mimebundle_()[WIDGET_VIEW]
    display({WIDGET_VIEW: options, "text/plain": text}, raw=True)


def _clip(figure: "Figure") -> None:
    """Clip lines to their axes, so that zooming and panning never draws beside them."""
    for axes in figure.axes:
        for line in axes.get_lines():
            if any(line.get_transform().contains_branch_seperately(axes.transData)):
                line.set_clip_on(True)
