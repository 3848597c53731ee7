"""What is needed to repeat a stored comparison?  (Notebook side.)"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import final

from ddpnb.notebook.record.comparison import Comparison
from ddpnb.notebook.record.repeat import magic_of
from ddpnb.notebook.record.summary import summarise
from ddpnb.notebook.show.table import Cell, Column, Table
from ddpnb.notebook.show.words import notes
from ddpnb.wire import MODEL_FILE, RunSpec

BLOCK = (
    "padding:.8em 1em;border-radius:.4em;background:rgba(128,128,128,.12);overflow:auto;"
    "max-height:30em;max-width:60em"
)


@final
class Details:
    """Settings, environment and the magic of a comparison; as HTML in a notebook."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    @property
    def magic(self) -> str:
        """The cell that trains it again; empty for a hand-written loop."""
        return magic_of(self.comparison)

    def tables(self) -> tuple[Table, Table]:
        """Return what was asked for, and where it ran."""
        return self._settings(), _pairs("Where it ran", dict(self.comparison.environment))

    def __repr__(self) -> str:
        parts = [table.text() for table in self.tables()]
        if self.magic:
            parts.append(f"To repeat it\n\n{self.magic}")
        elif self.comparison.source:
            parts.append(f"Its cell\n\n{self.comparison.source}")
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        head, code = "To repeat it", self.magic
        if not code:
            head, code = "Its cell", self.comparison.source
        block = f'<pre tabindex="0" style="{BLOCK}"><code>{escape(code)}</code></pre>'
        tables = "".join(table.html() for table in self.tables())
        return f"{tables}<p><b>{head}</b></p>{block}" if code else tables

    def _settings(self) -> Table:
        """Return the settings that the runs share, and what was emulated or adjusted."""
        comparison = self.comparison
        specs = comparison.specs or tuple(run.spec for run in comparison.runs if run.spec)
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(comparison.created))
        told = {"begun": begun, "strategies": " ".join(comparison.strategies)}
        hidden = ("run_id", "strategy", "repeat", "source", "cell", "checkpoints", "resume")
        for entry in dataclasses.fields(specs[0]) if specs else ():
            values = dict.fromkeys(_spoken(getattr(spec, entry.name)) for spec in specs)
            if entry.name not in hidden:
                told[entry.name.removeprefix("num_").replace("_", " ")] = " and ".join(values)
        if specs:
            told["repeats"] = str(max(spec.repeat for spec in specs) + 1)
        told |= {
            f"model of {spec.strategy}#{spec.repeat + 1}": str(p) for spec, p in _models(specs)
        }
        table = _pairs(comparison.name, told)
        return dataclasses.replace(table, notes=notes(comparison, summarise(comparison)))


def _models(specs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Path]]:
    """Yield where trained models lie, of those runs that saved them."""
    for spec in specs:
        path = Path(spec.checkpoints) / spec.run_id / MODEL_FILE
        if spec.checkpoints and path.is_file():
            yield spec, path


def _pairs(caption: str, pairs: dict[str, str]) -> Table:
    rows = tuple((Cell(text=name), Cell(text=value)) for name, value in pairs.items())
    return Table(
        caption=caption,
        columns=(Column(title="what"), Column(title="value", is_prose=True)),
        rows=rows,
    )


def _spoken(value: object) -> str:
    if value in (None, "", ()):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
