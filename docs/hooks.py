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
_ALIASES = ("Lengths", "DistanceFunction", "Reduction", "Optimizer", "StopReason")
"""Types that docs/api.md explains in a table."""
_ALIAS_USE = re.compile(rf'(<span class="n">)?\b({"|".join(_ALIASES)})\b(?![^<>]*>)')
_CODE = re.compile(r"<code\b.*?</code>", re.DOTALL)
_ROLE = re.compile(r":(?:func|class|meth):<code>~?([\w.]+)</code>")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the measured tables where a page asks for them, and an anchor before every numbered formula."""
    return _NUMBERED.sub(r'<div id="eq-\1"></div>\n\n$$', figures.fill(markdown))


def on_page_content(content: str, page: Any = None, **_: Any) -> str:
    """Turn TeX into MathML, and Sphinx roles, which editors understand in docstrings, into links."""
    if page is not None and page.file.src_uri == "api.md":
        content = _link_aliases(content)
    content = _DISPLAY.sub(lambda found: _equation(found[1]), content)
    content = _INLINE.sub(lambda found: convert(html.unescape(found[1])), content)
    return _ROLE.sub(lambda found: _link(found[1]), content)


def _link_aliases(content: str) -> str:
    """Names of types, in signatures and lists of parameters, lead to their row in the page's table."""
    content = _CODE.sub(lambda code: _ALIAS_USE.sub(r'\1<a href="#type-\2">\2</a>', code[0]), content)
    for name in _ALIASES:
        link = f'<td><code><a href="#type-{name}">{name}</a></code></td>'
        content = content.replace(link, f'<td id="type-{name}"><code>{name}</code></td>')
    return content


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
    module = "softdtw_cuda.plot" if short in ("AlignmentAxes", "plot_barycenter") else "softdtw_cuda"
    return f'<a href="#{module}.{short}"><code>{short}</code></a>'
