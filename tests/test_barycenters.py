"""Barycenters: what an average has to satisfy, and how the descent reports itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from softdtw_cuda import (
    BarycenterInfo,
    _barycenter_loss,
    _descent,
    softdtw,
    softdtw_barycenter,
    softdtw_barycenters,
    softdtw_divergence,
)
from softdtw_cuda._descent import Points
from softdtw_cuda.pairs import pair_values


def block_waves(device: str, count: int = 8, size: int = 50) -> torch.Tensor:
    """Blocks of different place and width, (count, size, 1)."""
    generator = torch.Generator().manual_seed(7)
    time = torch.arange(size)
    waves = []
    for _ in range(count):
        centre = torch.randint(15, 35, (), generator=generator)
        half = torch.randint(5, 10, (), generator=generator)
        waves.append(((time - centre).abs() < half).float())
    noise = 0.05 * torch.randn(count, size, generator=generator)
    return (torch.stack(waves) + noise).unsqueeze(2).to(device)


def loss_of(z: torch.Tensor, X: torch.Tensor, gamma: float, weights: torch.Tensor | None = None) -> float:
    values = softdtw(z.unsqueeze(0), X, gamma=gamma)
    return (values.mean() if weights is None else values @ weights).item()


OPTIMIZERS = pytest.mark.parametrize("optimizer", ["adam", "lbfgs", "newton-cg"])


@OPTIMIZERS
def test_identical_series_average_to_themselves(device: str, optimizer: str) -> None:
    # Steps of 0.2 against a tiny gamma: no warping pays, and the minimum is the series itself.
    one = torch.linspace(0, 8, 40, device=device).unsqueeze(1)
    init = one + 0.05 * torch.randn(40, 1).to(device)
    z = softdtw_barycenter(one.expand(5, -1, -1), gamma=1e-3, init=init, optimizer=optimizer, max_iter=300)
    assert z.shape == one.shape
    assert (init - one).abs().max() > 0.05
    assert (z - one).abs().max() < 0.005
    assert torch.equal(softdtw_barycenter(one.expand(5, -1, -1), gamma=1e-3, max_iter=1), one)


@OPTIMIZERS
def test_better_than_the_euclidean_mean(device: str, optimizer: str) -> None:
    X = block_waves(device)
    z, info = softdtw_barycenter(X, gamma=0.1, optimizer=optimizer, return_info=True)
    mean_loss = loss_of(X.mean(0), X, 0.1)
    assert info.losses[0] == pytest.approx(mean_loss, rel=1e-5)
    assert loss_of(z, X, 0.1) < mean_loss - 1.0
    # The mean of shifted blocks is a low hill; their barycenter is a block again.
    assert z.max() > 0.9
    assert X.mean(0).max() < 0.9


@OPTIMIZERS
def test_a_stationary_point(device: str, optimizer: str) -> None:
    X = block_waves(device).double()
    z = softdtw_barycenter(X, gamma=0.5, optimizer=optimizer, max_iter=300, tol=0.0, early_stopping=False)
    z.requires_grad_()
    softdtw(z.unsqueeze(0), X, gamma=0.5).mean().backward()
    assert z.grad.norm() < (2e-2 if optimizer == "adam" else 1e-5)


def test_order_does_not_matter(device: str) -> None:
    X = block_waves(device).double()
    order = torch.randperm(len(X))
    options = {"gamma": 0.5, "optimizer": "lbfgs", "tol": 0.0, "max_iter": 200}
    first = softdtw_barycenter(X, **options)
    second = softdtw_barycenter(X[order.to(device)], **options)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def test_lbfgs_reaches_at_least_what_adam_does(device: str) -> None:
    X = block_waves(device)
    _, adam = softdtw_barycenter(X, gamma=0.1, return_info=True)
    _, lbfgs = softdtw_barycenter(X, gamma=0.1, optimizer="lbfgs", return_info=True)
    assert lbfgs.best_loss <= adam.best_loss + 1e-4
    assert lbfgs.iterations < adam.iterations


class TestWeights:
    def test_all_on_one_series(self, device: str) -> None:
        X = block_waves(device)
        weights = [0.0] * 7 + [4.0]
        alone = softdtw_barycenter(X[7:], gamma=0.1, optimizer="lbfgs")
        weighted = softdtw_barycenter(X, gamma=0.1, weights=weights, optimizer="lbfgs")
        torch.testing.assert_close(weighted, alone, rtol=1e-3, atol=1e-3)

    def test_they_are_normalised(self, device: str) -> None:
        X = block_waves(device)
        weights = torch.arange(1.0, 9.0, device=device)
        first = softdtw_barycenter(X, weights=weights, max_iter=5, return_info=True)
        second = softdtw_barycenter(X, weights=(weights / 2).tolist(), max_iter=5, return_info=True)
        assert torch.equal(first[0], second[0])
        assert first[1].losses[0] == pytest.approx(
            loss_of(torch.einsum("k,knd->nd", weights / weights.sum(), X), X, 1.0, weights / weights.sum()),
            rel=1e-5,
        )

    def test_repeating_a_series_is_doubling_its_weight(self, device: str) -> None:
        X = block_waves(device, 3).double()
        options = {"gamma": 0.5, "optimizer": "lbfgs", "tol": 0.0}
        repeated = softdtw_barycenter(torch.cat((X, X[:1])), **options)
        weighted = softdtw_barycenter(X, weights=[2.0, 1.0, 1.0], **options)
        torch.testing.assert_close(repeated, weighted, rtol=1e-4, atol=1e-4)


class TestLengths:
    def test_a_list_equals_padding_with_lengths(self, device: str) -> None:
        X = block_waves(device)
        lengths = [50, 44, 41, 38, 50, 47, 39, 43]
        ragged = [series[:length] for series, length in zip(X, lengths, strict=True)]
        padded = X.clone()
        for series, length in zip(padded, lengths, strict=True):
            series[length:] = math.nan
        from_list, info = softdtw_barycenter(ragged, gamma=0.1, max_iter=30, return_info=True)
        from_padding = softdtw_barycenter(padded, gamma=0.1, max_iter=30, lengths=lengths)
        on_device = softdtw_barycenter(
            padded, gamma=0.1, max_iter=30, lengths=torch.tensor(lengths, device=device)
        )
        assert from_list.shape == (44, 1)  # the mean length
        assert torch.equal(from_list, from_padding)
        assert torch.equal(from_list, on_device)
        assert info.best_loss < info.losses[0]

    @pytest.mark.parametrize("length", [1, 20, 80])
    def test_a_length_of_its_own(self, device: str, length: int) -> None:
        X = block_waves(device)
        z, info = softdtw_barycenter(X, gamma=0.1, length=length, max_iter=30, return_info=True)
        assert z.shape == (length, 1)
        assert info.best_loss < info.losses[0]
        assert info.best_loss == pytest.approx(loss_of(z, X, 0.1), rel=1e-5)

    def test_init_sets_the_length(self, device: str) -> None:
        X = block_waves(device)
        init = torch.zeros(33, 1, device=device)
        assert softdtw_barycenter(X, init=init, max_iter=3).shape == (33, 1)
        assert (init == 0).all()
        assert not init.requires_grad


class TestInfo:
    def test_the_best_iterate_is_returned(self, device: str) -> None:
        X = block_waves(device)
        # Steps far too long: the loss jumps about, and the last iterate is not the best.
        z, info = softdtw_barycenter(
            X, gamma=0.1, lr=3.0, max_iter=25, early_stopping=False, return_info=True
        )
        assert isinstance(info, BarycenterInfo)
        assert len(info.losses) == info.iterations + 1 == 26
        assert info.stop_reason == "max_iter"
        assert info.losses[-1] > info.best_loss
        assert loss_of(z, X, 0.1) == pytest.approx(info.best_loss, rel=1e-5)

    def test_early_stopping(self, device: str) -> None:
        X = block_waves(device)
        _, info = softdtw_barycenter(X, gamma=0.1, max_iter=500, patience=5, tol=1e-3, return_info=True)
        assert info.stop_reason == "early_stopping"
        assert 250 <= info.iterations < 500
        recent, before = info.losses[-5:], info.losses[:-5]
        assert min(recent) >= min(before) - 1e-3

    def test_convergence(self, device: str) -> None:
        _, info = softdtw_barycenter(
            block_waves(device),
            gamma=0.1,
            optimizer="lbfgs",
            max_iter=500,
            early_stopping=False,
            return_info=True,
        )
        assert info.stop_reason == "converged"
        assert info.iterations < 500

    def test_divergence(self, device: str) -> None:
        z, info = softdtw_barycenter(block_waves(device), lr=1e30, max_iter=10, return_info=True)
        assert info.stop_reason == "diverged"
        assert torch.isfinite(z).all()
        assert math.isfinite(info.best_loss)


def test_progress_bar(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    softdtw_barycenter(block_waves(device), max_iter=3, progress=True)
    assert "3/3" in capsys.readouterr().err
    softdtw_barycenter(block_waves(device), max_iter=3)
    assert capsys.readouterr().err == ""


def test_types_and_gradient_mode(device: str) -> None:
    X = block_waves(device).requires_grad_()
    with torch.no_grad():
        z = softdtw_barycenter(X, max_iter=3)
    assert not z.requires_grad
    assert z.dtype == torch.float32
    assert X.grad is None
    assert softdtw_barycenter(X.detach().bfloat16(), max_iter=2).dtype == torch.float32
    assert softdtw_barycenter(X.detach().double(), max_iter=2).dtype == torch.float64
    assert softdtw_barycenter(X.detach().cpu(), max_iter=2, device=device).device.type == device


@pytest.mark.parametrize("fused", [True, False])
def test_fused_is_passed_on(device: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    X = block_waves(device)
    expected = softdtw_barycenter(X, gamma=0.1, max_iter=10)
    asked = []

    def watched(problem: Any, *arguments: Any) -> torch.Tensor:
        asked.append(problem.fused)
        return pair_values(problem, *arguments)

    monkeypatch.setattr(_barycenter_loss, "pair_values", watched)
    z = softdtw_barycenter(X, gamma=0.1, max_iter=10, fused=fused)
    assert set(asked) == {fused}
    torch.testing.assert_close(z, expected, rtol=1e-3, atol=1e-3)


def test_adam_is_torchs_with_steps_that_shrink_like_a_cosine(device: str) -> None:
    """As in the paper: from lr to a tenth of it."""
    X = block_waves(device).double()
    z = X.mean(0).requires_grad_()
    adam = torch.optim.Adam([z], lr=0.05)
    seen: list[torch.Tensor] = []
    softdtw_barycenter(
        X,
        gamma=0.1,
        max_iter=20,
        lr=0.05,
        early_stopping=False,
        callback=lambda step, iterate, loss: seen.append(iterate),
    )
    for step in range(20):
        adam.param_groups[0]["lr"] = 0.05 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / 20)) / 2)
        adam.zero_grad()
        softdtw(z.unsqueeze(0), X, gamma=0.1).mean().backward()
        adam.step()
        torch.testing.assert_close(seen[step], z.detach(), rtol=1e-7, atol=1e-7)


def test_the_first_step_of_lbfgs_is_as_long_as_lr_says(device: str) -> None:
    X = block_waves(device).double()
    start = X.mean(0).requires_grad_()
    softdtw(start.unsqueeze(0), X, gamma=0.1).mean().backward()
    assert start.grad is not None
    for rate in (0.3, 1.0):
        # Short enough for the line search to take it, long enough not to be doubled.
        z = softdtw_barycenter(X, gamma=0.1, max_iter=1, optimizer="lbfgs", lr=rate)
        torch.testing.assert_close(z, start.detach() - rate * 0.5 * start.grad)


def test_the_length_is_the_weighted_mean_of_all(device: str) -> None:
    series = [torch.randn(steps, 2, device=device) for steps in (4, 10, 40)]
    for weights, length in ((None, 18), ([3, 1, 0], 6), ([0, 0, 1], 40), ([1, 1, 2], 24)):
        assert softdtw_barycenter(series, weights=weights, max_iter=1).shape == (length, 2)


@pytest.mark.parametrize("size", [1e-6, 1e-12, 1e6])
def test_lbfgs_goes_on_however_small_the_numbers(device: str, size: float) -> None:
    X = block_waves(device).double()
    z, info = softdtw_barycenter(X, gamma=0.1, optimizer="lbfgs", tol=0, return_info=True)
    small, same = softdtw_barycenter(
        X * size, gamma=0.1 * size**2, optimizer="lbfgs", tol=0, return_info=True
    )
    assert same.losses[0] == pytest.approx(info.losses[0] * size**2, rel=1e-9)
    assert min(same.losses) == pytest.approx(min(info.losses) * size**2, rel=1e-3)
    assert loss_of(small / size, X, 0.1) == pytest.approx(loss_of(z, X, 0.1), rel=1e-3)


@pytest.mark.parametrize("size", [1e-25, 1e-42])
def test_lbfgs_and_numbers_whose_squares_vanish(device: str, size: float) -> None:
    X = block_waves(device) * size
    z, info = softdtw_barycenter(X, gamma=0.1, optimizer="lbfgs", max_iter=3, return_info=True)
    assert z.isfinite().all()
    assert all(map(math.isfinite, info.losses))


def huber(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A distance without kernels, smooth everywhere."""
    return (1 + (x.unsqueeze(2) - y.unsqueeze(1)).square().sum(3)).sqrt() - 1


MEASURES: dict[str, tuple[dict[str, Any], Callable[..., torch.Tensor]]] = {
    "plain": ({}, softdtw),
    "soft": ({"divergence": "soft"}, softdtw_divergence),
    "sharp": (
        {"divergence": "sharp"},
        lambda *series, **options: softdtw_divergence(*series, kind="sharp", **options),
    ),
    "band": ({"bandwidth": 4}, lambda *series, **options: softdtw(*series, bandwidth=4, **options)),
    "cosine": ({"dist": "cosine"}, lambda *series, **options: softdtw(*series, dist="cosine", **options)),
    "huber, soft": (
        {"dist": huber, "divergence": "soft"},
        lambda *series, **options: softdtw_divergence(*series, dist=huber, **options),
    ),
    "squares, sharp": (
        {"dist": lambda x, y: torch.cdist(x, y).square(), "divergence": "sharp"},
        lambda *series, **options: softdtw_divergence(*series, kind="sharp", **options),
    ),
}


def ragged_set(device: str) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """(9, 14, 2) waves with NaN in the padding, their lengths, and weights."""
    generator = torch.Generator().manual_seed(3)
    time = torch.linspace(0, 5, 14, dtype=torch.float64)
    phase = torch.rand(9, 1, generator=generator, dtype=torch.float64)
    X = torch.stack([(time + phase).sin(), (time * (1 + phase)).cos()], 2)
    X += 0.1 * torch.randn(X.shape, generator=generator, dtype=torch.float64)
    lengths = [14, 11, 12, 13, 12, 14, 11, 13, 12]
    for series, length in zip(X, lengths, strict=True):
        series[length:] = math.nan
    return X.to(device), lengths, torch.rand(9, generator=generator, dtype=torch.float64) + 0.1


class TestMeasures:
    @pytest.mark.parametrize("name", MEASURES)
    def test_the_loss_is_that_of_the_public_function_and_its_minimum_is_found(
        self, device: str, name: str
    ) -> None:
        options, measure = MEASURES[name]
        X, lengths, weights = ragged_set(device)
        z, info = softdtw_barycenter(
            X,
            gamma=0.3,
            lengths=lengths,
            weights=weights,
            optimizer="lbfgs",
            max_iter=200,
            early_stopping=False,
            return_info=True,
            **options,
        )
        shares = (weights / weights.sum()).to(device)

        def loss_at(points: torch.Tensor) -> torch.Tensor:
            """(R,) losses of points (R, L, D)."""
            series, owners = X.repeat(len(points), 1, 1), points.repeat_interleave(len(X), 0)
            values = measure(owners, series, gamma=0.3, y_lengths=lengths * len(points))
            return values.view(len(points), -1) @ shares

        point = z.clone().requires_grad_()
        loss = loss_at(point.unsqueeze(0)).sum()
        loss.backward()
        assert info.best_loss == pytest.approx(loss.item(), rel=1e-9)
        assert info.best_loss < info.losses[0] - 0.1 * (1 if name != "cosine" else 0)
        assert point.grad is not None
        assert point.grad.norm() < 1e-4
        generator = torch.Generator().manual_seed(4)
        nearby = z + 0.02 * torch.randn(100, *z.shape, generator=generator, dtype=z.dtype).to(device)
        with torch.no_grad():
            assert (loss_at(nearby) > loss).all()

    @pytest.mark.parametrize("divergence", ["soft", "sharp"])
    def test_copies_average_to_themselves_for_any_gamma(self, device: str, divergence: Any) -> None:
        one = torch.linspace(0, 6, 12, dtype=torch.float64, device=device).sin().unsqueeze(1)
        start = one + 0.1 * torch.randn(12, 1, dtype=torch.float64).to(device)
        options: dict[str, Any] = {"gamma": 1.0, "init": start, "optimizer": "lbfgs", "max_iter": 300}
        z, info = softdtw_barycenter(
            one.expand(3, -1, -1), divergence=divergence, tol=0.0, return_info=True, **options
        )
        assert info.best_loss < 1e-4 < info.losses[0]
        assert (z - one).abs().max() < (start - one).abs().max()
        # Plain Soft-DTW smooths instead.
        plain = softdtw_barycenter(one.expand(3, -1, -1), **options)
        assert (plain - one).abs().max() > 3 * (z - one).abs().max()


class TestNewton:
    @pytest.mark.parametrize("divergence", [None, "soft"])
    def test_the_minimum_of_lbfgs_in_fewer_iterations(self, device: str, divergence: Any) -> None:
        X, lengths, weights = ragged_set(device)
        options: dict[str, Any] = {
            "gamma": 0.3, "lengths": lengths, "weights": weights, "divergence": divergence,
            "max_iter": 400, "early_stopping": False, "return_info": True,
        }  # fmt: skip
        expected, lbfgs = softdtw_barycenter(X, optimizer="lbfgs", **options)
        z, newton = softdtw_barycenter(X, optimizer="newton-cg", **options)
        assert newton.stop_reason == "converged"
        assert newton.best_loss <= lbfgs.best_loss + 1e-9
        assert newton.iterations < lbfgs.iterations
        torch.testing.assert_close(z, expected, rtol=1e-3, atol=1e-3)


class TestClusters:
    LABELS = (2, 0, 2, 1, 0, 2, 2, 1, 0)

    # "sharp" has no Hessian for Newton's method.
    @pytest.mark.parametrize(
        ("optimizer", "name"),
        [
            *itertools.product(("adam", "lbfgs"), ("plain", "soft", "sharp", "band", "cosine")),
            ("newton-cg", "plain"),
            ("newton-cg", "soft"),
        ],
    )
    def test_each_is_a_call_of_its_own(self, device: str, optimizer: Any, name: str) -> None:
        X, lengths, weights = ragged_set(device)
        options = {"gamma": 0.3, "length": 12, "max_iter": 6, "optimizer": optimizer, **MEASURES[name][0]}
        z, infos = softdtw_barycenters(
            X, self.LABELS, lengths=lengths, weights=weights, return_info=True, **options
        )
        again = softdtw_barycenters(X, self.LABELS, lengths=lengths, weights=weights, **options)
        assert torch.equal(z, again)
        for k in range(3):
            own = [i for i, label in enumerate(self.LABELS) if label == k]
            alone, info = softdtw_barycenter(
                X[own], lengths=[lengths[i] for i in own], weights=weights[own], return_info=True, **options
            )
            torch.testing.assert_close(z[k], alone, rtol=1e-6, atol=1e-6)
            assert infos[k].losses == pytest.approx(info.losses, rel=1e-6, abs=1e-9)
            assert (infos[k].iterations, infos[k].stop_reason) == (info.iterations, info.stop_reason)

    @pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda each: torch.tensor(each).int()])
    def test_labels_of_any_kind(self, device: str, kind: Any) -> None:
        X = block_waves(device)
        labels = [1, 0, 0, 1, 1, 0, 1, 1]
        expected = softdtw_barycenters(X, labels, max_iter=3)
        assert torch.equal(softdtw_barycenters(X, kind(labels), max_iter=3), expected)
        ragged = [series[: 40 + k] for k, series in enumerate(X)]
        assert softdtw_barycenters(ragged, kind(labels), max_iter=3).shape == (2, 44, 1)

    def test_a_cluster_that_has_stopped_costs_nothing(
        self, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        X = block_waves(device).double()
        asked = []

        def watched(problem: Any, count: int, *arguments: Any) -> torch.Tensor:
            asked.append(count)
            return pair_values(problem, count, *arguments)

        monkeypatch.setattr(_barycenter_loss, "pair_values", watched)
        # The start of cluster 1 is at its minimum already.
        minimum = softdtw_barycenter(X[3:], gamma=0.1, optimizer="lbfgs", early_stopping=False)
        asked.clear()
        z, infos = softdtw_barycenters(
            X,
            [0] * 3 + [1] * 5,
            gamma=0.1,
            init=torch.stack([X[0], minimum]),
            optimizer="lbfgs",
            early_stopping=False,
            return_info=True,
        )
        assert torch.equal(z[1], minimum)
        assert infos[1].iterations <= 1
        assert infos[1].stop_reason == "converged"
        assert infos[0].iterations > 3
        # One list of all pairs for the start, soon cluster 0 alone.
        assert asked[0] == 8
        assert set(asked[2:]) == {3}

    def test_sums_in_groups(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        X = block_waves(device, 12).double()
        labels = [0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1]
        options: dict[str, Any] = {"gamma": 0.1, "optimizer": "newton-cg", "max_iter": 5}
        expected = softdtw_barycenters(X, labels, **options)
        for size in (1, 2, 3):
            monkeypatch.setattr(_barycenter_loss, "SERIES_OF_A_GROUP", size)
            torch.testing.assert_close(softdtw_barycenters(X, labels, **options), expected)

    @OPTIMIZERS
    def test_empty_clusters_keep_their_start(self, device: str, optimizer: Any) -> None:
        X = block_waves(device)
        init = X[:4].clone()
        seen = []
        z, infos = softdtw_barycenters(
            X,
            [2, 0, 0, 2, 2, 0, 0, 3],
            weights=[1.0] * 7 + [0.0],
            init=init,
            gamma=0.1,
            max_iter=4,
            optimizer=optimizer,
            return_info=True,
            callback=lambda step, iterates, losses: seen.append(losses),
        )
        assert z.isfinite().all()
        for k in (1, 3):
            assert torch.equal(z[k], init[k])
            assert infos[k] == BarycenterInfo([], 0, "empty")
            assert math.isnan(infos[k].best_loss)
            assert math.isnan(seen[0][k])
        for k in (0, 2):
            assert infos[k].best_loss < infos[k].losses[0]

    def test_more_clusters_than_labels(self, device: str) -> None:
        X = block_waves(device)
        z = softdtw_barycenters(X, [0] * 8, 3, init=X[:3], max_iter=2)
        assert torch.equal(z[1:], X[1:3])

    def test_clusters_stop_for_their_own_reasons(self, device: str) -> None:
        X = block_waves(device)
        _, (first, second) = softdtw_barycenters(
            torch.cat([X, 1e3 * X]), [0] * 8 + [1] * 8, gamma=0.1, tol=1.0, patience=2, max_iter=60,
            optimizer="lbfgs", return_info=True,
        )  # fmt: skip
        assert first.stop_reason == "early_stopping"
        assert second.iterations > first.iterations


class TestCallback:
    def test_one(self, device: str) -> None:
        X = block_waves(device)
        seen: list[tuple[int, torch.Tensor, float]] = []
        z, info = softdtw_barycenter(
            X, gamma=0.1, max_iter=4, return_info=True, callback=lambda *each: seen.append(each)
        )
        assert [step for step, _, _ in seen] == [1, 2, 3, 4]
        assert [loss for _, _, loss in seen] == info.losses[1:]
        for _, iterate, loss in seen:
            assert iterate.shape == (50, 1)
            assert loss_of(iterate, X, 0.1) == pytest.approx(loss, rel=1e-5)
        assert torch.equal(seen[-1][1], z)
        # Iterates are the callback's own.
        changed = softdtw_barycenter(
            X, gamma=0.1, max_iter=4, callback=lambda _, iterate, __: iterate.zero_()
        )
        assert torch.equal(changed, z)

    def test_several(self, device: str) -> None:
        X = block_waves(device)
        shapes = []
        softdtw_barycenters(
            X,
            [0, 1] * 4,
            max_iter=2,
            callback=lambda step, iterates, losses: shapes.append((step, iterates.shape, len(losses))),
        )
        assert shapes == [(1, (2, 50, 1), 2), (2, (2, 50, 1), 2)]

    def test_an_error_ends_the_call(self, device: str) -> None:
        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            softdtw_barycenter(block_waves(device), callback=stop)


@OPTIMIZERS
def test_no_iterations(device: str, optimizer: Any) -> None:
    X = block_waves(device)
    z, info = softdtw_barycenter(X, gamma=0.1, max_iter=0, optimizer=optimizer, return_info=True)
    torch.testing.assert_close(z, X.mean(0))
    assert info.iterations == 0
    assert info.stop_reason == "max_iter"
    assert info.losses == pytest.approx([loss_of(z, X, 0.1)], rel=1e-6)
    assert torch.equal(softdtw_barycenter(X, max_iter=0, init=X[3]), X[3])


def minimise(kind: str, start: torch.Tensor, functions: list[Callable[..., torch.Tensor]]) -> torch.Tensor:
    """Where an optimizer of points (k, n), each with a function of its own, ends."""

    def loss(z: torch.Tensor) -> torch.Tensor:
        return torch.stack([function(*row) for function, row in zip(functions, z, strict=True)])

    def evaluate(z: torch.Tensor, which: list[bool]) -> Points:
        z = z.detach().requires_grad_()
        losses = loss(z)
        (gradient,) = torch.autograd.grad(losses.sum(), z)
        losses = losses.detach()
        return Points(z.detach(), losses, gradient, 1e-16 * losses.abs())

    def hessians(z: torch.Tensor, which: list[bool]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda v: torch.autograd.functional.hvp(lambda each: loss(each).sum(), z, v)[1]

    optimizer = (
        _descent.LBFGS(evaluate, 1.0) if kind == "lbfgs" else _descent.NewtonCG(evaluate, hessians, 1.0)
    )
    at, active = evaluate(start, [True] * len(start)), [True] * len(start)
    for _ in range(200):
        at, moved = optimizer.step(at, active)
        active = [one and still for one, still in zip(active, moved.tolist(), strict=True)]
    assert not any(active)
    return at.z


@pytest.mark.parametrize("kind", ["lbfgs", "newton-cg"])
def test_points_with_functions_of_their_own(kind: str) -> None:
    functions: list[Callable[..., torch.Tensor]] = [
        lambda x, y: (1 - x).square() + 100 * (y - x * x).square(),  # Rosenbrock's valley
        lambda x, y: 1e4 * (x - 3).square() + 1e-2 * (y + 5).square(),
        lambda x, y: x**4 / 4 - x**2 / 2 + y**2,  # a saddle at zero, next to the start
        lambda x, y: (1 + x * x).sqrt() + (1 + y * y).sqrt(),  # nearly flat far from the minimum
    ]
    start = torch.tensor([[-1.2, 1.0], [0.0, 0.0], [1e-3, 1.0], [40.0, -30.0]], dtype=torch.float64)
    expected = torch.tensor([[1.0, 1.0], [3.0, -5.0], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    ends = minimise(kind, start, functions)
    ends[2, 0] = ends[2, 0].abs()  # either of its minima
    torch.testing.assert_close(ends, expected, rtol=1e-5, atol=1e-5)
