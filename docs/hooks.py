"""What the site needs besides Markdown: measured tables, formulas as MathML, notebooks, links in docstrings.

Formulas become MathML while the site is built, so pages need no script and no network to show them. Notebooks
of docs/tutorials become pages with the outputs that they were saved with, and can be downloaded; so can the
examples.
"""

from __future__ import annotations

import base64
import html
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures
from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_DISPLAY = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)
_NUMBERED = re.compile(r"^\$\$(?=[^$]*\\tag\{(\d+)\})", re.MULTILINE)
_TAG = re.compile(r"\\tag\{(\d+)\}")
# A function, its index included, with the end of an operand before it and the start of one after it.
_FUNCTION = re.compile(
    r"(</m(?:i|n|sub|sup|row|frac)>)?"
    r"(<msub><mi>(?:log|ln|exp)</mi>(?:(?!</msub>).)*</msub>|<mi>(?:log|ln|exp)</mi>)"
    r"(<m(?!o\b|space))?"
)
_THIN = '<mspace width="0.167em" />'
_ALIAS_ROW = re.compile(r"<td><code>(\w+)</code></td>")
_CODE = re.compile(r"<code\b.*?</code>", re.DOTALL)
_PICTURE = re.compile(r'<img [^>]*src="([^"]+\.png)"[^>]*/?>')
_ROLE = re.compile(r":(?:func|class|meth):<code>~?([\w.]+)</code>")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add a page for every tutorial, its pictures, and the examples' sources."""
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        text, pictures = notebook_page(path)
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=text))
        for name, data in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=data))
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by their names."""
    parts, pictures = [], {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(output["data"]["image/png"]))
                parts.append(f"![Output of the cell above]({name})")
            else:
                text = "".join(output["text"] if "text" in output else output["data"]["text/plain"])
                parts.append(f"``` {{ .text .output }}\n{text.rstrip()}\n```")
    title, *rest = parts[0].split("\n", 1)
    where = f"*This page is [a notebook]({path.name}), with the outputs of its last execution.*"
    parts[0] = "\n".join([title, "", where, *rest])
    return "\n\n".join(parts) + "\n", pictures


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the measured tables where a page asks for them, and an anchor before every numbered formula."""
    return _NUMBERED.sub(r'<div id="eq-\1"></div>\n\n$$', figures.fill(markdown))


def on_page_content(content: str, page: Any = None, **_: Any) -> str:
    """Turn TeX into MathML, Sphinx roles, which editors understand in docstrings, into links, and pictures
    into links to themselves."""
    if page is not None and page.file.src_uri == "api.md":
        content = _link_aliases(content)
    content = _DISPLAY.sub(lambda found: _equation(found[1]), content)
    content = _PICTURE.sub(r'<a class="picture" href="\1">\g<0></a>', content)
    content = _INLINE.sub(lambda found: mathml(html.unescape(found[1])), content)
    return _ROLE.sub(lambda found: _link(found[1]), content)


def _link_aliases(content: str) -> str:
    """Names of types, in signatures and lists of parameters, lead to their row in the page's first table."""
    table, end, rest = content.partition("</table>")
    names = _ALIAS_ROW.findall(table)
    table = _ALIAS_ROW.sub(r'<td id="type-\1"><code>\1</code></td>', table)
    use = re.compile(rf"\b({'|'.join(names)})\b(?![^<>]*>)")
    return table + end + _CODE.sub(lambda code: use.sub(r'<a href="#type-\1">\1</a>', code[0]), rest)


def mathml(tex: str, display: str = "inline") -> str:
    """A formula, with thin spaces around the names of functions, as TeX sets them."""

    def apart(found: re.Match[str]) -> str:
        before, function, after = found.groups("")
        return f"{before}{_THIN if before else ''}{function}{_THIN if after else ''}{after}"

    return _FUNCTION.sub(apart, convert(tex, display=display))


def _equation(tex: str) -> str:
    tex = html.unescape(tex).strip()
    tag = _TAG.search(tex)
    formula = mathml(_TAG.sub("", tex), display="block")
    if tag is None:
        return f'<div class="equation">{formula}</div>'
    number = tag[1]
    return f'<div class="equation">{formula}<a href="#eq-{number}">({number})</a></div>'


def _link(name: str) -> str:
    """A link within the API page, the only one that shows docstrings."""
    module, _, short = name.rpartition(".")
    if not module:
        module = "softdtw_cuda.plot" if short.startswith("plot_") else "softdtw_cuda"
    return f'<a href="#{module}.{short}"><code>{short}</code></a>'
