"""Second derivatives: finite differences for every option, all paths, autograd through the oracle."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from benchmarks.error_budget import Shape, measure_second_order
from softdtw_cuda import (
    SoftDTW,
    _reference,
    softdtw,
    softdtw_alignment,
    softdtw_cdist,
    softdtw_expected_cost,
    softdtw_from_cost,
    softdtw_pairs,
)
from softdtw_cuda._backends import DualBackend, dual_backend
from softdtw_cuda._distances import METRICS, sqeuclidean
from softdtw_cuda._problem import EXPECTED, EXPECTED_BACKWARD, NO_BAND, Direction, Problem
from tests.oracle import paths, relative

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"  # torch's own, where forward mode begins
)
LENGTHS = {"x_lengths": [3, 5], "y_lengths": [4, 3]}


def series(
    device: str, rows: tuple[int, int] = (2, 2), n: int = 5, m: int = 4, d: int = 2
) -> tuple[Tensor, Tensor]:
    x, y = (
        torch.randn(batch, length, d, dtype=torch.float64, device=device, requires_grad=True)
        for batch, length in zip(rows, (n, m), strict=True)
    )
    return x, y


def lopsided(x: Tensor, y: Tensor) -> Tensor:
    """A user's distance that is not symmetric."""
    return (x.unsqueeze(2) - 2 * y.unsqueeze(1)).abs().pow(2.5).sum(3)


class TestRecurrence:
    """Equations (12) to (15) in the reference, the oracle of everything else here."""

    @pytest.mark.parametrize("gamma", [0.3, 2.0])
    @pytest.mark.parametrize("bandwidth", [-1, 0, 1])
    @pytest.mark.parametrize("forbidden", [0.0, 0.3])
    def test_every_path(self, gamma: float, bandwidth: int, forbidden: float) -> None:
        for n, m in itertools.product(range(1, 5), repeat=2):
            if 0 <= bandwidth < abs(n - m):
                continue
            cost, omega = torch.randn(2, n, m, dtype=torch.float64)
            wall = torch.rand(n, m) < forbidden
            wall[0, 0] = wall[-1, -1] = False
            cost = cost.masked_fill(wall, math.inf)
            admitted = [
                path
                for path in paths(n, m)
                if all((bandwidth < 0 or abs(i - j) <= bandwidth) and not wall[i, j] for i, j in path)
            ]
            if not admitted:
                continue
            visits = torch.zeros(len(admitted), n, m, dtype=torch.float64)
            for path, visit in zip(admitted, visits, strict=True):
                for i, j in path:
                    visit[i, j] = 1
            totals = (visits * cost.masked_fill(wall, 0.0)).sum((1, 2))
            weights = torch.softmax(-totals / gamma, 0)
            changes = (visits * omega).sum((1, 2))
            mean = weights @ changes
            # The covariance of what a path visits with what it sums of omega.
            slope = -torch.einsum("p,pij->ij", weights * (changes - mean), visits) / gamma
            dot, alignment, alignment_slope = _reference.dual_from_cost(
                cost[None], omega[None], gamma, bandwidth
            )
            assert dot.item() == pytest.approx(mean.item(), abs=1e-13)
            torch.testing.assert_close(
                alignment[0], torch.einsum("p,pij->ij", weights, visits), rtol=0, atol=1e-13
            )
            torch.testing.assert_close(alignment_slope[0], slope, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("bandwidth", [-1, 9])
    @pytest.mark.parametrize("padded", [False, True])
    def test_autograd_through_the_oracle(self, bandwidth: int, padded: bool) -> None:
        cost = torch.rand(3, 40, 37, dtype=torch.float64, requires_grad=True)
        omega = torch.randn(3, 40, 37, dtype=torch.float64)
        lengths = [torch.tensor([40, 11, 25]), torch.tensor([37, 19, 20])] if padded else [None, None]
        value = _reference.softdtw_from_cost(cost, 0.05, bandwidth, *lengths)
        (alignment,) = torch.autograd.grad(value.sum(), cost, create_graph=True)
        (expected,) = torch.autograd.grad((alignment * omega).sum(), cost)
        dot, measured_alignment, measured = _reference.dual_from_cost(
            cost.detach(), omega, 0.05, bandwidth, *lengths
        )
        assert relative(measured, expected) < 1e-12
        assert relative(measured_alignment, alignment.detach()) < 1e-12
        assert relative(dot, (alignment * omega).sum((1, 2)).detach()) < 1e-12

    def test_differences_keep_float32s_digits(self) -> None:
        """What (12) to (15) are for: the textbook recurrence (9) loses them in long series."""
        torch.manual_seed(3)
        x, y = torch.randn(1, 300, 16, dtype=torch.float64), torch.randn(1, 290, 16, dtype=torch.float64)
        cost = sqeuclidean(x, y)
        position = torch.arange(1, 301).view(-1, 1) / 300 - torch.arange(1, 291).view(1, -1) / 290
        omega = position.double().square()[None]
        exact = _reference.dual_from_cost(cost, omega, 1.0)[2]
        rounded = _reference.dual_from_cost(cost, omega.float().double(), 1.0)[2]
        assert relative(rounded, exact) < 1e-6


class TestFiniteDifferences:
    @pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalize"])
    @pytest.mark.parametrize("lengths", [{}, LENGTHS], ids=["full", "lengths"])
    @pytest.mark.parametrize("bandwidth", [None, 2], ids=["all", "band"])
    @pytest.mark.parametrize("dist", [*METRICS, "sqeuclidean-cost", "cosine-cost", lopsided])
    def test_every_option(
        self,
        device: str,
        dist: str | Callable[..., Any],
        bandwidth: int | None,
        lengths: dict[str, Any],
        normalize: bool,
    ) -> None:
        options: dict[str, Any] = {"dist": dist}
        if isinstance(dist, str) and dist.endswith("-cost"):
            options = {"dist": dist.removesuffix("-cost"), "fused": False}
        x, y = series(device)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return softdtw(x, y, gamma=0.7, bandwidth=bandwidth, normalize=normalize, **options, **lengths)

        assert gradgradcheck(loss, (x, y), fast_mode=True)

    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize("normalize", [False, True])
    def test_broadcast(self, device: str, fused: bool, normalize: bool) -> None:
        one, many = series(device, (1, 3))

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return softdtw(x, y, fused=fused, normalize=normalize)

        assert gradgradcheck(loss, (one, many))
        assert gradgradcheck(loss, (many, one))

    @pytest.mark.parametrize("bandwidth", [None, 2])
    @pytest.mark.parametrize("lengths", [{}, LENGTHS])
    def test_cost(self, device: str, bandwidth: int | None, lengths: dict[str, Any]) -> None:
        cost = torch.randn(2, 5, 4, dtype=torch.float64, device=device, requires_grad=True)
        options = {"gamma": 0.4, "bandwidth": bandwidth, **lengths}
        assert gradgradcheck(lambda cost: softdtw_from_cost(cost, **options), (cost,))
        assert gradcheck(lambda cost: softdtw_alignment(cost=cost, **options), (cost,))

    @pytest.mark.parametrize("options", [{}, {"normalize": True}, {"memory_limit": 1}, {"dist": "euclidean"}])
    def test_pairs(self, device: str, options: dict[str, Any]) -> None:
        x, y = series(device, (2, 3))
        listed = [[0, 1], [1, 2], [0, 1], [0, 0]]
        for function in (
            lambda x, y: softdtw_pairs(x, y, listed, **options),
            lambda x, y: softdtw_cdist(x, y, y_lengths=[4, 2, 3], **options),
        ):
            assert gradgradcheck(function, (x, y), fast_mode=True)

    @pytest.mark.parametrize("dist", ["sqeuclidean", "cosine", "euclidean", "cityblock"])
    def test_forward_mode(self, device: str, dist: str) -> None:
        x, y = series(device)
        for function in (
            lambda x, y: softdtw(x, y, dist=dist, **LENGTHS),
            lambda x, y: softdtw(x, y, dist=dist, normalize=True),
            lambda x, y: softdtw_alignment(x, y, dist=dist),
            lambda x, y: softdtw_pairs(x, y, [[0, 1], [1, 1]], dist=dist),
        ):
            assert gradcheck(
                function,
                (x, y),
                check_forward_ad=True,
                check_batched_grad=True,
                check_batched_forward_grad=True,
            )
        assert gradgradcheck(
            lambda x, y: softdtw(x, y, dist=dist),
            (x, y),
            check_fwd_over_rev=True,
            check_rev_over_rev=False,
            check_undefined_grad=False,
        )

    def test_zero_vectors_under_cosine(self, device: str) -> None:
        x, y = series(device)
        with torch.no_grad():
            x[0, 1] = 0.0
        value = softdtw(x, y, dist="cosine", gamma=0.5)
        gradients = torch.autograd.grad(value.sum(), (x, y), create_graph=True)
        second_x, second_y = torch.autograd.grad(sum(each.square().sum() for each in gradients), (x, y))
        assert second_y.isfinite().all()
        assert second_x.isfinite().all()
        assert (second_x[0, 1] == 0).all()


class TestHessian:
    @pytest.mark.usefixtures("small_tiles")
    @pytest.mark.parametrize("size", [6, 70])  # one tile of the kernels, and several
    @pytest.mark.parametrize("fused", [True, False])
    def test_symmetric_and_equal_by_every_route(self, device: str, fused: bool, size: int) -> None:
        x, y = (side.detach() for side in series(device, (1, 1), size, size - 1, 1))

        def value(x: Tensor) -> Tensor:
            return softdtw(x, y, gamma=0.3, fused=fused).sum()

        hessian = torch.autograd.functional.hessian(value, x).reshape(x.numel(), -1)
        assert (hessian - hessian.T).abs().max() <= 1e-12 * hessian.abs().max()
        func = torch.func
        routes: tuple[Any, ...] = (
            func.hessian(value),
            func.jacrev(func.jacrev(value)),
            func.jacfwd(func.jacfwd(value)),
            func.jacrev(func.jacfwd(value)),
            lambda x: torch.autograd.functional.hessian(value, x, vectorize=True),
        )
        for route in routes:
            measured = route(x).reshape(x.numel(), -1)
            torch.testing.assert_close(measured, hessian, rtol=1e-12, atol=1e-12)

    @pytest.mark.usefixtures("small_tiles")
    @pytest.mark.parametrize("fused", [True, False], ids=["fused", "cost"])
    @pytest.mark.parametrize(
        ("n", "m", "d", "bandwidth"),
        [(1, 1, 1, None), (17, 1, 3, None), (65, 63, 5, None), (150, 140, 7, 31)],
    )
    def test_products_match_the_oracle(
        self, device: str, n: int, m: int, d: int, bandwidth: int | None, fused: bool
    ) -> None:
        x, y = series(device, (3, 3), n, m, d)
        weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, device=device, requires_grad=True)
        a, b = torch.randn_like(x), torch.randn_like(y)

        def products(value: Tensor) -> tuple[Tensor, ...]:
            gradients = torch.autograd.grad(value @ weights, (x, y), create_graph=True)
            along = sum((g * t).sum() for g, t in zip(gradients, (a, b), strict=True))
            return torch.autograd.grad(along, (x, y, weights))

        measured = products(softdtw(x, y, gamma=0.5, bandwidth=bandwidth, fused=fused))
        radius = NO_BAND if bandwidth is None else bandwidth
        expected = products(_reference.softdtw(x, y, 0.5, radius))
        for ours, theirs in zip(measured, expected, strict=True):
            assert relative(ours, theirs.cpu()) < 1e-10

    def test_the_gradient_of_the_incoming_gradient(self, device: str) -> None:
        x, y = series(device)
        weights = torch.randn(2, dtype=torch.float64, device=device, requires_grad=True)
        (gradient,) = torch.autograd.grad(softdtw(x, y), x, weights, create_graph=True)
        tangent = torch.randn_like(x)
        (measured,) = torch.autograd.grad((gradient * tangent).sum(), weights)
        expected = torch.func.jvp(lambda x: softdtw(x, y.detach()), (x.detach(),), (tangent,))[1]
        torch.testing.assert_close(measured, expected)

    @pytest.mark.parametrize("name", ["series", "cost", "normalize", "nonlinear"])
    def test_products_of_torchs_own(self, device: str, name: str) -> None:
        """torch.autograd.functional.hvp differentiates a double backward wrt its cotangent."""
        x, y = (side.detach() for side in series(device))
        function = {
            "series": lambda x: softdtw(x, y).sum(),
            "cost": lambda x: softdtw_from_cost(x.square()).sum(),
            "normalize": lambda x: softdtw(x, y, normalize=True).sum(),
            "nonlinear": lambda x: softdtw(x, y).square().sum(),
        }[name]
        vector = torch.randn_like(x)
        hessian = torch.autograd.functional.hessian(function, x).reshape(x.numel(), -1)
        expected = (hessian @ vector.flatten()).view_as(x)
        products: tuple[Any, ...] = (torch.autograd.functional.hvp, torch.autograd.functional.vhp)
        for product in products:
            torch.testing.assert_close(product(function, x, vector)[1], expected)

    def test_meta_learning(self, device: str) -> None:
        """The gradient through a step of gradient descent."""
        x, y = series(device)

        def after_a_step(x: Tensor, y: Tensor, value: Callable[..., Tensor]) -> Tensor:
            (gradient,) = torch.autograd.grad(value(x, y).sum(), x, create_graph=True)
            return value(x - 0.1 * gradient, y).sum()

        measured = torch.autograd.grad(after_a_step(x, y, SoftDTW(gamma=0.3)), (x, y))
        expected = torch.autograd.grad(after_a_step(x, y, lambda x, y: _reference.softdtw(x, y, 0.3)), (x, y))
        for ours, theirs in zip(measured, expected, strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_narrow_types(self, device: str) -> None:
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.01), (torch.float16, 2e-3)):
            x, y = (side.detach().to(dtype).requires_grad_() for side in series(device, n=30, m=25))
            (gradient,) = torch.autograd.grad(softdtw(x, y, gamma=0.5).sum(), x, create_graph=True)
            tangent = torch.randn_like(x)
            (measured,) = torch.autograd.grad((gradient * tangent).sum(), x)
            exact = x.detach().double().requires_grad_()
            (gradient,) = torch.autograd.grad(
                _reference.softdtw(exact, y.detach().double(), 0.5).sum(), exact, create_graph=True
            )
            (expected,) = torch.autograd.grad((gradient * tangent.double()).sum(), exact)
            assert measured.dtype == dtype
            assert relative(measured, expected.cpu()) < bound


@pytest.mark.parametrize("gamma", [1e-3, 0.1, 1.0, 100.0])
def test_float32_error_budget(device: str, gamma: float) -> None:
    """A part of the grid that `python -m benchmarks.error_budget --second-order` runs in full."""
    shapes = [Shape(32, 32, 1, 0.0), Shape(127, 109, 16, 1000.0)]
    cases = list(measure_second_order(shapes, gamma, device))
    assert {case.what for case in cases} == {"hvp", "expected"}
    for case in cases:
        assert case.passed, case


class TestTransforms:
    def test_jvp_eager_and_func(self, device: str) -> None:
        x, y = (side.detach() for side in series(device))
        a, b = torch.randn_like(x), torch.randn_like(y)
        for function in (softdtw, lambda x, y: softdtw(x, y, normalize=True)):
            with forward_ad.dual_level():
                dual = function(forward_ad.make_dual(x, a), forward_ad.make_dual(y, b))
                tangent = forward_ad.unpack_dual(dual).tangent
            by_func = torch.func.jvp(function, (x, y), (a, b))[1]
            step = 1e-6
            numeric = (function(x + step * a, y + step * b) - function(x - step * a, y - step * b)) / (
                2 * step
            )
            torch.testing.assert_close(tangent, by_func)
            torch.testing.assert_close(tangent, numeric, rtol=1e-6, atol=1e-6)

    def test_reverse_over_forward(self, device: str) -> None:
        """The tangent's gradient of either side, whichever side the tangent is along."""
        x, y = (side.detach() for side in series(device))
        a, b = torch.randn_like(x), torch.randn_like(y)

        def tangent(x: Tensor, y: Tensor, along: tuple[Tensor, Tensor]) -> Tensor:
            result: Tensor = torch.func.jvp(lambda x, y: softdtw(x, y).sum(), (x, y), along)[1]
            return result

        for along in ((a, b), (a, torch.zeros_like(b)), (torch.zeros_like(a), b)):
            _, expected = torch.autograd.functional.hvp(lambda x, y: softdtw(x, y).sum(), (x, y), along)
            for side in (0, 1):
                measured = torch.func.grad(tangent, side)(x, y, along)
                torch.testing.assert_close(measured, expected[side])
        # The derivative by a factor of the values is <E, Omega>, whose own needs neither side's second one.
        factor = torch.ones((), dtype=torch.float64, device=device)

        def inner(factor: Tensor, x: Tensor, y: Tensor) -> Tensor:
            gradient = torch.func.grad(lambda x: (factor * softdtw(x, y)).sum())(x)
            result: Tensor = (gradient * a).sum()
            return result

        _, (_, expected_y) = torch.autograd.functional.hvp(
            lambda x, y: softdtw(x, y).sum(), (x, y), (a, torch.zeros_like(b))
        )
        for sides in ((0,), (0, 1)):
            by_factor = torch.func.grad(inner, sides)
            measured = torch.func.grad(lambda y, by_factor=by_factor: by_factor(factor, x, y)[0])(y)
            torch.testing.assert_close(measured, expected_y)

    def test_a_gradient_inside_a_forward_level(self, device: str) -> None:
        """Forward over reverse without torch.func: the gradient's tangent is not lost."""
        x, y = (side.detach() for side in series(device))
        a = torch.randn_like(x)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, a).requires_grad_()
            (gradient,) = torch.autograd.grad(softdtw(dual, y).sum(), dual)
            tangent = forward_ad.unpack_dual(gradient).tangent
        _, expected = torch.autograd.functional.hvp(lambda x: softdtw(x, y).sum(), x, a)
        torch.testing.assert_close(tangent, expected)

    @pytest.mark.parametrize("options", [{}, {"fused": False}, {"normalize": True}, {"dist": "cityblock"}])
    @pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 1), (2, 0)])
    def test_vmap(self, device: str, options: dict[str, Any], in_dims: tuple[int | None, int | None]) -> None:
        sides = []
        for dim, length in zip(in_dims, (5, 4), strict=True):
            shape = [2, length, 3]
            if dim is not None:
                shape.insert(dim, 4)
            sides.append(torch.randn(shape, dtype=torch.float64, device=device))

        def pick(k: int) -> list[Tensor]:
            return [
                side if dim is None else side.select(dim, k) for side, dim in zip(sides, in_dims, strict=True)
            ]

        def value(x: Tensor, y: Tensor) -> Tensor:
            return softdtw(x, y, **options)

        def total(x: Tensor, y: Tensor) -> Tensor:
            return value(x, y).square().sum()

        def product(x: Tensor, y: Tensor) -> Tensor:
            result: Tensor = torch.func.grad(lambda x: torch.func.grad(total)(x, y).sum())(x)
            return result

        for function in (value, torch.func.grad(total), product, torch.func.jacfwd(value)):
            measured = torch.func.vmap(function, in_dims)(*sides)
            expected = torch.stack([function(*pick(k)) for k in range(4)])
            torch.testing.assert_close(measured, expected)

    def test_nested_vmap_and_lengths(self, device: str) -> None:
        x, y = torch.randn(3, 2, 5, 4, 2), torch.randn(3, 5, 6, 2)
        x, y = (side.to(device, torch.float64) for side in (x, y))
        lengths = torch.tensor([[4, 2, 3], [1, 4, 4]], device=device)

        def value(x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
            return softdtw(x, y, x_lengths=lengths)

        mapped = torch.func.vmap(torch.func.vmap(value, (0, None, None)), (0, 0, None))
        measured = mapped(x, y, lengths.flatten()[:5])
        expected = torch.stack(
            [torch.stack([value(x[i, j], y[i], lengths.flatten()[:5]) for j in range(2)]) for i in range(3)]
        )
        torch.testing.assert_close(measured, expected)
        over_lengths = torch.func.vmap(lambda k: softdtw(x[:, 0, 0], y[:, 0], x_lengths=k))(lengths)
        expected = torch.stack([softdtw(x[:, 0, 0], y[:, 0], x_lengths=k) for k in lengths])
        torch.testing.assert_close(over_lengths, expected)

    def test_per_sample_gradients(self, device: str) -> None:
        layer = torch.nn.Linear(2, 2).to(device, torch.float64)
        parameters = {name: value.detach() for name, value in layer.named_parameters()}
        x, y = (side.detach() for side in series(device, (4, 4)))

        def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return softdtw(torch.func.functional_call(layer, parameters, (x,)), y, gamma=0.1)

        measured = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
        for sample in range(4):
            expected = torch.func.grad(loss)(parameters, x[sample], y[sample])
            for name in parameters:
                torch.testing.assert_close(measured[name][sample], expected[name])

    @pytest.mark.parametrize("dist", METRICS)
    def test_batches_of_gradients_can_be_differentiated(self, device: str, dist: str) -> None:
        x, y = series(device)
        second = []
        for vectorize in (True, False):
            jacobian: Any = torch.autograd.functional.jacobian(
                lambda x: softdtw(x, y, dist=dist, gamma=0.5), x, create_graph=True, vectorize=vectorize
            )
            second.append(torch.autograd.grad(jacobian.square().sum(), (x, y)))
        for ours, theirs in zip(*second, strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_batches_of_second_gradients(self, device: str) -> None:
        x, y = series(device)
        (gradient,) = torch.autograd.grad(softdtw(x, y).sum(), x, create_graph=True)
        several = torch.randn(3, *gradient.shape, dtype=torch.float64, device=device)
        batched = torch.autograd.grad(gradient, (x, y), several, is_grads_batched=True, retain_graph=True)
        for k in range(3):
            each = torch.autograd.grad(gradient, (x, y), several[k], retain_graph=True)
            for ours, theirs in zip(batched, each, strict=True):
                torch.testing.assert_close(ours[k], theirs)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)  # torch's own
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("value", lambda x: softdtw(x, x.flip(1).detach())),
        pytest.param(
            "expected cost", lambda x: softdtw_expected_cost(x, x.flip(1).detach()), marks=pytest.mark.slow
        ),
    ],
)
def test_forward_mode_in_a_compiled_graph(device: str, name: str, function: Callable[..., Any]) -> None:
    """torch drops the tangents of operators, without a word: an error, or an uncompiled part."""
    x, a = torch.randn(2, 2, 6, 2, device=device)

    def by_func(compile_it: Callable[..., Any]) -> Tensor:
        tangent: Tensor = compile_it(lambda x: torch.func.jvp(function, (x,), (a,))[1])(x)
        return tangent

    def by_dual(compile_it: Callable[..., Any]) -> Tensor | None:
        with forward_ad.dual_level():
            dual = compile_it(function)(forward_ad.make_dual(x, a))
            tangent: Tensor | None = forward_ad.unpack_dual(dual).tangent
        return tangent

    expected = by_func(lambda call: call)
    for derivative in (by_func, by_dual):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="no forward mode inside a compiled graph"):
            derivative(functools.partial(torch.compile, fullgraph=True, backend="aot_eager"))
        torch._dynamo.reset()
        uncompiled = functools.partial(torch.compile, backend="aot_eager")
        if derivative is by_dual and name == "expected cost":
            # What torch runs of it uncompiled is not told of the open level; an error, no wrong tangent.
            with pytest.raises(RuntimeError, match="forward grad"):
                derivative(uncompiled)
        else:
            torch.testing.assert_close(derivative(uncompiled), expected)
    torch._dynamo.reset()


class TestBackend:
    """What `DualBackend` asks of a device's backend, whichever serves it."""

    @pytest.fixture
    def dual(self, device: str) -> DualBackend:
        return dual_backend(device)

    @staticmethod
    def directions(device: str, dtype: torch.dtype = torch.float64) -> dict[str, Direction]:
        a, b = (
            torch.randn(3, 40, 4, dtype=dtype, device=device),
            torch.randn(3, 35, 4, dtype=dtype, device=device),
        )
        matrix = torch.randn(1, 40, 35, dtype=dtype, device=device)
        return {
            "tangents": Direction("tangents", a, b),
            "one tangent": Direction("tangents", None, b),
            "matrix": Direction("matrix", matrix, None, True),
            "features": Direction("features", a[:1], b, True, True),
            "position": Direction("position"),
        }

    @pytest.mark.parametrize("name", ["tangents", "one tangent", "matrix", "features", "position"])
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("bandwidth", [NO_BAND, 20])
    def test_against_autograd(
        self, device: str, dual: DualBackend, name: str, padded: bool, bandwidth: int
    ) -> None:
        x, y = series(device, (3, 3), 40, 35, 4)
        lengths = [torch.tensor(n, dtype=torch.int64, device=device) for n in ([40, 17, 31], [35, 25, 20])]
        x_lengths, y_lengths = lengths if padded else (None, None)
        problem = Problem(x.detach(), y.detach(), x_lengths, y_lengths, 0.5, bandwidth, True, True)
        direction = self.directions(device)[name]
        grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, device=device)
        dot, value, state = dual.expected(problem, direction)
        gradients = dual.expected_backward(problem, direction, grad, value, state)

        # The same by autograd through the oracle.
        cost = sqeuclidean(x, y)
        a, b = (None if side is None else side.detach().requires_grad_() for side in direction[1:3])
        if direction.kind == "matrix":
            omega = a
        elif direction.kind == "features":
            omega = sqeuclidean(a, b)
        elif direction.kind == "position":
            rows, columns = (
                full if length is None else length.view(3, 1, 1)
                for full, length in ((40, x_lengths), (35, y_lengths))
            )
            i, j = (torch.arange(1, n + 1, dtype=torch.float64, device=device) for n in (40, 35))
            omega = (i.view(1, -1, 1) / rows - j.view(1, 1, -1) / columns).square()
        else:
            tangents = (torch.zeros_like(s) if t is None else t for s, t in zip((x, y), (a, b), strict=True))
            difference = torch.sub(*(s.unsqueeze(k) for s, k in zip(tangents, (2, 1), strict=True)))
            omega = 2 * ((x.unsqueeze(2) - y.unsqueeze(1)) * difference).sum(3)
        exact = _reference.softdtw_from_cost(cost, 0.5, bandwidth, x_lengths, y_lengths)
        (alignment,) = torch.autograd.grad(exact.sum(), cost, create_graph=True)
        assert omega is not None
        expected = (alignment * omega).sum((1, 2))
        assert relative(value, exact.detach().cpu()) < 1e-12
        assert relative(dot, expected.detach().cpu()) < 1e-12
        sources = [side for side, need in ((a, direction.need_a), (b, direction.need_b)) if need]
        theirs = torch.autograd.grad(expected @ grad, [x, y, *sources])
        ours = [side for side in gradients if side.numel()]
        assert len(ours) == len(theirs)
        for measured, truth in zip(ours, theirs, strict=True):
            summed = measured if measured.shape == truth.shape else measured.sum(0, keepdim=True)
            assert relative(summed, truth.cpu()) < 1e-11

    @pytest.mark.usefixtures("small_tiles")
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("gamma", [1e-2, 100.0])
    @pytest.mark.parametrize(
        ("n", "m", "d", "bandwidth"),
        [
            (1, 1, 1, NO_BAND),
            (1, 9, 2, NO_BAND),
            (65, 63, 9, 2),
            (150, 140, 3, 12),
            pytest.param(131, 270, 1, NO_BAND, marks=pytest.mark.slow),
        ],
    )
    def test_against_the_reference(
        self,
        device: str,
        dual: DualBackend,
        n: int,
        m: int,
        d: int,
        bandwidth: int,
        gamma: float,
        dtype: torch.dtype,
    ) -> None:
        """Odd shapes, several tiles, ragged lengths, a list of pairs, one series for all, an offset."""
        x, y = (side.detach().to(dtype) + 10 for side in series(device, (3, 3), n, m, d))
        lengths = [torch.tensor([k, (k + 1) // 2, k], device=device) for k in (n, m)]
        if bandwidth != NO_BAND:
            lengths = [torch.tensor([k, min(n, m) // 2 + 1, k], device=device) for k in (n, m)]
        whole, ragged = (None, None), tuple(lengths)
        listed = torch.tensor([[0, 2], [1, 1], [0, 0], [2, 0]], dtype=torch.int32, device=device)
        options = (gamma, bandwidth, True, True)
        costs = sqeuclidean(x, y)
        a, b = (torch.randn_like(side) for side in (x, y))
        features = [torch.randn(k, s, 11, dtype=dtype, device=device) for k, s in ((1, n), (3, m))]
        matrix = torch.randn(3, n, m, dtype=dtype, device=device)
        for problem, direction in (
            (Problem(x, y, *ragged, *options), Direction("tangents", a, b)),
            (Problem(x, y, *whole, *options, listed), Direction("tangents", a[:1], b[:1])),
            (Problem(x[:1], y, *whole, *options), Direction("tangents", None, b)),
            (Problem(x, y, *whole, *options), Direction("matrix", matrix[:1], None, True)),
            (Problem(x, y, *ragged, *options), Direction("features", *features, True, True)),
            (Problem(x, y[:1], *whole, *options), Direction("position")),
            (Problem(costs, None, *ragged, *options[:3]), Direction("matrix", matrix, None, True)),
            (Problem(costs, None, *whole, *options[:3]), Direction("position")),
        ):
            grad = torch.linspace(-1.0, 2.0, problem.batch, dtype=dtype, device=device)
            dot, value, state = dual.expected(problem, direction)
            needless = (
                problem._replace(need_x=False, need_y=False),
                direction._replace(need_a=False, need_b=False),
            )
            assert torch.equal(dual.expected(*needless)[0], dot), "with and without saved state"
            truth, exact, nothing = _reference.expected(problem, direction)
            bound = 1e-10 if dtype == torch.float64 else 3e-5
            assert relative(value, exact.cpu()) < bound
            assert (dot - truth).abs().max() <= bound * max(truth.abs().max().item(), 1e-3)
            ours = dual.expected_backward(problem, direction, grad, value, state)
            theirs = _reference.expected_backward(problem, direction, grad, exact, nothing)
            # Float32 costs of 10^4 times what gamma tells apart have lost that much.
            spread = costs.abs().max().item() / gamma * (1e-14 if dtype == torch.float64 else 1e-6)
            for measured, wanted in zip(ours, theirs, strict=True):
                assert measured.shape == wanted.shape
                assert measured.dtype == wanted.dtype
                scale = max(wanted.abs().max().item() if wanted.numel() else 0.0, 1e-3 / gamma)
                if wanted.numel():
                    assert (measured - wanted).abs().max() <= (bound + spread) * scale

    def test_costs_beyond_32_bit_exponents(self, device: str, dual: DualBackend) -> None:
        x, y = (side.detach().float() for side in series(device, (3, 3), 40, 35, 2))
        x[1] *= 3e3
        y[1, 1::2] = y[1, ::2][:17]  # equal neighbours: two ways of equal cost, but not of equal Omega
        # Costs of 10^11 gammas: float64 sums of them, and so the shares of two ways, are known to 10^-4.
        problem = Problem(x, y, None, None, 1e-3, NO_BAND, True, True)
        direction = Direction("features", x[:1], torch.randn_like(y), True, True)
        grad = torch.tensor([1.0, -2.0, 0.5], device=device)
        dot, value, state = dual.expected(problem, direction)
        truth, exact, nothing = _reference.expected(problem, direction)
        torch.testing.assert_close(value, exact)
        torch.testing.assert_close(dot, truth, rtol=1e-3, atol=0.0)
        ours = dual.expected_backward(problem, direction, grad, value, state)
        theirs = _reference.expected_backward(problem, direction, grad, exact, nothing)
        for first in (0, 2):  # of the series, then of the features of Omega; those of x may cancel
            largest = max(wanted[1].abs().max().item() for wanted in theirs[first : first + 2])
            assert largest > 0
            for measured, wanted in zip(ours[first : first + 2], theirs[first : first + 2], strict=True):
                torch.testing.assert_close(measured[1], wanted[1], rtol=1e-3, atol=1e-3 * largest)

    def test_broken_samples(self, device: str, dual: DualBackend) -> None:
        cost = torch.rand(3, 6, 5, dtype=torch.float64, device=device)
        cost[0, 3] = math.inf  # no path
        cost[1, 2, 2] = math.nan
        problem = Problem(cost, None, None, None, 0.5, NO_BAND, True)
        direction = Direction("matrix", cost.nan_to_num(7.0, 7.0), None, True)
        dot, value, state = dual.expected(problem, direction)
        assert dot[0] == 0
        assert dot[1].isnan()
        assert value[0] == math.inf
        assert value[1].isnan()
        grad = torch.ones(3, dtype=torch.float64, device=device)
        grad_x, _, grad_a, _ = dual.expected_backward(problem, direction, grad, value, state)
        for gradient in (grad_x, grad_a):
            assert (gradient[0] == 0).all()
            assert gradient[1].isnan().all()
            assert gradient[2].isfinite().all()

    def test_what_lies_in_the_padding(self, device: str) -> None:
        x, y = series(device, (2, 2), 9, 8)
        lengths = {"x_lengths": [9, 4], "y_lengths": [5, 8]}
        dirty = [side.detach().clone() for side in (x, y)]
        dirty[0][1, 4:] = math.nan
        dirty[1][0, 5:] = math.inf
        omega = torch.randn(2, 9, 8, dtype=torch.float64, device=device)
        results = []
        for sides in ((x, y), [side.requires_grad_() for side in dirty]):
            value = softdtw_expected_cost(*sides, omega=omega, **lengths)
            gradients = torch.autograd.grad(value.sum(), sides)
            slopes = torch.autograd.grad(softdtw(*sides, **lengths).sum(), sides, create_graph=True)
            along = sum(slope.nan_to_num().square().sum() for slope in slopes)
            results.append([value, *gradients, *torch.autograd.grad(along, sides)])
            omega = omega.clone()
            omega[1, 4:] = math.nan
        for clean, padded in zip(*results, strict=True):
            torch.testing.assert_close(clean, padded)
        for gradient in results[1][1:]:
            assert gradient.isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", ["tangents", "matrix", "features", "position"])
    def test_operators(self, device: str, name: str, dtype: torch.dtype) -> None:
        x, y = (side.detach().to(dtype) for side in series(device, (3, 3), 40, 35, 4))
        problem = Problem(x, y, None, None, 0.5, NO_BAND, True, True)
        direction = self.directions(device, dtype)[name]
        torch.library.opcheck(torch.ops.softdtw_cuda.expected, EXPECTED.row(problem, direction))
        _, value, state = torch.ops.softdtw_cuda.expected(*EXPECTED.row(problem, direction))
        arguments = EXPECTED_BACKWARD.row(problem, direction, (torch.ones_like(value), value, state))
        torch.library.opcheck(torch.ops.softdtw_cuda.expected_backward, arguments)
