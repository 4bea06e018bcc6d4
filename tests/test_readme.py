"""The README: its snippet runs, and its first screen has what a reader looks for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

TEXT = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_loss_takes_six_lines() -> None:
    snippets = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(snippets[0].splitlines()) <= 6
    assert "normalize=True" in snippets[0]  # the divergence is the loss for networks
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), names)
    assert names["prediction"].grad.abs().max() > 0


def test_the_first_screen() -> None:
    screen = "\n".join(TEXT.splitlines()[:32])
    assert len(re.findall(r"^!\[", screen, re.MULTILINE)) == 1
    for wanted in ("pip install", "from softdtw_cuda import", "make demo", "make test"):
        assert wanted in screen
    assert "--suite" not in TEXT  # how figures were measured is said elsewhere


def test_the_table_has_three_rows_of_time_alone() -> None:
    (block,) = re.findall(r"<!-- figures: readme -->\n(.*?)<!-- end figures -->", TEXT, re.DOTALL)
    rows = [line for line in block.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 3
    assert "MiB" not in block
    assert "docs/speed.md" in TEXT.split("<!-- end figures -->")[1].split("##")[0]


def test_six_libraries_to_switch_from() -> None:
    rows = re.findall(
        r"^\| (?!from|---)(.+?) \|", TEXT.split("## Switching")[1].split("\n##")[0], re.MULTILINE
    )
    assert len(rows) == 6


def test_links_lead_somewhere() -> None:
    """Files of the repository, and their headings."""
    root = Path(__file__).parent.parent
    links = re.findall(r"\]\(((?!https?:)[^)]+)\)", TEXT)
    assert len(links) > 20
    for link in links:
        path, _, anchor = link.partition("#")
        assert (root / path).exists(), link
        if anchor:
            text = (root / path).read_text(encoding="utf-8")
            titles = [
                re.sub(r"[^\w -]", "", title).strip() for title in re.findall(r"^#+ (.*)", text, re.MULTILINE)
            ]
            anchors = {title.lower().replace(" ", "-") for title in titles} | set(
                re.findall(r"#([\w-]+)\s*\}", text)
            )
            assert anchor in anchors, link
