"""Launch choices of the kernels of second order, as pure functions: nothing here needs a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from . import config
from .config import Device
from .kernel import (
    BACKWARD,
    COST,
    DIRECT,
    FORWARD,
    INPUT_CODES,
    STRIP,
    WORD,
    CType,
    StripKernel,
    struct_of,
    union_of,
)

KINDS = {"tangents": 0, "matrix": 1, "features": 2, "position": 3}
"""The kernels' KIND: what Omega is."""

FORWARD_STEPS = 32
"""Steps that are made ready together in the forward."""
WEIGHT_STRIDE, WEIGHT_MARGIN = 33, 3
PROGRESS_BYTES = 16
"""What a strip of the backward publishes."""

LARGE_SHARED = 98304
"""Shared memory of a block from which on a checkpoint may have 64 steps of float32."""


@dataclass(frozen=True)
class DualKernel(StripKernel):
    """One compiled source with its constants, for `driver.Gpu`."""

    mode: int
    kind: str
    double: bool
    checkpoint: int
    pipelined: bool
    """Warps of the backward have roles of their own, and buffers between them."""
    source = "dual"
    strip_rows = 32
    parts = (FORWARD, BACKWARD)

    def threads(self, part: str) -> int:
        """Of a block of one of `parts`."""
        if part == FORWARD:
            return 32 + 4 * FORWARD_STEPS
        if not self.pipelined:
            return 4 * self.checkpoint
        return 2 * 32 + 4 * (self.checkpoint // 2) + 4 * self.checkpoint

    @property
    def real(self) -> int:
        """Bytes of a number."""
        return 8 if self.double else 4

    @property
    def dims(self) -> int:
        """Features that are in shared memory at a time."""
        return 16 if self.double else 32

    @property
    def word_bytes(self) -> int:
        """Also of a cell's weight and Omega."""
        return 8 + 2 * self.real

    def shared(self, part: str) -> int:
        """Bytes of shared memory of a block of one of `parts`: the structures of the kernels."""
        long, real = CType(8, 8), CType(self.real, self.real)
        four, alignment = (real * 4).aligned(16), 8 if self.double else 16
        entry = struct_of(long, real, real, alignment=alignment)  # and a strip's saved bottom row

        def slices(steps: int) -> CType:
            return struct_of((real * (32 * self.dims)).aligned(16), real * ((steps + 32) * self.dims))

        def making(steps: int) -> CType:
            return slices(steps) * (2 if self.kind == "tangents" else 1)

        if part == FORWARD:
            above = struct_of(struct_of(real, long), real, real)
            return struct_of(making(FORWARD_STEPS), entry * 2048, above * 64, WORD, alignment=16).size
        steps, buffers = self.checkpoint, 2 if self.pipelined else 1
        overlaid = struct_of if self.pipelined else union_of
        return struct_of(
            overlaid(real * (buffers * 5 * steps * 32), making(steps // buffers), slices(steps)),
            overlaid(entry * (steps * 32), four * (4 * steps * 4)),
            struct_of(real * (2 * (steps + 2 * WEIGHT_MARGIN) * WEIGHT_STRIDE), long * 32) * buffers,
            entry * steps,
            real * (4 * steps),
            STRIP,
            WORD * (4 + buffers),
            alignment=16,
        ).size

    @property
    def blocks(self) -> tuple[int, int]:
        """Of the forward and of the backward that a processor has room for."""
        if self.double:
            return 1 if self.kind == "tangents" else 2, 2
        return (3, 1) if self.pipelined else (2, 2)

    def defines(self) -> dict[str, int]:
        """Macros that the source expects."""
        return {
            "MODE": self.mode,
            "KIND": KINDS[self.kind],
            "INPUT": INPUT_CODES[torch.float64 if self.double else torch.float32],
            "CHECKPOINT": self.checkpoint,
            "DIMS": self.dims,
            "PIPELINED": int(self.pipelined),
            "FORWARD_SHARED": self.shared(FORWARD),
            "BACKWARD_SHARED": self.shared(BACKWARD),
            "FORWARD_BLOCKS": self.blocks[0],
            "BACKWARD_BLOCKS": self.blocks[1],
        }

    @property
    def checkpoint_bytes(self) -> int:
        return self.strip_rows * (16 + 4 * self.real)


@functools.lru_cache(maxsize=256)
def choose(mode: int, kind: str, double: bool, device: Device) -> DualKernel | None:
    """The kernel of a mode and a kind for a card; None where it has no room for one."""
    large = device.shared_bytes >= LARGE_SHARED
    if double and not large:
        return None
    pipelined = DualKernel(mode, kind, double, 64, True)
    if not double and pipelined.shared(BACKWARD) <= device.shared_bytes:
        return pipelined
    return DualKernel(mode, kind, double, 64 if large and not double else 32, False)


def dual_kernel(is_cost: bool, kind: str, dtype: torch.dtype) -> DualKernel | None:
    """The kernel for problems and directions of this kind; None where a card has no room for it."""
    return choose(COST if is_cost else DIRECT, kind, dtype == torch.float64, config.weakest_device())


def start_lag_of(batch: int) -> int:
    """A strip of the backward begins where the one so many before it in the walk found alignment weight.

    See `config.start_lag_of`: the fewer, the less is done for nothing.
    """
    return 1 if batch >= config.weakest_device().processors else 2


@dataclass(frozen=True)
class DualLayout:
    """Offsets into the state, in bytes: [counters | progress of strips | hand-off rows | pairs]."""

    progress: int
    rows: int
    row_bytes: int
    scratch: int
    """What has to be ones before each launch."""
    pairs: int
    pair_bytes: int
    total: int


def layout_of(kernel: DualKernel, batch: int, n: int, m: int, bandwidth: int, save: bool) -> DualLayout:
    """Where everything lies; sizes may be symbolic."""
    progress = 16
    rows = progress + batch * kernel.strips(n) * PROGRESS_BYTES
    row_bytes = m * 16 * (4 if kernel.double else 3)
    scratch = rows + batch * row_bytes
    pairs = (scratch + 127) // 128 * 128
    pair_bytes = kernel.pair_bytes(n, m, bandwidth) if save else 0
    return DualLayout(progress, rows, row_bytes, scratch, pairs, pair_bytes, pairs + batch * pair_bytes)
