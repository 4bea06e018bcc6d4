"""Tiles, output files and their journal: torn lines, other jobs, full disks, early stops."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softdtw_cuda import _journal
from softdtw_cuda._journal import Journal, Output
from softdtw_cuda._problem import NO_BAND
from softdtw_cuda._tiles import Tile, count_cells, divide, row_tiles, square_tiles


def pair_cells(n: int, m: int, bandwidth: int) -> int:
    return sum(bandwidth < 0 or abs(i - j) <= bandwidth for i in range(n) for j in range(m))


@pytest.mark.parametrize("bandwidth", [NO_BAND, 3, 6])
def test_cells_are_those_inside_the_band(bandwidth: int) -> None:
    rows, columns = np.array([4, 6, 7]), np.array([5, 4])
    expected = sum(pair_cells(n, m, bandwidth) for n in rows.tolist() for m in columns.tolist())
    assert count_cells(rows, columns, bandwidth) == expected


@pytest.mark.parametrize(("count", "others"), [(1, 1), (1, 700), (700, 1), (300, None), (40, 5000)])
def test_tiles_cover_every_pair_once(count: int, others: int | None) -> None:
    generator = np.random.default_rng(count)
    x = generator.integers(1, 400, count)
    y = x if others is None else generator.integers(1, 400, others)
    for tiles in (
        square_tiles(x, None if others is None else y, NO_BAND, "cpu"),
        row_tiles(x, y, NO_BAND, "cpu"),
    ):
        seen = np.zeros((len(x), len(y)), int)
        for tile in tiles:
            seen[tile.rows, tile.columns] += 1
        if others is None and tiles[0].column_stop < len(y):
            assert (np.triu(seen) == np.triu(np.ones_like(seen))).all()
        else:
            assert (seen == 1).all()
    if others is None:
        total = (count_cells(x, x) + int((x**2).sum())) // 2
        tiles = square_tiles(x, None, NO_BAND, "cpu")
        assert abs(sum(tile.cells for tile in tiles) - total) <= len(tiles)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 7])
def test_shares_have_equal_cells_not_equal_pairs(processes: int) -> None:
    lengths = np.repeat([1000, 10], 200)  # the first half of the rows has nearly all cells
    tiles = square_tiles(lengths, lengths, NO_BAND, "cpu")
    shares = divide(tiles, processes)
    assert [tile for share in shares for tile in share] == list(range(len(tiles)))
    cells = [sum(tiles[tile].cells for tile in share) for share in shares]
    largest = max(tile.cells for tile in tiles)
    assert max(cells) - min(cells) <= 2 * largest
    assert max(cells) <= 1.05 * sum(cells) / processes


def test_more_processes_than_tiles() -> None:
    assert sorted(len(share) for share in divide([Tile(0, 1, 0, 1, 5)], 3)) == [0, 0, 1]


JOB = {"command": "cdist", "options": {"gamma": 1.0}}


def output(folder: Path) -> Output:
    return Output(folder / "d.npy", (4, 6), np.dtype(np.float32), np.nan)


def journal(folder: Path, process: int = 0, **options: float) -> Journal:
    return Journal([output(folder)], {**JOB, "options": {"gamma": 1.0, **options}}, process)


def begun(folder: Path) -> None:
    """Two of three tiles finished, the third written only."""
    with journal(folder) as one:
        assert one.begin() == set()
        one.open()
        one.write(0, slice(0, 2), slice(0, 3), np.full((2, 3), 1.0))
        one.finish([0])
        one.write(0, slice(1, 3), slice(0, 6), np.full((2, 6), 2.0))
        one.finish([7])
        one.write(0, slice(3, 4), slice(2, 3), np.full((1, 1), 3.0))


def test_what_is_finished_is_found_again(tmp_path: Path) -> None:
    begun(tmp_path)
    with journal(tmp_path) as again:
        assert again.begin() == {0, 7}
    values = np.load(tmp_path / "d.npy", mmap_mode="r")
    assert values[0].tolist()[:3] == [1.0] * 3
    assert np.isnan(values[0, 3:]).all()
    assert (values[1:3] == 2.0).all()


def test_torn_lines_are_ignored_and_do_not_spoil_the_next(tmp_path: Path) -> None:
    begun(tmp_path)
    log = tmp_path / "d.npy.journal" / "finished-0.log"
    whole = log.read_bytes()
    second = whole.index(b"\n") + 1
    for length in range(len(whole) + 1):
        log.write_bytes(whole[:length])
        expected = ({0} if length >= second else set()) | ({7} if length == len(whole) else set())
        with journal(tmp_path) as again:
            found = again.begin()
            # A line without its end is whole, too, if its checksum is.
            assert expected <= found <= expected | {0 if length == second - 1 else 7}
            again.open()
            again.finish([5])
        with journal(tmp_path) as third:
            assert third.begin() == found | {5}
    log.write_bytes(whole.replace(b"7 ", b"8 "))  # a checksum of another tile
    with journal(tmp_path) as again:
        assert again.begin() == {0}


def test_lists_of_several_processes(tmp_path: Path) -> None:
    with journal(tmp_path) as first, journal(tmp_path, 1) as second:
        first.begin()
        first.open()
        second.open()
        first.finish([2])
        second.finish([3, 4])
        assert first.read_finished() == {2, 3, 4}


def test_another_job_is_refused(tmp_path: Path) -> None:
    begun(tmp_path)
    different = pytest.raises(FileExistsError, match=r"options: gamma was 1\.0, is 2\.0")
    with journal(tmp_path, gamma=2.0) as other, different:
        other.begin()
    with journal(tmp_path, gamma=2.0) as other:
        assert other.begin(overwrite=True) == set()
    assert np.isnan(np.load(tmp_path / "d.npy")).all()


def test_somebodys_own_file_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", np.zeros(3))
    with journal(tmp_path) as one, pytest.raises(FileExistsError, match="no journal"):
        one.begin()
    assert np.load(tmp_path / "d.npy").shape == (3,)
    assert not (tmp_path / "d.npy.journal").exists()


def test_a_replaced_file_is_refused(tmp_path: Path) -> None:
    begun(tmp_path)
    np.save(tmp_path / "d.npy", np.zeros(3))
    with journal(tmp_path) as one, pytest.raises(FileExistsError, match="no longer an array of shape"):
        one.begin()


def test_a_lost_file_is_made_again(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "d.npy").unlink()
    with journal(tmp_path) as one:
        assert one.begin() == set()
        assert one.read_finished() == set()


def test_two_runs_do_not_begin_together(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with journal(tmp_path) as one, journal(tmp_path) as two:
        one.begin()
        with pytest.raises(BlockingIOError, match="another run"):
            two.begin()


def test_data_is_written_out_before_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, write = os.fsync, _journal._write

    def noted_fsync(handle: int) -> None:
        events.append("fsync")
        fsync(handle)

    def noted_write(file: Any, data: Any, path: Path) -> None:
        events.append(path.name)
        write(file, data, path)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    with journal(tmp_path) as one:
        one.begin()
        one.open()
        monkeypatch.setattr(_journal, "_write", noted_write)
        events.clear()
        one.write(0, slice(0, 1), slice(0, 2), np.ones((1, 2)))
        one.finish([1])
    assert events == ["d.npy", "fsync", "finished-0.log", "fsync"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with (
        open("/dev/full", "wb", buffering=0) as file,
        pytest.raises(OSError, match=r"bytes are free; make room") as found,
    ):
        _journal._write(file, b"1", tmp_path / "d.npy")
    assert found.value.errno == errno.ENOSPC
    assert found.value.filename == str(tmp_path / "d.npy")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_no_half_file_and_says_how_much_is_needed(tmp_path: Path) -> None:
    (tmp_path / "d.npy.draft").symlink_to("/dev/full")
    with journal(tmp_path) as one, pytest.raises(OSError, match="96 bytes are needed and") as found:
        one.begin()
    assert found.value.errno == errno.ENOSPC
    assert found.value.filename == str(tmp_path / "d.npy")
    assert not list(tmp_path.glob("d.npy*.draft"))
    assert not (tmp_path / "d.npy").exists()


def two_outputs(folder: Path, first: str, second: str, gamma: float = 1.0) -> Journal:
    outputs = [output(folder)._replace(path=folder / name) for name in (first, second)]
    return Journal(outputs, {"command": "knn", "options": {"gamma": gamma}}, 0)


def finish(one: Journal, overwrite: bool = False) -> None:
    with one:
        assert one.begin(overwrite) == set()
        one.open()
        for k in range(2):
            one.write(k, slice(0, 4), slice(0, 6), np.ones((4, 6)))
        one.finish([0])


@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_an_output_that_two_jobs_share_is_of_the_last(tmp_path: Path, gamma: float) -> None:
    finish(two_outputs(tmp_path, "v.npy", "i.npy"))
    with two_outputs(tmp_path, "v.npy", "i.npy") as again:
        assert again.begin() == {0}
    shared = pytest.raises(FileExistsError)
    with two_outputs(tmp_path, "w.npy", "i.npy", gamma) as other, shared as found:
        other.begin()
    assert found.value.filename == str(tmp_path / "i.npy")
    finish(two_outputs(tmp_path, "w.npy", "i.npy", gamma), overwrite=True)
    message = "options: gamma was" if gamma == 2.0 else "was made together with another file than"
    with two_outputs(tmp_path, "v.npy", "i.npy") as first, pytest.raises(FileExistsError, match=message):
        first.begin()
    with two_outputs(tmp_path, "w.npy", "i.npy", gamma) as again:
        assert again.begin() == {0}


def test_another_second_output_does_not_cost_the_first(tmp_path: Path) -> None:
    finish(two_outputs(tmp_path, "v.npy", "i.npy"))
    before = (tmp_path / "v.npy").read_bytes()
    named = pytest.raises(FileExistsError, match=r"other outputs was \['i\.npy'\], is \['j\.npy'\]")
    with two_outputs(tmp_path, "v.npy", "j.npy") as other, named:
        other.begin()
    assert (tmp_path / "v.npy").read_bytes() == before
    (tmp_path / "i.npy").unlink()  # lost: both are made again
    finish(two_outputs(tmp_path, "v.npy", "i.npy"))


def test_nobody_else_begins_with_the_second_output(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with two_outputs(tmp_path, "v.npy", "i.npy") as one, two_outputs(tmp_path, "w.npy", "i.npy") as two:
        one.begin()
        with pytest.raises(BlockingIOError, match="another run") as found:
            two.begin(overwrite=True)
        assert found.value.filename == str(tmp_path / "i.npy")
