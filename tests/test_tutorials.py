"""The tutorials: saved with the outputs of one execution, small, and still true when executed again."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
LARGEST = 400_000
"""Bytes of a notebook, pictures included."""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(notebook: Any) -> str:
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


def check(name: str, output: str) -> None:
    """What the text around the outputs claims."""
    output = f"\n{output}"

    def number(pattern: str) -> float:
        found = re.search(pattern, output)
        assert found is not None, output
        return float(found[1])

    if name == "forecaster":
        rows = {
            loss: [number(rf"\n{loss}{' +[0-9.]+' * column} +([0-9.]+)") for column in range(2)]
            for loss in ("squared error", "Soft-DTW divergence", "DILATE")
        }
        best_squared, worst_shape = rows["squared error"]
        for loss in ("Soft-DTW divergence", "DILATE"):
            squared, shape = rows[loss]
            assert shape < 0.9 * worst_shape
            assert 1.5 * best_squared < squared < 3 * best_squared
    elif name == "ucr_series":
        assert number(r"neighbour, divergence: (\d+)%") >= 97 > number(r"neighbour, Euclidean: +(\d+)%")
        assert number(r"barycenters, divergence: (\d+)%") >= 95
        assert number(r"means, Euclidean: +(\d+)%") < 70
        assert (
            0.7 < number(r"Rand index against the classes: ([\d.]+)") < 0.95
        )  # two classes are one to k-means
    elif name == "recordings":
        assert number(r"to the barycenter ([\d.]+)") < 0.5 * number(r"to the mean ([\d.]+)")
        person = number(r"barycenter, divergence +(\d+)% of the recordings")
        assert person > number(r"Euclidean distance +(\d+)% of the recordings")
        assert person > number(r"mean, divergence +(\d+)% of the recordings")
        assert number(r"nearest barycenter, divergence: (\d+)%") >= 95
    else:
        raise AssertionError(f"nothing is checked about {name}")


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["forecaster", "recordings", "ucr_series"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_outputs(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < LARGEST
    notebook = json.loads(text)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.get("name", "stdout") == "stdout" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert not re.search(r"/(home|root|Users|tmp)/", printed(notebook))
    check(path.stem, printed(notebook))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the packages that run kernels
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_executed_again(path: Path) -> None:
    """In a fresh kernel. Data that cannot be found is a failure, not a reason to skip."""
    check(path.stem, printed(load(ROOT / "tools" / "notebooks.py").execute(path)))
