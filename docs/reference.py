"""Writes the site's reference from the code: magics, functions, strategies."""

import argparse
import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import ddpnb
from ddpnb.magics.magics import DdpMagics
from ddpnb.protocol.catalogue import STRATEGIES, TASKS
from ddpnb.protocol.options import Option

RESULTS = ("ddpnb.reports.result.ComparisonResult", "ddpnb.reports.inside.traces.TraceResult")


def write(folder: Path) -> None:
    """Write the three pages."""
    folder.mkdir(exist_ok=True)
    for name, lines in {"magics": magics(), "api": api(), "strategies": strategies()}.items():
        (folder / f"{name}.md").write_text("\n".join(lines) + "\n")


def magics() -> Iterator[str]:
    """Yield the lines of the page of magics: what each does, and its options."""
    yield "# Magics: all options\n"
    yield "As `%magic?` shows them in the notebook. [Magics](../magics.md) has them by task.\n"
    for name, function in vars(DdpMagics).items():
        kinds = {"%": "line", "%%": "cell"}
        names = [f"{mark}{name}" for mark, kind in kinds.items() if name in DdpMagics.magics[kind]]
        if names:
            yield f"## {' and '.join(names)}\n"
            parser = getattr(function, "parser", None)
            yield inspect.cleandoc(parser.description if parser else function.__doc__) + "\n"
            yield from arguments(parser) if parser else ()


def arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a table for each group of a magic's arguments; the first has those without dashes."""
    without_dashes, first, *others = parser._action_groups
    for group in (first, *others):
        rows, named_first = [], without_dashes._group_actions if group is first else []
        for each in (*named_first, *group._group_actions):
            value = each.metavar or each.dest if each.nargs != 0 else ""
            named = " ".join((", ".join(each.option_strings), str(value))).strip()
            rows.append((f"`{named}`", (each.help or "").replace("%%", "%")))
        yield from table(("" if group is first else str(group.title), ""), rows)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield a table's lines, if it has rows."""
    shown = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    if shown:
        yield from (f"| {' | '.join(head)} |", "|---" * len(tuple(head)) + "|", *shown, "")


def api() -> Iterator[str]:
    """Yield the lines of the page of public functions and results."""
    yield "# Functions and results\n"
    yield "The twin of each magic in Python, and what they return.\n"
    yield "```{eval-rst}\n.. py:currentmodule:: ddpnb\n"
    for name in ddpnb.__all__:
        kind = "exception" if name == "UserError" else "function"
        place = "ddpnb.rank.publisher" if name == "log" else "ddpnb"  # log is the ranks' alone
        yield f".. auto{kind}:: {place}.{name}\n"
    for result in RESULTS:
        yield f".. autoclass:: {result}\n   :members:\n   :inherited-members:\n"
    yield "```"


def strategies() -> Iterator[str]:
    """Yield the lines of the page of strategies and tasks."""
    yield "# Strategies: update rules and messages\n"
    yield "From the head of each strategy's file; `%ddp_source NAME` shows the whole of it."
    yield "[Strategies](../strategies.md) has them on one screen.\n"
    for name, strategy in STRATEGIES.items():
        yield f"## {name}\n\n{ast.get_docstring(ast.parse(strategy.file.read_text()))}\n"
        yield from options(name, strategy.options)
    yield "## Tasks\n"
    for name, task in TASKS.items():
        yield f"`{name}`: {task.about}.\n"
        yield from options(name, task.options)


def options(owner: str, declared: Mapping[str, Option]) -> Iterator[str]:
    """Yield the table of the options of a strategy or task."""
    rows = (
        (f"`{owner}:{key}=`", each.meaning, "" if each.default is None else f"`{each.default}`")
        for key, each in declared.items()
    )
    yield from table(("option", "", "default"), rows)
