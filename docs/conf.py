"""Sphinx configuration: ``make docs`` builds the site from the Markdown files and notebooks."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from pygments.lexer import bygroups
from pygments.lexers.python import PythonLexer
from pygments.token import Keyword, Text
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
import reference  # noqa: E402

project = "ddpnb"
author = "ddpnb's authors"
root_doc = "docs/index"  # the repository is the source folder, so links work as on GitHub
include_patterns = ["docs/**", "notebooks/*", "benchmarks/README.md", "[ACR]*.md"]
exclude_patterns = ["README.md", "docs/root"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

repository = os.environ.get("GITHUB_REPOSITORY", "")  # GitHub's workflows set it
html_theme = "sphinx_book_theme"
html_title = "ddpnb"
html_extra_path = ["root"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
smartquotes_action = "qe"  # options keep their two dashes
html_theme_options: dict[str, Any] = {"show_toc_level": 2, "navbar_persistent": []}
if repository:
    html_theme_options |= {
        "repository_url": f"https://github.com/{repository}",
        "repository_branch": "main",
        "use_repository_button": True,
        "launch_buttons": {
            "notebook_interface": "jupyterlab",
            "binderhub_url": "https://mybinder.org",
        },
    }

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_math_renderer = "mathml"

nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build/lessons")
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 200
nb_merge_streams = True
nb_render_error_lexer = "text"
nb_code_prompt_show = "Show a solution"
nb_code_prompt_hide = "Hide the solution"

autodoc_typehints = "none"
autodoc_member_order = "bysource"


class NotebookLexer(PythonLexer):
    """A lexer for Python code with magics."""

    magic = bygroups(Keyword, Text)
    tokens = PythonLexer.tokens | {
        "root": [
            (r"^(\s*[%!]+[\w/.]+)(.*\n)", magic),
            (r"(%ddp_\w+)(.*\n)", magic),
            *PythonLexer.tokens["root"],
        ]
    }


def change_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Use a lesson's solutions, folded, as its source. On other pages link code to GitHub."""
    if docname.startswith("notebooks/0"):
        solved = ROOT / "notebooks/solutions" / f"{Path(docname).name}.ipynb"
        notebook = json.loads(solved.read_text())
        for cell in notebook["cells"]:
            lines = "".join(cell["source"]).splitlines(keepends=True)
            kept = [line for line in lines if not re.match(r" *### (BEGIN|END) SOLUTION", line)]
            if len(kept) < len(lines):
                cell["source"] = "".join(kept).rstrip()
                cell["metadata"] = {"tags": ["hide-input"]}
        source[0] = json.dumps(notebook)
    else:
        folders = r"ddpnb/|benchmarks/results|solutions/|Dockerfile|\.devcontainer/"
        links = rf"\[([^\]]+)\]\(((?:\.\./)*(?:{folders})[^)]*)\)"
        source[0] = re.sub(links, lambda link: code_link(link, Path(docname).parent), source[0])


def code_link(link: re.Match[str], folder: Path) -> str:
    """Return a link to code on GitHub, or only the link's text if the repository is unknown."""
    path = os.path.normpath(folder / link[2])
    address = f"https://github.com/{repository}/blob/main/{path}"
    return f"[{link[1]}]({address})" if repository else link[1]


def visit_math(translator: Any, node: nodes.Element) -> None:
    """Write a formula as MathML, because browsers show MathML without a script."""
    is_block = isinstance(node, nodes.math_block)
    translator.body.append(latex2mathml.tex2mathml(node.astext(), as_block=is_block))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Register the renderers, lexers and link changes, and write the reference pages."""
    reference.write(ROOT / "docs/reference")
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    for language in ("python", "ipython3"):
        app.add_lexer(language, NotebookLexer)
    app.connect("source-read", change_source)
