"""The least time that the algorithm needs on a GPU, from what the card can do.

Whatever the order of work, the forward must, for every cell,

    products    form a product of 2 D floating-point operations for its distance. In float32 that takes three
                16-bit products on the tensor cores, with 16-bit inputs one. With D <= 16 distances are direct
                differences and cost no such products.
    cells       issue about 20 instructions, one for each of 32 lanes at a time

The backward may leave out pruned cells, so it adds nothing to these. Both must

    chain       walk N + M - 1 anti-diagonals, each step waiting for the last, about 50 ns

The three can overlap at best, so the limit is the slowest of them.
"""

from __future__ import annotations

from dataclasses import dataclass

INSTRUCTIONS_PER_CELL = 20
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
