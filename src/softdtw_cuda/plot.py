"""Pictures of alignments, barycenters, clusters and all pairs.

They need matplotlib: ``pip install 'softdtw-cuda-torch[plot]'``.

Not imported with the package: ``from softdtw_cuda.plot import plot_alignment, plot_barycenter``.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["AlignmentAxes", "plot_alignment", "plot_barycenter", "plot_clusters", "plot_pairs"]

# The colours of every picture of the project: Okabe and Ito's, which colour-blind readers can tell apart.
# Soft-DTW, and this library beside others, is blue; what it is compared with first is vermillion.
BLUE, VERMILLION, GREEN = "#0072B2", "#D55E00", "#009E73"
PURPLE, ORANGE, SKY = "#CC79A7", "#E69F00", "#56B4E9"
INK, MUTED, GREY, PALE, SHADE = "#222222", "#666666", "#9AA0A6", "#DDDDDD", "#F2F3F5"
"""Lines and letters, lesser letters, lines in the background, grids, areas."""


class AlignmentAxes(NamedTuple):
    """The three panels of an alignment: `image` in the middle, `x` on its left and `y` above it."""

    image: Axes
    x: Axes
    y: Axes


def plot_alignment(
    E: Tensor | np.ndarray[Any, Any],
    x: Tensor | np.ndarray[Any, Any],
    y: Tensor | np.ndarray[Any, Any],
    *,
    figure: Figure | SubFigure | None = None,
    title: str | None = None,
    cmap: str = "Blues",
    exponent: float = 0.5,
    path: bool = False,
    colorbar: bool = False,
) -> AlignmentAxes:
    """Draw a soft alignment as an image between its two series: x downwards on the left, y above.

    Args:
        E: (N, M) alignment, as :func:`softdtw_cuda.softdtw_alignment` returns it.
        x: (N,) or (N, D) series; every feature is a line.
        y: (M,) or (M, D) series.
        figure: a figure or subfigure to draw into, so that several fit one picture. None makes one.
        title: text above the series.
        cmap: matplotlib's name of a colour map.
        exponent: the colour is E ** exponent; below 1 it shows cells that few paths visit. 1 is linear.
        path: also mark the likeliest column of each row.
        colorbar: explain the colours.

    Returns:
        The panels; ``.image.figure.savefig(...)`` saves the picture.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: shapes that do not fit together.

    Examples:
        >>> x, y = torch.randn(50, 1).cumsum(0), torch.randn(60, 1).cumsum(0)
        >>> E = softdtw_alignment(x, y, gamma=0.1)
        >>> panels = plot_alignment(E, x, y, title="gamma = 0.1")
    """
    pyplot = _pyplot()
    alignment = _array(E)
    if alignment.ndim != 2:
        raise ValueError(
            f"E has shape {alignment.shape}, expected (N, M): the alignment of one pair; pick it with E[k]."
        )
    rows = _series(x, "x", alignment.shape[0], "rows")
    columns = _series(y, "y", alignment.shape[1], "columns")
    if not exponent > 0:
        raise ValueError(f"exponent must be greater than 0, got {exponent}.")
    if figure is None:
        figure = pyplot.figure(figsize=(5.2, 5.2), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 4.2), height_ratios=(1, 4.2))
    image = figure.add_subplot(grid[1, 1])
    left = figure.add_subplot(grid[1, 0], sharey=image)
    top = figure.add_subplot(grid[0, 1], sharex=image)

    drawn = image.imshow(np.clip(alignment, 0, 1) ** exponent, cmap=cmap, vmin=0, vmax=1, aspect="auto")
    if path:
        image.plot(alignment.argmax(1), np.arange(len(alignment)), color=VERMILLION, lw=1.2)
    image.tick_params(labelleft=False, left=False)
    image.set_xlabel("step of y")
    colors = _line_colors(max(rows.shape[1], columns.shape[1]))
    for k in range(rows.shape[1]):
        left.plot(rows[:, k], np.arange(len(rows)), color=colors[k], lw=1.4)
    for k in range(columns.shape[1]):
        top.plot(columns[:, k], color=colors[k], lw=1.4)
    # Larger values point away from the image, on both sides.
    left.invert_xaxis()
    left.set_ylabel("step of x")
    left.set_xticks([])
    top.set_yticks([])
    top.tick_params(labelbottom=False, bottom=False)
    for panel, kept in ((left, "left"), (top, None)):
        for side, spine in panel.spines.items():
            spine.set_visible(side == kept)
            spine.set_color(GREY)
    for spine in image.spines.values():
        spine.set_color(GREY)
    if title is not None:
        top.set_title(title, loc="left", fontweight="bold", fontsize=11)
    if colorbar:
        shown = (0.0, 0.01, 0.1, 0.5, 1.0)
        bar = figure.colorbar(drawn, ax=[image, top], ticks=[value**exponent for value in shown], shrink=0.8)
        bar.ax.set_yticklabels([f"{value:g}" for value in shown])
        bar.set_label("probability that a path passes")
    return AlignmentAxes(image, left, top)


def plot_barycenter(
    X: Tensor | np.ndarray[Any, Any] | Sequence[Tensor | np.ndarray[Any, Any]],
    barycenter: Tensor | np.ndarray[Any, Any],
    *,
    others: Mapping[str, Tensor | np.ndarray[Any, Any]] | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    feature: int = 0,
    stretch: bool = True,
    label: str = "Soft-DTW barycenter",
    ax: Axes | None = None,
    title: str | None = None,
) -> Axes:
    """Draw series in grey and their barycenter over them.

    Args:
        X: (K, N, D) series, or K series (N_k, D) of different lengths; the feature axis may be left out.
        barycenter: (L, D) or (L,).
        others: more averages to compare with, by name, each (L', D) or (L',).
        lengths: (K,) true lengths where X is padded.
        feature: which of the D features to draw.
        stretch: put all series on one axis from 0 to 1; False draws them against their own steps.
        label: the barycenter's name in the legend.
        ax: where to draw. None makes a figure.
        title: text above the panel.

    Returns:
        The panel; ``.figure.savefig(...)`` saves the picture.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: shapes that do not fit together.

    Examples:
        >>> X = torch.randn(8, 50, 1).cumsum(1)
        >>> average = softdtw_barycenter(X, max_iter=5)
        >>> panel = plot_barycenter(X, average, others={"mean": X.mean(0)})
    """
    pyplot = _pyplot()
    series = [_series(one, f"X[{k}]") for k, one in enumerate(X)]
    if not series:
        raise ValueError("X is empty, expected at least one series.")
    if lengths is not None:
        true_lengths = [int(length) for length in lengths]
        if len(true_lengths) != len(series):
            raise ValueError(f"lengths has {len(true_lengths)} numbers, expected {len(series)}.")
        series = [one[:length] for one, length in zip(series, true_lengths, strict=True)]
    averages = {label: _series(barycenter, "barycenter")}
    averages |= {name: _series(one, f"others[{name!r}]") for name, one in (others or {}).items()}
    features = min(one.shape[1] for one in (*series, *averages.values()))
    if not 0 <= feature < features:
        raise ValueError(f"feature is {feature}, expected 0 to {features - 1}.")

    if ax is None:
        _, ax = pyplot.subplots(figsize=(7, 3.6), layout="constrained")

    def steps(one: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.linspace(0, 1, len(one)) if stretch else np.arange(len(one))

    alpha = max(0.35, 0.9 - 0.05 * len(series))
    for k, one in enumerate(series):
        name = f"{len(series)} series" if k == 0 else None
        ax.plot(steps(one), one[:, feature], color=GREY, lw=0.8, alpha=alpha, label=name)
    colors = [BLUE, *_line_colors(len(averages), first=VERMILLION)]
    # The barycenter last: over the others.
    for (name, one), color in reversed(list(zip(averages.items(), colors, strict=False))):
        ax.plot(steps(one), one[:, feature], color=color, lw=2.4 if name == label else 1.8, label=name)
    ax.set_xlabel("share of the series" if stretch else "step")
    ax.margins(x=0.01)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.legend(frameon=False, fontsize=9)
    if title is not None:
        ax.set_title(title, loc="left", fontweight="bold", fontsize=11)
    return ax


def plot_clusters(
    X: Tensor | np.ndarray[Any, Any] | Sequence[Tensor | np.ndarray[Any, Any]],
    labels: Tensor | np.ndarray[Any, Any] | Sequence[int],
    centers: Tensor | np.ndarray[Any, Any] | Sequence[Tensor | np.ndarray[Any, Any]],
    *,
    lengths: Tensor | Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    feature: int = 0,
    stretch: bool = True,
    columns: int = 3,
    figure: Figure | SubFigure | None = None,
) -> list[Axes]:
    """Draw every cluster in a panel of its own: members in grey, the center over them.

    Args:
        X: (K, N, D) series, or K series (N_k, D) of different lengths; the feature axis may be left out.
        labels: (K,) integers: the cluster of each series, an index into centers.
        centers: (C, L, D), or C centers (L_c, D).
        lengths: (K,) true lengths where X is padded.
        names: (C,) titles. None numbers the clusters. The number of members is added to each.
        feature: which of the D features to draw.
        stretch: as in :func:`plot_barycenter`.
        columns: most panels in a row.
        figure: a figure or subfigure to draw into. None makes one.

    Returns:
        The panels, one per cluster, with common axes; ``[0].figure.savefig(...)`` saves the picture.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: shapes that do not fit together, a label without a center.

    Examples:
        >>> X, labels = torch.randn(8, 50, 1).cumsum(1), [0, 0, 0, 1, 1, 1, 1, 1]
        >>> panels = plot_clusters(X, labels, [X[:3].mean(0), X[3:].mean(0)])
    """
    pyplot = _pyplot()
    members = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    count = len(centers)
    if members.shape != (len(X),):
        raise ValueError(f"labels has shape {members.shape}, expected ({len(X)},): one for each series of X.")
    if lengths is not None and len(lengths) != len(X):
        raise ValueError(f"lengths has {len(lengths)} numbers, expected {len(X)}.")
    if members.size and not 0 <= members.min() <= members.max() < count:
        raise ValueError(
            f"labels are {members.min()} to {members.max()}, expected 0 to {count - 1}: indices into centers."
        )
    titles = [f"cluster {k}" for k in range(count)] if names is None else list(names)
    if len(titles) != count:
        raise ValueError(f"names has {len(titles)} entries, expected {count}: one for each center.")
    if columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}.")
    columns = min(columns, count)
    rows = -(-count // columns)
    if figure is None:
        figure = pyplot.figure(figsize=(3.7 * columns, 2.5 * rows), layout="constrained")
    panels: list[Axes] = []
    for k in range(count):
        first = panels[0] if panels else None
        panel = figure.add_subplot(rows, columns, k + 1, sharex=first, sharey=first)
        panels.append(panel)
        index = np.flatnonzero(members == k).tolist()
        title = f"{titles[k]} ({len(index)} series)"
        if len(index):
            cut = None if lengths is None else [int(lengths[i]) for i in index]
            plot_barycenter(
                [X[i] for i in index], centers[k], lengths=cut, feature=feature, stretch=stretch, ax=panel,
                title=title, label="center",
            )  # fmt: skip
            legend = panel.get_legend()
            if legend is not None:
                legend.remove()
        else:
            panel.set_title(f"{titles[k]} (empty)", loc="left", fontweight="bold", fontsize=11)
        panel.tick_params(labelleft=k % columns == 0)
        if k + columns < count:  # another panel below says it
            panel.set_xlabel("")
            panel.tick_params(labelbottom=False)
    return panels


def plot_pairs(
    distances: Tensor | np.ndarray[Any, Any],
    *,
    labels: Tensor | np.ndarray[Any, Any] | Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    ax: Axes | None = None,
    title: str | None = None,
    cmap: str = "viridis_r",
    colorbar: bool = True,
) -> Axes:
    """Draw an all-pairs matrix as an image, the series of one class or cluster next to each other.

    Args:
        distances: (K, K), as :func:`softdtw_cuda.softdtw_cdist` returns it for one set.
        labels: (K,) integers. Rows and columns are sorted by them, in their order within a class, and lines
            part the classes. None keeps the order.
        names: one for each label that occurs, in ascending order of the labels. None shows the labels.
        ax: where to draw. None makes a figure.
        title: text above the panel.
        cmap: matplotlib's name of a colour map; near pairs are dark in the default.
        colorbar: explain the colours.

    Returns:
        The panel; ``.figure.savefig(...)`` saves the picture.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: shapes that do not fit together.

    Examples:
        >>> X = torch.randn(8, 50, 1).cumsum(1)
        >>> distances = softdtw_cdist(X, gamma=0.1, normalize=True)
        >>> panel = plot_pairs(distances, labels=[0, 1] * 4)
    """
    pyplot = _pyplot()
    matrix = _array(distances)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"distances has shape {matrix.shape}, expected (K, K): all pairs of one set.")
    size = len(matrix)
    edges: list[int] = []
    ticks: list[str] = []
    if labels is not None:
        classes = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
        if classes.shape != (size,):
            raise ValueError(f"labels has shape {classes.shape}, expected ({size},): one for each series.")
        order = np.argsort(classes, kind="stable")
        matrix = matrix[order][:, order]
        found, counts = np.unique(classes, return_counts=True)
        edges = [0, *np.cumsum(counts).tolist()]
        ticks = [str(each) for each in found] if names is None else list(names)
        if len(ticks) != len(found):
            raise ValueError(f"names has {len(ticks)} entries, expected {len(found)}: one for each label.")
    if ax is None:
        _, ax = pyplot.subplots(figsize=(5.4, 4.6), layout="constrained")
    image = ax.imshow(matrix, cmap=cmap, interpolation="nearest")
    if edges:
        for edge in edges[1:-1]:
            ax.axhline(edge - 0.5, color="white", lw=1.2)
            ax.axvline(edge - 0.5, color="white", lw=1.2)
        middles = [(first + last - 1) / 2 for first, last in itertools.pairwise(edges)]
        ax.set_xticks(middles, ticks)
        ax.set_yticks(middles, ticks)
        ax.tick_params(length=0)
    else:
        ax.set_xlabel("series")
        ax.set_ylabel("series")
    for spine in ax.spines.values():
        spine.set_visible(False)
    if colorbar:
        figure = ax.figure
        figure.colorbar(image, ax=ax, shrink=0.85).outline.set_visible(False)
    if title is not None:
        ax.set_title(title, loc="left", fontweight="bold", fontsize=11)
    return ax


def _pyplot() -> Any:
    try:
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError(
            "softdtw_cuda.plot needs matplotlib, which is not installed; "
            "`pip install matplotlib` or `pip install 'softdtw-cuda-torch[plot]'` brings it."
        ) from error


def _array(values: Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if isinstance(values, Tensor):
        # NumPy has no bfloat16.
        values = values.detach().to("cpu", torch.float64).numpy()
    return np.asarray(values, dtype=np.float64)


def _series(
    values: Tensor | np.ndarray[Any, Any], name: str, length: int | None = None, side: str = ""
) -> np.ndarray[Any, Any]:
    """values as (time, features)."""
    array = _array(values)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise ValueError(f"{name} has shape {array.shape}, expected (time,) or (time, features): one series.")
    if length is not None and len(array) != length:
        raise ValueError(
            f"{name} has {len(array)} steps but E has {length} {side}, expected as many; cut the padding off "
            "both, or exchange x and y."
        )
    return array


def _line_colors(count: int, first: str = INK) -> list[str]:
    wheel = [first, *(color for color in (BLUE, VERMILLION, GREEN, PURPLE) if color != first)]
    return [wheel[k % len(wheel)] for k in range(count)]
