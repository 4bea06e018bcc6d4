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
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import cases, records, tables  # noqa: E402
from benchmarks.providers import OURS_COST, OURS_FUSED  # noqa: E402
from benchmarks.records import Row  # noqa: E402
from benchmarks.scale import SHARED, WITHOUT_CELLS  # noqa: E402
from softdtw_cuda._problem import NO_BAND  # noqa: E402
from softdtw_cuda._tiles import divide, square_tiles  # noqa: E402

PLOTS = DOCS / "assets" / "benchmarks"
LOG_SPACE = DOCS / "data" / "log_space.csv"
CPU_TARGETS = records.RESULTS / "cpu.csv"
CLUSTERING = records.RESULTS / "clustering-cpu.csv"
LOWER_BOUND = records.RESULTS / "lower_bound.csv"
REAL_SERIES = records.RESULTS / "ucr.csv"
NOT_YET = "*Nothing has been measured yet: `make bench` fills this table.*\n"

_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n)(.*?)(<!-- end figures -->)", re.DOTALL)
_SUITE_TITLES = {
    "paper": "The paper's grid",
    "lengths": "Against length",
    "dimensions": "Against the number of features",
    "extensions": "Long, wide, many, narrow types, bands, lengths",
    "targets": "This library alone, and the host's time of a call",
    "second_order": "Second order",
    "accuracy": "Relative error of the float32 gradient",
}
_METRICS = {
    "time": "Time of an eager call",
    "replay": "Time of a CUDA graph's replay",
    "memory": "Peak memory beyond the inputs",
    "host time": "Time on the host",
    "gradient error": "Error relative to float64",
}
_PLOT_TITLES = {
    "lengths": "Time and peak memory against length",
    "dimensions": "Time and peak memory against the number of features",
    "long": "Time and peak memory of one long pair",
    "batch": "Time and peak memory of many short pairs",
    "accuracy": "Relative error of the float32 gradient against float64",
    "roofline": "Cells per second against the limit of the hardware",
    "throughput": "Cells per second with many pairs, and the limit of the hardware",
    "second_order_errors": "Relative error of second order against float64",
    "second_order": "Time of second order",
    "clustering": "Time of all pairs and k-means beside other libraries",
}

_PLOT_SUITES = {
    "lengths": "lengths",
    "dimensions": "dimensions",
    "long": "extensions",
    "batch": "extensions",
    "accuracy": "accuracy",
}
"""Suites of the plots that compare libraries."""


def _is_gpu(device: str) -> bool:
    return "nvidia" in device.lower()


def devices(rows: Sequence[Row]) -> list[str]:
    """Devices of the rows, GPUs first."""
    return sorted({row["device"] for row in rows}, key=lambda device: (not _is_gpu(device), device))


SEPARATE_RUNS = {
    ("paper", "NVIDIA H200"),
    ("lengths", "NVIDIA H200"),
    ("dimensions", "NVIDIA H200"),
    ("extensions", "NVIDIA H200"),
    ("accuracy", "NVIDIA H200"),
}
"""Tables whose columns were measured in different runs, and say so. No other may be (test_docs.py)."""


def _origin(rows: Sequence[Row]) -> str:
    """Where, when, with what and by which command rows were measured; each run where there were several."""
    device = "/".join(dict.fromkeys(row["device"] for row in rows))
    torch = "/".join(sorted({row["torch"] for row in rows if row["torch"]}))
    runs = records.runs(rows)
    if len(runs) == 1:
        date, command = runs[0]
        return f"{device}, torch {torch}, {date}, one run: `{command}`."
    lines = [f"{device}, torch {torch}. **Separate runs**, not measured side by side:", ""]
    for run in runs:
        who = dict.fromkeys(row["provider"] for row in rows if (row["date"], row["command"]) == run)
        lines.append(f"- {', '.join(who)}: {run[0]}, `{run[1]}`")
    return "\n".join(lines)


def published() -> Iterator[tuple[str, str, list[Row]]]:
    """Suite, device and rows of every table that pages show."""
    rows = records.read_folder(records.RESULTS)
    for suite, device in dict.fromkeys((row["suite"], row["device"]) for row in rows):
        yield suite, device, [row for row in rows if (row["suite"], row["device"]) == (suite, device)]


def _table(rows: Sequence[Row], suite: str, metric: str, device: str) -> str:
    """A caption and a table, or nothing where nothing was measured."""
    try:
        same = tables.constants(rows, suite, metric, device)
        unit = f" in {tables.UNITS[metric]}" if tables.UNITS[metric] else ""
        caption = f"{_METRICS[metric]}{unit}" + (f"; {same}" if same else "")
        return f"{caption}:\n\n{tables.compact(rows, suite, metric, device)}"
    except ValueError:
        return ""


def _plots(device: str, kinds: Sequence[str]) -> Iterator[str]:
    """Pictures of this device whose name begins with one of the kinds, in that order, as the site refers to
    them; where the lines come from separate runs, a caption says so."""
    slug = records.slug(device)
    for kind in kinds:
        for path in sorted(PLOTS.glob(f"{kind}*-{slug}.png")):
            suite = _PLOT_SUITES.get(path.stem.removesuffix(f"-{slug}"))
            drawn = [rows for name, where, rows in published() if (name, where) == (suite, device)]
            yield f"![{_plot_title(path)}, {device}](assets/benchmarks/{path.name})\n"
            if drawn and len(records.runs(drawn[0])) > 1:
                yield f"*{device}, {_days(drawn[0])}.*\n"


def _largest_batch(rows: Sequence[Row]) -> list[Row]:
    batch = max((row["B"] for row in rows), key=int)
    return [row for row in rows if row["B"] == batch]


def _paper_grid(metric: str) -> Iterator[tuple[str, str]]:
    """Each device with its table of the paper's sizes at the larger batch."""
    rows = records.read_folder(records.RESULTS)
    for device in devices(rows):
        here = [row for row in rows if row["suite"] == "paper" and row["device"] == device]
        table = _table(_largest_batch(here), "paper", metric, device) if here else ""
        if table:
            yield device, f"{table}\n{_origin(_largest_batch(here))}\n"


def speed() -> str:
    """Plots and a table of time for every device."""
    parts = []
    tables_of = dict(_paper_grid("time"))
    for device in devices(records.read_folder(records.RESULTS)):
        shown = list(_plots(device, ("lengths", "dimensions", "long", "batch", "roofline")))
        shown += [tables_of[device]] if device in tables_of else []
        if shown:
            parts += [f"### {device}\n", *shown]
    return "\n".join(parts) or NOT_YET


def memory() -> str:
    """A table of memory for every device."""
    parts = [f"### {device}\n\n{table}" for device, table in _paper_grid("memory")]
    return "\n".join(parts) or NOT_YET


def results() -> str:
    """Every suite and device, a table for each metric."""
    parts = []
    rows = records.read_folder(records.RESULTS)
    for device in devices(rows):
        shown = []
        for suite, title in _SUITE_TITLES.items():
            here = [row for row in rows if row["suite"] == suite and row["device"] == device]
            parts_of = [here]
            if suite == "accuracy":  # a table for each D, or it would be wider than a phone
                parts_of = [
                    [row for row in here if row["D"] == d]
                    for d in sorted({row["D"] for row in here}, key=int)
                ]
            found = [_table(part, suite, metric, device) for part in parts_of for metric in _METRICS]
            found = list(filter(None, found))
            if found:
                shown.append("\n".join([f"### {title}, {device}\n", *found, f"{_origin(here)}\n"]))
        if shown:
            parts += [f"## {device}\n", *shown]
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
    return (
        f"{_markdown(['B', 'L', 'D', 'measured', 'limit', 'aim'], body)}\n"
        f"The host alone, at B = 16, L = 64, D = 8, values not reduced: {host:.3g} ms.\n\n{_origin(rows)}\n"
    )


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
    parts = []
    for mode in (cases.FORWARD, cases.FORWARD_BACKWARD):
        body = []
        for length, batch in cases.THROUGHPUT_BATCH.items():
            times = [found.get((mode, length, d)) for d in cases.THROUGHPUT_DIMS]
            speeds = ["–" if time is None else f"{batch * length**2 / time / 1e6:.0f}" for time in times]
            body.append([str(length), *speeds])
        header = ["L \\ D", *map(str, cases.THROUGHPUT_DIMS)]
        parts.append(f"{mode.replace('+', ' and ').capitalize()}:\n\n{_markdown(header, body, '--:')}\n")
    pairs = ", ".join(f"{batch} of L = {length}" for length, batch in cases.THROUGHPUT_BATCH.items())
    pictures = "".join(f"{each}\n" for each in _plots(rows[0]["device"], ("throughput",)))
    return pictures + "".join(parts) + f"Pairs: {pairs}. {_origin(rows)}\n"


def second_order() -> str:
    """Error and time of second order on every device; nothing where neither was measured."""
    parts = [_second_order_errors(path) for path in sorted(records.RESULTS.glob("error_budget_second_*.csv"))]
    rows = [row for row in records.read_folder(records.RESULTS) if row["suite"] == "second_order"]
    for device in devices(rows):
        here = [row for row in rows if row["device"] == device]
        parts += [
            f"### {device}\n",
            *(each for each in _plots(device, ("second_order",)) if "errors" not in each),
        ]
        for mode in dict.fromkeys(row["mode"] for row in here):
            mine = [row for row in here if row["mode"] == mode]
            table = _table(mine, "second_order", "time", device)
            parts += [table] if table else []
        parts.append(f"{_origin(here)}\n")
    return "\n".join(parts)


def _second_order_errors(path: Path) -> str:
    """The cases of one CSV file of error_budget.py: the plot, and a line for each length."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    device = rows[0]["device"]
    body = []
    for length in sorted({int(row["n"]) for row in rows}):
        here = [row for row in rows if int(row["n"]) == length]
        cells = [str(length), str(len(here))]
        for what in ("hvp", "expected"):
            errors = [float(row["error"]) for row in here if row["what"] == what]
            cells += [f"{statistics.median(errors):.1e}", f"{max(errors):.1e}"]
        most = max(float(row["error"]) / float(row["budget"]) for row in here)
        body.append([*cells, f"{most:.2f}", str(sum(row["passed"] != "True" for row in here))])
    header = [
        "L",
        "cases",
        "product, median",
        "largest",
        "⟨E, Ω⟩, median",
        "largest",
        "of its budget",
        "over",
    ]
    sizes, gammas = (sorted({float(row[column]) for row in rows}) for column in ("d", "gamma"))
    return "\n".join(
        [
            f"### Error, {device}\n",
            *_plots(device, ("second_order_errors",)),
            "Relative errors, in norm, of Hessian-vector products and of gradients of the position's "
            "expected cost; the largest share of a case's budget, and how many cases are over theirs. "
            f"D from {sizes[0]:g} to {sizes[-1]:g}, γ from {gammas[0]:g} to {gammas[-1]:g}, N = M and N > M, "
            "with and without an offset of 1000:\n",
            _markdown(header, body, "--:"),
            f"{device}, torch {rows[0]['torch']}, {rows[0]['date']}: `{rows[0]['command']}`.\n",
        ]
    )


def cpu_targets() -> str:
    """The CPU's sizes of benchmarks/cpu_targets.py: beside others, many pairs, with and without a band."""
    if not CPU_TARGETS.exists():
        return NOT_YET
    with CPU_TARGETS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    providers = [name for name in dict.fromkeys(row["provider"] for row in rows) if name and " " not in name]
    beside: dict[str, dict[str, str]] = {}
    bands: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        provider, _, variant = row["provider"].partition(" ")
        if row["benchmark"].split()[0] in ("machine", "throughput"):
            continue
        value = float(row["value"])
        cell = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        size = row["benchmark"].replace("speed ", "").replace("memory ", "").replace("band L/10 ", "")
        if variant:
            key = (*re.findall(r"[BD]=(\d+)", size), row["metric"].removesuffix(", CPU time"))
            bands.setdefault(key, {})[variant] = cell
        else:
            what = size if row["metric"] == "forward+backward" else f"{size}, {row['metric']}"
            beside.setdefault(what, {})[provider] = f"{cell} {row['unit']}"
    names = ["this library" if name == "softdtw_cuda" else name for name in providers]
    lines = [[what, *(cells.get(name, "–") for name in providers)] for what, cells in beside.items()]
    variants = sorted({variant for cells in bands.values() for variant in cells}, key="band".__eq__)
    banded = [[*key, *(cells.get(variant, "–") for variant in variants)] for key, cells in bands.items()]
    titles = ["band of L/10" if variant == "band" else "no band" for variant in variants]
    first = rows[0]
    return (
        f"Forward and backward:\n\n{_markdown(['size', *names], lines)}\n{_many_pairs_on_cpu(rows)}"
        f"With a band, CPU time in ms at L = 2048:\n\n{_markdown(['B', 'D', 'pass', *titles], banded)}\n"
        f"{first['device']}, {first['versions']}, {first['date']}: `{first['command']}`.\n"
    )


def _many_pairs_on_cpu(rows: Sequence[Row]) -> str:
    """Time beside pysdtw, and Gcells/s by length and features."""
    times: dict[tuple[int, int, int], dict[tuple[str, str], float]] = {}
    for row in rows:
        size = re.fullmatch(r"throughput B=(\d+) L=(\d+) D=(\d+)", row["benchmark"])
        if size is not None:
            batch, length, d = map(int, size.groups())
            found = times.setdefault((batch, length, d), {})
            found[row["provider"], row["metric"]] = float(row["value"])
    if not times:
        return ""
    both, ours, theirs = "forward+backward", "softdtw_cuda", "pysdtw"
    beside = [
        [f"B={b} L={n} D={d}", *(f"{found[name, both]:.3g} ms" for name in (ours, theirs)),
         f"{found[theirs, both] / found[ours, both]:.1f}"]
        for (b, n, d), found in times.items() if (theirs, both) in found
    ]  # fmt: skip
    sizes = list(dict.fromkeys((b, n) for b, n, _ in times))
    dims = sorted({d for *_, d in times})
    speeds = [
        [name, f"{b} of {n}", *(f"{b * n * n / times[b, n, d][ours, metric] / 1e6:.2g}" for d in dims)]
        for name, metric in (("forward", "forward"), ("forward and backward", both))
        for b, n in sizes
    ]
    peaks = {row["metric"]: f"{float(row['value']):.0f}" for row in rows if row["benchmark"] == "machine"}
    return (
        f"Many pairs, forward and backward:\n\n"
        f"{_markdown(['size', 'this library', 'pysdtw', 'times'], beside)}\n"
        + "".join(f"{each}\n" for each in _plots(rows[0]["device"], ("throughput",)))
        + "Gcells/s of this library, features across:\n\n"
        f"{_markdown(['pass', 'pairs of length', *map(str, dims)], speeds)}\n"
        f"The machine: {peaks['multiply-adds']}·10⁹ multiply-adds a second, {peaks['instructions']}·10⁹ "
        f"lanes of vector instructions, {peaks['memory']} GB/s copied.\n\n"
    )


def accuracy() -> str:
    """Gradient errors of every provider and device: the plot, and the longest series of the most features."""
    rows = records.read_folder(records.RESULTS)
    parts = []
    for device in devices(rows):
        here = [row for row in rows if row["suite"] == "accuracy" and row["device"] == device]
        if not here:
            continue
        length, d = (max((row[size] for row in here), key=int) for size in ("N", "D"))
        here = [row for row in here if (row["N"], row["D"]) == (length, d)]
        table = _table(here, "accuracy", "gradient error", device)
        if table:
            parts += [f"### {device}\n", *_plots(device, ("accuracy",)), f"{table}\n{_origin(here)}\n"]
    return "\n".join(parts) or NOT_YET


def _scale_rows() -> list[Row]:
    """Whole jobs (benchmarks/scale.py) on every device, GPUs first."""
    rows = []
    for path in records.RESULTS.glob("scale-*.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            rows += list(csv.DictReader(file))
    return sorted(rows, key=lambda row: (not _is_gpu(row["device"]), row["device"]))


def _gpu_throughput() -> dict[tuple[int, int], float]:
    """Cells per second of the forward pass with many pairs, by length and features."""
    return {
        (int(row["N"]), int(row["D"])): int(row["B"]) * int(row["N"]) ** 2 / (float(row["p50"]) * 1e-3)
        for row in records.read_folder(records.RESULTS)
        if (row["suite"], row["metric"], row["mode"]) == ("throughput", "time", cases.FORWARD)
        and (row["provider"], row["device"]) == ("this library (fused)", "NVIDIA H200")
        and row["status"] == "ok"
    }


def _modelled(row: Row) -> str:
    """Seconds of an H200 by the cost model: cells over the throughput at the nearest length measured."""
    speeds = {length: speed for (length, d), speed in _gpu_throughput().items() if d == int(row["features"])}
    if row["device"] != "NVIDIA H200" or not speeds or row["cells"] == "0":
        return "–"
    nearest = min(speeds, key=lambda length: abs(math.log(length / int(row["steps"]))))
    return f"{int(row['cells']) / speeds[nearest]:.3g}"


def scale() -> str:
    """Whole jobs on every device: targets, model, measurement."""
    parts = []
    rows = [row for row in _scale_rows() if row["processes"] == "1" and row["job"] != SHARED.name]
    for device in dict.fromkeys(row["device"] for row in rows):
        here = [row for row in rows if row["device"] == device]
        body = []
        for row in here:
            rate = f"{int(row['cells']) / float(row['seconds']) / 1e9:.0f}" if row["cells"] != "0" else "–"
            mark = "" if row["share"] == "1" else f" (from {float(row['share']):.0%} of the queries)"
            size = f"{row['job']}, {row['steps']} steps, D = {row['features']}: `{row['route']}`"
            targets = [row["must"] or "–", row["aim"] or "–"]
            body.append([size, *targets, _modelled(row), row["seconds"] + mark, rate])
        header = ["job", "must, s", "aim, s", "model, s", "measured, s", "Gcells/s"]
        runs = dict.fromkeys(f"{row['date']}, {row['versions']}: `{row['command']}`" for row in here)
        parts.append(f"### {device}\n\n{_markdown(header, body)}\n{'; '.join(runs)}.\n")
    if not any(_is_gpu(row["device"]) for row in rows):
        parts.insert(0, "*Not measured on a GPU yet: `python -m benchmarks.scale --write` there.*\n")
    return "\n".join(parts)


def scale_processes() -> str:
    """One job by several CPU processes beside the model: the largest share of the cells, and all the rest."""
    rows = [row for row in _scale_rows() if row["job"] == SHARED.name]
    if not rows:
        return NOT_YET
    seconds = {(row["steps"], row["processes"]): float(row["seconds"]) for row in rows}
    tiles = square_tiles(np.full(SHARED.rows, SHARED.steps), None, NO_BAND, "cpu")
    total = sum(tile.cells for tile in tiles)
    one, nothing = (seconds[str(job.steps), "1"] for job in (SHARED, WITHOUT_CELLS))
    body = []
    for processes in sorted({row["processes"] for row in rows}, key=int):
        shares = divide(tiles, int(processes))
        largest = max(sum(tiles[k].cells for k in share) for share in shares) / total
        rest = seconds[str(WITHOUT_CELLS.steps), processes]
        model, measured = (one - nothing) * largest + rest, seconds[str(SHARED.steps), processes]
        figures = [f"{largest:.4f}", f"{rest:.2f}", f"{model:.2f}", f"{measured:.2f}"]
        body.append([processes, *figures, f"{measured / model - 1:+.1%}"])
    first = rows[0]
    header = ["processes", "largest share", "rest, s", "model, s", "measured, s", "difference"]
    return (
        f"{_markdown(header, body, '--:')}\n"
        f"{first['job'].capitalize()} of {SHARED.steps} steps, one thread a process; CPU time of the busiest "
        f"process, the least of {first['runs']} runs. Rest: as many series of {WITHOUT_CELLS.steps} steps. "
        f"{first['device']}, {first['date']}: `{first['command']}`.\n"
    )


def clustering() -> str:
    """All pairs and k-means beside other libraries (benchmarks/clustering.py): the plot and a table."""
    if not CLUSTERING.exists():
        return NOT_YET
    with CLUSTERING.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    parts = [f"{picture}\n" for picture in _plots(rows[0]["device"], ("clustering",))]
    for job in dict.fromkeys(row["job"] for row in rows):
        here = [row for row in rows if row["job"] == job]
        own = here[0]
        has_inertia = any(row["inertia"] for row in here)
        body = []
        for row in here:
            method = row["method"].replace("softdtw_cuda", "this library")
            if row["status"] != "ok":
                body.append([method, row["status"], "–", "–", *(["–"] if has_inertia else [])])
                continue
            ratio = float(row["seconds"]) / float(own["seconds"])
            times = [row["seconds"], row["cpu_seconds"], "–" if row is own else f"{ratio:.3g}×"]
            body.append([method, *times, *([row["inertia"]] if has_inertia else [])])
        header = [
            "",
            "time, s",
            "CPU time, s",
            "as long as the first row",
            *(["inertia"] if has_inertia else []),
        ]
        parts.append(f"{job}:\n\n{_markdown(header, body, '--:')}\n")
    first = rows[0]
    return (
        "".join(parts) + f"{first['device']}, {first['versions']}, {first['date']}: `{first['command']}`.\n"
    )


def _real_series_rows() -> list[Row]:
    if not REAL_SERIES.exists():
        return []
    with REAL_SERIES.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def real_series() -> str:
    """Scores and seconds on every UCR set (benchmarks/ucr.py), a line a measure, a column a gamma."""
    rows = _real_series_rows()
    if not rows:
        return NOT_YET
    gammas = sorted({row["gamma"] for row in rows if row["gamma"]}, key=float)
    header = ["task", "measure", *(_gamma_name(gamma) for gamma in gammas)]
    parts = []
    for name, sizes in dict.fromkeys((row["set"], row["sizes"]) for row in rows):
        body = []
        for task in ("1-NN", "nearest centroid", "k-means"):
            here = [row for row in rows if (row["set"], row["task"]) == (name, task)]
            for method in dict.fromkeys(row["method"] for row in here):
                mine = {row["gamma"]: row for row in here if row["method"] == method}
                cells = [_score_cell(mine.get(gamma)) for gamma in gammas]
                if "" in mine:  # DTW has no gamma: its one result stands in the first column
                    cells[0] = _score_cell(mine[""])
                body.append([task, method, *cells])
        parts.append(f"### {name}\n\n{sizes}:\n\n{_markdown(header, body)}\n")
    first = rows[0]
    return (
        "".join(parts) + f"{first['device']}, {first['versions']}, {first['date']}: `{first['command']}`.\n"
    )


def _score_cell(row: Row | None) -> str:
    if row is None:
        return "–"
    if row["status"] != "ok":
        return row["status"]
    return f"{float(row['score']):.3f} ({float(row['seconds']):.2g} s)"


def _gamma_name(gamma: str) -> str:
    return "γ = 10⁻⁶, or DTW" if gamma == "1e-06" else f"γ = {gamma}"


def real_series_means() -> str:
    """Means over the sets of a measure's scores, a column a gamma."""
    rows = [row for row in _real_series_rows() if row["status"] == "ok"]
    if not rows:
        return NOT_YET
    sets = len({row["set"] for row in rows})
    gammas = sorted({row["gamma"] for row in rows if row["gamma"]}, key=float)
    body = []
    for task in ("1-NN", "nearest centroid", "k-means"):
        here = [row for row in rows if row["task"] == task]
        for method in dict.fromkeys(row["method"] for row in here):
            cells = []
            for column, gamma in enumerate(gammas):
                wanted = ("", gamma) if column == 0 else (gamma,)
                scores = [
                    float(row["score"]) for row in here if row["method"] == method and row["gamma"] in wanted
                ]
                mean = f"{sum(scores) / len(scores):.3f}" if scores else "–"
                cells.append(mean if len(scores) in (0, sets) else f"{mean} ({len(scores)} of {sets} sets)")
            body.append([task, method, *cells])
    table = _markdown(["task", "measure", *(_gamma_name(gamma) for gamma in gammas)], body)
    return f"{table}\nMeans over {sets} sets.\n"


def lower_bound() -> str:
    """The share of the pairs that a lower bound could leave out (benchmarks/lower_bound.py)."""
    if not LOWER_BOUND.exists():
        return NOT_YET
    with LOWER_BOUND.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    gammas = list(dict.fromkeys(row["gamma"] for row in rows))
    body = []
    for key in dict.fromkeys((row["set"], row["steps"], row["bandwidth"]) for row in rows):
        mine = [row for row in rows if (row["set"], row["steps"], row["bandwidth"]) == key]
        shares = {row["gamma"]: f"{float(row['left_out']):.0%}" for row in mine}
        body.append([key[0], key[1], key[2] or "none", *(shares[gamma] for gamma in gammas)])
    header = ["set", "steps", "band", *(f"γ = {gamma}" for gamma in gammas)]
    return f"{_markdown(header, body)}\n{rows[0]['date']}: `{rows[0]['command']}`.\n"


def scale_plans() -> str:
    """On paper: cells over the measured throughput of one H200 at L = 128, D = 1."""
    speeds = _gpu_throughput()
    if (128, 1) not in speeds:
        return NOT_YET
    speed = speeds[128, 1]
    body = []
    for count in (10**6, 10**7, 10**8):
        for job, pairs, output in (
            ("all pairs", count * (count + 1) // 2, 4 * count**2),
            ("10 nearest", count**2, 120 * count),
        ):
            times = [_duration(pairs * 128**2 / speed / gpus) for gpus in (1, 8, 64)]
            sizes = [_bytes(512 * count), _bytes(output)]
            body.append([f"{count:,}", job, *times, *sizes])
    header = ["series", "job", "1 GPU", "8 GPUs", "64 GPUs", "input", "output"]
    table = _markdown(header, body, "--:")
    return (
        f"{table}\nL = 128, D = 1, float32, {speed / 1e9:.0f} Gcells/s a GPU, as measured "
        "for many pairs on one H200 ([speed](speed.md)); everything else is arithmetic.\n"
    )


def _duration(seconds: float) -> str:
    for unit, size in (("years", 365 * 86400), ("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _bytes(size: float) -> str:
    for unit, scale in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e6:.3g} MB"


def log_space() -> str:
    """Gradient errors of float32 in log space and of this library."""
    with LOG_SPACE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    header = ["N", "D", "γ", "differences", "shares", "this library", "float32 costs"]
    body = [
        [
            row["N"],
            row["D"],
            row["gamma"],
            *(
                tables.scientific(float(row[name]))
                for name in ("differences", "shares", "this_library", "rounded_costs")
            ),
        ]
        for row in rows
    ]
    return _markdown(header, body) + (
        f"\nM = {', '.join(dict.fromkeys(row['M'] for row in rows))} for the three N. "
        f"CPU, torch {rows[0]['torch']}, {rows[0]['date']}: `python docs/log_space.py --write`.\n"
    )


def readme() -> str:
    """The README's table: three lengths, time only, beside the others."""
    paper = _most_telling(records.read_folder(records.RESULTS), "paper")
    if not paper:
        return NOT_YET
    paper = _largest_batch(paper)
    lengths = sorted({row["N"] for row in paper}, key=int)
    paper = [row for row in paper if row["N"] in (lengths[0], lengths[len(lengths) // 3], lengths[-1])]
    paper = [row for row in paper if row["provider"] != OURS_COST]
    device = paper[0]["device"]
    return f"{_table(paper, 'paper', 'time', device)}\n{device}, {_days(paper)}.\n"


def landing() -> str:
    """The landing page's number: the largest problem of the paper's grid, by this library."""
    paper = _most_telling(records.read_folder(records.RESULTS), "paper")
    times = [
        row
        for row in tables.like_for_like(paper)
        if (row["provider"], row["metric"], row["status"]) == (OURS_FUSED, "time", "ok")
    ]
    if not times:
        return NOT_YET
    row = max(times, key=lambda row: int(row["B"]) * int(row["N"]) * int(row["M"]))
    return (
        f'<p class="number"><strong>{float(row["p50"]):.3g} ms</strong> for the loss of {row["B"]} pairs of '
        f"series with {row['N']} steps and {row['D']} features, and its gradients, on one {row['device']} "
        f'(<a href="speed/">measured</a> on {row["date"]})</p>\n'
    )


def _days(rows: Sequence[Row]) -> str:
    runs = records.runs(rows)
    if len(runs) == 1:
        return f"{runs[0][0]}, all in one run"
    days = " to ".join(dict.fromkeys((runs[0][0], runs[-1][0])))
    return f"{days}, this library and the others in separate runs"


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


def _markdown(header: Sequence[str], body: Sequence[Sequence[str]], rule: str = "---") -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, [rule] * len(header), *body))


FIGURES: dict[str, Callable[[], str]] = {
    "speed": speed,
    "memory": memory,
    "results": results,
    "targets": targets,
    "throughput": throughput,
    "second-order": second_order,
    "cpu-targets": cpu_targets,
    "accuracy": accuracy,
    "log-space": log_space,
    "scale": scale,
    "scale-processes": scale_processes,
    "clustering": clustering,
    "lower-bound": lower_bound,
    "real-series": real_series,
    "real-series-means": real_series_means,
    "scale-plans": scale_plans,
    "readme": readme,
    "landing": landing,
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
