"""Writes the site's reference from the code: magics, functions, strategies."""

import argparse
import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import ddpnb.magics.magics
from ddpnb.declaration import MAGICS
from ddpnb.magics.arguments import parser_of
from ddpnb.protocol.catalogue import STRATEGIES, TASKS
from ddpnb.protocol.options import Option

RESULTS = ("ddpnb.reports.result.ComparisonResult", "ddpnb.reports.inspection.traces.TraceResult")
MESSAGES = {
    "Which option is wrong?": (
        "magics/arguments.py: arguments _reject",
        "protocol/notation.py: parse_ranks",
        "magics/magics.py: _push _rank",
        "api.py: run_script show_collective",
        "session/cells.py: read_script",
    ),
    "Why do the ranks not start?": (
        "session/session.py: cluster",
        "cluster/placement.py: check_num_ranks place_ranks _choose_backend",
    ),
    "Why does a cell not run?": (
        "cluster/cluster.py: require require_idle",
        "cluster/group.py: ensure_group",
        "session/session.py: _refuse_if_training",
        "session/variables.py: pull send",
        "rank/torchrun.py: _check refuse_launchers",
    ),
    "What happened to the ranks?": (
        "session/errors.py: CellTimeoutError CellInterrupt HangError",
        "cluster/cluster.py: remedy",
        "cluster/hangs.py: notice",
        "rank/collectives/mismatch.py: _settle begin",
    ),
    "Why does a comparison not start?": (
        "session/comparison_spec.py: __post_init__ _check_device refuse_magics",
        "protocol/training_options.py: __post_init__ make_training_spec",
        "session/comparison.py: with_devices _check_target",
        "session/machine.py: disturbance",
    ),
    "What is wrong with my model or data?": (
        "rank/tasks/cell.py: _function _checked_model",
        "rank/training/model_checks.py: check_model check_loss _own_loss _supervised_loss",
        "rank/tasks/samples.py: as_samples _as_tensors _stack",
        "rank/tasks/batches.py: __post_init__",
        "rank/training/optimizers.py: _checked",
    ),
}
"""The functions whose messages users see most, by situation."""


MARKS = {"%": "line", "%%": "cell"}


def write(folder: Path) -> None:
    """Write the four pages."""
    folder.mkdir(exist_ok=True)
    pages = {"magics": magics, "api": api, "strategies": strategies, "messages": messages}
    for name, lines in pages.items():
        (folder / f"{name}.md").write_text("\n".join(lines()) + "\n")


def magics() -> Iterator[str]:
    """Yield the lines of the page of magics: what each does, and its options."""
    yield "# Magics: all options\n"
    yield "As `%magic?` shows them in the notebook. [Magics](../magics.md) has them by task.\n"
    for name, declared in MAGICS.items():
        marks = [mark for mark, kind in MARKS.items() if kind in declared.kind]
        yield f"## {' and '.join(mark + name for mark in marks)}\n"
        yield declared.help + "\n"
        yield from arguments(parser_of(name))


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
    yield "The Python function of each magic, and the results that these functions return.\n"
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


def messages() -> Iterator[str]:
    """Yield the lines of the page of messages: those that users see most, by situation."""
    yield "# Messages\n"
    yield "This page lists the messages that you are most likely to see, as they are in the code."
    yield "A word in braces stands for a value. If you have only a symptom, start with"
    yield "[Troubleshooting](../troubleshooting.md).\n"
    for heading, places in MESSAGES.items():
        yield f"## {heading}\n"
        yield from (f"- {each}" for place in places for each in messages_at(place))
        yield ""


def messages_at(place: str) -> Iterator[str]:
    """Yield each message that functions or classes of a file raise or return.

    ``place`` names them: ``"file.py: name name"``.
    """
    file, _, names = place.partition(": ")
    tree = ast.parse((Path(ddpnb.__file__).parent / file).read_text())
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = {node.name: node for node in ast.walk(tree) if isinstance(node, kinds)}
    for name in names.split():
        for node in ast.walk(found[name]):
            match node:
                case (
                    ast.Raise(exc=ast.Call(args=[text, *_]))
                    | ast.Expr(value=ast.Call(func=ast.Attribute(attr="__init__"), args=[text, *_]))
                    | ast.Return(value=ast.JoinedStr() as text)
                ) if len((message := written(text)).split()) > 5:
                    yield message


def written(node: ast.AST) -> str:
    """Return a text of the code as Markdown, with a name in braces for each value."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text)
        case ast.JoinedStr(values=parts):
            return "".join(map(written, parts))
        case ast.FormattedValue(value=ast.Name(id=name) | ast.Attribute(attr=name)):
            return f"{{{name.strip('_')}}}"
        case ast.FormattedValue(value=ast.Call(args=[ast.Name(id=name)])):
            return f"{{{name}}}"
        case ast.FormattedValue():
            return "{...}"
    return ""
