"""What NVRTC's assembler says of a kernel: registers, stack, spills, shared memory."""

from __future__ import annotations

import re
from concurrent.futures import Future
from typing import NamedTuple

from softdtw_cuda._cuda.compile import compile_source
from softdtw_cuda._cuda.kernel import AnyKernel


class Usage(NamedTuple):
    """What the assembler says of one function, per thread; static shared memory per block.

    A function that kernels call has their registers, and none of its own.
    """

    registers: int
    stack: int
    spilled: int
    shared: int


def usage_of(log: str) -> dict[str, Usage]:
    found = {}
    parts = re.split(r"Function properties for (\w+)", log)[1:]
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        stack, stores, loads = (
            int(re.search(rf"(\d+) bytes {word}", text)[1])  # type: ignore[index]  # None raises
            for word in ("stack frame", "spill stores", "spill loads")
        )
        registers = re.search(r"Used (\d+) registers", text)
        shared = re.search(r"(\d+) bytes smem", text)
        own = int(registers[1]) if registers else 0
        found[name] = Usage(own, stack, max(stores, loads), int(shared[1]) if shared else 0)
    return found


def compiled(architecture: str, kernel: AnyKernel, part: str) -> tuple[bytes, dict[str, Usage]]:
    log: list[str] = []
    binary = compile_source(kernel, part, architecture, log)
    return binary, usage_of(log[0])


Compilations = dict[tuple[str, AnyKernel, str], "Future[tuple[bytes, dict[str, Usage]]]"]
"""By architecture, kernel and part."""
