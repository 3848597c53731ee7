"""Runs the first lesson without a browser: ``python -m ddpnb.demo``.  Runs in the kernel."""

import sys
import time
from pathlib import Path

from ddpnb import api
from ddpnb.reports.result import ComparisonResult


def main(folder: str = "demo") -> None:
    """Run three comparisons of the first lesson, print their tables and save them.

    Args:
        folder: the folder for the results of eight emulated V100 GPUs: ``comparison.html``,
            ``.png`` and ``.runs.csv``.  Its subfolder ``network/`` is for results over a slow
            network, and ``cores/`` is for results of two ranks on this machine's cores.
    """
    start = time.monotonic()
    try:
        print(api.start(devices="8xV100", as_="resnet50"), "\n")
        race = compare("dp", "ddp", "async", epochs=6, batch_size=256, name="demo")
        network = compare(
            "ddp",
            "async",
            "local-sgd",
            epochs=6,
            batch_size=256,
            link="10Gbit,30us",
            name="network",
        )
        print(api.restart(2), "\n")
        cores = compare("ddp", "async", epochs=30, batch_size=128, repeats=3, name="demo-cores")
        written = [
            result.save(Path(folder) / place / f"comparison.{ending}")
            for place, result in (("", race), ("network", network), ("cores", cores))
            for ending in ("html", "png", "runs.csv")
        ]
    finally:
        api.stop()
    print(f"\nWritten in {time.monotonic() - start:.0f} s:", *written, sep="\n  ")


def compare(*strategies: str, **options: object) -> ComparisonResult:
    """Compare strategies on the task ``digits``."""
    result = api.compare(*strategies, task="digits", **options)  # type: ignore[arg-type]
    assert isinstance(result, ComparisonResult)  # wait is true
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
