"""The CPU kernels against the float64 oracle: values, gradients, bands, lengths, ranges, threads."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.error_budget import Shape, measure_second_order
from softdtw_cuda import _reference

numba = pytest.importorskip("numba")
from softdtw_cuda._cpu import compile as compiling  # noqa: E402  (they need numba)
from softdtw_cuda._cpu import config, dual_launch, launch, scaled_floats, scratch, vectors  # noqa: E402
from softdtw_cuda._cpu import threads as cpu_threads  # noqa: E402
from softdtw_cuda._cpu.arguments import UNBANDED, Tile  # noqa: E402
from softdtw_cuda._cpu.cost_range import largest_distance_worker  # noqa: E402
from softdtw_cuda._cpu.problem import arrays_of, order_of_tiles  # noqa: E402
from softdtw_cuda._cpu.shear import shear, unshear  # noqa: E402
from softdtw_cuda._problem import Direction, Problem  # noqa: E402
from softdtw_cuda.pairs import pairs_at_a_time  # noqa: E402

FLOAT_TYPES = (torch.float32, torch.float64)
VALUE_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}


def relative(found: Tensor, truth: Tensor) -> float:
    truth = truth.double()
    return float((found.double() - truth).norm() / truth.norm().clamp_min(1e-300))


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    return ((x[:, :, None] - y[:, None]) ** 2).sum(-1)


def oracle(
    x: Tensor,
    y: Tensor,
    gamma: float,
    bandwidth: int,
    lengths: tuple[Tensor | None, Tensor | None],
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """float64 value, per-sample gradients of x and y, and alignment, from the oracle and autograd."""
    batch = max(x.shape[0], y.shape[0])
    x = x.double().expand(batch, -1, -1).detach().clone().requires_grad_()
    y = y.double().expand(batch, -1, -1).detach().clone().requires_grad_()
    cost = squared_distances(x, y)
    cost.retain_grad()
    value = _reference.softdtw_from_cost(cost, gamma, bandwidth, *lengths)
    value.backward(grad.double())
    assert x.grad is not None
    assert y.grad is not None
    assert cost.grad is not None
    return value.detach(), x.grad, y.grad, cost.grad


def fused(
    x: Tensor,
    y: Tensor,
    gamma: float,
    bandwidth: int = -1,
    lengths: tuple[Tensor | None, Tensor | None] = (None, None),
    grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    value, state = launch.forward(Problem(x, y, *lengths, gamma, bandwidth, True, True))
    grad = torch.ones_like(value) if grad is None else grad
    gx, gy = launch.backward(Problem(x, y, *lengths, gamma, bandwidth, True, True), grad, value, state)
    return value, gx, gy


def from_cost(
    cost: Tensor,
    gamma: float,
    bandwidth: int = -1,
    lengths: tuple[Tensor | None, Tensor | None] = (None, None),
    grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    value, state = launch.forward(Problem(cost, None, *lengths, gamma, bandwidth, True))
    grad = torch.ones_like(value) if grad is None else grad
    return value, launch.backward(Problem(cost, None, *lengths, gamma, bandwidth, True), grad, value, state)[
        0
    ]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


SHAPES = [
    # B, N, M, D, gamma, bandwidth: around edges of vectors and tiles, N != M, bands inside and across tiles
    (1, 1, 1, 1, 1.0, -1),
    (2, 1, 9, 3, 1.0, -1),
    (2, 9, 1, 3, 1.0, -1),
    (3, 16, 17, 1, 0.1, -1),
    (2, 63, 65, 5, 1.0, -1),
    (2, 127, 129, 8, 1.0, -1),
    (2, 128, 128, 9, 10.0, -1),
    (1, 257, 140, 17, 1.0, -1),
    (2, 130, 300, 33, 100.0, -1),
    (5, 40, 33, 64, 1.0, -1),
    (2, 70, 70, 2, 0.1, 0),
    (2, 150, 150, 2, 1.0, 1),
    (2, 260, 250, 3, 1.0, 12),
    (2, 64, 64, 4, 1.0, 1000),
    pytest.param((2, 300, 290, 3, 1.0, 64), marks=pytest.mark.slow),
    pytest.param((1, 400, 390, 20, 10.0, 100), marks=pytest.mark.slow),
    pytest.param((1, 400, 390, 2, 100.0, 129), marks=pytest.mark.slow),
    pytest.param((1, 300, 420, 4, 1.0, 200), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradients_match_the_oracle(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    against_the_oracle(shape, dtype)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradients_over_many_tiles(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    against_the_oracle(shape, dtype)


def against_the_oracle(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    batch, n, m, d, gamma, bandwidth = shape
    generator = torch.Generator().manual_seed(n * 1000 + m)
    x = torch.randn(batch, n, d, dtype=dtype, generator=generator)
    y = torch.randn(batch, m, d, dtype=dtype, generator=generator)
    grad = torch.rand(batch, dtype=dtype, generator=generator) + 0.5
    true_value, true_gx, true_gy, true_gcost = oracle(x, y, gamma, bandwidth, (None, None), grad)
    # The value is a sum of about max(N, M) terms, each known to one rounding of max(cost, gamma).
    scale = true_value.abs() + gamma * max(n, m) / 8
    value, gx, gy = fused(x, y, gamma, bandwidth, grad=grad)
    assert float(((value.double() - true_value).abs() / scale).max()) < VALUE_TOLERANCE[dtype]
    assert relative(gx, true_gx) < GRADIENT_TOLERANCE[dtype]
    assert relative(gy, true_gy) < GRADIENT_TOLERANCE[dtype]
    unsaved, state = launch.forward(Problem(x, y, None, None, gamma, bandwidth))
    assert state.numel() == 0
    assert torch.equal(unsaved, value)

    cost = squared_distances(x.double(), y.double()).to(dtype)
    cost_value, gcost = from_cost(cost, gamma, bandwidth, grad=grad)
    assert float(((cost_value.double() - true_value).abs() / scale).max()) < VALUE_TOLERANCE[dtype]
    assert relative(gcost, true_gcost) < GRADIENT_TOLERANCE[dtype]
    assert torch.equal(launch.forward(Problem(cost, None, None, None, gamma, bandwidth))[0], cost_value)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("bandwidth", [-1, 30])
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("d", [3, 20])
def test_lengths_make_padding_irrelevant(dtype: torch.dtype, d: int, bandwidth: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x_lengths = torch.tensor([1, 20, 128, 140, 150], dtype=torch.int64)
    y_lengths = torch.tensor([5, 33, 130, 129, 160], dtype=torch.int64)
    x = torch.randn(5, 150, d, dtype=dtype, generator=generator)
    y = torch.randn(5, 160, d, dtype=dtype, generator=generator)
    cost = squared_distances(x, y)
    for b in range(5):
        x[b, x_lengths[b] :] = math.nan
        y[b, y_lengths[b] :] = math.nan
        cost[b, x_lengths[b] :] = math.nan
        cost[b, :, y_lengths[b] :] = math.nan
    value, gx, gy = fused(x, y, 1.0, bandwidth, (x_lengths, y_lengths))
    cost_value, gcost = from_cost(cost, 1.0, bandwidth, (x_lengths, y_lengths))
    for b, (n, m) in enumerate(zip(x_lengths.tolist(), y_lengths.tolist(), strict=True)):
        alone = fused(x[b : b + 1, :n], y[b : b + 1, :m], 1.0, bandwidth)
        assert torch.equal(value[b], alone[0][0])
        assert torch.equal(gx[b, :n], alone[1][0])
        assert torch.equal(gy[b, :m], alone[2][0])
        assert torch.equal(gx[b, n:], torch.zeros_like(gx[b, n:]))
        assert torch.equal(gy[b, m:], torch.zeros_like(gy[b, m:]))
        cost_alone = from_cost(cost[b : b + 1, :n, :m].contiguous(), 1.0, bandwidth)
        assert torch.equal(cost_value[b], cost_alone[0][0])
        assert torch.equal(gcost[b, :n, :m], cost_alone[1][0])
        assert int((gcost[b] != 0).sum()) == int((gcost[b, :n, :m] != 0).sum())
        assert bool(torch.isfinite(gcost[b]).all())


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_nan_poisons_its_own_sample_only(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 140, 4, dtype=dtype, generator=generator)
    y = torch.randn(3, 150, 4, dtype=dtype, generator=generator)
    lengths = (
        torch.tensor([140, 139, 140], dtype=torch.int64),
        torch.tensor([150, 150, 150], dtype=torch.int64),
    )
    clean = fused(x, y, 1.0, -1, lengths)
    x[1, 7, 2] = math.nan
    value, gx, gy = fused(x, y, 1.0, -1, lengths)
    assert bool(value[1].isnan())
    assert bool(gx[1, :139].isnan().all())
    assert torch.equal(gx[1, 139:], torch.zeros_like(gx[1, 139:]))
    assert bool(gy[1].isnan().all())
    for b in (0, 2):
        for found, expected in zip((value, gx, gy), clean, strict=True):
            assert torch.equal(found[b], expected[b])


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("position", [(0, 0), (149, 139), (0, 139), (70, 3), (128, 128)])
def test_one_nan_cost_anywhere_gives_nan(position: tuple[int, int]) -> None:
    cost = torch.rand(1, 150, 140)
    cost[0, position[0], position[1]] = math.nan
    value, gcost = from_cost(cost, 0.1)
    assert bool(value.isnan().all())
    assert bool(gcost.isnan().all())


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_negative_and_forbidden_costs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    cost = torch.randn(4, 140, 150, dtype=dtype, generator=generator) * 3
    cost[torch.rand(cost.shape, generator=generator) < 0.2] = math.inf
    cost[:, 0, 0] = -1.0
    cost[:, -1, -1] = 0.5
    cost[1] = math.inf
    cost[2, :, 60] = math.inf
    truth = cost.double().requires_grad_()
    true_value = _reference.softdtw_from_cost(truth, 0.5)
    (true_gradient,) = torch.autograd.grad(true_value.nan_to_num(posinf=0.0).sum(), truth)
    true_value = true_value.detach()
    value, gcost = from_cost(cost, 0.5)
    for b in (0, 3):
        assert abs(float(value[b]) - float(true_value[b])) < VALUE_TOLERANCE[dtype] * abs(
            float(true_value[b])
        )
        assert relative(gcost[b], true_gradient[b]) < GRADIENT_TOLERANCE[dtype]
        assert bool((gcost[b][cost[b].isinf()] == 0).all())
    for b in (1, 2):
        assert float(value[b]) == math.inf
        assert torch.equal(gcost[b], torch.zeros_like(gcost[b]))


def test_minus_infinity_gives_nan_and_not_a_number_that_looks_right() -> None:
    cost = torch.rand(1, 20, 20)
    cost[0, 5, 5] = -math.inf
    assert bool(from_cost(cost, 1.0)[0].isnan())


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("gamma", "cost_scale"),
    [
        pytest.param(
            gamma, cost, marks=[] if gamma == cost or (gamma, cost) == (1e-6, 1e6) else pytest.mark.slow
        )
        for gamma, cost in itertools.product([1e-6, 1e-3, 1.0, 1e3, 1e6], repeat=2)
    ],
)
def test_whole_range_of_gamma_and_cost(gamma: float, cost_scale: float) -> None:
    generator = torch.Generator().manual_seed(4)
    n, m, d = 90, 140, 3
    x = torch.randn(2, n, d, generator=generator) * math.sqrt(cost_scale)
    y = torch.randn(2, m, d, generator=generator) * math.sqrt(cost_scale)
    true_value, true_gx, true_gy, _ = oracle(x, y, gamma, -1, (None, None), torch.ones(2))
    value, gx, gy = fused(x, y, gamma)
    assert bool((value.double() - true_value).abs().max() <= 1e-6 * (true_value.abs().max() + gamma))
    assert relative(gx, true_gx) < 2e-5
    assert relative(gy, true_gy) < 2e-5
    cost = squared_distances(x.double(), y.double()).float()
    cost_value, gcost = from_cost(cost, gamma)
    truth = cost.double().requires_grad_()
    true_value = _reference.softdtw_from_cost(truth, gamma)
    (true_gradient,) = torch.autograd.grad(true_value.sum(), truth)
    assert bool((cost_value.double() - true_value).abs().max() <= 1e-6 * (true_value.abs().max() + gamma))
    assert relative(gcost, true_gradient) < 2e-5


def test_costs_beyond_every_float_of_gamma() -> None:
    """They are +inf, without a warning of NumPy; costs of zero stay zero."""
    cost = torch.zeros(2, 5, 4)
    cost[1] = 1e30
    value, gradient = from_cost(cost, 1e-300)
    assert value.tolist() == [0.0, math.inf]
    assert bool(gradient.isfinite().all())
    assert bool((gradient[1] == 0).all())


def test_only_samples_out_of_range_take_the_wide_path() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4, 60, 2, generator=generator)
    y = torch.randn(4, 50, 2, generator=generator)
    plain = fused(x, y, 0.01)
    x[2] *= 1e5
    problem = arrays_of(Problem(x, y, None, None, 0.01, -1))
    assert launch._needs_wide(problem, 60).tolist() == [False, False, True, False]
    value, gx, gy = fused(x, y, 0.01)
    for b in (0, 1, 3):
        assert torch.equal(value[b], plain[0][b])
        assert torch.equal(gx[b], plain[1][b])
    true_value, true_gx, true_gy, _ = oracle(x[2:3], y[2:3], 0.01, -1, (None, None), torch.ones(1))
    assert abs(float(value[2]) / float(true_value[0]) - 1) < 1e-6
    assert relative(gx[2:3], true_gx) < 1e-5
    assert relative(gy[2:3], true_gy) < 1e-5


def test_large_common_offset_costs_nothing() -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(1, 300, 16, generator=generator) + 1000
    y = torch.randn(1, 280, 16, generator=generator) + 1000
    true_value, true_gx, true_gy, _ = oracle(x, y, 0.1, -1, (None, None), torch.ones(1))
    value, gx, gy = fused(x, y, 0.1)
    assert abs(float(value[0]) / float(true_value[0]) - 1) < 1e-6
    assert relative(gx, true_gx) < 1e-5
    assert relative(gy, true_gy) < 1e-5


def test_alignment_weight_is_conserved() -> None:
    generator = torch.Generator().manual_seed(7)
    cost = torch.rand(2, 400, 390, generator=generator) * 4
    _, alignment = from_cost(cost, 0.5)
    assert bool((alignment >= 0).all())
    torch.testing.assert_close(alignment[:, 0, 0], torch.ones(2), rtol=2e-6, atol=0)
    assert bool((alignment[:, -1, -1] == 1).all())
    # Every path meets every row and every column.
    assert bool((alignment.double().sum(1) > 1 - 1e-5).all())
    assert bool((alignment.double().sum(2) > 1 - 1e-5).all())
    total = alignment.double().sum((1, 2))
    assert bool(((total >= 400) & (total <= 789)).all())


def test_band_of_zero_is_the_trace_exactly() -> None:
    cost = torch.rand(2, 500, 500)
    value, alignment = from_cost(cost, 0.1, 0)
    torch.testing.assert_close(
        value, cost.double().diagonal(dim1=1, dim2=2).sum(1).float(), rtol=1e-6, atol=0
    )
    assert torch.equal(alignment, torch.eye(500).expand(2, -1, -1))


@pytest.mark.usefixtures("small_tiles")
def test_cells_outside_the_band_are_never_used() -> None:
    cost = torch.rand(1, 300, 310)
    row, column = torch.arange(300)[:, None], torch.arange(310)[None]
    outside = (row - column).abs() > 25
    plain = from_cost(cost, 0.3, 25)
    cost[0, outside] = math.nan
    poisoned = from_cost(cost, 0.3, 25)
    assert torch.equal(plain[0], poisoned[0])
    assert torch.equal(plain[1], poisoned[1])
    assert bool((poisoned[1][0, outside] == 0).all())


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("bandwidth", [-1, 0, 7, 40, 101, 128, 190])
@pytest.mark.parametrize("d", [2, 20])
def test_leftovers_in_scratch_memory_are_never_used(
    d: int, bandwidth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(13)
    x = torch.randn(2, 400, d, generator=generator)
    y = torch.randn(2, 400, d, generator=generator)
    cost = squared_distances(x, y)
    lengths = torch.tensor([97, 33])
    aligned = scratch.aligned

    def results(leftover: float) -> tuple[Tensor, ...]:
        def filled(size: int, dtype: type) -> Any:
            array = aligned(size, dtype)
            integer = 255 if dtype == np.uint8 else -(1 << 20)  # bytes of a state: NaN
            array.fill(leftover if issubclass(dtype, np.floating) else integer)
            return array

        monkeypatch.setattr(scratch, "aligned", filled)
        monkeypatch.setattr(scratch, "_scratch", {})
        found = fused(x, y, 1.0, bandwidth)
        monkeypatch.setattr(scratch, "_scratch", {})
        # Of one tile, with padding: gradients with the value.
        short = fused(x[:, :100], y[:, :110], 1.0, max(bandwidth, 10), (lengths, lengths))
        monkeypatch.setattr(scratch, "_scratch", {})
        return *found, *short, *from_cost(cost, 1.0, bandwidth)

    expected = results(0.0)
    for leftover in (math.nan, 1e30, -1.0):
        for found, wanted in zip(results(leftover), expected, strict=True):
            assert torch.equal(found, wanted)


GUARD = 1 << 13


@pytest.mark.parametrize("bandwidth", [-1, 3, 40])
@pytest.mark.parametrize("features", [0, 1, 11, 40])
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_kernels_stay_in_their_parts_of_the_memory(
    dtype: torch.dtype, features: int, bandwidth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full tiles and partial ones, of pairs of one tile and of several: nothing beside a part is written, and
    results do not depend on what is there."""
    generator = torch.Generator().manual_seed(5)
    guards: list[Any] = []

    def allocate(needs: scratch.Needs, filling: float) -> Any:
        def take(part: Any) -> Any:
            if isinstance(part, tuple):
                return type(part)(*(take(each) for each in part))
            kind = needs.float_type if type(part) is int else needs.int_type
            array = np.full(part + 2 * GUARD, filling, kind)
            guards.extend((array[:GUARD], array[GUARD + part :]))
            return array[GUARD : GUARD + part]

        return take(scratch.sizes_of(needs))

    def results(n: int, m: int, filling: float) -> list[Tensor]:
        guards.clear()
        monkeypatch.setattr(scratch, "_scratch", {})
        monkeypatch.setattr(scratch, "allocate", lambda needs: allocate(needs, filling))
        generator.manual_seed(5)
        x, y = (torch.randn(2, size, features or 1, generator=generator).to(dtype) for size in (n, m))
        if features == 0:
            problem = Problem(squared_distances(x, y), None, None, None, 1.0, bandwidth, True)
            direction = Direction("matrix", torch.randn(2, n, m, generator=generator).to(dtype), None, True)
        else:
            problem = Problem(x, y, None, None, 1.0, bandwidth, True, True)
            direction = Direction("features", x.flip(0), y.flip(0), True, True)
        value, state = launch.forward(problem)
        gradients = launch.backward(problem, torch.ones_like(value), value, state)
        dot, value, dual_state = dual_launch.expected(problem, direction)
        seconds = dual_launch.expected_backward(problem, direction, torch.ones_like(dot), value, dual_state)
        assert guards
        for guard in guards:
            assert (guard == filling).all()
        return [value, *gradients, dot, *seconds]

    for n, m in ((32, 32), (31, 33), (256, 256), (300, 310)):
        if bandwidth < 0 or abs(n - m) <= bandwidth:
            expected = results(n, m, 7.0)
            for found, wanted in zip(results(n, m, -(2.0**20)), expected, strict=True):
                assert torch.equal(found, wanted)


@pytest.mark.parametrize("broadcast", ["x", "y"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_broadcast_side_and_result_types(broadcast: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(1 if broadcast == "x" else 3, 30, 4, generator=generator).to(dtype)
    y = torch.randn(1 if broadcast == "y" else 3, 40, 4, generator=generator).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    value, gx, gy = fused(x, y, 1.0)
    assert value.dtype == wide
    assert gx.dtype == (wide if broadcast == "x" else dtype)
    assert gy.dtype == (wide if broadcast == "y" else dtype)
    copied = fused(
        x.to(wide).repeat(4 - x.shape[0], 1, 1)[:3], y.to(wide).repeat(4 - y.shape[0], 1, 1)[:3], 1.0
    )
    assert torch.equal(value, copied[0])
    assert torch.equal(gx, copied[1].to(gx.dtype))
    assert torch.equal(gy, copied[2].to(gy.dtype))


def test_strides_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(9)
    base_x = torch.randn(6, 40, 5, generator=generator)
    base_y = torch.randn(3, 5, 50, generator=generator)
    x, y = base_x[::2], base_y.transpose(1, 2)
    expected = fused(x.contiguous(), y.contiguous(), 1.0)
    for found, wanted in zip(fused(x, y, 1.0), expected, strict=True):
        assert torch.equal(found, wanted)
    expanded = base_x[:1].expand(3, -1, -1)
    for found, wanted in zip(fused(expanded, y, 1.0), fused(expanded.contiguous(), y, 1.0), strict=True):
        assert torch.equal(found, wanted)
    cost = squared_distances(x, y)
    turned = cost.transpose(1, 2).contiguous().transpose(1, 2)
    for found, wanted in zip(from_cost(turned, 1.0), from_cost(cost, 1.0), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("d", [3, 20])
def test_sides_not_needed_are_left_out(d: int) -> None:
    x, y = torch.randn(2, 30, d), torch.randn(2, 40, d)
    value, state = launch.forward(Problem(x, y, None, None, 1.0, -1, True, True))
    both = launch.backward(Problem(x, y, None, None, 1.0, -1, True, True), torch.ones(2), value, state)
    only_x = launch.backward(Problem(x, y, None, None, 1.0, -1, True, False), torch.ones(2), value, state)
    only_y = launch.backward(Problem(x, y, None, None, 1.0, -1, False, True), torch.ones(2), value, state)
    assert torch.equal(only_x[0], both[0])
    assert only_x[1].shape == (0,)
    assert torch.equal(only_y[1], both[1])
    assert only_y[0].shape == (0,)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize(
    ("n", "m", "bandwidth"),
    [
        (n, m, bandwidth)
        for n, m in [(1, 1), (64, 64), (65, 129), (300, 301), (1000, 70), (1000, 900)]
        for bandwidth in [-1, 0, 5, 64, 127, 128, 129, 500]
        if bandwidth < 0 or bandwidth >= abs(n - m)  # others leave no path
    ],
)
def test_state_has_the_size_that_was_announced(n: int, m: int, dtype: torch.dtype, bandwidth: int) -> None:
    x, y = torch.randn(2, n, 3, dtype=dtype), torch.randn(2, m, 3, dtype=dtype)
    problem = Problem(x, y, None, None, 1.0, bandwidth, True, True)
    assert launch.forward(problem)[1].numel() == launch.state_bytes(problem)
    costs = problem._replace(x=torch.randn(2, n, m, dtype=dtype), y=None, need_y=False)
    assert launch.forward(costs)[1].numel() == config.saved_bytes(2, n, m, dtype, bandwidth)
    _, state = launch.forward(Problem(squared_distances(x, y), None, None, None, 1.0, bandwidth, True))
    assert state.numel() == config.saved_bytes(2, n, m, dtype, bandwidth)


def test_state_is_far_smaller_than_a_table() -> None:
    table = 4 * 20_000**2
    assert config.saved_bytes(1, 20_000, 20_000, torch.float32, -1) < table / 25
    assert config.saved_bytes(1, 20_000, 20_000, torch.float32, 100) < table / 1000


# -------------------------------------------------------------------------------------------------- threads
@pytest.mark.parametrize("bandwidth", [-1, 0, 150])
@pytest.mark.parametrize("batch", [1, 3])
def test_bitwise_the_same_for_any_number_of_threads_and_either_kind_of_ticket(
    batch: int, bandwidth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(10)
    x = torch.randn(batch, 500, 12, generator=generator)
    y = torch.randn(batch, 500, 12, generator=generator)
    lengths = torch.tensor([500, 400, 130][:batch], dtype=torch.int64)
    monkeypatch.setattr(cpu_threads, "SMALLEST_SHARE", 1)
    results = []
    before = torch.get_num_threads()
    try:
        for threads, by_tile in [(1, False), (1, True), (2, False), (2, True), (3, True), (8, True)]:
            torch.set_num_threads(threads)
            monkeypatch.setattr(launch, "_by_tile", lambda problem, count, answer=by_tile: answer)
            for _ in range(3):
                results.append(
                    (
                        *fused(x, y, 1.0, bandwidth, (lengths, lengths)),
                        launch.forward(Problem(x, y, lengths, lengths, 1.0, bandwidth))[0],
                        *from_cost(squared_distances(x, y), 1.0, bandwidth, (lengths, lengths)),
                    )
                )
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        for found, expected in zip(result, results[0], strict=True):
            assert torch.equal(found, expected)


def test_threads_are_woken_for_work_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    share = cpu_threads.SMALLEST_SHARE
    counts = [cpu_threads.threads_for(work) for work in (0, share, 2 * share, 5 * share + 1, 99 * share)]
    assert counts == [1, 1, 2, 5, 8]


@pytest.mark.parametrize(("bandwidth", "cells"), [(-1, 4 * 30 * 28), (3, 4 * 30 * 7), (25, 4 * 30 * 28)])
def test_work_is_counted_in_cells_not_in_tiles(bandwidth: int, cells: int) -> None:
    x, y = torch.zeros(4, 30, 2), torch.zeros(4, 28, 2)
    assert arrays_of(Problem(x, y, None, None, 1.0, bandwidth)).cells == cells


def test_several_calling_threads_share_the_pool(two_threads: None) -> None:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(1, 700, 3, generator=generator)
    y = torch.randn(1, 700, 3, generator=generator)
    expected = fused(x, y, 1.0)
    wrong: list[str] = []

    def call() -> None:
        for _ in range(10):
            for found, wanted in zip(fused(x, y, 1.0), expected, strict=True):
                if not torch.equal(found, wanted):
                    wrong.append("differs")

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


FORKING_PROGRAM = """
import os, torch
from softdtw_cuda._cpu import launch
from softdtw_cuda._problem import Problem
torch.set_num_threads(2)
torch.manual_seed(0)
x, y = torch.randn(1, 600, 3), torch.randn(1, 600, 3)
def gradient():
    problem = Problem(x, y, None, None, 1.0, -1, True, True)
    value, state = launch.forward(problem)
    return launch.backward(problem, torch.ones(1), value, state)[0]
expected = gradient()
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(gradient(), expected) else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes_too() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING_PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "0"


def test_an_error_in_a_worker_reaches_the_caller_and_stops_the_others() -> None:
    def work(worker: int) -> bool:
        if worker == 1:
            raise ValueError("from a worker")
        return True

    with pytest.raises(ValueError, match="from a worker"):
        cpu_threads.run(2, work)


# -------------------------------------------------------------------------------------------------- vectors
@numba.njit  # type: ignore[untyped-decorator]  # Numba's
def _apply_exp2(source: Any, target: Any) -> None:
    for k in range(0, source.size, vectors.lanes_of(source)):
        vectors.vstore(target, k, scaled_floats.vexp2(vectors.vload(source, k)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1.3e-7), (np.float64, 4e-16)])
def test_exp2_is_good_to_about_one_unit(dtype: type, tolerance: float) -> None:
    source: Any = np.linspace(-0.5, 0.5, 4096).astype(dtype)
    target = np.empty_like(source)
    _apply_exp2(source, target)
    truth = np.exp2(source.astype(np.longdouble))
    assert np.abs(target / truth - 1).max() < tolerance


@numba.njit  # type: ignore[untyped-decorator]  # Numba's
def _apply_down(n: Any, m: Any, target: Any) -> None:
    for k in range(0, target.size, vectors.lanes_of(target)):
        vectors.vstore(target, k, scaled_floats.vdown(vectors.vload(n, k), vectors.vload(m, k)))


@pytest.mark.parametrize(
    ("dtype", "integer", "cut"), [(np.float32, np.int32, 100), (np.float64, np.int64, 900)]
)
def test_powers_of_two_are_exact_and_end_in_zero(dtype: type, integer: type, cut: int) -> None:
    shift: Any = np.arange(4096).astype(integer)
    shift[-1] = (1 << 30) + (1 << 29)
    m: Any = np.full(4096, -(1 << 29), integer)
    target: Any = np.empty(4096, dtype)
    _apply_down(shift + m, m, target)
    assert np.array_equal(target, np.where(shift < cut, np.exp2(-shift.astype(np.float64)), 0).astype(dtype))


@numba.njit  # type: ignore[untyped-decorator]  # Numba's
def _apply_transpose(source: Any, target: Any, stride: int) -> None:
    vectors.transpose(source, 0, stride, target, 0, stride)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_transpose_and_shears(dtype: type) -> None:
    lanes = vectors.VECTOR_BYTES // np.dtype(dtype).itemsize
    source: Any = np.random.default_rng(0).random((lanes, lanes + 3)).astype(dtype)
    target = np.zeros_like(source)
    _apply_transpose(source.ravel(), target.ravel(), lanes + 3)
    assert np.array_equal(target[:, :lanes], source[:, :lanes].T)

    edge, height, width = 8 * lanes, 5 * lanes + 3, 7 * lanes
    pitch = edge + lanes
    rows: Any = np.random.default_rng(1).random((edge + 4 * lanes, pitch)).astype(dtype)
    diagonals: Any = np.full((2 * edge + 3 * lanes, pitch), np.nan, dtype)
    tile = Tile(edge, height, width, 0, UNBANDED)
    shear(rows.ravel(), tile, diagonals.ravel())
    for a, b in itertools.product(range(height), range(width)):
        assert diagonals[a + b, b] == rows[a + lanes, b]
    back = np.full_like(rows, np.nan)
    unshear(diagonals.ravel(), tile, back.ravel())
    inside = np.s_[lanes : lanes + height, :width]
    assert np.array_equal(back[inside], rows[inside])


def test_arguments_have_the_types_that_kernels_are_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code does not look at them again."""
    known: dict[Any, Any] = {}
    compile_for = compiling.compile_for

    def checked(kernel: Any, kind: Any, arguments: tuple[Any, ...]) -> Any:
        signature = compiling.signature_of(arguments)
        assert known.setdefault((kernel.__name__, kind), signature) == signature
        return compile_for(kernel, kind, arguments)

    monkeypatch.setattr(launch, "compile_for", checked)
    lengths = torch.tensor([3, 5], dtype=torch.int64)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, y = torch.randn(2, 6, 3).to(dtype), torch.randn(2, 5, 3).to(dtype)
        for a, b in [
            (x, y),
            (x[:1], y),
            (x.flip(0), y.expand(2, -1, -1)),
            (torch.randn(3, 6, 2).to(dtype).transpose(0, 2), y),
            (x[:1].expand(2, -1, -1), y[:1]),
            (x * 1e12, y),
        ]:
            for chosen in ((None, None), (lengths, lengths), (lengths.long(), lengths[[1, 0]])):
                for bandwidth in (-1, 2):
                    fused(a, b, 1.0, bandwidth, chosen, torch.ones(2).expand(2))
                    from_cost(squared_distances(a.float(), b.float()).to(dtype), 1.0, bandwidth, chosen)
                    launch.forward(Problem(a, b, *chosen, 1.0, bandwidth))
    assert len(known) == 8  # forward, backward and scaling in two types, distances and costs in float32


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_a_list_of_pairs_is_read_by_index(is_contiguous: bool) -> None:
    generator = torch.Generator().manual_seed(14)
    x = torch.randn(4, 40 if is_contiguous else 41, 3, generator=generator)[:, :40]
    y = torch.randn(3, 50, 3, generator=generator)
    lengths = torch.tensor([40, 33, 7, 20]), torch.tensor([50, 41, 9])
    pairs = torch.tensor([[3, 0], [0, 2], [0, 2], [1, 1], [2, 0]], dtype=torch.int32)

    arrays = arrays_of(Problem(x, y, *lengths, 1.0, -1, pairs=pairs))
    i, j = pairs.long().unbind(1)
    copied = arrays_of(Problem(x[i], y[j], lengths[0][i], lengths[1][j], 1.0, -1))
    assert arrays.pairs == 5
    assert np.array_equal(arrays.series.x_lengths, copied.series.x_lengths)
    assert np.array_equal(arrays.series.y_lengths, copied.series.y_lengths)
    value, state = launch._forward(arrays, 40, -1, True)
    wanted, wanted_state = launch._forward(copied, 40, -1, True)
    assert torch.equal(value, wanted)
    found = [torch.zeros(5, 40, 3), torch.zeros(5, 50, 3)]
    expected = [torch.zeros(5, 40, 3), torch.zeros(5, 50, 3)]
    both = Problem(x, y, None, None, 1.0, -1, True, True)
    launch._backward(arrays, both, torch.ones(5), value, state, *found)
    launch._backward(copied, both, torch.ones(5), wanted, wanted_state, *expected)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def bounds_of_distances(x: Tensor, y: Tensor, limits: list[float]) -> Any:
    problem = arrays_of(Problem(x, y, None, None, 1.0, -1))
    largest, centres = np.zeros(len(limits)), np.empty(x.shape[2], np.float32)
    largest_distance_worker(
        problem.series, np.array(limits), np.zeros(1, np.int64), centres, largest, 1 << 40, 0
    )
    return largest


def test_distance_bound_holds_and_is_not_far() -> None:
    generator = torch.Generator().manual_seed(12)
    x = torch.randn(3, 70, 8, generator=generator) + 1000
    y = torch.randn(3, 60, 8, generator=generator) + 1000
    largest = bounds_of_distances(x, y, [0.0] * 3)
    true_largest = squared_distances(x.double(), y.double()).amax((1, 2)).numpy()
    assert (largest >= true_largest).all()
    assert (largest <= 4 * true_largest).all()


@pytest.mark.parametrize("d", [1, 3, 16, 37])
def test_series_near_each_other_need_no_closer_look(d: int) -> None:
    """Half the limit bounds their distances; one number that is far, anywhere, is seen."""
    x, y = torch.rand(1, 23, d), torch.rand(1, 19, d)
    exact = bounds_of_distances(x, y, [0.0])
    assert exact < 4 * d
    assert bounds_of_distances(x, y, [20.0 * d]) == 10 * d
    for side in (x, y):
        for odd_one in (9.0, math.nan, math.inf):
            for step in range(side.shape[1]):
                for feature in (0, d - 1):
                    kept = side[0, step, feature].item()
                    side[0, step, feature] = odd_one
                    bound = bounds_of_distances(x, y, [20.0 * d])
                    side[0, step, feature] = kept
                    assert bound != 10 * d
                    assert bound >= (0 if math.isnan(odd_one) else (odd_one - 1) ** 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bandwidth", [-1, 9])
def test_gradient_with_the_value_is_that_of_two_passes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bandwidth: int
) -> None:
    """Pairs of one tile: bitwise equal values, gradients for gradients of any kind, flagged samples too."""
    x, y = torch.randn(6, 40, 3, dtype=dtype), torch.randn(6, 37, 3, dtype=dtype)
    x[1, 3] = math.nan
    x[2] *= 1e6  # beyond the range of float32 arithmetic
    lengths = [torch.tensor(each) for each in ([40, 40, 40, 1, 23, 40], [37, 37, 37, 9, 25, 36])]
    problem = Problem(x, y, *lengths, 0.01, bandwidth, True, True)
    grad = torch.tensor([1.0, 2.0, -0.5, 1.0, math.inf, 0.0], dtype=problem.value_dtype)
    together = launch.forward(problem)
    gradients = launch.backward(problem, grad, *together)
    monkeypatch.setattr(launch, "gradient_with_value", lambda *sizes: False)
    apart = launch.forward(problem)
    assert together[1].shape != apart[1].shape
    torch.testing.assert_close(together[0], apart[0], rtol=0, atol=0, equal_nan=True)
    tolerance = {"rtol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-6}
    for one, other in zip(gradients, launch.backward(problem, grad, *apart), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4])
def test_listed_pairs_keep_the_gradients_of_their_copies(dtype: torch.dtype, count: int) -> None:
    """Bit for bit, in first and second order: series in several pairs, flagged samples, a limit of memory."""
    x, y = torch.randn(count, 40, 3, dtype=dtype), torch.randn(3, 37, 3, dtype=dtype)
    y[1] *= 1e5  # beyond the range of float32 arithmetic
    lengths = torch.arange(40, 40 - count, -1), torch.tensor([37, 30, 36])
    pairs = torch.tensor([[0, 1], [count - 1, 0], [0, 2], [0, 1], [count - 1, 2]], dtype=torch.int32)
    listed = Problem(x, y, *lengths, 0.01, -1, True, True, pairs)
    grad = torch.tensor([1.0, 2.0, -0.5, 1.0, 0.0], dtype=listed.value_dtype)
    value, state = launch.forward(listed)
    copies = listed.gathered()
    expected = launch.forward(copies)
    number = 8 if dtype == torch.float64 else 4
    assert state.numel() == launch.state_bytes(listed) == number * 5 * (40 + 37) * 3
    torch.testing.assert_close((value, state), expected, rtol=0, atol=0)
    for ours, theirs in zip(
        launch.backward(listed, grad, value, state), launch.backward(copies, grad, *expected), strict=True
    ):
        torch.testing.assert_close(ours.to(dtype), theirs, rtol=0, atol=0)
    direction = Direction("tangents", torch.randn(5, 40, 3, dtype=dtype), None)
    second = dual_launch.expected(listed, direction)
    assert second[2].numel() == dual_launch.expected_state_bytes(listed, direction) == state.numel()
    torch.testing.assert_close(second, dual_launch.expected(copies, direction), rtol=0, atol=0)
    # All that pairs_at_a_time counts on: the state, and the gradients made of it; of float32 also copies,
    # state and gradients in float64, for pairs beyond its range.
    again = 0 if dtype == torch.float64 else 12 + 2 * number + 16
    assert pairs_at_a_time(listed, True, 3 * 77 * (64 + 3 * (3 * number + again))) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["tangents", "features", "position"])
@pytest.mark.parametrize("bandwidth", [-1, 9])
def test_second_order_in_one_pass_is_that_of_two(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str, bandwidth: int
) -> None:
    """As in first order; a gradient that is not needed is NaN in the state and asked for by nobody."""
    x, y = torch.randn(6, 40, 3, dtype=dtype), torch.randn(6, 37, 3, dtype=dtype)
    x[1, 3] = math.nan
    x[2] *= 1e5  # beyond the range of float32 arithmetic
    lengths = [torch.tensor(each) for each in ([40, 40, 40, 1, 23, 40], [37, 37, 37, 9, 25, 36])]
    problem = Problem(x, y, *lengths, 0.01, bandwidth, True, kind != "position")
    a, b = (None, None) if kind == "position" else (torch.randn_like(y)[:, :1].expand(6, 40, 3), y)
    direction = Direction(kind, a, b, kind == "features", False)
    grad = torch.tensor([1.0, 2.0, -0.5, 1.0, -3.0, 0.0], dtype=problem.value_dtype)
    *together, state = dual_launch.expected(problem, direction)
    assert state.numel() == dual_launch.expected_state_bytes(problem, direction)
    again = dual_launch.expected(problem, direction)[2]
    assert torch.equal(state, again)
    assert together[1][2] > 1e9
    assert together[1].isfinite().tolist() == [True, False, True, True, True, True]
    gradients = dual_launch.expected_backward(problem, direction, grad, together[1], state)
    monkeypatch.setattr(dual_launch, "has_gradient_with_value", lambda problem: False)
    *apart, state = dual_launch.expected(problem, direction)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 2e-6, torch.float64: 1e-13}[dtype]
    expected = dual_launch.expected_backward(problem, direction, grad, apart[1], state)
    for one, other in zip(gradients, expected, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one.isnan(), other.isnan())
        for pair in (0, 2, 3, 4, 5) if one.numel() else ():
            assert relative(one[pair], other[pair]) <= tolerance


@pytest.mark.parametrize("d", [3, 64])
def test_only_the_gradients_that_are_needed_are_kept(d: int) -> None:
    """Of a state of both, either one can be asked for."""
    x, y = torch.randn(3, 20, d), torch.randn(3, 19, d)
    both = Problem(x, y, None, None, 1.0, -1, True, True)
    value, state = launch.forward(both)
    gx, gy = launch.backward(both, torch.ones(3), value, state)
    assert state.numel() == 4 * (x.numel() + y.numel())
    for needs, side, wanted in (((True, False), x, gx), ((False, True), y, gy)):
        problem = both._replace(need_x=needs[0], need_y=needs[1])
        alone = launch.forward(problem)
        assert alone[1].numel() == launch.state_bytes(problem) == 4 * side.numel()
        for found in (alone, (value, state)):
            gradients = launch.backward(problem, torch.ones(3), *found)
            assert torch.equal(gradients[not needs[0]], wanted)
            assert gradients[needs[0]].numel() == 0


def test_slopes_where_paths_part_and_meet_again() -> None:
    """What E-dot sums to over all paths is zero, and stays so where a small gamma leaves a chain of loops.

    With the three parts of (15) rounded one by one the error is 3.8e-5, as exchanges 1.7e-6.
    """
    (case,) = (
        case
        for case in measure_second_order([Shape(512, 439, 1, 0.0)], 1e-3, "cpu")
        if case.what == "expected"
    )
    assert case.error < 1e-5


@pytest.mark.parametrize(
    ("rows", "columns", "radius"), [(1, 1, 0), (5, 9, 1), (9, 5, 2), (7, 7, 30), (12, 3, 1)]
)
def test_tiles_of_the_band(rows: int, columns: int, radius: int) -> None:
    inside = {(i, j) for i in range(rows) for j in range(columns) if abs(i - j) <= radius}
    for by_diagonal, reverse in itertools.product((False, True), repeat=2):
        order = list(zip(*order_of_tiles(rows, columns, radius, by_diagonal, reverse), strict=True))
        assert len(order) == len(inside)
        assert set(order) == inside
        at = {tile: k for k, tile in enumerate(order)}
        for i, j in order:
            for earlier in ((i - 1, j), (i, j - 1), (i - 1, j - 1)):
                assert earlier not in at or (at[earlier] < at[i, j]) != reverse


def test_a_narrow_band_of_a_long_pair_takes_no_memory_outside_it() -> None:
    x = torch.zeros(1, 300_000, 1)
    arrays = arrays_of(Problem(x, x, None, None, 1.0, 10))
    rows = arrays.tiles.rows
    threads, _, schedule = launch.plan(arrays, False, 1)
    assert threads == 1 or schedule.finished.size <= 5 * rows
    assert schedule.tile_rows.size <= 5 * rows
