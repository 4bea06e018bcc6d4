"""Lengths, padding, broken numbers, empty batches, strides: what a user may feed the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from softdtw_cuda import (
    distributed,
    gamma_heuristic,
    softdtw,
    softdtw_alignment,
    softdtw_barycenter,
    softdtw_cdist,
    softdtw_divergence,
    softdtw_from_cost,
    softdtw_knn,
)
from tests.oracle import assert_within_float64, truth

DISTS = pytest.mark.parametrize("dist", ["sqeuclidean", "euclidean", "cityblock", "cosine"])
FUSED = pytest.mark.parametrize("fused", [True, False], ids=["fused", "cost"])
X_LENGTHS, Y_LENGTHS = [33, 1, 70, 64], [40, 5, 66, 1]


def padded(device: str, filler: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(4, size, 3, dtype=torch.float64, generator=generator) for size in (70, 66))
    for side, lengths in ((x, X_LENGTHS), (y, Y_LENGTHS)):
        for sample, length in enumerate(lengths):
            side[sample, length:] = filler
    return x.to(device).requires_grad_(), y.to(device).requires_grad_()


@DISTS
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("filler", [0.0, math.nan, math.inf, 1e300])
def test_padding_changes_nothing(device: str, dist: str, normalize: bool, filler: float) -> None:
    x, y = padded(device, filler)
    value = softdtw(x, y, dist=dist, normalize=normalize, x_lengths=X_LENGTHS, y_lengths=Y_LENGTHS)
    value.sum().backward()
    for sample, (n, m) in enumerate(zip(X_LENGTHS, Y_LENGTHS, strict=True)):
        alone_x = x[sample, :n].detach().clone().requires_grad_()
        alone_y = y[sample, :m].detach().clone().requires_grad_()
        alone = softdtw(alone_x, alone_y, dist=dist, normalize=normalize)
        alone.backward()
        assert_within_float64(value[sample], alone.detach().cpu(), 1e-11)
        for grad, alone_grad, length in ((x.grad, alone_x.grad, n), (y.grad, alone_y.grad, m)):
            torch.testing.assert_close(grad[sample, :length], alone_grad, rtol=1e-10, atol=1e-10)
            assert (grad[sample, length:] == 0).all()


@FUSED
def test_lengths_and_band_match_the_oracle(device: str, fused: bool) -> None:
    x, y = padded(device, math.nan)
    x_lengths, y_lengths = [33, 1, 70, 5], [40, 5, 66, 1]
    value = softdtw(x, y, gamma=0.5, bandwidth=9, fused=fused, x_lengths=x_lengths, y_lengths=y_lengths)
    value.sum().backward()
    expected = truth(x, y, 0.5, 9, x_lengths, y_lengths)
    assert_within_float64(value, expected.value)
    assert_within_float64(x.grad, expected.grad_x)
    assert_within_float64(y.grad, expected.grad_y)


def test_every_kind_of_lengths_means_the_same(device: str) -> None:
    x, y = padded(device, math.nan)
    expected = softdtw(x, y, x_lengths=X_LENGTHS, y_lengths=Y_LENGTHS)
    assert torch.isfinite(expected).all()
    for dtype in (torch.int16, torch.int32, torch.int64):
        for where in {"cpu", device}:
            lengths = [torch.tensor(given, dtype=dtype, device=where) for given in (X_LENGTHS, Y_LENGTHS)]
            assert torch.equal(softdtw(x, y, x_lengths=lengths[0], y_lengths=lengths[1]), expected)
    strided = torch.tensor([[length, 0] for length in X_LENGTHS])[:, 0]
    assert torch.equal(softdtw(x, y, x_lengths=strided, y_lengths=tuple(Y_LENGTHS)), expected)
    one = softdtw(x[0], y[0], x_lengths=33, y_lengths=torch.tensor(40))
    assert one.dim() == 0
    assert one.item() == pytest.approx(expected[0].item(), rel=1e-12)


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", [Marked, torch.nn.Parameter])
def test_lengths_of_another_type_are_checked_too(device: str, kind: type[torch.Tensor]) -> None:
    def marked(numbers: list[int]) -> torch.Tensor:
        given = torch.tensor(numbers)
        return given.as_subclass(Marked) if kind is Marked else torch.nn.Parameter(given, requires_grad=False)

    x, y = padded(device, math.nan)
    lengths = marked(X_LENGTHS), marked(Y_LENGTHS)
    assert all(type(each) is kind for each in lengths)
    expected = softdtw(x, y, x_lengths=X_LENGTHS, y_lengths=Y_LENGTHS)
    assert torch.equal(softdtw(x, y, x_lengths=lengths[0], y_lengths=lengths[1]), expected)
    cost = torch.rand(4, 70, 66, device=device)
    call: Callable[[], object]
    for bad in (200_000, -5, 0):
        wrong = marked([33, bad, 70, 5])
        for call in (
            lambda wrong=wrong: softdtw(x, y, x_lengths=wrong),
            lambda wrong=wrong: softdtw_from_cost(cost, x_lengths=wrong),
            lambda wrong=wrong: softdtw_barycenter(x, lengths=wrong),
        ):
            with pytest.raises(ValueError, match=rf"lengths\[1\] is {bad}, expected a length from 1 to 70"):
                call()
    with pytest.raises(ValueError, match="bandwidth"):
        softdtw(x, y, bandwidth=1, x_lengths=marked([33, 1, 70, 5]), y_lengths=Y_LENGTHS)
    assert softdtw_barycenter(x, lengths=lengths[0], max_iter=1).shape == (42, 3)


@pytest.mark.parametrize("default", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensors_are_made_where_the_inputs_are(default: str, device: str) -> None:
    """Not where torch makes them by default."""
    x, y = (torch.randn(3, steps, 2, device=device).requires_grad_() for steps in (20, 15))
    cost = torch.rand(3, 20, 15, device=device, requires_grad=True)

    def answers() -> list[torch.Tensor]:
        values = [
            softdtw(x, y),
            softdtw(x, y, x_lengths=[5, 20, 7], normalize=True),
            softdtw(x, y, dist="cityblock", bandwidth=8),
            softdtw_from_cost(cost),
            softdtw_alignment(x, y),
            softdtw_barycenter(x, weights=[1.0, 2.0, 3.0], lengths=[5, 20, 7], max_iter=2),
            softdtw_barycenter(list(x), max_iter=2, optimizer="lbfgs"),
            softdtw_cdist(x.detach(), normalize=True),
            *softdtw_knn(x.detach(), y.detach().cpu(), 2, query_lengths=[5, 20, 7], exclude_self=True),
            torch.tensor(gamma_heuristic(x, lengths=[5, 20, 7], n_samples=20), device=device),
            distributed.cdist(x.detach(), y.detach().cpu(), normalize=True),
            *distributed.knn(x.detach().cpu(), None, 2, device=device),
        ]
        gradients = torch.autograd.grad(sum(values[:4]).sum(), (x, y, cost))
        return [*(value.detach() for value in values), *gradients]

    expected = answers()
    torch.set_default_device(default)
    try:
        given = answers()
    finally:
        torch.set_default_device(None)
    for ours, theirs in zip(given, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_lazy_negation_and_zero_tensors(device: str) -> None:
    x, y = (torch.randn(3, steps, 2, device=device) for steps in (20, 15))
    cost = torch.rand(3, 20, 15, device=device)
    for call, series in ((softdtw, (x, y)), (softdtw_from_cost, (cost,))):
        given = [torch._neg_view(-each).requires_grad_() for each in series]
        plain = [each.clone().requires_grad_() for each in series]
        assert all(each.is_neg() for each in given)
        expected = call(*plain)
        assert torch.equal(call(*given), expected)
        weights = torch.tensor([1.0, -2.0, 3.0], device=device)
        wanted = torch.autograd.grad(expected, plain, weights, retain_graph=True)
        for ours in (
            torch.autograd.grad(call(*given), given, weights),
            torch.autograd.grad(expected, plain, torch._neg_view(-weights), retain_graph=True),
        ):
            assert all(map(torch.equal, ours, wanted))
        none = torch.autograd.grad(expected, plain, torch._efficientzerotensor(3, device=device))
        assert all((each == 0).all() for each in none)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e16, 1e30])
def test_costs_too_large_for_gamma_forbid_their_cell(device: str, dtype: torch.dtype, size: float) -> None:
    """Never a wrong number: rounded to an exponent they would give one."""
    cost = torch.rand(2, 6, 5, dtype=dtype, device=device)
    cost[0], cost[1, 2, 2] = size, size
    forbidden = cost.clone()
    forbidden[0], forbidden[1, 2, 2] = math.inf, math.inf
    values = [softdtw_from_cost(given.requires_grad_()) for given in (cost, forbidden)]
    torch.testing.assert_close(*values)
    assert values[0].isinf().tolist() == [True, False]
    grads = [
        torch.autograd.grad(*pair)[0] for pair in ((values[0].sum(), cost), (values[1].sum(), forbidden))
    ]
    torch.testing.assert_close(*grads)
    x, y = torch.zeros(1, 9, 1, dtype=dtype, device=device), torch.ones(1, 9, 1, dtype=dtype, device=device)
    assert softdtw(x, y, gamma=1e-20).isinf()
    largest = torch.full((1, 6, 5), 1e15, dtype=dtype, device=device)
    torch.testing.assert_close(softdtw_from_cost(largest), largest[:, 0, 0] * 6)


def test_lengths_of_a_cost_matrix(device: str) -> None:
    cost = torch.rand(3, 9, 8, dtype=torch.float64)
    lengths = {"x_lengths": [9, 4, 1], "y_lengths": [3, 8, 1]}
    broken = cost.clone()
    for sample, (n, m) in enumerate(zip(*lengths.values(), strict=True)):
        broken[sample, n:] = math.nan
        broken[sample, :, m:] = math.nan
    broken = broken.to(device).requires_grad_()
    value = softdtw_from_cost(broken, gamma=0.3, **lengths)
    value.sum().backward()
    alignment = softdtw_alignment(cost=broken.detach(), gamma=0.3, **lengths)
    assert torch.equal(alignment, broken.grad)
    for sample, (n, m) in enumerate(zip(*lengths.values(), strict=True)):
        alone = softdtw_from_cost(cost[sample, :n, :m], gamma=0.3)
        assert value[sample].item() == pytest.approx(alone.item(), rel=1e-12)
        assert (broken.grad[sample, n:] == 0).all()
        assert (broken.grad[sample, :, m:] == 0).all()
        assert broken.grad[sample, n - 1, m - 1].item() == pytest.approx(1)


@pytest.mark.gpu
def test_bad_lengths_on_the_device_give_nan() -> None:
    """Reading them on the host would make it wait for the GPU; the kernel answers NaN for the sample."""
    x, y = padded("cuda", 0.0)
    for bad in (0, -3, 71):
        lengths = torch.tensor([33, bad, 70, 64], device="cuda")
        value = softdtw(x, y, x_lengths=lengths)
        assert value.isnan().tolist() == [False, True, False, False]
    value = softdtw(x, y, bandwidth=4, x_lengths=torch.tensor([66, 10, 70, 61], device="cuda"))
    assert value.isnan().tolist() == [False, True, False, True]


@DISTS
@FUSED
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_sample_breaks_itself_alone(
    device: str, dist: str, fused: bool | None, broken: float
) -> None:
    if fused and dist != "sqeuclidean":
        fused = None
    x, y = (torch.randn(3, size, 2, device=device) for size in (50, 45))
    healthy_x, healthy_y = x.clone().requires_grad_(), y.clone().requires_grad_()
    healthy = softdtw(healthy_x, healthy_y, dist=dist, fused=fused)
    healthy.sum().backward()
    x[1, 20, 0] = broken
    x, y = x.requires_grad_(), y.requires_grad_()
    value = softdtw(x, y, dist=dist, fused=fused)
    value.sum().backward()
    assert not math.isfinite(value[1].item())
    if math.isnan(broken):
        assert value[1].isnan()
        assert x.grad[1].isnan().any()
    for sample in (0, 2):
        assert value[sample] == healthy[sample]
        assert torch.equal(x.grad[sample], healthy_x.grad[sample])
        assert torch.equal(y.grad[sample], healthy_y.grad[sample])


@pytest.mark.parametrize("broken", [math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dist", ["sqeuclidean", "euclidean", "cityblock"])
def test_an_infinite_step_has_infinite_costs_and_no_gradient(
    device: str, dist: str, dtype: torch.dtype, broken: float
) -> None:
    """From the cost matrix, gradients, tangents and Hessian-vector products: 0 * inf would be NaN."""
    x, y, tangent = (torch.randn(2, size, 3, dtype=dtype, device=device) for size in (20, 17, 20))
    for side in (x, y):
        side[0, 5, 1] = broken
        sides = [each.clone().requires_grad_() for each in (x, y)]
        value = softdtw(*sides, dist=dist, fused=False)
        assert value[0] == math.inf
        first = torch.autograd.grad(value.sum(), sides, create_graph=True)
        second = torch.autograd.grad((first[0] * tangent).sum(), sides)
        along_x = torch.func.jvp(partial(softdtw, y=y, dist=dist, fused=False), (x,), (tangent,))
        for result in (*first, *second, along_x[1]):
            assert (result[0] == 0).all()
            assert result[1].isfinite().all()
            assert (result[1] != 0).any() or dist == "cityblock"
        side[0, 5, 1] = 0.0


@pytest.mark.parametrize("features", [1, 3, 12])
@pytest.mark.parametrize("size", [20, 300])
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"dist": "cosine"}, {"normalize": True}], ids=str)
def test_of_an_infinite_step_the_value_is_infinite_or_nan_and_the_gradient_with_it(
    device: str, options: dict[str, Any], size: int, features: int
) -> None:
    x, y = (torch.randn(2, size, features, device=device) for _ in range(2))
    x[0, 5, 0] = math.inf
    x.requires_grad_()
    value = softdtw(x, y, **options)
    value.sum().backward()
    assert value[1].isfinite()
    assert x.grad[1].isfinite().all()
    if value[0].isnan():
        assert x.grad[0].isnan().any()
    else:
        assert value[0] == math.inf
        assert (x.grad[0] == 0).all()


@FUSED
def test_a_broken_sample_leaves_its_padding_alone(device: str, fused: bool) -> None:
    x, y = padded(device, 0.0)
    with torch.no_grad():
        x[0, 5] = math.nan
    softdtw(x, y, fused=fused, x_lengths=X_LENGTHS, y_lengths=Y_LENGTHS).sum().backward()
    assert x.grad[0, : X_LENGTHS[0]].isnan().any()
    assert (x.grad[0, X_LENGTHS[0] :] == 0).all()
    assert (y.grad[0, Y_LENGTHS[0] :] == 0).all()
    assert torch.isfinite(x.grad[1:]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_infeasible_cost_matrix_gives_inf_and_no_gradient(device: str, dtype: torch.dtype) -> None:
    cost = torch.rand(3, 40, 40, dtype=dtype, device=device)
    cost[0] = math.inf
    cost[1, :, 17] = math.inf
    cost.requires_grad_()
    value = softdtw_from_cost(cost)
    value.sum().backward()
    assert value[0] == math.inf
    assert value[1] == math.inf
    assert torch.isfinite(value[2])
    assert (cost.grad[:2] == 0).all()
    assert cost.grad[2, 0, 0].item() == pytest.approx(1, rel=1e-5)
    assert (softdtw_alignment(cost=cost.detach())[:2] == 0).all()


def test_forbidden_cells_are_avoided(device: str) -> None:
    cost = torch.rand(1, 30, 30, dtype=torch.float64, device=device)
    wall = torch.zeros(30, 30, dtype=torch.bool)
    wall[10, 1:] = True  # one gap, in column 0
    cost = cost.masked_fill(wall.to(device), math.inf)
    alignment = softdtw_alignment(cost=cost, gamma=0.2)[0].cpu()
    assert (alignment[wall] == 0).all()
    assert alignment[10, 0].item() == pytest.approx(1)
    assert alignment.isfinite().all()


class TestEmptyBatch:
    def test_pair(self, device: str) -> None:
        x = torch.zeros(0, 5, 2, device=device, requires_grad=True)
        y = torch.zeros(1, 4, 2, device=device, requires_grad=True)
        each: tuple[dict[str, Any], ...]
        each = ({}, {"fused": False}, {"normalize": True}, {"dist": "cosine"}, {"x_lengths": []})
        for options in each:
            value = softdtw(x, y, **options)
            assert value.shape == (0,)
            assert value.dtype == torch.float32
            value.sum().backward()
            assert x.grad.shape == x.shape
            assert (y.grad == 0).all()

    def test_cost(self, device: str) -> None:
        cost = torch.zeros(0, 5, 4, device=device, requires_grad=True)
        value = softdtw_from_cost(cost)
        value.sum().backward()
        assert value.shape == (0,)
        assert cost.grad.shape == cost.shape
        assert softdtw_alignment(cost=cost.detach()).shape == (0, 5, 4)

    def test_all_pairs(self, device: str) -> None:
        x = torch.zeros(0, 5, 2, device=device, requires_grad=True)
        y = torch.zeros(3, 4, 2, device=device, requires_grad=True)
        value = softdtw_cdist(x, y)
        assert value.shape == (0, 3)
        value.sum().backward()
        assert (y.grad == 0).all()
        assert softdtw_cdist(y, x).shape == (3, 0)


class TestStrides:
    def variants(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        wide = torch.randn(*x.shape[:2], 2 * x.shape[2], dtype=x.dtype, device=x.device)
        wide[..., ::2] = x
        return {
            "transposed": x.transpose(1, 2).contiguous().transpose(1, 2),
            "batch last": x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
            "every other feature": wide[..., ::2],
            "offset": torch.cat((x[:1], x))[1:],
            "every other sample": x.repeat_interleave(2, 0)[::2],
            "reversed twice": x.flip(1).flip(1),
        }

    @FUSED
    def test_any_layout_gives_the_same(self, device: str, fused: bool) -> None:
        x, y = (torch.randn(3, size, 4, device=device) for size in (40, 37))
        leaf_x, leaf_y = x.clone().requires_grad_(), y.clone().requires_grad_()
        expected = softdtw(leaf_x, leaf_y, fused=fused)
        expected.sum().backward()
        for name, laid_out in self.variants(x).items():
            assert torch.equal(laid_out, x), name
            laid_out = laid_out.detach().requires_grad_()
            value = softdtw(laid_out, y, fused=fused)
            value.sum().backward()
            assert torch.equal(value, expected), name
            if fused:
                assert torch.equal(laid_out.grad, leaf_x.grad), name
            else:  # torch's matrix products depend on the layout in the last bits
                torch.testing.assert_close(laid_out.grad, leaf_x.grad, rtol=1e-5, atol=1e-5)

    @FUSED
    def test_expanded_input(self, device: str, fused: bool) -> None:
        one = torch.randn(1, 20, 3, dtype=torch.float64, device=device, requires_grad=True)
        y = torch.randn(5, 22, 3, dtype=torch.float64, device=device)
        value = softdtw(one.expand(5, -1, -1), y, fused=fused)
        value.sum().backward()
        expanded_grad, one.grad = one.grad, None
        broadcast = softdtw(one, y, fused=fused)
        broadcast.sum().backward()
        assert torch.equal(value, broadcast)
        assert_within_float64(one.grad, expanded_grad.cpu())

    def test_strided_costs(self, device: str) -> None:
        cost = torch.rand(3, 21, 34, device=device)
        expected = softdtw_from_cost(cost)
        assert torch.equal(softdtw_from_cost(cost.transpose(1, 2).contiguous().transpose(1, 2)), expected)
        assert torch.equal(softdtw_from_cost(cost[:1].expand(3, -1, -1)), expected[:1].expand(3))


def test_unbatched_input_gives_a_scalar(device: str) -> None:
    x, y = torch.randn(12, 3, device=device), torch.randn(10, 3, device=device)
    assert softdtw(x, y).shape == ()
    assert softdtw_divergence(x, y).shape == ()
    assert softdtw_from_cost(torch.rand(3, 4, device=device)).shape == ()
    assert softdtw_alignment(x, y).shape == (12, 10)
    assert softdtw_alignment(cost=torch.rand(3, 4, device=device)).shape == (3, 4)
    assert softdtw(x, y) == softdtw(x.unsqueeze(0), y.unsqueeze(0))[0]


def test_broadcast_equals_repetition(device: str) -> None:
    x, y = torch.randn(1, 30, 2, device=device), torch.randn(6, 28, 2, device=device)
    repeated = x.repeat(6, 1, 1)
    for options in ({}, {"fused": False}, {"normalize": True}, {"dist": "euclidean"}, {"bandwidth": 5}):
        torch.testing.assert_close(softdtw(x, y, **options), softdtw(repeated, y, **options))
        torch.testing.assert_close(softdtw(y, x, **options), softdtw(y, repeated, **options))
    value = softdtw(x, y, dist=lambda a, b: (a.unsqueeze(2) - b.unsqueeze(1)).abs().sum(3))
    torch.testing.assert_close(value, softdtw(x, y, dist="cityblock"))


@DISTS
def test_metrics_against_plain_definitions(device: str, dist: str) -> None:
    definitions = {
        "sqeuclidean": lambda x, y: (x.unsqueeze(2) - y.unsqueeze(1)).square().sum(3),
        "euclidean": lambda x, y: torch.linalg.vector_norm(x.unsqueeze(2) - y.unsqueeze(1), dim=3),
        "cityblock": lambda x, y: (x.unsqueeze(2) - y.unsqueeze(1)).abs().sum(3),
        "cosine": lambda x, y: 1 - torch.cosine_similarity(x.unsqueeze(2), y.unsqueeze(1), dim=3),
    }
    x, y = (torch.randn(2, size, 5, dtype=torch.float64, device=device) for size in (12, 15))
    assert_within_float64(softdtw(x, y, dist=dist), softdtw(x, y, dist=definitions[dist]).cpu())


def test_no_grad_gives_the_same_value(device: str) -> None:
    x = torch.randn(2, 140, 3, device=device, requires_grad=True)
    y = torch.randn(2, 130, 3, device=device)
    expected = softdtw(x, y)
    assert expected.requires_grad
    with torch.no_grad():
        value = softdtw(x, y)
    assert not value.requires_grad
    assert torch.equal(value, expected)
    with torch.inference_mode():
        assert torch.equal(softdtw(x, y), expected)


def test_inputs_are_left_alone(device: str) -> None:
    x, y = (torch.randn(2, 20, 3, device=device) for _ in range(2))
    cost = torch.rand(2, 20, 20, device=device)
    before = [side.clone() for side in (x, y, cost)]
    softdtw(x.requires_grad_(), y.requires_grad_(), normalize=True, x_lengths=[3, 20]).sum().backward()
    softdtw_from_cost(cost.requires_grad_(), bandwidth=3).sum().backward()
    for side, original in zip((x, y, cost), before, strict=True):
        assert torch.equal(side, original)


def test_backward_twice_with_retained_graph(device: str) -> None:
    x = torch.randn(2, 40, 3, device=device, requires_grad=True)
    value = softdtw(x, torch.randn(2, 30, 3, device=device)).sum()
    (first,) = torch.autograd.grad(value, x, retain_graph=True)
    (second,) = torch.autograd.grad(value, x)
    assert torch.equal(first, second)


def test_changing_the_input_before_backward_is_an_error(device: str) -> None:
    x = torch.randn(1, 10, 2, device=device, requires_grad=True)
    y = torch.randn(1, 10, 2, device=device)
    value = softdtw(x, y)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 300])
def test_negative_costs_beyond_the_range_of_exponents_are_never_wrong(
    device: str, dtype: torch.dtype, size: int
) -> None:
    """Below about -10^15 gamma there is no exponent: NaN, in that sample; above it the value holds."""
    cost = torch.zeros(4, size, size, dtype=dtype, device=device)
    cost[1, 0, 0] = -1e20
    cost[2, 0, 0] = -math.inf
    cost[3, 0, 0] = -1e12
    cost.requires_grad_()
    value = softdtw_from_cost(cost)
    value.sum().backward()
    assert value[1:3].isnan().all()
    zero, negative = value[0].item(), value[3].item()
    assert zero == pytest.approx(softdtw_from_cost(cost.detach()[:1])[0].item())
    assert negative == pytest.approx(-1e12, rel=1e-6)
    assert cost.grad is not None
    assert cost.grad[[0, 3]].isfinite().all()


@FUSED
def test_divergence_of_a_tensor_with_itself_has_no_gradient(device: str, fused: bool) -> None:
    x = (100 * torch.randn(3, 150, 2, device=device)).requires_grad_()
    softdtw_divergence(x, x, gamma=0.1, fused=fused).sum().backward()
    assert x.grad is not None
    assert (x.grad == 0).all()
