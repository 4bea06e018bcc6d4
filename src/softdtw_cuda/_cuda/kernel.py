"""What a compiled kernel is: its source, the constants it is built with, and the memory that it takes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

INPUT_CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}

COST, DIRECT, UNIVARIATE, TENSOR = 0, 1, 2, 3
"""The kernels' MODE: a given cost matrix, direct differences, D = 1, tensor cores."""

FORWARD, BACKWARD, RERUN, FORWARD_BACKWARD = "forward", "backward", "rerun", "forward_backward"
"""Parts of a source: kernels that are compiled and launched by themselves."""

TILED, UNIVARIATE_SOURCE, PAIR, MATRIX, WIDE_SOURCE = "tiled", "univariate", "pair", "matrix", "wide"
"""Sources: costs made tile by tile beside the walk; one warp per strip for D = 1; one warp per pair; one warp
per cost matrix; wide numbers."""

MOST_CENTRES = 1024
"""Features whose centres a sliced kernel keeps."""

ANY_ROWS, WHOLE_QUADS, WHOLE_SLICES = 0, 1, 2
"""The kernels' FIT: how rows of features can be read."""

PACKED_LANE_BYTES = 22
"""What a checkpoint of two rows of a lane takes when it is packed."""

PAIR_WINDOW = 128
"""Columns of y that a warp which walks a whole pair has in shared memory."""


class AnyKernel:
    """A compiled source with its constants, as the compiler and the driver see it."""

    source: str

    @functools.cached_property
    def tag(self) -> str:
        """A name of its own. Looked up several times per call, and quicker to hash than a dozen fields."""
        return repr(self)

    def name(self, part: str) -> str:
        """Of one of the parts of the source."""
        return f"{self.source}_{part}"

    def threads(self, part: str) -> int:
        """Of a block of one of the parts."""
        raise NotImplementedError

    def shared(self, part: str) -> int:
        """Bytes of shared memory of a block of one of the parts."""
        raise NotImplementedError

    def defines(self) -> dict[str, int]:
        """Macros that the source expects."""
        raise NotImplementedError


@dataclass(frozen=True)
class ScaleKernel(AnyKernel):
    """The backward of problems whose forward kept the gradients: their product with that of the values."""

    source = "scale"
    parts = (BACKWARD,)

    def threads(self, part: str) -> int:
        return 256

    def shared(self, part: str) -> int:
        return 0

    def defines(self) -> dict[str, int]:
        return {"INPUT": INPUT_CODES[torch.float32], "SCALE_THREADS": self.threads(BACKWARD)}

    def blocks(self, numbers: int) -> int:
        """Of a launch: threads have four numbers each, or less than a block more."""
        return (numbers + 4 * 256 - 1) // (4 * 256)


SCALE = ScaleKernel()


class StripKernel(AnyKernel):
    """What the kernels of both orders have in common: what they save of a pair."""

    checkpoint: int
    """Steps from one saved state of the lanes to the next."""

    @property
    def strip_rows(self) -> int:
        raise NotImplementedError

    @property
    def word_bytes(self) -> int:
        """Of a cell in a strip's bottom row."""
        raise NotImplementedError

    @property
    def checkpoint_bytes(self) -> int:
        """Of a strip's lane states at a checkpoint: two anti-diagonals."""
        raise NotImplementedError

    def strips(self, n: int) -> int:
        """Strips of a series of n rows."""
        return (n + self.strip_rows - 1) // self.strip_rows

    def checkpoints(self, m: int, bandwidth: int, rows: int | None = None) -> int:
        """Checkpoints kept of a strip, whose steps run from its first column to its last plus its rows.

        The first is where the walk starts, and is not kept. A pair's last strip may have fewer `rows`.
        """
        every = (m + (self.strip_rows if rows is None else rows) - 2) // self.checkpoint
        if bandwidth < 0:
            return every
        narrow: int = torch.sym_min(every, (2 * bandwidth + 2 * self.strip_rows) // self.checkpoint + 1)
        return narrow

    def bound_columns(self, m: int, bandwidth: int) -> int:
        """Columns of a strip's bottom row."""
        columns: int = m if bandwidth < 0 else torch.sym_min(m, 2 * bandwidth + 1)
        return columns

    def states_bytes(self, n: int, m: int, bandwidth: int) -> int:
        """Lane states of one pair."""
        before_last = self.strips(n) - 1
        count = before_last * self.checkpoints(m, bandwidth)
        count += self.checkpoints(m, bandwidth, n - before_last * self.strip_rows)
        return count * self.checkpoint_bytes

    def pair_bytes(self, n: int, m: int, bandwidth: int) -> int:
        """Everything saved of one pair: states, then the bottom row of each strip but the last."""
        bounds = (self.strips(n) - 1) * self.bound_columns(m, bandwidth) * self.word_bytes
        return self.states_bytes(n, m, bandwidth) + bounds


@dataclass(frozen=True)
class Kernel(StripKernel):
    """One compiled source with its constants."""

    source: str
    mode: int
    input_code: int
    banded: bool
    lane_rows: int
    checkpoint: int
    subwalk: int = 0
    packed: bool = False
    dims: int = 1
    sliced: bool = False
    fit: int = 0
    forward_blocks: int = 1

    @property
    def wide(self) -> bool:
        """Double fractions and 64-bit exponents."""
        return self.source == WIDE_SOURCE

    @property
    def walks_whole_pairs(self) -> bool:
        """A block walks all strips of a pair, one after the other."""
        return self.source in (PAIR, MATRIX)

    @property
    def strip_rows(self) -> int:
        return 32 * self.lane_rows

    @property
    def may_keep_gradients(self) -> bool:
        """Whether it also serves problems whose forward computes the gradients."""
        return self.input_code == INPUT_CODES[torch.float32] and self.mode != COST

    @property
    def parts(self) -> tuple[str, ...]:
        """The kernels in the source: `forward` and `backward`; `rerun` where flagged pairs are walked again;
        `forward_backward` for both passes over small pairs, which are float32, of one strip."""
        if self.wide:
            return FORWARD, BACKWARD, RERUN
        if self.walks_whole_pairs:
            return FORWARD, BACKWARD
        has_both = self.may_keep_gradients and not self.sliced and self.dims <= 32
        return (FORWARD, BACKWARD, FORWARD_BACKWARD) if has_both else (FORWARD, BACKWARD)

    def threads(self, part: str) -> int:
        """Of a block of one of `parts`."""
        if self.source != TILED:
            return 32
        return 160 if part == FORWARD else 512

    def shared(self, part: str) -> int:
        """Bytes of shared memory of a block of one of `parts`."""
        return self.forward_shared if part == FORWARD else self.backward_shared

    @property
    def forward_shared(self) -> int:
        return _forward_shared(self).size

    @property
    def backward_shared(self) -> int:
        return _backward_shared(self).size

    @property
    def word_bytes(self) -> int:
        """A scaled number: fraction and exponent."""
        return 16 if self.wide else 8

    @property
    def checkpoint_bytes(self) -> int:
        return 32 * PACKED_LANE_BYTES if self.packed else 2 * self.strip_rows * self.word_bytes

    def defines(self) -> dict[str, int]:
        """Macros that the sources expect."""
        macros = {
            "MODE": self.mode,
            "INPUT": self.input_code,
            "BANDED": int(self.banded),
            "LANE_ROWS": self.lane_rows,
            "CHECKPOINT": self.checkpoint,
            "FORWARD_SHARED": self.forward_shared,
            "BACKWARD_SHARED": self.backward_shared,
        }
        if self.source == PAIR:
            macros |= {"DIMS": self.dims, "PACKED": int(self.packed)}
        elif self.source == MATRIX:
            macros["PACKED"] = int(self.packed)
        elif self.source == TILED:
            macros |= {"DIMS": self.dims, "SLICED": int(self.sliced), "FIT": self.fit}
            macros["FORWARD_BLOCKS"] = self.forward_blocks
        else:
            macros["SUBWALK"] = self.subwalk
        if self.source == UNIVARIATE_SOURCE:
            macros["PACKED"] = int(self.packed)
        return macros


def padded(size: int, to: int = 16) -> int:
    return (size + to - 1) // to * to


# ---- shared memory: the structures of the kernels, member by member, which static assertions there compare


@dataclass(frozen=True)
class CType:
    """Size and alignment of a C++ type."""

    size: int
    alignment: int

    def __mul__(self, count: int) -> CType:
        """An array."""
        return CType(self.size * count, self.alignment)

    def aligned(self, to: int) -> CType:
        """A member with `alignas(to)`."""
        return CType(self.size, max(self.alignment, to))


WORD = CType(4, 4)
"""float, i32, u32"""
_FEATURES = CType(16, 8)
_ORDER = WORD * 2


def struct_of(*members: CType, alignment: int = 1) -> CType:
    """A struct with these members, or with `alignas`."""
    size = 0
    for member in members:
        size = padded(size, member.alignment) + member.size
        alignment = max(alignment, member.alignment)
    return CType(padded(size, alignment), alignment)


def union_of(*members: CType) -> CType:
    """A union of these members."""
    alignment = max(member.alignment for member in members)
    return CType(padded(max(member.size for member in members), alignment), alignment)


STRIP = struct_of(WORD * 11, CType(3, 1))
_SCHEDULE = struct_of(STRIP, WORD * 10, CType(2, 1))


def _vector(k: Kernel, reals: int) -> CType:
    """Numbers of a lane that are read in one access."""
    size = (8 if k.wide else 4) * reals
    return CType(size, size)


def _planes(k: Kernel, rows: int) -> CType:
    """Rows of features as operands of tensor cores, in two planes for float32."""
    planes = 2 if k.input_code == 0 else 1
    return (CType(2, 2) * (planes * rows * (k.dims + 8))).aligned(16)


def _normalization(k: Kernel) -> CType:
    if k.mode != TENSOR:
        return WORD
    own = (
        (WORD * MOST_CENTRES).aligned(16) if k.sliced else struct_of(_planes(k, k.strip_rows), WORD * k.dims)
    )
    return struct_of(own, WORD * k.strip_rows, WORD, _FEATURES.aligned(16))


def _cost_shared(k: Kernel) -> CType:
    if k.mode == COST:
        return WORD
    if k.mode == DIRECT:
        return WORD * (32 * k.dims)
    if not k.sliced:
        return struct_of(_planes(k, 32), WORD * 32)
    return struct_of(_planes(k, 2 * 32), WORD * 32, _planes(k, 2 * k.strip_rows), WORD * k.dims)


def _grad_shared(k: Kernel) -> CType:
    if k.mode == COST:
        return WORD
    if k.mode == DIRECT:
        return WORD * ((k.strip_rows + 32) * k.dims + 4 * k.strip_rows * (k.dims + 1))
    if not k.sliced:
        return struct_of(_planes(k, 32))
    return struct_of(_planes(k, 2 * k.strip_rows), WORD * k.dims, _planes(k, 2 * 32))


def _ring(k: Kernel, chunks: int) -> CType:
    """Steps of all rows of a strip."""
    stride = k.strip_rows + (4 if k.mode == TENSOR else 2)
    return (WORD * (chunks * 32 * stride)).aligned(16)


def _window(k: Kernel, columns: int) -> CType:
    """Columns of y, in vectors of up to four features."""
    return _vector(k, min(k.dims, 4)) * (columns * max(k.dims // 4, 1))


def _wide_costs(k: Kernel) -> CType:
    """Costs of eight steps."""
    return _vector(k, k.lane_rows) * (8 * 32)


def _forward_shared(k: Kernel) -> CType:
    rows = _vector(k, 2) * 64
    if k.source == PAIR:
        return struct_of(_window(k, PAIR_WINDOW), rows, alignment=64)
    if k.source == MATRIX:
        return struct_of(_vector(k, k.lane_rows) * (32 * 33), rows, alignment=64)
    if k.source == WIDE_SOURCE:
        return struct_of(rows, _wide_costs(k), alignment=64)
    if k.source == UNIVARIATE_SOURCE:
        return struct_of(rows, WORD * (k.strip_rows + 32), alignment=64)
    return struct_of(_ring(k, k.lane_rows + 2), _normalization(k), _cost_shared(k), rows, STRIP, WORD)


def _backward_shared(k: Kernel) -> CType:
    shares, left, state = _vector(k, 2 * k.lane_rows), _vector(k, k.lane_rows), _vector(k, 2)
    if k.source == PAIR:
        windows = _window(k, PAIR_WINDOW), _window(k, 32)
        return struct_of(shares * 1024, *windows, state * 32, WORD * 64, alignment=64)
    if k.source == MATRIX:
        return struct_of(shares * (32 * 33), state * 32, WORD * 64, alignment=64)
    if k.source != TILED:
        members = [shares * (k.subwalk * 32), *([left * (k.subwalk * 32)] if k.banded else [])]
        members += [state * (2 * k.subwalk), state * k.checkpoint]
        if k.source == WIDE_SOURCE:
            members.append(_wide_costs(k))
            members.append(state * (2 * k.strip_rows * (k.checkpoint // k.subwalk - 2)))
        else:
            members.append(WORD * (k.strip_rows + k.checkpoint))
        return struct_of(*members, alignment=64)
    chunks = k.checkpoint // 32
    slots = chunks + 1
    rings = _ring(k, k.lane_rows + 2 * chunks), _ring(k, k.lane_rows + 2)
    left_slots = slots if k.lane_rows == 2 or k.banded else 1
    cells = shares * (slots * 1024), left * (left_slots * 1024)
    making = _normalization(k), _cost_shared(k), _grad_shared(k)
    return struct_of(*rings, *cells, *making, state * 32, WORD * 64, WORD * 8, _ORDER * 2, _SCHEDULE, WORD)
