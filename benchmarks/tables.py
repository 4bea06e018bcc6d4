"""Markdown tables drawn from the CSV, and the check that a document shows what the CSV says.

A document holds a table between two comments; `python -m benchmarks table --write FILE` renews it:

    <!-- benchmark: paper time NVIDIA H200 -->
    <!-- end benchmark -->
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from . import records
from .records import Row

_BLOCK = re.compile(
    r"(?P<open><!-- benchmark: (?P<suite>[\w-]+) "
    r"(?P<metric>time|memory|both|memory per cell|gradient error|host time) "
    r"(?P<device>.+?) -->\n)(?P<body>.*?)(?P<close><!-- end benchmark -->)",
    re.DOTALL,
)
_SIZES = ("B", "N", "D", "gamma", "bandwidth", "dtype", "mode", "normalize", "lengths")
_HEADINGS = {"N": "L", "bandwidth": "band", "dtype": "type", "normalize": "divergence"}


def figure(row: Row) -> str:
    """A cell of a table: the median, or what went wrong."""
    if row["status"] != "ok":
        return row["status"]
    value = float(row["p50"])
    if row["metric"].endswith("error"):
        return f"{value:.1e}"
    if row["metric"] == "memory per cell":
        return f"{value:.2g} byte"
    if row["metric"] == "memory":
        return f"{value:,.0f} MiB" if value >= 10 else f"{value:.2g} MiB"
    return f"{value:.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def like_for_like(rows: Sequence[Row]) -> list[Row]:
    """The rows with the time of an eager call as everybody's `time`; `replay` where a CUDA graph was timed.

    Only this library can be recorded in a graph, which leaves out the host's part of a call.
    """
    eager = {records.case_key(row): row for row in rows if row["metric"] == "time, eager"}
    changed = []
    for row in rows:
        found = eager.get(records.case_key(row))
        if row["metric"] == "time" and found is not None:
            changed += [{**found, "metric": "time"}, {**row, "metric": "replay"}]
        elif row["metric"] != "time, eager":
            changed.append(row)
    return changed


def markdown(rows: Sequence[Row], suite: str, metric: str, device: str) -> str:
    """Sizes down, providers across; "both" puts time and memory into one cell.

    Where others stand beside this library, times are those of eager calls, and the replay of a CUDA graph
    follows in brackets.

    Raises:
        ValueError: when the CSV holds nothing of the kind.
    """
    metrics = ("time", "replay", "memory") if metric == "both" else (metric,)
    if suite != "targets":
        rows = like_for_like(rows)
    chosen = [r for r in rows if r["suite"] == suite and r["device"] == device and r["metric"] in metrics]
    if not chosen:
        raise ValueError(f"no {metric} of suite {suite} on {device!r} in the results.")
    providers = list(dict.fromkeys(row["provider"] for row in chosen))
    # Sizes that are the same in every row belong in a caption, not in a column; B and L always show.
    sizes = [s for s in _SIZES if s in ("B", "N") or len({row[s] for row in chosen}) > 1]
    lines: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for wanted in metrics:
        for row in chosen:
            if row["metric"] != wanted:
                continue
            cell = lines.setdefault(tuple(row[s] for s in sizes), {}).setdefault(row["provider"], [])
            text = f"({figure(row)})" if wanted == "replay" else figure(row)
            if text not in cell:  # a failure is the same for time and memory
                cell.append(text)
    header = [*(_HEADINGS.get(s, s) for s in sizes), *providers]
    table = [header, ["---"] * len(header)]
    for values, cells in lines.items():
        texts = [", ".join(cells.get(provider, ["-"])).replace(", (", " (") for provider in providers]
        table.append([*(v or "-" for v in values), *texts])
    return "".join(f"| {' | '.join(line)} |\n" for line in table)


def renew(text: str, rows: Sequence[Row]) -> str:
    """The document with every block drawn again from the rows."""

    def block(match: re.Match[str]) -> str:
        body = markdown(rows, match["suite"], match["metric"], match["device"])
        return f"{match['open']}{body}{match['close']}"

    return _BLOCK.sub(block, text)


def write(files: Sequence[Path], rows: Sequence[Row]) -> list[Path]:
    """Renew the blocks of files; those that changed."""
    changed = []
    for path in files:
        old = path.read_text(encoding="utf-8")
        new = renew(old, rows)
        if new != old:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed
