"""Markdown tables drawn from the CSV, and the check that a document shows what the CSV says.

A document holds a table between two comments; `python -m benchmarks table --write FILE` renews it:

    <!-- benchmark: paper time NVIDIA H200 -->
    <!-- end benchmark -->
"""

# ruff: noqa: RUF001 (tables have Greek letters and dashes)

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from . import records
from .cases import EXPECTED_COST, FORWARD, FORWARD_BACKWARD, HESSIAN_PRODUCT
from .providers import OURS_COST, OURS_FUSED, ROUNDING
from .records import Row

_BLOCK = re.compile(
    r"(?P<open><!-- benchmark: (?P<suite>[\w-]+) "
    r"(?P<metric>time|memory|both|memory per cell|gradient error|host time) "
    r"(?P<device>.+?) -->\n)(?P<body>.*?)(?P<close><!-- end benchmark -->)",
    re.DOTALL,
)
_SIZES = ("B", "N", "D", "gamma", "bandwidth", "dtype", "mode", "normalize", "lengths")
_HEADINGS = {"N": "L", "gamma": "γ", "bandwidth": "band", "dtype": "type", "normalize": "divergence"}


def scientific(value: float) -> str:
    """Two digits and an exponent without zeros, which a phone has no room for."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def figure(row: Row) -> str:
    """A cell of a table: the median, or what went wrong."""
    if row["status"] != "ok":
        return row["status"]
    value = float(row["p50"])
    if row["metric"].endswith("error"):
        return scientific(value)
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


UNITS = {"time": "ms", "replay": "ms", "host time": "ms", "memory": "MiB", "gradient error": ""}
SHORT_NAMES = {OURS_FUSED: "this library", OURS_COST: "cost matrix", ROUNDING: "float32 costs"}
_FOOTNOTES = (
    ("out of memory", "does not fit the card's memory"),
    ("over 1024 steps", "above 1024 steps the library computes on the CPU"),
    ("fused on CUDA", "the library's fused path is for CUDA alone"),
    ("has no", "the library has no such argument"),
    ("over ", "longer than the limit of the command"),
    ("timeout at", "longer than the limit of the command at a smaller size already"),
)  # fmt: skip
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def footnote(row: Row) -> str:
    """Why a cell has no number, in a sentence; the CSV file has the message."""
    launch = re.search(r"LAUNCH_OUT_OF_RESOURCES|INVALID_VALUE", row["note"])
    if launch:
        cuda = re.search(r"\+cu(\d\d)\d", row["torch"])
        under = f" under CUDA {cuda[1]}" if cuda else ""
        newer = cuda is not None and int(cuda[1]) > 12 and row["provider"].startswith("BGU")
        supported = ", and its authors support CUDA 12.6 at most" if newer else ""
        return f"a Numba kernel of the library does not launch{under} ({launch[0]}){supported}"
    for part, text in _FOOTNOTES:
        if part in row["note"]:
            return text
    return row["note"].split("\n")[0][:100] or row["status"]


def compact(
    rows: Sequence[Row], suite: str, metric: str, device: str, reasons: list[str] | None = None
) -> str:
    """A table that fits a page: one metric, bare numbers, no column of one value.

    A provider without any number has no column. Its reasons stand below, and so do those of single cells,
    unless `reasons` collects the latter for several tables: `notes` writes them.

    Its caption has to say the unit (`UNITS`) and the sizes that are the same in every row (`constants`).

    Raises:
        ValueError: when the CSV holds nothing of the kind.
    """
    chosen = _chosen(rows, suite, metric, device)
    able = dict.fromkeys(row["provider"] for row in chosen if row["status"] == "ok")
    providers = sorted(able, key=_order)
    sizes = [s for s in _SIZES if len({row[s] for row in chosen}) > 1]
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    own: list[str] = []
    marks = own if reasons is None else reasons
    for row in chosen:
        cells = lines.setdefault(tuple(row[s] for s in sizes), {})
        if row["provider"] not in able:
            continue
        if row["status"] == "ok":
            cell = figure(row).removesuffix(" ms").removesuffix(" MiB")
        else:
            reason = footnote(row)
            if reason not in marks:
                marks.append(reason)
            cell = f"–{_mark(marks.index(reason))}"
        cells[row["provider"]] = cell
    together = len(sizes) > 3  # one column of words instead of many narrow ones
    header = [*(["case"] if together else (_HEADINGS.get(s, s) for s in sizes)), *map(_short, providers)]
    table = [header, ["---", *["--:"] * (len(header) - 1)] if together else ["--:"] * len(header)]
    for values, cells in lines.items():
        key = [_words(sizes, values)] if together else [value or "none" for value in values]
        table.append([*key, *(cells.get(name, "") for name in providers)])
    return "".join(f"| {' | '.join(line)} |\n" for line in table) + notes(own) + no_numbers(chosen)


def notes(reasons: Sequence[str]) -> str:
    """What the marks of cells without a number mean."""
    return "".join(f"\n{_mark(place)} {reason}.\n" for place, reason in enumerate(reasons))


def _mark(place: int) -> str:
    return str(place + 1).translate(_SUPERSCRIPTS)


def no_numbers(rows: Sequence[Row]) -> str:
    """A sentence for providers that have no number in any of the rows."""
    able = {row["provider"] for row in rows if row["status"] == "ok"}
    unable: dict[str, list[str]] = {}
    for name in dict.fromkeys(row["provider"] for row in rows if row["provider"] not in able):
        why = dict.fromkeys(footnote(row) for row in rows if row["provider"] == name)
        unable.setdefault("; ".join(why), []).append(_short(name))
    return "".join(f"\nNo number for {_listed(names)}: {why}.\n" for why, names in unable.items())


def _order(provider: str) -> tuple[bool, bool, bool]:
    """This library first, others as they come, what is no library last."""
    return (provider != OURS_FUSED, provider != OURS_COST, provider == ROUNDING)


def _short(provider: str) -> str:
    return SHORT_NAMES.get(provider, provider.replace("(", "").replace(")", ""))


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


MODES = {
    FORWARD_BACKWARD: "forward and backward",
    FORWARD: "forward",
    HESSIAN_PRODUCT: "value, gradient and Hessian-vector product",
    EXPECTED_COST: "expected cost and its gradient",
}


def constants(rows: Sequence[Row], suite: str, metric: str, device: str) -> str:
    """What is the same in every row of `compact`, to end its caption: mode, type and sizes."""
    chosen = _chosen(rows, suite, metric, device)
    same = {s: chosen[0][s] for s in _SIZES if len({row[s] for row in chosen}) == 1}
    mode = same.pop("mode", "")
    words = [MODES[mode]] if mode and not metric.endswith("error") else []
    words += [same.pop("dtype")] if "dtype" in same else []
    sizes = _words(list(same), list(same.values()))
    return "".join(f", {word}" for word in words) + (f"; {sizes}" if sizes else "")


def _chosen(rows: Sequence[Row], suite: str, metric: str, device: str) -> list[Row]:
    rows = like_for_like(rows)
    chosen = [r for r in rows if (r["suite"], r["device"], r["metric"]) == (suite, device, metric)]
    if not chosen:
        raise ValueError(f"no {metric} of suite {suite} on {device!r} in the results.")
    return chosen


def _words(sizes: Sequence[str], values: Sequence[str]) -> str:
    """Sizes as words, without what goes without saying."""
    usual = {
        "bandwidth": "",
        "dtype": "float32",
        "mode": "forward+backward",
        "normalize": "no",
        "lengths": "full",
    }
    names = {"N": "L", "gamma": "γ"}
    shown = []
    for size, value in zip(sizes, values, strict=True):
        if size in usual:
            words = {"normalize": "divergence", "bandwidth": f"band {value}"}
            shown += [] if value == usual[size] else [words.get(size, value)]
        else:
            shown.append(f"{names.get(size, size)} = {value}")
    return ", ".join(shown)


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
