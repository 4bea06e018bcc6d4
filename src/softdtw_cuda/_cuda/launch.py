"""The CUDA backend: allocates through torch, fills in `Params`, launches on torch's current stream.

Nothing here waits for the GPU or reads from it. A forward makes one buffer of bytes (laid out by `config`),
fills its front with ones, and launches; narrow kernels are followed by a launch that reruns flagged pairs,
which ends immediately where there are none, and leaves the scratch all ones again for the backward. Every
byte of a state is written, so that equal calls have equal states whatever was in new memory.

For small problems the forward computes the gradients, too (`config.gradient_with_value`): the state is then
the gradients for a `grad` of 1, and the backward multiplies them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._problem import Problem
from .._torch_compat import materialized
from . import config
from .config import TILE, Layout, Plan
from .driver import Gpu
from .kernel import BACKWARD, FORWARD, FORWARD_BACKWARD, MATRIX, RERUN, SCALE, Kernel
from .params import Params, set_addresses

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)
_RERUN_BLOCKS_PER_PROCESSOR = 4
_MOST_BLOCKS = 2**31 - 2**16
"""Reruns count twice as many, and a few more, in 32 bits."""
_MOST_STEPS = 2**30
_MOST_FEATURES = 2**27
"""Kernels add up to three numbers of steps, or multiply features by eight, in 32 bits with a sign."""

gpu = Gpu()


Sizes = tuple[int, int, int, int]
"""B, N, M, D; 1 for D of a cost matrix."""


class Call(NamedTuple):
    """What depends on shapes, types and the band; `params` is a `Params` without addresses and gamma."""

    plan: Plan
    layout: Layout
    params: bytes
    blocks: int
    alone: bool
    """Whether pairs are one strip, of which one launch computes value and gradient."""
    bounds: int
    rerun_blocks: int
    rerun_bounds: int
    rerun_counts: tuple[int, int, int]


def check_sizes(batch: int, n: int, m: int, d: int, blocks: int) -> None:
    """Raises where a launch, or the kernels' 32-bit numbers, cannot hold a problem."""
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
    if blocks > _MOST_BLOCKS:
        raise ValueError(
            f"softdtw_cuda: {batch} pairs of {n} steps take {blocks} blocks, and a CUDA launch has "
            f"{_MOST_BLOCKS} at most; pass the pairs in several batches."
        )


@functools.lru_cache(maxsize=256)
def _call(plan: Plan, batch: int, n: int, m: int, d: int, bandwidth: int, save: bool) -> Call:
    blocks = batch if plan.main.walks_whole_pairs else batch * plan.main.strips(n)
    check_sizes(batch, n, m, d, blocks)
    layout = config.layout_of(plan, batch, n, m, bandwidth, save)
    device = config.weakest_device()

    def counts(kernel: Kernel) -> tuple[int, int, int]:
        return kernel.strips(n), kernel.checkpoints(m, bandwidth), kernel.bound_columns(m, bandwidth)

    p = Params()
    p.batch, p.n, p.m, p.d = batch, n, m, d
    p.x_count = p.y_count = batch
    p.bandwidth = min(bandwidth, n + m) if bandwidth >= 0 else n + m
    p.strips, p.checkpoints, p.bound_columns = counts(plan.main)
    p.tiles = (m + TILE - 1) // TILE
    p.start_lag = config.start_lag_of(plan.main, batch, n, device)
    p.pair_bytes = layout.pair_bytes
    p.row_bytes, p.more_row_bytes = layout.row_bytes, layout.more_row_bytes
    p.scratch_bytes = layout.scratch
    p.saved_bytes = plan.main.pair_bytes(n, m, bandwidth)
    rerun = plan.rerun or plan.main
    return Call(
        plan=plan,
        layout=layout,
        params=bytes(p),
        blocks=blocks,
        alone=plan.main.strips(n) == 1 and FORWARD_BACKWARD in plan.main.parts,
        bounds=plan.main.states_bytes(n, m, bandwidth),
        rerun_blocks=min(batch * rerun.strips(n), _RERUN_BLOCKS_PER_PROCESSOR * device.processors),
        rerun_bounds=rerun.states_bytes(n, m, bandwidth),
        rerun_counts=counts(rerun),
    )


class _Inputs(NamedTuple):
    """Tensors whose last two dimensions are dense, and the call for them."""

    x: Tensor
    y: Tensor | None
    pairs: Tensor | None
    call: Call
    params: Params


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor itself if its last two dimensions are dense; its batch stride is free."""
    tensor = materialized(tensor)
    if tensor.is_contiguous():
        return tensor
    _, rows, columns = tensor.shape
    strides = tensor.stride()
    if (columns == 1 or strides[2] == 1) and (rows == 1 or strides[1] == columns):
        return tensor
    return tensor.contiguous()


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def stride(tensor: Tensor | None) -> int:
    """Elements from one sample to the next."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


def _sizes(problem: Problem) -> Sizes:
    x, y, pairs = problem.x, problem.y, problem.pairs
    batch, n, d = x.shape
    if y is None:
        return batch, n, d, 1
    y_batch, m, _ = y.shape
    if pairs is not None:
        batch = pairs.shape[0]
    elif batch == 1:
        batch = y_batch
    return batch, n, m, d


def _inputs(problem: Problem, sizes: Sizes, save: bool) -> _Inputs:
    batch, n, m, d = sizes
    x, y, bandwidth = dense_rows(problem.x), problem.y, problem.bandwidth
    x_stride, y_stride = stride(x), 0
    if y is None:
        plan = config.cost_plan(n, x.dtype, bandwidth, batch=batch)
    else:
        y = dense_rows(y)
        y_stride = stride(y)
        # Whether all rows begin at multiples of 16 bytes, if their own sizes allow it.
        aligned = not (x.data_ptr() | y.data_ptr() | (x_stride | y_stride) * x.element_size()) % 16
        plan = config.fused_plan(n, d, x.dtype, bandwidth, aligned, batch=batch)
    call = _call(plan, batch, n, m, d, bandwidth, save)
    params = Params.from_buffer_copy(call.params)
    params.x_stride, params.y_stride = x_stride, y_stride
    params.scale = _LOG2_E / problem.gamma
    params.unscale = problem.gamma * _LN_2
    pairs = problem.pairs
    if pairs is not None and y is not None:
        pairs = pairs.contiguous()
        params.x_count, params.y_count = x.shape[0], y.shape[0]
    return _Inputs(x, y, pairs, call, params)


def _bind_addresses(
    problem: Problem,
    inputs: _Inputs,
    base: int,
    value: Tensor,
    grad: Tensor | None = None,
    grad_x: int = 0,
    grad_y: int = 0,
) -> None:
    """Sets the addresses of tensors, and of the buffer at `base`, whose front is scratch."""
    x, y, pairs, call, params = inputs
    layout = call.layout
    states = base + layout.pairs
    set_addresses(
        params,
        0,
        x.data_ptr(),
        address(y),
        address(problem.x_lengths),
        address(problem.y_lengths),
        address(pairs),
        address(grad),
        value.data_ptr(),
        grad_x,
        grad_y,
        grad_x,  # sum_x
        grad_y,  # sum_y
        states,
        states + call.bounds,
        0,  # scratch
        base + layout.rows,
        base + layout.more_rows,
        base,  # tickets
        base + 4,  # other_tickets
        base + layout.range_flags,
        base + layout.progress,
        base + layout.grad_y_order,
    )


def _make_rerun(params: Params, call: Call, restore: bool) -> None:
    """Makes the params those of the launch after the main one, which is to `restore` the scratch or not."""
    params.strips, params.checkpoints, params.bound_columns = call.rerun_counts
    params.rerun = 1
    params.bounds += call.rerun_bounds - call.bounds
    params.scratch = params.tickets if restore else 0
    params.tickets, params.other_tickets = params.other_tickets, params.tickets


def _has_gradient_with_value(problem: Problem, sizes: Sizes) -> bool:
    """Whether the forward computes gradients, too: never those of costs and of listed pairs.

    Otherwise it depends on nothing but sizes and type, so that all terms of a divergence are computed in the
    same way, and cancel exactly where they should.
    """
    if problem.y is None or problem.pairs is not None or problem.x.dtype != torch.float32:
        return False
    return config.gradient_with_value(*sizes)


def _kept_bytes(sizes: Sizes, kept_x: bool, kept_y: bool) -> tuple[int, int]:
    """Of the gradients of x and of y in the state."""
    batch, n, m, d = sizes
    return 4 * batch * n * d if kept_x else 0, 4 * batch * m * d if kept_y else 0


def state_bytes(problem: Problem) -> int:
    """Size of the state that `forward` saves."""
    batch, n, m, d = sizes = _sizes(problem)
    if _has_gradient_with_value(problem, sizes):
        return sum(_kept_bytes(sizes, problem.need_x, problem.need_y))
    dtype, bandwidth = problem.x.dtype, problem.bandwidth
    if problem.y is None:
        plan = config.cost_plan(n, dtype, bandwidth, batch=batch)
    else:
        # Alignment changes how rows are read, not what is saved.
        plan = config.fused_plan(n, d, dtype, bandwidth, batch=batch)
    return config.layout_of(plan, batch, n, m, bandwidth, True).total


def _is_padded(problem: Problem) -> bool:
    """Whether pairs may be shorter than the tensors, or invalid, so that kernels do not visit everything."""
    return not problem.pairs is problem.x_lengths is problem.y_lengths is None


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Values (B,), and the state that the backward needs."""
    save, sizes = problem.needs_gradient, _sizes(problem)
    if save and _has_gradient_with_value(problem, sizes):
        return _forward_backward(problem, sizes)
    inputs = _inputs(problem, sizes, save)
    _, _, _, call, params = inputs
    device, plan, layout = problem.x.device, call.plan, call.layout
    value = gpu.empty(sizes[0], problem.value_dtype, device)
    buffer = gpu.empty(layout.total, torch.uint8, device)
    base = buffer.data_ptr()
    _bind_addresses(problem, inputs, base, value)
    params.save = save
    if not save:
        params.grad_y_order = 0  # its place in the layout is empty: a wide rerun would clear what follows it
    with gpu.queue(device) as queue:
        # Of a full batch without a band kernels write all of the state. What they leave out of another's is
        # known on the GPU alone: see docs/kernels.md for what it costs to fill all of it.
        visits_all = not save or (problem.bandwidth < 0 and not _is_padded(problem))
        queue.fill_with_ones(base, layout.pairs if visits_all else layout.total)
        queue.run(plan.main, FORWARD, params, call.blocks)
        if plan.rerun is not None:
            _make_rerun(params, call, restore=save)
            params.save = 0
            queue.run(plan.rerun, FORWARD, params, call.rerun_blocks)
        elif save:
            queue.fill_with_ones(base, layout.scratch)
    return value, buffer if save else gpu.empty(0, torch.uint8, device)


def _forward_backward(problem: Problem, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Values, and as the state the gradients for a `grad` of 1: of x and then of y, where they are needed."""
    inputs = _inputs(problem, sizes, True)
    _, _, _, call, params = inputs
    device, plan, layout = problem.x.device, call.plan, call.layout
    value = gpu.empty(sizes[0], torch.float32, device)
    buffer = gpu.empty(layout.total, torch.uint8, device)
    x_bytes, y_bytes = _kept_bytes(sizes, problem.need_x, problem.need_y)
    new = gpu.zeros if not call.alone and _is_padded(problem) else gpu.empty
    state = new(x_bytes + y_bytes, torch.uint8, device)
    base = buffer.data_ptr()
    grad_x = state.data_ptr() if x_bytes else 0
    grad_y = state.data_ptr() + x_bytes if y_bytes else 0
    _bind_addresses(problem, inputs, base, value, None, grad_x, grad_y)
    params.save = 1
    with gpu.queue(device) as queue:
        # Where block b has pair b in both launches, blocks share nothing that would have to be filled.
        is_shared = not call.alone or call.rerun_blocks < call.blocks
        if is_shared:
            queue.fill_with_ones(base, layout.pairs)
        if call.alone:
            queue.run(plan.main, FORWARD_BACKWARD, params, call.blocks)
        else:
            queue.run(plan.main, FORWARD, params, call.blocks)
            queue.fill_with_ones(base, layout.scratch)
            queue.run(plan.main, BACKWARD, params, call.blocks)
        if plan.rerun is not None:
            _make_rerun(params, call, restore=False)
            if not is_shared:
                params.tickets = 0
            queue.run(plan.rerun, RERUN, params, call.rerun_blocks)
    return value, state


def backward(problem: Problem, grad: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients, one per pair."""
    grad = materialized(grad)
    if grad.dtype != value.dtype:
        grad = grad.to(value.dtype)
    sizes = _sizes(problem)
    if _has_gradient_with_value(problem, sizes):
        return _scaled_gradients(problem, sizes, grad, state)
    inputs = _inputs(problem, sizes, True)
    x, y, _, call, params = inputs
    device, plan = x.device, call.plan
    # Cells that no kernel visits, outside the band, in the padding or of an invalid pair, have no gradient.
    stores_all = y is not None or plan.main.source == MATRIX
    new = gpu.empty if stores_all and not _is_padded(problem) else gpu.zeros
    grad_x = grad_y = none = problem.no_gradient()
    sums = []

    def sum_of(gradient: Tensor) -> int:
        """Where a gradient is summed: in float32."""
        if gradient.element_size() != 2 or y is None:
            return gradient.data_ptr()
        sums.append(gpu.empty(gradient.shape, torch.float32, device))
        return sums[-1].data_ptr()

    if problem.need_x:
        grad_x = new((sizes[0], *x.shape[1:]), problem.gradient_dtype(x), device)
    if problem.need_y and y is not None:
        grad_y = new((sizes[0], *y.shape[1:]), problem.gradient_dtype(y), device)
    base = state.data_ptr()
    _bind_addresses(problem, inputs, base, value, grad, grad_x.data_ptr(), grad_y.data_ptr())
    params.grad_stride = grad.stride(0)
    if grad_x is not none:
        params.grad_x_wide, params.sum_x = grad_x.dtype == torch.float32, sum_of(grad_x)
    if grad_y is not none:
        params.grad_y_wide, params.sum_y = grad_y.dtype == torch.float32, sum_of(grad_y)
    with gpu.queue(device) as queue:
        try:
            queue.run(plan.main, BACKWARD, params, call.blocks)
            if plan.rerun is not None:
                _make_rerun(params, call, restore=True)
                params.save = 1
                queue.run(plan.rerun, RERUN, params, call.rerun_blocks)
            else:
                queue.fill_with_ones(base, call.layout.scratch)
        except BaseException:  # also an interrupt; autograd keeps the state then, and may come back with it
            with contextlib.suppress(RuntimeError):
                queue.fill_with_ones(base, call.layout.scratch)
            raise
    return grad_x, grad_y


def _scaled_gradients(problem: Problem, sizes: Sizes, grad: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients that `_forward_backward` kept, times `grad`."""
    batch, n, m, d = sizes
    x_bytes, y_bytes = _kept_bytes(sizes, True, True)
    device, kept = problem.x.device, state.data_ptr()
    params = Params()
    params.batch, params.n, params.m, params.d = sizes
    params.grad, params.grad_stride = grad.data_ptr(), grad.stride(0)
    if problem.need_x:
        grad_x = gpu.empty((batch, n, d), torch.float32, device)
        params.sum_x, params.grad_x = kept, grad_x.data_ptr()
    else:
        grad_x = problem.no_gradient()
    if problem.need_y:
        grad_y = gpu.empty((batch, m, d), torch.float32, device)
        # The forward needed the same sides, or both.
        params.sum_y = kept + x_bytes if state.numel() == x_bytes + y_bytes else kept
        params.grad_y = grad_y.data_ptr()
    else:
        grad_y = problem.no_gradient()
    with gpu.queue(device) as queue:
        queue.run(SCALE, BACKWARD, params, SCALE.blocks(batch * (n + m) * d))
    return grad_x, grad_y
