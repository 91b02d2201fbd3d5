"""Sphinx's settings for the site. `build.py` writes the pages that they apply to, and starts Sphinx."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes, utils
from docutils.parsers.rst.states import Inliner
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.transforms import SphinxTransform

import fastrt

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import diagrams  # noqa: E402 (found by the line above)
from reference import MODULES, public_names  # noqa: E402 (found by the line above)

project = "fastrt"
author = copyright = "fastrt developers"
version = release = fastrt.__version__
root_doc = "index"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
suppress_warnings = ["misc.highlighting_failure"]  # programs of other languages and made-up output
highlight_language = "none"
smartquotes_action = "D"  # dashes only: quotes in docstrings are mostly those of code

# Docstrings have the Google form, and single backticks around code.
default_role = "code-or-name"
napoleon_numpy_docstring = False
napoleon_use_param = False  # or "a, b: text" becomes two entries with the same text
napoleon_use_ivar = True
napoleon_custom_sections = ["Source"]
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 72

html_theme = "furo"
html_title = f"fastrt {version}"
html_static_path = [str(HERE / "style.css")]
html_favicon = str(HERE.parents[1] / "src" / "fastrt" / "dashboard" / "static" / "icon.svg")
html_css_files = ["style.css"]
html_copy_source = False
html_use_index = html_domain_indices = False  # the search finds names
html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": [], "navigation_with_keys": True}

NAMES = public_names()
SHORT = {name.rpartition(".")[2] for name in NAMES}
TYPE = re.compile(r"(?<![\w.~'\"])[A-Z]\w*\b(?!\()")
CONSTANT = re.compile(r"(?<== )_[A-Z_]+\b")  # a default with a name of its own
PAGE = re.compile(r"`?\bdocs/(\w+)\.md`?")


class Diagrams(SphinxTransform):
    """Replaces Mermaid's code blocks by what `diagrams` makes of them."""

    default_priority = 200

    def apply(self) -> None:
        """Replace those of one page."""
        for block in list(self.document.findall(nodes.literal_block)):
            if block.get("language") == "mermaid":
                block.replace_self(nodes.raw("", diagrams.as_html(block.astext()), format="html"))


def code_or_name(
    role: str, rawtext: str, text: str, lineno: int, inliner: Inliner, options: Any = None, content: Any = ()
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Text between single backticks: a link if it is a public name or a call of one, else just code."""
    text = utils.unescape(text)
    full = NAMES.get(text.partition("(")[0])
    if full is None:
        return [nodes.literal(rawtext, text)], []
    link = addnodes.pending_xref(rawtext, refdomain="py", reftype="obj", reftarget=full, refexplicit=True, refwarn=True)
    link += nodes.literal(rawtext, text)
    return [link], []


def name_types(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Give types in a signature their full names, as two modules have a `Handle`.

    One that another module than the signature's has is a type variable here, and becomes no link.
    """
    module = max((m for m in MODULES if name.startswith(f"{m}.")), key=len, default="fastrt")

    if what == "class" and re.search(r"\b[Mm]ade by `", getattr(obj, "__doc__", None) or ""):
        return "", None  # programs do not call it

    def full(match: re.Match[str]) -> str:
        if f"{module}.{match[0]}" in NAMES:
            return f"~{module}.{match[0]}"
        return NAMES.get(match[0], f"~{module}.{match[0]}") if match[0] in SHORT else match[0]

    defaults = getattr(inspect.unwrap(obj), "__globals__", {}) if callable(obj) else {}
    if inspect.isclass(obj):
        defaults = getattr(obj.__init__, "__globals__", {})
    if signature:
        signature = CONSTANT.sub(lambda match: repr(defaults.get(match[0], match[0])), signature)
    return signature and TYPE.sub(full, signature), returned and TYPE.sub(full, returned)


def mend_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Make links of the pages that a docstring names; leave out what abstract methods raise.

    A colon before the description of a result keeps napoleon from taking its first words for a type.
    """
    text = re.sub(r"(?m)^Raises:\n +NotImplementedError: always, in this base class\.\n?", "", "\n".join(lines))
    lines[:] = re.sub(r"(?m)^(Returns:\n +)", r"\1: ", text).split("\n")
    for i, line in enumerate(lines):
        lines[i] = PAGE.sub(r":doc:`/\1`", line)


def drop_overloads(app: Sphinx) -> None:
    """Show one signature for a function that has several for type checkers: `fastrt.remote` has thirteen."""
    for name in [name for name in sys.modules if name.split(".")[0] == "fastrt"]:
        if (getattr(sys.modules[name], "__file__", None) or "").endswith(".py"):
            analyzer = ModuleAnalyzer.for_module(name)
            analyzer.analyze()
            analyzer.overloads.clear()


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.add_transform(Diagrams)
    app.add_role("code-or-name", code_or_name)
    app.connect("autodoc-process-docstring", mend_docstring, priority=100)  # before napoleon's
    app.connect("autodoc-process-signature", name_types)
    app.connect("builder-inited", drop_overloads)
