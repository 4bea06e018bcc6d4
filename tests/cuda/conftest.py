"""Kernels are compiled by NVRTC from the first test of this folder on, beside tests that leave cores idle."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from softdtw_cuda._cuda.config import Device
from tests.cuda.nvrtc_usage import Compilations, compiled

FOLDER = Path(__file__).parent
BUILD_LIMIT_S = 1200
"""The first test of a file builds its kernels: minutes, and more than the limit of pyproject.toml where the
machine is busy."""


@pytest.hookimpl(tryfirst=True)  # before deselection by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A kernel takes the compiler ten seconds; the quick suite emulates two kinds, in float32, on one GPU."""
    has_limits = importlib.util.find_spec("pytest_timeout") is not None
    for item in items:
        if item.path.name == "test_kernels_emulated.py":
            case = getattr(item, "callspec", None) and item.callspec.params.get("case")  # type: ignore[attr-defined]
            if case is None or not _is_quick(case):
                item.add_marker(pytest.mark.slow)
        if FOLDER in item.path.parents and item.get_closest_marker("slow") and has_limits:
            item.add_marker(pytest.mark.timeout(BUILD_LIMIT_S))


def _is_quick(case: Any) -> bool:
    return (
        case.d in (0, 5)
        and case.dtype == torch.float32
        and case.device == Device()
        and case.bandwidth < 0
        and not case.races
        and case.n * case.m <= 20_000
    )


@pytest.fixture(scope="session", autouse=True)
def compilations(request: pytest.FixtureRequest) -> Iterator[Compilations]:
    """What the selected tests of test_nvrtc.py want; they take it as it comes."""
    items = [item for item in request.session.items if item.path.name == "test_nvrtc.py"]
    specs = [spec for item in items if (spec := getattr(item, "callspec", None)) is not None]
    asked = [
        (spec.params["architecture"], spec.params["kernel"], part)
        for spec in specs
        if "kernel" in spec.params
        for part in spec.params["kernel"].parts
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {each: pool.submit(compiled, *each) for each in asked}
        pool.shutdown(cancel_futures=True)
