"""The CPU backend: launches the kernels, and chooses between narrow and wide arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from softdtw_cuda._cpu import kernels
from softdtw_cuda._cpu.compile import compile_for
from softdtw_cuda._cpu.config import saved_bytes, saved_edge_cells
from softdtw_cuda._cpu.problem import Array, Arrays, arrays_of, order_of_tiles
from softdtw_cuda._cpu.scratch import borrowed, zeroed_bytes
from softdtw_cuda._cpu.threads import run, threads_for
from softdtw_cuda._problem import Problem
from softdtw_cuda._torch_compat import materialized

LOG2_E = 1.4426950408889634

SLICE = 200_000_000
"""Cells times (dimensions + 8) after which a worker returns so that signals are handled: 10 to 20 ms of a
forward on one 2020s core, which a call from Python (30 us) does not slow."""
BACKWARD_SLICE = SLICE // 4
"""A cell of the backward takes up to four times as long."""


def _needs_wide(problem: Arrays, n: int) -> Array:
    """Which float32 samples could leave 32-bit exponents: |s| < 2^22 a cell, |n| < 2^29 a path."""
    tickets = np.zeros(1, np.int64)
    if problem.is_cost:
        threads = threads_for(3 * problem.cells)
        blocks = -(-n // 64)
        largest = np.zeros(problem.batch * blocks)

        arguments: tuple[Any, ...] = (
            problem.x,
            problem.x_stride,
            problem.m,
            problem.x_lengths,
            problem.y_lengths,
            problem.tiles.bandwidth,
            blocks,
            tickets,
            largest,
            SLICE,
        )
        compile_for(kernels.largest_cost_worker, problem.dtype, arguments)
        run(threads, lambda worker: kernels.largest_cost_worker(*arguments))
        largest = largest.reshape(problem.batch, blocks).max(1)
    else:
        threads = min(threads_for(16 * problem.batch * (n + problem.m) * problem.d), problem.batch)
        centres: Array = np.empty(threads * problem.d, problem.float_type)
        largest = np.zeros(problem.batch)

        arguments = (
            problem.x,
            problem.x_stride,
            problem.y,
            problem.y_stride,
            problem.d,
            problem.x_lengths,
            problem.y_lengths,
            tickets,
            centres,
            largest,
            SLICE,
        )
        compile_for(kernels.largest_distance_worker, problem.dtype, (*arguments, 0))
        run(threads, lambda worker: kernels.largest_distance_worker(*arguments, worker))
    steps = largest * (LOG2_E / problem.gamma)
    path = problem.x_lengths + problem.y_lengths
    wide: Array = ~((steps < 2.0**22) & (steps * path < 2.0**29))
    return wide


# -------------------------------------------------------------------------------------------------- kernels
def _scratch_sizes(problem: Arrays, backward: bool) -> tuple[int, int]:
    edge, lanes = problem.tiles.edge, problem.lanes
    span, plane = edge + 3 * lanes, (2 * edge + 3 * lanes) * (edge + lanes)
    floats = (edge + 4 * lanes) * (edge + lanes) + plane + 3 * span
    integers = 3 * span
    if backward:
        padded = -(-problem.d // lanes) * lanes
        floats += 3 * plane + 9 * span + 2 * edge + max((edge + 1) * lanes, 4 * edge * padded)
        integers += 2 * (edge // 4) ** 2
    return floats, integers


def _split_state(
    state: Array, problem: Arrays, n: int, bandwidth: int
) -> tuple[Array, Array, Array, Array, int]:
    """bottom f, bottom n, right f, right n out of the state's bytes, and the cells a pair takes in each."""
    cells = int(saved_edge_cells(n, problem.m, problem.dtype, bandwidth))
    floats, integers = state.view(problem.float_type), state.view(problem.int_type)
    quarter = problem.batch * cells
    return (
        floats[:quarter],
        integers[quarter : 2 * quarter],
        floats[2 * quarter : 3 * quarter],
        integers[3 * quarter : 4 * quarter],
        cells,
    )


def _by_tile(problem: Arrays, threads: int) -> bool:
    return threads > 1 and problem.batch < 2 * threads and problem.tiles.rows * problem.tiles.kept > 1


def _forward(problem: Arrays, n: int, bandwidth: int, save: bool) -> tuple[Tensor, Tensor]:
    tiles = problem.tiles
    threads = threads_for(problem.cells * (problem.d + 8))
    by_tile = _by_tile(problem, threads)
    threads = threads if by_tile else min(threads, problem.batch)
    slots = problem.batch if by_tile else threads
    value = torch.empty(problem.batch, dtype=problem.dtype, device="cpu")
    if save:
        # Tiles at the edges leave bytes unwritten; equal calls give equal states all the same.
        state = zeroed_bytes(saved_bytes(problem.batch, n, problem.m, problem.dtype, bandwidth))
        bottom_f, bottom_n, right_f, right_n, saved = _split_state(state.numpy(), problem, n, bandwidth)
    else:
        state = torch.empty(0, dtype=torch.uint8, device="cpu")
        saved = max(tiles.rows, tiles.columns) * tiles.edge
        bottom_f, right_f = np.empty((2, slots * saved), problem.float_type)
        bottom_n, right_n = np.empty((2, slots * saved), problem.int_type)
    corners_f: Array = np.empty(slots * tiles.rows, problem.float_type)
    corners_n: Array = np.empty(slots * tiles.rows, problem.int_type)
    packed_stride = tiles.columns * tiles.edge * problem.d
    rows, columns = order_of_tiles(tiles.rows, tiles.columns, tiles.radius, by_tile, False)
    tickets = np.zeros(1, np.int64)
    resume = np.full(2 * threads, -1, np.int64)
    flags = np.zeros(problem.batch * tiles.rows * tiles.columns if by_tile else 1, np.int32)
    floats, integers = _scratch_sizes(problem, False)
    value_array = value.numpy()
    common: tuple[Any, ...] = problem.common()
    with (
        borrowed(threads, floats, problem.float_type) as scratch,
        borrowed(threads, integers, problem.int_type) as scratch_n,
        borrowed(1, slots * packed_stride, problem.float_type) as (packed,),
    ):
        before: tuple[Any, ...] = (
            *common,
            tickets,
            rows,
            columns,
            by_tile,
            save,
            value_array,
            bottom_f,
            bottom_n,
            right_f,
            right_n,
            saved,
            corners_f,
            corners_n,
            tiles.rows,
            packed,
            packed_stride,
            flags,
            resume,
            SLICE,
        )

        def arguments(worker: int) -> tuple[Any, ...]:
            return (*before, worker, scratch[worker], scratch_n[worker])

        compile_for(kernels.forward_worker, problem.dtype, arguments(0))
        run(threads, lambda worker: kernels.forward_worker(*arguments(worker)))
    return value, state


def _backward(
    problem: Arrays,
    n: int,
    bandwidth: int,
    grad: Tensor,
    value: Tensor,
    state: Tensor,
    need_x: bool,
    need_y: bool,
    gx: Array,
    gx_stride: int,
    gy: Array,
    gy_stride: int,
) -> None:
    tiles = problem.tiles
    threads = threads_for(problem.cells * (problem.d + 8))
    by_tile = _by_tile(problem, threads)
    threads = threads if by_tile else min(threads, problem.batch)
    slots = problem.batch if by_tile else threads
    bottom_f, bottom_n, right_f, right_n, saved = _split_state(
        state.contiguous().numpy(), problem, n, bandwidth
    )
    upward: Array = np.empty(slots * tiles.columns * tiles.edge, problem.float_type)
    leftward: Array = np.empty(slots * tiles.rows * tiles.edge, problem.float_type)
    cornerward: Array = np.empty(slots * (tiles.rows + tiles.columns), problem.float_type)
    packed_stride = tiles.columns * tiles.edge * problem.d
    rows, columns = order_of_tiles(tiles.rows, tiles.columns, tiles.radius, by_tile, True)
    tickets = np.zeros(1, np.int64)
    resume = np.full(2 * threads, -1, np.int64)
    flags = np.zeros(problem.batch * tiles.rows * tiles.columns if by_tile else 1, np.int32)
    floats, integers = _scratch_sizes(problem, True)
    gradient = materialized(grad.detach()).to(problem.dtype).contiguous().numpy()
    values = value.detach().to(problem.dtype).contiguous().numpy()
    # Mass too small to matter beside any other makes denormal numbers, which are slow.
    smallest = 2.0**-100 if problem.dtype == torch.float32 else 2.0**-900
    common: tuple[Any, ...] = problem.common()
    with (
        borrowed(threads, floats, problem.float_type) as scratch,
        borrowed(threads, integers, problem.int_type) as scratch_n,
        borrowed(1, slots * packed_stride, problem.float_type) as (packed,),
    ):
        before: tuple[Any, ...] = (
            *common,
            tickets,
            rows,
            columns,
            by_tile,
            gradient,
            values,
            bottom_f,
            bottom_n,
            right_f,
            right_n,
            saved,
            upward,
            leftward,
            cornerward,
            packed,
            packed_stride,
            flags,
            resume,
            BACKWARD_SLICE,
        )
        after = (
            smallest,
            need_x,
            need_y,
            gx,
            gx_stride,
            gy,
            gy_stride,
        )

        def arguments(worker: int) -> tuple[Any, ...]:
            return (*before, worker, scratch[worker], scratch_n[worker], *after)

        compile_for(kernels.backward_worker, problem.dtype, arguments(0))
        run(threads, lambda worker: kernels.backward_worker(*arguments(worker)))


# --------------------------------------------------------------------------------------------------- backend
def _computed(tensor: Tensor) -> Tensor:
    """In float32 for float16 and bfloat16."""
    tensor = materialized(tensor)
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)


def _computable(problem: Problem) -> Problem:
    y = None if problem.y is None else _computed(problem.y)
    return problem._replace(x=_computed(problem.x), y=y)


def _picked(problem: Problem, samples: Tensor) -> Problem:
    """The chosen samples in float64, which has a wide exponent; a broadcast side stays one series."""

    def side(tensor: Tensor) -> Tensor:
        return (tensor if tensor.shape[0] < problem.batch else tensor[samples]).to(torch.float64)

    def of(lengths: Tensor | None) -> Tensor | None:
        return None if lengths is None else lengths[samples]

    return problem._replace(
        x=side(problem.x),
        y=None if problem.y is None else side(problem.y),
        x_lengths=of(problem.x_lengths),
        y_lengths=of(problem.y_lengths),
    )


def _beyond_range(arrays: Arrays, n: int) -> Tensor:
    """The samples that need wide exponents."""
    if arrays.dtype == torch.float64:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.from_numpy(np.flatnonzero(_needs_wide(arrays, n)))


def state_bytes(problem: Problem) -> int:
    """Size of the state that `forward` saves."""
    return saved_bytes(problem.batch, problem.n, problem.m, problem.x.dtype, problem.bandwidth)


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Values (B,) and saved state. A cost of -inf gives NaN."""
    problem = problem.gathered()
    problem = _computable(problem)
    arrays = arrays_of(problem)
    value, state = _forward(arrays, problem.n, problem.bandwidth, problem.needs_gradient)
    samples = _beyond_range(arrays, problem.n)
    if len(samples):
        wide = _picked(problem, samples)._replace(need_x=False, need_y=False)
        value[samples] = forward(wide)[0].to(value.dtype)
    return value, state


def backward(problem: Problem, grad: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients, one per pair."""
    asked = problem
    problem = _computable(problem.gathered())
    arrays = arrays_of(problem)
    batch, (n, width) = problem.batch, problem.x.shape[1:]
    gx = problem.x.new_zeros((batch, n, width) if problem.need_x else (0,))
    gy = problem.x.new_zeros((batch, problem.m, width) if problem.need_y else (0,))
    samples = _beyond_range(arrays, n)
    # A zero gradient makes the kernel pass over the samples that the wide kernels will compute.
    narrow = grad.index_fill(0, samples, 0.0) if len(samples) else grad
    _backward(
        arrays,
        n,
        problem.bandwidth,
        narrow,
        value,
        state,
        problem.need_x,
        problem.need_y,
        gx.view(-1).numpy(),
        n * width,
        gy.view(-1).numpy(),
        problem.m * width,
    )
    if len(samples):
        wide = _picked(problem, samples)
        # The saved state is narrow: these few samples run forward once more.
        wide_gx, wide_gy = backward(wide, grad[samples].to(torch.float64), *forward(wide))
        if problem.need_x:
            gx[samples] = wide_gx.to(gx.dtype)
        if problem.need_y:
            gy[samples] = wide_gy.to(gy.dtype)
    return (
        gx.to(asked.gradient_dtype(asked.x)) if asked.need_x else asked.no_gradient(),
        asked.no_gradient() if asked.y is None or not asked.need_y else gy.to(asked.gradient_dtype(asked.y)),
    )
