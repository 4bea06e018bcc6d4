"""Losses on the soft alignment: expected cost, sharp Soft-DTW, entropy, divergences, DILATE."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from benchmarks.error_budget import SECOND_ORDER_BUDGET
from softdtw_cuda import (
    DilateLoss,
    _reference,
    softdtw,
    softdtw_alignment,
    softdtw_divergence,
    softdtw_entropy,
    softdtw_expected_cost,
    softdtw_sharp,
)
from softdtw_cuda._distances import METRICS
from tests.oracle import delannoy, enumerate_paths, paths, relative

LENGTHS = {"x_lengths": [5, 3, 2], "y_lengths": [2, 4, 4]}
OPTIONS = [{}, LENGTHS, {"bandwidth": 2}]


def series(device: str, n: int = 5, m: int = 4, d: int = 2) -> tuple[Tensor, Tensor]:
    x, y = (
        torch.randn(3, length, d, dtype=torch.float64, device=device, requires_grad=True) for length in (n, m)
    )
    return x, y


class TestExpectedCost:
    @pytest.mark.parametrize("options", OPTIONS, ids=["full", "lengths", "band"])
    @pytest.mark.parametrize("dist", METRICS)
    def test_against_the_alignment(self, device: str, dist: str, options: dict[str, Any]) -> None:
        x, y = series(device)
        options = {"gamma": 0.5, "dist": dist, **options}
        alignment = softdtw_alignment(x, y, **options)
        matrix = torch.randn(5, 4, dtype=torch.float64, device=device, requires_grad=True)
        each = torch.randn(3, 5, 4, dtype=torch.float64, device=device, requires_grad=True)
        a = torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True)
        b = torch.randn(3, 4, 3, dtype=torch.float64, device=device, requires_grad=True)
        n = torch.tensor(options.get("x_lengths", [5] * 3), device=device).view(3, 1, 1)
        m = torch.tensor(options.get("y_lengths", [4] * 3), device=device).view(3, 1, 1)
        i = torch.arange(1, 6, device=device).view(1, 5, 1)
        j = torch.arange(1, 5, device=device).view(1, 1, 4)
        for omega, table in (
            ("position", (i / n - j / m).double().square()),
            (matrix, matrix),
            (each, each),
            ((a, b), (a.unsqueeze(1) - b.unsqueeze(1)).square().sum(3)),
        ):
            measured = softdtw_expected_cost(x, y, omega=omega, **options)
            expected = (alignment * table).sum((1, 2))
            # arange / n is float32.
            torch.testing.assert_close(
                measured, expected, rtol=1e-6 if omega == "position" else 1e-12, atol=1e-12
            )

    @pytest.mark.parametrize("options", OPTIONS, ids=["full", "lengths", "band"])
    @pytest.mark.parametrize("dist", METRICS)
    def test_gradcheck(self, device: str, dist: str, options: dict[str, Any]) -> None:
        x, y = series(device)
        omega = torch.randn(1, 5, 4, dtype=torch.float64, device=device, requires_grad=True)
        a = torch.randn(1, 5, 3, dtype=torch.float64, device=device, requires_grad=True)
        b = torch.randn(3, 4, 3, dtype=torch.float64, device=device, requires_grad=True)

        def expected(x: Tensor, y: Tensor, omega: object) -> Tensor:
            return softdtw_expected_cost(x, y, omega=omega, gamma=0.5, dist=dist, **options)

        assert gradcheck(expected, (x, y, omega))
        assert gradcheck(lambda x, y, a, b: expected(x, y, (a, b)), (x, y, a, b))
        assert gradcheck(lambda x, y: expected(x, y, "position"), (x, y))

    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own
    def test_forward_mode_and_vmap(self, device: str) -> None:
        x, y = series(device)
        omega = torch.randn(5, 4, dtype=torch.float64, device=device, requires_grad=True)
        assert gradcheck(
            lambda x, y, omega: softdtw_expected_cost(x, y, omega=omega),
            (x, y, omega),
            check_forward_ad=True,
            check_batched_forward_grad=True,
            check_batched_grad=True,
        )
        several = torch.randn(4, 5, 4, dtype=torch.float64, device=device)
        mapped = torch.func.vmap(lambda omega: softdtw_expected_cost(x, y, omega=omega))(several)
        each = torch.stack([softdtw_expected_cost(x, y, omega=omega) for omega in several])
        torch.testing.assert_close(mapped, each)

    def test_func_by_some_of_the_arguments(self, device: str) -> None:
        """torch.func hides from the forward which gradients are asked for."""
        x, y = (torch.randn(2, n, 3, dtype=torch.float64, device=device) for n in (6, 5))
        a, b = (torch.randn(2, n, 2, dtype=torch.float64, device=device) for n in (6, 5))
        omega = torch.randn(2, 6, 5, dtype=torch.float64, device=device)

        def by_matrix(x: Tensor, y: Tensor, omega: Tensor) -> Tensor:
            return softdtw_expected_cost(x, y, omega=omega).sum()

        def by_features(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return softdtw_expected_cost(x, y, omega=(a, b)).sum()

        for function, tensors in ((by_matrix, (x, y, omega)), (by_features, (x, y, a, b))):
            leaves = [each.clone().requires_grad_() for each in tensors]
            expected = torch.autograd.grad(function(*leaves), leaves)
            for k in range(len(tensors)):
                torch.testing.assert_close(torch.func.grad(function, k)(*tensors), expected[k])

    def test_unbatched_and_empty(self, device: str) -> None:
        x, y = series(device)
        one = softdtw_expected_cost(x[0], y[0], omega=torch.ones(5, 4, dtype=torch.float64, device=device))
        assert one.dim() == 0
        torch.testing.assert_close(one, softdtw_alignment(x[0], y[0]).sum())
        none = softdtw_expected_cost(x[:0], y[:0])
        assert none.shape == (0,)
        none.sum().backward()
        assert (x.grad == 0).all()

    def test_on_the_diagonal_alone_nothing_is_out_of_place(self, device: str) -> None:
        x = torch.randn(2, 7, 2, device=device)
        assert (softdtw_expected_cost(x, x.flip(1), bandwidth=0) == 0).all()


class TestSharp:
    @pytest.mark.parametrize("options", OPTIONS, ids=["full", "lengths", "band"])
    @pytest.mark.parametrize("dist", METRICS)
    def test_sharp_and_entropy(self, device: str, dist: str, options: dict[str, Any]) -> None:
        x, y = series(device)
        options = {"gamma": 0.5, "dist": dist, **options}
        sharp, entropy = softdtw_sharp(x, y, **options), softdtw_entropy(x, y, **options)
        torch.testing.assert_close(sharp - 0.5 * entropy, softdtw(x, y, **options))
        assert (entropy >= 0).all()
        assert gradcheck(lambda x, y: softdtw_sharp(x, y, **options), (x, y))
        assert gradcheck(lambda x, y: softdtw_entropy(x, y, **options), (x, y))

    def test_every_path(self, device: str) -> None:
        for n, m in ((1, 1), (2, 3), (4, 4), (4, 1)):
            x = torch.randn(n, 2, dtype=torch.float64, device=device)
            y = torch.randn(m, 2, dtype=torch.float64, device=device)
            cost = (x.unsqueeze(1) - y.unsqueeze(0)).square().sum(2).cpu()
            _, alignment = enumerate_paths(cost, 0.7)
            totals = torch.tensor([sum(cost[i, j] for i, j in path) for path in paths(n, m)])
            weights = torch.softmax(-totals / 0.7, 0)
            assert softdtw_sharp(x, y, gamma=0.7).item() == pytest.approx((alignment * cost).sum().item())
            surprise = -(weights * weights.log()).sum().item()
            assert softdtw_entropy(x, y, gamma=0.7).item() == pytest.approx(surprise, abs=1e-9)

    def test_limits(self, device: str) -> None:
        x, y = (side.detach() for side in series(device))
        count = math.log(delannoy(4, 3))
        flat = softdtw_entropy(x, y, gamma=1e6)
        torch.testing.assert_close(flat, torch.full_like(flat, count), rtol=1e-4, atol=0)
        hard = softdtw(x, y, gamma=1e-6)
        torch.testing.assert_close(softdtw_sharp(x, y, gamma=1e-6), hard, rtol=1e-5, atol=0)

    def test_entropy_of_float32_at_a_small_gamma(self, device: str) -> None:
        """A difference of float32 numbers would be off by a thousand times its value."""
        x, y = torch.randn(2, 200, 16, device=device), torch.randn(2, 190, 16, device=device)
        measured = softdtw_entropy(x, y, gamma=0.05)
        assert measured.dtype == torch.float32
        expected = softdtw_entropy(x.double(), y.double(), gamma=0.05)
        torch.testing.assert_close(measured.double(), expected, rtol=1e-6, atol=1e-9)


def jumps(length: int, height: float) -> tuple[Tensor, Tensor]:
    """A jump that comes early in x and late in y: all likely paths are far from the diagonal."""
    k = torch.arange(length, dtype=torch.float64)
    x = height * (k >= length // 10) + 0.001 * k.sin()
    y = height * (k >= length - length // 10) + 0.001 * k.cos()
    return x.view(1, -1, 1), y.view(1, -1, 1)


def bumps(length: int, height: float) -> tuple[Tensor, Tensor]:
    """The same bump early in x and late in y."""
    k = torch.arange(length, dtype=torch.float64) / length
    x, y = (height * (-(((k - middle) / 0.05) ** 2)).exp() for middle in (0.3, 0.7))
    return x.view(1, -1, 1), y.view(1, -1, 1)


class TestPathsFarFromTheDiagonal:
    """<E, Omega> where costs next to the diagonal are a million times those of the likely paths, or more.

    Errors are relative to sum E |Omega|, of which rounding Omega and the shares moves a part.
    """

    BUDGET = {torch.float32: SECOND_ORDER_BUDGET, torch.float64: 1e-11}  # noqa: RUF012

    @pytest.mark.parametrize("dtype", BUDGET)
    @pytest.mark.parametrize("gradient", [False, True], ids=["value", "with gradient"])
    @pytest.mark.parametrize(
        ("of", "length", "height", "gamma"),
        [
            (jumps, 200, 100.0, 0.1),
            (jumps, 500, 100.0, 0.1),
            (jumps, 300, 1e4, 0.1),
            (bumps, 500, 10.0, 0.01),
        ],
    )
    def test_values(
        self,
        device: str,
        of: Any,
        length: int,
        height: float,
        gamma: float,
        gradient: bool,
        dtype: torch.dtype,
    ) -> None:
        x, y = (side.to(device, dtype).requires_grad_(gradient) for side in of(length, height))
        a, b = torch.randn_like(x), torch.randn_like(y)
        wide_x, wide_y = x.detach().double(), y.detach().double()
        difference = wide_x - wide_y.mT
        cost = difference.square()
        change = 2 * difference * (a.double() - b.double().mT)
        position = torch.arange(1, length + 1, dtype=torch.float64, device=device) / length
        position = (position.view(1, -1, 1) - position).square()
        alignment = _reference.alignment_from_cost(cost, gamma)
        measured = [
            (softdtw_sharp(x, y, gamma=gamma), cost),
            (softdtw_expected_cost(x, y, gamma=gamma), position),
        ]
        if gradient:  # the derivative along tangents, by the gradient's derivative wrt the incoming gradient
            one = torch.ones(1, dtype=dtype, device=device, requires_grad=True)
            slopes = torch.autograd.grad(softdtw(x, y, gamma=gamma), (x, y), one, create_graph=True)
            along = (slopes[0] * a).sum() + (slopes[1] * b).sum()
            measured.append((torch.autograd.grad(along, one)[0], change))
        for value, omega in measured:
            error = (value.detach().double() - (alignment * omega).sum((1, 2))).abs().item()
            assert error <= self.BUDGET[dtype] * (alignment * omega.abs()).sum().item(), value

    @pytest.mark.usefixtures("small_tiles")
    @pytest.mark.parametrize("bandwidth", [None, 150])
    def test_small_tiles_lengths_and_a_band(self, device: str, bandwidth: int | None) -> None:
        """The sums of one pair are not those of the pair before, whose memory they take."""
        x, y = (side.float().to(device) for side in jumps(190, 100.0))
        x, y = torch.cat([x, x.flip(1), x]), torch.cat([y, y.flip(1), y])
        lengths = {"x_lengths": [190, 150, 33], "y_lengths": [190, 100, 40]}
        options = {"gamma": 0.1, "bandwidth": bandwidth, **lengths}
        alignment = softdtw_alignment(x.double(), y.double(), **options)
        expected = (alignment * (x.double() - y.double().mT).square()).sum((1, 2))
        measured = softdtw_sharp(x, y, **options)
        assert ((measured.double() - expected).abs() <= SECOND_ORDER_BUDGET * expected).all()

    def test_the_sharp_divergence(self, device: str) -> None:
        x, y = (side.to(device, torch.float32) for side in jumps(200, 100.0))
        wide = softdtw_divergence(x.double(), y.double(), kind="sharp", gamma=0.1).item()
        terms = (
            softdtw_sharp(x, y, gamma=0.1) + softdtw_sharp(x, x, gamma=0.1) + softdtw_sharp(y, y, gamma=0.1)
        )
        measured = softdtw_divergence(x, y, kind="sharp", gamma=0.1).item()
        assert abs(measured - wide) <= SECOND_ORDER_BUDGET * terms.item()


class TestDivergences:
    @pytest.mark.parametrize("options", OPTIONS, ids=["full", "lengths", "band"])
    @pytest.mark.parametrize("kind", ["sharp", "mean_cost"])
    @pytest.mark.parametrize("dist", ["sqeuclidean", "cosine", "euclidean"])
    def test_gradcheck(self, device: str, dist: str, kind: str, options: dict[str, Any]) -> None:
        x, y = series(device)
        assert gradcheck(lambda x, y: softdtw_divergence(x, y, kind=kind, dist=dist, **options), (x, y))

    @pytest.mark.parametrize("kind", ["soft", "sharp", "mean_cost"])
    def test_zero_at_equal_series(self, device: str, kind: str) -> None:
        x, _ = series(device)
        value = softdtw_divergence(x, x.detach(), kind=kind)
        value.sum().backward()
        assert (value == 0).all()
        assert x.grad.abs().max() <= (0.0 if kind == "soft" else 1e-13)
        others = softdtw_divergence(x.detach(), x.detach().flip(0), kind=kind)
        assert (others[[0, 2]] > 0).all()

    def test_sharp_from_its_parts(self, device: str) -> None:
        x, y = (side.detach() for side in series(device))
        measured = softdtw_divergence(x, y, kind="sharp", gamma=0.3, **LENGTHS)
        for k in range(3):
            n, m = LENGTHS["x_lengths"][k], LENGTHS["y_lengths"][k]
            a, b = x[k, :n], y[k, :m]
            parts = [softdtw_sharp(*pair, gamma=0.3) for pair in ((a, b), (a, a), (b, b))]
            assert measured[k].item() == pytest.approx((parts[0] - (parts[1] + parts[2]) / 2).item())

    def test_mean_cost_over_every_path(self, device: str) -> None:
        x, y = (side.detach() for side in series(device, 4, 3))

        def mean_cost(a: Tensor, b: Tensor) -> float:
            cost = (a.unsqueeze(1) - b.unsqueeze(0)).square().sum(2)
            totals = [sum(cost[i, j].item() for i, j in path) for path in paths(len(a), len(b))]
            return sum(totals) / len(totals)

        measured = softdtw_divergence(x, y, kind="mean_cost")
        for k in range(3):
            a, b = x[k], y[k]
            expected = mean_cost(a, b) - (mean_cost(a, a) + mean_cost(b, b)) / 2
            assert measured[k].item() == pytest.approx(expected)
        # The limit of the sharp divergence.
        assert relative(softdtw_divergence(x, y, kind="sharp", gamma=1e7), measured.cpu()) < 1e-5

    def test_mean_cost_leaves_forbidden_cells_out(self, device: str) -> None:
        """As the other kinds do; +inf where every path is forbidden."""
        x, y = (side.detach().requires_grad_() for side in series(device, 4, 3))

        def forbidding(x: Tensor, y: Tensor) -> Tensor:
            return (x.unsqueeze(2) - y.unsqueeze(1)).square().sum(3).index_put(walls, wall)

        def mean_cost(a: Tensor, b: Tensor) -> Tensor:
            cost = (a.unsqueeze(1) - b.unsqueeze(0)).square().sum(2)
            totals = [
                torch.stack([cost[i, j] for i, j in path]).sum()
                for path in paths(len(a), len(b))
                if (1, 0) not in path
            ]
            return torch.stack(totals).mean()

        one = torch.ones((), dtype=torch.int64, device=device)
        wall = torch.tensor(math.inf, dtype=x.dtype, device=device)
        walls = (torch.arange(3, device=device), one, 0 * one)
        measured = softdtw_divergence(x, y, kind="mean_cost", dist=forbidding)
        expected = torch.stack(
            [
                mean_cost(a, b) - (mean_cost(a, a) + mean_cost(b, b)) / 2
                for a, b in zip(x.unbind(), y.unbind(), strict=True)
            ]
        )
        torch.testing.assert_close(measured, expected)
        torch.testing.assert_close(
            torch.autograd.grad(measured.sum(), (x, y)), torch.autograd.grad(expected.sum(), (x, y))
        )
        walls = (torch.arange(3, device=device), 0 * one, 0 * one)
        assert not softdtw_divergence(x, y, kind="mean_cost", dist=forbidding).isfinite().any()


class TestDilate:
    """The definitions of Le Guen and Thome (2019)."""

    def test_literal_values(self, device: str) -> None:
        """x = (0, 1), y = (0, 2), gamma = 1: costs ((0, 4), (1, 1)), and three paths of cost 1, 2 and 5."""
        x = torch.tensor([[[0.0], [1.0]]], dtype=torch.float64, device=device)
        y = torch.tensor([[[0.0], [2.0]]], dtype=torch.float64, device=device)
        weights = [math.exp(-1), math.exp(-2), math.exp(-5)]  # the diagonal, down and right, right and down
        shape = -math.log(sum(weights))
        # Either corner off the diagonal is (i - j)^2 = 1, over N M = 4.
        time = (weights[1] + weights[2]) / sum(weights) / 4
        assert shape == pytest.approx(0.67343736)
        assert time == pytest.approx(0.06965020)
        for alpha in (0.0, 0.3, 1.0):
            loss = DilateLoss(alpha=alpha, gamma=1.0)(x, y)
            assert loss.item() == pytest.approx(alpha * shape + (1 - alpha) * time)

    def test_the_definition(self, device: str) -> None:
        """alpha softdtw + (1 - alpha) <E, omega> / (N M) with omega = (i - j)^2, as a mean over the batch."""
        x, y = series(device, 6, 6, 1)
        step = torch.arange(1, 7, dtype=torch.float64, device=device)
        omega = (step.view(-1, 1) - step).square()
        shape = softdtw(x, y, gamma=0.1).mean()
        time = (softdtw_alignment(x, y, gamma=0.1) * omega).sum() / 36 / 3
        loss = DilateLoss(alpha=0.8, gamma=0.1)(x, y)
        torch.testing.assert_close(loss, 0.8 * shape + 0.2 * time)
        measured = torch.autograd.grad(loss, (x, y))
        expected = torch.autograd.grad(0.8 * shape + 0.2 * time, (x, y))
        for ours, theirs in zip(measured, expected, strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_lengths(self, device: str) -> None:
        x, y = (side.detach() for side in series(device))
        loss = DilateLoss(gamma=0.2, reduction="none")
        measured = loss(x, y, *LENGTHS.values())
        for k in range(3):
            n, m = LENGTHS["x_lengths"][k], LENGTHS["y_lengths"][k]
            torch.testing.assert_close(measured[k], loss(x[k, :n], y[k, :m]))

    def test_gradcheck(self, device: str) -> None:
        x, y = series(device)
        assert gradcheck(DilateLoss(gamma=0.5, reduction="none"), (x, y))

    def test_module(self, device: str) -> None:
        assert repr(DilateLoss()) == "DilateLoss(alpha=0.5, gamma=0.01, reduction='mean')"
        x, y = (side.detach() for side in series(device))
        values = DilateLoss(reduction="none")(x, y)
        torch.testing.assert_close(DilateLoss()(x, y), values.mean())
        torch.testing.assert_close(DilateLoss(reduction="sum")(x, y), values.sum())

    @pytest.mark.slow
    def test_it_moves_a_forecast_in_time(self, device: str) -> None:
        target = torch.zeros(1, 20, 1, device=device)
        target[0, 10:] = 1.0
        late = torch.zeros(1, 20, 1, device=device)
        late[0, 14:] = 1.0
        assert DilateLoss(alpha=0.0)(late, target) > DilateLoss(alpha=0.0)(target, target)


COMPILED = {
    "expected cost": lambda x, y: softdtw_expected_cost(x, y, gamma=0.5),
    "features": lambda x, y: softdtw_expected_cost(x, y, omega=(x, y), gamma=0.5),
    "sharp": lambda x, y: softdtw_sharp(x, y, gamma=0.5, dist="cityblock"),
    "entropy": lambda x, y: softdtw_entropy(x, y, gamma=0.5),
    "sharp divergence": lambda x, y: softdtw_divergence(x, y, kind="sharp"),
    "dilate": lambda x, y: DilateLoss(gamma=0.5)(x, y),
    "alignment": lambda x, y: softdtw_alignment(x, y).square().sum((1, 2)),
}


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)  # torch's own
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("expected cost", "dilate") else name
        for name in COMPILED
    ],
)
def test_fullgraph(device: str, name: str) -> None:
    torch._dynamo.reset()
    x, y = (side.detach().float().requires_grad_() for side in series(device, 20, 18))
    results = []
    compiled_function: Any = torch.compile(COMPILED[name], fullgraph=True, backend="aot_eager")
    for function in (COMPILED[name], compiled_function):
        value = function(x, y)
        results.append([value, *torch.autograd.grad(value.sum(), (x, y))])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
