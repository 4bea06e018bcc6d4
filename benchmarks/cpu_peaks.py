"""What a CPU can do at most, by simple loops: arithmetic on vectors in registers, and copies of memory.

The vectors are those of the kernels (`softdtw_cuda._cpu.vectors`), in float32. Each figure is the best of
several runs, with a thread on every core that torch uses.
"""

# Numba is annotated in parts or not at all, differently from one version to the next.
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch

from softdtw_cuda._cpu.threads import run
from softdtw_cuda._cpu.vectors import VECTOR_BYTES, lanes_of, vfma, vload, vsplat, vstore

LANES = VECTOR_BYTES // 4
CHAINS = 10
"""Independent sums: enough for the latency of an instruction, few enough for the registers."""
STEPS = 1_000_000
RUNS = 30
COPIED = 1 << 28
"""Bytes: far more than the caches hold."""


@numba.njit(nogil=True)
def _multiply_adds(sums: Any, steps: int) -> None:
    """Ten multiply-adds a step."""
    n = lanes_of(sums)
    factor, term = vsplat(sums, 0.999), vsplat(sums, 0.001)
    a, b, c, d, e = (
        vload(sums, 0),
        vload(sums, n),
        vload(sums, 2 * n),
        vload(sums, 3 * n),
        vload(sums, 4 * n),
    )
    f, g, h = vload(sums, 5 * n), vload(sums, 6 * n), vload(sums, 7 * n)
    i, j = vload(sums, 8 * n), vload(sums, 9 * n)
    for _ in range(steps):
        a, b = vfma(a, factor, term), vfma(b, factor, term)
        c, d = vfma(c, factor, term), vfma(d, factor, term)
        e, f = vfma(e, factor, term), vfma(f, factor, term)
        g, h = vfma(g, factor, term), vfma(h, factor, term)
        i, j = vfma(i, factor, term), vfma(j, factor, term)
    vstore(sums, 0, a + b + c + d + e + f + g + h + i + j)


@numba.njit(nogil=True)
def _instructions(sums: Any, steps: int) -> None:
    """Five multiply-adds and five additions a step, which most processors issue side by side."""
    n = lanes_of(sums)
    factor, term = vsplat(sums, 0.999), vsplat(sums, 0.001)
    a, b, c, d, e = (
        vload(sums, 0),
        vload(sums, n),
        vload(sums, 2 * n),
        vload(sums, 3 * n),
        vload(sums, 4 * n),
    )
    f, g, h = vload(sums, 5 * n), vload(sums, 6 * n), vload(sums, 7 * n)
    i, j = vload(sums, 8 * n), vload(sums, 9 * n)
    for _ in range(steps):
        a, f = vfma(a, factor, term), f + term
        b, g = vfma(b, factor, term), g + term
        c, h = vfma(c, factor, term), h + term
        d, i = vfma(d, factor, term), i + term
        e, j = vfma(e, factor, term), j + term
    vstore(sums, 0, a + b + c + d + e + f + g + h + i + j)


def _rate(loop: Callable[[Any, int], None], threads: int) -> float:
    """Lanes of instructions a second of all threads together."""
    sums = [np.random.default_rng(k).random(CHAINS * LANES, np.float32) for k in range(threads)]
    loop(sums[0], 1)

    def work(worker: int) -> bool:
        loop(sums[worker], STEPS)
        return False

    return max(CHAINS * LANES * STEPS * threads / _seconds(lambda: run(threads, work)) for _ in range(RUNS))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def multiply_adds(threads: int) -> float:
    """Multiply-adds a second."""
    return _rate(_multiply_adds, threads)


def instructions(threads: int) -> float:
    """Lanes of arithmetic vector instructions a second."""
    return _rate(_instructions, threads)


def copied_bytes() -> float:
    """Bytes a second, read and written, while copying."""
    source, target = torch.zeros(COPIED // 4), torch.zeros(COPIED // 4)
    return max(2 * COPIED / _seconds(lambda: target.copy_(source)) for _ in range(RUNS))
