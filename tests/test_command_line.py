"""The command line: by itself, under torchrun, with wrong files, and killed at random moments."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from softdtw_cuda import __main__ as command_line
from softdtw_cuda import distributed, softdtw_cdist, softdtw_knn
from softdtw_cuda.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 120.0


def series(count: int, steps: int, seed: int = 0) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, steps, generator=generator).cumsum(1).numpy()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with some series, where commands run."""
    np.save(tmp_path / "x.npy", series(12, 30))
    np.save(tmp_path / "y.npy", series(9, 25, 1)[:, :, None])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> int:
    return main([*arguments, "--device", "cpu", "--no-progress"])


# ---- in this process


def test_all_pairs_of_one_set_and_of_two(files: Path) -> None:
    x, y = (torch.from_numpy(np.load(files / name)) for name in ("x.npy", "y.npy"))
    assert run("cdist", "x.npy", "--out", "d.npy", "--gamma", "0.5") == 0
    assert np.array_equal(np.load("d.npy"), softdtw_cdist(x[..., None], gamma=0.5))
    options = ["--normalize", "--dist", "euclidean", "--bandwidth", "11"]
    assert run("cdist", "x.npy", "y.npy", "--out", "e.npy", *options) == 0
    expected = softdtw_cdist(x[..., None], y, normalize=True, dist="euclidean", bandwidth=11)
    assert np.array_equal(np.load("e.npy"), expected)


def test_lengths(files: Path) -> None:
    x, y = (torch.from_numpy(np.load(files / name)) for name in ("x.npy", "y.npy"))
    lengths = {"x": np.arange(12) + 10, "y": np.full(9, 20)}
    for name, each in lengths.items():
        np.save(f"{name}_lengths.npy", each)
    given = ["--x-lengths", "x_lengths.npy", "--y-lengths", "y_lengths.npy"]
    assert run("cdist", "x.npy", "y.npy", "--out", "d.npy", *given) == 0
    expected = softdtw_cdist(
        x[..., None], y, x_lengths=lengths["x"].tolist(), y_lengths=lengths["y"].tolist()
    )
    assert np.array_equal(np.load("d.npy"), expected)


def test_neighbours(files: Path) -> None:
    x, y = (torch.from_numpy(np.load(files / name)) for name in ("x.npy", "y.npy"))
    outs = ["--out", "v.npy", "--indices", "i.npy"]
    assert run("knn", "x.npy", "y.npy", "-k", "3", *outs) == 0
    values, indices = softdtw_knn(x[..., None], y, 3)
    assert np.array_equal(np.load("v.npy"), values)
    assert np.array_equal(np.load("i.npy"), indices)
    assert run("knn", "x.npy", *outs, "--overwrite") == 0
    values, indices = softdtw_knn(x[..., None], x[..., None], 1, exclude_self=True)
    assert np.array_equal(np.load("v.npy"), values)
    assert np.array_equal(np.load("i.npy"), indices)


def save(name: str, content: Any) -> None:
    if isinstance(content, bytes):
        Path(name).write_bytes(content)
    elif isinstance(content, dict):
        with open(name, "wb") as file:
            np.savez(file, **content)
    else:
        np.save(name, content, allow_pickle=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "bad.npy: there is no such file"),
        (b"1,2,3\n", r"bad\.npy is no \.npy file of numbers"),
        (b"", r"bad\.npy is no \.npy file of numbers"),
        (np.zeros((3, 4), np.float32).tobytes(), r"bad\.npy is no \.npy file of numbers"),
        (np.array([np.zeros(3), np.zeros(4)], object), r"bad\.npy is no \.npy file of numbers"),
        ({"x": np.zeros((3, 4))}, r"bad\.npy is an \.npz archive, expected a \.npy file"),
        (np.zeros(5, np.float32), r"bad\.npy has shape \(5,\), expected \(series, time steps\) or"),
        (np.zeros((2, 2, 2, 2), np.float32), r"has shape \(2, 2, 2, 2\), expected"),
        (np.zeros((3, 4), np.int32), r"bad\.npy has the type int32, expected float32 or float64; convert it"),
        (np.zeros((3, 4), np.longdouble), "has the type float128, expected float32"),
        (np.zeros((3, 4)), "x has dtype torch.float32 and y torch.float64"),
        (np.zeros((3, 4, 2), np.float32), "x has 1 features and y has 2"),
        (np.zeros((3, 0), np.float32), r"bad\.npy has shape \(3, 0\), expected at least one series"),
        (np.zeros((0, 3), np.float32), r"bad\.npy has shape \(0, 3\), expected at least one series"),
        (np.array([[0, 1], [2, np.nan], [3, np.inf]]), r"bad\.npy has NaN or infinite values, in series 1"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_wrong_files(files: Path, content: Any, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        save("bad.npy", content)
    assert run("cdist", "x.npy", "bad.npy", "--out", "d.npy") == 1
    shown = capsys.readouterr().err
    assert re.match(f"softdtw_cuda: error: .*({message})", shown), shown
    assert shown.count("\n") == 1
    assert not Path("d.npy").exists()


@pytest.mark.usefixtures("files")
def test_nobody_is_told_to_unpickle(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.npy").write_text("1,2,3")
    assert run("cdist", "x.npy", "--out", "d.npy") == 1
    assert "pickle" not in capsys.readouterr().err


def test_a_file_that_is_cut_off(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = Path("x.npy").read_bytes()
    Path("x.npy").write_bytes(whole[:-100])
    assert run("cdist", "x.npy", "--out", "d.npy") == 1
    assert "x.npy is no .npy file of numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cdist", "x.npy", "--out", "x.npy", "--overwrite"], "x.npy is an input and an output"),
        (["cdist", "x.npy", "--out", "no/d.npy"], "no: there is no such folder for the output"),
        (["cdist", "x.npy", "--out", "y.npy"], "y.npy: the output exists and has no journal"),
        (["cdist", ".", "--out", "d.npy"], ".: Is a directory"),
        (["cdist", "x.npy", "--out", "."], "the output exists and is no file"),
        (
            ["cdist", "x.npy", "--out", "d.npy", "--gamma", "0"],
            "gamma must be a finite number greater than 0",
        ),
        (["cdist", "x.npy", "y.npy", "--out", "d.npy", "--bandwidth", "2"], "bandwidth"),
        (["cdist", "x.npy", "--out", "d.npy", "--y-lengths", "x.npy"], "expected integers, one for each"),
        (["cdist", "x.npy", "--out", "d.npy", "--y-lengths", "n.npy"], "second set, but there is none"),
        (["cdist", "x.npy", "--out", "d.npy", "--x-lengths", "m.npy"], "m.npy has 9 lengths and x.npy 12"),
        (
            ["cdist", "x.npy", "--out", "d.npy", "--x-lengths", "long.npy"],
            "long.npy has 31 for series 3, expected a length from 1 to 30, the steps of x.npy",
        ),
        (["cdist", "x.npy", "--out", "d.npy", "--device", "meta"], "--device is 'meta', but torch cannot"),
        (["cdist", "x.npy", "--out", "d.npy", "--device", "gpu"], "--device is 'gpu', expected 'cpu'"),
        (["knn", "x.npy", "y.npy", "-k", "10", "--out", "v.npy", "--indices", "i.npy"], "k is 10 but the"),
        (["knn", "x.npy", "--out", "v.npy", "--indices", "v.npy"], "out names v.npy twice"),
        (["knn", "x.npy", "--out", "v.npy", "--indices", "x.npy", "--overwrite"], "input and an output"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments(
    files: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, lengths in (("n", [20] * 12), ("m", [20] * 9), ("long", [20] * 3 + [31] * 9)):
        np.save(f"{name}.npy", np.array(lengths))
    before = {path: path.read_bytes() for path in files.glob("*.npy")}
    assert main([arguments[0], "--device", "cpu", *arguments[1:], "--no-progress"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("softdtw_cuda: error: ")
    assert message in shown
    assert {path: path.read_bytes() for path in files.glob("*.npy")} == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.usefixtures("files")
def test_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cdist", "x.npy", "--out", "d.npy", "--device", "cuda"]) == 1
    assert "--device is 'cuda', but torch finds no GPU here" in capsys.readouterr().err


@pytest.mark.usefixtures("files")
def test_another_job_is_refused_and_may_be_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cdist", "x.npy", "--out", "d.npy") == 0
    before = np.load("d.npy")
    assert run("cdist", "x.npy", "--out", "d.npy", "--gamma", "2") == 1
    assert "belongs to another job: options: gamma was 1.0, is 2.0" in capsys.readouterr().err
    changed = np.load("x.npy")
    changed[3, 7] += 1
    np.save("x.npy", changed)
    assert run("cdist", "x.npy", "--out", "d.npy") == 1
    assert "belongs to another job: inputs: x: content was" in capsys.readouterr().err
    assert np.array_equal(np.load("d.npy"), before)
    assert run("cdist", "x.npy", "--out", "d.npy", "--overwrite") == 0
    assert not np.array_equal(np.load("d.npy"), before)


@pytest.mark.usefixtures("files")
def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cdist", "x.npy", "y.npy", "--out", "d.npy", "--device", "cpu"]) == 0
    assert re.search(r"100%.*81\.0k/81\.0k .*cell/s", capsys.readouterr().err)
    assert main(["cdist", "x.npy", "y.npy", "--out", "d.npy", "--device", "cpu"]) == 0
    assert capsys.readouterr().err == "d.npy: already finished\n"


@pytest.mark.usefixtures("files")
def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(distributed, "softdtw_cdist", interrupt)
    assert run("cdist", "x.npy", "--out", "d.npy") == 130
    assert "interrupted; the same command goes on from here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [[], ["cdist"], ["knn"], ["kmeans"]], ids=["all", "cdist", "knn", "kmeans"]
)
def test_help_is_for_a_newcomer(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    wanted = {
        "": [
            "cdist",
            "knn",
            "torchrun --nproc-per-node 4 -m softdtw_cuda",
            ".npy",
            "give the same command again",
        ],
        "cdist": [
            "All pairs of two sets, or of one with itself: the table of their values of Soft-DTW, or",
            *["X.npy", "Y.npy", "--out", "--gamma", "--bandwidth", "--normalize", "--device"],
        ],
        "knn": [
            "The nearest series of each query, by Soft-DTW, or",
            *["X.npy", "Y.npy", "-k", "--out", "--indices", "--gamma"],
        ],
        "kmeans": [
            "under the divergence of Soft-DTW, or",
            *["X.npy", "-k", "--centers", "--labels", "--gamma", "--no-normalize", "--seed"],
        ],
    }[" ".join(command)]
    shown_words = " ".join(shown.split())
    assert all(text in shown_words for text in wanted)
    assert max(map(len, shown.splitlines())) <= 110
    # Every option is explained: a line of its own has no text beside it or below it.
    for name in re.findall(r"^  (-[^\n]*)$", shown, re.MULTILINE):
        after = shown.split(f"  {name}\n", 1)[1]
        assert "  " in name or after.startswith("         "), name


KMEANS = ["kmeans", "x.npy", "-k", "3", "--centers", "c.npy", "--labels", "l.npy", "--gamma", "0.5"]


@pytest.mark.parametrize("normalize", [True, False])
def test_k_means(files: Path, normalize: bool, capsys: pytest.CaptureFixture[str]) -> None:
    estimators = pytest.importorskip("softdtw_cuda.estimators")
    more = ["--seed", "4", "--starts", "2", "--rounds", "3", *([] if normalize else ["--no-normalize"])]
    assert run(*KMEANS, *more) == 0
    model = estimators.SoftDTWKMeans(
        3, gamma=0.5, n_init=2, max_iter=3, normalize=normalize, random_state=4, device="cpu"
    )
    model.fit(np.load("x.npy"))
    np.testing.assert_array_equal(np.load("c.npy")[:, :, 0], model.cluster_centers_)
    np.testing.assert_array_equal(np.load("l.npy"), model.labels_)
    assert f"{model.inertia_:.8g}" in capsys.readouterr().out
    before = [Path(name).read_bytes() for name in ("c.npy", "l.npy")]
    assert run(*KMEANS) == 1
    assert "c.npy: the output belongs to another job: options: " in capsys.readouterr().err
    Path("l.npy").unlink()
    assert main([*KMEANS, *more, "--device", "cpu"]) == 0
    assert capsys.readouterr().err == "c.npy: already finished\n"
    assert [Path(name).read_bytes() for name in ("c.npy", "l.npy")] == before
    np.save("l.npy", np.zeros(3))
    assert run(*KMEANS, *more) == 1
    assert "l.npy: the output exists and is not of this job" in capsys.readouterr().err
    np.save("n.npy", np.full(12, 20))
    assert run(*KMEANS, "--overwrite", "--x-lengths", "n.npy") == 0
    assert np.load("c.npy").shape == (3, 20, 1)
    assert not list(files.glob("*.part"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-k", "13"], "k is 13 but x.npy has 12 series"),
        (["-k", "0"], "k must be at least 1"),
        (["--gamma", "-1"], "gamma"),
        (["--tol", "-1"], "tol"),
        (["--labels", "c.npy"], "c.npy is named twice"),
        (["--labels", "x.npy"], "x.npy is an input and an output"),
        (["--device", "gpu"], "--device is 'gpu', expected 'cpu', 'cuda', 'cuda:1' or another device"),
    ],
)
def test_wrong_arguments_of_k_means(
    files: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*KMEANS, "--no-progress", "--device", "cpu", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in files.iterdir()) == ["x.npy", "y.npy"]


@pytest.mark.usefixtures("files")
def test_k_means_finds_out_first_that_it_cannot_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compute(*_: object, **__: object) -> None:
        raise AssertionError("hours of work that nobody gets")

    monkeypatch.setattr(command_line, "k_means", compute)
    assert run(*KMEANS, "--labels", "no/l.npy") == 1
    assert "no/l.npy: the output cannot be written: No such file" in capsys.readouterr().err

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert run(*KMEANS) == 1
    assert "c.npy: the output cannot be written: No space left" in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["x.npy", "y.npy"]


def test_k_means_of_values_that_are_not_finite(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.load("x.npy")
    x[3, 4] = np.nan
    np.save("x.npy", x)
    assert run(*KMEANS) == 1
    assert "x.npy has NaN or infinite values, in series 3 first" in capsys.readouterr().err
    x[3, 4:] = np.nan  # where the series has ended
    np.save("x.npy", x)
    np.save("n.npy", np.full(12, 4))
    assert run(*KMEANS, "--x-lengths", "n.npy") == 0
    assert np.isfinite(np.load("c.npy")).all()


# ---- processes


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **more}


def torchrun(folder: Path, processes: int, *arguments: str, restarts: int = 0) -> list[str]:
    given = ["--standalone", "--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    return command("torch.distributed.run", *given, "-m", "softdtw_cuda", *arguments, "--no-progress")


def call(given: Sequence[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        given, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=LIMIT
    )


@pytest.fixture
def job(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A folder with series, and all of their pairs: 150 tiles, a second of a core."""
    np.save(tmp_path / "x.npy", series(100, 180))
    (expected,) = (distributed.cdist(series(100, 180)[:, :, None], gamma=0.5),)
    return tmp_path, expected


ARGUMENTS = ["cdist", "x.npy", "--out", "d.npy", "--gamma", "0.5"]


@pytest.mark.slow
def test_as_a_command_and_under_torchrun(job: tuple[Path, np.ndarray]) -> None:
    folder, expected = job
    alone = call(command("softdtw_cuda", *ARGUMENTS), folder)
    assert (alone.returncode, alone.stdout) == (0, ""), alone.stderr
    assert "100%" in alone.stderr
    assert np.array_equal(np.load(folder / "d.npy"), expected)
    os.rename(folder / "d.npy", folder / "alone.npy")
    together = call(torchrun(folder, 3, *ARGUMENTS), folder)
    assert together.returncode == 0, together.stderr
    assert (folder / "d.npy").read_bytes() == (folder / "alone.npy").read_bytes()
    assert len(list((folder / "d.npy.journal").glob("finished-*.log"))) == 3
    alone = call(command("softdtw_cuda", *KMEANS, "--rounds", "3"), folder)
    found = [(folder / name).read_bytes() for name in ("c.npy", "l.npy")]
    together = call(torchrun(folder, 3, *KMEANS, "--rounds", "3", "--overwrite"), folder)
    assert together.returncode == 0, together.stderr
    assert together.stdout == alone.stdout
    assert [(folder / name).read_bytes() for name in ("c.npy", "l.npy")] == found
    wrong = call(torchrun(folder, 2, "cdist", "z.npy", "--out", "e.npy"), folder)
    assert wrong.returncode == 1
    assert wrong.stderr.count("softdtw_cuda: error: z.npy: there is no such file") == 1


@pytest.mark.slow
def test_a_disk_that_is_too_small(job: tuple[Path, np.ndarray]) -> None:
    """A limit for the size of files stands in for it; the kernel's error is another one.

    It is lifted before the process ends, where coverage writes a file of its own.
    """
    pytest.importorskip("resource")
    folder, _ = job
    program = (
        "import resource, sys; size = resource.RLIMIT_FSIZE; limits = resource.getrlimit(size);"
        "from softdtw_cuda.__main__ import main; resource.setrlimit(size, (20_000, limits[1]));"
        "status = main(sys.argv[1:]); resource.setrlimit(size, limits); sys.exit(status)"
    )
    found = call([sys.executable, "-c", program, *ARGUMENTS], folder)
    assert found.returncode == 1
    assert "softdtw_cuda: error: d.npy: File too large" in found.stderr
    assert "Traceback" not in found.stderr
    assert sorted(path.name for path in folder.glob("*.npy*")) == ["d.npy.journal", "x.npy"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("processes", "kills"), [(1, 24), (2, 8)])
def test_killed_at_random_moments(job: tuple[Path, np.ndarray], processes: int, kills: int) -> None:
    folder, expected = job
    seed = str(random.randrange(1 << 30))
    program = [sys.executable, str(ROOT / "tests" / "killed.py"), str(processes), str(kills), seed]
    found = call([*program, *ARGUMENTS], folder)
    assert found.returncode == 0, (seed, found.stderr)
    seen = json.loads(found.stdout)
    assert len(seen["finished"]) == kills
    assert len(set(seen["finished"])) > kills // 4, "the kills came at few different moments"
    assert seen["status"] == [0] * processes
    assert seen["others"] == [1] * (kills * (processes - 1)), "who loses another process fails, too"
    assert np.array_equal(np.load(folder / "d.npy"), expected), seed


@pytest.mark.slow
def test_neighbours_killed_at_random_moments(tmp_path: Path) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    np.save(tmp_path / "x.npy", series(90, 150))
    arguments = ["knn", "x.npy", "-k", "4", "--out", "v.npy", "--indices", "i.npy"]
    program = [sys.executable, str(ROOT / "tests" / "killed.py"), "1", "10", "7"]
    found = call([*program, *arguments], tmp_path)
    assert found.returncode == 0, found.stderr
    values, indices = distributed.knn(series(90, 150)[:, :, None], None, 4, exclude_self=True)
    assert np.array_equal(np.load(tmp_path / "v.npy"), values)
    assert np.array_equal(np.load(tmp_path / "i.npy"), indices)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("processes", "kills"), [(1, 24), (2, 6)])
def test_k_means_killed_at_random_moments(tmp_path: Path, processes: int, kills: int) -> None:
    """What a round or a start has reached is never lost, and the end is that of an uninterrupted fit."""
    np.save(tmp_path / "x.npy", series(40, 60))
    arguments = [*KMEANS, "--starts", "3", "--rounds", "8", "--tol", "0"]
    alone = call(command("softdtw_cuda", *arguments), tmp_path)
    assert alone.returncode == 0, alone.stderr
    expected = [(tmp_path / name).read_bytes() for name in ("c.npy", "l.npy")]
    for path in (*tmp_path.glob("[cl].npy"), *(tmp_path / "c.npy.journal").iterdir()):
        path.unlink()
    seed = str(random.randrange(1 << 30))
    program = [sys.executable, str(ROOT / "tests" / "killed.py"), str(processes), str(kills), seed]
    found = call([*program, *arguments], tmp_path)
    assert found.returncode == 0, (seed, found.stderr)
    seen = json.loads(found.stdout[found.stdout.rindex("{") :])
    assert len(set(seen["finished"])) > kills // 4, "the kills came at few different moments"
    assert seen["status"] == [0] * processes
    assert [(tmp_path / name).read_bytes() for name in ("c.npy", "l.npy")] == expected, seed


def children(parent: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_torchrun_restarts_what_is_killed(tmp_path: Path) -> None:
    """A worker is killed each time that the journal has grown; torchrun starts all of them again.

    They overwrite what was there before, but not what they had finished.
    """
    np.save(tmp_path / "x.npy", series(200, 300))
    np.save(tmp_path / "d.npy", np.zeros(3))
    expected = distributed.cdist(series(200, 300)[:, :, None], gamma=0.5)
    chance, kills, lines, begun = random.Random(5), 0, 0, time.monotonic()
    given = torchrun(tmp_path, 2, *ARGUMENTS, "--overwrite", restarts=3)
    with subprocess.Popen(given, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE) as agent:
        while agent.poll() is None:
            if time.monotonic() - begun > LIMIT:
                agent.terminate()
            time.sleep(0.02)
            logs = (tmp_path / "d.npy.journal").glob("finished-*.log")
            now = sum(path.read_bytes().count(b"\n") for path in logs)
            assert now >= lines, "a restart has thrown away what was finished"
            workers = children(agent.pid)
            if kills < 2 and now > lines + 2 and len(workers) == 2:
                os.kill(chance.choice(workers), signal.SIGKILL)
                kills, lines = kills + 1, now
                while len(children(agent.pid)) == 2 and children(agent.pid) == workers:
                    time.sleep(0.02)
        errors = agent.stderr.read().decode() if agent.stderr is not None else ""
    assert agent.returncode == 0, errors
    assert kills == 2
    assert np.array_equal(np.load(tmp_path / "d.npy"), expected)
