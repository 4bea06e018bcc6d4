"""Debug builds: a wait that takes too long ends the launch, and says who waits for whom."""

from __future__ import annotations

import ctypes

import pytest
import torch

from softdtw_cuda._cuda import config, launch
from softdtw_cuda._problem import Problem
from tests.cuda.emulated_gpu import EmulatedGpu
from tests.cuda.emulator import EmulationError

pytestmark = pytest.mark.slow  # building its kernels for the emulator takes minutes


class LosesTheFirstTicket(EmulatedGpu):
    """Nobody walks the first strip, so that the next one waits for ever."""

    def fill_with_ones(self, address: int, count: int) -> None:
        super().fill_with_ones(address, count)
        ctypes.c_uint32.from_address(address).value = 0


def run(monkeypatch: pytest.MonkeyPatch, d: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(config, "weakest_device", config.Device)
    monkeypatch.setattr(launch, "gpu", LosesTheFirstTicket(0))
    x = torch.zeros(1, 100, d, dtype=dtype)
    launch.forward(Problem(x, x, None, None, 1.0, -1))


@pytest.mark.parametrize(
    ("source", "d", "dtype"),
    [("univariate", 1, torch.float32), ("tiled", 3, torch.float32), ("wide", 2, torch.float64)],
)
def test_who_waits_for_whom(source: str, d: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTDTW_CUDA_POLL_LIMIT", "20")
    message = rf"{source} kernel, pair 0, strip 1, block \d+, warp 0, .* waits for the row above: strip 0 of"
    with pytest.raises(EmulationError, match=message):
        run(monkeypatch, d, dtype)


def test_ordinary_builds_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOFTDTW_CUDA_POLL_LIMIT", raising=False)
    with pytest.raises(EmulationError, match="deadlock"):
        run(monkeypatch, 1, torch.float32)
