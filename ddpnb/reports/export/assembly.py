"""Assembly of a script's text from the statements of several files (kernel).

The files are read and never imported, because they need torch and the kernel does not import it.
"""

import ast
import symtable
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from ddpnb.protocol.errors import UserError

WIDTH = 88
"""Ruff's default line length."""
CELL_NAMES = (
    *("model", "data", "loss", "collate_fn", "optimizer"),
    *("training_step", "validation_step", "metric"),
)
"""Names that a cell can define and that the files use."""


class Import(NamedTuple):
    """An imported name: ``from module import name as bound``, or ``import module``."""

    module: str
    name: str
    bound: str

    @property
    def root(self) -> str:
        """The top-level package of the module."""
        return self.module.partition(".")[0]

    @property
    def path(self) -> str:
        """The full path of the imported object, the same for every form of import."""
        if self.name:
            return f"{self.module}.{self.name}"
        return self.root if self.bound == self.root else self.module


class Statement(NamedTuple):
    """A statement at the top of a file, with the comments above it."""

    text: str
    bound: frozenset[str]
    used: frozenset[str]
    """Global names that the statement uses, including Python's built-ins."""
    is_block: bool
    """True if two blank lines surround the statement."""


class Source(NamedTuple):
    """The imports and statements of a file or a cell."""

    imports: Sequence[Import]
    statements: Sequence[Statement]

    @property
    def bound(self) -> set[str]:
        """The names that the statements define."""
        return {name for each in self.statements for name in each.bound}

    @property
    def unknown(self) -> set[str]:
        """The names that are used but neither defined nor imported."""
        used = {name for each in self.statements for name in each.used}
        return used - self.bound - {each.bound for each in self.imports}


def parse(text: str) -> Source:
    """Return the imports and statements of a text, without its docstring.

    Raises:
        SyntaxError: the text is not Python.
    """
    nodes, lines = ast.parse(text).body, text.splitlines()
    imports: list[Import] = []
    chunks: list[list[str]] = []
    comments: list[str] = []
    end = 0
    for above, node in zip([None, *nodes], nodes, strict=False):
        begin, end = end, node.end_lineno or 0
        chunk = lines[begin:end]
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports += _imports(node)
            comments += [line for line in chunk if line.startswith("#")]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if chunks:  # it describes the statement above
                chunks[-1] += chunk
        elif chunk or isinstance(above, ast.Import | ast.ImportFrom):  # otherwise on the same line
            chunks.append([*comments, *(chunk or [ast.unparse(node)])])
            comments = []
    if chunks:
        chunks[-1] += lines[end:]
    return Source(imports, [_statement("\n".join(each)) for each in chunks])


def needed(
    roots: Collection[str], sources: Sequence[Source], own: Source, settings: Collection[str]
) -> tuple[list[Import], set[Statement], set[str]]:
    """Return the imports, statements and names that a script needs, directly or indirectly.

    Args:
        roots: the names that the script uses first.
        sources: the files.  Later files override earlier files.
        own: the cell, which overrides all files for the names that a cell can define.
        settings: names with a value, which override statements.

    Raises:
        UserError: the cell uses a needed name for something else.
    """
    defined = {name: each for file in sources for each in file.statements for name in each.bound}
    imported = {each.bound: each for file in sources for each in file.imports}
    known = {each.bound: each.path for each in own.imports} | dict.fromkeys(own.bound, "")
    found: set[str] = set()
    pending = list(roots)
    while pending:
        name = pending.pop()
        is_other = name in settings or name in defined or name in imported
        if name in found or not is_other or (name in known and name in CELL_NAMES):
            continue
        if name in known and (name not in imported or imported[name].path != known[name]):
            raise UserError(
                f"The cell defines {name}, but the script needs this name for something else. "
                "Use another name in the cell."
            )
        found.add(name)
        if name in defined and name not in settings:
            pending += defined[name].used
    imports = [each for name, each in imported.items() if name in found and name not in known]
    return imports, {defined[name] for name in found & defined.keys() - {*settings}}, found


def imports_text(imports: Iterable[Import]) -> str:
    """Return import statements that are sorted and wrapped like ruff's."""
    named: dict[tuple[int, bool, str, str], list[str]] = {}
    for each in dict.fromkeys(imports):
        kind = 0 if each.root == "__future__" else 1 if each.root in sys.stdlib_module_names else 2
        alias = "" if each.bound in (each.name, each.path) else f" as {each.bound}"
        place = (kind, bool(each.name), each.module, each.name if alias else "")
        named.setdefault(place, []).append(each.name + alias)
    sections: dict[int, list[str]] = {}
    for (kind, is_from, module, _), names in sorted(named.items()):
        names.sort(key=lambda name: (len(name) < 2 or not name.isupper(), name[:1].islower(), name))
        line = (
            f"from {module} import {', '.join(names)}" if is_from else f"import {module}{names[0]}"
        )
        if len(line) > WIDTH:
            line = f"from {module} import (\n    " + ",\n    ".join(names) + ",\n)"
        sections.setdefault(kind, []).append(line)
    return "\n\n".join(map("\n".join, sections.values()))


def joined(statements: Sequence[Statement]) -> str:
    """Return statements as one text, with two blank lines around functions and classes."""
    text = ""
    for above, each in zip([None, *statements], statements, strict=False):
        is_far = above is not None and (above.is_block or each.is_block)
        text += ("\n\n\n" if is_far else "\n") + (each.text.strip("\n") if is_far else each.text)
    return text.strip("\n")


def _statement(text: str) -> Statement:
    """Return a statement with its names, and keep one blank line above the statement."""
    used: set[str] = set()
    bound: set[str] = set()
    tables = [symtable.symtable(text, "", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() or table.get_type() == "module":
                is_bound = symbol.is_assigned() or symbol.is_imported()
                (bound if is_bound else used).add(symbol.get_name())
    is_block = isinstance(ast.parse(text).body[0], ast.FunctionDef | ast.ClassDef | ast.If)
    text = "\n" * text.startswith("\n") + text.strip("\n")
    return Statement(text, frozenset(bound), frozenset(used), is_block)


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[Import]:
    """Yield the imported names, except imports from ddpnb."""
    module = getattr(node, "module", "")
    for each in node.names:
        if isinstance(node, ast.Import):
            root = each.name.partition(".")[0]
            yield Import(each.name, "", each.asname or root)
        elif module.partition(".")[0] == "ddpnb":
            return
        elif each.name == "*":
            raise UserError(
                f"The cell imports * from {module}, but a script needs the names. Import each "
                "name that the cell uses."
            )
        else:
            yield Import(module, each.name, each.asname or each.name)
