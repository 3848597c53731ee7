"""``make demo``: the comparison of the first lesson without a browser."""

import sys
import time

from ddpnb import api
from ddpnb.reports.result import ComparisonResult


def main(folder: str) -> None:
    """Run the comparison of the first lesson, print its table and save it.

    Args:
        folder: where ``comparison.html``, ``.png`` and ``.csv`` are written.
    """
    start = time.monotonic()
    try:
        print(api.start(), "\n")
        result = api.compare(
            "dp", "ddp", "async", task="digits", epochs=12, lr=0.02, repeats=3, name="demo"
        )
        assert isinstance(result, ComparisonResult)  # wait is true
        paths = result.save(folder)
    finally:
        api.stop()
    print(f"\nWritten in {time.monotonic() - start:.0f} s:", *paths, sep="\n  ")


if __name__ == "__main__":
    main(*sys.argv[1:])
