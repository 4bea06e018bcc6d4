"""Measured figures for the documentation and the README: Markdown out of the CSV files.

    python docs/figures.py            renew the figures of README.md and of the pages of docs/
    python docs/figures.py --check    say whether they are what the CSV files say

A document marks the place of a figure with a pair of comments, and what is between them is written here:

    <!-- figures: readme -->
    <!-- end figures -->
"""

# ruff: noqa: RUF001 (tables have Greek letters, dashes and multiplication signs)

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import cases, records, tables  # noqa: E402
from benchmarks.records import Row  # noqa: E402

PLOTS = DOCS / "assets" / "benchmarks"
LOG_SPACE = DOCS / "data" / "log_space.csv"
CPU_TARGETS = records.RESULTS / "cpu.csv"
NOT_YET = "*Nothing has been measured yet: `make bench` fills this table.*\n"

_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n)(.*?)(<!-- end figures -->)", re.DOTALL)
_SUITE_TITLES = {
    "paper": "The paper's grid: D = 64, γ = 1, forward and backward",
    "lengths": "Against length: D = 128",
    "dimensions": "Against the number of features",
    "extensions": "Further: long, wide, many, narrow types, bands, lengths",
    "targets": "This library alone, and the host's time per call",
}
_PLOT_TITLES = {
    "lengths": "Time and peak memory against length",
    "dimensions": "Time and peak memory against the number of features",
    "long": "Time and peak memory of one long pair",
    "batch": "Time and peak memory of many short pairs",
    "accuracy": "Relative error of the float32 gradient against float64",
    "roofline": "Cells per second against the bound of the hardware",
}


def _is_gpu(device: str) -> bool:
    return "nvidia" in device.lower()


def devices(rows: Sequence[Row]) -> list[str]:
    """Devices of the rows, GPUs first."""
    return sorted({row["device"] for row in rows}, key=lambda device: (not _is_gpu(device), device))


def _origin(rows: Sequence[Row]) -> str:
    """Where, when, with what and by which command rows were measured."""
    device = "/".join(dict.fromkeys(row["device"] for row in rows))
    torch = "/".join(sorted({row["torch"] for row in rows if row["torch"]}))
    dates = sorted({row["date"] for row in rows})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    commands = " and ".join(f"`{command}`" for command in dict.fromkeys(row["command"] for row in rows))
    return f"{device}, torch {torch}, {span}: {commands}."


def _table(rows: Sequence[Row], suite: str, metric: str, device: str) -> str:
    try:
        return tables.markdown(rows, suite, metric, device)
    except ValueError:
        return ""


def _plots(device: str, kinds: Sequence[str]) -> Iterator[str]:
    """Pictures of this device whose name begins with one of the kinds, as the site refers to them."""
    for path in sorted(PLOTS.glob(f"*-{records.slug(device)}.png")):
        kind = path.stem.removesuffix(f"-{records.slug(device)}")
        if any(kind.startswith(wanted) for wanted in kinds):
            yield f"![{_plot_title(path)}, {device}](assets/benchmarks/{path.name})\n"


def speed() -> str:
    """Time and memory of every suite and device."""
    rows = records.read_folder(records.RESULTS)
    parts = []
    for device in devices(rows):
        shown = list(_plots(device, ("lengths", "dimensions", "long", "batch", "roofline")))
        for suite, title in _SUITE_TITLES.items():
            here = [row for row in rows if row["suite"] == suite and row["device"] == device]
            for metric, name in (("both", "time, peak memory"), ("host time", "host time")):
                table = _table(here, suite, metric, device)
                if table:
                    shown.append(f"**{title}** ({name})\n\n{table}\n{_origin(here)}\n")
        if shown:
            parts += [f"### {device}\n", *shown]
    return "\n".join(parts) or NOT_YET


def targets() -> str:
    """Performance targets of the GPU kernels, and what was measured."""
    rows = [
        row
        for row in records.read_folder(records.RESULTS)
        if (row["suite"], row["provider"], row["dtype"]) == ("targets", "this library (fused)", "float32")
        and _is_gpu(row["device"])
        and row["status"] == "ok"
    ]
    if not rows:
        return NOT_YET
    found = {(row["metric"], int(row["B"]), int(row["N"]), int(row["D"])): float(row["p50"]) for row in rows}

    def short(measured: float, wanted: float) -> str:
        return "reached" if measured <= wanted else f"{measured / wanted - 1:.0%} more"

    body = []
    for size, wanted in cases.TARGETS.items():
        time = found[("time", *size)]
        verdicts = [f"{each:g} ms: {short(time, each)}" for each in wanted]
        body.append([*map(str, size), f"{time:.3g} ms", *verdicts])
    host = next(value for (metric, *_), value in found.items() if metric == "host time")
    body.append(["16", "64", "8", f"{host:.3g} ms (the host alone, values not reduced)", "-", "-"])
    return f"{_markdown(['B', 'L', 'D', 'measured', 'limit', 'aim'], body)}\n{_origin(rows)}\n"


def throughput() -> str:
    """Gcells/s with many pairs, a row for each length and pass, features across."""
    rows = [
        row
        for row in records.read_folder(records.RESULTS)
        if (row["suite"], row["provider"], row["metric"]) == ("throughput", "this library (fused)", "time")
        and _is_gpu(row["device"])
        and row["status"] == "ok"
    ]
    if not rows:
        return NOT_YET
    found = {(row["mode"], int(row["N"]), int(row["D"])): float(row["p50"]) for row in rows}
    body = []
    for length, batch in cases.THROUGHPUT_BATCH.items():
        for mode in (cases.FORWARD, cases.FORWARD_BACKWARD):
            cells = batch * length**2
            times = [found.get((mode, length, d)) for d in cases.THROUGHPUT_DIMS]
            speeds = ["–" if time is None else f"{cells / time / 1e6:.0f}" for time in times]
            body.append([str(length), str(batch), mode, *speeds])
    header = ["L", "pairs", "pass", *(f"D = {d}" for d in cases.THROUGHPUT_DIMS)]
    return f"{_markdown(header, body)}\n{_origin(rows)}\n"


def cpu_targets(compared: bool = False) -> str:
    """The CPU's sizes of benchmarks/cpu_targets.py, providers across; or only those that others ran, too."""
    if not CPU_TARGETS.exists():
        return NOT_YET
    with CPU_TARGETS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    providers = [name for name in dict.fromkeys(row["provider"] for row in rows) if " " not in name]
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        provider, _, variant = row["provider"].partition(" ")
        what = row["benchmark"].replace("speed ", "").replace("memory ", "")
        if variant:
            what = what.replace("band L/10", "band of L/10," if variant == "band" else "no band,")
        value = float(row["value"])
        cell = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        lines.setdefault((what, row["metric"]), {})[provider] = f"{cell} {row['unit']}"
    header = ["size", "what", *("this library" if name == "softdtw_cuda" else name for name in providers)]
    body = [[*key, *(cells.get(name, "–") for name in providers)] for key, cells in lines.items()]
    if compared:
        body = [line for line in body if "–" not in line]
    first = rows[0]
    return (
        _markdown(header, body)
        + f"\n{first['device']}, {first['versions']}, {first['date']}: `{first['command']}`.\n"
    )


def accuracy() -> str:
    """Gradient errors of every provider and device."""
    rows = records.read_folder(records.RESULTS)
    parts = []
    for device in devices(rows):
        here = [row for row in rows if row["suite"] == "accuracy" and row["device"] == device]
        table = _table(here, "accuracy", "gradient error", device)
        if table:
            parts += [f"### {device}\n", *_plots(device, ("accuracy",)), f"{table}\n{_origin(here)}\n"]
    return "\n".join(parts) or NOT_YET


def log_space() -> str:
    """Gradient errors of float32 in log space and of this library."""
    with LOG_SPACE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    header = ["N × M", "D", "γ", "value", "log space, differences", "log space, shares", "this library"]
    header.append("float32 costs, exact otherwise")
    body = [
        [
            f"{row['N']} × {row['M']}",
            row["D"],
            row["gamma"],
            f"{float(row['value']):,.1f}",
            *(
                f"{float(row[name]):.1e}"
                for name in ("differences", "shares", "this_library", "rounded_costs")
            ),
        ]
        for row in rows
    ]
    return _markdown(header, body) + (
        f"\nCPU, torch {rows[0]['torch']}, {rows[0]['date']}: `python docs/log_space.py --write`.\n"
    )


def readme() -> str:
    """The README's picture, of the gradient's error, and its table: time and memory beside the others'."""
    rows = records.read_folder(records.RESULTS)
    text = ""
    exact = _most_telling(rows, "accuracy")
    if exact:
        picture = PLOTS / f"accuracy-{records.slug(exact[0]['device'])}.png"
        text += f"![{_plot_title(picture)}](docs/assets/benchmarks/{picture.name})\n\n{_origin(exact)}\n\n"
    paper = _most_telling(rows, "paper")
    if not paper:
        return f"{text}Forward and backward\n\n{cpu_targets(compared=True)}"
    batch = max((row["B"] for row in paper), key=int)
    paper = [row for row in paper if row["B"] == batch]
    return (
        f"{text}Forward and backward, D = 64, γ = 1, float32: time of an eager call "
        f"(of a CUDA graph's replay), and peak memory beyond the inputs\n\n"
        f"{_table(paper, 'paper', 'both', paper[0]['device'])}\n{_origin(paper)}\n"
    )


def _most_telling(rows: Sequence[Row], suite: str) -> list[Row]:
    """Rows of a suite on one device, a GPU if there is one, without providers that have no way to run it."""
    found = [row for row in rows if row["suite"] == suite]
    if not found:
        return []
    device = devices(found)[0]
    found = [row for row in found if row["device"] == device]
    able = {row["provider"] for row in found if row["status"] != "unsupported"}
    return [row for row in found if row["provider"] in able]


def _plot_title(path: Path) -> str:
    return next((text for name, text in _PLOT_TITLES.items() if path.name.startswith(name)), path.stem)


def _markdown(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, ["---"] * len(header), *body))


FIGURES: dict[str, Callable[[], str]] = {
    "speed": speed,
    "targets": targets,
    "throughput": throughput,
    "cpu-targets": cpu_targets,
    "accuracy": accuracy,
    "log-space": log_space,
    "readme": readme,
}


def fill(text: str) -> str:
    """The document with every marked place drawn again from the CSV files.

    Raises:
        KeyError: for a mark that names no figure.
    """
    return _BLOCK.sub(lambda found: f"{found[1]}{FIGURES[found[2]]()}{found[4]}", text)


def pages() -> list[Path]:
    """README and the pages of the site that show figures."""
    found = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    return [path for path in found if _BLOCK.search(path.read_text(encoding="utf-8"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something would")
    arguments = parser.parse_args()
    differing = 0
    for path in pages():
        old = path.read_text(encoding="utf-8")
        new = fill(old)
        if new == old:
            continue
        differing += 1
        if arguments.check:
            print(f"{path.name} differs from the CSV files; `python docs/figures.py` renews it")
        else:
            path.write_text(new, encoding="utf-8")
            print(f"renewed {path.name}")
    if not differing:
        print("every page shows what the CSV files say")
    return 1 if differing and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
