"""Kernels are compiled by NVRTC from the first test of this folder on, beside tests that leave cores idle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cuda.nvrtc_usage import Compilations, compiled


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
