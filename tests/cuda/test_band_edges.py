"""Paths along the edge of a band, where strips and checkpoints meet it; random costs hide such faults."""

from __future__ import annotations

import pytest
import torch

from softdtw_cuda import _reference, softdtw
from softdtw_cuda._cuda import launch
from softdtw_cuda._problem import Problem
from tests.cuda.emulated_gpu import EmulatedGpu

pytestmark = pytest.mark.slow  # building its kernels for the emulator takes minutes


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpu", EmulatedGpu(0))


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize(
    ("n", "bandwidth"), [(300, 0), (80, 1), (140, 1), (140, 64), (140, 65), (260, 96), (260, 33)]
)
def test_cost_matrix(n: int, bandwidth: int, side: int, dtype: torch.dtype) -> None:
    cost = torch.rand(1, n, n, dtype=torch.float64)
    row, column = torch.arange(n).view(n, 1), torch.arange(n)
    cost[0][column - row == side * bandwidth] -= 1.5
    cost = cost.to(dtype)
    exact = cost.double().requires_grad_()
    expected = _reference.softdtw_from_cost(exact, 1.0, bandwidth)
    expected.sum().backward()
    value, state = launch.forward(Problem(cost, None, None, None, 1.0, bandwidth, True))
    gradient = launch.backward(
        Problem(cost, None, None, None, 1.0, bandwidth, True), torch.ones_like(value), value, state
    )[0]
    assert exact.grad is not None
    assert _relative(value, expected.detach()) <= (1e-6 if dtype == torch.float32 else 1e-12)
    assert _relative(gradient, exact.grad) <= (1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize(("n", "bandwidth"), [(80, 33), (140, 64), (260, 97), (140, 1)])
@pytest.mark.parametrize("side", [-1, 1])
def test_series(n: int, bandwidth: int, side: int, d: int) -> None:
    x = torch.randn(1, n, d)
    y = torch.roll(x, side * bandwidth, 1) + 0.1 * torch.randn(1, n, d)
    exact_x, exact_y = x.double().requires_grad_(), y.double().requires_grad_()
    expected = _reference.softdtw(exact_x, exact_y, 1.0, bandwidth)
    expected.sum().backward()
    value, state = launch.forward(Problem(x, y, None, None, 1.0, bandwidth, True, True))
    grad_x, grad_y = launch.backward(
        Problem(x, y, None, None, 1.0, bandwidth, True, True), torch.ones(1), value, state
    )
    assert exact_x.grad is not None
    assert exact_y.grad is not None
    assert _relative(value, expected.detach()) <= 1e-6
    assert _relative(grad_x, exact_x.grad) <= 1e-5
    assert _relative(grad_y, exact_y.grad) <= 1e-5


@pytest.mark.parametrize("n", [700, 900])
def test_sums_past_32_bits_are_rerun(n: int) -> None:
    x, y = torch.zeros(1, n, 2), torch.full((1, n, 2), 1177.0)
    value, _ = launch.forward(Problem(x, y, None, None, 1.0, -1))
    assert value.item() == pytest.approx(n * 2 * 1177.0**2, rel=1e-6)


@pytest.mark.parametrize("d", [1, 2, 64])
@pytest.mark.parametrize("level", [0.31, 1.7, 20.0])
def test_purely_diagonal_paths(d: int, level: float) -> None:
    x = torch.full((1, 400, d), level)
    value, _ = launch.forward(Problem(x, -x, None, None, 1.0, -1, True, True))
    expected = _reference.softdtw(x.double(), -x.double(), 1.0)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("bandwidth", [2**31 - 1, 2**40])
def test_a_huge_band_is_no_band(bandwidth: int) -> None:
    x, y = torch.randn(2, 70, 3), torch.randn(2, 60, 3)
    wide, _ = launch.forward(Problem(x, y, None, None, 1.0, bandwidth, True, True))
    none, _ = launch.forward(Problem(x, y, None, None, 1.0, -1, True, True))
    torch.testing.assert_close(wide, none)


@pytest.mark.parametrize("d", [1, 3])
def test_nothing_is_lost_along_a_long_band(d: int) -> None:
    """Shares that do not quite add up to one would lose a part of the alignment at each of the many steps."""
    steps, bandwidth = 16384, 40
    generator = torch.Generator().manual_seed(d)
    x = (0.05 * torch.randn(1, steps, d, generator=generator)).cumsum(1)
    y = x + 0.01 * (0.05 * torch.randn(1, steps, d, generator=generator)).cumsum(1)
    exact_x = x.double().requires_grad_()
    softdtw(exact_x, y.double(), gamma=1.0, bandwidth=bandwidth).sum().backward()
    assert exact_x.grad is not None
    value, state = launch.forward(Problem(x, y, None, None, 1.0, bandwidth, True, True))
    grad_x, _ = launch.backward(
        Problem(x, y, None, None, 1.0, bandwidth, True, False), torch.ones(1), value, state
    )
    assert grad_x is not None
    assert _relative(grad_x, exact_x.grad) <= 1e-5
