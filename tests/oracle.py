"""What tests compare with: all paths by enumeration, and the recurrence in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from softdtw_cuda import _reference
from softdtw_cuda._distances import fill_padding


def delannoy(n: int, m: int) -> int:
    """Number of monotone paths from (0, 0) to (n, m) with diagonal steps."""
    return sum(math.comb(n, k) * math.comb(m, k) * 2**k for k in range(min(n, m) + 1))


def paths(n: int, m: int) -> Iterator[list[tuple[int, int]]]:
    """All warping paths from (0, 0) to (n - 1, m - 1)."""
    if n == 1 and m == 1:
        yield [(0, 0)]
        return
    for before in ((n - 1, m), (n, m - 1), (n - 1, m - 1)):
        if min(before) >= 1:
            for path in paths(*before):
                yield [*path, (n - 1, m - 1)]


def enumerate_paths(cost: Tensor, gamma: float, bandwidth: int = -1) -> tuple[float, Tensor]:
    """Value and alignment of one small cost matrix (N, M) as sums over every path."""
    n, m = cost.shape
    admitted = [
        path for path in paths(n, m) if bandwidth < 0 or all(abs(i - j) <= bandwidth for i, j in path)
    ]
    totals = [math.fsum(cost[i, j].item() for i, j in path) for path in admitted]
    smallest = min(totals)
    weights = [math.exp((smallest - total) / gamma) for total in totals]
    partition = math.fsum(weights)
    alignment = torch.zeros(n, m, dtype=torch.float64)
    for path, weight in zip(admitted, weights, strict=True):
        for i, j in path:
            alignment[i, j] += weight / partition
    return smallest - gamma * math.log(partition), alignment


class Truth(NamedTuple):
    """float64 values (B,) and gradients of their weighted sum, on the CPU."""

    value: Tensor
    grad_x: Tensor
    grad_y: Tensor
    rounding: float
    """What rounding the exact costs to float32 does to the gradients, relative in norm."""


def relative(measured: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    difference = torch.linalg.vector_norm(measured.detach().cpu().double() - truth)
    return float(difference / torch.linalg.vector_norm(truth).clamp(min=1e-300))


def truth(
    x: Tensor,
    y: Tensor,
    gamma: float,
    bandwidth: int | None = None,
    x_lengths: Sequence[int] | None = None,
    y_lengths: Sequence[int] | None = None,
    weights: Tensor | None = None,
) -> Truth:
    """The oracle on x (Bx, N, D) and y (By, M, D) under the squared Euclidean distance."""
    x, y = (side.detach().cpu().double().requires_grad_() for side in (x, y))
    radius = -1 if bandwidth is None else bandwidth
    lengths = [None if given is None else torch.tensor(list(given)) for given in (x_lengths, y_lengths)]
    padded = [
        side if given is None else fill_padding(side, given)
        for side, given in zip((x, y), lengths, strict=True)
    ]
    exact = _reference.sqeuclidean_cost(*padded)
    gradients = []
    # The rounded costs keep the exact costs' gradient: the difference is a constant.
    for cost in (exact, exact + (exact.detach().float().double() - exact.detach())):
        value = _reference.softdtw_from_cost(cost, gamma, radius, *lengths)
        weighted = value.sum() if weights is None else value @ weights.detach().cpu().double()
        gradients.append(torch.autograd.grad(weighted, (x, y), retain_graph=True))
        if cost is exact:
            exact_value = value.detach()
    (grad_x, grad_y), (blurred_x, blurred_y) = gradients
    rounding = max(relative(blurred_x, grad_x), relative(blurred_y, grad_y))
    return Truth(exact_value, grad_x, grad_y, rounding)


def assert_within_float64(measured: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """Within 1e-12 of the oracle, relative in norm."""
    assert measured.dtype == torch.float64
    assert relative(measured, expected) <= tolerance, relative(measured, expected)


def assert_value_within_budget(measured: Tensor, expected: Tensor, gamma: float, steps: int) -> None:
    """The float32 value budget. Values cross zero, so the size of the terms they are made of is the scale."""
    assert measured.dtype == torch.float32
    scale = expected.abs() + gamma * math.log(3) * steps
    assert ((measured.detach().cpu().double() - expected).abs() <= 1e-6 * scale).all()


def assert_gradient_within_budget(measured: Tensor, expected: Tensor, rounding: float) -> None:
    """The float32 gradient budget: 1e-5, or ten times what rounding the costs does."""
    assert measured.dtype == torch.float32
    assert relative(measured, expected) <= max(1e-5, 10 * rounding), (relative(measured, expected), rounding)
