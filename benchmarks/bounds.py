"""The least time that the algorithm needs, from what the hardware can do.

A GPU's rates are those of its data sheet, a CPU's those that simple loops reach on it (`cpu_peaks.py`).

On a GPU

Whatever the order of work, the forward must, for every cell,

    products    form a product of 2 D floating-point operations for its distance. In float32 that takes three
                16-bit products on the tensor cores, with 16-bit inputs one. With D <= 16 distances are direct
                differences and cost no such products.
    cells       issue about 20 instructions, one for each of 32 lanes at a time

The backward may leave out pruned cells, so it adds nothing to these. Both must

    chain       walk N + M - 1 anti-diagonals, each step waiting for the last, about 50 ns

The three can overlap at best, so the limit is the slowest of them.

On a CPU the forward must, for every cell,

    instructions    issue about 40 arithmetic vector instructions for the recurrence, and two (a difference
                    and a multiply-add) for each feature; one does as many cells as a vector has lanes
    multiply-adds   13 of these, and one for each feature, are products or multiply-adds

and both passes must read the series and write their gradients once (memory). Here too the backward adds
no arithmetic to the limit, since it may leave out pruned cells.
"""

from __future__ import annotations

from dataclasses import dataclass

INSTRUCTIONS_PER_CELL = 20
STEP_S = 50e-9
DIRECT_UP_TO = 16


CPU_INSTRUCTIONS_PER_CELL = 40
CPU_MULTIPLY_ADDS_PER_CELL = 13


@dataclass(frozen=True)
class Cpu:
    """Of all threads, in float32: lanes of instructions and of multiply-adds, and bytes, per second."""

    instructions: float
    multiply_adds: float
    bytes: float


@dataclass(frozen=True)
class Gpu:
    """Peak rates: dense 16-bit products with float32 sums, and warp instructions, per second."""

    half_flops: float
    warp_instructions: float


_HOPPER = Gpu(half_flops=989e12, warp_instructions=132 * 4 * 1.83e9)
GPUS = {"NVIDIA H200": _HOPPER, "NVIDIA H100 80GB HBM3": _HOPPER}
"""Cards for which the 50 ns of a step are known."""


def least_seconds(
    gpu: Gpu, batch: int, n: int, m: int, d: int, dtype: str, backward: bool = True
) -> dict[str, float]:
    """Least seconds of forward + backward, or of forward alone, that each of the three resources needs."""
    cells = batch * n * m
    products = 3 if dtype == "float32" else 1
    flops = 0 if d <= DIRECT_UP_TO else products * 2 * d * cells
    return {
        "products": flops / gpu.half_flops,
        "cells": cells * INSTRUCTIONS_PER_CELL / 32 / gpu.warp_instructions,
        "chain": (2 if backward else 1) * (n + m - 1) * STEP_S,
    }


def least_cpu_seconds(
    cpu: Cpu, batch: int, n: int, m: int, d: int, backward: bool = True
) -> dict[str, float]:
    """Least seconds of forward + backward, or of forward alone, in float32, that each resource needs."""
    cells = batch * n * m
    return {
        "instructions": cells * (CPU_INSTRUCTIONS_PER_CELL + 2 * d) / cpu.instructions,
        "multiply-adds": cells * (CPU_MULTIPLY_ADDS_PER_CELL + d) / cpu.multiply_adds,
        "memory": 4 * batch * (n + m) * d * (2 if backward else 1) / cpu.bytes,
    }
