"""Compares the machine code of the CUDA kernels at a git revision and in the working tree; needs no GPU.

    python tools/compare_sass.py REVISION          a representative set
    python tools/compare_sass.py REVISION --all    every kernel that a call can ask for

A change that only moves code leaves every instruction as it was. NVRTC compiles both sides for the same
architecture, and the code of each kernel is compared in its encoded form, 16 bytes an instruction, so that
registers, constants and scheduling count. Names of kernels and of their parts do not. Exit status 1 means
that something differs.

Binaries of the revision are kept in a temporary folder, so that the next comparison with it is quick. With
nvdisasm on the path (pip install nvidia-cuda-nvdisasm) --show prints the instructions that differ.
"""

from __future__ import annotations

import argparse
import collections
import difflib
import importlib
import inspect
import io
import itertools
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = "src"
INSTRUCTION_BYTES = 16
NOP = 0x918
FEATURES = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 40, 64, 65, 80, 128, 130, 132, 4096)
DEVICES = {
    "sm_75": (65536, (7, 5), 40),
    "sm_80": (166912, (8, 0), 108),
    "sm_90": (232448, (9, 0), 132),
    "sm_100": (232448, (10, 0), 148),
    "sm_120": (101376, (12, 0), 170),
}


class Choice(NamedTuple):
    """Arguments of `config.choose`, less the device."""

    is_cost: bool
    d: int
    dtype: str
    banded: bool = False
    short: bool = False
    aligned: bool = True
    many: bool = False

    def __str__(self) -> str:
        flags = [name for name in ("banded", "short", "many") if getattr(self, name)]
        flags += [] if self.aligned else ["unaligned"]
        return "-".join(["cost" if self.is_cost else f"d{self.d}", self.dtype, *flags])


REPRESENTATIVE = (
    Choice(True, 1, "float32"),
    Choice(True, 1, "bfloat16", short=True),
    Choice(False, 1, "float32"),
    Choice(False, 1, "float32", banded=True),
    Choice(False, 1, "float16", short=True),
    Choice(False, 4, "float32"),
    Choice(False, 16, "float16", banded=True),
    Choice(False, 8, "float32", short=True),
    Choice(False, 32, "float32"),
    Choice(False, 64, "float32"),
    Choice(False, 64, "bfloat16"),
    Choice(False, 40, "float32", banded=True),
    Choice(False, 33, "bfloat16", banded=True, short=True),
    Choice(False, 128, "float32"),
    Choice(False, 80, "float16", aligned=False),
    Choice(False, 4096, "float32"),
    Choice(False, 130, "bfloat16", banded=True),
    Choice(False, 4, "float64"),
    Choice(False, 4, "float32", many=True),
    Choice(False, 16, "bfloat16", many=True),
)


def every_choice() -> list[Choice]:
    flags = (False, True)
    dtypes = ("float32", "float64", "float16", "bfloat16")
    return [Choice(*each) for each in itertools.product(flags, FEATURES, dtypes, flags, flags, flags, flags)]


# ---- in a process of its own, for there is one package of a name


def kernels_of(choices: list[Choice], architecture: str) -> dict[str, tuple[Any, str]]:
    """Kernels and parts that the choices lead to, each once, by a name that survives renaming."""
    import torch

    config = importlib.import_module("softdtw_cuda._cuda.config")
    device = config.Device(*DEVICES[architecture])
    found: dict[str, tuple[Any, str]] = {}
    seen = set()
    for choice in choices:
        if choice.many and "many" not in inspect.signature(config.choose).parameters:
            continue  # an older revision
        plan = config.choose(
            *(choice.is_cost, choice.d, getattr(torch, choice.dtype), choice.banded, choice.short),
            *(choice.aligned, device, *([True] if choice.many else [])),
        )
        for role, kernel in (
            ("main", plan.main),
            ("second", vars(plan).get("redo", vars(plan).get("rerun"))),
        ):
            if kernel is None or kernel in seen:
                continue
            seen.add(kernel)
            found |= {f"{choice}-{role}{i}": (kernel, part) for i, part in enumerate(kernel.parts)}
    return found


def compile_all(sources: str, folder: Path, architecture: str, everything: bool) -> None:
    """Writes a binary for each kernel that is not in `folder` yet."""
    sys.path.insert(0, sources)
    compiling = importlib.import_module("softdtw_cuda._cuda.compile")
    wanted = kernels_of(every_choice() if everything else list(REPRESENTATIVE), architecture)
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(name: str) -> None:
        path = folder / f"{name}.cubin"
        if not path.exists():
            kernel, part = wanted[name]
            unfinished = path.with_suffix(".tmp")
            unfinished.write_bytes(compiling.compile_source(kernel, part, architecture))
            unfinished.rename(path)

    importlib.import_module("cuda.core")  # two threads that import it at the same time fail
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, wanted))
    (folder / "names").write_text("\n".join(wanted))


# ---- machine code


class Code(NamedTuple):
    """Functions of a binary: the registers and the instructions of each."""

    functions: tuple[tuple[int, tuple[bytes, ...]], ...]

    @property
    def instructions(self) -> list[bytes]:
        return [each for _, body in self.functions for each in body]

    @property
    def registers(self) -> int:
        return max(registers for registers, _ in self.functions)


def code_of(cubin: bytes) -> Code:
    """The sections of code of an ELF file of 64 bits, the largest first."""
    at, count, names_at = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<2H", cubin, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, at + 64 * i) for i in range(count)]
    names = headers[names_at][4]
    functions = []
    for header in headers:
        start = names + header[0]
        if cubin[start : cubin.index(b"\0", start)].startswith(b".text"):
            body = cubin[header[4] : header[4] + header[5]]
            split = [body[i : i + INSTRUCTION_BYTES] for i in range(0, len(body), INSTRUCTION_BYTES)]
            while split and opcode(split[-1]) == NOP:
                split.pop()
            functions.append((header[7] >> 24, tuple(split)))
    return Code(tuple(sorted(functions, key=lambda function: (-len(function[1]), function[1]))))


def opcode(instruction: bytes) -> int:
    return int.from_bytes(instruction[:2], "little") & 0xFFF


def difference(old: Code, new: Code) -> str | None:
    """In a few words, or None."""
    if old == new:
        return None
    before, after = old.instructions, new.instructions
    counts = [collections.Counter(map(opcode, each)) for each in (before, after)]
    moved = sum((counts[0] - counts[1]).values()), sum((counts[1] - counts[0]).values())
    registers = (
        f"registers {old.registers} -> {new.registers}"
        if old.registers != new.registers
        else "same registers"
    )
    kinds = f"opcodes -{moved[0]} +{moved[1]}" if any(moved) else "same opcodes"
    return f"{len(before)} -> {len(after)} instructions, {registers}, {kinds}"


def disassembled(path: Path) -> Iterator[str]:
    text = subprocess.run(["nvdisasm", "-c", path], check=True, capture_output=True, text=True).stdout
    for line in text.splitlines():
        found = re.search(r"/\*[0-9a-f]{4,}\*/\s*(.*?;)", line)
        if found:
            yield found[1]


# ---- the comparison


def sources_at(revision: str, folder: Path) -> str:
    """The sources of a revision, unpacked."""
    target = folder / "sources"
    if not target.exists():
        packed = subprocess.run(
            ["git", "-C", ROOT, "archive", revision, SOURCES], check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(target, filter="data")
    return str(target / SOURCES)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision", help="what to compare the working tree with")
    parser.add_argument("--all", action="store_true", help="every kernel, in minutes")
    parser.add_argument("--architecture", default="sm_90", choices=DEVICES)
    parser.add_argument("--only", default="", help="a regular expression of the names that are compared")
    parser.add_argument(
        "--show", action="store_true", help="print the instructions that differ (needs nvdisasm)"
    )
    parser.add_argument("--compile", nargs=2, metavar=("SOURCES", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_all(options.compile[0], Path(options.compile[1]), options.architecture, options.all)
        return 0
    commit = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", f"{options.revision}^{{commit}}"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    kept = Path(tempfile.gettempdir()) / "softdtw_sass" / commit
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        sides = [
            (sources_at(commit, kept), kept / options.architecture),
            (str(ROOT / SOURCES), Path(temporary)),
        ]
        for sources, folder in sides:
            command = [sys.executable, __file__, *sys.argv[1:], "--compile", sources, str(folder)]
            subprocess.run(command, check=True)
        folders = [folder for _, folder in sides]
        old, new = (dict.fromkeys((folder / "names").read_text().split()) for folder in folders)
        for name in old.keys() ^ new.keys():
            print(f"{name}: only {'before' if name in old else 'after'}")
        both = [name for name in old if name in new and re.search(options.only, name)]
        differing = 0
        for name in both:
            paths = [folder / f"{name}.cubin" for folder in folders]
            found = difference(*(code_of(path.read_bytes()) for path in paths))
            if found is None:
                continue
            differing += 1
            print(f"{name}: {found}")
            if options.show and shutil.which("nvdisasm"):
                lines = difflib.unified_diff(
                    *(list(disassembled(path)) for path in paths), "before", "after", n=1
                )
                print("\n".join(itertools.islice((line.rstrip() for line in lines), 80)))
    print(f"{len(both) - differing} of {len(both)} kernels are the same to the instruction")
    return int(bool(differing or old.keys() ^ new.keys()))


if __name__ == "__main__":
    sys.exit(main())
