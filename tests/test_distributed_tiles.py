"""All pairs and neighbours over several processes: the same bits for any number, one voice for errors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from softdtw_cuda import _journal, _tile_work, _tiles, distributed, softdtw_cdist, softdtw_knn

MOST_PROCESSES = 4
SMALL_TILE = 3000
"""Cells: some dozens of tiles in the jobs below."""


def data() -> tuple[Tensor, Tensor, list[int], list[int]]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(count, steps, 2, generator=generator) for count, steps in ((29, 31), (17, 26)))
    x_lengths = torch.randint(20, 32, (29,), generator=generator).tolist()
    y_lengths = torch.randint(20, 27, (17,), generator=generator).tolist()
    return x, y, x_lengths, y_lengths


Answer = tuple[Any, ...]


def jobs() -> dict[str, Callable[..., Answer]]:
    """Name to call; each takes further arguments, `out` for one."""
    x, y, x_lengths, y_lengths = data()
    all_pairs: Any = distributed.cdist
    neighbours: Any = distributed.knn

    def cdist(*sets: Any, **options: Any) -> Callable[..., Answer]:
        return lambda **more: (all_pairs(*sets, gamma=0.3, **options, **more),)

    def knn(*sets: Any, **options: Any) -> Callable[..., Answer]:
        return lambda **more: neighbours(*sets, 4, gamma=0.3, **options, **more)

    lengths = {"x_lengths": x_lengths, "y_lengths": y_lengths}
    return {
        "cdist": cdist(x),
        "cdist of two sets": cdist(x, y),
        "cdist with lengths": cdist(x, x_lengths=x_lengths),
        "cdist of two sets with lengths": cdist(x, y, **lengths),
        "cdist in a band": cdist(x, bandwidth=13),
        "cdist of two sets with lengths in a band": cdist(x, y, **lengths, bandwidth=13),
        "cdist, divergence": cdist(x, normalize=True),
        "cdist of two sets with lengths, divergence": cdist(x, y, **lengths, normalize=True),
        "cdist of arrays": cdist(x.double().numpy(), y.double().numpy()),
        "cdist of lists": cdist([one[:n] for one, n in zip(x, x_lengths, strict=True)]),
        "cdist, not fused": cdist(x, y, dist="euclidean"),
        "knn": knn(x, y),
        "knn of itself": knn(x, None, exclude_self=True, normalize=True),
        "knn with lengths in a band": knn(
            x, y, query_lengths=x_lengths, database_lengths=y_lengths, bandwidth=13
        ),
    }


def arrays(answer: Answer) -> list[np.ndarray]:
    return [np.asarray(one) for one in answer]


def small_tiles() -> None:
    _tiles.SMALLEST_TILE = SMALL_TILE


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tiles, "SMALLEST_TILE", SMALL_TILE)
    torch.set_num_threads(1)


# ---- one process, without a group


@pytest.mark.parametrize("name", [name for name in jobs() if name.startswith("cdist")])
def test_tiles_have_the_bits_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def counting(*sets: Any, **options: Any) -> Any:
        counted.append(sets[0].shape[0])
        return softdtw_cdist(*sets, **options)

    (tiled,) = jobs()[name]()
    monkeypatch.setattr(distributed, "softdtw_cdist", counting)
    jobs()[name]()
    assert len(counted) > 20
    monkeypatch.setattr(_tiles, "SMALLEST_TILE", 1 << 40)
    counted.clear()
    (whole,) = jobs()[name]()
    assert counted == [29]
    assert type(tiled) is type(whole)
    assert np.array_equal(tiled, whole)
    assert np.isfinite(np.asarray(tiled)).all()


def test_the_values_are_those_of_the_functions_without_tiles() -> None:
    x, y, x_lengths, y_lengths = data()
    options: dict[str, Any] = {"gamma": 0.3, "normalize": True, "bandwidth": 13}
    lengths = {"x_lengths": x_lengths, "y_lengths": y_lengths}
    assert torch.equal(
        distributed.cdist(x, y, **lengths, **options), softdtw_cdist(x, y, **lengths, **options)
    )
    assert torch.equal(distributed.cdist(x, **options), softdtw_cdist(x, **options))
    for exclude_self in (False, True):
        ours = distributed.knn(x, x, 5, gamma=0.3, exclude_self=exclude_self)
        theirs = softdtw_knn(x, x, 5, gamma=0.3, exclude_self=exclude_self)
        assert all(torch.equal(*both) for both in zip(ours, theirs, strict=True))


def test_devices_without_kernels_have_tiles() -> None:
    lengths = np.full(500, 300)
    assert _tiles.square_tiles(lengths, None, -1, "mps") == _tiles.square_tiles(lengths, None, -1, "cpu")
    assert _tiles.row_tiles(lengths, lengths, -1, "xpu") == _tiles.row_tiles(lengths, lengths, -1, "cpu")


class TestFiles:
    def run(self, folder: Path, **options: Any) -> Any:
        x, y, _, _ = data()
        return distributed.cdist(x, y, out=folder / "d.npy", **options)

    def test_the_same_as_in_memory(self, tmp_path: Path) -> None:
        for number, (name, job) in enumerate(jobs().items()):
            outs = [tmp_path / f"{number}-{k}.npy" for k in range(2)]
            filed = job(out=outs if name.startswith("knn") else outs[0])
            for one, other in zip(arrays(job()), filed, strict=True):
                assert isinstance(other, np.memmap)
                assert one.dtype == other.dtype
                assert np.array_equal(one, other)

    def test_what_is_finished_is_not_computed_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = np.asarray(self.run(tmp_path))
        lines = (tmp_path / "d.npy.journal" / "finished-0.log").read_bytes().splitlines(keepends=True)
        assert len(lines) > 50
        (tmp_path / "d.npy.journal" / "finished-0.log").write_bytes(b"".join(lines[::2]))
        counted = []

        def counting(*sets: Any, **options: Any) -> Any:
            counted.append(1)
            return softdtw_cdist(*sets, **options)

        monkeypatch.setattr(distributed, "softdtw_cdist", counting)
        assert np.array_equal(self.run(tmp_path), expected)
        assert len(counted) == len(lines) // 2

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"gamma": 2.0}, r"options: gamma was 1\.0, is 2\.0"),
            ({"bandwidth": 9}, "options: bandwidth was None, is 9"),
            ({"normalize": True}, "options: normalize was False, is True"),
            ({"dist": "euclidean"}, "options: dist was 'sqeuclidean', is 'euclidean'"),
            ({"x_lengths": [31] * 28 + [30]}, "inputs: x: lengths was"),
        ],
        ids=str,
    )
    def test_other_options_are_refused(self, tmp_path: Path, change: dict[str, Any], named: str) -> None:
        before = np.asarray(self.run(tmp_path)).copy()
        with pytest.raises(FileExistsError, match=named):
            self.run(tmp_path, **change)
        assert np.array_equal(np.load(tmp_path / "d.npy"), before)
        self.run(tmp_path, **change, overwrite=True)

    def test_other_content_and_other_tiles_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x, y, _, _ = data()
        self.run(tmp_path)
        y[16, 25, 1] += 1e-6
        with pytest.raises(FileExistsError, match="inputs: y: content was"):
            distributed.cdist(x, y, out=tmp_path / "d.npy")
        monkeypatch.setattr(_tiles, "SMALLEST_TILE", SMALL_TILE + 1)
        assert len(_tiles.square_tiles(np.full(29, 31), np.full(17, 26), -1, "cpu")) > 20
        monkeypatch.setattr(_tiles, "_cuts", lambda lengths, parts, side=None: [0, 7, len(lengths)])
        with pytest.raises(FileExistsError, match="tiles was"):
            self.run(tmp_path)

    def test_options_of_numpy_are_those_of_python(self, tmp_path: Path) -> None:
        self.run(tmp_path, bandwidth=13)
        self.run(tmp_path, gamma=np.float64(1.0), bandwidth=np.int64(13), normalize=np.bool_(False))

    def test_a_write_that_fails_is_not_listed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """After an error the next fsync succeeds, though what was to be written out is lost."""
        fsync = os.fsync
        failed: list[str] = []
        monkeypatch.setattr(_tile_work, "SECONDS_BETWEEN_FLUSHES", 0.0)

        def failing(handle: int) -> None:
            name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))
            if name == "d.npy" and len(failed) < 3:
                failed.append(name)
                if len(failed) == 3:
                    raise OSError(5, "Input/output error")
            fsync(handle)

        if not Path("/proc/self/fd").exists():
            pytest.skip("needs /proc")
        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match="Input/output error") as found:
            self.run(tmp_path)
        assert found.value.filename == str(tmp_path / "d.npy")
        # The tile whose fsync failed is not there, the two before it are.
        lines = (tmp_path / "d.npy.journal" / "finished-0.log").read_bytes().split()
        assert lines[::2] == [b"0", b"1"]
        finished = np.isfinite(np.load(tmp_path / "d.npy")).sum()
        assert 0 < finished < 29 * 17
        x, y, _, _ = data()
        assert np.array_equal(self.run(tmp_path), softdtw_cdist(x, y))

    def test_a_full_disk_keeps_what_is_finished(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write, calls = _journal._write, []

        def full(file: Any, data: Any, path: Path) -> None:
            calls.append(path)
            if path.name == "d.npy" and len(calls) > 120:
                with _journal._explained(path):
                    raise OSError(28, "No space left on device")
            write(file, data, path)

        monkeypatch.setattr(_journal, "_write", full)
        with pytest.raises(OSError, match=r"No space left on device: .* bytes are free; make room and run"):
            self.run(tmp_path)
        kept = np.load(tmp_path / "d.npy")
        monkeypatch.setattr(_journal, "_write", write)
        listed = (tmp_path / "d.npy.journal" / "finished-0.log").read_bytes().splitlines()
        assert len(listed) > 10
        done = np.asarray(self.run(tmp_path))
        assert np.array_equal(kept[np.isfinite(kept)], done[np.isfinite(kept)])
        assert 0.1 < np.isfinite(kept).mean() < 0.9

    def test_a_restart_goes_on_with_what_it_overwrote(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        np.save(tmp_path / "d.npy", np.zeros(3))  # somebody's own
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # killed before it could begin
        expected = np.asarray(self.run(tmp_path, overwrite=True))
        assert expected.shape == (29, 17)
        stamp = (tmp_path / "d.npy").stat().st_ino
        self.run(tmp_path, overwrite=True)
        assert (tmp_path / "d.npy").stat().st_ino == stamp, "it had finished, and began again"
        (tmp_path / "d.npy.journal" / "job.json").unlink()  # killed while it overwrote
        assert np.array_equal(self.run(tmp_path, overwrite=True), expected)
        self.run(tmp_path, overwrite=True, gamma=3.0)
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
        stamp = (tmp_path / "d.npy").stat().st_mtime_ns
        self.run(tmp_path, overwrite=True, gamma=3.0)
        assert (tmp_path / "d.npy").stat().st_mtime_ns != stamp

    def test_overwriting_leaves_no_values_of_the_other_job(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stopped at any rename or removal, nothing of the earlier job is taken for this one's."""
        self.run(tmp_path)
        for stop in range(5):
            steps: list[Any] = []

            def stopping(*given: Any, stop: int = stop, steps: list[Any] = steps, call: Any) -> Any:
                steps.append(given)
                if len(steps) > stop:
                    raise KeyboardInterrupt
                return call(*given)

            with monkeypatch.context() as patch:
                for name in ("replace", "unlink"):
                    call = getattr(os, name)
                    patch.setattr(os, name, lambda *given, call=call, **_: stopping(*given, call=call))
                with pytest.raises(KeyboardInterrupt):
                    self.run(tmp_path, overwrite=True, gamma=2.0 + stop)
            if (tmp_path / "d.npy").exists():
                job = json.loads((tmp_path / "d.npy.journal" / "job.json").read_bytes())
                assert job["options"]["gamma"] == 1.0 or np.isnan(np.load(tmp_path / "d.npy")).all()
            self.run(tmp_path, overwrite=True)

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no such folder for the output; make it first"):
            self.run(tmp_path / "missing")

    def test_outputs_are_two_files(self, tmp_path: Path) -> None:
        x, y, _, _ = data()
        with pytest.raises(ValueError, match="out must be two files, for values and for"):
            distributed.knn(x, y, 2, out="v.npy")
        (tmp_path / "link").symlink_to(tmp_path)
        with pytest.raises(ValueError, match=r"out names .*v\.npy twice"):
            distributed.knn(x, y, 2, out=(tmp_path / "v.npy", tmp_path / "link" / "v.npy"))


def test_other_bytes_of_a_page_are_left_alone(tmp_path: Path) -> None:
    """Where a file may be read, too, NFS writes whole pages, with other machines' bytes as they were."""
    fcntl = pytest.importorskip("fcntl")
    output = _journal.Output(tmp_path / "d.npy", (4, 6), np.dtype(np.float32), np.nan)
    with _journal.Journal([output], {}, 0) as journal:
        journal.begin()
        journal.open()
        (file,) = journal._files
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY


def test_lengths() -> None:
    x, y, _, _ = data()
    with pytest.raises(TypeError, match="x_lengths must be an integer tensor or a list of integers"):
        distributed.cdist(x, x_lengths=[2.5] * 29)
    with pytest.raises(ValueError, match=r"x_lengths\[0\] is 32, expected a length from 1 to 31"):
        distributed.cdist(x, x_lengths=[32] * 29)
    with pytest.raises(TypeError, match=r"query_lengths has dtype torch\.bool.* mask\.sum\(1\)"):
        distributed.knn(x, y, 1, query_lengths=torch.ones(29, 31, dtype=torch.bool))


def test_flags() -> None:
    """Whatever is not a flag must not pass for True and overwrite a file."""
    x, y, _, _ = data()
    with pytest.raises(TypeError, match="overwrite must be True or False, got 'no'"):
        distributed.cdist(x, y, overwrite="no")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match="progress must be True or False"):
        distributed.knn(x, y, 1, progress="no")  # type: ignore[arg-type]  # wrong on purpose


def test_series_with_a_lazy_sign(tmp_path: Path) -> None:
    x, y, _, _ = data()
    lazy = torch._neg_view(-x)
    assert lazy.is_neg()
    expected = distributed.cdist(x, y, out=tmp_path / "plain.npy")
    np.testing.assert_array_equal(distributed.cdist(lazy, y, out=tmp_path / "lazy.npy"), expected)


def test_lengths_of_any_kind() -> None:
    x, y, x_lengths, _ = data()
    assert torch.equal(
        distributed.cdist(x, y, x_lengths=torch.tensor(x_lengths)),
        distributed.cdist(x, y, x_lengths=x_lengths),
    )


# ---- several processes


def meet(folder: str, rank: int, processes: int, name: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting-{name}", rank=rank, world_size=processes
    )


def messages_of(job: Callable[[], object]) -> int:
    """How many tensors the processes send to each other."""
    sent = []
    send = torch.distributed.broadcast

    def counting(*arguments: Any, **options: Any) -> Any:
        sent.append(1)
        return send(*arguments, **options)

    torch.distributed.broadcast = counting
    try:
        job()
    finally:
        torch.distributed.broadcast = send
    return len(sent)


def compute(rank: int, folder: str) -> None:
    """In groups of one, two, three and four of the same processes: every job, in memory and into files."""
    torch.set_num_threads(1)
    small_tiles()
    for processes in range(1, MOST_PROCESSES + 1):
        if rank >= processes:
            continue
        meet(folder, rank, processes, str(processes))
        # With three processes a message holds two tiles or so, otherwise all tiles of a process.
        _tile_work.VALUES_OF_A_MESSAGE = 12 if processes == 3 else 1 << 24
        try:
            Path(f"{folder}/messages-{processes}-{rank}").write_text(str(messages_of(jobs()["knn"])))
            for number, (name, job) in enumerate(jobs().items()):
                outs = [f"{folder}/{processes}-{number}-{k}.npy" for k in range(2)]
                filed = job(out=outs if name.startswith("knn") else outs[0])
                np.savez(f"{folder}/{processes}-{number}-{rank}.npz", *arrays(job()), *filed)
        finally:
            torch.distributed.destroy_process_group()
    if rank < 3:
        meet(folder, rank, 3, "errors")
        try:
            Path(f"{folder}/errors-{rank}.json").write_text(json.dumps(errors(rank, folder)))
        finally:
            torch.distributed.destroy_process_group()


def errors(rank: int, folder: str) -> dict[str, str]:
    """What this process raises where process 1 of three does something wrong."""
    x, y, _, _ = data()
    odd = rank == 1
    found = {}

    def note(name: str, call: Callable[[], object]) -> None:
        try:
            call()
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    def changed() -> Tensor:
        other = y.clone()
        other[3, 2] += odd
        return other

    def breaking(*sets: Any, **options: Any) -> Any:
        calls.append(1)
        if odd and len(calls) > 5:
            raise MemoryError
        return softdtw_cdist(*sets, **options)

    out = f"{folder}/broken.npy"
    calls: list[int] = []
    note("argument", lambda: distributed.cdist(x, gamma=-1.0 if odd else 1.0))
    note("shape", lambda: distributed.knn(x[:, 0] if odd else x, y, 2))
    note("options", lambda: distributed.cdist(x, gamma=2.0 if odd else 1.0))
    note("sizes", lambda: distributed.knn(x[: 29 - odd], y, 2))
    note("content", lambda: distributed.cdist(x, changed(), out=f"{folder}/content.npy"))
    note("content in memory", lambda: distributed.cdist(x, changed()))
    note("lock", lambda: distributed.cdist(x, y, out=f"{folder}/missing/d.npy"))
    distributed.softdtw_cdist = breaking  # type: ignore[assignment, attr-defined]
    note("tile", lambda: distributed.cdist(x, y))
    calls.clear()
    note("tile into a file", lambda: distributed.cdist(x, y, out=out))
    distributed.softdtw_cdist = softdtw_cdist  # type: ignore[attr-defined]
    torch.distributed.barrier()
    found["finished before"] = str(int(np.isfinite(np.load(out)).sum()))
    torch.distributed.barrier()
    note("again", lambda: distributed.cdist(x, y, out=out))
    return found


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    torch.multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]  # documented, not annotated
        compute, (str(folder),), MOST_PROCESSES
    )
    return folder


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_bits(several: Path) -> None:
    for number, (name, job) in enumerate(jobs().items()):
        alone = arrays(job())
        for processes in range(1, MOST_PROCESSES + 1):
            for rank in range(processes):
                with np.load(several / f"{processes}-{number}-{rank}.npz") as found:
                    together = list(found.values())
                assert len(together) == 2 * len(alone)
                for one, other in zip(alone * 2, together, strict=True):
                    assert one.dtype == other.dtype
                    assert np.array_equal(one, other), (name, processes, rank)


@pytest.mark.slow
def test_every_process_has_its_share(several: Path) -> None:
    for processes in range(1, MOST_PROCESSES + 1):
        lists = sorted((several / f"{processes}-1-0.npy.journal").glob("finished-*.log"))
        tiles = [len(path.read_bytes().splitlines()) for path in lists]
        assert len(tiles) == processes
        assert max(tiles) <= 1.2 * sum(tiles) / processes


@pytest.mark.slow
def test_the_tiles_of_a_process_are_sent_together(several: Path) -> None:
    # Values and indices: two messages of each process, not two of each of some twenty tiles.
    for processes, least, most in ((1, 0, 0), (2, 4, 4), (3, 10, 60), (4, 8, 8)):
        for rank in range(processes):
            assert least <= int((several / f"messages-{processes}-{rank}").read_text()) <= most


def test_messages_have_every_tile_once_and_keep_to_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [3, 3, 5, 2, 9, 1, 1, 1]
    tiles = [_tiles.Tile(0, size, 0, 1, size) for size in sizes]
    monkeypatch.setattr(_tile_work, "VALUES_OF_A_MESSAGE", 6)
    share = range(1, len(tiles))
    found = list(_tile_work._messages(share, tiles))
    assert [sizes[part.start : part.stop] for part in found] == [[3], [5], [2], [9], [1, 1, 1]]
    assert [tile for part in found for tile in part] == list(share)
    assert list(_tile_work._messages(range(2, 2), tiles)) == []


@pytest.mark.slow
def test_what_one_process_raises_all_raise(several: Path) -> None:
    found = [json.loads((several / f"errors-{rank}.json").read_text()) for rank in range(3)]
    expected = {
        "argument": "ValueError: gamma must be a finite number greater than 0, got -1.0",
        "shape": "ValueError: queries must be a tensor or an array of shape (series, time, features)",
        "options": "ValueError: process 1 was called with something else than process 0: options: gamma was "
        "1.0, is 2.0",
        "sizes": "ValueError: process 1 was called with something else than process 0: inputs: queries: ",
        "content": "ValueError: process 1 was called with something else than process 0: inputs: y: content",
        "content in memory": "ValueError: process 1 was called with something else than process 0: inputs: y",
        "tile": "MemoryError",
        "tile into a file": "MemoryError",
    }
    for name, text in expected.items():
        assert found[1][name].startswith(text)
        message = text.split(": ", 1)[-1]
        for rank in (0, 2):
            assert found[rank][name].startswith(f"ProcessFailed: process 1 failed: {message}"), name
    assert found[0]["lock"].startswith("FileNotFoundError: [Errno 2] there is no such folder for the output")
    assert all(found[rank]["lock"].startswith("ProcessFailed: process 0 failed") for rank in (1, 2))
    for each in found:
        assert 0 < int(each["finished before"]) < 29 * 17
        assert each["again"] == "nothing"
    x, y, _, _ = data()
    assert np.array_equal(np.load(several / "broken.npy"), softdtw_cdist(x, y))


@pytest.mark.gpu
def test_on_a_stream_of_ones_own(tmp_path: Path) -> None:
    """Values are copied by another thread, which has torch's default stream and has to wait for this one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 200, 3, generator=generator).cuda()
    expected = softdtw_cdist(x, gamma=0.3).cpu()
    with torch.cuda.stream(torch.cuda.Stream()):
        for number in range(5):
            assert torch.equal(distributed.cdist(x, gamma=0.3).cpu(), expected)
            filed = distributed.cdist(x, gamma=0.3, out=tmp_path / f"{number}.npy")
            assert np.array_equal(filed, expected.numpy())


@pytest.mark.gpu
def test_sets_on_another_device_than_the_computation() -> None:
    x, y, _, _ = data()
    expected = distributed.knn(x, y, 3)
    values, indices = distributed.knn(x.cuda(), y.cuda(), 3, device="cpu")
    assert values.device.type == "cuda"
    assert torch.equal(values.cpu(), expected[0])
    assert torch.equal(indices.cpu(), expected[1])
