"""What does the main comparison look like without a browser?  ``make demo``.  (Notebook side.)"""

import sys
import time

from ddpnb import api
from ddpnb.reports.result import ComparisonResult


def main(folder: str) -> None:
    """Run the comparison of the first lesson, print its table and save it.

    Args:
        folder: where ``comparison.html``, ``.png`` and ``.csv`` are written.
    """
    began = time.monotonic()
    try:
        print(api.start(), "\n")
        result = api.compare(
            "dp", "ddp", "async", task="digits", epochs=12, lr=0.02, repeats=3, name="demo"
        )
        assert isinstance(result, ComparisonResult)  # for it waited
        paths = result.save(folder)
    finally:
        api.stop()
    print(f"\nWritten in {time.monotonic() - began:.0f} s:", *paths, sep="\n  ")


if __name__ == "__main__":
    main(*sys.argv[1:])
