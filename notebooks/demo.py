"""``make demo``: the comparisons of the first lesson without a browser."""

import sys
import time
from pathlib import Path

from ddpnb import api
from ddpnb.reports.result import ComparisonResult


def main(folder: str) -> None:
    """Run both comparisons of the first lesson, print their tables and save them.

    Args:
        folder: where ``comparison.html``, ``.png`` and ``.csv`` are written, and those of the
            comparison over an emulated network in ``link/``.
    """
    start = time.monotonic()
    try:
        print(api.start(), "\n")
        race = api.compare(
            "dp", "ddp", "async", task="digits", epochs=40, batch_size=128, repeats=3, name="demo"
        )
        linked = api.compare(
            "ddp",
            "async",
            "local-sgd",
            task="digits",
            epochs=5,
            batch_size=128,
            link="1Gbit,0.5ms",
            name="demo-link",
        )
        assert isinstance(race, ComparisonResult)  # wait is true
        assert isinstance(linked, ComparisonResult)
        paths = [*race.save(folder), *linked.save(Path(folder) / "link")]
    finally:
        api.stop()
    print(f"\nWritten in {time.monotonic() - start:.0f} s:", *paths, sep="\n  ")


if __name__ == "__main__":
    main(*sys.argv[1:])
