"""Nearest neighbours: against the sorted table of all pairs, in tiles of any size, from any kind of data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from softdtw_cuda import _series, neighbours, softdtw_cdist, softdtw_knn

LENGTHS = [9, 4, 6, 7, 5, 9, 8, 3, 9, 6, 7]


def sets(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Queries and a database, in which some series are there twice: equal values, to be sorted by index."""
    database = torch.randn(11, 9, 2)
    database[7:10] = database[[2, 2, 5]]
    queries = torch.cat([torch.randn(4, 8, 2), database[[2, 5], :8]])
    return queries.to(device, dtype), database.to(device, dtype)


def from_table(table: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, indices = torch.sort(table, dim=1, stable=True)
    return values[:, :k], indices[:, :k]


def tiles(monkeypatch: pytest.MonkeyPatch, pairs: int, rows: int) -> None:
    monkeypatch.setattr(neighbours, "CELLS_OF_A_TILE", pairs * 8 * 9)
    monkeypatch.setattr(neighbours, "ROWS_OF_A_TILE", rows)


@pytest.mark.parametrize("dist", ["sqeuclidean", "cosine", "euclidean"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "lengths"])
def test_nearest_of_the_table(
    device: str, dist: str, normalize: bool, lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, database = sets(device)
    options: dict[str, Any] = {"gamma": 0.3, "dist": dist, "normalize": normalize}
    table = softdtw_cdist(queries, database, y_lengths=lengths, **options)
    for pairs, rows in ((1000, 1000), (4, 4), (12, 2), (1, 1)):
        tiles(monkeypatch, pairs, rows)
        values, indices = softdtw_knn(queries, database, 5, database_lengths=lengths, **options)
        expected = from_table(table, 5)
        assert torch.equal(values, expected[0])
        assert torch.equal(indices, expected[1])
        assert not values.requires_grad


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "lengths"])
def test_a_set_with_itself(
    device: str,
    exclude_self: bool,
    normalize: bool,
    lengths: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, database = sets(device)
    table = softdtw_cdist(database, gamma=0.3, normalize=normalize, x_lengths=lengths)
    for pairs, rows in ((1000, 1000), (4, 4), (25, 3), (1, 1)):
        tiles(monkeypatch, pairs, rows)
        values, indices = softdtw_knn(
            database,
            None,
            4,
            gamma=0.3,
            normalize=normalize,
            query_lengths=lengths,
            exclude_self=exclude_self,
        )
        ranked = torch.sort(table, dim=1, stable=True)
        for i in range(len(database)):
            keep = (ranked.indices[i] != i) if exclude_self else torch.ones_like(ranked.indices[i]).bool()
            assert torch.equal(indices[i], ranked.indices[i][keep][:4])
            assert torch.equal(values[i], ranked.values[i][keep][:4])


def test_each_unordered_pair_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from softdtw_cuda import _backends

    counted = []
    forward = _backends.forward

    def count(problem: Any) -> tuple[Tensor, Tensor]:
        counted.append(problem.batch)
        return forward(problem)

    monkeypatch.setattr(_backends, "forward", count)
    tiles(monkeypatch, 9, 3)
    softdtw_knn(torch.randn(11, 8, 1), None, 2)
    assert len(counted) > 5
    assert sum(counted) == 66


def test_an_asymmetric_distance_in_both_orders() -> None:
    x = torch.randn(6, 5, 2, dtype=torch.float64)
    options: dict[str, Any] = {"dist": lambda a, b: torch.cdist(a, 0.5 * b)}
    assert torch.equal(softdtw_knn(x, None, 6, **options)[0], from_table(softdtw_cdist(x, **options), 6)[0])


def test_nan_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, database = sets()
    database[[0, 3]] = torch.nan
    for pairs in (1000, 2):
        tiles(monkeypatch, pairs, 2)
        values, indices = softdtw_knn(queries, database, 11)
        assert values[:, :9].isfinite().all()
        assert values[:, 9:].isnan().all()
        assert indices[:, 9:].tolist() == [[0, 3]] * 6
    database[1, 2] = torch.inf
    values, indices = softdtw_knn(database, None, 10, exclude_self=True)
    assert all(i not in row for i, row in enumerate(indices.tolist()))


def test_memory_does_not_grow_with_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    of_tile = neighbours.nearest_of_tile

    def watch(tile: Tensor, first: int, k: int) -> neighbours.Nearest:
        sizes.append(tile.numel())
        return of_tile(tile, first, k)

    monkeypatch.setattr(neighbours, "nearest_of_tile", watch)
    x = torch.randn(40, 4, 1)
    softdtw_knn(x, torch.randn(300, 4, 1), 3, memory_limit=64 * 500)
    assert max(sizes) <= 500
    assert sum(sizes) == 40 * 300


class TestKinds:
    def test_numpy_in_numpy_out(self) -> None:
        queries, database = sets()
        expected = softdtw_knn(queries, database, 3)
        for given in (queries.numpy(), np.asfortranarray(queries.numpy()), queries.numpy()[:, ::-1][:, ::-1]):
            values, indices = softdtw_knn(given, database.numpy(), 3)
            assert isinstance(values, np.ndarray)
            assert isinstance(indices, np.ndarray)
            assert values.dtype == np.float32
            assert np.array_equal(values, expected[0])
            assert np.array_equal(indices, expected[1])
        swapped = queries.numpy().astype(">f4")
        assert np.array_equal(softdtw_knn(swapped, database.numpy(), 3)[0], expected[0])

    def test_a_memory_map(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        queries, database = sets()
        np.save(tmp_path / "database.npy", database.numpy())
        mapped = np.load(tmp_path / "database.npy", mmap_mode="r")
        tiles(monkeypatch, 8, 4)
        values, indices = softdtw_knn(queries, mapped, 3)
        expected = softdtw_knn(queries, database, 3)
        assert isinstance(values, Tensor)
        assert torch.equal(values, expected[0])
        assert torch.equal(indices, expected[1])

    @pytest.mark.parametrize("kind", ["tensors", "arrays", "objects"])
    def test_lists_of_unequal_length(self, kind: str) -> None:
        queries, database = sets()
        ragged: Any = [one[:n] for one, n in zip(database, LENGTHS, strict=True)]
        expected = softdtw_knn(queries, database, 3, database_lengths=LENGTHS)
        if kind != "tensors":
            ragged = [one.numpy() for one in ragged]
        if kind == "objects":
            listed, ragged = ragged, np.empty(len(ragged), dtype=object)
            ragged[:] = listed
        values, indices = softdtw_knn(queries, ragged, 3)
        assert torch.equal(values, expected[0])
        assert torch.equal(indices, expected[1])
        values, _ = softdtw_knn(ragged, queries if kind == "tensors" else queries.numpy(), 3)
        assert isinstance(values, Tensor if kind == "tensors" else np.ndarray)
        assert values.shape == (11, 3)


class TestErrors:
    def test_k(self) -> None:
        queries, database = sets()
        with pytest.raises(ValueError, match="k is 12 but the database has 11 series; expected at most 11"):
            softdtw_knn(queries, database, 12)
        with pytest.raises(ValueError, match="11 series, one of them the query itself; expected at most 10"):
            softdtw_knn(database, None, 11, exclude_self=True)
        with pytest.raises(ValueError, match="k must be at least 1"):
            softdtw_knn(queries, database, 0)
        with pytest.raises(TypeError, match="k must be an integer"):
            softdtw_knn(queries, database, 2.5)

    def test_they_name_queries_and_database(self) -> None:
        queries, database = sets()
        with pytest.raises(ValueError, match=r"queries has 2 features and database has 1 \(shapes"):
            softdtw_knn(queries, database[:, :, :1], 1)
        with pytest.raises(TypeError, match=r"queries has dtype torch.float32 and database torch.float64"):
            softdtw_knn(queries, database.double(), 1)
        with pytest.raises(ValueError, match="queries and database must both have 3 dimensions"):
            softdtw_knn(queries[0], database, 1)
        with pytest.raises(ValueError, match=r"query_lengths\[1\] is 9"):
            softdtw_knn(queries, database, 1, query_lengths=[8, 9, 8, 8, 8, 8])
        with pytest.raises(ValueError, match=r"the pair queries\[0\], database\[7\] without a path"):
            softdtw_knn(queries, database, 1, bandwidth=1, database_lengths=LENGTHS)
        with pytest.raises(TypeError, match=r"database must be a torch\.Tensor, got str"):
            softdtw_knn(queries, "database.npy", 1)
        with pytest.raises(ValueError, match="database_lengths is given but database is None"):
            softdtw_knn(database, None, 1, database_lengths=LENGTHS)

    def test_lists(self) -> None:
        queries, database = sets()
        with pytest.raises(ValueError, match=r"database\[1\] has shape \(9,\), expected \(time, 2\)"):
            softdtw_knn(queries, [database[0], database[1, :, 0]], 1)
        with pytest.raises(TypeError, match=r"database\[1\] has dtype torch.float64, expected torch.float32"):
            softdtw_knn(queries, [database[0], database[1].double()], 1)
        with pytest.raises(ValueError, match="lengths of database are given, but database is a list"):
            softdtw_knn(queries, list(database), 1, database_lengths=LENGTHS)
        with pytest.raises(TypeError, match="database has tensors and arrays, expected one of them"):
            softdtw_knn(queries, [database[0], database[1].numpy()], 1)


def test_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(monkeypatch, 4, 2)
    softdtw_knn(torch.randn(6, 8, 1), None, 2, progress=True)
    assert "21.0/21.0" in capsys.readouterr().err
    softdtw_knn(torch.randn(6, 8, 1), torch.randn(7, 8, 1), 2, progress=True)
    assert "42.0/42.0" in capsys.readouterr().err


def test_blocks_are_the_set() -> None:
    series = torch.randn(7, 3, 1)
    parts = list(_series.blocks_on(torch.device("cpu"), series, 3))
    assert [(part.start, part.stop) for part, _ in parts] == [(0, 3), (3, 6), (6, 7)]
    assert torch.equal(torch.cat([block for _, block in parts]), series)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tensor", "numpy", "memmap", "device"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_database_on_the_host(
    kind: str, normalize: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed to the GPU in many blocks, through buffers that are used again and again."""
    queries, database = torch.randn(50, 40, 2), torch.randn(3000, 40, 2)
    expected = softdtw_knn(queries.cuda(), database.cuda(), 7, gamma=0.3, normalize=normalize)
    monkeypatch.setattr(neighbours, "CELLS_OF_A_TILE", 1600 * 2000)
    given: Any = database
    if kind != "tensor":
        given = database.numpy()
    if kind == "memmap":
        np.save(tmp_path / "database.npy", given)
        given = np.load(tmp_path / "database.npy", mmap_mode="r")
    options: dict[str, Any] = {"gamma": 0.3, "normalize": normalize}
    for _ in range(5):
        if kind == "device":
            values, indices = softdtw_knn(queries, given, 7, device="cuda", **options)
            assert values.device.type == "cpu"
        else:
            values, indices = softdtw_knn(queries.cuda(), given, 7, **options)
            assert values.device.type == "cuda"
        assert torch.equal(values.cpu(), expected[0].cpu())
        assert torch.equal(indices.cpu(), expected[1].cpu())
