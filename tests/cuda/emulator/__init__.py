"""Runs CUDA kernel sources on the host, without a GPU, over a host version of ``primitives.cuh``.

Every lane is a fiber, blocks are scheduled in random orders, few resident at a time, all memory is guarded::

    module = build([Path("kernel.cu")], {"MODE": 1})
    out = GuardedBuffer(np.zeros(32, np.float32), "out")
    module.launch("kernel", Params(out=out.address), blocks=1, threads=32, shared_bytes=0)

Kernels have the form ``KERNEL THREADS_PER_BLOCK(t, b) name(GRID_CONSTANT const Params p)``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = ["EmulatedModule", "EmulationError", "GuardedBuffer", "LaunchStatistics", "build"]

_HERE = Path(__file__).resolve().parent
_PRIMITIVES = "primitives.cuh"
_GUARD_BYTES = 16 << 20
_CANARY = 0xA5
_OWN_FILES = ("host_primitives.h", "scheduler.h", "pending_stores.h", "races.h", "fibers.h", "entries")

Flush = Literal["start", "end"]


class EmulationError(RuntimeError):
    """A kernel did what it must not: it diverged, deadlocked, left its buffers, or does not build."""


# ---- building


@functools.cache
def _compiler() -> tuple[str, ...]:
    for command in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if command and shutil.which(command.split()[0]):
            return tuple(command.split())
    if shutil.which("gcc"):
        return ("gcc",)  # the emulator needs a C++ compiler, but no C++ library
    raise EmulationError(
        "no C++ compiler found: install g++, or name a compiler in the environment variable CXX"
    )


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([*_compiler(), "--version"], check=True, capture_output=True, text=True).stdout


def _checks() -> tuple[str, ...]:
    """Traps where a GPU and this machine differ, or where a guard around the whole buffer is too far away."""
    bounds = "bounds" if "clang" in _compiler_version() else "bounds-strict"
    kinds = f"{bounds},alignment,shift-exponent,float-cast-overflow"
    return (f"-fsanitize={kinds}", "-fsanitize-undefined-trap-on-error")


@functools.cache
def _processor() -> str:
    """What -march=native depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    return "\n".join(sorted(set(re.findall(r"^(?:flags|Features|model name)\s*:.*$", text, re.MULTILINE))))


@functools.cache
def _cache_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"softdtw-cuda-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        folder = Path(tempfile.mkdtemp(prefix="softdtw-cuda-emulator-"))
    return folder


def _forget_old_builds(folder: Path, days: float = 7) -> None:
    for library in folder.glob("*.so"):
        try:
            if time.time() - library.stat().st_mtime > days * 86400:
                library.unlink()
        except OSError:
            continue  # another process was faster


def _inline(path: Path, seen: set[Path]) -> str:
    """The source with its neighbours included in place, each once, and without ``primitives.cuh``."""
    lines = [f'#line 1 "{path}"']
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        found = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if not found:
            lines.append("" if re.match(r"\s*#\s*pragma\s+once\b", line) else line)
            continue
        included = (path.parent / found[1]).resolve()
        if included.name != _PRIMITIVES and included not in seen:
            seen.add(included)
            lines.append(_inline(included, seen))
        lines.append(f'#line {number + 1} "{path}"')
    return "\n".join(lines) + "\n"


def _run_compiler(arguments: Sequence[str], text: str) -> str:
    done = subprocess.run([*_compiler(), *arguments], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(f"the kernel source does not build for the host:\n{done.stderr[-6000:]}")
    return done.stdout


# KERNEL's expansion in host_primitives.h; line markers may stand between it and the name.
_KERNEL = re.compile(r'extern "C" __attribute__\(\(used\)\) void(?:\s|#[^\n]*\n)+(\w+)\s*\(')


def build(
    sources: Sequence[Path],
    defines: Mapping[str, int | str] | None = None,
    *,
    races: bool = False,
    flags: Sequence[str] = (),
) -> EmulatedModule:
    """Compiles kernel sources for the host; a second build of the same text comes from a cache on disk.

    Args:
        sources: files that are concatenated in order. What they include from their own folder is included
            once; ``primitives.cuh`` is replaced by the emulator's version.
        defines: macros, as with ``-D``.
        races: watch every load and store of the kernels; a launch fails on two accesses to the same bytes
            that no barrier and no release with its acquire put in order, whichever came first in this run.
            Needs gcc, and several times the time.
        flags: further flags for the compiler.

    Raises:
        EmulationError: there is no compiler, or the source does not build.
    """
    seen: set[Path] = set()
    text = '#include "host_primitives.h"\n' + "".join(_inline(Path(path).resolve(), seen) for path in sources)
    options = [
        *(
            "-std=c++17",
            "-O2",
            "-g",
            "-march=native",
            "-fPIC",
            "-fvisibility=hidden",
            "-fno-exceptions",
            "-fno-rtti",
        ),
        # Views of a buffer may alias, as on the device; products and sums are rounded as written.
        *("-fno-strict-aliasing", "-ffp-contract=off", "-fno-math-errno", "-fno-stack-protector", "-w"),
        *_checks(),
        *(("-fsanitize=thread", "-DEMULATOR_RACES") if races else ()),
        *flags,
    ]
    macros = [f"-D{name}={value}" for name, value in (defines or {}).items()]
    return _built(text, tuple(options), tuple(macros))


@functools.cache
def _built(text: str, options: tuple[str, ...], macros: tuple[str, ...]) -> EmulatedModule:
    unit = _run_compiler([*options, *macros, f"-I{_HERE}", "-x", "c++", "-E", "-"], text)
    kernels = list(dict.fromkeys(_KERNEL.findall(unit)))
    unit += '\n# 1 "entries"\n'
    export = 'extern "C" __attribute__((visibility("default"), used))'
    for name in kernels:
        unit += f"{export} void emulator_entry_{name}(const void* p) {{ emulator::call({name}, p); }}\n"
        unit += f"{export} const unsigned emulator_params_{name} = emulator::bytes_of_params({name});\n"
    text_of_all = "\0".join([unit, *options, _compiler_version(), _processor()])
    key = hashlib.sha256(text_of_all.encode()).hexdigest()[:24]
    library = _cache_folder() / f"{key}.so"
    try:
        os.utime(library)
    except OSError:
        _forget_old_builds(_cache_folder())
        with tempfile.TemporaryDirectory(dir=_cache_folder()) as scratch:
            made = Path(scratch) / "module.so"
            object_file = Path(scratch) / "module.o"
            _run_compiler([*options, "-c", "-x", "c++-cpp-output", "-", "-o", str(object_file)], unit)
            # Linked without the options: the sanitizer's own library must stay away.
            _run_compiler(["-shared", str(object_file), "-o", str(made), "-lm"], "")
            made.replace(library)
    return EmulatedModule(library, kernels)


# ---- memory


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


_LIBC = _libc()
_PROT_NONE = 0
_MAP_NORESERVE = 0x4000


class _Region:
    """The memory of a GuardedBuffer, given back when the last array over it goes."""

    def __init__(self, name: str, nbytes: int, flush: Flush, align: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._inner = max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        mapped = self._inner + 2 * _GUARD_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        mapping = _LIBC.mmap(None, mapped, _PROT_NONE, flags, -1, 0)
        if mapping in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"no address space for the buffer {name!r} of {nbytes} bytes")
        weakref.finalize(self, _LIBC.munmap, mapping, mapped)
        self._mapping = range(mapping, mapping + mapped)
        self._begin: int = mapping + _GUARD_BYTES
        self.protect(mmap.PROT_READ | mmap.PROT_WRITE)
        ctypes.memset(self._begin, _CANARY, self._inner)
        self.address = self._begin + (0 if flush == "start" else (self._inner - nbytes) // align * align)
        _regions.add(self)

    def protect(self, protection: int) -> None:
        if _LIBC.mprotect(self._begin, self._inner, protection):
            raise MemoryError(f"the buffer {self.name!r} of {self.nbytes} bytes cannot be mapped")

    def covers(self, address: int) -> bool:
        return address in self._mapping

    def check(self) -> None:
        """Raises EmulationError, once, if the bytes between the contents and the guards were written."""
        end = self.address + self.nbytes
        zones = (("before", self._begin, self.address), ("after", end, self._begin + self._inner))
        for where, first, last in zones:
            zone = ctypes.string_at(first, last - first)
            if zone != bytes([_CANARY]) * len(zone):
                rest = zone.lstrip(bytes([_CANARY]))
                ctypes.memset(first, _CANARY, last - first)
                raise EmulationError(
                    f"out of bounds write {where} buffer {self.name!r}, "
                    f"at {last - len(rest) - self.address:+d} of {self.nbytes} bytes"
                )


_regions: weakref.WeakSet[_Region] = weakref.WeakSet()


class GuardedBuffer:
    """Memory for a kernel between two inaccessible zones, so that an access out of bounds faults.

    Args:
        source: an array whose contents are copied, or a number of bytes (filled with 0xFF, NaN as a float).
        name: what error messages call it.
        flush: the side on which the contents touch the guard. At the end, up to ``align - 1`` bytes may
            remain; they are checked for writes after every launch.
        align: alignment of the address in bytes.
        readonly: a kernel's write faults.

    Example:
        >>> x = GuardedBuffer(np.zeros((2, 5), np.float32), "x")
        >>> x.array.shape
        (2, 5)
    """

    def __init__(
        self,
        source: npt.NDArray[Any] | int,
        name: str,
        *,
        flush: Flush = "end",
        align: int = 16,
        readonly: bool = False,
    ) -> None:
        if flush not in ("start", "end"):
            raise ValueError(f'flush must be "start" or "end", got {flush!r}')
        if align < 1 or align & (align - 1) or align > mmap.PAGESIZE:
            raise ValueError(f"align must be a power of two up to {mmap.PAGESIZE}, got {align}")
        nbytes = source if isinstance(source, int) else source.nbytes
        self._region = _Region(name, nbytes, flush, align)
        self.name = name
        self.nbytes = nbytes
        self.address: int = self._region.address
        raw = (ctypes.c_uint8 * nbytes).from_address(self.address)
        raw._region = self._region  # type: ignore[attr-defined]  # arrays may outlive this object
        array = np.frombuffer(memoryview(raw), np.uint8) if nbytes else np.empty(0, np.uint8)
        if isinstance(source, int):
            array[:] = 0xFF
            self._view = array
        else:
            self._view = array.view(source.dtype).reshape(source.shape)
            self._view[...] = source
        if readonly:
            self._region.protect(mmap.PROT_READ)
            self._view.flags.writeable = False

    @property
    def array(self) -> npt.NDArray[Any]:
        """The contents; a view, not a copy. It stays guarded for as long as any view of it lives."""
        return self._view


# ---- launching


class _Range(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_void_p), ("bytes", ctypes.c_uint64))


class _Options(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("cpu_seconds", ctypes.c_double),
        ("blocks", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
        ("relaxed", ctypes.c_uint32),
        ("shared_flush_start", ctypes.c_uint32),
        ("stacks", ctypes.c_void_p),
        ("ranges", ctypes.c_void_p),
        ("range_count", ctypes.c_uint32),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("collectives", ctypes.c_uint64),
        ("switches_of_warps", ctypes.c_uint64),
        ("failed_polls", ctypes.c_uint64),
        ("fault_address", ctypes.c_uint64),
        ("fault_instruction", ctypes.c_uint64),
        ("other_instruction", ctypes.c_uint64),
        ("faulted", ctypes.c_uint32),
        ("fault_is_write", ctypes.c_uint32),
        ("message", ctypes.c_char * 8000),
    )


@dataclass(frozen=True)
class LaunchStatistics:
    """What a launch did: collectives of warps, changes from warp to warp, polls that failed."""

    collectives: int
    switches_of_warps: int
    failed_polls: int


# Fibers share the process's signal handlers, so one launch runs at a time.
_launching = threading.Lock()
_stacks: list[int] = []  # of the lanes of each warp; kept for the next launch, of whatever module


class EmulatedModule:
    """Kernels built for the host; made by :func:`build`."""

    def __init__(self, library: Path, kernels: Sequence[str]) -> None:
        self.kernels = tuple(kernels)
        self._path = library
        self._library = ctypes.CDLL(str(library))
        self._library.emulator_new_stacks.restype = ctypes.c_void_p
        self._library.emulator_launch.argtypes = [ctypes.POINTER(_Options), ctypes.POINTER(_Report)]

    def launch(
        self,
        kernel_name: str,
        params: ctypes.Structure,
        *,
        blocks: int,
        threads: int,
        shared_bytes: int,
        seed: int = 0,
        resident: int = 4,
        relaxed: bool = False,
        first_flush: Flush = "end",
        cpu_seconds: float = 120.0,
    ) -> LaunchStatistics:
        """Runs a grid to its end.

        Args:
            kernel_name: one of :attr:`kernels`.
            params: the kernel's only parameter, byte for byte.
            blocks: how many blocks the grid has.
            threads: threads per block, whole warps, at most 1024.
            shared_bytes: dynamic shared memory of each block.
            seed: decides the order of everything; different seeds also prefer long or short turns.
            resident: how many blocks are under way at a time.
            relaxed: words stored for other blocks become visible late and out of order.
            first_flush: the side on which shared memory touches its guard.
            cpu_seconds: the processor time after which a launch is given up.

        Raises:
            EmulationError: divergence, deadlock, access out of bounds, or out of time.
        """
        if kernel_name not in self.kernels:
            raise ValueError(
                f"no kernel {kernel_name!r} in this module; it has {', '.join(self.kernels) or 'none'}"
            )
        expected = ctypes.c_uint32.in_dll(self._library, f"emulator_params_{kernel_name}").value
        if ctypes.sizeof(params) != expected:
            raise ValueError(
                f"params has {ctypes.sizeof(params)} bytes, the kernel's Params {expected}: "
                "declare the same fields"
            )
        if threads < 32 or threads % 32 or threads > 1024:
            raise ValueError(f"threads must be a multiple of 32 up to 1024, got {threads}")
        if blocks < 1 or resident < 1 or shared_bytes < 0:
            raise ValueError(f"got blocks={blocks}, resident={resident}, shared_bytes={shared_bytes}")
        if first_flush not in ("start", "end"):
            raise ValueError(f'first_flush must be "start" or "end", got {first_flush!r}')
        regions = list(_regions)
        ranges = (_Range * len(regions))(*[_Range(region.address, region.nbytes) for region in regions])
        options = _Options(
            ctypes.cast(self._library[f"emulator_entry_{kernel_name}"], ctypes.c_void_p),
            ctypes.addressof(params),
            seed % 2**64,
            cpu_seconds,
            blocks,
            threads,
            shared_bytes,
            resident,
            relaxed,
            first_flush == "start",
            None,
            ctypes.addressof(ranges),
            len(regions),
        )
        report = _Report()
        with _launching:
            stacks = self._stacks(min(resident, blocks) * threads // 32)
            options.stacks = ctypes.addressof(stacks)
            failed = self._library.emulator_launch(options, report)
        if failed:
            raise EmulationError(f"{kernel_name}, seed {seed}: {self._explain(report)}")
        for region in regions:
            region.check()
        return LaunchStatistics(report.collectives, report.switches_of_warps, report.failed_polls)

    def _stacks(self, warps: int) -> ctypes.Array[ctypes.c_void_p]:
        while len(_stacks) < warps:
            made = self._library.emulator_new_stacks()
            if not made:
                raise MemoryError(f"no address space for the stacks of {warps} warps: lower resident")
            _stacks.append(made)
        return (ctypes.c_void_p * warps)(*_stacks[:warps])

    def _explain(self, report: _Report) -> str:
        message: str = report.message.decode(errors="replace")
        if report.faulted:
            address = report.fault_address
            for region in list(_regions):
                if region.covers(address):
                    message += f", buffer {region.name!r} {address - region.address:+d}, size {region.nbytes}"
                    break
            else:
                message += f", address {address:#x}"
        for word, instruction in (("at", report.fault_instruction), ("after", report.other_instruction)):
            place = self._source_place(instruction) if instruction else ""
            message += f", {word} {place}" if place else ""
        return message

    def _source_place(self, instruction: int) -> str:
        """The line of an instruction of this library, when binutils are there to tell."""
        if not shutil.which("addr2line"):
            return ""
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith(str(self._path)):
                base = int(line.split("-")[0], 16)
                break
        else:
            return ""
        told = subprocess.run(
            ["addr2line", "-s", "-i", "-e", str(self._path), hex(instruction - base)],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.splitlines()
        places = [line.split()[0] for line in told if line and not line.startswith(("?", *_OWN_FILES))]
        return " in ".join(places)
