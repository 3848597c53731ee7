"""The demo runs from its start to its end, without a notebook."""

from pathlib import Path

from tests.programs import printed

SHORT = """
from ddpnb import api, demo
compare = api.compare
api.compare = lambda *names, **options: compare(*names, **options | dict(epochs=1, repeats=1))
demo.main({folder!r})
"""


def test_the_demo_saves_three_comparisons_and_leaves_nothing_running(tmp_path: Path):
    text = printed(SHORT.format(folder=str(tmp_path / "demo")))
    assert "times are computed for 8 emulated V100" in text
    for place in ("", "network", "cores"):
        for ending in ("html", "png", "runs.csv"):
            file = tmp_path / "demo" / place / f"comparison.{ending}"
            assert file.stat().st_size > 1000
            assert str(file) in text
