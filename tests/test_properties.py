"""Random problems of every kind against the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from softdtw_cuda import _reference, softdtw, softdtw_alignment, softdtw_from_cost
from tests.oracle import (
    assert_gradient_within_budget,
    assert_value_within_budget,
    assert_within_float64,
    relative,
    truth,
)

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# The fixtures hold for every example alike; a first example may include the compilation of the kernels.
RELAXED = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# Around the edges of SIMD vectors and tiles, and anything between.
SIZES = st.one_of(
    st.integers(1, 12), st.sampled_from([15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 150])
)


@dataclass(frozen=True)
class Problem:
    seed: int
    batch: int
    x_rows: int
    y_rows: int
    n: int
    m: int
    d: int
    gamma: float
    bandwidth: int | None
    x_lengths: list[int] | None
    y_lengths: list[int] | None
    layout: str
    fused: bool
    needs: tuple[bool, bool]

    def series(self, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        sides = []
        for rows, size, lengths, needed in (
            (self.x_rows, self.n, self.x_lengths, self.needs[0]),
            (self.y_rows, self.m, self.y_lengths, self.needs[1]),
        ):
            side = torch.randn(rows, size, self.d, dtype=torch.float64, generator=generator).to(dtype)
            if lengths is not None and rows == len(lengths):
                for sample, length in enumerate(lengths):
                    side[sample, length:] = math.nan
            side = side.to(device)
            if self.layout == "transposed":
                side = side.transpose(1, 2).contiguous().transpose(1, 2)
            elif self.layout == "strided":
                side = side.repeat_interleave(2, 2)[..., ::2]
            elif self.layout == "expanded" and self.batch > 1 and rows == 1:
                side = side.expand(self.batch, -1, -1)
            sides.append(side.detach().requires_grad_(needed))
        return sides[0], sides[1]

    @property
    def options(self) -> dict[str, object]:
        return {
            "gamma": self.gamma,
            "bandwidth": self.bandwidth,
            "x_lengths": self.x_lengths,
            "y_lengths": self.y_lengths,
        }


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    batch, n, m = draw(st.integers(1, 4)), draw(SIZES), draw(SIZES)
    x_rows, y_rows = draw(st.sampled_from([(batch, batch), (1, batch), (batch, 1)]))
    x_lengths, y_lengths = (
        draw(st.none() | st.lists(st.integers(1, size), min_size=batch, max_size=batch)) for size in (n, m)
    )
    needed = max(abs(i - j) for i, j in zip(x_lengths or [n] * batch, y_lengths or [m] * batch, strict=True))
    return Problem(
        seed=draw(st.integers(0, 2**31)),
        batch=batch,
        x_rows=x_rows,
        y_rows=y_rows,
        n=n,
        m=m,
        d=draw(st.sampled_from([1, 2, 3, 5, 8, 17, 33])),
        gamma=draw(st.sampled_from([1e-2, 0.1, 1.0, 10.0, 1e3])),
        bandwidth=draw(st.none() | st.integers(needed, needed + 40)),
        x_lengths=x_lengths,
        y_lengths=y_lengths,
        layout=draw(st.sampled_from(["contiguous", "transposed", "strided", "expanded"])),
        fused=draw(st.booleans()),
        needs=draw(st.sampled_from([(True, True), (True, False), (False, True)])),
    )


def solve(
    problem: Problem, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, y = problem.series(dtype, device)
    value = softdtw(x, y, fused=problem.fused, **problem.options)
    value.sum().backward()
    return value, x, y


def true(problem: Problem, x: torch.Tensor, y: torch.Tensor):  # type: ignore[no-untyped-def]  # oracle's
    return truth(x, y, problem.gamma, problem.bandwidth, problem.x_lengths, problem.y_lengths)


@pytest.mark.slow
@RELAXED
@given(problem=problems())
def test_float64(device: str, problem: Problem) -> None:
    value, x, y = solve(problem, torch.float64, device)
    expected = true(problem, x, y)
    # The oracle works in log space: a value of size R is known to 1e-16 R; what counts is that over gamma.
    slack = 1e-15 * expected.value.abs().max().item() / problem.gamma
    assert_within_float64(value, expected.value)
    for side, grad in ((x, expected.grad_x), (y, expected.grad_y)):
        assert side.grad is None or relative(side.grad, grad) <= 1e-12 + slack


@pytest.mark.slow
@RELAXED
@given(problem=problems())
def test_float32(device: str, problem: Problem) -> None:
    value, x, y = solve(problem, torch.float32, device)
    expected = true(problem, x, y)
    assert_value_within_budget(value, expected.value, problem.gamma, problem.n + problem.m)
    for side, grad in ((x, expected.grad_x), (y, expected.grad_y)):
        if side.grad is not None:
            assert_gradient_within_budget(side.grad, grad, expected.rounding)


@pytest.mark.slow
@RELAXED
@given(problem=problems(), dtype=st.sampled_from([torch.float16, torch.bfloat16]))
def test_narrow(device: str, problem: Problem, dtype: torch.dtype) -> None:
    value, x, y = solve(problem, dtype, device)
    expected = true(problem, x, y)
    assert_value_within_budget(value, expected.value, problem.gamma, problem.n + problem.m)
    for side, grad in ((x, expected.grad_x), (y, expected.grad_y)):
        if side.grad is not None:
            assert side.grad.dtype == dtype
            # Its own rounding, and that of numbers too small for float16's exponent.
            smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            absolute = smallest * math.sqrt(grad.numel()) / max(grad.norm().item(), 1e-300)
            assert (
                relative(side.grad, grad)
                <= torch.finfo(dtype).eps / 2 + 1e-5 + 10 * expected.rounding + absolute
            )


@RELAXED
@given(problem=problems())
def test_alignment(device: str, problem: Problem) -> None:
    """E is a probability: it starts and ends at the corners, and no cell has more than all of the paths."""
    x, y = problem.series(torch.float32, device)
    with torch.no_grad():
        alignment = softdtw_alignment(x, y, **problem.options).cpu()
    for sample in range(problem.batch):
        n = problem.x_lengths[sample] if problem.x_lengths else problem.n
        m = problem.y_lengths[sample] if problem.y_lengths else problem.m
        inside = alignment[sample, :n, :m]
        assert inside[0, 0].item() == pytest.approx(1, abs=1e-4)
        assert inside[-1, -1].item() == pytest.approx(1, abs=1e-6)
        assert inside.min() >= 0
        assert inside.max() <= 1 + 1e-4
        assert inside.sum() == pytest.approx(inside.sum().item())
        assert max(n, m) - 1e-2 <= inside.sum().item() <= n + m - 1 + 1e-2
        assert alignment[sample].sum().item() == pytest.approx(inside.sum().item(), rel=1e-6)


@pytest.mark.slow
@RELAXED
@given(problem=problems(), lowest=st.sampled_from([-3.0, 0.0]), holes=st.sampled_from([0.0, 0.2]))
def test_cost(device: str, problem: Problem, lowest: float, holes: float) -> None:
    """User-made costs: negative ones, and forbidden cells, with and without a way through."""
    generator = torch.Generator().manual_seed(problem.seed)
    shape = (problem.batch, problem.n, problem.m)
    cost = torch.rand(shape, dtype=torch.float64, generator=generator) * 4 + lowest
    cost = cost.masked_fill(torch.rand(shape, generator=generator) < holes, math.inf)
    measured = cost.to(device).requires_grad_()
    value = softdtw_from_cost(measured, **problem.options)
    value.sum().backward()
    lengths = [None if g is None else torch.tensor(g) for g in (problem.x_lengths, problem.y_lengths)]
    radius = -1 if problem.bandwidth is None else problem.bandwidth
    leaf = cost.detach().clone().requires_grad_()
    expected = _reference.softdtw_from_cost(leaf, problem.gamma, radius, *lengths)
    expected.sum().backward()
    assert torch.equal(value.detach().cpu() == math.inf, expected == math.inf)
    reached = expected != math.inf
    scale = expected[reached].abs() + problem.gamma * (problem.n + problem.m)
    assert ((value.detach().cpu()[reached] - expected[reached]).abs() <= 1e-12 * scale).all()
    slack = 1e-15 * (scale.max().item() if reached.any() else 0) / problem.gamma
    assert relative(measured.grad, leaf.grad) <= 1e-12 + slack
