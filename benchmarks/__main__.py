"""Runs benchmarks and stores their figures: ``python -m benchmarks [versus ranks ...]``.

Without a name it runs ``versus``, as ``make bench`` does.  Options follow a colon:
``claims:num=20,part=power``.  ``python -m benchmarks table`` only writes the tables.
"""

import importlib
import re
import sys
from typing import Any

from benchmarks import table, versus
from benchmarks.measure import HEAD, Figure


def main(words: list[str]) -> None:
    print(HEAD)
    for word in words or ["versus"]:
        name, _, given = word.partition(":")
        options = dict(part.split("=", 1) for part in given.split(",") if part)
        figures: list[Figure] = []
        for figure in _measure(name, options):  # a benchmark may be killed before its last figure
            figures.append(figure)
            print(figure.row(), flush=True)
            table.keep(re.sub(r"[:=,]", "-", word), figures)


def _measure(name: str, options: dict[str, str]) -> Any:
    """Run one benchmark; each option is converted to the type of its parameter."""
    function = importlib.import_module(f"benchmarks.{name}").measure
    kinds = function.__annotations__
    return function(**{key: kinds[key](value) for key, value in options.items()})


if sys.argv[1:] == ["table"]:
    table.write()
    versus.write()
else:
    main(sys.argv[1:])
