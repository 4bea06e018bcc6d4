"""Compilation of the CPU kernels: the cache on disk, the notice, forks, and life without any of them."""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

numba = pytest.importorskip("numba")
from softdtw_cuda import _cache_folder  # noqa: E402
from softdtw_cuda._cpu import cache  # noqa: E402
from softdtw_cuda._cpu import compile as compiling  # noqa: E402

PROGRAM = """
import torch
from softdtw_cuda import softdtw
x = torch.ones(1, 3, 1)
"""
VALUE = "print(float(softdtw(x, x)))"


def run_program(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )


# ---------------------------------------------------------------------------------------- a kernel of its own
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOFTDTW_CUDA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def add_one(a: int) -> int:
    return a + 1


def misses(dispatcher: Any) -> int:
    """How often it was really compiled."""
    return sum(dispatcher.stats.cache_misses.values())


def new_kernel() -> Any:
    """As a new process would have it."""
    return compiling.kernel(add_one)


def test_kernels_do_not_count_references_to_arrays() -> None:
    """They are the caller's; a count is an atomic operation, by which small tiles took twice as long."""

    class Pair(NamedTuple):
        one: Any
        other: Any

    @compiling.jit
    def first_of(pair: Pair) -> float:
        return pair.one[0]  # type: ignore[no-any-return]

    def total(pair: Pair, other: Any) -> float:
        result = 0.0
        for _ in range(3):
            result += first_of(Pair(pair.other, other)) + first_of(pair)
        return result

    ones = np.ones(1)
    compiled = compiling.jit(total)
    assert compiled(Pair(ones, ones), ones) == 6.0
    assert "NRT_" not in next(iter(compiled.inspect_llvm().values()))  # type: ignore[attr-defined]
    counting = numba.njit(total)
    counting(Pair(ones, ones), ones)
    assert "NRT_" in next(iter(counting.inspect_llvm().values()))


def test_a_kernel_is_compiled_once(folder: Path) -> None:
    first, second = new_kernel(), new_kernel()
    assert first(1) == 2
    assert len(list(folder.iterdir())) == 1
    assert second(1) == 2
    assert (misses(first), misses(second)) == (1, 0)
    assert second(1.5) == 2.5
    assert misses(second) == 1, "another type"


def test_any_changed_source_compiles_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_kernel()(1)
    package = Path(cache.__file__).parent
    shutil.copytree(package, tmp_path / "copy")
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "copy" / "cache.py"))
    stamps = set()
    for source in [None, *sorted((tmp_path / "copy").glob("*.py"))]:
        if source is not None:
            source.write_text(source.read_text() + "\n# changed\n")
        cache.source_stamp.cache_clear()
        stamps.add(cache.source_stamp())
    try:
        assert len(stamps) == 1 + len(list(package.glob("*.py")))
        changed = new_kernel()
        assert changed(1) == 2
        assert misses(changed) == 1
    finally:
        cache.source_stamp.cache_clear()


class _Trap:
    """Stands for code of another user's: unpickling it leaves a trace."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["SOFTDTW_CUDA_CACHE"] + "/trapped",)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no owners and modes")
def test_code_that_others_could_have_written_is_not_even_unpickled(folder: Path) -> None:
    new_kernel()(1)
    (stored,) = folder.iterdir()
    _cache_folder.write_cached(stored, pickle.dumps(_Trap()))
    stored.chmod(0o666)
    fresh = new_kernel()
    assert fresh(1) == 2
    assert misses(fresh) == 1
    assert not (folder / "trapped").exists()
    again = new_kernel()
    assert again(1) == 2
    assert misses(again) == 0, "the file was replaced"


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps(("too", "short"))])
def test_what_cannot_be_loaded_is_compiled(folder: Path, content: bytes) -> None:
    new_kernel()(1)
    (stored,) = folder.iterdir()
    _cache_folder.write_cached(stored, content)
    fresh = new_kernel()
    assert fresh(1) == 2
    assert misses(fresh) == 1


@pytest.mark.parametrize("call", ["replace", "fdopen", "mkdir"])
def test_a_full_disk_is_no_error(folder: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path if call == "mkdir" else os, call, full)
    for _ in range(2):
        assert new_kernel()(1) == 2
    assert not folder.exists() or not list(folder.iterdir())


def test_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "cache_folder", lambda: None)
    assert new_kernel()(1) == 2


def test_a_numba_without_its_private_names_compiles_in_every_process(folder: Path) -> None:
    before = sys.modules.pop("numba.core.caching")
    sys.modules["numba.core.caching"] = None  # type: ignore[assignment]  # its import fails
    try:
        changed = importlib.reload(cache)
        assert not changed.AVAILABLE
        assert new_kernel()(1) == 2
        assert not folder.exists()
    finally:
        sys.modules["numba.core.caching"] = before
        importlib.reload(cache)


# ------------------------------------------------------------------------------------------------ the notice
@pytest.fixture
def notice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setattr(compiling, "_notice_given", False)

    def given() -> str:
        compiling._give_notice()
        compiling._give_notice()
        return capsys.readouterr().err

    return given


def test_the_notice_says_once_where_kernels_are_kept(folder: Path, notice: Any) -> None:
    said = notice()
    assert said.count("compiling or loading the CPU kernels") == 1
    assert f"kept in {folder}" in said


def test_the_notice_says_why_kernels_are_not_kept(
    folder: Path, notice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.joinpath("file").write_text("in the way")
    monkeypatch.setenv("SOFTDTW_CUDA_CACHE", str(folder.parent / "file" / "below"))
    said = notice()
    assert "cannot be kept" in said
    assert "SOFTDTW_CUDA_CACHE" in said
    assert "once" not in said


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser writes everywhere")
def test_the_notice_in_a_read_only_folder(folder: Path, notice: Any) -> None:
    folder.mkdir(mode=0o500)
    said = notice()
    assert "Permission denied" in said
    assert "once" not in said


def test_no_thread_for_the_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refuse)
    with compiling._notice():
        pass


# ---------------------------------------------------------------------------------------- whole interpreters
FORKING = """
import os, sys, threading, time
from softdtw_cuda import _backends

def wait_for_child(child):
    deadline = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            sys.exit("the child hangs")
        time.sleep(0.05)

def fork_and_call(work):
    child = os.fork()
    if child == 0:
        print(work(), flush=True)
        os._exit(0)
    wait_for_child(child)

worker = threading.Thread(target=softdtw, args=(x, x))
worker.start()
while "softdtw_cuda._cpu.launch" not in sys.modules:  # until the other thread imports it
    time.sleep(0.001)
fork_and_call(lambda: _backends.backend("cpu").__name__)
while "cpu" not in _backends._found:
    time.sleep(0.001)
time.sleep(0.5)  # it compiles
fork_and_call(lambda: float(softdtw(x, x)))
worker.join()
print(float(softdtw(x, x)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forks_while_another_thread_imports_and_compiles(tmp_path: Path) -> None:
    """An empty cache, so that everything is compiled; the one program here that has to wait for it."""
    done = run_program(FORKING, SOFTDTW_CUDA_CACHE=str(tmp_path), PYTHONWARNINGS="ignore")
    module, child, parent = done.stdout.split()
    assert module == "softdtw_cuda._cpu.launch"
    assert child == parent
    assert "compiling or loading the CPU kernels" in done.stderr
    assert list(tmp_path.glob("forward_*.numba"))


def test_without_a_compiler_the_reference_computes() -> None:
    done = run_program(VALUE, NUMBA_DISABLE_JIT="1")
    assert float(done.stdout) == float(run_program(VALUE).stdout)
    assert "NUMBA_DISABLE_JIT" in done.stderr
    assert "falling back to plain torch" in done.stderr


AT_EXIT = """
import atexit
torch.set_num_threads(2)
large = torch.ones(16, 300, 8)
atexit.register(lambda: print(float(softdtw(large, large).sum())))
if EARLIER:
    print(float(softdtw(large, large).sum()))
"""


@pytest.mark.parametrize("earlier", [True, False])
def test_a_call_at_exit(earlier: bool) -> None:
    found = run_program(f"EARLIER = {earlier}" + AT_EXIT).stdout.split()
    assert len(set(found)) == 1
    assert len(found) == 1 + earlier
