"""tools/compare_speed.py: medians of paired ratios, what counts as slower, and a small run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.cases import Case
from tools import compare_speed
from tools.compare_speed import Comparison, Timing, table

ROOT = Path(__file__).resolve().parent.parent
CASE = Case("targets", 2, 12, 12, 3)


def comparison(*rounds: tuple[float | None, float | None]) -> Comparison:
    return Comparison(CASE, [(Timing(before, "oom: "), Timing(after, "oom: ")) for before, after in rounds])


def test_the_ratio_is_that_of_a_round() -> None:
    """The machine slows down between rounds: medians of either side would say half or twice as much."""
    drifting = comparison((1.0, 1.01), (2.0, 2.02), (4.0, 4.04))
    assert drifting.ratios == pytest.approx([1.01] * 3)
    assert not drifting.is_worse(3.0)
    assert drifting.is_worse(0.5)
    assert "1.010" in table([drifting], 3.0)
    assert "slower" not in table([drifting], 3.0)


def test_one_slow_round_is_no_verdict() -> None:
    assert not comparison((1.0, 1.0), (1.0, 9.0), (1.0, 1.0)).is_worse(3.0)
    assert "slower" in table([comparison((1.0, 1.2), (1.0, 0.9), (1.0, 1.1))], 3.0)


def test_a_failure_is_worse_where_the_revision_has_a_time() -> None:
    broken = comparison((1.0, None), (1.0, None))
    assert broken.is_worse(3.0)
    assert "after: oom" in table([broken], 3.0)
    assert not comparison((None, 1.0)).is_worse(3.0)
    assert not comparison((None, None)).is_worse(3.0)
    assert comparison((1.0, None), (1.0, 1.1)).ratios == [1.1]


def test_a_suite_without_cases_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_speed.main(["HEAD", "--device", "cpu", "--only", "no such case"])
    assert "leaves no case" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs the repository's history"
)
def test_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    git = ["git", "-C", str(ROOT), "worktree", "list"]
    before = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    command = ["HEAD", "--device", "cpu", "--quick", "--only", "B=4", "--rounds", "2", "--seconds", "0.05"]
    compare_speed.main([*command, "--limit", "100000"])
    printed = capsys.readouterr().out
    assert "targets: B=4 L=256 D=64" in printed
    assert "0 of 1 are slower" in printed
    assert subprocess.run(git, capture_output=True, text=True, check=True).stdout == before
