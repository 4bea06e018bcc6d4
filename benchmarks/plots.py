"""Plots from the CSV alone: time and memory against L and D, accuracy, throughput against hardware limits.

PNG and SVG, made to be read at 800 pixels. Colours are Okabe and Ito's, told apart by colour-blind readers;
lines carry their names at their ends and differ in their markers too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bounds import GPUS, least_seconds
from .cases import FORWARD_BACKWARD
from .providers import OURS_COST, OURS_FUSED, ROUNDING
from .records import Row, slug
from .tables import like_for_like

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

VERMILLION, ORANGE, BLUE, SKY, GREEN, PURPLE = (
    "#D55E00",
    "#E69F00",
    "#0072B2",
    "#56B4E9",
    "#009E73",
    "#CC79A7",
)
GREY, DARK, PALE = "#8A8A8A", "#333333", "#DDDDDD"
FIXED_STYLES = {OURS_FUSED: (VERMILLION, "o"), OURS_COST: (ORANGE, "s"), ROUNDING: (GREY, "")}
OTHER_STYLES = [(BLUE, "^"), (SKY, "v"), (GREEN, "D"), (PURPLE, "P"), ("#000000", "X"), (GREY, "h")]
FAILED = ("oom", "error", "crash", "timeout", "skipped", "unsupported", "not finite")
REASONS = {"oom": "out of memory", "error": "fails", "crash": "crashes", "timeout": "too slow",
           "unsupported": "unsupported", "not finite": "NaN or inf"}  # fmt: skip


def style(providers: Sequence[str], provider: str) -> tuple[str, str]:
    """Colour and marker; the same in every plot with the same providers."""
    if provider in FIXED_STYLES:
        return FIXED_STYLES[provider]
    others = [name for name in providers if name not in FIXED_STYLES]
    return OTHER_STYLES[others.index(provider) % len(OTHER_STYLES)]


def draw_all(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Every plot that the rows can fill, for each device; the files written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "svg.hashsalt": "softdtw",
        "svg.fonttype": "none",
    }
    written: list[Path] = []
    with plt.rc_context(settings):
        for device in dict.fromkeys(row["device"] for row in rows):
            here = [row for row in rows if row["device"] == device]
            for name, figure in _figures(here, device):
                written += _save(figure, folder, f"{name}-{slug(device)}")
                plt.close(figure)
    return written


def _save(figure: Figure, folder: Path, name: str) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, extra in ((".png", {"dpi": 200}), (".svg", {"metadata": {"Date": None}})):
        path = folder / f"{name}{suffix}"
        figure.savefig(path, **extra)
        yield path


def _figures(rows: Sequence[Row], device: str) -> Iterator[tuple[str, Figure]]:
    lengths = [r for r in rows if r["suite"] == "lengths"]
    if lengths:
        title = f"Forward + backward, {_sizes(lengths, 'B', 'D')}, float32, {device}"
        yield "lengths", _time_and_memory(lengths, "N", "length L", title)
    dimensions = [r for r in rows if r["suite"] == "dimensions"]
    if dimensions:
        title = f"Forward + backward, {_sizes(dimensions, 'B', 'N')}, float32, {device}"
        yield "dimensions", _time_and_memory(dimensions, "D", "features D", title)
    plain = [r for r in rows if r["suite"] == "extensions" and _is_plain(r)]
    long = [r for r in plain if r["B"] == "1"]
    if long:
        title = f"One long pair, forward + backward, {_sizes(long, 'D')}, float32, {device}"
        yield "long", _time_and_memory(long, "N", "length L", title)
    many = [r for r in plain if r["N"] == "64" and r["D"] == "8"]
    if many:
        title = f"Many short pairs, forward + backward, {_sizes(many, 'N', 'D')}, float32, {device}"
        yield "batch", _time_and_memory(many, "B", "batch size B", title)
    accuracy = [r for r in rows if r["metric"] == "gradient error"]
    if accuracy:
        yield "accuracy", _accuracy(accuracy, device)
    speeds = [
        r
        for r in rows
        if r["suite"] == "targets"
        and r["provider"] == OURS_FUSED
        and r["metric"] == "time"
        and r["status"] == "ok"
    ]
    if speeds and device in GPUS:
        yield "roofline", _roofline(speeds, device)


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
    figure = plt.figure(figsize=(8, 3.9 + 0.16 * len(failing)))
    figure.suptitle(title, x=0.01, y=0.985, ha="left", fontsize=10, color=DARK)
    grid = figure.add_gridspec(1, 2, left=0.06, right=0.83, wspace=0.8, top=0.87, bottom=0.13)
    for column, metric, label in ((0, "time", "time (ms)"), (1, "memory", "extra memory (MiB)")):
        chosen = [row for row in rows if row["metric"] == metric]
        axes, strip = _panel(figure, grid[0, column], len(failing))
        # A CPU's memory comes in pages, and a small call may find all of its memory free already.
        least = 0.1 if metric == "memory" and rows[0]["device"] not in GPUS else 0.0
        _lines(axes, chosen, providers, lambda row: float(row[x]), least)
        axes.set_xlabel(x_label)
        (strip or axes).set_title(label)
        if strip is not None:
            # Both panels fail alike: the left one says who, the right one why.
            text = "{provider}" if column == 0 else "{reasons}"
            _mark_failures(strip, chosen, providers, failing, lambda row: float(row[x]), text)
        _name_lines(axes)
    return figure


def _failing(rows: Sequence[Row], providers: Sequence[str]) -> list[str]:
    failed = {row["provider"] for row in rows if row["status"] in FAILED}
    return [provider for provider in providers if provider in failed]


def _panel(
    figure: Figure, place: SubplotSpec, failing: int, sharey: Axes | None = None
) -> tuple[Axes, Axes | None]:
    """Axes for the lines and, above them, a strip for the crosses of providers that failed."""
    if not failing:
        return figure.add_subplot(place, sharey=sharey), None
    parts = place.subgridspec(2, 1, height_ratios=(failing, 16), hspace=0.03)
    axes = figure.add_subplot(parts[1], sharey=sharey)
    return axes, figure.add_subplot(parts[0], sharex=axes)


def _lines(
    axes: Axes, rows: Sequence[Row], providers: Sequence[str], x_of: Callable[[Row], float], least: float
) -> None:
    """A line a provider, with the p20 to p80 range as a shade."""
    ticks = sorted({x_of(row) for row in rows})
    for provider in providers:
        colour, marker = style(providers, provider)
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
        if points:
            axes.plot([points[-1][0]], [points[-1][2]], color=colour, linestyle="none", label=provider)
    axes.set_xscale("log", base=2 if len(ticks) > 1 and ticks[1] <= 4 * ticks[0] else 10)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [_tick(tick) for tick in ticks], rotation=45 if len(ticks) > 6 else 0)
    axes.minorticks_off()
    axes.grid(axis="y", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)


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
    strip: Axes,
    rows: Sequence[Row],
    providers: Sequence[str],
    failing: Sequence[str],
    x_of: Callable[[Row], float],
    text: str,
) -> None:
    """A row of crosses for each provider that failed, and `text` with its {provider} and {reasons}."""
    for height, provider in enumerate(reversed(failing)):
        colour, _ = style(providers, provider)
        bad = [row for row in rows if row["provider"] == provider and row["status"] in FAILED]
        if not bad:
            continue
        xs = [x_of(row) for row in bad]
        strip.plot(xs, [height] * len(xs), color=colour, marker="x", markersize=5, markeredgewidth=1.8,
                   linestyle="none", clip_on=False)  # fmt: skip
        reasons = ", ".join(dict.fromkeys(_reason(row) for row in bad))
        strip.annotate(
            text.format(provider=provider, reasons=reasons), (1.03, height),
            xycoords=("axes fraction", "data"), ha="left", va="center", fontsize=6.5, color=_ink(colour),
            annotation_clip=False,
        )  # fmt: skip
    strip.set_ylim(-0.7, len(failing) - 0.3)
    strip.axis("off")


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
    spacing = 9.5 * figure.dpi / 72
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
            str(line.get_label()),
            (x, y),
            xytext=(1.03, place[1]),
            textcoords="axes fraction",
            ha="left",
            va="center",
            fontsize=7.5,
            color=_ink(colour),
            fontweight="bold" if line.get_label() == OURS_FUSED else "normal",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0},
        )


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


def _accuracy(rows: Sequence[Row], device: str) -> Figure:
    import matplotlib.pyplot as plt

    providers = list(dict.fromkeys(row["provider"] for row in rows))
    failing = _failing(rows, providers)
    lengths = sorted({int(row["N"]) for row in rows})[-3:]
    dims = sorted({int(row["D"]) for row in rows})
    dims = [dims[0], dims[-1]] if len(dims) > 1 else dims
    height = 0.9 + (2.5 + 0.14 * len(failing)) * len(dims)
    figure = plt.figure(figsize=(8, height))
    title = f"Relative error of the float32 gradient against float64, {device}"
    figure.suptitle(title, x=0.01, y=1 - 0.06 / height, ha="left", va="top", fontsize=10, color=DARK)
    grid = figure.add_gridspec(
        len(dims), len(lengths), left=0.07, right=0.775, top=1 - 0.6 / height, bottom=0.5 / height,
        wspace=0.12, hspace=0.28,
    )  # fmt: skip

    def gamma_of(row: Row) -> float:
        return float(row["gamma"])

    first: Axes | None = None
    last_column = []
    for (i, d), (j, length) in itertools.product(enumerate(dims), enumerate(lengths)):
        axes, strip = _panel(figure, grid[i, j], len(failing), sharey=first)
        first = first or axes
        chosen = [row for row in rows if int(row["N"]) == length and int(row["D"]) == d]
        _lines(axes, chosen, providers, gamma_of, 1e-30)
        axes.set_xscale("log")
        ticks = sorted({float(row["gamma"]) for row in chosen})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        (strip or axes).set_title(f"L = {length}, D = {d}", fontsize=9)
        if i == len(dims) - 1:
            axes.set_xlabel("$\\gamma$")
        if j:
            axes.tick_params(labelleft=False)
        is_last = j == len(lengths) - 1
        if strip is not None:
            _mark_failures(
                strip, chosen, providers, failing, gamma_of, "{provider}: {reasons}" if is_last else ""
            )
        if is_last:
            last_column.append(axes)
    assert first is not None
    high = max((2 * float(row["p80"]) for row in rows if row["status"] == "ok"), default=1.0)
    # Below float32's own rounding there is nothing to see, and only the limit goes there.
    first.set_ylim(1e-8, max(high, 1.5))
    for axes in last_column:
        _name_lines(axes)
    return figure


def _roofline(rows: Sequence[Row], device: str) -> Figure:
    """Cells a second of each case beside the limit that each resource sets."""
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys((int(r["B"]), int(r["N"]), int(r["D"])) for r in rows))
    figure, axes = plt.subplots(figsize=(8, 1.3 + 0.62 * len(cases)))
    limits = (
        ("products", SKY, "tensor cores"),
        ("cells", GREEN, "instructions"),
        ("chain", PURPLE, "dependent steps"),
    )
    for position, (batch, length, d) in enumerate(cases):
        height = len(cases) - 1 - position
        for dtype, colour, offset, text in (
            ("float32", VERMILLION, 0.16, "float32"),
            ("bfloat16", BLUE, -0.2, "bfloat16"),
        ):
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
            y = height + offset
            axes.plot([speed, limit], [y, y], color=PALE, linewidth=5, solid_capstyle="butt", zorder=1)
            for name, limit_colour, _ in limits:
                if least[name] > 0:
                    at = cells / least[name]
                    is_lowest = least[name] == max(least.values())
                    axes.plot(
                        [at, at], [y - 0.15, y + 0.15], color=limit_colour, linewidth=3 if is_lowest else 1.2
                    )
            axes.plot([speed], [y], marker="o", color=colour, markersize=7, zorder=3)
            axes.annotate(
                f"{text}: {speed / limit:.0%} of the limit", (speed, y), xytext=(-8, 0),
                textcoords="offset points", ha="right", va="center", fontsize=7, color=colour,
            )  # fmt: skip
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(10 ** (math.log10(low) - 0.9), high)
    axes.set_ylim(-0.6, len(cases) - 0.25)
    axes.set_yticks(
        range(len(cases)), [f"B = {b}, L = {length}, D = {d}" for b, length, d in reversed(cases)]
    )
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("cells a second, forward + backward")
    axes.set_title(f"Throughput against hardware limits, {device}", color=DARK, pad=20)
    for position, (_, limit_colour, label) in enumerate(limits):
        axes.annotate(
            f"❙ {label}", (0.36 + 0.21 * position, 1.0), xycoords="axes fraction", xytext=(0, 6),
            textcoords="offset points", fontsize=8, color=_ink(limit_colour),
        )  # fmt: skip
    axes.annotate(
        "the most that each resource allows:", (0.0, 1.0), xycoords="axes fraction", xytext=(0, 6),
        textcoords="offset points", fontsize=8, color=DARK,
    )  # fmt: skip
    figure.tight_layout()
    return figure
