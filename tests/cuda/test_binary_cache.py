"""The cache of compiled kernels on disk: named by everything a binary depends on, and never in the way."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from softdtw_cuda._cache_folder import cache_folder, read_cached, write_cached
from softdtw_cuda._cuda import compile as compiling
from softdtw_cuda._cuda import config, driver
from softdtw_cuda._cuda.kernel import BACKWARD, FORWARD, FORWARD_BACKWARD, RERUN, SCALE, AnyKernel, Kernel

KERNEL = config.choose(False, 5, torch.float32, False, False, True, config.Device()).main
BINARY = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that does not exist yet."""
    chosen = tmp_path / "some" / "cache"
    monkeypatch.setenv("SOFTDTW_CUDA_CACHE", str(chosen))
    return chosen


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Kernel, str, str]]:
    """What was compiled; the compiler is played by a constant."""
    calls: list[tuple[Kernel, str, str]] = []

    def compile_source(kernel: Kernel, part: str, architecture: str, log: Any = None) -> bytes:
        calls.append((kernel, part, architecture))
        return BINARY

    monkeypatch.setattr(compiling, "compile_source", compile_source)
    monkeypatch.setattr(compiling, "compiler_version", lambda: "12.9")
    return calls


class TestKey:
    def test_it_depends_on_options_architecture_and_compiler(self) -> None:
        key = compiling.cache_key(KERNEL, FORWARD, "sm_90", "12.9")
        others = [
            compiling.cache_key(KERNEL, BACKWARD, "sm_90", "12.9"),
            compiling.cache_key(KERNEL, FORWARD, "sm_80", "12.9"),
            compiling.cache_key(KERNEL, FORWARD, "sm_90", "13.0"),
            *(
                compiling.cache_key(
                    replace(KERNEL, **{field: getattr(KERNEL, field) + 1}), FORWARD, "sm_90", "12.9"
                )
                for field in ("input_code", "banded", "lane_rows", "checkpoint", "dims", "forward_blocks")
            ),
        ]
        assert len({key, *others}) == 1 + len(others)
        assert key == compiling.cache_key(replace(KERNEL), FORWARD, "sm_90", "12.9")

    def test_it_depends_on_options_that_all_kernels_share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        key = compiling.cache_key(KERNEL, FORWARD, "sm_90", "12.9")
        options = compiling._options(KERNEL, FORWARD)
        assert options["std"] == "c++17"
        monkeypatch.setattr(compiling, "_options", lambda *about: {**options, "std": "c++20"})
        assert compiling.cache_key(KERNEL, FORWARD, "sm_90", "12.9") != key

    @pytest.mark.parametrize("part", ["tiled.cu", "primitives.cuh", "params.cuh", "walker.cuh"])
    def test_it_depends_on_every_source(
        self, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = compiling.cache_key(KERNEL, FORWARD, "sm_90", "12.9")
        for source in compiling._KERNELS.iterdir():
            if source.is_file():
                (tmp_path / source.name).write_bytes(source.read_bytes())
        monkeypatch.setattr(compiling, "_KERNELS", tmp_path)
        compiling.source_text.cache_clear()
        try:
            assert compiling.cache_key(KERNEL, FORWARD, "sm_90", "12.9") == before
            (tmp_path / part).write_text((tmp_path / part).read_text() + "\n// changed\n")
            compiling.source_text.cache_clear()
            assert compiling.cache_key(KERNEL, FORWARD, "sm_90", "12.9") != before
        finally:
            compiling.source_text.cache_clear()

    def test_no_include_is_left_in_the_source(self) -> None:
        for kernel in ("univariate.cu", "wide.cu", "tiled.cu"):
            assert "#include" not in compiling.source_text(kernel)


class TestFolder:
    def test_the_variable_decides(self, folder: Path) -> None:
        assert cache_folder() == folder

    def test_otherwise_the_users_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("SOFTDTW_CUDA_CACHE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_folder() == tmp_path / "softdtw_cuda"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert cache_folder() == tmp_path / "home" / ".cache" / "softdtw_cuda"

    def test_a_user_without_a_home(
        self, monkeypatch: pytest.MonkeyPatch, compiled: list[tuple[Kernel, str, str]]
    ) -> None:
        """A container may run under a user id that the password file does not know."""
        for name in ("SOFTDTW_CUDA_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)

        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", no_home)
        assert compiling.binary_of(KERNEL, FORWARD, "sm_90") == BINARY


@pytest.mark.usefixtures("folder")
def test_it_compiles_once(compiled: list[tuple[Kernel, str, str]]) -> None:
    for _ in range(3):
        assert compiling.binary_of(KERNEL, FORWARD, "sm_90") == BINARY
    assert compiled == [(KERNEL, FORWARD, "sm_90")]
    compiling.binary_of(KERNEL, FORWARD, "sm_80")
    compiling.binary_of(replace(KERNEL, banded=True), FORWARD, "sm_90")
    compiling.binary_of(KERNEL, BACKWARD, "sm_90")
    assert len(compiled) == 4


def test_another_compiler_compiles_again(
    folder: Path, compiled: list[tuple[Kernel, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling.binary_of(KERNEL, FORWARD, "sm_90")
    monkeypatch.setattr(compiling, "compiler_version", lambda: "13.0")
    compiling.binary_of(KERNEL, FORWARD, "sm_90")
    assert len(compiled) == 2
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:10],
        lambda content: content[:32],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: content[:500] + bytes([content[500] ^ 1]) + content[501:],
        lambda content: bytes([content[0] ^ 1]) + content[1:],
        lambda content: b"\x7fELF" + content,
    ],
    ids=["empty", "short", "checksum-only", "truncated", "longer", "flipped", "checksum-flipped", "foreign"],
)
def test_a_damaged_file_is_replaced(folder: Path, compiled: list[Any], damage: Any) -> None:
    compiling.binary_of(KERNEL, FORWARD, "sm_90")
    (stored,) = folder.iterdir()
    whole = stored.read_bytes()
    stored.write_bytes(damage(whole))
    assert compiling.binary_of(KERNEL, FORWARD, "sm_90") == BINARY
    assert len(compiled) == 2
    assert stored.read_bytes() == whole
    compiling.binary_of(KERNEL, FORWARD, "sm_90")
    assert len(compiled) == 2


class TestUnusableFolder:
    def test_a_file_is_in_the_way(
        self, tmp_path: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("not a folder")
        for place in (tmp_path / "file", tmp_path / "file" / "below"):
            monkeypatch.setenv("SOFTDTW_CUDA_CACHE", str(place))
            assert compiling.binary_of(KERNEL, FORWARD, "sm_90") == BINARY
        assert (tmp_path / "file").read_text() == "not a folder"

    @pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
    def test_it_cannot_be_written(self, folder: Path, compiled: list[Any]) -> None:
        folder.mkdir(parents=True)
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
        assert compiling.binary_of(KERNEL, FORWARD, "sm_90") == BINARY
        assert list(folder.iterdir()) == []

    @pytest.mark.parametrize("call", ["replace", "fdopen"])
    def test_the_disk_is_full(
        self, folder: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, call, fail)
        assert compiling.binary_of(KERNEL, FORWARD, "sm_90") == BINARY
        assert list(folder.iterdir()) == [], "no half-written file stays behind"


def test_many_at_once(folder: Path, compiled: list[tuple[Kernel, str, str]]) -> None:
    """Threads stand for processes: nothing in the process is shared between two calls but the folder."""
    path = folder / "binary.cubin"
    wrong = []

    def work(number: int) -> None:
        for _ in range(50):
            if number % 2:
                write_cached(path, BINARY)
            elif read_cached(path) not in (None, BINARY):
                wrong.append(number)
            assert compiling.binary_of(KERNEL, FORWARD, "sm_90") == BINARY

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not wrong
    assert read_cached(path) == BINARY
    assert len(list(folder.iterdir())) == 2


def test_what_is_stored_is_a_checksum_and_the_binary(folder: Path, compiled: list[Any]) -> None:
    compiling.binary_of(KERNEL, FORWARD, "sm_90")
    (stored,) = folder.iterdir()
    assert stored.read_bytes() == hashlib.sha256(BINARY).digest() + BINARY
    assert stored.name == f"{compiling.cache_key(KERNEL, FORWARD, 'sm_90', '12.9')}.cubin"


class TestAhead:
    """The first call of a training step begins to compile all that the step will need."""

    @pytest.fixture
    def begun(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[AnyKernel, str]]:
        calls: list[tuple[AnyKernel, str]] = []

        def binary_of(kernel: AnyKernel, part: str, architecture: str) -> bytes:
            calls.append((kernel, part))
            if kernel == replace(KERNEL, input_code=3):
                raise RuntimeError("no such compiler")
            return f"{kernel.source} {part} {architecture}".encode()

        monkeypatch.setattr(driver, "binary_of", binary_of)
        return calls

    @staticmethod
    def loading(gpu: driver.Gpu) -> Callable[..., str]:
        """Loads a part as `Gpu.load` does, without a driver."""

        def load(kernel: AnyKernel, part: str, save: bool = False) -> str:
            binary = gpu._binary(kernel, part, "sm_90", save)
            gpu.loaded[kernel.tag, part, 0] = driver._Loaded(None, 0, 0, 0)
            return binary.decode()

        return load

    def test_a_training_step(self, begun: list[tuple[AnyKernel, str]]) -> None:
        load, companion = self.loading(driver.Gpu()), config.wide_companion(KERNEL)
        assert load(KERNEL, FORWARD, save=True) == "tiled forward sm_90"
        assert load(companion, FORWARD) == "wide forward sm_90"
        assert load(KERNEL, BACKWARD) == "tiled backward sm_90"
        assert load(SCALE, BACKWARD) == "scale backward sm_90"
        assert load(companion, RERUN, save=True) == "wide rerun sm_90"
        needed = {(KERNEL, FORWARD), (KERNEL, BACKWARD), (companion, FORWARD), (companion, RERUN)}
        assert set(begun) == needed | {(SCALE, BACKWARD)}
        assert len(begun) == 5, "each once"

    def test_small_pairs(self, begun: list[tuple[AnyKernel, str]]) -> None:
        load, companion = self.loading(driver.Gpu()), config.wide_companion(KERNEL)
        assert load(KERNEL, FORWARD_BACKWARD, save=True) == "tiled forward_backward sm_90"
        assert load(KERNEL, FORWARD) == "tiled forward sm_90"
        assert load(KERNEL, BACKWARD) == "tiled backward sm_90"
        assert load(SCALE, BACKWARD) == "scale backward sm_90"
        assert load(companion, RERUN, save=True) == "wide rerun sm_90"
        assert load(companion, FORWARD) == "wide forward sm_90"
        needed = {(KERNEL, FORWARD_BACKWARD), (KERNEL, FORWARD), (KERNEL, BACKWARD)}
        assert set(begun) == needed | {(companion, FORWARD), (companion, RERUN), (SCALE, BACKWARD)}
        assert len(begun) == 6, "each once"

    def test_what_may_be_captured_is_loaded(self) -> None:
        """In the capture of a graph nothing can be loaded."""
        wide = config.choose(False, 5, torch.float64, False, False, True, config.Device()).main
        for kernel, part, others in (
            (KERNEL, FORWARD, []),
            (KERNEL, BACKWARD, [(SCALE, BACKWARD)]),
            (KERNEL, FORWARD_BACKWARD, [(KERNEL, FORWARD), (KERNEL, BACKWARD), (SCALE, BACKWARD)]),
            (config.wide_companion(KERNEL), RERUN, [(config.wide_companion(KERNEL), FORWARD)]),
            (wide, BACKWARD, []),
            (SCALE, BACKWARD, []),
        ):
            assert driver._loaded_with(kernel, part) == others

    def test_what_is_loaded_is_not_compiled_again(self, begun: list[tuple[AnyKernel, str]]) -> None:
        gpu = driver.Gpu()
        gpu.loaded[KERNEL.tag, FORWARD, 1] = driver._Loaded(None, 0, 0, 0)
        gpu._binary(KERNEL, FORWARD_BACKWARD, "sm_90", True, 1)
        assert (KERNEL, FORWARD_BACKWARD) in begun
        assert (KERNEL, FORWARD) not in begun

    def test_a_forward_alone(self, begun: list[tuple[AnyKernel, str]]) -> None:
        driver.Gpu()._binary(KERNEL, FORWARD, "sm_90", save=False)
        assert {part for _, part in begun} == {FORWARD}

    def test_a_wide_kernel_has_no_companion(self, begun: list[tuple[AnyKernel, str]]) -> None:
        wide = config.choose(False, 5, torch.float64, False, False, True, config.Device()).main
        gpu = driver.Gpu()
        for part in (FORWARD, BACKWARD):
            gpu._binary(wide, part, "sm_90", save=True)
        assert set(begun) == {(wide, FORWARD), (wide, BACKWARD)}

    def test_a_failure_is_told_and_not_remembered(self, begun: list[tuple[AnyKernel, str]]) -> None:
        kernel, gpu = replace(KERNEL, input_code=3), driver.Gpu()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no such compiler"):
                gpu._binary(kernel, FORWARD, "sm_90", save=False)
        assert begun.count((kernel, FORWARD)) == 2


def test_a_real_binary(folder: Path) -> None:
    pytest.importorskip("cuda.core")
    kernel = config.choose(False, 1, torch.float32, False, True, True, config.Device()).main
    binary = compiling.binary_of(kernel, BACKWARD, "sm_90")
    assert binary[:4] == b"\x7fELF"
    assert kernel.name(BACKWARD).encode() in binary
    assert kernel.name(FORWARD).encode() not in binary
    (stored,) = folder.iterdir()
    assert read_cached(stored) == binary == compiling.binary_of(kernel, BACKWARD, "sm_90")
