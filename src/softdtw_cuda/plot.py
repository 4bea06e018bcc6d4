"""Pictures of alignments and barycenters. Needs matplotlib: ``pip install 'softdtw-cuda-torch[plot]'``.

Not imported with the package: ``from softdtw_cuda.plot import plot_alignment, plot_barycenter``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["AlignmentAxes", "plot_alignment", "plot_barycenter"]

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_BLUE, _ORANGE, _GREEN, _PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
_GREY, _INK = "#9AA0A6", "#222222"


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
        >>> panels = plot_alignment(softdtw_alignment(x, y, gamma=0.1), x, y, title="gamma = 0.1")
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
        image.plot(alignment.argmax(1), np.arange(len(alignment)), color=_ORANGE, lw=1.2)
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
            spine.set_color(_GREY)
    for spine in image.spines.values():
        spine.set_color(_GREY)
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
        >>> panel = plot_barycenter(X, softdtw_barycenter(X, max_iter=5), others={"mean": X.mean(0)})
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
        ax.plot(steps(one), one[:, feature], color=_GREY, lw=0.8, alpha=alpha, label=name)
    colors = [_BLUE, *_line_colors(len(averages), first=_ORANGE)]
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


def _line_colors(count: int, first: str = _INK) -> list[str]:
    wheel = [first, *(color for color in (_BLUE, _ORANGE, _GREEN, _PURPLE) if color != first)]
    return [wheel[k % len(wheel)] for k in range(count)]
