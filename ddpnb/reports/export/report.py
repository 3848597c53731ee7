"""A comparison as one page that needs no other file (kernel)."""

from html import escape

from ddpnb.history.comparison import Comparison, magic_of
from ddpnb.protocol.notation import Target
from ddpnb.reports.findings import results_table
from ddpnb.reports.formatting import title
from ddpnb.reports.kit import image_html, page
from ddpnb.reports.sentence import sentence
from ddpnb.reports.table import pairs_table


def report_html(comparison: Comparison, png: bytes, target: Target | None = None) -> str:
    """Return the report: figure (``png``), sentence, table, settings, code, environment."""
    parts = [
        f"<h1>{escape(title(comparison))}</h1>",
        f"<p>{escape(sentence(comparison, target))}</p>",
        image_html(png, title(comparison)),
        f'<div class="wide">{results_table(comparison, target).html()}</div>',
        _settings(comparison),
        _code(comparison.source or magic_of(comparison)),
        pairs_table("Environment", comparison.environment).html() if comparison.environment else "",
    ]
    return page(title(comparison), "\n".join(part for part in parts if part))


def _settings(comparison: Comparison) -> str:
    spec = next((run.spec for run in comparison.runs if run.spec), None)
    if spec is None:
        return ""
    settings = {
        "task": spec.task,
        "passes over the data": f"{spec.num_epochs:g}",
        "global batch": spec.batch_words,
        "learning rate": spec.rate_words,
        "momentum": f"{spec.momentum:g}",
        "seed": str(spec.seed),
        "warm-up steps, not timed": str(spec.num_warmup_steps),
    }
    return pairs_table("Settings of the first run", settings).html()


def _code(source: str) -> str:
    return f"<h2>Code</h2><pre><code>{escape(source)}</code></pre>" if source.strip() else ""
