"""The least time that the algorithm needs on a GPU, from what the card can do.

Forward and backward together must, whatever the order of work:

    products    form four products of 2 D floating-point operations a cell: the distances twice, once in each
                pass, and the gradients of x and of y. A float32 product takes three 16-bit products on the
                tensor cores. With 16-bit inputs the distances take one and the gradients, whose alignment
                keeps two planes, two. With D <= 16 they are direct differences and cost no such products.
    cells       issue about 70 instructions a cell, one for each of 32 lanes at a time
    chain       walk N + M - 1 anti-diagonals twice, each step waiting for the last, about 50 ns

The three can overlap at best, so the roof is the slowest of them.
"""

from __future__ import annotations

from dataclasses import dataclass

INSTRUCTIONS_PER_CELL = 70
STEP_S = 50e-9
DIRECT_UP_TO = 16


@dataclass(frozen=True)
class Gpu:
    """Peak rates: dense 16-bit products with float32 sums, and warp instructions, per second."""

    half_flops: float
    warp_instructions: float


_HOPPER = Gpu(half_flops=989e12, warp_instructions=132 * 4 * 1.83e9)
GPUS = {"NVIDIA H200": _HOPPER, "NVIDIA H100 80GB HBM3": _HOPPER}
"""Cards for which the 50 ns of a step are known."""


def least_seconds(gpu: Gpu, batch: int, n: int, m: int, d: int, dtype: str) -> dict[str, float]:
    """Least time of forward + backward that each of the three resources needs, in seconds."""
    cells = batch * n * m
    products = 12 if dtype == "float32" else 6
    flops = 0 if d <= DIRECT_UP_TO else products * 2 * d * cells
    return {
        "products": flops / gpu.half_flops,
        "cells": cells * INSTRUCTIONS_PER_CELL / 32 / gpu.warp_instructions,
        "chain": 2 * (n + m - 1) * STEP_S,
    }
