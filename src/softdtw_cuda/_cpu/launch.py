"""Launcher of the CPU kernels: operators, and the choice between narrow and wide arithmetic.

Every function takes plain CPU tensors; shapes and lengths have been checked by the caller.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from softdtw_cuda._cpu import kernels
from softdtw_cuda._cpu.config import cost_state_bytes, fused_state_bytes, saved_edge_cells
from softdtw_cuda._cpu.notice import compiling
from softdtw_cuda._cpu.problem import Array, Problem, cost_problem, fused_problem, order_of_tiles
from softdtw_cuda._cpu.scratch import borrowed
from softdtw_cuda._cpu.threads import run, threads_for
from softdtw_cuda._memory import in_memory

__all__ = [
    "cost_backward",
    "cost_forward",
    "cost_state_bytes",
    "fused_backward",
    "fused_forward",
    "fused_state_bytes",
]

LOG2_E = 1.4426950408889634


def _needs_wide(problem: Problem, n: int) -> Array:
    """Which float32 samples could leave 32-bit exponents: |s| < 2^22 a cell, |n| < 2^29 a path."""
    tickets = np.zeros(1, np.int64)
    if problem.is_cost:
        threads = threads_for(3 * problem.cells)
        blocks = -(-n // 64)
        largest = np.zeros(problem.batch * blocks)

        def work(worker: int) -> bool:
            kernels.largest_cost_worker(
                problem.x,
                problem.x_stride,
                problem.m,
                problem.x_lengths,
                problem.y_lengths,
                problem.tiles.bandwidth,
                blocks,
                tickets,
                largest,
            )
            return False

        with compiling(kernels.largest_cost_worker, problem.x):
            run(threads, work)
        largest = largest.reshape(problem.batch, blocks).max(1)
    else:
        threads = min(threads_for(16 * problem.batch * (n + problem.m) * problem.d), problem.batch)
        centres: Array = np.empty(threads * problem.d, problem.float_type)
        largest = np.zeros(problem.batch)

        def work(worker: int) -> bool:
            kernels.largest_distance_worker(
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
                worker,
            )
            return False

        with compiling(kernels.largest_distance_worker, problem.x):
            run(threads, work)
    steps = largest * (LOG2_E / problem.gamma)
    path = problem.x_lengths + problem.y_lengths
    wide: Array = ~((steps < 2.0**22) & (steps * path < 2.0**29))
    return wide


# -------------------------------------------------------------------------------------------------- kernels
def _scratch_sizes(problem: Problem, backward: bool) -> tuple[int, int]:
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
    state: Array, problem: Problem, n: int, bandwidth: int
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


def _by_tile(problem: Problem, threads: int) -> bool:
    return threads > 1 and problem.batch < 2 * threads and problem.tiles.rows * problem.tiles.kept > 1


def _forward(problem: Problem, n: int, bandwidth: int, save: bool) -> tuple[Tensor, Tensor]:
    tiles = problem.tiles
    threads = threads_for(problem.cells * (problem.d + 8))
    by_tile = _by_tile(problem, threads)
    threads = threads if by_tile else min(threads, problem.batch)
    slots = problem.batch if by_tile else threads
    value = torch.empty(problem.batch, dtype=problem.dtype, device="cpu")
    if save:
        state = torch.empty(
            cost_state_bytes(problem.batch, n, problem.m, problem.dtype, bandwidth),
            dtype=torch.uint8,
            device="cpu",
        )
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
    pending = np.full(threads, -1, np.int64)
    flags = np.zeros(problem.batch * tiles.rows * tiles.columns if by_tile else 1, np.int32)
    floats, integers = _scratch_sizes(problem, False)
    value_array = value.numpy()
    kernel: Any = kernels.forward_worker
    common: tuple[Any, ...] = problem.common()
    with (
        borrowed(threads, floats, problem.float_type) as scratch,
        borrowed(threads, integers, problem.int_type) as scratch_n,
        borrowed(1, slots * packed_stride, problem.float_type) as (packed,),
    ):

        def work(worker: int) -> bool:
            again: bool = kernel(
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
                pending,
                worker,
                scratch[worker],
                scratch_n[worker],
            )
            return again

        with compiling(kernels.forward_worker, problem.x):
            run(threads, work)
    return value, state


def _backward(
    problem: Problem,
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
    pending = np.full(threads, -1, np.int64)
    flags = np.zeros(problem.batch * tiles.rows * tiles.columns if by_tile else 1, np.int32)
    floats, integers = _scratch_sizes(problem, True)
    gradient = in_memory(grad.detach()).to(problem.dtype).contiguous().numpy()
    values = value.detach().to(problem.dtype).contiguous().numpy()
    # Mass too small to matter beside any other makes denormal numbers, which are slow.
    smallest = 2.0**-100 if problem.dtype == torch.float32 else 2.0**-900
    kernel: Any = kernels.backward_worker
    common: tuple[Any, ...] = problem.common()
    with (
        borrowed(threads, floats, problem.float_type) as scratch,
        borrowed(threads, integers, problem.int_type) as scratch_n,
        borrowed(1, slots * packed_stride, problem.float_type) as (packed,),
    ):

        def work(worker: int) -> bool:
            again: bool = kernel(
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
                pending,
                worker,
                scratch[worker],
                scratch_n[worker],
                smallest,
                need_x,
                need_y,
                gx,
                gx_stride,
                gy,
                gy_stride,
            )
            return again

        with compiling(kernels.backward_worker, problem.x):
            run(threads, work)


def _picked(tensor: Tensor | None, samples: Tensor) -> Tensor | None:
    """The chosen samples of a batch; a broadcast one stays as it is."""
    if tensor is None or (tensor.dim() > 1 and tensor.shape[0] == 1):
        return tensor
    return tensor[samples]


def _float64(tensor: Tensor, samples: Tensor) -> Tensor:
    picked = _picked(tensor, samples)
    assert picked is not None
    return picked.to(torch.float64)


# ------------------------------------------------------------------------------------------------ operators
def _computed(tensor: Tensor) -> Tensor:
    """In float32 for float16 and bfloat16."""
    tensor = in_memory(tensor)
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)


def fused_forward(
    x: Tensor,
    y: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Squared Euclidean Soft-DTW of x (Bx, N, D) and y (By, M, D): value (B,) and saved state."""
    x, y = _computed(x), _computed(y)
    problem = fused_problem(x, y, gamma, bandwidth, x_lengths, y_lengths)
    value, state = _forward(problem, x.shape[1], bandwidth, save)
    if x.dtype == torch.float32:
        wide = _needs_wide(problem, x.shape[1])
        if wide.any():
            samples = torch.from_numpy(np.flatnonzero(wide))
            value[samples] = fused_forward(
                _float64(x, samples),
                _float64(y, samples),
                gamma,
                bandwidth,
                _picked(x_lengths, samples),
                _picked(y_lengths, samples),
                False,
            )[0].to(value.dtype)
    return value, state


def fused_backward(
    grad: Tensor,
    x: Tensor,
    y: Tensor,
    value: Tensor,
    state: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    need_x: bool,
    need_y: bool,
) -> tuple[Tensor, Tensor]:
    """Per-sample gradients (B, N, D) and (B, M, D), zero in the padding; empty for a side not needed."""
    types = tuple(
        torch.promote_types(t.dtype, torch.float32) if t.shape[0] < grad.shape[0] else t.dtype for t in (x, y)
    )
    x, y = _computed(x), _computed(y)
    problem = fused_problem(x, y, gamma, bandwidth, x_lengths, y_lengths)
    n, m, d = x.shape[1], y.shape[1], x.shape[2]
    gx = x.new_zeros((problem.batch, n, d) if need_x else (0,))
    gy = x.new_zeros((problem.batch, m, d) if need_y else (0,))
    wide = _needs_wide(problem, n) if x.dtype == torch.float32 else np.zeros(problem.batch, bool)
    # A zero gradient makes the kernel pass over the samples that the wide kernels will compute.
    narrow_grad = torch.where(torch.from_numpy(wide), 0.0, grad) if wide.any() else grad
    _backward(
        problem,
        n,
        bandwidth,
        narrow_grad,
        value,
        state,
        need_x,
        need_y,
        gx.view(-1).numpy(),
        n * d,
        gy.view(-1).numpy(),
        m * d,
    )
    if wide.any():
        samples = torch.from_numpy(np.flatnonzero(wide))
        picked = _float64(x, samples), _float64(y, samples)
        lengths = _picked(x_lengths, samples), _picked(y_lengths, samples)
        # The saved state is narrow: these few samples run forward once more.
        wide_value, wide_state = fused_forward(*picked, gamma, bandwidth, *lengths, True)
        wide_gx, wide_gy = fused_backward(
            grad[samples].to(torch.float64),
            *picked,
            wide_value,
            wide_state,
            gamma,
            bandwidth,
            *lengths,
            need_x,
            need_y,
        )
        if need_x:
            gx[samples] = wide_gx.to(gx.dtype)
        if need_y:
            gy[samples] = wide_gy.to(gy.dtype)
    return gx.to(types[0]), gy.to(types[1])


def cost_forward(
    cost: Tensor, gamma: float, bandwidth: int, x_lengths: Tensor | None, y_lengths: Tensor | None, save: bool
) -> tuple[Tensor, Tensor]:
    """Soft-DTW of a cost matrix (B, N, M): value (B,) and saved state. A cost of -inf gives NaN."""
    cost = _computed(cost)
    problem = cost_problem(cost, gamma, bandwidth, x_lengths, y_lengths)
    value, state = _forward(problem, cost.shape[1], bandwidth, save)
    if cost.dtype == torch.float32:
        wide = _needs_wide(problem, cost.shape[1])
        if wide.any():
            samples = torch.from_numpy(np.flatnonzero(wide))
            lengths = _picked(x_lengths, samples), _picked(y_lengths, samples)
            wide_value, _ = cost_forward(cost[samples].to(torch.float64), gamma, bandwidth, *lengths, False)
            value[samples] = wide_value.to(value.dtype)
    return value, state


def cost_backward(
    grad: Tensor,
    cost: Tensor,
    value: Tensor,
    state: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
) -> Tensor:
    """grad_b E_b, the gradient of the cost matrix (B, N, M); zero in the padding."""
    dtype = cost.dtype
    cost = _computed(cost)
    problem = cost_problem(cost, gamma, bandwidth, x_lengths, y_lengths)
    n = cost.shape[1]
    gcost = cost.new_zeros(cost.shape)
    wide = _needs_wide(problem, n) if cost.dtype == torch.float32 else np.zeros(problem.batch, bool)
    narrow_grad = torch.where(torch.from_numpy(wide), 0.0, grad) if wide.any() else grad
    flat = gcost.view(-1).numpy()
    _backward(problem, n, bandwidth, narrow_grad, value, state, True, False, flat, n * problem.m, flat, 0)
    if wide.any():
        samples = torch.from_numpy(np.flatnonzero(wide))
        picked = cost[samples].to(torch.float64)
        lengths = _picked(x_lengths, samples), _picked(y_lengths, samples)
        wide_value, wide_state = cost_forward(picked, gamma, bandwidth, *lengths, True)
        gcost[samples] = cost_backward(
            grad[samples].to(torch.float64), picked, wide_value, wide_state, gamma, bandwidth, *lengths
        ).to(gcost.dtype)
    return gcost.to(dtype)
