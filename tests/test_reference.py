"""The oracle itself, against enumeration and finite differences, and as a backend without kernels."""

from __future__ import annotations

import math

import pytest
import torch

from softdtw_cuda import _reference
from softdtw_cuda._problem import NO_BAND, Direction, Problem
from tests.oracle import assert_within_float64, enumerate_paths, relative


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 4), (5, 1), (3, 4), (5, 5)])
@pytest.mark.parametrize("bandwidth", [-1, 2])
@pytest.mark.parametrize("gamma", [0.05, 1.0])
def test_every_path(n: int, m: int, bandwidth: int, gamma: float) -> None:
    if bandwidth >= 0 and abs(n - m) > bandwidth:
        bandwidth = abs(n - m)
    cost = torch.randn(1, n, m, dtype=torch.float64, requires_grad=True)
    value, alignment = enumerate_paths(cost[0].detach(), gamma, bandwidth)
    measured = _reference.softdtw_from_cost(cost, gamma, bandwidth)
    assert measured.item() == pytest.approx(value, rel=1e-12, abs=1e-13)
    (grad,) = torch.autograd.grad(measured.sum(), cost)
    torch.testing.assert_close(grad[0], alignment, rtol=1e-11, atol=1e-13)
    swept = _reference.alignment_from_cost(cost.detach(), gamma, bandwidth)
    torch.testing.assert_close(swept[0], alignment, rtol=1e-11, atol=1e-13)


def test_differentiable_as_often_as_autograd_likes() -> None:
    lengths = {"x_lengths": torch.tensor([3, 4]), "y_lengths": torch.tensor([4, 3])}

    def loss(cost: torch.Tensor) -> torch.Tensor:
        return _reference.softdtw_from_cost(cost, 0.5, 2, **lengths)

    cost = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (cost,))
    assert torch.autograd.gradgradcheck(loss, (cost,))
    x = torch.randn(2, 4, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, y: _reference.softdtw(x, y, 0.5), (x, y))


def test_forbidden_cells_leave_no_nan_in_second_derivatives() -> None:
    cost = torch.rand(1, 5, 5, dtype=torch.float64)
    cost[0, 2, 1:] = math.inf
    cost[0, 0, 3] = math.inf
    cost.requires_grad_()
    value = _reference.softdtw_from_cost(cost, 0.5)
    (grad,) = torch.autograd.grad(value.sum(), cost, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), cost)
    assert torch.isfinite(grad).all()
    assert torch.isfinite(second).all()


def test_bad_lengths_give_nan() -> None:
    cost = torch.rand(4, 5, 5, dtype=torch.float64)
    value = _reference.softdtw_from_cost(cost, 1.0, 2, torch.tensor([5, 0, 6, 2]), torch.tensor([5, 5, 5, 5]))
    assert value.isnan().tolist() == [False, True, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_as_a_backend(dtype: torch.dtype, rows: int) -> None:
    """The operators' contract: types, per-sample gradients, zero gradient in the padding."""
    x, y = torch.randn(rows, 20, 3).to(dtype), torch.randn(3, 18, 3).to(dtype)
    x_lengths, y_lengths = torch.tensor([20, 7, 13]), torch.tensor([18, 9, 1])
    for sample, length in enumerate(y_lengths.tolist()):
        y[sample, length:] = math.nan
    problem = Problem(x, y, x_lengths, y_lengths, 0.1, NO_BAND, True, True)
    value, state = _reference.forward(problem)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (value.dtype, state.numel()) == (wide, 0)
    grad = torch.tensor([1.0, -2.0, 3.0], dtype=wide)
    grad_x, grad_y = _reference.backward(problem, grad, value, state)
    assert grad_x.dtype == (wide if rows == 1 else dtype)
    assert grad_y.dtype == dtype
    for sample in range(3):
        n, m = x_lengths[sample], y_lengths[sample]
        alone_x = x[sample % rows, :n].double().unsqueeze(0).requires_grad_()
        alone_y = y[sample, :m].double().unsqueeze(0).requires_grad_()
        alone = _reference.softdtw(alone_x, alone_y, 0.1)
        assert relative(value[sample], alone.detach()[0]) <= (1e-12 if dtype == torch.float64 else 1e-6)
        expected = torch.autograd.grad(alone.sum() * grad[sample].item(), (alone_x, alone_y))
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
        assert relative(grad_x[sample, :n], expected[0][0]) <= tolerance
        assert relative(grad_y[sample, :m], expected[1][0]) <= tolerance
        assert (grad_x[sample, n:] == 0).all()
        assert (grad_y[sample, m:] == 0).all()
    nothing, only_y = _reference.backward(problem._replace(need_x=False), grad, value, state)
    assert nothing.shape == (0,)
    assert torch.equal(only_y, grad_y)


def test_as_a_backend_broken_samples() -> None:
    cost = torch.rand(3, 6, 6)
    cost[0] = math.inf
    cost[1, 3, 3] = math.nan
    value, state = _reference.forward(Problem(cost, None, None, None, 1.0, -1, True))
    assert value[0] == math.inf
    assert value[1].isnan()
    grad = _reference.backward(Problem(cost, None, None, None, 1.0, -1, True), torch.ones(3), value, state)[0]
    assert (grad[0] == 0).all()
    assert grad[1].isnan().all()
    lengths = torch.tensor([6, 5, 6]), torch.tensor([6, 4, 6])
    padded = _reference.backward(Problem(cost, None, *lengths, 1.0, -1, True), torch.ones(3), value, state)[0]
    assert padded[1, :5, :4].isnan().all()
    assert (padded[1, 5:] == 0).all()
    assert (padded[1, :, 4:] == 0).all()
    assert_within_float64(
        grad[2].double(), _reference.alignment_from_cost(cost[2:].double(), 1.0)[0], tolerance=1e-7
    )


def test_as_a_backend_infinite_series() -> None:
    for side in range(2):
        series = [torch.randn(2, 9, 3, dtype=torch.float64) for _ in range(2)]
        series[side][0, 4, 1] = math.inf
        problem = Problem(*series, None, None, 1.0, NO_BAND, True, True)
        value, state = _reference.forward(problem)
        assert value[0] == math.inf
        grad = torch.ones(2, dtype=torch.float64)
        tangents = Direction("tangents", *(torch.randn_like(each) for each in series))
        for gradients in (
            _reference.backward(problem, grad, value, state),
            _reference.expected_backward(problem, tangents, grad, value, state)[:2],
        ):
            for gradient in gradients:
                assert (gradient[0] == 0).all()
                assert gradient[1].isfinite().all()
