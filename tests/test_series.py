"""Sets of series as arrays and lists, and a gamma from the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from softdtw_cuda import gamma_heuristic, softdtw_cdist, softdtw_knn

LENGTHS = [5, 7, 2]


def ragged(grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(length, 2, dtype=torch.float64, requires_grad=grad) for length in LENGTHS]


@pytest.mark.parametrize("normalize", [False, True])
def test_all_pairs_of_lists(normalize: bool) -> None:
    x, y = ragged(), ragged()[:2]
    padded = [torch.nn.utils.rnn.pad_sequence(side, batch_first=True) for side in (x, y)]
    options: dict[str, Any] = {"gamma": 0.5, "normalize": normalize}
    expected = softdtw_cdist(*padded, x_lengths=LENGTHS, y_lengths=LENGTHS[:2], **options)
    assert torch.equal(softdtw_cdist(x, y, **options), expected)
    arrays = softdtw_cdist([one.numpy() for one in x], [one.numpy() for one in y], **options)
    assert isinstance(arrays, np.ndarray)
    assert np.array_equal(arrays, expected)
    alone = softdtw_cdist(tuple(x), **options)
    assert torch.equal(alone, softdtw_cdist(padded[0], x_lengths=LENGTHS, **options))


def test_all_pairs_of_arrays() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 4, 6, 3)).astype(np.float32)
    value = softdtw_cdist(x, y, x_lengths=[1, 2, 3, 6])
    assert isinstance(value, np.ndarray)
    assert value.dtype == np.float32
    expected = softdtw_cdist(torch.tensor(x), torch.tensor(y), x_lengths=[1, 2, 3, 6])
    assert np.array_equal(value, expected)


def test_gradients_reach_the_series_of_a_list() -> None:
    x = ragged(grad=True)
    softdtw_cdist(x, gamma=0.5).sum().backward()
    for one in x:
        assert one.grad is not None
        assert one.grad.shape == one.shape
        assert one.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
def test_gamma_is_the_median_of_squared_distances(kind: str) -> None:
    series = torch.randn(6, 30, 2)
    given: Any = {"tensor": series, "array": series.numpy(), "list": list(series)}[kind]
    steps = series.flatten(0, 1).double()
    exact = torch.pdist(steps).square().median().item()
    assert gamma_heuristic(given) == pytest.approx(exact)
    sampled = gamma_heuristic(given, n_samples=100)
    assert sampled != gamma_heuristic(given)
    assert sampled == gamma_heuristic(given, n_samples=100) != gamma_heuristic(given, n_samples=100, seed=1)
    assert sampled == pytest.approx(exact, rel=0.3)


def test_gamma_ignores_padding_and_scales_with_the_data() -> None:
    series = ragged()
    padded = torch.nn.utils.rnn.pad_sequence(series, batch_first=True, padding_value=1e9)
    gamma = gamma_heuristic(series)
    assert gamma_heuristic(padded, lengths=LENGTHS) == gamma
    assert gamma_heuristic([10 * one for one in series]) == pytest.approx(100 * gamma)
    blocks = torch.zeros(3, 20, 1)
    blocks[0, :4] = 1.0  # the median is zero
    assert 0 < gamma_heuristic(blocks) < 1


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_series_without_a_scale(value: float) -> None:
    with pytest.raises(ValueError, match="X has a typical squared distance"):
        gamma_heuristic(torch.full((3, 4, 1), value))
    with pytest.raises(ValueError, match="expected at least 2"):
        gamma_heuristic(torch.zeros(1, 1, 1))


def test_gamma_of_more_steps_than_memory_holds() -> None:
    """Ten billion of them: a permutation would take 160 GB."""
    series = torch.randn(1, 100_000, 1).cumsum(1)
    assert 0 < gamma_heuristic(series.expand(100_000, -1, -1)) < float("inf")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"n_samples": 1}, ValueError, "n_samples must be at least 2, got 1"),
        ({"seed": "a"}, TypeError, "seed must be an integer, got 'a'"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
    ],
)
def test_a_gamma_that_cannot_be_drawn(options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        gamma_heuristic(torch.randn(3, 4, 1), **options)


def test_what_is_wrong_is_called_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"^X must have 3 dimensions.* got shape \(3, 4\)"):
        gamma_heuristic(torch.randn(3, 4))
    mixed: Any = [torch.randn(3, 2), np.zeros((4, 2), np.float32)]
    with pytest.raises(TypeError, match="queries has tensors and arrays, expected one of them"):
        softdtw_knn(mixed, torch.randn(5, 4, 2), 1)
