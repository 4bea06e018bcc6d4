"""Tensors in, tensors out: allocates through torch, fills in `Params`, launches on torch's current stream.

Nothing here waits for the GPU or reads from it. A forward makes one buffer of bytes (laid out by `config`),
fills its front with ones, and launches; narrow kernels are followed by a launch that redoes flagged samples,
which is usually over at once, and leaves the scratch all ones again for the backward. Small pairs have a way
of their own, `at_once`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._memory import in_memory
from .._reference import value_dtype
from . import config
from .config import AT_ONCE, BACKWARD, FORWARD, REDO, TILE, Kernel, Layout, Plan
from .driver import Gpu
from .params import Params, set_addresses

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)
_REDO_BLOCKS_PER_PROCESSOR = 4
_MOST_BLOCKS = 2**31 - 2**16
"""Second walks count twice as many, and a few more, in 32 bits."""
_MOST_STEPS = 2**30
_MOST_FEATURES = 2**27
"""Kernels add up to three numbers of steps, or multiply features by eight, in 32 bits with a sign."""

gpu = Gpu()


def _redo_blocks(kernel: Kernel, batch: int, n: int) -> int:
    return min(batch * kernel.strips(n), _REDO_BLOCKS_PER_PROCESSOR * config.weakest_device().processors)


class Call(NamedTuple):
    """What depends on shapes alone, kept from call to call; `params` is a `Params` without addresses."""

    plan: Plan
    layout: Layout
    params: bytes
    blocks: int
    alone: bool
    bounds: int
    redo_blocks: int
    redo_bounds: int
    redo_counts: tuple[int, int, int]


@functools.lru_cache(maxsize=256)
def _call(plan: Plan, batch: int, n: int, m: int, d: int, gamma: float, bandwidth: int, save: bool) -> Call:
    if n + m > _MOST_STEPS:
        raise ValueError(
            f"softdtw_cuda: series of N = {n} and M = {m} steps are too long for a GPU, expected N + M <= "
            f"{_MOST_STEPS}; cut them into pieces, or average neighbouring steps."
        )
    if d > _MOST_FEATURES:
        raise ValueError(
            f"softdtw_cuda: D = {d} features are too many for a GPU, expected at most {_MOST_FEATURES}; pass "
            "the distances as a cost matrix to softdtw_from_cost."
        )
    blocks = batch * plan.main.strips(n)
    if blocks > _MOST_BLOCKS:
        raise ValueError(
            f"softdtw_cuda: {batch} pairs of {n} steps take {blocks} blocks, and a CUDA launch has "
            f"{_MOST_BLOCKS} at most; pass the pairs in several batches."
        )
    layout = config.layout_of(plan, batch, n, m, bandwidth, save)

    def counts(kernel: Kernel) -> tuple[int, int, int]:
        return kernel.strips(n), kernel.checkpoints(m, bandwidth), kernel.bound_columns(m, bandwidth)

    p = Params()
    p.batch, p.n, p.m, p.d = batch, n, m, d
    p.bandwidth = min(bandwidth, n + m) if bandwidth >= 0 else n + m
    p.strips, p.checkpoints, p.bound_columns = counts(plan.main)
    p.tiles = (m + TILE - 1) // TILE
    p.lead = config.lead_of(plan.main, batch, n, config.weakest_device())
    p.scale = _LOG2_E / gamma
    p.unscale = gamma * _LN_2
    p.pair_bytes = layout.pair_bytes
    p.row_bytes, p.more_row_bytes = layout.row_bytes, layout.more_row_bytes
    p.scratch_bytes = layout.scratch
    redo = plan.redo or plan.main
    return Call(
        plan=plan,
        layout=layout,
        params=bytes(p),
        blocks=blocks,
        alone=blocks == batch and AT_ONCE in plan.main.parts,
        bounds=plan.main.states_bytes(n, m, bandwidth),
        redo_blocks=_redo_blocks(redo, batch, n),
        redo_bounds=redo.states_bytes(n, m, bandwidth),
        redo_counts=counts(redo),
    )


@functools.lru_cache(maxsize=256)
def fused_call(
    batch: int,
    n: int,
    m: int,
    d: int,
    dtype: torch.dtype,
    gamma: float,
    bandwidth: int,
    aligned: bool,
    save: bool,
) -> Call:
    plan = config.fused_plan(n, d, dtype, bandwidth, aligned)
    return _call(plan, batch, n, m, d, gamma, bandwidth, save)


Inputs = tuple[int, int, int, int, int, int]
"""Addresses of x, y, x_lengths and y_lengths, then elements from one sample of x, and of y, to the next.

y is 0 for a cost matrix."""


def point(
    p: Params,
    call: Call,
    inputs: Inputs,
    base: int,
    value: int,
    total: int = 0,
    grad: int = 0,
    grad_x: int = 0,
    grad_y: int = 0,
    redo: bool = False,
) -> None:
    """Points `p` at tensors and at the buffer at `base`, whose front is scratch.

    With `redo` for the launch after the main kernel, which is to leave the scratch as it is.
    """
    layout = call.layout
    x, y, x_lengths, y_lengths, x_stride, y_stride = inputs
    states = base + layout.pairs
    tickets, other_tickets = (base + 4, base) if redo else (base, base + 4)
    set_addresses(
        p,
        0,
        x,
        y,
        x_lengths,
        y_lengths,
        grad,
        value,
        total,
        grad_x,
        grad_y,
        grad_x,  # sum_x
        grad_y,  # sum_y
        states,
        states + (call.redo_bounds if redo else call.bounds),
        0,  # scratch
        base + layout.rows,
        base + layout.more_rows,
        tickets,
        other_tickets,
        base + layout.health,
        base + layout.tokens,
        base + layout.turns,
        x_stride,
        y_stride,
    )


def set_redo_counts(p: Params, call: Call) -> None:
    p.strips, p.checkpoints, p.bound_columns = call.redo_counts
    p.redo = 1


def _turn_to_redo(p: Params, call: Call, restore: bool) -> None:
    """Makes the main kernel's `p` that of the launch after it, which is to `restore` the scratch or not."""
    set_redo_counts(p, call)
    p.bounds += call.redo_bounds - call.bounds
    p.scratch = p.tickets if restore else 0
    p.tickets, p.other_tickets = p.other_tickets, p.tickets


def rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself if its last two dimensions are dense; its batch stride is free."""
    tensor = in_memory(tensor)
    if tensor.is_contiguous():
        return tensor
    _, rows, columns = tensor.shape
    strides = tensor.stride()
    if (columns == 1 or strides[2] == 1) and (rows == 1 or strides[1] == columns):
        return tensor
    return tensor.contiguous()


def inputs_of(x: Tensor, y: Tensor, x_lengths: Tensor | None, y_lengths: Tensor | None) -> Inputs:
    return (
        x.data_ptr(),
        y.data_ptr(),
        0 if x_lengths is None else x_lengths.data_ptr(),
        0 if y_lengths is None else y_lengths.data_ptr(),
        0 if x.shape[0] == 1 else x.stride()[0],
        0 if y.shape[0] == 1 else y.stride()[0],
    )


def _cost_inputs(cost: Tensor, x_lengths: Tensor | None, y_lengths: Tensor | None) -> Inputs:
    address, _, rows, columns, stride, _ = inputs_of(cost, cost, x_lengths, y_lengths)
    return address, 0, rows, columns, stride, 0


def are_aligned(inputs: Inputs, element_size: int) -> bool:
    """Whether all rows begin at multiples of 16 bytes, if their own sizes allow it."""
    x, y, _, _, x_stride, y_stride = inputs
    return not (x | y | (x_stride | y_stride) * element_size) % 16


def _forward(
    call: Call, inputs: Inputs, batch: int, save: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    plan = call.plan
    value = gpu.empty(batch, dtype, device)
    buffer = gpu.empty(call.layout.total, torch.uint8, device)
    base = buffer.data_ptr()
    p = Params.from_buffer_copy(call.params)
    point(p, call, inputs, base, value.data_ptr())
    p.save = save
    queue = gpu.queue(device)
    try:
        queue.fill_with_ones(base, call.layout.filled)
        queue.run(plan.main, FORWARD, p, call.blocks)
        if plan.redo is not None:
            _turn_to_redo(p, call, restore=save)
            p.save = 0
            queue.run(plan.redo, FORWARD, p, call.redo_blocks)
        elif save:
            queue.fill_with_ones(base, call.layout.scratch)
    finally:
        queue.close()
    return value, buffer if save else buffer.new_empty(0)


def _backward(
    call: Call,
    inputs: Inputs,
    grad: Tensor,
    value: Tensor,
    state: Tensor,
    grad_x: Tensor | None,
    grad_y: Tensor | None,
) -> None:
    plan, device = call.plan, value.device
    grad = in_memory(grad)
    if grad.dtype != value.dtype:
        grad = grad.to(value.dtype)
    p = Params.from_buffer_copy(call.params)
    point(
        p,
        call,
        inputs,
        state.data_ptr(),
        value.data_ptr(),
        grad=grad.data_ptr(),
        grad_x=0 if grad_x is None else grad_x.data_ptr(),
        grad_y=0 if grad_y is None else grad_y.data_ptr(),
    )
    p.grad_stride = grad.stride(0)
    sums = []
    if grad_x is not None:
        p.grad_x_wide = grad_x.dtype == torch.float32
        if grad_x.element_size() == 2 and p.y:
            sums.append(gpu.empty(grad_x.shape, torch.float32, device))
            p.sum_x = sums[-1].data_ptr()
    if grad_y is not None:
        p.grad_y_wide = grad_y.dtype == torch.float32
        if grad_y.element_size() == 2:
            sums.append(gpu.empty(grad_y.shape, torch.float32, device))
            p.sum_y = sums[-1].data_ptr()
    queue = gpu.queue(device)
    try:
        queue.run(plan.main, BACKWARD, p, call.blocks)
        if plan.redo is not None:
            _turn_to_redo(p, call, restore=True)
            p.save = 1
            queue.run(plan.redo, REDO, p, call.redo_blocks)
        else:
            queue.fill_with_ones(state.data_ptr(), call.layout.scratch)
    except BaseException:  # also an interrupt; autograd keeps the state then, and another backward may come
        with contextlib.suppress(RuntimeError):
            queue.fill_with_ones(state.data_ptr(), call.layout.scratch)
        raise
    finally:
        queue.close()


def fused_forward(
    x: Tensor,
    y: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Values (B,) of x (B or 1, N, D) against y (B or 1, M, D), and the state that the backward needs."""
    x, y = rows_contiguous(x), rows_contiguous(y)
    (x_batch, n, d), (y_batch, m, _) = x.shape, y.shape
    batch = y_batch if x_batch == 1 else x_batch
    inputs = inputs_of(x, y, x_lengths, y_lengths)
    aligned = are_aligned(inputs, x.element_size())
    call = fused_call(batch, n, m, d, x.dtype, gamma, bandwidth, aligned, save)
    return _forward(call, inputs, batch, save, value_dtype(x.dtype), x.device)


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
) -> tuple[Tensor | None, Tensor | None]:
    """Per-sample gradients (B, N, D) and (B, M, D); None where not needed, not 16-bit where broadcast."""
    x, y = rows_contiguous(x), rows_contiguous(y)
    (x_batch, n, d), (y_batch, m, _) = x.shape, y.shape
    batch = y_batch if x_batch == 1 else x_batch
    inputs = inputs_of(x, y, x_lengths, y_lengths)
    aligned = are_aligned(inputs, x.element_size())
    call = fused_call(batch, n, m, d, x.dtype, gamma, bandwidth, aligned, True)
    new = gpu.empty if x_lengths is None and y_lengths is None else gpu.zeros
    grad_x = grad_y = None
    if need_x:
        grad_x = new((batch, n, d), x.dtype if x_batch == batch else value.dtype, x.device)
    if need_y:
        grad_y = new((batch, m, d), y.dtype if y_batch == batch else value.dtype, x.device)
    _backward(call, inputs, grad, value, state, grad_x, grad_y)
    return grad_x, grad_y


def cost_forward(
    cost: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Values (B,) of cost matrices (B, N, M), and the state that the backward needs."""
    cost = rows_contiguous(cost)
    batch, n, m = cost.shape
    call = _call(config.cost_plan(n, cost.dtype, bandwidth), batch, n, m, 1, gamma, bandwidth, save)
    inputs = _cost_inputs(cost, x_lengths, y_lengths)
    return _forward(call, inputs, batch, save, value_dtype(cost.dtype), cost.device)


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
    """(B, N, M): grad_b times the soft alignment E of eq. (8)."""
    cost = rows_contiguous(cost)
    batch, n, m = cost.shape
    call = _call(config.cost_plan(n, cost.dtype, bandwidth), batch, n, m, 1, gamma, bandwidth, True)
    inputs = _cost_inputs(cost, x_lengths, y_lengths)
    # Cells that no kernel visits, outside the band or in the padding, are zeros.
    gradient = gpu.zeros((batch, n, m), cost.dtype, cost.device)
    _backward(call, inputs, grad, value, state, gradient, None)
    return gradient
