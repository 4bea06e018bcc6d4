"""Values and gradients on a GPU: error budgets, tile boundaries, reproducibility, very long series."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.error_budget import Shape, measure
from softdtw_cuda import softdtw, softdtw_alignment, softdtw_from_cost
from tests.oracle import (
    assert_gradient_within_budget,
    assert_value_within_budget,
    assert_within_float64,
    relative,
    truth,
)

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")

EDGES = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)


def value_and_gradients(x: Tensor, y: Tensor, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    value = softdtw(x, y, **options)  # type: ignore[arg-type]  # options differ in type
    grad_x, grad_y = torch.autograd.grad(value.sum(), (x, y))
    return value.detach(), grad_x, grad_y


def pair(batch: int, n: int, m: int, d: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * 7919 + m * 31 + d)
    sides = (torch.randn(batch, steps, d, generator=generator, dtype=torch.float64) for steps in (n, m))
    x, y = (side.to(dtype).to(DEVICE) for side in sides)
    return x, y


@pytest.mark.parametrize("gamma", [1e-3, 0.1, 1.0, 100.0])
@pytest.mark.parametrize(("n", "m"), [(32, 32), (127, 109), (512, 439), (1024, 1024)])
def test_float32_budget(n: int, m: int, gamma: float) -> None:
    """A part of the grid of benchmarks/error_budget.py."""
    shapes = [Shape(n, m, d, offset) for d in (1, 3, 16, 64, 130) for offset in (0.0, 1000.0)]
    failed = [case for case in measure(shapes, gamma, str(DEVICE)) if not case.passed]
    assert not failed


@pytest.mark.parametrize("apart", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("d", [1, 5, 64, 130])
def test_series_that_nearly_agree(d: int, apart: float) -> None:
    """Differences keep their digits; products keep those of the series themselves (docs/accuracy.md)."""
    x, noise = pair(3, 200, 200, d)
    y = x + apart * noise
    limit = 1e-5 if d <= 16 else 2e-7 / apart
    _, *gradients = value_and_gradients(x, y, gamma=0.1)
    expected = truth(x, y, 0.1)
    for measured, exact in zip(gradients, (expected.grad_x, expected.grad_y), strict=True):
        assert relative(measured, exact) <= limit


@pytest.mark.parametrize("gamma", [1e-6, 1e6])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
@pytest.mark.parametrize("d", [1, 5, 64])
def test_the_ends_of_the_range(d: int, gamma: float, scale: float) -> None:
    x, y = (side * scale for side in pair(3, 150, 170, d))
    value, *gradients = value_and_gradients(x, y, gamma=gamma)
    expected = truth(x, y, gamma)
    assert_value_within_budget(value, expected.value, gamma, 320)
    for measured, exact in zip(gradients, (expected.grad_x, expected.grad_y), strict=True):
        assert_gradient_within_budget(measured, exact, expected.rounding)


@pytest.mark.parametrize("d", [1, 5, 64])
def test_float64(d: int) -> None:
    x, y = pair(3, 200, 150, d, torch.float64)
    value, *gradients = value_and_gradients(x, y, gamma=0.1)
    expected = truth(x, y, 0.1)
    for measured, exact in zip((value, *gradients), expected[:3], strict=True):
        assert_within_float64(measured, exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [1, 8, 40, 64, 200])
def test_sixteen_bits(d: int, dtype: torch.dtype) -> None:
    x, y = pair(3, 200, 150, d, dtype)
    value, *gradients = value_and_gradients(x, y)
    expected = truth(x, y, 1.0)
    assert_value_within_budget(value, expected.value, 1.0, 350)
    for measured, exact in zip(gradients, (expected.grad_x, expected.grad_y), strict=True):
        assert measured.dtype == dtype
        assert relative(measured, exact) <= 4e-3


@pytest.mark.parametrize("bandwidth", [None, 300])
@pytest.mark.parametrize("d", [1, 5, 64])
def test_lengths_around_every_tile_boundary(d: int, bandwidth: int | None) -> None:
    """All in one batch, in padding full of NaN, against each pair on its own."""
    turns = (0, 4) if d == 64 else (0, 1, 4, 9)
    x_lengths = torch.tensor([n for _ in turns for n in EDGES], dtype=torch.int32)
    y_lengths = torch.tensor(
        [EDGES[k - turn] for turn in turns for k in range(len(EDGES))], dtype=torch.int32
    )
    x, y = pair(len(x_lengths), 257, 257, d)
    steps = torch.arange(257).view(1, -1, 1)
    x[(steps >= x_lengths.view(-1, 1, 1)).expand_as(x).to(DEVICE)] = math.nan
    y[(steps >= y_lengths.view(-1, 1, 1)).expand_as(y).to(DEVICE)] = math.nan
    value, grad_x, grad_y = value_and_gradients(
        x, y, bandwidth=bandwidth, x_lengths=x_lengths.to(DEVICE), y_lengths=y_lengths.to(DEVICE)
    )
    expected = truth(x, y, 1.0, bandwidth, x_lengths.tolist(), y_lengths.tolist())
    assert_value_within_budget(value, expected.value, 1.0, 514)
    for measured, exact, lengths in (
        (grad_x, expected.grad_x, x_lengths),
        (grad_y, expected.grad_y, y_lengths),
    ):
        assert_gradient_within_budget(measured, exact, expected.rounding)
        assert (measured[(steps >= lengths.view(-1, 1, 1)).expand_as(measured).to(DEVICE)] == 0).all()


@pytest.mark.parametrize("d", [1, 5, 64])
def test_sizes_around_every_tile_boundary(d: int) -> None:
    for n, m in zip(EDGES, reversed(EDGES), strict=True):
        x, y = pair(1, n, m, d)
        value, *gradients = value_and_gradients(x, y)
        expected = truth(x, y, 1.0)
        assert_value_within_budget(value, expected.value, 1.0, n + m)
        for measured, exact in zip(gradients, (expected.grad_x, expected.grad_y), strict=True):
            assert_gradient_within_budget(measured, exact, expected.rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [1, 5, 64, 130])
def test_the_same_bits_every_time(d: int, dtype: torch.dtype) -> None:
    x, y = pair(40, 700, 650, d, dtype)
    first = value_and_gradients(x, y, gamma=0.1)
    for _ in range(4):
        for again, once in zip(value_and_gradients(x, y, gamma=0.1), first, strict=True):
            assert torch.equal(again, once)


def test_alignment_weight_is_conserved() -> None:
    """A path is on each anti-diagonal or jumps it, and then it is on both neighbours."""
    cost = torch.rand(2, 500, 400, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weights = softdtw_alignment(cost=cost, gamma=0.1).double()
    sums = torch.stack([weights.flip(2).diagonal(k, 1, 2).sum(1) for k in range(399, -500, -1)], 1)
    assert (sums[:, [0, -1]] - 1).abs().max() <= 1e-5
    assert sums.max() <= 1 + 1e-5
    assert (sums[:, 1:] + sums[:, :-1]).min() >= 1 - 1e-5


def walks(batch: int, n: int, d: int, seed: int) -> Tensor:
    """Random walks: neighbouring steps are alike, as in real series."""
    steps = torch.randn(batch, n, d, generator=torch.Generator().manual_seed(seed)) * 0.05
    return steps.cumsum(1).to(DEVICE)


def test_65536_steps() -> None:
    """Without a table: distances do not change when both series move, so the gradients sum to zero."""
    x, y = walks(1, 65536, 4, 0), walks(1, 65536, 4, 1)
    value, grad_x, grad_y = value_and_gradients(x, y, gamma=0.1)
    assert value.isfinite().all()
    total = grad_x.double().sum(1) + grad_y.double().sum(1)
    size = grad_x.double().abs().sum() + grad_y.double().abs().sum()
    assert size > 0
    assert total.abs().max() <= 1e-6 * size
    swapped, grad_y_too, grad_x_too = value_and_gradients(y, x, gamma=0.1)
    torch.testing.assert_close(swapped, value, rtol=1e-5, atol=0)
    assert relative(grad_x_too, grad_x.cpu().double()) <= 1e-4
    assert relative(grad_y_too, grad_y.cpu().double()) <= 1e-4


def test_65536_steps_on_a_band() -> None:
    # Costs of some tens: rounding them to float32 blurs exp(-cost / gamma) by a few 1e-6.
    x, y = walks(1, 65536, 4, 0), walks(1, 65536, 4, 0) + 0.01 * walks(1, 65536, 4, 1)
    value, *gradients = value_and_gradients(x, y, gamma=1.0, bandwidth=64)
    exact_value, *exact = value_and_gradients(x.double(), y.double(), gamma=1.0, bandwidth=64)
    torch.testing.assert_close(value.double(), exact_value, rtol=1e-6, atol=0)
    for measured, wide in zip(gradients, exact, strict=True):
        assert relative(measured, wide.cpu()) <= 2e-5


def test_a_hundred_thousand_short_pairs() -> None:
    x, y = pair(100_000, 20, 24, 3)
    value, *gradients = value_and_gradients(x, y)
    some = torch.tensor([0, 1, 4242, 65535, 65536, 99_999])
    expected = truth(x[some], y[some], 1.0)
    assert_value_within_budget(value[some], expected.value, 1.0, 44)
    for measured, exact in zip(gradients, (expected.grad_x, expected.grad_y), strict=True):
        assert measured.isfinite().all()
        assert_gradient_within_budget(measured[some], exact, expected.rounding)


def test_a_cost_matrix_of_its_own() -> None:
    cost = torch.rand(5, 300, 280, generator=torch.Generator().manual_seed(0)).to(DEVICE) - 0.3
    results = []
    for dtype in (torch.float32, torch.float64):
        leaf = cost.clone().to(dtype).requires_grad_()
        value = softdtw_from_cost(leaf, gamma=0.1)
        results.append((value.detach(), *torch.autograd.grad(value.sum(), leaf)))
    (value, gradient), (exact_value, exact_gradient) = results
    assert_value_within_budget(value, exact_value.cpu(), 0.1, 580)
    assert relative(gradient, exact_gradient.cpu()) <= 1e-5
