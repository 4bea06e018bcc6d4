"""Sums of gradients by series: one after the other in the order of the list, on every route."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from softdtw_cuda import softdtw, softdtw_pairs
from softdtw_cuda._sums import add_in_order, gather, sum_to


def in_a_loop(total: Tensor, rows: Tensor, series: Tensor) -> Tensor:
    total = total.clone()
    for k, row in zip(series.tolist(), rows, strict=True):
        total[k] += row
    return total


def operands(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Large enough for torch to divide the sum among threads."""
    series = torch.randint(0, 3, (1200,)).to(device)
    rows = torch.randn(1200, 60, 8, dtype=torch.float64).to(device, dtype)
    return torch.randn(3, 60, 8, dtype=torch.float64).to(device, dtype), rows, series


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("differentiated", [False, True])
def test_rows_are_added_in_their_order(device: str, dtype: torch.dtype, differentiated: bool) -> None:
    total, rows, series = operands(device, dtype)
    expected = in_a_loop(total, rows, series)
    for _ in range(5):
        with torch.set_grad_enabled(differentiated):
            found = add_in_order(total.clone(), rows, series.int())
        if device == "cpu":
            assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=1e-4 if dtype == torch.float32 else 1e-12, atol=1e-4)


def test_parts_have_the_bits_of_the_whole(device: str) -> None:
    with torch.no_grad():
        total, rows, series = operands(device)
        whole = add_in_order(total.clone(), rows, series)
        for start in range(0, len(rows), 170):
            total = add_in_order(total, rows[start : start + 170], series[start : start + 170])
    assert torch.equal(total, whole)


@torch.no_grad()
def test_nothing_is_copied_on_the_cpu() -> None:
    """Copies of a side for each part were most of the time of a backward in parts."""
    total, rows, series = operands("cpu")
    assert add_in_order(total, rows, series) is total


@torch.no_grad()
def test_an_index_out_of_range_has_no_gradient(device: str) -> None:
    rows = torch.tensor([[1.0], [0.0], [0.0]], device=device)
    found = sum_to(rows, torch.zeros(2, 1, device=device), torch.tensor([1, -1, 2], device=device))
    assert found.tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("shape", [(), (60, 8)])
def test_the_gradient_of_a_copy_is_summed_in_order(shape: tuple[int, ...]) -> None:
    count = 1200 if shape else 200_000
    series, weights = torch.randint(0, 3, (count,)), torch.randn(count, *shape)
    x = torch.randn(3, *shape, requires_grad=True)
    (found,) = torch.autograd.grad((gather(x, series) * weights).sum(), x)
    if shape:
        assert torch.equal(found, in_a_loop(torch.zeros_like(x), weights, series))
    exact = in_a_loop(torch.zeros_like(x).double(), weights.double(), series)
    torch.testing.assert_close(found.double(), exact, rtol=0.0, atol=0.01)
    for _ in range(5):
        assert torch.equal(torch.autograd.grad((gather(x, series) * weights).sum(), x)[0], found)


def eager(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.autograd.grad(loss(x), x)[0]


def with_graph(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.autograd.grad(loss(x), x, create_graph=True)[0].detach()


def by_transform(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gradient: Tensor = torch.func.grad(loss)(x.detach())
    return gradient


@pytest.mark.parametrize("route", [eager, with_graph, by_transform])
@pytest.mark.parametrize("dist", ["sqeuclidean", "euclidean", "cityblock"])
def test_gradients_are_summed_in_order_on_every_route(
    route: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor], dist: str
) -> None:
    """By as many threads as torch has; torch's own sums change from run to run."""
    x, y = torch.randn(3, 60, 8, requires_grad=True), torch.randn(400, 60, 8)
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(400))
    weights = torch.randn(len(pairs))
    each = x.detach()[pairs[:, 0]].requires_grad_()
    rows = route(lambda each: (softdtw(each, y[pairs[:, 1]], dist=dist) * weights).sum(), each)
    found = route(lambda x: (softdtw_pairs(x, y, pairs, dist=dist) * weights).sum(), x)
    assert torch.equal(found, in_a_loop(torch.zeros(3, 60, 8), rows, pairs[:, 0]))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does
@pytest.mark.parametrize("options", [{"dist": "euclidean"}, {"normalize": True}], ids=str)
def test_compiled_gradients_are_summed_in_order(device: str, options: dict[str, Any]) -> None:
    """index_add, which eager copies go back by, is left to no compiler."""
    x, y = torch.randn(3, 9, 2, device=device, requires_grad=True), torch.randn(4, 9, 2, device=device)
    pairs = torch.tensor([[0, 1], [2, 0], [0, 1], [0, 3]], device=device)
    names: set[str] = set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(str(function))
            return function(*args, **(kwargs or {}))

    compiled = torch.compile(
        lambda x: softdtw_pairs(x, y, pairs, **options), backend="aot_eager", fullgraph=True
    )
    value = compiled(x)
    expected = torch.autograd.grad(softdtw_pairs(x, y, pairs, **options).sum(), x)
    with Recorder():  # type: ignore[no-untyped-call]  # torch's own
        found = torch.autograd.grad(value.sum(), x)
    assert torch.equal(found[0], expected[0])
    assert any("segment_reduce" in name for name in names)
    assert not any("index_add" in name or "index_put" in name for name in names)
