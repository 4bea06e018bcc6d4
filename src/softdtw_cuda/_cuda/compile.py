"""Kernel sources to binaries: NVRTC through cuda.core, with a cache on disk.

Each part of a kernel (forward, backward) is a binary of its own, so that they can be compiled side by side.
It is stored under a key of source text, options, architecture and compiler version (see `_cache_folder`):
whatever is unreadable, truncated or foreign is compiled again, and a folder that cannot be written is done
without.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path
from typing import Any

from .._cache_folder import cache_folder, read_cached, write_cached
from .kernel import BACKWARD, FORWARD, FORWARD_BACKWARD, RERUN, AnyKernel

_KERNELS = Path(__file__).parent / "kernels"
_PART_CODES = {FORWARD: 1, BACKWARD: 2, RERUN: 3, FORWARD_BACKWARD: 4}


@functools.cache
def source_text(name: str) -> str:
    """A kernel source with its includes, each named once, in place, so that the compiler needs no header."""
    text = (_KERNELS / name).read_text(encoding="utf-8")
    return re.sub(r'^#include "([\w.]+)"$', lambda found: source_text(found[1]), text, flags=re.MULTILINE)


def compiler_version() -> str:
    """Version of the NVRTC library that would be used."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def debug_macros() -> dict[str, int]:
    """Of a debug build: $SOFTDTW_CUDA_POLL_LIMIT is how often a wait may poll before it ends the launch.

    It then prints who waits for whom; see kernels/polling.cuh.
    """
    limit = os.environ.get("SOFTDTW_CUDA_POLL_LIMIT")
    return {"POLL_LIMIT": int(limit)} if limit else {}


def _options(kernel: AnyKernel, part: str) -> dict[str, Any]:
    macros = {**kernel.defines(), **debug_macros(), "PART": _PART_CODES[part]}
    return {
        "std": "c++17",
        "device_as_default_execution_space": True,  # older NVRTC asks for it on generic lambdas
        "define_macro": [(name, str(value)) for name, value in macros.items()],
    }


def cache_key(kernel: AnyKernel, part: str, architecture: str, compiler: str) -> str:
    """Names a binary by everything that it depends on."""
    options = repr(sorted(_options(kernel, part).items()))
    all_of_it = [source_text(f"{kernel.source}.cu"), options, architecture, compiler]
    return hashlib.sha256("\0".join(all_of_it).encode()).hexdigest()


def compile_source(kernel: AnyKernel, part: str, architecture: str, log: list[str] | None = None) -> bytes:
    """Compiles one part of a kernel for an architecture such as ``"sm_90"``; needs no GPU.

    Args:
        kernel: which source, and its constants.
        part: one of the kernel's parts.
        architecture: real architecture to make a binary for.
        log: receives the assembler's report on registers and spills, if given.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=architecture, ptxas_options=["-v"] if log is not None else None, **_options(kernel, part)
    )
    program = Program(source_text(f"{kernel.source}.cu"), "c++", options)
    if log is None:
        return bytes(program.compile("cubin").code)
    import io

    text = io.StringIO()
    binary = bytes(program.compile("cubin", logs=text).code)
    log.append(text.getvalue())
    return binary


def binary_of(kernel: AnyKernel, part: str, architecture: str) -> bytes:
    """The compiled part of a kernel, from the cache if it is there."""
    folder = cache_folder()
    if folder is None:
        return compile_source(kernel, part, architecture)
    path = folder / f"{cache_key(kernel, part, architecture, compiler_version())}.cubin"
    binary = read_cached(path)
    if binary is None:
        binary = compile_source(kernel, part, architecture)
        write_cached(path, binary)
    return binary
