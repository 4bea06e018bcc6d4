"""Calls without a gradient, on the emulator: a buffer that saves nothing has room for less."""

from __future__ import annotations

import pytest
import torch

from softdtw_cuda._cuda import launch
from softdtw_cuda._problem import NO_BAND, Problem
from tests.cuda.emulated_gpu import EmulatedGpu

pytestmark = pytest.mark.slow  # building its kernels for the emulator takes minutes


@pytest.mark.parametrize("steps", [3, 150])
@pytest.mark.parametrize("is_cost", [False, True])
def test_samples_beyond_the_narrow_range(steps: int, is_cost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three samples is flagged and computed again, whether there is a gradient or not."""
    x = torch.randn(3, steps, 1, generator=torch.Generator().manual_seed(0))
    y = torch.randn(3, steps, 1, generator=torch.Generator().manual_seed(1))
    x[1] *= 1e5
    cost = (x - y.transpose(1, 2)).square()
    side, other = (cost, None) if is_cost else (x, y)
    problem = Problem(side, other, None, None, 1e-2, NO_BAND)
    for seed in range(3):
        monkeypatch.setattr(launch, "gpu", EmulatedGpu(seed))
        with_gradient, _ = launch.forward(problem._replace(need_x=True))
        value, _ = launch.forward(problem)
        assert torch.isfinite(value).all()
        torch.testing.assert_close(value, with_gradient, rtol=1e-6, atol=0)
