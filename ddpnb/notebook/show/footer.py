"""What stands in one line below a figure?  (Notebook side.)"""

from ddpnb.notebook.record.comparison import Comparison
from ddpnb.notebook.record.summary import StrategySummary
from ddpnb.notebook.show import words
from ddpnb.notebook.show.layout import WIDTH
from ddpnb.notebook.show.measure import width_inches

FOOTER_INCHES = WIDTH - 0.7
MORE = "more below the table"


def footer(comparison: Comparison, summaries: tuple[StrategySummary, ...]) -> str:
    """Return what the lines mean, and what must be said beside them, in one line of whole notes."""
    repeats = max((run.repeat for run in comparison.runs), default=0) > 0
    faint, strong = ("each repeat", "median") if repeats else ("every update", "moving average")
    text, told = f"Faint: {faint}, strong: {strong}.", ""
    notes = [note.rstrip(".") for note in words.notes(comparison, summaries)]
    for index, note in enumerate(notes):
        longer = f"{told}; {note}" if told else f" {note}"
        rest = "" if index == len(notes) - 1 else f"; {MORE}"
        if width_inches(text + longer + rest) > FOOTER_INCHES:
            return f"{text}{told}; {MORE}" if told else f"{text} {MORE.capitalize()}"
        told = longer
    return text + told
