"""Real series: the loader reads the archive's sets, and for small gamma neighbours are those of DTW."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

from benchmarks import lower_bound, ucr, ucr_data
from benchmarks import ucr_methods as methods
from benchmarks.ucr_data import SETS, Split, parse_ts
from softdtw_cuda import softdtw_cdist, softdtw_divergence

AT_A_TIME = {"ACSF1": (30, 12)}
"""Series for training and testing of the set that would take longest, minutes for all of it."""


def random_split(lengths: list[int], features: int, seed: int) -> Split:
    generator = torch.Generator().manual_seed(seed)
    series = [torch.randn(n, features, dtype=torch.float64, generator=generator).cumsum(0) for n in lengths]
    return Split(series, torch.arange(len(lengths)) % 2)


def test_ts_files_are_read() -> None:
    series, labels = parse_ts("# text\n@problemName x\n@data\n1,2,3:4,5,6:yes\n7,8:9,10:no\n")
    assert labels == ["yes", "no"]
    torch.testing.assert_close(series[0], torch.tensor([[1, 4], [2, 5], [3, 6]], dtype=torch.float64))
    torch.testing.assert_close(series[1], torch.tensor([[7, 9], [8, 10]], dtype=torch.float64))
    with pytest.raises(ValueError, match="'@data'"):
        parse_ts("1,2,3:yes")
    with pytest.raises(ValueError, match="expected one of ArrowHead"):
        ucr_data.load("Arrowhead")


def test_the_table_of_the_sharp_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "PAIRS_AT_A_TIME", 4)
    x, y = random_split([9, 12, 7], 2, 0), random_split([8, 11], 2, 1)
    found = methods.sharp(x, y, 0.5)
    for i, one in enumerate(x.series):
        for j, other in enumerate(y.series):
            exact = softdtw_divergence(one, other, kind="sharp", gamma=0.5)
            torch.testing.assert_close(found[i, j].double(), exact, rtol=1e-4, atol=1e-3)


def test_every_measure_has_its_tasks() -> None:
    """Of two kinds that differ, all of them find out which is which."""
    pytest.importorskip("sklearn")
    up = [torch.linspace(0, 5, n, dtype=torch.float64).unsqueeze(1) for n in (10, 12, 14)]
    data = Split([*up, *(5 - each for each in up)], torch.tensor([0, 0, 0, 1, 1, 1]))
    for measure in methods.MEASURES:
        found = methods.answers(data, data, measure, 0.1, n_init=2, max_iter=5)
        assert list(found) == ["1-NN", "nearest centroid", "k-means"][: 2 if measure == methods.SHARP else 3]
        for task, answer in found.items():
            assert methods.rand_index(answer(), data.labels) == 1.0, (measure, task)


def test_rand_index_counts_pairs() -> None:
    # Pairs 01, 02, 12: together in both, together in one, apart in the other.
    assert methods.rand_index(torch.tensor([0, 0, 0]), torch.tensor([1, 1, 0])) == pytest.approx(1 / 3)
    assert methods.rand_index(torch.tensor([1, 0, 0]), torch.tensor([0, 1, 1])) == 1.0


def test_the_rows_of_a_set_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucr, "version", lambda package: "1.0")
    path = tmp_path / "ucr.csv"

    def row(name: str, score: str) -> ucr.Row:
        return ucr.Row(name, "2 / 2 series", "1-NN", "Soft-DTW", "0.1", score, "0.5", "ok")

    ucr.write([row("Trace", "0.5")], "first", path)
    ucr.write([row("GunPoint", "0.6")], "second", path)
    ucr.write([row("Trace", "0.7")], "third", path)
    with path.open(newline="") as file:
        found = [(each["set"], each["score"], each["command"]) for each in csv.DictReader(file)]
    assert found == [("GunPoint", "0.6", "second"), ("Trace", "0.7", "third")]


def test_the_lower_bound_is_one() -> None:
    assert math.exp(lower_bound.log_paths(10, 9)) == pytest.approx(1462563)  # a Delannoy number
    assert lower_bound.log_paths(10, 0) == 0.0
    x, y = (random_split([20] * 6, 1, seed).padded(torch.float64).numpy() for seed in (2, 3))
    for radius in (2, 19):
        bounds = lower_bound.lower_bounds(x[:, :, 0], y[:, :, 0], radius)
        exact = softdtw_cdist(x, y, gamma=1e-6, bandwidth=radius)
        assert (bounds <= exact + 1e-4).all()
        assert (bounds > 0.02 * exact).any()


@njit(cache=False)
def dtw(x: np.ndarray, y: np.ndarray) -> float:
    """Hard DTW of two series (N, D) and (M, D), as the recurrence is written."""
    n, m = len(x), len(y)
    before = np.full(m + 1, np.inf)
    before[0] = 0.0
    for i in range(n):
        now = np.full(m + 1, np.inf)
        for j in range(m):
            cost = 0.0
            for d in range(x.shape[1]):
                cost += (x[i, d] - y[j, d]) ** 2
            now[j + 1] = cost + min(before[j], before[j + 1], now[j])
        before = now
    return float(before[m])


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_for_small_gamma_the_nearest_neighbour_is_that_of_dtw(name: str) -> None:
    try:
        data = ucr_data.load(name)
    except ucr_data.DataNotFound as error:
        pytest.skip(str(error))
    train, test = data.train, data.test
    if name in AT_A_TIME:
        train, test = (
            split.take(torch.linspace(0, len(split) - 1, count).long())
            for split, count in zip((train, test), AT_A_TIME[name], strict=True)
        )
    rows = [[dtw(q.numpy(), d.numpy()) for d in train.series] for q in test.series]
    hard = torch.tensor(rows, dtype=torch.float64)
    soft = methods.soft(test, train, ucr.ALMOST_DTW, torch.float64)
    # Of Delannoy(N, M) < (1 + sqrt 2)^(N + M) paths none is cheaper than the cheapest.
    longest = max(len(one) for one in (*train.series, *test.series))
    bound = ucr.ALMOST_DTW * 2 * longest * math.log(1 + math.sqrt(2))
    gap = hard - soft
    assert float(gap.min()) >= -1e-9 * float(hard.max())
    assert float(gap.max()) <= bound
    errors = [int((train.labels[each.argmin(1)] != test.labels).sum()) for each in (hard, soft)]
    assert errors[0] == errors[1]
