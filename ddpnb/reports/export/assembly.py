"""Assembles a script's text from statements that are in several files.  Runs in the kernel.

ddpnb parses these files but never imports them, because they need torch.  The kernel does not
import torch.
"""

import ast
import symtable
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from ddpnb.protocol.errors import UserError

LINE_LENGTH = 88
"""Ruff's default line length."""
CELL_NAMES = (
    *("model", "data", "loss", "collate_fn", "optimizer"),
    *("training_step", "validation_step", "metric"),
)
"""Names that a cell can define.  An exported script uses the cell's definition if there is one."""


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
        """The object's full path: ``a.b`` for ``from a import b`` and for ``import a.b as c``."""
        if self.name:
            return f"{self.module}.{self.name}"
        return self.root if self.bound == self.root else self.module


class Statement(NamedTuple):
    """A top-level statement of a file, with the comments above the statement."""

    text: str
    bound: frozenset[str]
    used: frozenset[str]
    """Global names that the statement uses, including Python's built-ins."""
    is_block: bool
    """True if the statement needs two blank lines above and below, like a function."""


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
        """The names that the statements use without defining or importing them."""
        used = {name for each in self.statements for name in each.used}
        return used - self.bound - {each.bound for each in self.imports}


def parse(text: str) -> Source:
    """Return the imports and statements of Python code, without the module's docstring.

    Raises:
        SyntaxError: the text is not Python code.
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
            if chunks:  # the docstring of the field above
                chunks[-1] += chunk
        elif chunk or isinstance(above, ast.Import | ast.ImportFrom):  # skip if on the same line
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
        roots: the names that the script's main part uses.
        sources: the files.  If two files define a name, the later file is used.
        own: the user's cell.  The script uses the cell's definitions of ``CELL_NAMES``.
        settings: names of the script's settings.  Statements that define a setting are left out.

    Raises:
        UserError: the cell defines a name that the script needs for something else.
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
                f"The cell defines {name}, but the exported script needs this name for something "
                "else. Use another name in the cell."
            )
        found.add(name)
        if name in defined and name not in settings:
            pending += defined[name].used
    imports = [each for name, each in imported.items() if name in found and name not in known]
    return imports, {defined[name] for name in found & defined.keys() - {*settings}}, found


def imports_text(imports: Iterable[Import]) -> str:
    """Return the text of import statements, sorted and wrapped as ruff does it."""
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
        if len(line) > LINE_LENGTH:
            line = f"from {module} import (\n    " + ",\n    ".join(names) + ",\n)"
        sections.setdefault(kind, []).append(line)
    return "\n\n".join(map("\n".join, sections.values()))


def joined(statements: Sequence[Statement]) -> str:
    """Return the text of statements, with two blank lines around functions and classes."""
    text = ""
    for above, each in zip([None, *statements], statements, strict=False):
        is_far = above is not None and (above.is_block or each.is_block)
        text += ("\n\n\n" if is_far else "\n") + (each.text.strip("\n") if is_far else each.text)
    return text.strip("\n")


def _statement(text: str) -> Statement:
    """Return a ``Statement`` with the names that it defines and uses.  Keep a blank line above."""
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
    """Yield the names that a statement imports, except names of ddpnb."""
    module = getattr(node, "module", "")
    for each in node.names:
        if isinstance(node, ast.Import):
            root = each.name.partition(".")[0]
            yield Import(each.name, "", each.asname or root)
        elif module.partition(".")[0] == "ddpnb":
            return
        elif each.name == "*":
            raise UserError(
                f"The cell uses 'from {module} import *', but ddpnb must know the imported names "
                "to export a script. Import each name that the cell uses."
            )
        else:
            yield Import(module, each.name, each.asname or each.name)
