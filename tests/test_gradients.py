"""Gradients: finite differences for every option, the oracle in float64, the error budget in float32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.error_budget import Shape, measure
from softdtw_cuda import softdtw, softdtw_cdist, softdtw_from_cost
from softdtw_cuda._distances import METRICS
from tests.oracle import (
    assert_gradient_within_budget,
    assert_value_within_budget,
    assert_within_float64,
    relative,
    truth,
)

LENGTHS = {"x_lengths": [3, 6], "y_lengths": [4, 5]}


def lopsided(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A user's distance that is not symmetric."""
    return (x.unsqueeze(2) - 2 * y.unsqueeze(1)).abs().pow(1.5).sum(3)


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalize"])
@pytest.mark.parametrize("lengths", [{}, LENGTHS], ids=["full", "lengths"])
@pytest.mark.parametrize("bandwidth", [None, 2], ids=["all", "band"])
@pytest.mark.parametrize("dist", [*METRICS, "sqeuclidean-cost", lopsided])
def test_gradcheck(
    device: str, dist: object, bandwidth: int | None, lengths: dict[str, Any], normalize: bool
) -> None:
    options = {"dist": "sqeuclidean", "fused": False} if dist == "sqeuclidean-cost" else {"dist": dist}
    x = torch.randn(2, 6, 3, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.randn(2, 5, 3, dtype=torch.float64, device=device, requires_grad=True)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return softdtw(x, y, gamma=0.7, bandwidth=bandwidth, normalize=normalize, **options, **lengths)

    assert torch.autograd.gradcheck(loss, (x, y), fast_mode=False)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("normalize", [False, True])
def test_gradcheck_broadcast(device: str, fused: bool, normalize: bool) -> None:
    one = torch.randn(1, 4, 2, dtype=torch.float64, device=device, requires_grad=True)
    many = torch.randn(3, 5, 2, dtype=torch.float64, device=device, requires_grad=True)

    def loss(x: torch.Tensor, y: torch.Tensor, **lengths: list[int]) -> torch.Tensor:
        return softdtw(x, y, fused=fused, normalize=normalize, **lengths)

    assert torch.autograd.gradcheck(loss, (one, many))
    assert torch.autograd.gradcheck(loss, (many, one))
    assert torch.autograd.gradcheck(lambda x, y: loss(x, y, x_lengths=[3], y_lengths=[5, 2, 4]), (one, many))
    assert torch.autograd.gradcheck(lambda x, y: loss(x, y, x_lengths=[1, 3, 4]), (one, many))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_gradcheck_all_pairs(device: str, sizes: tuple[int, int], normalize: bool) -> None:
    x = torch.randn(sizes[0], 4, 2, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.randn(sizes[1], 5, 2, dtype=torch.float64, device=device, requires_grad=True)
    lengths = {"x_lengths": [4, 2, 3][: sizes[0]], "y_lengths": [5, 3, 1][: sizes[1]]}
    assert torch.autograd.gradcheck(lambda x, y: softdtw_cdist(x, y, normalize=normalize, **lengths), (x, y))
    expected = torch.stack(
        [
            torch.stack(
                [
                    softdtw(
                        x[i, : lengths["x_lengths"][i]], y[j, : lengths["y_lengths"][j]], normalize=normalize
                    )
                    for j in range(sizes[1])
                ]
            )
            for i in range(sizes[0])
        ]
    )
    measured = softdtw_cdist(x, y, normalize=normalize, **lengths)
    assert_within_float64(measured, expected.detach().cpu())


@pytest.mark.parametrize("bandwidth", [None, 2])
@pytest.mark.parametrize("lengths", [{}, LENGTHS])
def test_gradcheck_cost(device: str, bandwidth: int | None, lengths: dict[str, Any]) -> None:
    cost = torch.randn(2, 6, 5, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda c: softdtw_from_cost(c, gamma=0.4, bandwidth=bandwidth, **lengths), (cost,)
    )


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "cost"])
@pytest.mark.parametrize(
    ("n", "m", "d", "bandwidth"),
    [
        (1, 1, 1, None),
        (17, 1, 3, None),
        (64, 64, 1, 8),
        (65, 63, 5, None),
        (129, 127, 2, None),
        (200, 190, 7, 31),
    ],
)
def test_float64_matches_the_oracle(
    device: str, n: int, m: int, d: int, bandwidth: int | None, fused: bool
) -> None:
    x = torch.randn(3, n, d, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.randn(3, m, d, dtype=torch.float64, device=device, requires_grad=True)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, device=device)
    value = softdtw(x, y, gamma=0.5, bandwidth=bandwidth, fused=fused)
    (value @ weights).backward()
    expected = truth(x, y, 0.5, bandwidth, weights=weights)
    assert_within_float64(value, expected.value)
    assert_within_float64(x.grad, expected.grad_x)
    assert_within_float64(y.grad, expected.grad_y)


@pytest.mark.parametrize("gamma", [1e-3, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("n", [32, *(pytest.param(n, marks=pytest.mark.slow) for n in (127, 512))])
def test_float32_error_budget(device: str, n: int, gamma: float) -> None:
    """A part of the grid that `python -m benchmarks.error_budget` runs in full."""
    for m, offset in ((n, 0.0), (n, 1000.0), (n - n // 7, 0.0)):
        for case in measure([Shape(n, m, d, offset) for d in (1, 3, 16, 64)], gamma, device):
            assert case.passed, case


@pytest.mark.parametrize("gamma", [1e-2, 1.0])
def test_float32_error_budget_of_the_cost_path(device: str, gamma: float) -> None:
    for offset in (0.0, 1000.0):
        x, y = (torch.randn(2, length, 16) + offset for length in (150, 130))
        x, y = x.to(device).requires_grad_(), y.to(device).requires_grad_()
        value = softdtw(x, y, gamma=gamma, fused=False)
        value.sum().backward()
        expected = truth(x, y, gamma)
        assert_value_within_budget(value, expected.value, gamma, 280)
        assert_gradient_within_budget(x.grad, expected.grad_x, expected.rounding)
        assert_gradient_within_budget(y.grad, expected.grad_y, expected.rounding)


@pytest.mark.parametrize("cost_scale", [1e-6, 1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("gamma", [1e-6, 1e-3, 1.0, 1e3, 1e6])
def test_extreme_temperatures_and_costs(device: str, gamma: float, cost_scale: float) -> None:
    x, y = (torch.randn(2, length, 3) * math.sqrt(cost_scale) for length in (70, 60))
    x, y = x.to(device).requires_grad_(), y.to(device).requires_grad_()
    value = softdtw(x, y, gamma=gamma)
    value.sum().backward()
    # At cost / gamma = 1e12 even float64 is not exact enough in log space: the oracle itself is then off by
    # 1e-16 * 1e12, which is why that is allowed for.
    expected = truth(x, y, gamma)
    assert_value_within_budget(value, expected.value, gamma, 130)
    slack = max(expected.rounding, 1e-16 * cost_scale / gamma)
    assert_gradient_within_budget(x.grad, expected.grad_x, slack)
    assert_gradient_within_budget(y.grad, expected.grad_y, slack)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
def test_narrow_types(device: str, dtype: torch.dtype, fused: bool) -> None:
    x = torch.randn(2, 90, 6, device=device).to(dtype).requires_grad_()
    y = torch.randn(2, 80, 6, device=device).to(dtype).requires_grad_()
    value = softdtw(x, y, gamma=0.1, fused=fused)
    value.sum().backward()
    expected = truth(x, y, 0.1)
    assert_value_within_budget(value, expected.value, 0.1, 170)
    for grad, true_grad in ((x.grad, expected.grad_x), (y.grad, expected.grad_y)):
        assert grad.dtype == dtype
        # The gradient is right to float32; what is left is its own rounding to the narrow type.
        assert relative(grad, true_grad) <= torch.finfo(dtype).eps / 2


def test_narrow_values_do_not_overflow(device: str) -> None:
    x = torch.full((1, 100, 8), 100.0, dtype=torch.float16, device=device)
    value = softdtw(x, -x)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(100 * 8 * 200.0**2, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broadcast_gradient_is_summed_in_full_precision(device: str, dtype: torch.dtype) -> None:
    one = torch.randn(1, 20, 2, device=device).to(dtype).requires_grad_()
    many = torch.randn(50, 25, 2, device=device).repeat_interleave(2, 0)
    many = (many + 0.02 * torch.randn(100, 25, 2, device=device)).to(dtype)
    # Neighbours nearly cancel, so a sum over samples already rounded to bfloat16 has no digit left.
    weights = torch.tensor([1.0, -1.0] * 50, device=device)
    (softdtw(one, many, gamma=0.1) @ weights).backward()
    expected = truth(one, many, 0.1, weights=weights)
    assert one.grad.dtype == dtype
    assert one.grad.shape == one.shape
    assert relative(one.grad, expected.grad_x) <= (
        1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("normalize", [False, True])
def test_one_sided_gradients(device: str, fused: bool, normalize: bool) -> None:
    x = torch.randn(2, 20, 3, dtype=torch.float64, device=device)
    y = torch.randn(2, 25, 3, dtype=torch.float64, device=device)
    both = [side.clone().requires_grad_() for side in (x, y)]
    softdtw(*both, fused=fused, normalize=normalize).sum().backward()
    for side in (0, 1):
        alone = [x.clone(), y.clone()]
        alone[side].requires_grad_()
        softdtw(*alone, fused=fused, normalize=normalize).sum().backward()
        assert_within_float64(alone[side].grad, both[side].grad.cpu())
        assert alone[1 - side].grad is None


@pytest.mark.parametrize("dist", ["euclidean", "cityblock", "cosine"])
def test_coinciding_points_have_a_finite_gradient(device: str, dist: str) -> None:
    x = torch.zeros(1, 5, 2, device=device, requires_grad=True)
    softdtw(x, torch.zeros(1, 4, 2, device=device), dist=dist).sum().backward()
    assert (x.grad == 0).all()


def test_weighted_samples_keep_apart(device: str) -> None:
    """Each sample's gradient is scaled by its own incoming gradient, also where that is not contiguous."""
    x = torch.randn(4, 15, 2, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.randn(4, 15, 2, dtype=torch.float64, device=device)
    weights = torch.tensor([1.0, 9, 0, 9, -3, 9, 2, 9], dtype=torch.float64, device=device)[::2]
    softdtw(x, y).backward(weights)
    expected = truth(x, y, 1.0, weights=weights)
    assert_within_float64(x.grad, expected.grad_x)
    assert (x.grad[1] == 0).all()
