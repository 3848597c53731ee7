"""``%matplotlib widget``: an interactive canvas beside the PNG, never instead of it."""

from collections.abc import Iterator

import pytest

from tests.kernel.client import Cell, Kernel

VIEW = "application/vnd.jupyter.widget-view+json"
LINE = "%ddp_compare ddp --task synthetic --epochs 0.1 --no-baseline --name"


@pytest.fixture
def widget_kernel(kernel: Kernel) -> Iterator[Kernel]:
    chosen = kernel.run("%matplotlib widget")
    assert not chosen.error, chosen.error_text
    yield kernel
    kernel.run("%matplotlib inline")


def kinds(cell: Cell) -> list[set[str]]:
    assert not cell.error, cell.error_text
    return [set(output["data"]) for output in cell.outputs]


PICTURE, TABLE, CANVAS = (
    {"image/png", "text/plain"},
    {"text/html", "text/plain"},
    {VIEW, "text/plain"},
)


def test_without_it_there_is_no_canvas_and_no_backend_is_chosen(kernel: Kernel):
    kernel.run("%matplotlib inline")
    assert kinds(kernel.run(f"{LINE} still", timeout=120)) == [PICTURE, TABLE]
    assert kinds(kernel.run("%ddp_plot still")) == [PICTURE, TABLE]


def test_a_comparison_and_a_plot_add_a_canvas(widget_kernel: Kernel):
    for source in (f"{LINE} moving", "%ddp_plot moving", "%ddp_plot moving --x seconds --log"):
        cell = widget_kernel.run(source, timeout=120)
        assert kinds(cell) == [PICTURE, TABLE, CANVAS]
        model = cell.outputs[2]["data"][VIEW]["model_id"]
        canvas = f"__import__('ipywidgets').widgets.widget._instances['{model}']"
        assert widget_kernel.value(f"type({canvas}).__module__") == "ipympl.backend_nbagg"
        assert int(widget_kernel.value(f"len({canvas}.figure.axes)")) >= 3
        assert "to zoom and pan" in cell.outputs[2]["data"]["text/plain"]
    title = widget_kernel.value(f"{canvas}.manager.get_window_title()")
    assert title == "moving"
    figures = "__import__('matplotlib.pyplot').pyplot.get_fignums()"
    assert widget_kernel.value(figures) == "[]"  # none is left open, nor shown twice


def test_the_canvas_answers_its_client(widget_kernel: Kernel):
    cell = widget_kernel.run(f"{LINE} answers", timeout=120)
    model = cell.outputs[2]["data"][VIEW]["model_id"]
    widgets = "__import__('ipywidgets').widgets.widget._instances"
    zoomed = widget_kernel.run(
        f"""%%local
canvas = {widgets}["{model}"]
for content in (
    {{"type": "initialized"}},
    {{"type": "send_image_mode"}},
    {{"type": "refresh"}},
    {{"type": "draw"}},
):
    canvas._handle_message(canvas, content, [])
axes = canvas.figure.axes[0]
old = axes.get_xlim()
canvas.manager.toolbar.zoom()
box = axes.bbox
def mouse(kind, x, y):
    canvas._handle_message(canvas, {{
        "type": kind, "x": x, "y": canvas.figure.bbox.height - y, "button": 0, "buttons": 1,
        "modifiers": [], "guiEvent": {{}},
    }}, [])
mouse("button_press", box.x0 + 0.2 * box.width, box.y0 + 0.2 * box.height)
mouse("motion_notify", box.x0 + 0.6 * box.width, box.y0 + 0.6 * box.height)
mouse("button_release", box.x0 + 0.6 * box.width, box.y0 + 0.6 * box.height)
new = axes.get_xlim()
print((new[1] - new[0]) < 0.5 * (old[1] - old[0]))
"""
    )
    assert not zoomed.error, zoomed.error_text
    assert zoomed.stdout.strip() == "True"


def test_a_comparison_in_the_background_adds_one_too(widget_kernel: Kernel):
    request = widget_kernel.begin(
        f"running = {LINE.replace('--name', '--no-wait --name')} behind\n"
        "while not running.done:\n    __import__('time').sleep(0.05)"
    )
    cell = widget_kernel.wait(request, timeout=120)
    assert not cell.error, cell.error_text
    assert widget_kernel.value("running.error") == "None"
    assert len(cell.bundles("image/png")) == 1
    assert len(cell.bundles(VIEW)) == 1
