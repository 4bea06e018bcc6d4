"""The benchmark command: its table, its failures, its plots, and a small run of it."""

from __future__ import annotations

import csv
import datetime
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import cpu_targets, plots, records, release, scale, tables
from benchmarks.__main__ import command_line, main, parser
from benchmarks.bounds import GPUS, Cpu, least_cpu_seconds, least_seconds
from benchmarks.cases import (
    ACCURACY,
    FORWARD,
    FORWARD_BACKWARD,
    HOST,
    SECOND_ORDER,
    SUITES,
    Case,
    cases_of,
)
from benchmarks.error_budget import KEY, Errors, row_of
from benchmarks.plots import _apart
from benchmarks.providers import OURS_COST, OURS_FUSED, ROUNDING, Provider, from_checkout, installed
from benchmarks.runner import Runner, Settings
from softdtw_cuda.plot import INK, PALE

ROOT = Path(__file__).resolve().parent.parent
TINY = Case("paper", 2, 12, 12, 3)
ADAPTERS = {
    "right": "from softdtw_cuda import softdtw\n"
    "def make_loss(case, device): return lambda x, y, *lengths: softdtw(x, y, gamma=case.gamma)",
    "exits": "import os\ndef make_loss(case, device):\n"
    "    if case.suite == 'start': return lambda x, y, *lengths: (x.sum((1, 2)) + y.sum((1, 2)))\n"
    "    os._exit(7)",
    "raises": "def make_loss(case, device):\n"
    "    if case.suite == 'start': return lambda x, y, *lengths: (x.sum((1, 2)) + y.sum((1, 2)))\n"
    "    raise ValueError('no such luck\\nsecond line')",
    "needs too much": "import torch\ndef make_loss(case, device):\n"
    "    if case.suite == 'start': return lambda x, y, *lengths: (x.sum((1, 2)) + y.sum((1, 2)))\n"
    "    return lambda x, y, *lengths: x.sum((1, 2)) * torch.empty(1 << 58, device=device)[0]",
    "is crowded out": "import torch\nseen = []\ndef make_loss(case, device):\n"
    "    seen.append(case.suite)\n"
    "    if seen.count('paper') == 1: torch.empty(1 << 58, device=device)\n"
    "    return lambda x, y, *lengths: (x.sum((1, 2)) + y.sum((1, 2)))",
    "sleeps": "import time\ndef make_loss(case, device):\n"
    "    if case.suite != 'start': time.sleep(60)\n"
    "    return lambda x, y, *lengths: (x.sum((1, 2)) + y.sum((1, 2)))",
    "does not start": "raise RuntimeError('nothing to import')",
    "prints": "def make_loss(case, device):\n"
    '    print(\'{"status": "not an answer"}\')\n'
    "    return lambda x, y, *lengths: (x.sum((1, 2)) + y.sum((1, 2)))",
    "is wrong": "def make_loss(case, device):\n"
    "    return lambda x, y, *lengths: (x.sum((1, 2)) + y.sum((1, 2))) * float('nan')",
}


def row(**changes: str) -> records.Row:
    usual = dict.fromkeys(records.COLUMNS, "") | {
        "suite": "lengths", "device": "Test Device", "provider": OURS_FUSED, "metric": "time",
        "mode": "forward+backward", "normalize": "no", "lengths": "full", "gamma": "1", "dtype": "float32",
        "B": "4", "N": "64", "M": "64", "D": "8", "p20": "0.9", "p50": "1", "p80": "1.1", "unit": "ms",
        "status": "ok",
    }  # fmt: skip
    return usual | changes


@pytest.fixture
def peer(tmp_path: Path) -> Callable[[str], Provider]:
    """A provider of one's own, from a folder with a benchmark_adapter.py."""

    def make(name: str) -> Provider:
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        (folder / "benchmark_adapter.py").write_text(ADAPTERS[name])
        (provider,) = from_checkout(f"{name}={folder}")
        return provider

    return make


@pytest.fixture(params=["in turns", "alone"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Cases of ordinary size, and cases so large that providers are measured one after the other."""
    if request.param == "alone":
        monkeypatch.setattr("benchmarks.runner.LARGE_CELLS", 0)
    return str(request.param)


def measure(providers: list[Provider], cases: list[Case], limit: float = 60.0) -> list[records.Row]:
    settings = Settings(seconds=0.01, limit=limit, threads=1, command="test")
    with Runner(providers, settings) as runner:
        return runner.run(cases, None, progress=False)


# The table


def test_upsert_replaces_by_key_and_keeps_the_rest(tmp_path: Path) -> None:
    records.upsert(tmp_path, [row(), row(N="128"), row(suite="paper")])
    files = records.upsert(tmp_path, [row(p50="2", date="later"), row(metric="memory")])
    assert [file.name for file in files] == ["lengths-test-device.csv"]
    kept = {records.key(r): r for r in records.read_folder(tmp_path)}
    assert len(kept) == 4
    assert kept[records.key(row())]["p50"] == "2"
    assert kept[records.key(row(N="128"))]["p50"] == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "lengths-test-device.csv",
        "paper-test-device.csv",
    ]


def test_a_failure_leaves_no_older_figure_beside_it(tmp_path: Path) -> None:
    both = [row(), row(metric="time, eager")]
    records.upsert(tmp_path, [*both, row(metric="memory"), row(provider="other"), row(N="128")])
    records.upsert(tmp_path, [row(status="oom", p50=""), row(metric="memory", status="oom", p50="")])
    kept = [(r["provider"], r["N"], r["metric"], r["status"]) for r in records.read_folder(tmp_path)]
    assert sorted(kept) == sorted(
        [
            (OURS_FUSED, "64", "time", "oom"),
            (OURS_FUSED, "64", "memory", "oom"),
            ("other", "64", "time", "ok"),
            (OURS_FUSED, "128", "time", "ok"),
        ]
    )


@pytest.mark.parametrize("column", records.KEY)
def test_every_key_column_tells_rows_apart(column: str, tmp_path: Path) -> None:
    records.upsert(tmp_path, [row(), row(**{column: "something else"})])
    assert len(records.read_folder(tmp_path)) == 2


def test_what_is_measured_is_no_part_of_the_key() -> None:
    others = (*records.VALUES, *records.ORIGIN)
    assert records.key(row()) == records.key(row(**dict.fromkeys(others, "other")))


def test_a_row_with_other_columns_is_refused(tmp_path: Path) -> None:
    incomplete = row()
    del incomplete["status"]
    with pytest.raises(ValueError, match="exactly the columns"):
        records.upsert(tmp_path, [incomplete])


def test_two_rows_with_one_key_in_a_file_are_an_error(tmp_path: Path) -> None:
    (path,) = records.upsert(tmp_path, [row()])
    path.write_text(path.read_text() + path.read_text().splitlines()[1] + "\n")
    with pytest.raises(ValueError, match="two rows with one key"):
        records.read(path)


def test_files_with_other_columns_are_left_alone(tmp_path: Path) -> None:
    other = records.file_of(tmp_path, "lengths", "Test Device")
    other.write_text("a,b\n1,2\n")
    assert records.read_folder(tmp_path) == []
    with pytest.raises(ValueError, match="other columns"):
        records.upsert(tmp_path, [row()])
    assert other.read_text() == "a,b\n1,2\n"


def test_of_a_case_in_two_suites_the_later_figures_count() -> None:
    old, new = {"date": "2026-11-16"}, {"date": "2026-11-18"}
    rows = [
        row(**old, p50="1"), row(**old, metric="time, eager", p50="2"), row(**old, metric="memory", p50="3"),
        row(**old, N="128", p50="4"), row(**old, provider="other", p50="5"),
        row(suite="targets", **new, p50="6"), row(suite="targets", **new, metric="time, eager", p50="7"),
        row(suite="paper", **old, p50="8"),
    ]  # fmt: skip
    shown = [(r["suite"], r["metric"], r["p50"], r["date"]) for r in records.newest(rows)]
    assert shown == [
        ("lengths", "time", "6", "2026-11-18"),
        ("lengths", "time, eager", "7", "2026-11-18"),
        # The later run has no figure of memory, and an older one must not stand beside its times.
        ("lengths", "time", "4", "2026-11-16"),
        ("lengths", "time", "5", "2026-11-16"),
        ("targets", "time", "6", "2026-11-18"),
        ("targets", "time, eager", "7", "2026-11-18"),
        ("paper", "time", "6", "2026-11-18"),
    ]


def test_quantiles() -> None:
    samples = torch.rand(37, dtype=torch.float64).tolist()
    expected = torch.quantile(
        torch.tensor(samples, dtype=torch.float64), torch.tensor([0.2, 0.5, 0.8]).double()
    )
    assert records.quantiles(samples) == pytest.approx(expected.tolist())
    assert records.quantiles([3.0]) == (3.0, 3.0, 3.0)
    assert all(value != value for value in records.quantiles([1.0, float("nan")]))
    assert records.quantiles([float("inf")] * 4) == (float("inf"),) * 3


def test_committed_results_can_be_read() -> None:
    for path in records.RESULTS.glob("*.csv"):
        for one in records.read(path):
            assert path == records.file_of(records.RESULTS, one["suite"], one["device"])
            assert (one["status"] == "ok") == (one["p50"] != "") or one["status"] == "not finite"
            assert not re.search(r"/(home|root|work|tmp|Users)/", "".join(one.values()))


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))], ids=lambda p: p.name
)
def test_tables_in_documents_are_what_the_csv_says(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert tables.renew(text, records.read_folder(records.RESULTS)) == text


# The grids


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_no_case_twice(device: str, quick: bool) -> None:
    for suite in SUITES:
        cases = cases_of(suite, device, quick)
        assert cases
        assert len(set(cases)) == len(cases)


def test_the_papers_grid() -> None:
    cases = cases_of("paper", "cuda")
    assert {(c.batch, c.n, c.m, c.d, c.gamma, c.bandwidth) for c in cases} == {
        (batch, length, length, 64, 1.0, None) for batch in (16, 32) for length in (128, 512, 1024, 2048)
    }


def test_includes_asks_for_the_same_thing_at_no_smaller_size() -> None:
    small, large = Case("paper", 2, 64, 64, 8), Case("paper", 2, 128, 64, 8)
    assert large.includes(small)
    assert small.includes(small)
    assert not small.includes(large)
    assert not large.includes(Case("paper", 2, 64, 64, 8, dtype="bfloat16"))
    assert not large.includes(Case("paper", 2, 64, 64, 8, bandwidth=5))


def test_roof_at_the_known_size() -> None:
    least = least_seconds(GPUS["NVIDIA H200"], 32, 2048, 2048, 64, "float32")
    assert least["cells"] == pytest.approx(0.087e-3, rel=0.05)
    assert least["chain"] == pytest.approx(0.4e-3, rel=0.05)
    assert least["products"] == pytest.approx(3 * 17.2e9 / 989e12, rel=0.01)
    assert least_seconds(GPUS["NVIDIA H200"], 32, 2048, 2048, 64, "bfloat16")["products"] < least["products"]


# Providers


def test_checkouts_are_recognised(tmp_path: Path) -> None:
    for name, file in {
        "a": "soft_dtw_cuda.py",
        "b": "softdtw_cuda/autograd_xy.py",
        "c": "src/softdtw_cuda/_ops.py",
        "d": "pysdtw/__init__.py",
    }.items():
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).touch()
    found = {name: from_checkout(f"N={tmp_path / name}") for name in "abcd"}
    assert [p.adapter for p in found["a"]] == ["maghoumi"]
    assert [p.name for p in found["b"]] == ["N (fused)", "N (unfused)"]
    assert [p.name for p in found["c"]] == ["N (fused)", "N (cost matrix)"]
    assert [p.adapter for p in found["d"]] == ["pysdtw"]
    for wrong in ("N", f"N={tmp_path}", f"N={tmp_path / 'missing'}"):
        with pytest.raises(ValueError, match="--peer"):
            from_checkout(wrong)


def test_two_peers_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "soft_dtw_cuda.py").touch()
    assert main(["--quick", "--peer", f"A={tmp_path}", "--peer", f"A={tmp_path}"]) == 2
    assert "two providers are called 'A'" in capsys.readouterr().err


def test_command_hides_folders() -> None:
    given = ["run", "--peer", "BGU=/a/b", "--peer=X=/c", "--output", "/d", "--resume", "--seconds", "1"]
    assert command_line(given) == "python -m benchmarks run --peer BGU=PATH --peer=X=PATH --seconds 1"
    assert command_line([*given, "--no-progress", "--output=/e"]) == command_line(given)


# Failures are rows


@pytest.mark.slow
def test_a_failure_is_a_row_and_others_go_on(peer: Callable[[str], Provider]) -> None:
    expected = {
        "exits": ("crash", "exit status 7"),
        "raises": ("error", "ValueError: no such luck"),
        "needs too much": ("oom", "RuntimeError"),
        "does not start": ("error", "could not start: RuntimeError: nothing to import"),
    }
    # What a library prints is no answer, even when it looks like one.
    providers = [peer(name) for name in [*expected, "right", "prints"]]
    rows = measure(providers, [TINY, Case("paper", 2, 14, 12, 3)])
    for name, (status, note) in expected.items():
        bad = [r for r in rows if r["provider"] == name]
        assert [r["metric"] for r in bad] == ["time", "memory"] * 2
        assert all(r["p50"] == "" for r in bad)
        assert bad[0]["status"] == bad[1]["status"] == status
        assert bad[0]["note"].startswith(note)
        assert "second line" not in bad[0]["note"]
        # What did not fit is not tried again at a larger size; everything else is.
        assert bad[2]["status"] == ("skipped" if status == "oom" else status)
    for name in ("right", "prints"):
        good = [r for r in rows if r["provider"] == name]
        assert [r["status"] for r in good] == ["ok"] * 4
        assert all(float(r["p20"]) <= float(r["p50"]) <= float(r["p80"]) for r in good)
    assert len({records.key(r) for r in rows}) == len(rows)
    assert all(set(r) == set(records.COLUMNS) and r["device"] and r["torch"] for r in rows)


@pytest.mark.slow
def test_what_does_not_fit_beside_others_is_tried_alone(peer: Callable[[str], Provider]) -> None:
    rows = measure([peer("prints"), peer("is crowded out")], [TINY])
    assert {(r["provider"], r["status"]) for r in rows} == {("prints", "ok"), ("is crowded out", "ok")}


@pytest.mark.slow
@pytest.mark.usefixtures("order")
def test_too_long_is_a_row_and_larger_cases_are_skipped(peer: Callable[[str], Provider]) -> None:
    larger, other = Case("paper", 2, 20, 20, 3), Case("paper", 2, 12, 12, 3, dtype="float64")
    rows = measure([peer("sleeps"), peer("prints")], [TINY, larger, other], limit=3.0)
    times = [r for r in rows if r["metric"] == "time"]
    slow = [r for r in times if r["provider"] == "sleeps"]
    assert [r["status"] for r in slow] == ["timeout", "skipped", "timeout"]
    assert slow[0]["note"] == "over 3 s"
    assert slow[1]["note"] == "timeout at B=2 L=12 D=3"
    assert [r["status"] for r in times if r["provider"] == "prints"] == ["ok"] * 3


@pytest.mark.slow
def test_accuracy_knows_right_from_wrong(peer: Callable[[str], Provider]) -> None:
    cases = [Case("accuracy", 2, 24, 20, 3, gamma=gamma, kind=ACCURACY) for gamma in (0.1, 1.0)]
    rows = [r for r in measure([peer("right"), peer("is wrong")], cases) if r["metric"] == "gradient error"]
    errors = {(r["provider"], r["gamma"]): r for r in rows}
    for gamma in ("0.1", "1"):
        assert 0 < float(errors["right", gamma]["p50"]) < 1e-5
        assert errors["is wrong", gamma]["status"] == "not finite"
        assert 0 < float(errors[ROUNDING, gamma]["p50"]) < 1e-5


@pytest.mark.gpu
def test_on_a_gpu(peer: Callable[[str], Provider]) -> None:
    accuracy = Case("accuracy", 2, 40, 40, 20, gamma=0.1, kind=ACCURACY)
    settings = Settings(device="cuda", seconds=0.02, limit=60.0)
    providers = [*installed()[0][:2], peer("needs too much"), peer("exits")]
    with Runner(providers, settings) as runner:
        rows = runner.run([TINY, Case("targets", 2, 64, 64, 20, kind=HOST), accuracy], None, progress=False)
    assert {r["device"] for r in rows} == {torch.cuda.get_device_name()}
    for name in (OURS_FUSED, OURS_COST):
        mine = {(r["suite"], r["metric"]): r for r in rows if r["provider"] == name}
        assert {r["status"] for r in mine.values()} == {"ok"}
        assert mine["paper", "time"]["method"] == "CUDA graph"
        assert mine["paper", "time, eager"]["method"] == "CUDA events"
        assert mine["paper", "memory"]["method"] == "torch's peak"
        assert mine["targets", "host time"]["method"] == "wall clock"
        assert float(mine["accuracy", "gradient error"]["p50"]) < 1e-5
    statuses = {r["provider"]: r["status"] for r in rows if r["suite"] == "paper"}
    assert statuses["needs too much"] == "oom"
    assert statuses["exits"] == "crash"


# Plots and tables


def results(folder: Path) -> None:
    rows = []
    for length, provider, status in (
        (64, OURS_FUSED, "ok"),
        (128, OURS_FUSED, "ok"),
        (64, "peer", "ok"),
        (128, "peer", "oom"),
    ):
        for metric in ("time", "memory"):
            value = "" if status != "ok" else str(length / 7)
            rows.append(
                row(
                    N=str(length),
                    provider=provider,
                    metric=metric,
                    status=status,
                    p20=value,
                    p50=value,
                    p80=value,
                )
            )
    for gamma, d in ((g, d) for g in ("0.1", "1") for d in ("1", "64")):
        common = {"suite": "accuracy", "metric": "gradient error", "gamma": gamma, "D": d}
        rows += [row(**common, p50="1e-6", p20="1e-6", p80="2e-6"), row(**common, provider=ROUNDING)]
        rows.append(row(**common, provider="peer", status="not finite", p20="nan", p50="nan", p80="nan"))
    for dtype in ("float32", "bfloat16"):
        rows.append(row(suite="targets", device="NVIDIA H200", D="64", dtype=dtype))
    for mode, d in itertools.product((FORWARD, FORWARD_BACKWARD), ("1", "32")):
        size = {"B": "512", "N": "1024", "M": "1024", "D": d}
        rows.append(row(suite="throughput", device="NVIDIA H200", mode=mode, p50="10", **size))
    for mode, provider in itertools.product((*SECOND_ORDER, FORWARD_BACKWARD), (OURS_FUSED, "philtorch")):
        rows.append(row(suite="second_order", device="NVIDIA H200", mode=mode, provider=provider))
    records.upsert(folder, rows)
    columns = ["gamma", "what", "error", "rounding", "theirs", "device"]
    with (folder / "error_budget_second_order_cuda.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerow([0.1, "hvp", 1e-9, 1e-7, 1e-3, "NVIDIA H200"])
        writer.writerow([0.1, "expected", 1e-6, 1e-7, "nan", "NVIDIA H200"])


def test_plots_come_from_the_csv_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results(tmp_path)
    assert main(["plot", "--results", str(tmp_path), "--output", str(tmp_path / "plots")]) == 0
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    h200 = ("roofline", "throughput", "second-order", "second-order-errors")
    stems = ("lengths-test-device", "accuracy-test-device", *(f"{name}-nvidia-h200" for name in h200))
    assert names == {f"{stem}{suffix}" for stem in stems for suffix in (".png", ".svg")}
    svg = (tmp_path / "plots" / "lengths-test-device.svg").read_text()
    for text in ("this library", "peer: out of memory at L = 128", "Test Device", "time (ms)"):
        assert text in svg
    assert "NaN or inf" in (tmp_path / "plots" / "accuracy-test-device.svg").read_text()
    assert len(capsys.readouterr().out.splitlines()) == 2 * len(stems)
    # 512 pairs of 1024 steps in 10 ms: 5.4e10 cells a second, of at most 1.5e12 by instructions.
    assert ">3%<" in (tmp_path / "plots" / "throughput-nvidia-h200.svg").read_text()
    assert "philtorch" in (tmp_path / "plots" / "second-order-nvidia-h200.svg").read_text()


def test_throughput_of_a_cpu_stands_beside_what_its_loops_reach(tmp_path: Path) -> None:
    rates = {"instructions": 200.0, "multiply-adds": 110.0, "memory": 5.0}
    peaks = [("machine", "", name, value, "") for name, value in rates.items()]
    times = [
        (f"throughput B=512 L=128 D={d}", "softdtw_cuda", mode, 10.0, "ms")
        for mode, d in itertools.product((FORWARD, FORWARD_BACKWARD), (1, 3, 64))
    ]
    with (tmp_path / "cpu.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["device", *cpu_targets.Row._fields])
        writer.writerows(["Some CPU, 2 threads", *each] for each in (*peaks, *times))
    plots.draw_cpu_throughput(tmp_path / "cpu.csv", tmp_path)
    svg = (tmp_path / "throughput-some-cpu-2-threads.svg").read_text()
    # 8.4e6 cells of 168 instructions, 200e9 a second, take 7.05 ms; in both passes 67 MB at 5 GB/s 13.4 ms.
    cpu = Cpu(*(1e9 * each for each in rates.values()))
    for backward, slowest, least in ((False, "instructions", 7.05e-3), (True, "memory", 13.42e-3)):
        seconds = least_cpu_seconds(cpu, 512, 128, 128, 64, backward)
        assert max(seconds, key=lambda name: seconds[name]) == slowest
        assert seconds[slowest] == pytest.approx(least, rel=1e-3)
    assert ">70%<" in svg
    assert ">134%<" in svg


def test_figures_of_a_cpu_are_kept_from_one_run_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cpu_targets", "--only", "memory", "--write"])
    with pytest.raises(SystemExit):
        cpu_targets.main()
    assert "--only" in capsys.readouterr().err
    monkeypatch.setattr(cpu_targets, "RESULTS", tmp_path / "cpu.csv")
    for name in ("old", "new"):
        cpu_targets.write([cpu_targets.Row(name, "softdtw_cuda", "forward", 1.0, "ms")], 2)
    text = (tmp_path / "cpu.csv").read_text()
    assert "new" in text
    assert "old" not in text


def test_a_provider_looks_the_same_in_every_plot() -> None:
    looks = [plots.style(name) for name in plots.STYLES]
    assert len(set(looks)) == len(looks)
    assert len({colour for colour, _ in looks}) == len(looks)
    assert plots.style("someone else") == plots.style("someone else")


def test_what_is_below_the_range_is_marked(tmp_path: Path) -> None:
    common = {"metric": "memory", "p20": "0", "p80": "1", "unit": "MiB"}
    rows = [row(N="64", **common, p50="0.01"), row(N="128", **common, p50="1"), row(N="64"), row(N="128")]
    plots.draw_all(rows, tmp_path)
    assert "less than 0.1" in (tmp_path / "lengths-test-device.svg").read_text()
    plots.draw_all([one | {"p50": "1"} for one in rows], tmp_path)
    assert "less than" not in (tmp_path / "lengths-test-device.svg").read_text()


def test_lines_on_each_other_are_named(tmp_path: Path) -> None:
    def curve(provider: str, value: float) -> list[records.Row]:
        sizes = {"suite": "accuracy", "metric": "gradient error", "N": "64", "D": "1"}
        numbers = dict.fromkeys(("p20", "p50", "p80"), str(value))
        return [row(**sizes, **numbers, provider=provider, gamma=gamma) for gamma in ("0.1", "1")]

    same = [*curve(OURS_FUSED, 1e-7), *curve("BGU (fused)", 1e-3), *curve("pysdtw", 1.1e-3)]
    for rows, named in ((same, True), ([*same[:4], *curve("pysdtw", 1e-1)], False)):
        plots.draw_all(rows, tmp_path)
        drawn = (tmp_path / "accuracy-test-device.svg").read_text()
        assert (">on one line:<" in drawn and ">BGU (fused), pysdtw<" in drawn) == named
        assert ">pysdtw<" in drawn  # in the legend


def test_who_cannot_run_a_suite_is_no_line_of_its_plots(tmp_path: Path) -> None:
    never = [row(provider="BGU (fused)", N=n, status="unsupported", p50="") for n in ("64", "128")]
    once = [row(provider="pysdtw"), row(provider="pysdtw", N="128", status="unsupported", p50="")]
    plots.draw_all([row(), row(N="128"), *never, *once], tmp_path)
    drawn = (tmp_path / "lengths-test-device.svg").read_text()
    assert "BGU (fused)" not in drawn
    assert "pysdtw: unsupported at L = 128" in drawn


def test_bare_plot_leaves_the_pages_pictures_alone() -> None:
    options = parser().parse_args(["plot"])
    assert "docs" not in options.output.relative_to(ROOT).parts


def test_no_plot_without_this_library(tmp_path: Path) -> None:
    plots.draw_all([row(provider="peer"), row(provider="peer", N="128"), row(status="oom", p50="")], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sizes", [1, 4])
def test_second_order_has_room_for_few_sizes(sizes: int) -> None:
    """No letters lie on others."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    rows = [
        row(suite="second_order", mode=mode, provider=name, B=str(b), N=str(64 * b), p50=str(time * b))
        for b in range(1, sizes + 1)
        for mode in (*SECOND_ORDER, FORWARD_BACKWARD)
        for name, time in ((OURS_FUSED, 1.3), ("philtorch", 2.9))
    ]
    with pyplot.rc_context(plots.SETTINGS):
        figure = plots._second_order(rows, "Some device")
        figure.draw_without_rendering()
    texts = [each for each in figure.findobj(pyplot.Text) if each.get_visible() and each.get_text().strip()]
    assert {"B = 1, L = 64", "this library", "time (ms)"} <= {each.get_text() for each in texts}
    for one, other in itertools.combinations(texts, 2):
        assert not one.get_window_extent().overlaps(other.get_window_extent()), (one, other)
    for above, below in itertools.pairwise(figure.axes):
        assert not below.title.get_window_extent().overlaps(above.get_window_extent())
        assert below.get_window_extent().height > 0.4 * figure.dpi
    assert len(figure.axes[-1].get_xticks()) >= 2
    pyplot.close(figure)


def test_limits_look_like_no_provider() -> None:
    """A limit is a dark line; the second type of a provider is a hollow marker of its colour."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    size = {"suite": "targets", "B": "32", "N": "512", "M": "512", "D": "64", "p50": "0.3"}
    rows = [row(**size), row(**size, dtype="bfloat16")]
    figure = plots._roofline(rows, "NVIDIA H200")
    colours = {line.get_color() for line in figure.axes[0].get_lines()}
    assert colours == {plots.STYLES[OURS_FUSED][0], INK, PALE}
    assert INK not in {colour for colour, _ in plots.STYLES.values()}
    faces = {line.get_markerfacecolor() for line in figure.axes[0].get_lines() if line.get_marker() == "o"}
    assert faces == {plots.STYLES[OURS_FUSED][0], "white"}
    pyplot.close(figure)


def test_names_of_lines_do_not_overlap() -> None:
    wanted = [0.0, 1.0, 2.0, 50.0, 51.0, 100.0]
    placed = _apart(wanted, 10.0)
    assert all(b - a >= 10.0 - 1e-9 for a, b in itertools.pairwise(placed))
    assert placed == pytest.approx([-9.0, 1.0, 11.0, 45.5, 55.5, 100.0])
    crowded = _apart([float(i) for i in range(9)], 3.0)
    assert sum(crowded) / 9 == pytest.approx(4.0)


def test_plot_without_results_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "--results", str(tmp_path)]) == 2
    assert "measure first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.84e-7, "1.8e-7"), (9.96e-8, "1.0e-7"), (160.0, "1.6e2"), (1.3e-12, "1.3e-12"), (0.0, "0")],
)
def test_errors_are_short_enough_for_a_phone(value: float, text: str) -> None:
    assert tables.figure(row(metric="gradient error", p50=str(value))) == text


def test_a_compact_table_leaves_out_who_has_no_number() -> None:
    launch = {"status": "error", "p50": "", "note": "CUDAError: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: This"}
    old, new = {"torch": "2.6.0+cu124"}, {"torch": "2.11.0+cu130"}
    rows = [
        row(provider=ROUNDING), row(provider="Maghoumi"), row(provider=OURS_COST), row(),
        row(N="128"), row(N="128", provider="Maghoumi", **launch, **new),
        row(provider="BGU (unfused)", **launch, **new), row(provider="pysdtw", **launch, **old),
        row(provider="tslearn", status="oom", p50="", note="CUDA out of memory."),
        row(provider="aeon", status="oom", p50="", note="CUDA out of memory."),
    ]  # fmt: skip
    lines = tables.compact(rows, "lengths", "time", "Test Device").splitlines()
    # This library first, what is no library last.
    assert lines[0] == "| L | this library | cost matrix | Maghoumi | float32 costs |"
    assert lines[3] == "| 128 | 1 |  | \u2013¹ |  |"
    assert "¹ a Numba kernel of the library does not launch under CUDA 13 (LAUNCH_OUT_OF_RESOURCES)." in lines
    (theirs,) = (line for line in lines if line.startswith("No number for BGU unfused:"))
    assert "under CUDA 13 (LAUNCH_OUT_OF_RESOURCES), and its authors support CUDA 12.6 at most." in theirs
    (other,) = (line for line in lines if line.startswith("No number for pysdtw:"))
    assert "under CUDA 12 (LAUNCH_OUT_OF_RESOURCES)." in other
    assert "No number for tslearn and aeon: does not fit the card's memory." in lines


def test_table_shows_medians_and_failures(tmp_path: Path) -> None:
    results(tmp_path)
    rows = records.read_folder(tmp_path)
    lines = tables.markdown(rows, "lengths", "both", "Test Device").splitlines()
    assert lines[0] == f"| B | L | {OURS_FUSED} | peer |"
    assert lines[2:] == [
        "| 4 | 64 | 9.14 ms, 9.1 MiB | 9.14 ms, 9.1 MiB |",
        "| 4 | 128 | 18.3 ms, 18 MiB | oom |",
    ]
    document = tmp_path / "page.md"
    document.write_text("a\n<!-- benchmark: lengths time Test Device -->\nold\n<!-- end benchmark -->\nb\n")
    assert main(["table", "--results", str(tmp_path), "--write", str(document)]) == 0
    text = document.read_text()
    assert "| 4 | 128 | 18.3 ms | oom |" in text
    assert "old" not in text
    assert tables.renew(text, rows) == text
    with pytest.raises(ValueError, match="no memory of suite paper"):
        tables.markdown(rows, "paper", "memory", "Test Device")


# The command


def test_help_names_every_suite() -> None:
    for arguments, expected in (([], ["run", "plot", "table"]), (["run"], list(SUITES))):
        command = [sys.executable, "-m", "benchmarks", *arguments, "--help"]
        shown = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        ).stdout
        assert all(name in shown for name in expected)


@pytest.mark.slow
def test_small_run_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "--quick",
        "--device",
        "cpu",
        "--suite",
        "dimensions",
        "--only",
        "this library",
        "--threads",
        "1",
    ]
    command += ["--seconds", "0.02", "--output", str(tmp_path), "--no-progress"]
    assert main(command) == 0
    rows = records.read_folder(tmp_path)
    assert {(r["provider"], r["metric"]) for r in rows} == {
        (provider, metric) for provider in (OURS_FUSED, OURS_COST) for metric in ("time", "memory")
    }
    for one in rows:
        assert one["status"] == "ok"
        assert one["command"] == (
            "python -m benchmarks run --quick --device cpu --suite dimensions --only this library "
            "--threads 1 --seconds 0.02"
        )
    output = capsys.readouterr().out
    assert "### dimensions: time" in output
    (picture,) = re.findall(r"^  (.*\.png)$", output.split("pictures:")[1], re.MULTILINE)
    assert Path(picture).parent == tmp_path
    assert Path(picture).read_bytes().startswith(b"\x89PNG")
    assert f"CSV files: {tmp_path}\n" in output
    assert output.splitlines()[-1].startswith(f"{len(rows)} rows, 0 failures, 0 unsupported, in ")
    assert main([*command, "--resume"]) == 0  # the same command: nothing is left
    output = capsys.readouterr().out
    assert "2 cases on cpu, 2 of them measured before" in output
    assert "0 rows, " in output.splitlines()[-1]
    assert records.read_folder(tmp_path) == rows


def test_this_library_needs_no_path() -> None:
    assert [p.name for p in installed()[0]][:2] == [OURS_FUSED, OURS_COST]


def test_whole_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # the second run replaces the rows of the first
        assert scale.main(["--quick", "--device", "cpu", "--write", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("scale-*.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    shown = capsys.readouterr().out
    names = [row["job"] for row in rows]
    for job in scale.QUICK:
        assert names.count(job.name) == (2 if job.kind == "cdist" else 1) or f"{job.name}: left out" in shown
    for row in rows:
        assert float(row["seconds"]) > 0
        assert row["command"] == "python -m benchmarks.scale --device cpu --share 0.1 --quick --write"
    assert records.read(path) == []


def test_a_share_of_a_search_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the queries is computed, and the time of that times ten stands for all of them."""
    seen = []

    def count(queries: torch.Tensor, database: torch.Tensor, *_: object, **__: object) -> None:
        seen.append(len(queries))

    monkeypatch.setattr(scale, "softdtw_knn", count)
    monkeypatch.setattr(scale, "measure", lambda call: [call(None) or 0.5])
    monkeypatch.setattr(scale, "cells", lambda job: 2 * 10**14 if job.name == "large" else 1)
    job = scale.Job("large", "knn", 400, 30, 8)
    (row,) = scale.run([job], "cpu", 0.1)
    assert seen == [40]
    assert (row.seconds, row.share) == ("5", "0.1")
    (row,) = scale.run([job._replace(name="small")], "cpu", 0.1)
    assert seen == [40, 400]
    assert (row.seconds, row.share) == ("0.5", "1")


# Everything again, before a release


def step(part: str, *command: str, limit: float = 60.0) -> release.Step:
    return release.Step(part, command, limit)


def test_a_part_that_fails_or_takes_too_long_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    sleep = ("timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)")
    todo = [
        step("sleeps", *sleep, limit=2.0),
        step("fails", "no_such_module"),
        step("works", "timeit", "-n", "1", "-r", "1", "pass"),
    ]
    start = time.perf_counter()
    outcomes = list(release.run(todo, 120.0, tmp_path))
    assert time.perf_counter() - start < 60
    assert [each.state for each in outcomes] == ["out of time (2 s)", "failed, status 1", "finished"]
    assert "no_such_module" in outcomes[1].said
    assert outcomes[2].said.startswith("1 loop")
    shown = release.summary(outcomes, tmp_path).splitlines()
    assert [line.split()[0] for line in shown[1:4]] == ["sleeps", "fails", "works"]
    assert "0 of 0 figures of today meet their target" in shown


def test_what_there_is_no_time_for_is_not_started(tmp_path: Path) -> None:
    (outcome,) = release.run([step("late", "no_such_module")], 1.0, tmp_path)
    assert outcome.state == "not started, no time left"
    assert not outcome.is_finished


def test_a_part_ends_with_what_it_has_started(tmp_path: Path) -> None:
    """A worker of a command that runs out of time must not go on beside the next part."""
    (tmp_path / "starts_another.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = step("both", "cProfile", str(tmp_path / "starts_another.py"))
    outcome = release.perform(command, 3.0, tmp_path / "log")
    assert outcome.state == "out of time (3 s)"
    until = time.perf_counter() + 10
    status = Path(f"/proc/{int(outcome.said)}/stat")
    while status.exists() and ") Z " not in status.read_text() and time.perf_counter() < until:
        time.sleep(0.05)
    assert not status.exists() or ") Z " in status.read_text()


def test_missed_targets_are_named(tmp_path: Path) -> None:
    today = datetime.date.today().isoformat()
    size = {"suite": "targets", "B": "32", "N": "128", "M": "128", "D": "64", "date": today}
    graph = {"method": "CUDA graph"}
    rows = [row(**size, **graph, p50="0.07"), row(**size, **graph, provider=OURS_COST, p50="9")]
    records.upsert(tmp_path, [*rows, row(**size, device="Some CPU", method="wall clock", p50="9")])
    job = scale.CUDA[0]
    about = {"date": today, "device": "Some GPU", "versions": "v", "command": "python --device cuda"}
    scale.write([scale.row_of(job, "softdtw_cdist", 1, 1.0, 1)], about, tmp_path)
    scale.write([scale.row_of(job, "distributed.cdist", 1, 9.0, 1)], about | {"date": "2026-01-01"}, tmp_path)
    case = Errors(8, 8, 1, 0.0, 0.1, 1e-9, 2e-5, 0.0)
    records.replace(tmp_path / "error_budget_cuda.csv", [row_of(case, about)], KEY[:5])
    ratio = {"call": "fixed", "ratio": "3.2", "microseconds": "1", "torch_microseconds": "1", **about}
    records.replace(tmp_path / "host-time-some-gpu.csv", [ratio], ("call",))
    shown = release.summary([], tmp_path)
    assert "1 of 4 figures of today meet their target" in shown  # all pairs of 10,000 in 1.0 s
    for missed in ("B = 32, L = 128, D = 64, ms: 0.07, target 0.06", "host time, fixed: 3.2, target 3"):
        assert f"missed: {missed}" in shown
    assert "missed: gradient, n = 8, m = 8, d = 1, offset = 0.0, gamma = 0.1: 2e-05, target 1e-05" in shown


def test_the_parts_cover_every_suite_within_half_an_hour(tmp_path: Path) -> None:
    steps = list(release.steps("cuda", ["X=PATH"], False, tmp_path))
    suites = [word for each in steps for word in each.command if word in SUITES]
    assert sorted(suites) == sorted(SUITES)
    assert sum(each.limit for each in steps) <= 30 * 60
    assert max(each.limit for each in steps) <= 10 * 60
    assert {each.part for each in steps} >= {"errors", "second-order-errors", "jobs", "host"}
    beside = [each for each in steps if {"paper", "lengths", "extensions", "accuracy"} & set(each.command)]
    assert len(beside) == 3
    for each in beside:  # the same libraries and limits
        assert "X=PATH" in each.command
        assert each.command[each.command.index("--limit") + 1] == "6"
    assert main(["release", "--parts", "nonsense", "--device", "cpu"]) == 2


@pytest.mark.slow
def test_release_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["release", "--device", "cpu", "--quick", "--parts", "second-order", "jobs", "--minutes", "4"]
    command += ["--output", str(tmp_path / "results"), "--logs", str(tmp_path / "logs")]
    states = []
    for _ in range(2):
        status = main(command)
        shown = capsys.readouterr().out
        assert status == 0, shown
        states.append({path.name: path.read_text() for path in (tmp_path / "results").glob("*.csv")})
    assert states[0] == states[1]  # the second run measured nothing again
    assert "0 rows, 0 failures" in shown
    assert {"second-order", "jobs"} <= {line.split(" ")[0] for line in shown.splitlines() if line}
