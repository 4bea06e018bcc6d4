"""The cosine distance on the fused path: series embedded so that squared distances are 1 - cos."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softdtw_cuda import SoftDTW, softdtw, softdtw_cdist, softdtw_divergence
from softdtw_cuda._distances import cosine, embed_for_cosine
from tests.oracle import assert_within_float64, relative

F64 = torch.float64


def value_and_gradients(x: Tensor, y: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    value = softdtw(x, y, dist="cosine", **options)
    weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype, device=value.device)
    grad_x, grad_y = torch.autograd.grad(value, (x, y), weights)
    return value.detach(), grad_x, grad_y


def series(*shape: int, dtype: torch.dtype = F64, device: str = "cpu", zeros: tuple[int, ...] = ()) -> Tensor:
    x = torch.randn(*shape, dtype=dtype, device=device)
    x[:, list(zeros)] = 0.0
    return x


@pytest.mark.parametrize("d", [1, 3, 14, 15, 62, 64, 130])
def test_squared_distances_are_cosine_distances(d: int) -> None:
    x, y = series(2, 9, d, zeros=(0, 4)), series(2, 7, d, zeros=(3,))
    a, b = embed_for_cosine(x, True), embed_for_cosine(y, False)
    assert a.shape[2] == b.shape[2] >= d + 2
    assert d < 15 or a.shape[2] % 4 == 0
    squares = (a.unsqueeze(2) - b.unsqueeze(1)).square().sum(3)
    torch.testing.assert_close(squares, cosine(x, y), rtol=0, atol=1e-14)
    torch.testing.assert_close(squares[:, 0], torch.ones(2, 7, dtype=F64), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bandwidth": 9},
        {"x_lengths": [20, 31], "y_lengths": [25, 7]},
        {"normalize": True},
        {"normalize": True, "x_lengths": [20, 31], "y_lengths": [25, 7]},
    ],
    ids=str,
)
@pytest.mark.parametrize("d", [2, 20, 130])
def test_the_same_as_by_the_cost_matrix(device: str, d: int, options: dict[str, Any]) -> None:
    x = series(2, 31, d, device=device, zeros=(0, 7, 8))
    y = series(2, 28, d, device=device, zeros=(8, 20))
    expected = value_and_gradients(x, y, gamma=0.1, fused=False, **options)
    for measured, truth in zip(value_and_gradients(x, y, gamma=0.1, **options), expected, strict=True):
        assert_within_float64(measured, truth.cpu())
    assert (expected[1][:, 7] == 0).all()


@pytest.mark.parametrize("gamma", [0.001, 0.1, 10.0])
@pytest.mark.parametrize("d", [3, 14, 64, 200])
def test_float32_against_float64(device: str, d: int, gamma: float) -> None:
    # Drawn on the CPU: the same numbers for every device.
    x = series(2, 150, d, dtype=torch.float32, zeros=(11,)) + 0.5
    y = series(2, 170, d, dtype=torch.float32) * 1000
    measured = value_and_gradients(x.to(device), y.to(device), gamma=gamma, fused=True)
    expected = value_and_gradients(x.double(), y.double(), gamma=gamma, fused=False)
    for ours, truth, limit in zip(measured, expected, (1e-6, 1e-5, 1e-5), strict=True):
        assert relative(ours, truth) <= limit


def test_padding_changes_nothing(device: str) -> None:
    x, y = series(2, 20, 3, device=device), series(2, 20, 3, device=device)
    x[0, 12:], y[1, 15:] = torch.nan, torch.inf
    lengths = {"x_lengths": [12, 20], "y_lengths": [20, 15]}
    value, grad_x, grad_y = value_and_gradients(x, y, **lengths)
    assert (grad_x[0, 12:] == 0).all()
    assert (grad_y[1, 15:] == 0).all()
    for i, (n, m) in enumerate(((12, 20), (20, 15))):
        torch.testing.assert_close(value[i], softdtw(x[i, :n], y[i, :m], dist="cosine"))
        assert grad_x[i].isfinite().all()


def test_nan_in_one_sample_stays_there(device: str) -> None:
    x, y = series(3, 20, 3, device=device), series(3, 18, 3, device=device)
    expected = value_and_gradients(x, y)
    x[1, 5, 0] = torch.nan
    measured = value_and_gradients(x, y)
    assert measured[0][1].isnan()
    for ours, theirs in zip(measured, expected, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[2], theirs[2])


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("zeros", [(), (4, 5)])
def test_divergence_of_equal_series(device: str, zeros: tuple[int, ...], dtype: torch.dtype) -> None:
    x = series(2, 40, 5, dtype=dtype, device=device, zeros=zeros)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    value = softdtw_divergence(a, b, gamma=0.1, dist="cosine")
    value.sum().backward()
    torch.testing.assert_close(value.detach(), torch.zeros_like(value), rtol=0, atol=1e-5)
    assert (a.grad == 0).all()
    assert (b.grad == 0).all()


@pytest.mark.parametrize("normalize", [False, True])
def test_all_pairs(device: str, normalize: bool) -> None:
    x, y = series(2, 12, 3, device=device, zeros=(1,)), series(3, 15, 3, device=device, zeros=(2,))
    options: dict[str, Any] = {"dist": "cosine", "normalize": normalize, "gamma": 0.3}
    table = softdtw_cdist(x, y, **options)
    for i, one in enumerate(x):
        for j, other in enumerate(y):
            torch.testing.assert_close(table[i, j], softdtw(one, other, **options))


def test_broadcast(device: str) -> None:
    x, y = series(1, 20, 3, device=device), series(4, 22, 3, device=device)
    value, grad_x, grad_y = value_and_gradients(x, y)
    repeated = value_and_gradients(x.repeat(4, 1, 1), y)
    torch.testing.assert_close(value, repeated[0])
    torch.testing.assert_close(grad_x, repeated[1].sum(0, keepdim=True))
    torch.testing.assert_close(grad_y, repeated[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(device: str, dtype: torch.dtype) -> None:
    x, y = (series(2, 30, 6, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    value, grad_x, grad_y = value_and_gradients(x, y, gamma=0.1)
    assert (value.dtype, grad_x.dtype, grad_y.dtype) == (torch.float32, dtype, dtype)
    expected = value_and_gradients(x.double(), y.double(), gamma=0.1)
    assert relative(value, expected[0].cpu()) <= 1e-6
    assert relative(grad_x, expected[1].cpu()) <= torch.finfo(dtype).eps / 2


def test_a_module_may_demand_it(device: str) -> None:
    x, y = series(2, 9, 3, device=device), series(2, 8, 3, device=device)
    assert torch.equal(SoftDTW(dist="cosine", fused=True)(x, y), softdtw(x, y, dist="cosine"))
