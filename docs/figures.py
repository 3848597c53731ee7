"""Draws the docs' numbered figures. ``python docs/figures.py`` takes half a minute."""

from pathlib import Path
from typing import Any

import ddpnb

FOLDER = Path(__file__).parent
STEP = ((0.21, 0.913), (0.818, 0.776), (0.853, 0.847), (0.92, 0.913), (0.807, 0.448))
PREDICTION = ((0.73, 0.708), (1.158, 0.78), (0.47, 0.54), (0.66, 0.58), (0.56, 0.32))
"""Positions of the numbers, as fractions of the axes."""


def save(result: Any, name: str, places: tuple[tuple[float, float], ...] = ()) -> None:
    """Save a result's picture with numbers at ``places``, or before each panel's title."""
    picture = result.pictures()[0]
    panels = [axes for axes in picture.figure.axes if places or axes.get_title(loc="left")]
    marks = [(axes, (0.0, 1.0), (-13, 14)) for axes in panels]
    if places:
        marks = [(panels[-1], at, (0, 0)) for at in places]
    for number, (axes, at, offset) in enumerate(marks, start=1):
        circle = {"boxstyle": "circle,pad=0.2", "facecolor": "#1f2328", "edgecolor": "white"}
        look = {"color": "white", "weight": "bold", "ha": "center", "va": "center", "size": 11}
        where = {"xycoords": "axes fraction", "xytext": offset, "textcoords": "offset points"}
        axes.annotate(str(number), at, bbox=circle, annotation_clip=False, **where, **look)
    (FOLDER / "figures" / f"{name}.png").write_bytes(picture.png())


def main() -> None:
    """Train on eight emulated devices, predict up to 64, and inspect a step on three."""
    ddpnb.start(devices="8xV100", as_="resnet50")
    race = ddpnb.compare("dp", "ddp", "async", task="digits", epochs=6, batch_size=256, name="race")
    race.save(FOLDER / "comparison.png")  # for README.md
    save(race, "comparison")
    question = {"strategies": "ddp,async", "link": "25GbE", "hosts": 8, "batch_per_worker": 32}
    save(ddpnb.predict("1,2,4,8,16,32,64", run="race", **question), "prediction", PREDICTION)
    ddpnb.restart(3)
    step = ddpnb.inspect(task="digits", devices="3xV100", as_="resnet50", link="25Gbit,30us")
    save(step, "step", STEP)
    ddpnb.stop()


if __name__ == "__main__":
    main()
