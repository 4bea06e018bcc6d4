"""Every Python snippet of the README runs, in order."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path


def test_snippets() -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) >= 4
    names: dict[str, object] = {}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for snippet in snippets:
            exec(compile(snippet, "README.md", "exec"), names)
    assert "torch.Size([4]) tensor(0.)" in output.getvalue()
