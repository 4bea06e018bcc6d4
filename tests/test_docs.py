"""The documentation builds strictly, its snippets run, and its figures are those of the CSV files."""

# ruff: noqa: RUF001 (tables have Greek letters, dashes and multiplication signs)

from __future__ import annotations

import contextlib
import csv
import functools
import html
import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple

import pytest
import torch

import softdtw_cuda
from benchmarks import records, scale
from benchmarks.plots import draw_clustering
from softdtw_cuda import _reference, softdtw, softdtw_barycenter, softdtw_cdist
from softdtw_cuda._backends import backend
from softdtw_cuda._problem import NO_BAND, Problem

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "softdtw_cuda"
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted(DOCS.glob("*.md"))]
EQUATIONS = 23
"""Numbered equations of docs/math.md."""
DOCS_TEXT = "".join(page.read_text(encoding="utf-8") for page in PAGES)
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


figures = load("figures")


# ---- snippets


@pytest.fixture
def _quiet_plots() -> Iterator[None]:
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    yield
    pyplot.close("all")


def with_snippets() -> list[Path]:
    return [page for page in PAGES if SNIPPET.search(page.read_text(encoding="utf-8"))]


def test_the_pages_that_show_code_are_found() -> None:
    names = {page.name for page in with_snippets()}
    assert names >= {"README.md", "index.md", "quickstart.md", "choosing.md", "lengths.md", "accuracy.md"}
    for page in PAGES:  # a block that the pattern misses would go untested
        text = page.read_text(encoding="utf-8")
        assert len(re.findall(r"^\s*(```|~~~)\s*(python|py)\b", text, re.MULTILINE)) == len(
            SNIPPET.findall(text)
        )


def test_code_fits_the_column_of_a_page() -> None:
    """Blocks of pages, and the sources and docstrings that the site shows."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", DOCS_TEXT, re.DOTALL | re.MULTILINE)
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
    for path in (DOCS / "tutorials").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    docstrings = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.glob("**/*.py"))
    shown = re.findall(r"^ *((?:>>>|\.\.\.) .*)", docstrings, re.MULTILINE)
    lines = [line for text in (*blocks, *sources) for line in text.splitlines()]
    assert [line for line in (*lines, *shown) if len(line) > 84] == []


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.usefixtures("_quiet_plots")
@pytest.mark.parametrize("page", with_snippets(), ids=lambda page: page.name)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page's blocks in order, in one namespace, where they may leave files."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for found in SNIPPET.finditer(text):
            line = text.count("\n", 0, found.start(1))
            exec(compile("\n" * line + found[1], str(page), "exec"), names)
    check_output(page.name, output.getvalue())


def check_output(name: str, output: str) -> None:
    """What the text around a snippet claims about it."""
    if name == "accuracy.md":
        errors = dict(re.findall(r"^(log space|this library) +(\S+)$", output, re.MULTILINE))
        assert float(errors["this library"]) < 2e-6
        assert float(errors["log space"]) > 5 * float(errors["this library"])
    elif name == "choosing.md":
        visited = [int(number) for number in re.findall(r"gamma .*: (\d+) cells", output)]
        assert visited == sorted(visited)
        assert len(visited) == 3
        assert "bandwidth" in output  # the error of a band that is too narrow
        large = re.findall(r"cost 0.01 at gamma .*: (\S+) in float32, (\S+) in float64", output)
        assert large == [(narrow, "0.0100000") for narrow in ("0.0100000", "0.0100136", "0.0000000")]
        found = re.search(r"sdtw\(x, x\) = (\S+), gradient (\S+)", output)
        assert found
        value, gradient = found.groups()
        assert float(value) < 0 < float(gradient)
        assert "divergence(x, x) = 0.0, gradient 0.00" in output
    elif name == "memory.md":
        sizes = [float(size) for size in re.findall(r": ([\d.]+) bytes a cell", output)]
        assert len(sizes) == 2
        assert sizes[0] == 0.125
        assert sizes[1] < 0.5
        banded = [int(percent) for percent in re.findall(r"(\d+)% of what no band saves", output)]
        assert len(banded) == 2
        assert max(banded) < 20
    elif name == "which_loss.md":
        moved = [float(number) for number in re.findall(r"moves by (\S+)", output)]
        assert moved[0] > 0.01
        assert moved[1] == 0.0
    elif name == "migrating.md":
        assert "tensor(-0.89" in output
        assert "39.8896" in output  # of tslearn 0.10
    elif name == "troubleshooting.md":
        assert "x_lengths[1] is 12" in output


# ---- figures


def row(**changes: str) -> records.Row:
    measured = dict.fromkeys(records.COLUMNS, "")
    measured |= {
        "suite": "paper", "device": "NVIDIA Example", "provider": "this library (fused)", "metric": "time",
        "mode": "forward+backward", "normalize": "False", "lengths": "full", "dtype": "float32",
        "B": "32", "N": "512", "M": "512", "D": "64", "gamma": "1.0",
        "p20": "1", "p50": "1.25", "p80": "2", "unit": "ms", "status": "ok",
        "date": "2026-12-01", "torch": "9.9", "command": "python -m benchmarks run",
    }  # fmt: skip
    return measured | changes


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of benchmarks/results, for figures to read."""
    monkeypatch.setattr(figures.records, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.name)
def test_pages_show_what_the_csv_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert figures.fill(text) == text, "`python docs/figures.py` renews it"


def test_the_pages_with_figures() -> None:
    assert {"README.md", "speed.md", "accuracy.md"} <= {page.name for page in figures.pages()}


def test_whole_jobs_follow_the_csv(results: Path) -> None:
    assert "Not measured on a GPU yet" in figures.scale()
    size = {"B": "1000", "N": "128", "M": "128", "D": "1", "mode": "forward", "device": "NVIDIA H200"}
    fused = row(suite="throughput", **size, p50="0.02")
    records.upsert(results, [fused, fused | {"provider": "this library (cost matrix)", "p50": "0.5"}])
    large = scale.CUDA[3]
    rows = [scale.row_of(large, "softdtw_knn", 1, 20.0, 1, 0.1)]
    about = {"date": "2026-12-01", "versions": "v", "command": "a command"}
    scale.write(rows, {**about, "device": "NVIDIA H200"}, results)
    route = "distributed.cdist"
    shown = [scale.row_of(scale.SHARED, route, n, t, 3) for n, t in ((1, 8.5), (2, 5.0))]
    shown += [scale.row_of(scale.WITHOUT_CELLS, route, n, t, 3) for n, t in ((1, 0.5), (2, 0.3))]
    scale.write(shown, {**about, "device": "Some CPU, 2 cores"}, results)
    cells = 100_000**2 * 128**2
    model = f"{cells / (1000 * 128**2 / 0.02e-3):.3g}"
    assert f"`softdtw_knn` | {model} | 200 (from 10% of the queries) |" in figures.scale()
    assert "`softdtw_knn` | 200 | 320 | 160 |" in figures.scale_targets()
    # 8 s of cells, of which the busier process has 50.1 %, and 0.3 s of everything else.
    assert "| 2 | 0.5010 | 0.30 | 4.31 | 5.00 | +16.1% |" in figures.scale_processes()
    assert "Not measured" not in figures.scale()
    plans = figures.scale_plans()
    assert "| 1,000,000 | 10 nearest | 5.56 h | 41.7 min | 5.21 min | 512 MB | 120 MB |" in plans
    assert plans.count("\n| 1") == 6


def test_clustering_follows_the_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clustering-cpu.csv"
    monkeypatch.setattr(figures, "CLUSTERING", path)
    assert figures.clustering() == figures.NOT_YET
    path.write_text(
        "job,method,seconds,cpu_seconds,inertia,status,date,device,versions,command\n"
        "k-means,softdtw_cuda,0.5,1,7,ok,today,Some CPU,v,c\n"
        "k-means,tslearn,10,12,8,ok,today,Some CPU,v,c\n"
        "k-means,aeon,,,,not installed: aeon,today,Some CPU,v,c\n"
    )
    table = figures.clustering()
    assert "| this library | 0.5 | 1 | – | 7 |" in table
    assert "| tslearn | 10 | 12 | 20× | 8 |" in table
    assert "| aeon | not installed: aeon | – | – | – |" in table
    pytest.importorskip("matplotlib")
    (picture, drawing) = draw_clustering(path, tmp_path)
    assert picture.name == "clustering-some-cpu.png"
    assert all(name in drawing.read_text(encoding="utf-8") for name in ("this library", "tslearn", "k-means"))


def test_real_series_follow_the_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ucr.csv"
    monkeypatch.setattr(figures, "REAL_SERIES", path)
    assert figures.real_series() == figures.real_series_means() == figures.NOT_YET
    header = "set,sizes,task,method,gamma,score,seconds,status,date,device,versions,command\n"
    lines = [
        "A,small,1-NN,Soft-DTW,1e-06,0.75,1,ok",
        "A,small,1-NN,Soft-DTW,0.1,0.5,2,ok",
        "B,large,1-NN,Soft-DTW,0.1,0.7,3,ok",
        'A,small,1-NN,"DTW, aeon",,0.75,4,ok',
        'B,large,1-NN,"DTW, aeon",,,,not within 5 s in all',
    ]
    path.write_text(header + "".join(f"{line},today,Some CPU,v,c\n" for line in lines))
    table = figures.real_series()
    assert "### A\n\nsmall:\n" in table
    assert "| 1-NN | Soft-DTW | 0.500 (2\u00a0s) |" in table
    assert "| 1-NN | Soft-DTW, γ = 10⁻⁶ | 0.750 (1\u00a0s) |" in table
    assert "| 1-NN | DTW, aeon | not within 5 s in all |" in table
    assert "– |" not in table  # DTW, which has no gamma, has a table of its own
    means = figures.real_series_means()
    assert "| 1-NN | Soft-DTW | 0.600 |" in means
    assert "| 1-NN | Soft-DTW, γ = 10⁻⁶ | 0.750 (1 of 2 sets) |" in means
    assert "| 1-NN | DTW, aeon | 0.750 (1 of 2 sets) |" in means


def test_readme_prefers_a_gpu_and_follows_the_csv(results: Path) -> None:
    slow = {"device": "Some CPU", "p50": "777"}
    records.upsert(results, [row(), row(metric="memory", p50="42.5", unit="MiB"), row(**slow)])
    records.upsert(results, [row(provider="other", status="oom", note="CUDA out of memory.", p50="")])
    records.upsert(results, [row(provider="elsewhere", status="unsupported", p50="")])
    records.upsert(results, [row(N="128"), row(N="128", provider="other")])
    table = figures.readme()
    assert "elsewhere" not in table
    assert "| this library | other |" in table
    assert "| 1.25 | \u2013¹ |" in table
    assert "¹ does not fit the card's memory" in table
    assert "NVIDIA Example, 2026-12-01, all in one run." in table
    assert "777" not in table
    assert "42" not in table  # time only
    records.upsert(results, [row(p50="3.5"), row(metric="memory", p50="42.5", unit="MiB")])
    assert "| 3.5 | \u2013¹ |" in figures.readme()


def test_times_beside_others_are_of_eager_calls(results: Path) -> None:
    ours = [row(), row(metric="time, eager", p50="4"), row(metric="memory", p50="42.5", unit="MiB")]
    records.upsert(results, [*ours, row(provider="other", p50="7")])
    assert "| 4 | 7 |" in figures.readme()
    assert "Time of an eager call in ms, forward and backward, float32; B = 32," in figures.readme()
    records.upsert(results, [each | {"suite": "targets"} for each in ours])  # of this library alone
    eager, replay = re.split(
        r"^Time of a CUDA graph", figures.results().split("### This library alone")[1], flags=re.M
    )
    assert "| 4 |" in eager
    assert "| 1.25 |" in replay


@pytest.mark.parametrize("change", [{"date": "2026-12-02"}, {"command": "python -m benchmarks --limit 2"}])
def test_tables_of_several_runs_say_so(results: Path, change: dict[str, str]) -> None:
    records.upsert(results, [row(), row(provider="other")])
    assert "one run" in figures.readme()
    assert "**Separate runs**" not in figures.speed()
    records.upsert(results, [row(provider="other", **change)])
    assert "separate runs" in figures.readme()
    assert "**Separate runs**" in figures.speed()
    assert len(records.runs(records.read_folder(results))) == 2


def test_figures_of_an_earlier_version_say_so(results: Path) -> None:
    old, new = figures.CHANGED[True], "2026-12-01"
    for other, ours, said in ((new, new, False), (old, new, False), (new, old, True)):
        records.upsert(results, [row(date=ours), row(provider="other", date=other)])
        for page in (figures.readme(), figures.speed(), figures.results()):
            assert (f"This library's figures of {old} are of an earlier version." in page) == said
            assert ("To be measured again before the release." in page) == (other != ours)


def test_notes_and_commands_of_a_device_are_said_once(results: Path) -> None:
    launch = {"status": "error", "p50": "", "note": "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"}
    for suite in ("paper", "lengths"):
        others = [row(suite=suite, provider=name, **launch) for name in ("never", "sometimes")]
        large = row(suite=suite, provider="sometimes", N="1024", M="1024")
        records.upsert(results, [row(suite=suite), row(suite=suite, N="1024", M="1024"), *others, large])
    page = figures.results()
    assert page.count("| 512 | 1.25 | –¹ |") == 2
    for once in ("\n¹ a Numba kernel", "No number for never", "python -m benchmarks run"):
        assert page.count(once) == 1
    assert page.index("### Against length") < page.index("### Notes, NVIDIA Example")


def test_what_the_cpu_saves_is_what_its_backend_saves() -> None:
    lines = figures.saved().splitlines()
    for length in (128, 300):
        x = torch.randn(8, length, 64)
        state = backend("cpu").forward(Problem(x, x, None, None, 1.0, NO_BAND, need_x=True, need_y=True))[1]
        assert any(line.startswith(f"| {length} | {state.nbytes / 2**20:.3g} |") for line in lines)


def test_the_grid_of_errors_has_a_table_for_each_number_of_features(results: Path) -> None:
    errors = {"suite": "accuracy", "metric": "gradient error", "p50": "1e-7"}
    sizes = [{"D": d, "N": n} for d in ("16", "1") for n in ("128", "512")]
    records.upsert(results, [row(**errors, **size) for size in sizes])
    captions = re.findall(r"^Error relative to float64, float32; .*$", figures.results(), re.MULTILINE)
    assert [re.findall(r"D = (\d+)", caption) for caption in captions] == [["1"], ["16"]]


def test_plots_of_several_runs_say_so(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "PLOTS", tmp_path)
    for kind in ("batch", "dimensions", "lengths"):
        (tmp_path / f"{kind}-nvidia-example.png").touch()
    ours, other = row(suite="lengths"), row(suite="lengths", provider="other")
    records.upsert(results, [ours, other, row(suite="dimensions"), row(suite="extensions")])
    shown = list(figures._plots("NVIDIA Example", ("lengths", "dimensions", "batch")))
    assert [kind in each for kind, each in zip(("lengths", "dimensions", "batch"), shown, strict=True)]
    records.upsert(results, [other | {"date": "2026-12-02"}])
    caption = list(figures._plots("NVIDIA Example", ("lengths", "dimensions")))[1]
    assert "2026-12-01 to 2026-12-02, this library and the others in separate runs" in caption
    assert "To be measured again before the release." in caption


def test_published_tables_are_one_run() -> None:
    """Rows that differ in date, limit or command are no comparison; those that still do are listed."""
    several = {(suite, device) for suite, device, rows in figures.published() if len(records.runs(rows)) > 1}
    assert several == figures.SEPARATE_RUNS


@pytest.mark.parametrize(
    "path",
    [figures.CPU_TARGETS, *sorted(records.RESULTS.glob("error_budget_*.csv"))],
    ids=lambda path: path.stem,
)
def test_tables_of_targets_are_one_run(path: Path) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        assert len({(row["date"], row["command"], row["device"]) for row in csv.DictReader(file)}) == 1


def test_pages_show_every_device(results: Path) -> None:
    records.upsert(
        results, [row(), row(device="Some CPU", p50="777"), row(suite="accuracy", metric="gradient error")]
    )
    page = figures.speed()
    assert page.index("### NVIDIA Example") < page.index("### Some CPU")
    assert "| 777 |" in page
    assert "### NVIDIA Example" in figures.accuracy()


def test_what_was_not_reached_is_said(results: Path) -> None:
    def measured(batch: int, length: int, d: int, **changes: str) -> records.Row:
        size = {"B": str(batch), "N": str(length), "M": str(length), "D": str(d)}
        return row(suite="targets", **size, **changes)

    sizes = figures.cases.TARGETS
    times = ["0.05", "0.25", "0.9", "3", "1", "5", "1.4"]
    rows = [measured(*size, p50=time) for size, time in zip(sizes, times, strict=True)]
    records.upsert(results, [*rows, measured(16, 64, 8, metric="host time", p50="0.18")])
    table = figures.targets()
    assert "| 32 | 128 | 64 | 0.05 ms | 0.12 ms: reached | 0.06 ms: reached |" in table
    assert "| 32 | 512 | 64 | 0.25 ms | 0.35 ms: reached | 0.2 ms: 25% more |" in table
    assert "| 32 | 2048 | 64 | 3 ms | 2.5 ms: 20% more | 1.2 ms: 150% more |" in table
    assert "B = 16, L = 64, D = 8: 0.18 ms" in table


def test_throughput_counts_cells(results: Path) -> None:
    def measured(batch: int, length: int, d: int, mode: str) -> records.Row:
        size = {"B": str(batch), "N": str(length), "M": str(length), "D": str(d)}
        return row(suite="throughput", mode=mode, p50="2" if mode == figures.cases.FORWARD else "4", **size)

    sizes = figures.cases.THROUGHPUT_BATCH
    modes = (figures.cases.FORWARD, figures.cases.FORWARD_BACKWARD)
    dims = figures.cases.THROUGHPUT_DIMS
    rows = [measured(b, n, d, mode) for n, b in sizes.items() for d in dims for mode in modes]
    records.upsert(results, rows)
    table = figures.throughput()
    forward, both = table.split("Forward and backward:")
    assert "| 1 | 134 | 134 | 268 | 268 |" in forward  # 65536 pairs of 64 x 64 cells in 2 ms
    assert "| 256 | 67 | 67 | 134 | 134 |" in both


def test_nothing_measured_is_said(results: Path) -> None:
    assert (
        figures.speed() == figures.accuracy() == figures.targets() == figures.throughput() == figures.NOT_YET
    )


def test_unknown_figures_are_errors() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        figures.fill("<!-- figures: nonsense -->\n<!-- end figures -->")


def test_log_space_alignment_is_right_in_float64() -> None:
    """The comparison on the page about accuracy is with the right recurrence: only its precision differs."""
    alignment = load("log_space").log_space_alignment
    for n, m in ((13, 9), (5, 8), (1, 4), (4, 1), (1, 1)):
        cost = torch.rand(n, m, dtype=torch.float64)
        expected = _reference.alignment_from_cost(cost.unsqueeze(0), 0.3)[0]
        for shares in (False, True):
            torch.testing.assert_close(alignment(cost, 0.3, shares), expected)


def test_log_space_table() -> None:
    """One small case measured again, to the order of magnitude."""
    measured = load("log_space").measure(128, 120, 64, 0.1)
    with (DOCS / "data" / "log_space.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if (r["N"], r["D"], r["gamma"]) == ("128", "64", "0.1")]
    assert len(rows) == 1
    assert measured["value"] == pytest.approx(float(rows[0]["value"]), rel=1e-5)
    assert measured["this_library"] < 1e-6
    assert 0.1 < measured["differences"] / float(rows[0]["differences"]) < 10
    assert "| 128 | 64 | 0.1 | 1.4e-2 |" in figures.log_space()


# ---- the mathematics, checked as it stands on the page


Cells = dict[tuple[int, int], float]
UP, LEFT, DIAGONAL = (-1, 0), (0, -1), (-1, -1)


class Sweep(NamedTuple):
    """One small cost matrix with indices from 1, as in docs/math.md."""

    shares: dict[tuple[int, int], dict[tuple[int, int], float]]
    alignment: Cells
    dropped: float
    """Sum of the alignment weights that were dropped."""
    drops: int


def sweep(cost: torch.Tensor, gamma: float, threshold: float = 0.0) -> Sweep:
    """Equations (4), (7) and (8); E below the threshold is dropped."""
    n, m = cost.shape
    z: Cells = {(0, 0): 1.0}
    shares = {}
    for i in range(1, n + 1):
        for j in range(1, m + 1):
            terms = {step: z.get((i + step[0], j + step[1]), 0.0) for step in (UP, LEFT, DIAGONAL)}
            total = sum(terms.values())
            # A cell that no path reaches takes any shares that sum to 1.
            shares[i, j] = {
                step: term / total if total else float(step == DIAGONAL) for step, term in terms.items()
            }
            z[i, j] = math.exp(-cost[i - 1, j - 1].item() / gamma) * total
    alignment: Cells = {}
    dropped, drops = 0.0, 0
    for i in range(n, 0, -1):
        for j in range(m, 0, -1):
            after = {step: (i - step[0], j - step[1]) for step in (UP, LEFT, DIAGONAL)}
            here = float((i, j) == (n, m))
            here += sum(alignment[k] * shares[k][step] for step, k in after.items() if k in alignment)
            if here < threshold:
                dropped, drops, here = dropped + here, drops + (here > 0), 0.0
            alignment[i, j] = here
    return Sweep(shares, alignment, dropped, drops)


def as_tensor(cells: Cells, n: int, m: int) -> torch.Tensor:
    numbers = [[cells[i, j] for j in range(1, m + 1)] for i in range(1, n + 1)]
    return torch.tensor(numbers, dtype=torch.float64)


def second_order(cost: torch.Tensor, direction: torch.Tensor, gamma: float) -> tuple[float, torch.Tensor]:
    """Derivatives of the value and of E by equations (11) to (15)."""
    n, m = cost.shape
    shares, alignment, _, _ = sweep(cost, gamma)
    u: Cells = {}
    v: Cells = {}
    share_dot = {}
    for i in range(1, n + 1):
        for j in range(1, m + 1):
            p, omega = shares[i, j], direction[i - 1, j - 1].item()
            b, c = v.get((i - 1, j), 0.0), u.get((i, j - 1), 0.0)  # (12)
            delta = c - b
            mu = {
                UP: p[LEFT] * delta - p[DIAGONAL] * b,
                LEFT: -p[UP] * delta - p[DIAGONAL] * c,
                DIAGONAL: p[UP] * b + p[LEFT] * c,
            }  # (13)
            u[i, j] = omega + mu[UP] if i > 1 else 0.0
            v[i, j] = omega + mu[LEFT] if j > 1 else 0.0  # (14)
            share_dot[i, j] = {step: p[step] * mu[step] / gamma for step in p}  # (15)
    dot: Cells = {}
    for i in range(n, 0, -1):
        for j in range(m, 0, -1):
            dot[i, j] = 0.0
            for step in (UP, LEFT, DIAGONAL):
                k = (i - step[0], j - step[1])
                if k in alignment:  # (11)
                    dot[i, j] += dot[k] * shares[k][step] + alignment[k] * share_dot[k][step]
    value_dot = direction[0, 0].item() + sum(u[i, 1] for i in range(2, n + 1))
    return value_dot + sum(v[n, j] for j in range(2, m + 1)), as_tensor(dot, n, m)


@pytest.mark.parametrize(("n", "m"), [(7, 5), (4, 9), (1, 6), (6, 1)])
@pytest.mark.parametrize("hole", [False, True])
def test_second_order_equations(n: int, m: int, hole: bool) -> None:
    """Against differences of exact alignments, also around a hole of forbidden cells."""
    generator = torch.Generator().manual_seed(n + m)
    cost = torch.rand(n, m, dtype=torch.float64, generator=generator)
    direction = torch.randn(n, m, dtype=torch.float64, generator=generator)
    if hole and min(n, m) > 3:
        cost[1:3, 1:3] = math.inf
    gamma, h = 0.3, 1e-5
    expected = _reference.alignment_from_cost(cost.unsqueeze(0), gamma)[0]
    torch.testing.assert_close(as_tensor(sweep(cost, gamma).alignment, n, m), expected)
    ends = [
        _reference.alignment_from_cost((cost + sign * h * direction).unsqueeze(0), gamma)[0]
        for sign in (1, -1)
    ]
    value_dot, alignment_dot = second_order(cost, direction, gamma)
    torch.testing.assert_close(alignment_dot, (ends[0] - ends[1]) / (2 * h), rtol=1e-6, atol=1e-8)
    assert value_dot == pytest.approx((expected * direction).sum().item(), rel=1e-12)


def test_gradients_of_gradients_of_series() -> None:
    """Equations (16) to (19), against differences of (16) and (17)."""
    generator = torch.Generator().manual_seed(0)
    x, y, a, b = (torch.randn(length, 2, dtype=torch.float64, generator=generator) for length in (6, 5, 6, 5))
    gamma, h = 0.7, 1e-5

    def gradients(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = _reference.alignment_from_cost(torch.cdist(x, y).square().unsqueeze(0), gamma)[0]
        pulls = weights.unsqueeze(2) * (x.unsqueeze(1) - y)
        return 2 * pulls.sum(1), -2 * pulls.sum(0)

    difference = x.unsqueeze(1) - y
    change = a.unsqueeze(1) - b
    cost = difference.square().sum(2)
    weights = _reference.alignment_from_cost(cost.unsqueeze(0), gamma)[0]
    _, weights_dot = second_order(cost, 2 * (difference * change).sum(2), gamma)
    pulls = weights_dot.unsqueeze(2) * difference + weights.unsqueeze(2) * change
    forward, backward = gradients(x + h * a, y + h * b), gradients(x - h * a, y - h * b)
    for derivative, end, start in zip((2 * pulls.sum(1), -2 * pulls.sum(0)), forward, backward, strict=True):
        torch.testing.assert_close(derivative, (end - start) / (2 * h), rtol=1e-6, atol=1e-7)
    leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    softdtw(*leaves, gamma=gamma).backward()
    for leaf, gradient in zip(leaves, gradients(x, y), strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


@pytest.mark.parametrize("gamma", [1e-3, 0.1, 1.0, 100.0, 1e6])
@pytest.mark.parametrize(("n", "m", "d"), [(1, 1, 1), (3, 50, 2), (128, 120, 8), (300, 310, 1)])
def test_rounding_bound_of_values(n: int, m: int, d: int, gamma: float) -> None:
    """Equation (23) in float32: the error is relative to gamma where that is larger than the value."""
    generator = torch.Generator().manual_seed(n)
    x, y = (torch.randn(2, length, d, generator=generator) for length in (n, m))
    cost = torch.cdist(x.double(), y.double()).square()
    weights = _reference.alignment_from_cost(cost, gamma)
    exact = softdtw(x.double(), y.double(), gamma=gamma)
    error = (softdtw(x, y, gamma=gamma) - exact).abs()
    bound = 5 * gamma * (n + m) + (weights * cost).sum((1, 2)) + exact.abs()
    assert (error <= 2.0**-24 * bound).all()


@pytest.mark.parametrize("threshold", [1e-6, 1e-3, 3e-2])
@pytest.mark.parametrize("gamma", [0.05, 1.0])
def test_pruning_bound(threshold: float, gamma: float) -> None:
    """Equations (20) and (21), with thresholds large enough to matter."""
    n, m = 24, 19
    cost = torch.rand(n, m, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    pruned = sweep(cost, gamma, threshold)
    exact = as_tensor(sweep(cost, gamma).alignment, n, m)
    missing = exact - as_tensor(pruned.alignment, n, m)
    assert 0 < pruned.dropped <= pruned.drops * threshold <= n * m * threshold
    rounding = n * m * 2.0**-53  # of a sum over all cells; E_11 misses all that was dropped
    assert missing.min() >= -rounding
    assert missing.max() <= pruned.dropped + rounding
    assert missing.sum(1).max() <= m * (pruned.dropped + rounding)
    assert missing.sum(0).max() <= n * (pruned.dropped + rounding)
    assert missing.sum() <= (n + m - 1) * (pruned.dropped + rounding)


# ---- the architecture


LOSS = ["functional.py", "_validation.py", "_problem.py", "_autograd.py", "_backends.py", "_cpu/launch.py"]
"""The way of a loss on the CPU, down to its backend."""
ANSWERS = {
    *("_torch_compat.py", "_options.py", "_lengths.py", "_distances.py", "_series.py"),
    *("_barycenter_arguments.py", "_barycenter_loss.py", "_descent.py", "_processes.py"),
    *("_free_memory.py", "_sums.py"),
}
"""Files that are asked on the way and answer without passing the problem on; the page names them."""


class Visits(NamedTuple):
    """The package's files that a call enters: in the order of first entry, and one above the other."""

    order: list[str]
    stacks: set[tuple[str, ...]]
    """From the public function to the backend, each file once."""


def visits(call: Callable[[], object]) -> Visits:
    call()  # compiles, and fills caches
    order: list[str] = []
    stacks: set[tuple[str, ...]] = set()

    def file_of(frame: FrameType) -> str | None:
        if frame.f_code is Problem.__new__.__code__:  # generated, in no file
            return "_problem.py"
        if frame.f_code.co_name == "explained":  # the decorator that rewords Python's own TypeError
            return None
        path = Path(frame.f_code.co_filename)
        return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (name := file_of(frame)) is None:
            return
        if name not in order:
            order.append(name)
        if name.startswith("_cpu/"):
            files = [name]
            above: FrameType | None = sys._getframe(1)  # Numba's frames have no caller
            while above is not None:
                if above.f_code.co_name == "state_bytes":  # a question about size, not the way
                    return
                files += filter(None, [file_of(above)])
                above = above.f_back
            stacks.add(tuple(dict.fromkeys(reversed(files))))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Visits(order, stacks)


@functools.cache
def drawn_files() -> dict[str, int]:
    """The names of files and folders in the drawing, and how far down each stands."""
    drawing = (DOCS / "assets" / "architecture.svg").read_text(encoding="utf-8")
    return {
        name: int(y) for y, name in re.findall(r'<text class="file"[^>]* y="(\d+)">([^<]+)</text>', drawing)
    }


def test_the_drawing_names_files_that_exist() -> None:
    assert set(drawn_files()) >= {*LOSS, "pairs.py", "barycenters.py", "_cuda/launch.py", "_ops.py"}
    heights = [drawn_files()[name] for name in LOSS]
    assert heights == sorted(set(heights)), "the way goes down the drawing"
    for name in drawn_files():
        path = PACKAGE / name
        assert path.is_dir() if name.endswith("/") else path.is_file(), name


def test_the_architecture_page_names_files_that_exist() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`((?:_cpu/|_cuda/)?\w+\.py|_cpu/|_cuda/kernels/)`", text))
    assert names >= set(drawn_files())
    for name in names:
        assert (PACKAGE / name).exists(), name


def series() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 20, 2, requires_grad=True), torch.randn(3, 15, 2)


def test_the_way_of_a_loss_is_that_of_the_drawing() -> None:
    x, y = series()
    seen = visits(lambda: softdtw(x, y).sum())
    host = [name for name in seen.order if not name.startswith("_cpu/") or name == "_cpu/launch.py"]
    assert [name for name in host if name not in ANSWERS] == LOSS
    for stack in seen.stacks:
        assert stack[:4] == ("functional.py", "_autograd.py", "_backends.py", "_cpu/launch.py")
        # Those above the kernel, and the two that made the problem.
        assert len({*stack, "_validation.py", "_problem.py"}) <= 8


def test_the_ways_of_all_pairs_and_of_a_barycenter_are_those_of_the_drawing() -> None:
    x, y = series()
    down = ("_autograd.py", "_backends.py", "_cpu/launch.py")
    for call, start in (
        (lambda: softdtw_cdist(x, y).sum(), ("pairs.py",)),
        (lambda: softdtw_barycenter(y, max_iter=1), ("barycenters.py", "pairs.py")),
    ):
        seen = visits(call)
        stacks = [tuple(name for name in stack if name not in ANSWERS) for stack in seen.stacks]
        ways = {stack[: stack.index("_cpu/launch.py") + 1] for stack in stacks}
        # torch's autograd calls the backward, past the public functions.
        assert ways - {(start[0], *down)} == {(*start, *down)} - {(start[0], *down)}
        assert (*start, *down) in ways
        host = {name for name in seen.order if not name.startswith("_cpu/")}
        assert host <= set(drawn_files()) | ANSWERS


# ---- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr
    return folder


def test_site_needs_no_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text(encoding="utf-8")):
            assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag), f"{page.name}: {tag}"


def test_every_column_has_a_heading(site: Path) -> None:
    for page in site.rglob("index.html"):
        assert not re.search(r"<th\b[^>]*>\s*</th>", page.read_text(encoding="utf-8")), page


def test_formulas_are_mathml_and_numbered(site: Path) -> None:
    text = (site / "math" / "index.html").read_text(encoding="utf-8")
    assert "arithmatex" not in text
    assert not re.search(r"\\(?:frac|tag|gamma|mathrm|operatorname|left|text)\b", text)
    assert "<mi>&</mi>" not in text  # an environment that the converter does not have
    for number in range(1, EQUATIONS + 1):
        assert text.count(f'id="eq-{number}"') == 1
        assert f'<a href="#eq-{number}">({number})</a>' in text
    assert f'id="eq-{EQUATIONS + 1}"' not in text


def test_functions_stand_apart_from_their_operands() -> None:
    for package in ("mkdocs", "latex2mathml"):
        pytest.importorskip(package)
    thin = '<mspace width="0.167em" />'
    mathml = load("hooks").mathml
    assert f"<mi>d</mi>{thin}<msub><mi>log</mi><mn>2</mn></msub><mo" in mathml(r"d \log_2(e)/\gamma")
    assert f"{thin}<mi>ln</mi>{thin}<mn>2</mn>" in mathml(r"\gamma \ln 2")
    assert thin not in mathml(r"= \exp(-x)")


def test_equations_cited_by_the_code_exist() -> None:
    tags = re.findall(r"\\tag\{(\d+)\}", (DOCS / "math.md").read_text(encoding="utf-8"))
    assert tags == [str(number) for number in range(1, EQUATIONS + 1)]
    numbers = set(tags)
    cited = set()
    for path in (ROOT / "src").rglob("*"):
        if path.suffix in (".py", ".cu", ".cuh"):
            for group in re.findall(
                r"\beqs?\. ?\(([\d, ]+)\)", path.read_text(encoding="utf-8"), re.IGNORECASE
            ):
                cited |= set(re.findall(r"\d+", group))
    assert cited
    assert cited <= numbers


def test_reference_has_every_public_name(site: Path) -> None:
    pytest.importorskip("sklearn")
    from softdtw_cuda import distributed, estimators, plot

    text = (site / "api" / "index.html").read_text(encoding="utf-8")
    for name in softdtw_cuda.__all__:
        assert f'id="softdtw_cuda.{name}"' in text
    for module in (plot, estimators, distributed):
        for name in module.__all__:
            assert f'id="{module.__name__}.{name}"' in text
    assert ":func:" not in text
    assert ":class:" not in text
    for found in re.finditer(r"Returns:</span>.*?\u2013", text, re.DOTALL):  # a colon would be parsed
        assert re.search(r"Tensor|Axes|float|Any", re.sub(r"<[^>]+>", "", found[0])), found[0]
    assert "<blockquote" not in text  # a section that the parser does not have, such as "Example:"
    assert "&gt;&gt;&gt;" in text
    for alias in ("Lengths", "DistanceFunction", "Reduction", "Optimizer", "StopReason"):
        assert text.count(f'<td id="type-{alias}"><code>{alias}</code></td>') == 1
        assert f'<a href="#type-{alias}">' in text
    shown = re.sub(r"<[^>]+>", "", text)
    for name in (name for name in softdtw_cuda.__all__ if name.startswith("softdtw")):
        assert len(re.findall(rf"\b{name}\(\n\s+\w+: ", shown)) == 1, (
            f"{name} has overloads beside its signature"
        )
    anchors = set(re.findall(r'\bid="([^"]+)"', text))
    for target in re.findall(r'href="#(softdtw_cuda[^"]*)"', text):
        assert target in anchors


def sections(page: str) -> list[tuple[str, str]]:
    """Names and HTML of the documented objects of the API page."""
    parts = re.split(r'<h[34] id="(softdtw_cuda\.[\w.]+)"', page)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def test_no_section_of_the_reference_is_empty_or_garbled(site: Path) -> None:
    text = (site / "api" / "index.html").read_text(encoding="utf-8")
    found = sections(text)
    assert len(found) >= len(softdtw_cuda.__all__)
    for name, part in found:
        words = re.sub(r"<[^>]+>", " ", part)
        assert len(words.split()) > 8, f"{name} says nothing"
        pieces = re.split(r'doc-section-title">(\w+):</span>', part)
        for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
            assert title in {"Parameters", "Returns", "Raises", "Examples", "Attributes"}, (name, title)
            assert re.sub(r"<[^>]+>", "", body).strip(), f"{title} of {name} is empty"
        # A section that was not recognised becomes a box or stays text, and its example a quote.
        assert "<details" not in part, name
        assert "<blockquote" not in part, name
        prose = re.sub(r"<(code|span)\b.*?</\1>", "", part, flags=re.DOTALL)
        assert not re.search(r"\b(Args|Returns|Raises|Examples?|Note|Yields):", prose), name
        assert "&gt;&gt;&gt;" not in prose, name


def test_types_of_signatures_are_explained(site: Path) -> None:
    """Every alias that a signature shows has a row in the page's table, and a link to it."""
    text = (site / "api" / "index.html").read_text(encoding="utf-8")
    aliases = re.findall(r'<td id="type-(\w+)">', text)
    assert {"Lengths", "Reduction", "DistanceFunction", "Series", "Optimizer", "StopReason"} <= set(aliases)
    # Names of Python and of other libraries, and what is documented on the page itself.
    known = {"None", "Any", "Callable", "Literal", "Mapping", "Sequence"}
    known |= {"RandomState", "Axes", "Figure", "SubFigure"}
    known |= {name.rsplit(".", 1)[1] for name, _ in sections(text)} | {"Omega"}  # the last is an argument
    for name, part in sections(text):
        shown = html.unescape(
            re.sub(r"<[^>]+>", "", " ".join(re.findall(r"<code\b.*?</code>", part, re.DOTALL)))
        )
        types = {
            word
            for note in re.findall(r"[:>] ([\w\[\]|, .]+)", shown)
            for word in re.findall(r"\b[A-Z]\w+", note)
        }
        assert types <= known | set(aliases), f"{name} has types that nothing explains"
        for alias in aliases:
            if re.search(rf": (?:\w+ \| )*{alias}\b", shown):
                assert f'href="#type-{alias}"' in part, f"{alias} in {name} leads nowhere"


def test_the_landing_page_has_one_picture_one_number_and_three_links(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    article = text[text.index("<article") : text.index("</article>")]
    assert article.count("<img") == 1
    assert len(re.findall(r'<p class="number"><strong>[\d.]+ ms</strong>', article)) == 1
    assert article.count('class="md-button') == 3


def test_pictures_lead_to_themselves_in_full_size(site: Path) -> None:
    text = (site / "speed" / "index.html").read_text(encoding="utf-8")
    pictures = re.findall(r'<img [^>]*src="([^"]+\.png)"', text)
    assert pictures
    assert re.findall(r'<a class="picture" href="([^"]+)">', text) == pictures
    assert all((site / "speed" / picture).is_file() for picture in pictures)


def test_the_minimum_of_torch_is_that_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (least,) = re.findall(r'"torch>=([\d.]+)"', project)
    assert re.findall(r"torch ([\d.]+) or newer", DOCS_TEXT) == [least]


def test_what_is_installed_is_a_checkout_until_there_is_a_release() -> None:
    """Without an address in pyproject.toml, `pip install softdtw-cuda-torch` finds nothing of ours."""
    released = "Homepage =" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert released == bool(re.search(r"pip install ['\"]?softdtw-cuda-torch", DOCS_TEXT))


def test_the_gallery_shows_picture_source_and_link(site: Path) -> None:
    text = (site / "examples" / "index.html").read_text(encoding="utf-8")
    names = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"demo"}
    for name in names:
        assert f"assets/examples/{name}.png" in text
        assert re.search(rf'href="(?:\.\./examples/|\./)?{name}\.py"', text), name
        assert (site / "examples" / f"{name}.py").read_bytes() == (
            ROOT / "examples" / f"{name}.py"
        ).read_bytes()
    assert text.count("<details") == len(names)
    assert text.count("__main__") == len(names)  # the sources themselves


def test_tutorials_are_pages(site: Path) -> None:
    for path in (DOCS / "tutorials").glob("*.ipynb"):
        text = (site / "tutorials" / path.stem / "index.html").read_text(encoding="utf-8")
        pictures = re.findall(rf'src="\.\./({path.stem}-\d+\.png)"', text)
        assert len(pictures) >= 2
        for picture in pictures:
            assert (site / "tutorials" / picture).read_bytes().startswith(b"\x89PNG")
        assert 'class="text output' in text or "output" in text
        assert f'href="../{path.name}"' in text
        assert (site / "tutorials" / path.name).is_file()


def test_the_changelog_has_every_public_name() -> None:
    pytest.importorskip("sklearn")
    from softdtw_cuda import distributed, estimators, plot

    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for module in (softdtw_cuda, distributed, estimators, plot):
        for name in module.__all__:
            assert re.search(rf"`{name}\b", changelog), name


def test_the_citation_has_the_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {softdtw_cuda.__version__}\n" in text


def test_the_citation_has_the_papers_of_the_page() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    page = re.sub(r"[{}]", "", (DOCS / "citing.md").read_text(encoding="utf-8"))
    found = re.findall(r"^  title +=\s*(.*?),$", page, re.MULTILINE | re.DOTALL)
    titles = [" ".join(title.split()) for title in found]
    assert len(titles) == 4
    for title in titles:
        assert f'title: "{title}"' in citation


PRIVATE_WORDS = re.compile(
    r"right gradient|same bits every|\bmends?\b|\bmass\b|\bporter\b|small pairs|put off|were to reach"
)
"""What pages said before there was a glossary."""


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_pages_use_the_words_of_the_glossary(page: Path) -> None:
    found = PRIVATE_WORDS.search(page.read_text(encoding="utf-8").lower())
    assert found is None, f"{page.name} says {found[0]!r}; docs/glossary.md has the word for it"


def test_drawings_are_well_formed() -> None:
    drawings = list((DOCS / "assets").glob("*.svg"))
    assert drawings
    for drawing in drawings:
        root = xml.etree.ElementTree.parse(drawing).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.find("{http://www.w3.org/2000/svg}title") is not None


def rows_of(path: Path) -> list[records.Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("device", "claim"), [("cpu", "on a CPU"), ("cuda", "on an H200")])
def test_the_readme_says_what_the_error_budget_measured(device: str, claim: str) -> None:
    rows = rows_of(records.RESULTS / f"error_budget_{device}.csv")
    before, after = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split()).split(claim, 1)
    assert f"{sum(row['passed'] == 'True' for row in rows)} of {len(rows)}" in before[-60:]
    # Of an earlier version it says so, and of which day.
    date = rows[0]["date"]
    is_old = date <= figures.CHANGED[device == "cuda"]
    assert after.startswith(f" ({date}, an earlier version; to be measured again") == is_old


def test_the_readme_says_what_the_host_takes() -> None:
    (row,) = (
        row
        for row in rows_of(records.RESULTS / "targets-nvidia-h200.csv")
        if (row["provider"], row["metric"]) == ("this library (fused)", "host time")
    )
    shown = re.search(r"\[([\d.]+) ms\]\(docs/targets.md\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown is not None
    assert float(shown[1]) == round(float(row["p50"]), 1)
