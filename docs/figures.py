"""Draws the numbered figures of the reading pages: ``python docs/figures.py``, half a minute."""

from pathlib import Path
from typing import Any

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

import ddpnb

FOLDER = Path(__file__).parent / "figures"
FONT = ImageFont.truetype(font_manager.findfont("DejaVu Sans:bold"), 24)
MARKS = {
    "comparison": ((70, 72), (834, 72), (181, 387), (557, 387), (1036, 387), (1326, 387)),
    "step": ((500, 133), (1262, 172), (1310, 152), (1425, 133), (1250, 270)),
    "prediction": ((965, 327), (1447, 273), (669, 399), (885, 375), (770, 520)),
}
"""Where the numbers stand, in a picture of 1568 pixels' width."""


def save(result: Any, name: str) -> None:
    """Save a result's picture with its numbers."""
    path = FOLDER / f"{name}.png"
    result.save(path)
    picture = Image.open(path).convert("RGB")
    scale, drawing = picture.width / 1568, ImageDraw.Draw(picture)
    for number, (x, y) in enumerate(MARKS[name], start=1):
        at = (x * scale, y * scale)
        drawing.circle(at, 19, fill="#1f2328", outline="white", width=3)
        drawing.text(at, str(number), fill="white", font=FONT, anchor="mm")
    picture.quantize(method=Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def main() -> None:
    """Train on eight emulated devices, predict more of them, and look into a step of three."""
    FOLDER.mkdir(exist_ok=True)
    ddpnb.start(devices="8xV100", as_="resnet50")
    race = ddpnb.compare("dp", "ddp", "async", task="digits", epochs=6, batch_size=256, name="race")
    race.save(FOLDER.parent / "comparison.png")  # the README's
    save(race, "comparison")
    question = {"strategies": "ddp,async", "link": "25GbE", "hosts": 8, "batch_per_worker": 32}
    save(ddpnb.predict("1,2,4,8,16,32,64", run="race", **question), "prediction")
    ddpnb.restart(3)
    save(ddpnb.inspect(task="digits", link="10Gbit,30us"), "step")
    ddpnb.stop()


if __name__ == "__main__":
    main()
