"""What the site needs besides Markdown: measured tables, formulas as MathML, and links in docstrings.

Formulas become MathML while the site is built, so pages need no script and no network to show them.
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures
from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_DISPLAY = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)
_NUMBERED = re.compile(r"^\$\$(?=[^$]*\\tag\{(\d+)\})", re.MULTILINE)
_TAG = re.compile(r"\\tag\{(\d+)\}")
_ROLE = re.compile(r":(?:func|class|meth):<code>~?([\w.]+)</code>")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the measured tables where a page asks for them, and an anchor before every numbered formula."""
    return _NUMBERED.sub(r'<div id="eq-\1"></div>\n\n$$', figures.fill(markdown))


def on_page_content(content: str, **_: Any) -> str:
    """Turn TeX into MathML and Sphinx roles, which editors understand in docstrings, into links."""
    content = _DISPLAY.sub(lambda found: _equation(found[1]), content)
    content = _INLINE.sub(lambda found: convert(html.unescape(found[1])), content)
    return _ROLE.sub(lambda found: _link(found[1]), content)


def _equation(tex: str) -> str:
    tex = html.unescape(tex).strip()
    tag = _TAG.search(tex)
    formula = convert(_TAG.sub("", tex), display="block")
    if tag is None:
        return f'<div class="equation">{formula}</div>'
    number = tag[1]
    return f'<div class="equation">{formula}<a href="#eq-{number}">({number})</a></div>'


def _link(name: str) -> str:
    """A link within the API page, the only one that shows docstrings."""
    short = name.split(".")[-1]
    module = "softdtw_cuda.plot" if short == "AlignmentAxes" else "softdtw_cuda"
    return f'<a href="#{module}.{short}"><code>{short}</code></a>'
