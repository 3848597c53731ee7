"""Writes the site's reference from the code: magics, functions, strategies."""

import argparse
import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import ddpnb
from ddpnb.magics.inside import InsideMagics
from ddpnb.magics.magics import DdpMagics
from ddpnb.protocol.catalogue import STRATEGIES, TASKS
from ddpnb.protocol.options import Option

RESULTS = ("ddpnb.reports.result.ComparisonResult", "ddpnb.reports.inside.traces.TraceResult")


def write(folder: Path) -> None:
    """Write the pages; one that has not changed stays as it is, so that it is not built again."""
    folder.mkdir(exist_ok=True)
    for name, lines in {"magics": magics(), "api": api(), "strategies": strategies()}.items():
        page, text = folder / f"{name}.md", "\n".join(lines) + "\n"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def magics() -> Iterator[str]:
    """Yield the lines of the page of magics, in the order of the source."""
    yield "# Magics: all options\n"
    yield "As `%magic?` shows them in the notebook. [Magics](../magics.md) has them by task.\n"
    for owner in (DdpMagics, InsideMagics):
        for name in vars(owner):
            marks = [
                mark for kind, mark in (("line", "%"), ("cell", "%%")) if name in owner.magics[kind]
            ]
            if marks:
                yield f"## {' and '.join(f'{mark}{name}' for mark in marks)}\n"
                yield from magic(getattr(owner, name))


def magic(function: object) -> Iterator[str]:
    """Yield what a magic does, and its options as a table for each group."""
    parser: argparse.ArgumentParser | None = getattr(function, "parser", None)
    yield inspect.cleandoc((parser.description if parser else function.__doc__) or "") + "\n"
    for group in parser._action_groups[1:] if parser else ():
        is_first = group.title == "options"
        actions = [*(parser._positionals._group_actions if is_first else ()), *group._group_actions]
        rows = []
        for each in actions:
            value = each.metavar or each.dest if each.nargs != 0 else ""
            named = " ".join((", ".join(each.option_strings), str(value))).strip()
            rows.append((f"`{named}`", (each.help or "").replace("%%", "%")))
        yield from table(("" if is_first else str(group.title), ""), rows)


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
        if name == "UserError":
            yield ".. autoexception:: ddpnb.protocol.errors.UserError\n"
        else:
            place = "ddpnb.rank.publisher" if name == "log" else "ddpnb"
            yield f".. autofunction:: {place}.{name}\n"
    for result in RESULTS:
        yield f".. autoclass:: {result}\n   :members:\n   :inherited-members:\n"
    yield "```"


def strategies() -> Iterator[str]:
    """Yield the lines of the page of strategies and tasks."""
    yield "# Strategies: update rules and messages\n"
    yield "From the head of each strategy's file; `%ddp_source NAME` shows the whole of it."
    yield "[Strategies](../strategies.md) has them on one screen.\n"
    for name, entry in STRATEGIES.items():
        yield f"## {name}\n"
        yield (ast.get_docstring(ast.parse(entry.file.read_text())) or "") + "\n"
        yield from options(name, entry.options)
    yield "## Tasks\n"
    yield from table(("task", ""), ((f"`{name}`", each.about) for name, each in TASKS.items()))
    for name, task in TASKS.items():
        yield from options(name, task.options)


def options(owner: str, declared: Mapping[str, Option]) -> Iterator[str]:
    """Yield the table of the options of a strategy or task."""
    rows = (
        (f"`{owner}:{key}=`", each.meaning, "" if each.default is None else f"`{each.default}`")
        for key, each in declared.items()
    )
    yield from table(("option", "", "default"), rows)
