"""The pictures show the data they were given, at the place where a reader looks for it."""

from __future__ import annotations

import doctest
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import softdtw_cuda
from softdtw_cuda import softdtw_alignment, softdtw_barycenter

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (after the skip)

from softdtw_cuda import plot  # noqa: E402  (after the skip)


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    pyplot.close("all")


def test_alignment_panels() -> None:
    x, y = torch.randn(20, 1).cumsum(0), torch.randn(30, 2).cumsum(0)
    E = softdtw_alignment(x, y[:, :1], gamma=0.1)
    panels = plot.plot_alignment(E, x, y, exponent=1.0, path=True, colorbar=True, title="a title")
    drawn = panels.image.images[0].get_array()
    np.testing.assert_allclose(drawn, E.double().clamp(0, 1).numpy(), rtol=1e-6)
    # Step i of x is beside row i of the image, and step j of y above column j.
    (line,) = panels.x.lines
    np.testing.assert_allclose(line.get_xdata(), x[:, 0])
    np.testing.assert_array_equal(line.get_ydata(), np.arange(20))
    assert panels.x.get_ylim() == panels.image.get_ylim() == (19.5, -0.5)
    assert panels.y.get_xlim() == panels.image.get_xlim() == (-0.5, 29.5)
    assert len(panels.y.lines) == 2
    np.testing.assert_allclose(panels.y.lines[1].get_ydata(), y[:, 1])
    (path,) = panels.image.lines
    np.testing.assert_array_equal(path.get_xdata(), E.argmax(1))
    assert panels.y.get_title(loc="left") == "a title"


def test_alignment_takes_arrays_bfloat16_and_grad(tmp_path: Path) -> None:
    x, y = torch.randn(12, requires_grad=True), torch.randn(9).bfloat16()
    E = np.full((12, 9), 0.25)
    panels = plot.plot_alignment(E, x, y)
    np.testing.assert_allclose(panels.image.images[0].get_array(), 0.5)  # the default shows sqrt(E)
    panels.image.figure.savefig(tmp_path / "alignment.png")
    assert (tmp_path / "alignment.png").read_bytes().startswith(b"\x89PNG")


def test_alignments_share_a_figure() -> None:
    figure = pyplot.figure()
    x, y = torch.randn(5), torch.randn(6)
    for part in figure.subfigures(1, 2):
        panels = plot.plot_alignment(torch.rand(5, 6), x, y, figure=part)
        assert panels.image.get_figure(root=False) is part
    assert len(pyplot.get_fignums()) == 1


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.rand(2, 5, 6), torch.rand(5), torch.rand(6)), {}, r"E has shape \(2, 5, 6\)"),
        ((torch.rand(5, 6), torch.rand(6), torch.rand(5)), {}, "x has 6 steps but E has 5 rows"),
        ((torch.rand(5, 6), torch.rand(5), torch.rand(5)), {}, "y has 5 steps but E has 6 columns"),
        ((torch.rand(5, 6), torch.rand(1, 5, 1), torch.rand(6)), {}, r"x has shape \(1, 5, 1\)"),
        ((torch.rand(5, 6), torch.rand(5), torch.rand(6)), {"exponent": 0.0}, "exponent must be greater"),
    ],
)
def test_alignment_errors(
    arguments: tuple[torch.Tensor, ...], options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plot.plot_alignment(*arguments, **options)  # type: ignore[arg-type]  # wrong on purpose


def test_barycenter_lines() -> None:
    X = [torch.randn(length, 2) for length in (10, 14, 17)]
    barycenter = softdtw_barycenter(X, max_iter=3)
    panel = plot.plot_barycenter(X, barycenter, others={"mean": torch.zeros(5, 2)}, feature=1, stretch=False)
    by_name = {line.get_label(): line for line in panel.lines}
    np.testing.assert_allclose(by_name["Soft-DTW barycenter"].get_ydata(), barycenter[:, 1])
    assert len(by_name["mean"].get_ydata()) == 5
    np.testing.assert_allclose(by_name["3 series"].get_ydata(), X[0][:, 1])
    assert [len(line.get_xdata()) for line in panel.lines[:3]] == [10, 14, 17]
    assert panel.lines[2].get_xdata()[-1] == 16
    assert panel.lines[-1] is by_name["Soft-DTW barycenter"]  # drawn over the others
    assert len({line.get_color() for line in panel.lines}) == 3


def test_barycenter_lengths_and_stretch() -> None:
    X = torch.randn(2, 10, 1)
    panel = plot.plot_barycenter(X, torch.zeros(8), lengths=torch.tensor([10, 4]))
    assert [len(line.get_xdata()) for line in panel.lines] == [10, 4, 8]
    assert all(line.get_xdata()[-1] == 1.0 for line in panel.lines)
    _, mine = pyplot.subplots()
    assert plot.plot_barycenter(X, torch.zeros(8), ax=mine) is mine


@pytest.mark.parametrize(
    ("X", "options", "message"),
    [
        ([], {}, "X is empty"),
        (torch.rand(2, 5, 1), {"lengths": [5]}, "lengths has 1 numbers, expected 2"),
        (torch.rand(2, 5, 2), {"feature": 1}, "feature is 1, expected 0 to 0"),
        ([torch.rand(1, 5, 1)], {}, r"X\[0\] has shape"),
    ],
)
def test_barycenter_errors(X: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot.plot_barycenter(X, torch.zeros(5), **options)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("name", ["plot_alignment", "plot_barycenter", "plot_clusters", "plot_pairs"])
def test_docstring_examples(name: str) -> None:
    names = {"torch": torch, **vars(softdtw_cuda), **vars(plot)}
    (test,) = doctest.DocTestFinder().find(getattr(plot, name), name, globs=names)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_matplotlib_is_optional() -> None:
    """The package imports without matplotlib, and a plot says what is missing."""
    code = """
import sys
sys.modules["matplotlib"] = sys.modules["matplotlib.pyplot"] = None
import torch
from softdtw_cuda.plot import plot_alignment
try:
    plot_alignment(torch.rand(2, 2), torch.rand(2), torch.rand(2))
except ImportError as error:
    assert "pip install" in str(error), error
else:
    raise SystemExit("no ImportError")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_clusters_have_a_panel_each_with_members_and_center() -> None:
    X = torch.randn(7, 12, 2)
    labels = torch.tensor([2, 0, 2, 0, 0, 2, 2])
    centers = torch.randn(3, 9, 2)
    panels = plot.plot_clusters(
        X, labels, centers, feature=1, stretch=False, names=["a", "b", "c"], columns=2
    )
    assert [panel.get_title(loc="left") for panel in panels] == ["a (3 series)", "b (empty)", "c (4 series)"]
    for k in (0, 2):
        *members, center = panels[k].lines
        np.testing.assert_allclose([line.get_ydata() for line in members], X[labels == k, :, 1])
        np.testing.assert_allclose(center.get_ydata(), centers[k, :, 1])
    assert not panels[1].lines


def test_clusters_cut_the_padding() -> None:
    panels = plot.plot_clusters(torch.randn(2, 9, 1), [0, 0], [torch.randn(4)], lengths=[5, 9])
    assert [len(line.get_ydata()) for line in panels[0].lines] == [5, 9, 4]


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([0, 1], {}, r"labels has shape \(2,\), expected \(3,\)"),
        ([0, 1, 2], {}, "labels are 0 to 2, expected 0 to 1"),
        ([0, 1, 1], {"names": ["one"]}, "names has 1 entries, expected 2"),
        ([0, 1, 1], {"lengths": [5]}, "lengths has 1 numbers, expected 3"),
        ([0, 1, 1], {"columns": 0}, "columns must be at least 1"),
    ],
)
def test_clusters_errors(labels: list[int], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot.plot_clusters(torch.randn(3, 5, 1), labels, torch.randn(2, 5, 1), **options)


def test_pairs_are_sorted_by_label() -> None:
    distances = torch.arange(16.0).view(4, 4)
    panel = plot.plot_pairs(distances, labels=[1, 0, 1, 0], names=["zero", "one"], title="pairs")
    order = [1, 3, 0, 2]
    np.testing.assert_array_equal(panel.images[0].get_array(), distances[order][:, order])
    assert [text.get_text() for text in panel.get_xticklabels()] == ["zero", "one"]
    assert panel.get_xticks().tolist() == [0.5, 2.5]
    assert len(panel.lines) == 2  # one border between the classes, across and down
    np.testing.assert_array_equal(plot.plot_pairs(distances, colorbar=False).images[0].get_array(), distances)


def test_pairs_errors() -> None:
    with pytest.raises(ValueError, match=r"distances has shape \(2, 3\), expected \(K, K\)"):
        plot.plot_pairs(torch.rand(2, 3))
    with pytest.raises(ValueError, match=r"labels has shape \(2,\), expected \(3,\)"):
        plot.plot_pairs(torch.rand(3, 3), labels=[0, 1])
    with pytest.raises(ValueError, match="names has 1 entries, expected 2"):
        plot.plot_pairs(torch.rand(2, 2), labels=[0, 1], names=["one"])
