"""Plots from the CSV alone: time and memory against L and D, accuracy, throughput against hardware limits.

PNG and SVG, narrow enough to be read on a phone. Colours are those of `softdtw_cuda.plot`; lines carry their
names at their ends and differ in their markers too. A provider looks the same in every plot; limits are dark,
since no provider is. What lies outside of a plot's range is drawn at its edge with a mark of its own.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from softdtw_cuda.plot import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, SKY, VERMILLION

from .bounds import GPUS, Cpu, least_cpu_seconds, least_seconds
from .cases import EXPECTED_COST, FORWARD, FORWARD_BACKWARD, HESSIAN_PRODUCT, THROUGHPUT_DIMS
from .providers import OURS_COST, OURS_FUSED, ROUNDING
from .records import Row, slug
from .tables import SHORT_NAMES, like_for_like

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

STYLES = {
    OURS_FUSED: (BLUE, "o"), OURS_COST: (SKY, "s"), ROUNDING: (GREY, ""),
    "BGU (fused)": (VERMILLION, "^"), "BGU (unfused)": (ORANGE, "v"), "Maghoumi": (GREEN, "D"),
    "pysdtw": (PURPLE, "P"), "tslearn": ("#000000", "X"), "philtorch": ("#882255", "p"),
    "aeon": ("#6B5B00", "*"), "ddtw": ("#5D3FD3", "h"),
}  # fmt: skip
OTHER_STYLES = [("#7F7F7F", "<"), ("#4D8076", ">"), ("#A0522D", "d")]
WIDTH = 5.0
"""Inches; on a phone, 360 pixels, letters of 9 points are as many pixels high."""
FAILED = ("oom", "error", "crash", "timeout", "skipped", "unsupported", "not finite")
REASONS = {"oom": "out of memory", "error": "fails", "crash": "crashes", "timeout": "too slow",
           "unsupported": "unsupported", "not finite": "NaN or inf"}  # fmt: skip


SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "svg.hashsalt": "softdtw",
    "svg.fonttype": "none",
}


def style(provider: str) -> tuple[str, str]:
    """Colour and marker of a provider, the same in every plot, also of a name that is not in the table."""
    return STYLES.get(provider) or OTHER_STYLES[sum(provider.encode()) % len(OTHER_STYLES)]


def short(provider: str) -> str:
    """A name for the end of a line."""
    return SHORT_NAMES.get(provider, provider)


def draw_all(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Every plot that the rows can fill, for each device; the files written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written: list[Path] = []
    with plt.rc_context(SETTINGS):
        for device in dict.fromkeys(row["device"] for row in rows):
            here = [row for row in rows if row["device"] == device]
            for name, figure in _figures(here, device):
                written += _save(figure, folder, f"{name}-{device}")
                plt.close(figure)
    return written


def _save(figure: Figure, folder: Path, name: str) -> Iterator[Path]:
    """As NAME.png and NAME.svg, named as CSV files are."""
    folder.mkdir(parents=True, exist_ok=True)
    name = slug(name)
    for suffix, extra in ((".png", {"dpi": 200}), (".svg", {"metadata": {"Date": None}})):
        path = folder / f"{name}{suffix}"
        figure.savefig(path, **extra)
        yield path


def _figures(rows: Sequence[Row], device: str) -> Iterator[tuple[str, Figure]]:
    # Who has no way to run a suite on this device is no line of its plots; the tables say why.
    able = {(row["suite"], row["provider"]) for row in rows if row["status"] != "unsupported"}
    rows = [row for row in rows if (row["suite"], row["provider"]) in able]
    lengths = [r for r in rows if r["suite"] == "lengths"]
    if _has_ours(lengths):
        title = f"Forward + backward, {_sizes(lengths, 'B', 'D')}, float32, {device}"
        yield "lengths", _time_and_memory(lengths, "N", "length L", title)
    dimensions = [r for r in rows if r["suite"] == "dimensions"]
    if _has_ours(dimensions):
        title = f"Forward + backward, {_sizes(dimensions, 'B', 'N')}, float32, {device}"
        yield "dimensions", _time_and_memory(dimensions, "D", "features D", title)
    plain = [r for r in rows if r["suite"] == "extensions" and _is_plain(r)]
    long = [r for r in plain if r["B"] == "1"]
    if _has_ours(long):
        title = f"One long pair, forward + backward, {_sizes(long, 'D')}, float32, {device}"
        yield "long", _time_and_memory(long, "N", "length L", title)
    many = [r for r in plain if r["N"] == "64" and r["D"] == "8"]
    if _has_ours(many):
        title = f"Many short pairs, forward + backward, {_sizes(many, 'N', 'D')}, float32, {device}"
        yield "batch", _time_and_memory(many, "B", "batch size B", title)
    accuracy = [r for r in rows if r["metric"] == "gradient error"]
    if _has_ours(accuracy):
        yield "accuracy", _accuracy(accuracy, device)
    throughput = [r for r in rows if r["suite"] == "throughput" and _is_measured(r)]
    if throughput and device in GPUS:
        yield "throughput", _throughput(throughput, device, lambda row: _limit(row, device), THROUGHPUT_DIMS)
    second = [r for r in rows if r["suite"] == "second_order"]
    if _has_ours(second):
        yield "second_order", _second_order(second, device)
    speeds = [r for r in rows if r["suite"] == "targets" and _is_measured(r)]
    if speeds and device in GPUS:
        yield "roofline", _roofline(speeds, device)


def _has_ours(rows: Sequence[Row]) -> bool:
    """Whether there is anything to hold others against."""
    return any((row["provider"], row["status"]) == (OURS_FUSED, "ok") for row in rows)


def _is_measured(row: Row) -> bool:
    return (row["provider"], row["metric"], row["status"]) == (OURS_FUSED, "time", "ok")


def _is_plain(row: Row) -> bool:
    return (
        row["mode"] == FORWARD_BACKWARD
        and row["normalize"] == "no"
        and row["lengths"] == "full"
        and row["bandwidth"] == ""
        and row["dtype"] == "float32"
    )


def _sizes(rows: Sequence[Row], *columns: str) -> str:
    names = {"N": "L"}
    return ", ".join(f"{names.get(c, c)} = {'/'.join(dict.fromkeys(r[c] for r in rows))}" for c in columns)


def _time_and_memory(rows: Sequence[Row], x: str, x_label: str, title: str) -> Figure:
    import matplotlib.pyplot as plt

    rows = like_for_like(rows)
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    failing = _failing(rows, providers)
    title = textwrap.fill(title, 68)
    top = 0.5 + 0.17 * title.count("\n") + 0.12 * len(failing)
    height = 5.6 + top + 0.18 * len(failing)
    figure = plt.figure(figsize=(WIDTH, height))
    figure.suptitle(title, x=0.02, y=1 - 0.08 / height, ha="left", va="top", fontsize=10, color=INK)
    grid = figure.add_gridspec(
        2, 1, left=0.12, right=0.76, hspace=(0.75 + 0.12 * len(failing)) / 2.2,
        top=1 - top / height, bottom=(0.55 + 0.18 * len(failing)) / height,
    )  # fmt: skip
    for place, metric, label in ((0, "time", "time (ms)"), (1, "memory", "extra memory (MiB)")):
        chosen = [row for row in rows if row["metric"] == metric]
        axes = figure.add_subplot(grid[place])
        # A CPU's memory comes in pages, and a small call may find all of its memory free already.
        least = 0.1 if metric == "memory" and rows[0]["device"] not in GPUS else 0.0
        _lines(axes, chosen, providers, lambda row: float(row[x]), least)
        axes.set_xlabel(x_label)
        axes.set_ylabel(label)
        _mark_failures(axes, chosen, failing, lambda row: float(row[x]))
        _name_lines(axes)
    _explain_failures(figure, rows, failing, x, x_label.split()[-1])
    return figure


def _failing(rows: Sequence[Row], providers: Sequence[str]) -> list[str]:
    failed = {row["provider"] for row in rows if row["status"] in FAILED}
    return [provider for provider in providers if provider in failed]


def _lines(
    axes: Axes,
    rows: Sequence[Row],
    providers: Sequence[str],
    x_of: Callable[[Row], float],
    least: float,
    note: bool = True,
) -> None:
    """A line a provider, with the p20 to p80 range as a shade; open triangles for what is below `least`."""
    ticks = sorted({x_of(row) for row in rows})
    below = False
    for provider in providers:
        colour, marker = style(provider)
        mine = sorted((row for row in rows if row["provider"] == provider), key=x_of)
        good = [row for row in mine if row["status"] == "ok"]
        points = [(x_of(row), *(max(float(row[p]), least) for p in ("p20", "p50", "p80"))) for row in good]
        for run in _runs(points, ticks):
            xs, lows, mids, highs = zip(*run, strict=True)
            ours = provider in (OURS_FUSED, OURS_COST)
            axes.plot(
                xs,
                mids,
                color=colour,
                marker=marker,
                markersize=5 if marker else 0,
                linewidth=2.4 if provider == OURS_FUSED else 1.5,
                linestyle="--" if provider == ROUNDING else "-",
                zorder=3 if ours else 2,
                label="_run",
            )
            axes.fill_between(xs, lows, highs, color=colour, alpha=0.18, linewidth=0)
        low = [x_of(row) for row in good if float(row["p50"]) < least]
        if low:
            below = True
            axes.plot(low, [least] * len(low), color=colour, marker="v", markersize=8, linestyle="none",
                      markerfacecolor="white", zorder=4, clip_on=False, label="_below")  # fmt: skip
        if points:
            axes.plot([points[-1][0]], [points[-1][2]], color=colour, linestyle="none", label=provider)
    axes.set_xscale("log", base=2 if len(ticks) > 1 and ticks[1] <= 4 * ticks[0] else 10)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [_tick(tick) for tick in ticks], rotation=45 if len(ticks) > 6 else 0)
    axes.minorticks_off()
    axes.grid(axis="y", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    if below and note:
        axes.annotate(f"\u25bd less than {least:g}", (1, 0), xycoords="axes fraction", xytext=(0, -24),
                      textcoords="offset points", ha="right", va="top", fontsize=8, color=INK)  # fmt: skip


def _tick(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:,g}"


def _runs(points: Sequence[tuple[float, ...]], ticks: Sequence[float]) -> Iterator[list[tuple[float, ...]]]:
    """Points that are neighbours on the grid: a line must not pass over a failure."""
    run: list[tuple[float, ...]] = []
    for point in points:
        if run and ticks.index(point[0]) != ticks.index(run[-1][0]) + 1:
            yield run
            run = []
        run.append(point)
    if run:
        yield run


def _mark_failures(
    axes: Axes, rows: Sequence[Row], failing: Sequence[str], x_of: Callable[[Row], float]
) -> None:
    """Above the axes a row of crosses for each provider that failed."""
    for position, provider in enumerate(failing):
        xs = [x_of(row) for row in rows if row["provider"] == provider and row["status"] in FAILED]
        for x in xs:
            axes.annotate(
                "\u00d7", (x, 1), xycoords=("data", "axes fraction"), xytext=(0, 5 + 8.5 * position),
                textcoords="offset points", ha="center", va="center", fontsize=11, fontweight="bold",
                color=style(provider)[0], annotation_clip=False,
            )  # fmt: skip


def _explain_failures(
    figure: Figure, rows: Sequence[Row], failing: Sequence[str], x: str, symbol: str
) -> None:
    """At the foot of a figure a line for each provider that failed: where, and why."""
    for position, provider in enumerate(reversed(failing)):
        places: dict[str, list[float]] = {}
        for row in rows:
            if row["provider"] == provider and row["status"] in FAILED:
                where = places.setdefault(_reason(row), [])
                where += [] if float(row[x]) in where else [float(row[x])]
        texts = [
            f"{reason} at {symbol} = {', '.join(f'{each:g}' for each in sorted(at))}"
            for reason, at in places.items()
        ]
        figure.text(0.02, (0.08 + 0.18 * position) / figure.get_figheight(),
                    f"\u00d7 {short(provider)}: {'; '.join(texts)}", fontsize=8.5, va="bottom",
                    color=_ink(style(provider)[0]))  # fmt: skip


def _reason(row: Row) -> str:
    # The note of a skipped case begins with the status of the smaller case that is to blame.
    status = row["note"].split(" ")[0] if row["status"] == "skipped" else row["status"]
    return REASONS.get(status, status)


def _ink(colour: str) -> str:
    """The colour, darker, for letters on white."""
    return "#" + "".join(f"{int(int(colour[i : i + 2], 16) * 0.8):02X}" for i in (1, 3, 5))


def _name_lines(axes: Axes) -> None:
    """Write each line's name at its end, moved apart where they would overlap."""
    named = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    if not named:
        return
    figure = axes.figure
    spacing = 10.5 * figure.dpi / 72
    floor = axes.get_ylim()[0]
    ends = []
    for line in named:
        x, y = float(line.get_xdata()[-1]), max(float(line.get_ydata()[-1]), floor)  # type: ignore[index,arg-type]
        ends.append((axes.transData.transform((x, y))[1], x, y, line))
    ends.sort(key=lambda end: end[0])
    heights = _apart([end[0] for end in ends], spacing)
    right = axes.transAxes.transform((1, 0))[0]
    for height, (_, x, y, line) in zip(heights, ends, strict=True):
        colour: Any = line.get_color()
        place = axes.transAxes.inverted().transform((right, height))
        axes.annotate(
            short(str(line.get_label())),
            (x, y),
            xytext=(1.03, place[1]),
            textcoords="axes fraction",
            ha="left",
            va="center",
            fontsize=9,
            color=_ink(colour),
            fontweight="bold" if line.get_label() == OURS_FUSED else "normal",
            annotation_clip=False,
            # Thin, grey and dotted: no line of data.
            arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.7, "linestyle": (0, (1, 2)),
                        "shrinkA": 0, "shrinkB": 4},
        )  # fmt: skip


def _apart(wanted: Sequence[float], spacing: float) -> list[float]:
    """Ascending heights, moved until neighbours are `spacing` apart: each crowd about its own centre."""
    crowds: list[list[float]] = []
    for height in wanted:
        crowds.append([height])
        while len(crowds) > 1 and _place(crowds[-2], spacing)[-1] + spacing > _place(crowds[-1], spacing)[0]:
            crowds[-2:] = [crowds[-2] + crowds[-1]]
    return [height for crowd in crowds for height in _place(crowd, spacing)]


def _place(crowd: Sequence[float], spacing: float) -> list[float]:
    middle = sum(crowd) / len(crowd)
    return [middle + (i - (len(crowd) - 1) / 2) * spacing for i in range(len(crowd))]


LEAST_ERROR = 1e-8
"""Below float32's own rounding there is nothing to see; what lies there is marked at this height."""


def _accuracy(rows: Sequence[Row], device: str) -> Figure:
    """Lengths down, the fewest and the most features across; a legend, since most lines lie on each other."""
    import matplotlib.pyplot as plt

    providers = list(dict.fromkeys(row["provider"] for row in rows))
    failing = _failing(rows, providers)
    lengths = sorted({int(row["N"]) for row in rows})[-3:]
    dims = sorted({int(row["D"]) for row in rows})
    dims = [dims[0], dims[-1]] if len(dims) > 1 else dims
    foot = 0.85 + 0.2 * ((len(providers) + 2) // 2) + 0.18 * len(failing)
    height = 0.75 + foot + (2.05 + 0.12 * len(failing)) * len(lengths)
    figure = plt.figure(figsize=(WIDTH, height))
    title = f"Relative error of the float32 gradient\nagainst float64, {device}"
    figure.suptitle(title, x=0.02, y=1 - 0.08 / height, ha="left", va="top", fontsize=10, color=INK)
    grid = figure.add_gridspec(
        len(lengths), len(dims), left=0.13, right=0.98, top=1 - (0.85 + 0.12 * len(failing)) / height,
        bottom=foot / height, wspace=0.1, hspace=0.35 + 0.07 * len(failing),
    )  # fmt: skip

    def gamma_of(row: Row) -> float:
        return float(row["gamma"])

    first: Axes | None = None
    high = max((2 * float(row["p80"]) for row in rows if row["status"] == "ok"), default=1.0)
    for (i, length), (j, d) in itertools.product(enumerate(lengths), enumerate(dims)):
        axes = figure.add_subplot(grid[i, j], sharey=first)
        first = first or axes
        chosen = [row for row in rows if int(row["N"]) == length and int(row["D"]) == d]
        _lines(axes, chosen, providers, gamma_of, LEAST_ERROR, note=False)
        axes.set_xscale("log")
        ticks = sorted({float(row["gamma"]) for row in chosen})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        crosses = len(_failing(chosen, providers))
        axes.set_title(f"L = {length}, D = {d}", fontsize=9, pad=6 + 8.5 * crosses)
        if i == len(lengths) - 1:
            axes.set_xlabel("$\\gamma$")
        if j:
            axes.tick_params(labelleft=False)
        else:
            axes.set_ylabel("relative error")
        _mark_failures(axes, chosen, _failing(chosen, providers), gamma_of)
        if _name_overlaps(axes, chosen):  # above the lines
            high = max([high, *(200 * float(row["p80"]) for row in chosen if row["status"] == "ok")])
    assert first is not None
    first.set_ylim(LEAST_ERROR / 2, max(high, 1.5))
    samples = [*map(_sample, providers), _below_sample()]
    names = [*map(short, providers), f"less than {LEAST_ERROR:g}"]
    figure.legend(
        samples, names, ncols=2, loc="lower left",
        bbox_to_anchor=(0.02, (0.1 + 0.18 * len(failing)) / height), frameon=False, fontsize=9,
    )  # fmt: skip
    _explain_failures(figure, rows, failing, "N", "L")
    return figure


def _sample(provider: str) -> Line2D:
    """A line of the legend."""
    from matplotlib.lines import Line2D

    colour, marker = style(provider)
    return Line2D([], [], color=colour, marker=marker or "none", linestyle="-" if marker else "--")


def _below_sample() -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=GREY, marker="v", markersize=8, markerfacecolor="white", linestyle="none")


def _name_overlaps(axes: Axes, rows: Sequence[Row]) -> bool:
    """Name the lines that lie on each other, which no marker can tell apart, in the panel's upper corner."""
    curves: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["status"] == "ok" and row["provider"] not in (OURS_FUSED, OURS_COST, ROUNDING):
            curves.setdefault(row["provider"], {})[float(row["gamma"])] = float(row["p50"])
    groups = []
    while len(curves) > 1:
        name = next(iter(curves))
        curve = curves.pop(name)
        same = [
            other
            for other, points in curves.items()
            if points.keys() == curve.keys() and all(0.4 < points[x] / curve[x] < 2.5 for x in curve)
        ]
        for other in same:
            del curves[other]
        if same:
            groups.append([short(each) for each in (name, *same)])
    if groups:
        lines = [", ".join(names[at : at + 3]) for names in groups for at in range(0, len(names), 3)]
        axes.text(1, 0.99, "\n".join(["on one line:", *lines]), transform=axes.transAxes, fontsize=7,
                  color=INK, ha="right", va="top", linespacing=1.15,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
    return bool(groups)


def _roofline(rows: Sequence[Row], device: str) -> Figure:
    """Cells a second of each case beside the limit that each resource sets."""
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    cases = list(dict.fromkeys((int(r["B"]), int(r["N"]), int(r["D"])) for r in rows))
    height = 2.2 + 0.62 * len(cases)
    figure, axes = plt.subplots(figsize=(WIDTH, height))
    figure.subplots_adjust(left=0.27, right=0.97, top=1 - 0.5 / height, bottom=1.35 / height)
    limits: tuple[tuple[str, Literal["-", "--", ":"], str], ...] = (
        ("products", "-", "limit of the tensor cores"),
        ("cells", "--", "limit of instructions"),
        ("chain", ":", "limit of dependent steps"),
    )
    types = (("float32", BLUE, 0.18), ("bfloat16", "white", -0.18))
    for position, (batch, length, d) in enumerate(cases):
        for dtype, face, offset in types:
            mine = [
                r
                for r in rows
                if (int(r["B"]), int(r["N"]), int(r["D"]), r["dtype"]) == (batch, length, d, dtype)
            ]
            if not mine:
                continue
            cells = batch * length * length
            speed = cells / (float(mine[0]["p50"]) / 1e3)
            least = least_seconds(GPUS[device], batch, length, length, d, dtype)
            limit = cells / max(least.values())
            y = len(cases) - 1 - position + offset
            axes.plot([speed, limit], [y, y], color=PALE, linewidth=5, solid_capstyle="butt", zorder=1)
            for name, dashes, _ in limits:
                if least[name] > 0:
                    at = cells / least[name]
                    width = 2.4 if least[name] == max(least.values()) else 1.2
                    axes.plot([at, at], [y - 0.16, y + 0.16], color=INK, linewidth=width, linestyle=dashes)
            axes.plot([speed], [y], marker="o", color=BLUE, markerfacecolor=face, markersize=7, zorder=3)
            axes.annotate(f"{speed / limit:.0%}", (speed, y), xytext=(-8, 0), textcoords="offset points",
                          ha="right", va="center", fontsize=9, color=_ink(BLUE))  # fmt: skip
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(10 ** (math.log10(low) - 0.4), high)
    axes.set_ylim(-0.6, len(cases) - 0.25)
    axes.set_yticks(range(len(cases)), [f"{b}, {length}, {d}" for b, length, d in reversed(cases)])
    axes.set_ylabel("B, L, D")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("cells a second, forward and backward, and share of the lowest limit")
    axes.xaxis.set_label_coords(0.36, -0.38 / (height - 1.85))
    figure.suptitle(f"Throughput against hardware limits, {device}", x=0.02, y=1 - 0.08 / height, ha="left",
                    va="top", fontsize=10, color=INK)  # fmt: skip
    samples = [
        Line2D([], [], color=BLUE, markerfacecolor=face, marker="o", linestyle="none") for _, face, _ in types
    ]
    samples += [Line2D([], [], color=INK, linewidth=2, linestyle=dashes) for _, dashes, _ in limits]
    names = [*(name for name, *_ in types), *(name for *_, name in limits)]
    figure.legend(samples, names, ncols=2, loc="lower left", bbox_to_anchor=(0.02, 0.0), frameon=False,
                  fontsize=9)  # fmt: skip
    return figure


def _throughput(
    rows: Sequence[Row], device: str, limit_of: Callable[[Row], float], ticks: Sequence[int]
) -> Figure:
    """Cells a second against the number of features, a line a length, below the limit of the hardware."""
    import matplotlib.pyplot as plt

    lengths = sorted({int(row["N"]) for row in rows})
    dims = sorted({*ticks, *(int(row["D"]) for row in rows)})
    shades = [BLUE, "#3F88B0", "#6E97AB", GREY]
    figure, panels = plt.subplots(2, 1, figsize=(WIDTH, 7.4), sharex=True)
    figure.subplots_adjust(left=0.17, right=0.8, top=0.9, bottom=0.14, hspace=0.28)
    figure.suptitle(f"Many pairs, float32, {device}", x=0.02, y=0.985, ha="left", fontsize=10, color=INK)
    for axes, mode in zip(panels, (FORWARD, FORWARD_BACKWARD), strict=True):
        longest: dict[int, float] = {}
        for shade, length in zip(itertools.cycle(shades), reversed(lengths)):
            mine = {int(r["D"]): r for r in rows if r["mode"] == mode and int(r["N"]) == length}
            points = [
                (float(d), int(r["B"]) * length * int(r["M"]) / float(r["p50"]) * 1e3)
                for d, r in sorted(mine.items())
            ]
            # Limits differ by length only where the chain of dependent steps sets them.
            limits = {d: limit_of(r) for d, r in mine.items()}
            longest = longest or limits
            for run in _runs(points, [float(d) for d in dims]):
                axes.plot(*zip(*run, strict=True), color=shade, marker="o", markersize=4.5, label="_run")
            if points:
                axes.plot(
                    [points[-1][0]], [points[-1][1]], color=shade, linestyle="none", label=f"L = {length}"
                )
            if length == lengths[-1]:
                for d, speed in points:
                    axes.annotate(f"{speed / limits[int(d)]:.0%}", (d, limits[int(d)]), xytext=(2, 5),
                                  textcoords="offset points", ha="left", fontsize=8,
                                  color=_ink(BLUE))  # fmt: skip
        if longest:
            xs = sorted(longest)
            axes.plot(xs, [longest[d] for d in xs], color=INK, linestyle="--", linewidth=1.2, label="_limit")
            axes.plot([xs[-1]], [longest[xs[-1]]], color=INK, linestyle="none", label="limit")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(dims, [str(d) for d in dims])
        axes.minorticks_off()
        _label(axes.yaxis, lambda speed, _: f"{speed / 1e9:g} G")
        axes.grid(axis="y", color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_ylabel("cells a second")
        axes.set_title(mode.replace("+", " and ").capitalize())
        _name_lines(axes)
    panels[-1].set_xlabel("features D")
    figure.text(0.02, 0.012, f"Dashed: the most that the hardware allows (benchmarks/bounds.py).\n"
                f"Percent: share of it that L = {lengths[-1]} reaches. No point: not measured.", fontsize=8.5,
                color=INK)  # fmt: skip
    return figure


def _label(axis: Axis, text: Callable[[float, object], str]) -> None:
    """Marks of a logarithmic axis: powers of ten, or as much more than that as it takes to have three."""
    low, high = axis.get_view_interval()
    marks: list[float] = []
    for digits in ((1,), (1, 2, 5), range(1, 10), [k / 10 for k in range(10, 100)]):
        if len(marks) < 3:
            marks = [m * 10.0**k for k in range(-9, 14) for m in digits if low <= m * 10.0**k <= high]
    axis.set_ticks(marks[:: max(1, len(marks) // 5)])
    axis.set_major_formatter(text)
    axis.set_ticks([], minor=True)


def _limit(row: Row, device: str) -> float:
    """The most cells a second that the hardware allows for a case."""
    batch, n, m, d = (int(row[size]) for size in ("B", "N", "M", "D"))
    backward = row["mode"] != FORWARD
    return batch * n * m / max(least_seconds(GPUS[device], batch, n, m, d, row["dtype"], backward).values())


def _second_order(rows: Sequence[Row], device: str) -> Figure:
    """Time of Hessian products and expected costs by size, and of first derivatives for comparison."""
    import matplotlib.pyplot as plt

    rows = [row for row in like_for_like(rows) if row["metric"] == "time"]
    providers = list(dict.fromkeys(row["provider"] for row in rows if row["status"] == "ok"))
    sizes = list(dict.fromkeys((int(r["B"]), int(r["N"])) for r in rows))
    titles = {
        HESSIAN_PRODUCT: "Hessian-vector product (value, gradient and product)",
        EXPECTED_COST: "Expected cost and its gradient",
        FORWARD_BACKWARD: "For comparison: value and gradient",
    }
    # Inches: of a size, and of everything in and between three panels that does not depend on the sizes.
    panel, gap = 0.2 + 0.28 * len(sizes), 0.45
    height = 1.75 + 3 * panel + 2 * gap
    figure, panels = plt.subplots(3, 1, figsize=(WIDTH, height), sharex=True)
    figure.subplots_adjust(
        left=0.3, right=0.96, top=1 - 0.65 / height, bottom=1.1 / height, hspace=gap / panel
    )
    figure.suptitle(f"Second order, {_sizes(rows, 'D')}, float32, {device}", x=0.02, y=1 - 0.08 / height,
                    ha="left", va="top", fontsize=10, color=INK)  # fmt: skip
    for axes, (mode, title) in zip(panels, titles.items(), strict=True):
        for provider in providers:
            colour, marker = style(provider)
            mine = [r for r in rows if (r["provider"], r["mode"], r["status"]) == (provider, mode, "ok")]
            heights = [-sizes.index((int(r["B"]), int(r["N"]))) for r in mine]
            axes.plot([float(r["p50"]) for r in mine], heights, color=colour, marker=marker, linestyle="none",
                      markersize=7)  # fmt: skip
        axes.set_xscale("log")
        axes.set_yticks([-k for k in range(len(sizes))], [f"B = {b}, L = {length}" for b, length in sizes])
        axes.set_ylim(-len(sizes) + 0.4, 0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="both", color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_title(title, fontsize=9)
    panels[-1].margins(x=0.1)
    _label(panels[-1].xaxis, lambda time, _: f"{time:g}")
    panels[-1].set_xlabel("time (ms)")
    figure.legend(list(map(_sample, providers)), list(map(short, providers)), ncols=3, loc="lower left",
                  bbox_to_anchor=(0.02, 0.0), frameon=False, fontsize=9)  # fmt: skip
    return figure


def draw_cpu_throughput(path: Path, folder: Path) -> list[Path]:
    """Cells a second with many pairs on a CPU, below its limit, from the file of cpu_targets.py."""
    import csv
    import re

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with path.open(newline="") as file:
        measured = list(csv.DictReader(file))
    peaks = {row["metric"]: float(row["value"]) * 1e9 for row in measured if row["benchmark"] == "machine"}
    rows = []
    for row in measured:
        size = re.fullmatch(r"throughput B=(?P<B>\d+) L=(?P<N>\d+) D=(?P<D>\d+)", row["benchmark"])
        # D = 3 is beside other libraries in a table; here its label would lie on that of D = 4.
        if size is not None and row["provider"] == "softdtw_cuda" and size["D"] != "3":
            rows.append({**size.groupdict(), "M": size["N"], "mode": row["metric"], "p50": row["value"]})
    if not rows or not peaks:
        return []
    cpu = Cpu(peaks["instructions"], peaks["multiply-adds"], peaks["memory"])

    def limit_of(row: Row) -> float:
        batch, n, d = int(row["B"]), int(row["N"]), int(row["D"])
        return batch * n * n / max(least_cpu_seconds(cpu, batch, n, n, d, row["mode"] != FORWARD).values())

    with plt.rc_context(SETTINGS):
        figure = _throughput(rows, measured[0]["device"], limit_of, ())
        written = list(_save(figure, folder, f"throughput-{measured[0]['device']}"))
        plt.close(figure)
    return written


def draw_second_order_errors(path: Path, folder: Path) -> list[Path]:
    """Errors of second order by gamma, a panel for each quantity, from a CSV file of error_budget.py."""
    import csv

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    titles = {"hvp": "Hessian-vector product", "expected": "Gradient of the expected cost"}
    series = {
        "this library": ("error", *STYLES[OURS_FUSED]),
        "philtorch": ("theirs", *STYLES["philtorch"]),
        "float32 costs and shares": ("rounding", GREY, "_"),
    }
    device = rows[0]["device"]
    with plt.rc_context(SETTINGS):
        figure, panels = plt.subplots(2, 1, figsize=(WIDTH, 6.6), sharex=True)
        figure.subplots_adjust(left=0.14, right=0.97, top=0.88, bottom=0.15, hspace=0.25)
        figure.suptitle(f"Relative error of second order in float32\nagainst float64, every case, {device}",
                        x=0.02, y=0.985, ha="left", va="top", fontsize=10)  # fmt: skip
        gammas = sorted({float(row["gamma"]) for row in rows})
        for axes, (what, title) in zip(panels, titles.items(), strict=True):
            for place, (name, (column, colour, marker)) in enumerate(series.items()):
                found = [
                    (float(r["gamma"]), float(r[column])) for r in rows if r["what"] == what and r[column]
                ]
                found = [(gamma, error) for gamma, error in found if math.isfinite(error)]
                if found:
                    shift = 1.25 ** (place - 1)  # beside each other
                    xs, ys = zip(*found, strict=True)
                    axes.plot([x * shift for x in xs], [max(y, LEAST_ERROR) for y in ys], color=colour,
                              marker=marker, markersize=5, ls="none", alpha=0.6, label=name)  # fmt: skip
                    low = [x * shift for x, y in found if y < LEAST_ERROR]
                    axes.plot(low, [LEAST_ERROR] * len(low), color=colour, marker="v", markersize=7,
                              markerfacecolor="white", linestyle="none", clip_on=False)  # fmt: skip
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xticks(gammas, [f"{gamma:g}" for gamma in gammas])
            axes.minorticks_off()
            axes.grid(axis="y", color=PALE, linewidth=0.6)
            axes.set_title(title)
            axes.set_ylabel("relative error")
        panels[-1].set_xlabel("$\\gamma$")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend([*handles, _below_sample()], [*labels, f"less than {LEAST_ERROR:g}"], ncols=2,
                      loc="lower left", bbox_to_anchor=(0.02, 0.0), frameon=False, fontsize=9)  # fmt: skip
        written = list(_save(figure, folder, f"second_order_errors-{device}"))
        plt.close(figure)
    return written


def draw_clustering(path: Path, folder: Path) -> list[Path]:
    """All pairs and k-means beside other libraries, from a CSV file of clustering.py."""
    import csv

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "ok"]
    jobs = {job: [row for row in rows if row["job"] == job] for job in dict.fromkeys(r["job"] for r in rows)}
    device = rows[0]["device"]
    with plt.rc_context(SETTINGS):
        height = 1.2 + 0.32 * len(rows) + 0.4 * len(jobs)
        figure = plt.figure(figsize=(WIDTH, height))
        grid = figure.add_gridspec(
            len(jobs), 1, height_ratios=[len(mine) + 0.6 for mine in jobs.values()], left=0.3, right=0.94,
            top=1 - 0.55 / height, bottom=0.75 / height, hspace=0.4,
        )  # fmt: skip
        figure.suptitle(f"All pairs and k-means, {device}", x=0.02, y=1 - 0.08 / height, ha="left", va="top",
                        fontsize=10, color=INK)  # fmt: skip
        first: Axes | None = None
        for place, (job, mine) in enumerate(jobs.items()):
            axes = figure.add_subplot(grid[place], sharex=first)
            first = first or axes
            for y, row in enumerate(reversed(mine)):
                colour, marker = style(clustering_provider(row["method"]))
                for column, face in (("cpu_seconds", "white"), ("seconds", colour)):
                    axes.plot([float(row[column])], [y], color=colour, marker=marker, markersize=8,
                              markerfacecolor=face, linestyle="none", clip_on=False)  # fmt: skip
            names = [row["method"].replace("softdtw_cuda", "this library") for row in reversed(mine)]
            axes.set_yticks(range(len(mine)), names)
            axes.set_ylim(-0.6, len(mine) - 0.4)
            axes.set_xscale("log")
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="both", color=PALE, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.set_title(job, fontsize=9)
            axes.tick_params(labelbottom=place == len(jobs) - 1)
        _label(axes.xaxis, lambda time, _: f"{time:g}")
        axes.set_xlabel("time (s)")
        figure.text(0.02, 0.1 / height, "Filled: time of the call. Open: CPU time of all its threads.",
                    fontsize=8.5, color=INK)  # fmt: skip
        written = list(_save(figure, folder, f"clustering-{device}"))
        plt.close(figure)
    return written


def clustering_provider(method: str) -> str:
    """The provider of a method of clustering.py, for its colour and marker."""
    name = method.partition(",")[0]
    return OURS_FUSED if name == "softdtw_cuda" else name
