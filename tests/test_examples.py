"""Every example runs, shows what it says it shows, and leaves a picture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ucr_data

ROOT = Path(__file__).parent.parent
SMALLER = {
    "alignment": [],
    "barycenter": ["--iterations", "30"],
    "classification": ["--test", "60"],
    "clusters": ["--starts", "2"],
    "dilate": ["--steps", "150", "--seeds", "1"],
    "forecasting": ["--steps", "400"],
    "learned_alignment": ["--steps", "60"],
    "speech_training": ["--steps", "25"],
}


def numbers(output: str, pattern: str) -> list[float]:
    found = re.search(pattern, output, re.MULTILINE)
    assert found is not None, output
    return [float(group) for group in found.groups()]


def check(name: str, output: str) -> None:
    """A small run still has to show what the example is about."""
    if name == "alignment":
        sharp, soft = (numbers(output, rf"^ +{gamma} +\S+ +(\d+)")[0] for gamma in (r"0\.001", "1"))
        assert 120 <= sharp < soft / 2  # cells that paths visit; no path has fewer than the longer series
    elif name == "barycenter":
        (washed_out,) = numbers(output, r"Euclidean mean +([\d.]+)")
        (sharp,) = numbers(output, r"Soft-DTW 0\.1 +([\d.]+)")
        assert washed_out < 0.7
        assert 0.95 < sharp < 1.1  # as high as the waves themselves
    elif name == "classification":
        (euclidean,) = numbers(output, r"Euclidean distance: +([\d.]+) %")
        (warped,) = numbers(output, r"Soft-DTW barycenter.*: +([\d.]+) %")
        assert warped >= 85
        assert warped > euclidean
    elif name == "clusters":
        (score,) = numbers(output, r"^Rand index .*: ([\d.]+),")
        assert score > 0.8
    elif name == "dilate":
        _, warped_shape, warped_timing = numbers(output, r"^Soft-DTW +([\d.]+) ±\S+ +([\d.]+) ±\S+ +([\d.]+)")
        _, shape, timing = numbers(output, r"^DILATE +([\d.]+) ±\S+ +([\d.]+) ±\S+ +([\d.]+)")
        assert timing < 0.8 * warped_timing
        assert warped_shape < shape
    elif name == "forecasting":
        (ramp,) = numbers(output, r"^squared error .* ([\d.]+)x$")
        (jump,) = numbers(output, r"^Soft-DTW .* ([\d.]+)x$")
        assert jump > 2 * ramp
    elif name == "learned_alignment":
        (channels,) = numbers(output, r"^all channels +([\d.]+) %")
        (trained,) = numbers(output, r"^trained features +([\d.]+) %")
        assert trained < 0.5 * channels
    else:
        first, last = numbers(output, r"loss ([\d.]+) -> ([\d.]+)")
        assert last < 0.4 * first


def test_every_example_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*SMALLER, "demo"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLER)
def test_example(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    if name == "clusters":
        try:
            ucr_data.load("Trace")
        except ucr_data.DataNotFound as error:
            pytest.skip(str(error))
    folder = tmp_path / "pictures"
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--out", str(folder), *SMALLER[name]],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))},
    )
    assert result.returncode == 0, result.stderr
    picture = folder / f"{name}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
    assert f"picture: {picture}" in result.stdout
    check(name, result.stdout)
