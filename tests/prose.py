"""Measures how the project's texts read: ``python -m tests.prose`` prints the profile.

A count is a symptom.  If a figure is outside its bounds, rewrite the sentences; do not swap words.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pandas

from tests.lessons import NOTEBOOKS, SOLUTIONS, read

ROOT = Path(__file__).parents[1]
BOUNDS = {
    "if": (2, 20),
    "because": (0.5, 5),
    "instead": (0.3, 4),
    "where": (0, 2),
    "what": (0, 2),
    "as many": (0, 0.2),
    "in place of": (0, 0.2),
    "alone": (0, 0.4),
    "anew|mend|mends|mended": (0, 0.05),
    "of (?:its|their|your) own": (0, 0.3),
    "(?:that|those) of": (0, 0.4),
    "refuses|refused": (0, 0.3),
    "stands|stand for|lies|lie": (0, 0.2),
    "who|whose": (0, 0.3),
    "nobody|nothing": (0, 1.2),
    "hence|thus|likewise": (0, 0.3),
}
"""The lowest and highest number of occurrences in 1,000 words of plain technical English."""
LONGEST = 32


def pages() -> Iterator[str]:
    folders = (ROOT, ROOT / "docs", ROOT / "notebooks", ROOT / "benchmarks")
    for path in (path for folder in folders for path in sorted(folder.glob("*.md"))):
        yield _prose(path.read_text())


def lessons() -> Iterator[str]:
    for path in (*SOLUTIONS, NOTEBOOKS / "colab.ipynb"):
        yield from (
            _prose(cell.source) for cell in read(path).cells if cell.cell_type == "markdown"
        )


def code(*, docstrings: bool) -> Iterator[str]:
    """Yield every docstring and field doc of the package, or every other text of over 4 words."""
    for path in sorted((ROOT / "ddpnb").rglob("*.py")):
        tree = ast.parse(path.read_text())
        documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                is_long = len(node.value.split()) > 4
                if docstrings if id(node) in documented else not docstrings and is_long:
                    yield _prose(node.value)


KINDS = {
    "pages": pages,
    "lessons": lessons,
    "docstrings": lambda: code(docstrings=True),
    "messages": lambda: code(docstrings=False),
}


def profile(kind: str) -> dict[str, float]:
    """Return how often each word of ``BOUNDS`` occurs in 1,000 words of this kind of text."""
    text = "\n".join(KINDS[kind]())
    num_words = len(re.findall(r"[A-Za-z']+", text))
    return {
        word: 1000 * len(re.findall(rf"\b(?:{word})\b", text, re.IGNORECASE)) / num_words
        for word in BOUNDS
    }


def outside(kind: str) -> list[str]:
    """Return the words of this kind of text that occur too often or too seldom."""
    return [
        f"{word!r} occurs {found:.2f} times in 1,000 words of {kind}, not {low:g} to {high:g}"
        for word, found in profile(kind).items()
        for low, high in [BOUNDS[word]]
        if not low <= found <= high
    ]


def sentences(kind: str) -> Iterator[str]:
    """Yield the sentences of this kind of text, and the cells of its tables."""
    for text in KINDS[kind]():
        for part in re.split(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*[-*#|]|\n\s*\d+\. |\|", text):
            yield " ".join(part.split())


def _prose(text: str) -> str:
    text = re.sub(r"```.*?```|\$\$.*?\$\$", "\n\n", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "X", text))


if __name__ == "__main__":
    print(pandas.DataFrame({kind: profile(kind) for kind in KINDS} | {"wanted": BOUNDS}).round(2))
