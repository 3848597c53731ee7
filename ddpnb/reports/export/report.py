"""A comparison as one page that needs no other file (kernel)."""

from html import escape

from ddpnb.history.comparison import Comparison, magic_of
from ddpnb.protocol.notation import Target
from ddpnb.reports.findings import results_table
from ddpnb.reports.formatting import title
from ddpnb.reports.kit import image_html
from ddpnb.reports.sentence import sentence
from ddpnb.reports.table import pairs_table

STYLE_SHEET = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; height: auto; }
pre { padding: 1rem; overflow: auto; border-radius: .5rem; background: rgba(128,128,128,.12); }
.wide { overflow-x: auto; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin-top: 2rem; }
@media print {
  body { max-width: none; margin: 0; font-size: 11pt; }
  pre { white-space: pre-wrap; overflow: visible; }
  img, tr, pre { break-inside: avoid; }
  h2 { break-after: avoid; }
  .wide, .wide > div { overflow-x: visible !important; }
}
"""


def report_html(comparison: Comparison, png: bytes, target: Target | None = None) -> str:
    """Return the report: figure (``png``), sentence, table, settings, code, environment."""
    heading = escape(title(comparison))
    parts = [
        f"<h1>{heading}</h1>",
        f"<p>{escape(sentence(comparison, target))}</p>",
        image_html(png, title(comparison)),
        f'<div class="wide">{results_table(comparison, target).html()}</div>',
        _settings(comparison),
        _code(comparison.source or magic_of(comparison)),
        pairs_table("Environment", comparison.environment).html() if comparison.environment else "",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{heading}</title><style>{STYLE_SHEET}</style></head>\n"
        f"<body>{chr(10).join(part for part in parts if part)}</body></html>\n"
    )


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
