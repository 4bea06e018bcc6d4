"""Every test runs on the CPU and, under the marker `gpu`, on CUDA; fresh memory is full of NaN."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    # pyproject.toml sets a time limit for pytest-timeout. A GPU machine may lack that plugin, and without it
    # pytest would refuse the setting.
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "seconds; ignored without pytest-timeout")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    user, system = sum(each.ru_utime for each in used), sum(each.ru_stime for each in used)
    terminalreporter.write_line(
        f"CPU time: {user + system:.0f} s ({user:.0f} s user, {system:.0f} s system), with child processes"
    )


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU kernels cut every pair into tiles of 32 x 32 cells: small problems have several, too."""
    pytest.importorskip("numba")
    from softdtw_cuda._cpu import config, problem

    monkeypatch.setattr(config, "LARGEST_TILE", 0)
    monkeypatch.setattr(config, "TILE", 32)
    problem._tiles.cache_clear()
    yield
    problem._tiles.cache_clear()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    # Fake tensors have no memory; a fill would only enter the graph being traced.
    if type(tensor) is torch.Tensor and not tensor.requires_grad and not torch._C._len_torch_dispatch_stack():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


class _PoisonedNumpy:
    """numpy, but np.empty is full of NaN."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def empty(*args: Any, **kwargs: Any) -> np.ndarray:
        array = np.empty(*args, **kwargs)
        array.fill(np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max)
        return array


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output or a scratch cell that no kernel writes shows as NaN instead of as luck."""

    def poisoned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: _poison(function(*args, **kwargs))

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    monkeypatch.setattr(torch.Tensor, "new_empty_strided", poisoned(torch.Tensor.new_empty_strided))
    if importlib.util.find_spec("numba") is not None:
        from softdtw_cuda._cpu import dual_launch, launch, problem, scratch

        # The launcher's own names only: Numba must keep recognising numpy's functions.
        for module in (dual_launch, launch, problem, scratch):
            monkeypatch.setattr(module, "np", _PoisonedNumpy())
