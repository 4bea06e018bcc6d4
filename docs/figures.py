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
import torch

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import cases, records, tables  # noqa: E402
from benchmarks.providers import OURS_COST, OURS_FUSED  # noqa: E402
from benchmarks.records import Row  # noqa: E402
from benchmarks.scale import SHARED, WITHOUT_CELLS  # noqa: E402
from softdtw_cuda._backends import backend, dual_backend  # noqa: E402
from softdtw_cuda._problem import NO_BAND, Direction, Problem  # noqa: E402
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
    "extensions": "Extended cases",
    "targets": "This library alone, and host overhead of a call",
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
    "second-order-errors": "Relative error of second order against float64",
    "second-order": "Time of second order",
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


CHANGED = {True: "2026-11-16", False: "2026-11-18"}
"""Up to which day figures of this library are of an earlier version, on a GPU and on a CPU: commit 8faaa0b
replaced what the host does for a call on a GPU, 7c02324 the tiles of the CPU. Figures of GPU kernels that
were replaced are not kept at all."""


def _is_gpu(device: str) -> bool:
    return "nvidia" in device.lower()


def _rows() -> list[Row]:
    """Of every table of `python -m benchmarks`, for readers."""
    return records.newest(records.read_folder(records.RESULTS))


def _reservation(rows: Sequence[Row], runs: int = 1) -> str:
    """What to know about figures of one device that are not those of one run of the present code."""
    changed = CHANGED[_is_gpu(rows[0]["device"])]
    days = sorted({row["date"] for row in rows if _is_ours(row) and row["date"] <= changed})
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""
    text = f" This library's figures of {when} are of an earlier version." if days else ""
    return text + (" To be measured again before the release." if days or runs > 1 else "")


def _is_ours(row: Row) -> bool:
    """Whether the row is of this library; those of most single benchmarks have no other."""
    name = row.get("provider", OURS_FUSED)
    return name in (OURS_FUSED, OURS_COST) or name.startswith("softdtw_cuda")


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
    version = "/".join(sorted({row["torch"] for row in rows if row["torch"]}))
    runs = records.runs(rows)
    if len(runs) == 1:
        date, command = runs[0]
        return f"{device}, torch {version}, {date}, one run: `{command}`.{_reservation(rows)}"
    reservation = _reservation(rows, len(runs))
    lines = [f"{device}, torch {version}. **Separate runs**, not measured side by side.{reservation}", ""]
    for run in runs:
        who = dict.fromkeys(row["provider"] for row in rows if (row["date"], row["command"]) == run)
        lines.append(f"- {', '.join(who)}: {run[0]}, `{run[1]}`")
    return "\n".join(lines)


def _single_origin(rows: Sequence[Row], versions: str = "") -> str:
    """The same for the file of one benchmark, which is one run or a few of them."""
    runs = dict.fromkeys(
        ", ".join(filter(None, (row.get("versions", versions), row["date"]))) + f": `{row['command']}`"
        for row in rows
    )
    return f"{rows[0]['device']}, {'; '.join(runs)}.{_reservation(rows)}\n"


def published() -> Iterator[tuple[str, str, list[Row]]]:
    """Suite, device and rows of every table that pages show."""
    rows = _rows()
    for suite, device in dict.fromkeys((row["suite"], row["device"]) for row in rows):
        yield suite, device, [row for row in rows if (row["suite"], row["device"]) == (suite, device)]


def _table(
    rows: Sequence[Row], suite: str, metric: str, device: str, reasons: list[str] | None = None
) -> str:
    """A caption and a table, or nothing where nothing was measured."""
    try:
        same = tables.constants(rows, suite, metric, device)
        unit = f" in {tables.UNITS[metric]}" if tables.UNITS[metric] else ""
        table = tables.compact(rows, suite, metric, device, reasons)
        return f"{_METRICS[metric]}{unit}{same}:\n\n{table}"
    except ValueError:
        return ""


def _plots(device: str, kinds: Sequence[str]) -> Iterator[str]:
    """The device's pictures of these kinds, in that order, as the site refers to them.

    Where the lines come from separate runs, or from an earlier version, a caption says so.
    """
    for kind in kinds:
        path = PLOTS / f"{kind}-{records.slug(device)}.png"
        if not path.exists():
            continue
        yield f"![{_PLOT_TITLES[kind]}, {device}](assets/benchmarks/{path.name})\n"
        drawn = [row for row in _rows() if (row["suite"], row["device"]) == (_PLOT_SUITES.get(kind), device)]
        reservation = _reservation(drawn, len(records.runs(drawn))) if drawn else ""
        if reservation:
            yield f"*{device}, {_days(drawn)}.{reservation}*\n"


def _largest_batch(rows: Sequence[Row]) -> list[Row]:
    batch = max((row["B"] for row in rows), key=int)
    return [row for row in rows if row["B"] == batch]


def _paper_grid(metric: str) -> Iterator[tuple[str, str]]:
    """Each device with its table of the paper's sizes at the larger batch."""
    rows = _rows()
    for device in devices(rows):
        here = [row for row in rows if row["suite"] == "paper" and row["device"] == device]
        table = _table(_largest_batch(here), "paper", metric, device) if here else ""
        if table:
            yield device, f"{table}\n{_origin(_largest_batch(here))}\n"


def speed() -> str:
    """Plots and a table of time for every device."""
    parts = []
    tables_of = dict(_paper_grid("time"))
    for device in devices(_rows()):
        shown = list(_plots(device, ("lengths", "dimensions", "long", "batch", "roofline")))
        shown += [tables_of[device]] if device in tables_of else []
        if shown:
            parts += [f"### {device}\n", *shown]
    return "\n".join(parts) or NOT_YET


def memory() -> str:
    """A table of memory for every GPU. (That of a CPU comes in pages: `saved` has what is exact.)"""
    parts = [f"### {device}\n\n{table}" for device, table in _paper_grid("memory") if _is_gpu(device)]
    return "\n".join(parts) or NOT_YET


SAVED_LENGTHS = (64, 128, 256, 300, 512, 1024, 4096)


def saved() -> str:
    """What a forward on the CPU saves for its backward, as the backend computes it before it allocates."""
    body = []
    for length in SAVED_LENGTHS:
        x = torch.empty(8, length, 64, device="meta")
        problem = Problem(x, x, None, None, 1.0, NO_BAND, need_x=True, need_y=True)
        sizes = [
            backend("cpu").state_bytes(problem),
            dual_backend("cpu").expected_state_bytes(problem, Direction("position")),
            4 * 8 * length**2,
        ]
        body.append([str(length), *(f"{size / 2**20:.3g}" for size in sizes)])
    header = ["L", "first order", "second order", "one N×M table"]
    caption = "On the CPU, in MiB; float32, B = 8, D = 64, gradients of both sides"
    return f"{caption}:\n\n{_markdown(header, body, '--:')}"


def results() -> str:
    """Every suite and device, a table for each metric; notes and runs once for a device."""
    parts = []
    rows = _rows()
    for device in devices(rows):
        here = [row for row in rows if row["device"] == device and row["suite"] in _SUITE_TITLES]
        able = {row["provider"] for row in here if row["status"] == "ok"}
        shown: list[str] = []
        reasons: list[str] = []
        for suite, title in _SUITE_TITLES.items():
            mine = [row for row in here if row["suite"] == suite and row["provider"] in able]
            parts_of = [mine]
            if suite == "accuracy":  # a table for each D, or it would be wider than a phone
                parts_of = [
                    [row for row in mine if row["D"] == d]
                    for d in sorted({row["D"] for row in mine}, key=int)
                ]
            found = [_table(part, suite, metric, device, reasons) for part in parts_of for metric in _METRICS]
            found = list(filter(None, found))
            if found:
                shown.append("\n".join([f"### {title}, {device}\n", *found]))
        if shown:
            below = tables.notes(reasons) + tables.no_numbers(here)
            parts += [f"## {device}\n", *shown, f"### Notes, {device}\n{below}\n{_origin(here)}\n"]
    return "\n".join(parts) or NOT_YET


def targets() -> str:
    """Performance targets of the GPU kernels, and what was measured."""
    rows = [
        row
        for row in _rows()
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
        f"{_markdown(['B', 'L', 'D', 'measured', 'required', 'target'], body)}\n"
        f"Host overhead of an eager call without reduction, B = 16, L = 64, D = 8: {host:.3g} ms.\n\n"
        f"{_origin(rows)}\n"
    )


def host_time() -> str:
    """Ratios of benchmarks/host_time.py on GPUs."""
    rows = [
        row
        for path in sorted(records.RESULTS.glob("host-time-*.csv"))
        for row in records.read_any(path)
        if _is_gpu(row["device"])
    ]
    if not rows:
        return "*Not measured yet: `python -m benchmarks.host_time --write`.*\n"
    body = [
        [
            row["call"].replace("_", " "),
            f"{float(row['ratio']):.2f}",
            row["microseconds"],
            row["torch_microseconds"],
        ]
        for row in rows
    ]
    header = ["call", "ratio", "this library, µs", "torch's sum, µs"]
    return f"{_markdown(header, body)}\n{_single_origin(rows)}"


def scale_targets() -> str:
    """Whole jobs on a GPU beside their targets."""
    rows = [row for row in _scale_rows() if row["target"]]
    body = [
        [f"{row['job']}: `{row['route']}`", row["seconds"], row["required"], row["target"]] for row in rows
    ]
    if not rows:
        return NOT_YET
    return f"{_markdown(['job', 'measured, s', 'required, s', 'target, s'], body)}\n{_single_origin(rows)}"


def throughput() -> str:
    """Gcells/s with many pairs, a table for each pass: features down, lengths across."""
    rows = [
        row
        for row in _rows()
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
        for d in cases.THROUGHPUT_DIMS:
            speeds = [
                f"{batch * length**2 / found[mode, length, d] / 1e6:.0f}"
                if (mode, length, d) in found
                else "–"
                for length, batch in cases.THROUGHPUT_BATCH.items()
            ]
            body.append([str(d), *speeds])
        header = ["D", *(f"L = {length}" for length in cases.THROUGHPUT_BATCH)]
        parts.append(f"{mode.replace('+', ' and ').capitalize()}:\n\n{_markdown(header, body, '--:')}\n")
    pairs = ", ".join(f"{batch} of L = {length}" for length, batch in cases.THROUGHPUT_BATCH.items())
    pictures = "".join(f"{each}\n" for each in _plots(rows[0]["device"], ("throughput",)))
    return pictures + "".join(parts) + f"Pairs: {pairs}. {_origin(rows)}\n"


def second_order() -> str:
    """Error and time of second order on every device; nothing where neither was measured."""
    parts = [_second_order_errors(path) for path in sorted(records.RESULTS.glob("error_budget_second_*.csv"))]
    rows = [row for row in _rows() if row["suite"] == "second_order"]
    for device in devices(rows):
        here = [row for row in rows if row["device"] == device]
        parts += [
            f"### {device}\n",
            *_plots(device, ("second-order",)),
        ]
        for mode in dict.fromkeys(row["mode"] for row in here):
            mine = [row for row in here if row["mode"] == mode]
            table = _table(mine, "second_order", "time", device)
            parts += [table] if table else []
        parts.append(f"{_origin(here)}\n")
    if not any(_is_gpu(row["device"]) for row in rows):
        parts.append("*Times on a GPU are to be measured before the release.*\n")
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
        "product, largest",
        "⟨E, Ω⟩, median",
        "⟨E, Ω⟩, largest",
        "share of budget",
        "over",
    ]
    sizes, gammas = (sorted({float(row[column]) for row in rows}) for column in ("d", "gamma"))
    return "\n".join(
        [
            f"### Error, {device}\n",
            *_plots(device, ("second-order-errors",)),
            "Relative errors, in norm, of Hessian-vector products and of gradients of the position's "
            "expected cost; the largest share of a case's budget, and how many cases are over theirs. "
            f"D from {sizes[0]:g} to {sizes[-1]:g}, γ from {gammas[0]:g} to {gammas[-1]:g}, N = M and N > M, "
            "with and without an offset of 1000:\n",
            _markdown(header, body, "--:"),
            _single_origin(rows, f"torch {rows[0]['torch']}"),
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
    return (
        f"Forward and backward:\n\n{_markdown(['size', *names], lines)}\n{_many_pairs_on_cpu(rows)}"
        f"With a band, CPU time in ms at L = 2048:\n\n{_markdown(['B', 'D', 'pass', *titles], banded)}\n"
        f"{_single_origin(rows)}"
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
    passes = [(metric, b, n) for metric in ("forward", both) for b, n in sizes]
    speeds = [
        [str(d), *(f"{b * n * n / times[b, n, d][ours, metric] / 1e6:.2g}" for metric, b, n in passes)]
        for d in sorted({d for *_, d in times})
    ]
    header = ["D", *(f"{'forward' if metric == 'forward' else 'both'}, L = {n}" for metric, _, n in passes)]
    pairs = " and ".join(f"{b} pairs of L = {n}" for b, n in sizes)
    peaks = {row["metric"]: f"{float(row['value']):.0f}" for row in rows if row["benchmark"] == "machine"}
    return (
        f"Many pairs, forward and backward:\n\n"
        f"{_markdown(['size', 'this library', 'pysdtw', 'ratio'], beside)}\n"
        + "".join(f"{each}\n" for each in _plots(rows[0]["device"], ("throughput",)))
        + f"Gcells/s of this library, forward and both passes, {pairs}:\n\n"
        f"{_markdown(header, speeds, '--:')}\n"
        f"The machine: {peaks['multiply-adds']}·10⁹ multiply-adds a second, {peaks['instructions']}·10⁹ "
        f"lanes of vector instructions, {peaks['memory']} GB/s copied.\n\n"
    )


def accuracy() -> str:
    """Gradient errors of every provider and device: the plot, and the longest series of the most features."""
    rows = _rows()
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
        for row in _rows()
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
    """Whole jobs on every device: model and measurement."""
    parts = []
    rows = [row for row in _scale_rows() if row["processes"] == "1" and row["job"] != SHARED.name]
    for device in dict.fromkeys(row["device"] for row in rows):
        here = [row for row in rows if row["device"] == device]
        body = []
        for row in here:
            rate = f"{int(row['cells']) / float(row['seconds']) / 1e9:.0f}" if row["cells"] != "0" else "–"
            mark = "" if row["share"] == "1" else f" (from {float(row['share']):.0%} of the queries)"
            size = f"{row['job']}, {row['steps']} steps, D = {row['features']}: `{row['route']}`"
            body.append([size, _modelled(row), row["seconds"] + mark, rate])
        header = ["job", "model, s", "measured, s", "Gcells/s"]
        parts.append(f"### {device}\n\n{_markdown(header, body)}\n{_single_origin(here)}")
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
        f"{_single_origin(rows)}"
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
        header = ["method", "time, s", "CPU time, s", "relative time", *(["inertia"] if has_inertia else [])]
        parts.append(f"{job}:\n\n{_markdown(header, body, '--:')}\n")
    return "".join(parts) + _single_origin(rows)


def _real_series_rows() -> list[Row]:
    if not REAL_SERIES.exists():
        return []
    with REAL_SERIES.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def real_series() -> str:
    """Scores and seconds on every UCR set (benchmarks/ucr.py)."""
    rows = _real_series_rows()
    if not rows:
        return NOT_YET
    parts = []
    for name, sizes in dict.fromkeys((row["set"], row["sizes"]) for row in rows):
        here = [row for row in rows if row["set"] == name]
        parts.append(f"### {name}\n\n{sizes}:\n\n{_by_gamma(here, lambda found: _score_cell(found[0]))}\n")
    return "".join(parts) + _single_origin(rows)


def _by_gamma(rows: Sequence[Row], cell: Callable[[Sequence[Row]], str]) -> str:
    """Two tables: a column a gamma, and below it DTW and Soft-DTW at a gamma so small that it is DTW."""
    limits = ("", "1e-06")
    gammas = sorted({row["gamma"] for row in rows} - {*limits}, key=float)
    soft, hard = [], []
    tasks = ("1-NN", "nearest centroid", "k-means")
    for task, method in sorted(
        dict.fromkeys((row["task"], row["method"]) for row in rows), key=lambda each: tasks.index(each[0])
    ):
        mine = [row for row in rows if (row["task"], row["method"]) == (task, method)]
        found = [[row for row in mine if row["gamma"] == gamma] for gamma in gammas]
        if any(found):
            soft.append([task, method, *(cell(each) if each else "–" for each in found)])
        for gamma in limits:
            name = f"{method}, γ = 10⁻⁶" if gamma else method
            each = [row for row in mine if row["gamma"] == gamma]
            hard += [[task, name, cell(each)]] if each else []
    tables = [_markdown(["task", "measure", *(f"γ = {gamma}" for gamma in gammas)], soft)] if soft else []
    tables += [_markdown(["task", "measure", "score"], hard)] if hard else []
    return "\n".join(tables)


def _score_cell(row: Row) -> str:
    if row["status"] != "ok":
        return row["status"]
    return f"{float(row['score']):.3f} ({float(row['seconds']):.2g}\u00a0s)"


def real_series_means() -> str:
    """Means over the sets of a measure's scores."""
    rows = [row for row in _real_series_rows() if row["status"] == "ok"]
    if not rows:
        return NOT_YET
    sets = len({row["set"] for row in rows})

    def mean(found: Sequence[Row]) -> str:
        value = f"{sum(float(row['score']) for row in found) / len(found):.3f}"
        return value if len(found) == sets else f"{value} ({len(found)} of {sets} sets)"

    return f"{_by_gamma(rows, mean)}\nMeans over {sets} sets.\n"


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
    paper = _most_telling(_rows(), "paper")
    if not paper:
        return NOT_YET
    paper = _largest_batch(paper)
    lengths = sorted({row["N"] for row in paper}, key=int)
    paper = [row for row in paper if row["N"] in (lengths[0], lengths[len(lengths) // 3], lengths[-1])]
    paper = [row for row in paper if row["provider"] != OURS_COST]
    device = paper[0]["device"]
    reservation = _reservation(paper, len(records.runs(paper)))
    return f"{_table(paper, 'paper', 'time', device)}\n{device}, {_days(paper)}.{reservation}\n"


def landing() -> str:
    """The landing page's number: the largest problem of the paper's grid, by this library."""
    paper = _most_telling(_rows(), "paper")
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


def _markdown(header: Sequence[str], body: Sequence[Sequence[str]], rule: str = "---") -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, [rule] * len(header), *body))


FIGURES: dict[str, Callable[[], str]] = {
    "speed": speed,
    "memory": memory,
    "saved": saved,
    "results": results,
    "targets": targets,
    "host-time": host_time,
    "scale-targets": scale_targets,
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
