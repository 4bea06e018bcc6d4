"""Barycenters: what an average has to satisfy, and how the descent reports itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from softdtw_cuda import BarycenterInfo, barycenters, softdtw, softdtw_barycenter
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


OPTIMIZERS = pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])


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

    monkeypatch.setattr(barycenters, "pair_values", watched)
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
