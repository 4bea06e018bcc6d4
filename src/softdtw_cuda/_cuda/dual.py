"""Second order on a GPU: the DualBackend protocol. Nothing here waits for the GPU or reads from it.

Kernels compute in float32, or in float64 for float64 input; 16-bit input is converted first, and gradients
are converted to the type that they should have at the end.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import _reference
from .._problem import Direction, Problem
from .._torch_compat import materialized
from . import launch
from .config_dual import DualKernel, DualLayout, dual_kernel, layout_of, start_lag_of
from .kernel import BACKWARD, FORWARD
from .params import DualParams


def _wide(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The tensor in the kernels' type, with dense rows."""
    return None if tensor is None else launch.dense_rows(tensor.detach().to(dtype))


def _has_whole_units(side: Tensor | None) -> bool:
    """Whether every row begins at a multiple of 16 bytes and has features in fours."""
    if side is None:
        return True
    return not (side.data_ptr() % 16 or side.shape[2] % 4 or launch.stride(side) % 4)


class _Call:
    """Tensors in the kernels' type, kept alive, and the params that name them."""

    def __init__(self, kernel: DualKernel, problem: Problem, direction: Direction, save: bool) -> None:
        dtype = problem.value_dtype
        self.x, self.y = _wide(problem.x, dtype), _wide(problem.y, dtype)
        self.a, self.b = _wide(direction.a, dtype), _wide(direction.b, dtype)
        self.lengths = problem.x_lengths, problem.y_lengths
        self.pairs = None if problem.pairs is None else problem.pairs.contiguous()
        assert self.x is not None
        batch, n, m, bandwidth = problem.batch, problem.n, problem.m, problem.bandwidth
        d = 1 if self.y is None else self.x.shape[2]
        f = d if self.a is None or direction.kind == "matrix" else self.a.shape[2]
        launch.check_sizes(batch, n, m, max(d, f), batch * kernel.strips(n))
        self.kernel = kernel
        self.layout: DualLayout = layout_of(kernel, batch, n, m, bandwidth, save)
        p = self.params = DualParams()
        p.batch, p.n, p.m, p.d, p.f = batch, n, m, d, f
        p.x_count = p.y_count = batch
        if self.pairs is not None and self.y is not None:
            p.x_count, p.y_count = self.x.shape[0], self.y.shape[0]
        p.bandwidth = min(bandwidth, n + m) if bandwidth >= 0 else n + m
        p.strips, p.checkpoints = kernel.strips(n), kernel.checkpoints(m, bandwidth)
        p.bound_columns = kernel.bound_columns(m, bandwidth)
        p.start_lag = start_lag_of(batch)
        p.scale, p.unscale = math.log2(math.e) / problem.gamma, problem.gamma * math.log(2.0)
        p.inverse_gamma = 1.0 / problem.gamma
        p.x_stride, p.y_stride, p.a_stride, p.b_stride = map(launch.stride, (self.x, self.y, self.a, self.b))
        p.pair_bytes, p.row_bytes, p.save = self.layout.pair_bytes, self.layout.row_bytes, int(save)
        p.x, p.y, p.a, p.b = map(launch.address, (self.x, self.y, self.a, self.b))
        p.x_lengths, p.y_lengths, p.pairs = map(launch.address, (*self.lengths, self.pairs))
        p.whole_units = all(_has_whole_units(side) for side in (self.x, self.y, self.a, self.b))
        self.states_bytes = kernel.states_bytes(n, m, bandwidth)
        self.blocks = batch * kernel.strips(n)

    def run(self, part: str, buffer: Tensor, device: torch.device) -> None:
        """Launches a pass on the state `buffer`.

        A forward fills all of it, so that equal calls have equal states, whatever parts of it kernels visit.
        That is about a byte a cell, and by estimate 1 % of the forward's time on an H200.
        """
        p, base = self.params, buffer.data_ptr()
        p.tickets, p.other_tickets = base, base + 4
        p.progress, p.rows = base + self.layout.progress, base + self.layout.rows
        p.states = base + self.layout.pairs
        p.bounds = p.states + self.states_bytes
        with launch.gpu.queue(device) as queue:
            queue.fill_with_ones(base, self.layout.total if part == FORWARD else self.layout.scratch)
            queue.run(self.kernel, part, p, self.blocks)


def _kernel(problem: Problem, direction: Direction) -> DualKernel | None:
    return dual_kernel(problem.y is None, direction.kind, problem.value_dtype)


def expected_state_bytes(problem: Problem, direction: Direction) -> int:
    """Size of the state that `expected` saves."""
    kernel = _kernel(problem, direction)
    if kernel is None:
        return _reference.expected_state_bytes(problem, direction)
    return layout_of(kernel, problem.batch, problem.n, problem.m, problem.bandwidth, True).total


def expected(problem: Problem, direction: Direction) -> tuple[Tensor, Tensor, Tensor]:
    """<E, Omega> and values (B,), and the state that the backward needs."""
    kernel = _kernel(problem, direction)
    if kernel is None:
        return _reference.expected(problem, direction)
    save = problem.needs_gradient or direction.need_a or direction.need_b
    call = _Call(kernel, problem, direction, save)
    device, dtype = problem.x.device, problem.value_dtype
    dot, value = (launch.gpu.empty(problem.batch, dtype, device) for _ in range(2))
    buffer = launch.gpu.empty(call.layout.total, torch.uint8, device)
    call.params.dot, call.params.value = dot.data_ptr(), value.data_ptr()
    call.run(FORWARD, buffer, device)
    return dot, value, buffer if save else launch.gpu.empty(0, torch.uint8, device)


def expected_backward(
    problem: Problem, direction: Direction, grad: Tensor, value: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients, one per pair."""
    kernel = _kernel(problem, direction)
    if kernel is None:
        return _reference.expected_backward(problem, direction, grad, value, state)
    call = _Call(kernel, problem, direction, True)
    device, dtype = problem.x.device, problem.value_dtype
    grad = materialized(grad).to(dtype)
    value = materialized(value)
    none = problem.no_gradient()
    sums: list[Tensor] = []
    for name, side, needed in (
        ("grad_x", problem.x, problem.need_x),
        ("grad_y", problem.y, problem.need_y),
        ("grad_a", direction.a, direction.need_a),
        ("grad_b", direction.b, direction.need_b),
    ):
        # Cells that no kernel visits (padding, outside the band, invalid pairs, E = 0) have no gradient.
        if side is None or not needed:
            sums.append(none)
            continue
        sums.append(launch.gpu.zeros((problem.batch, *side.shape[1:]), dtype, device))
        setattr(call.params, name, sums[-1].data_ptr())
    call.params.grad, call.params.grad_stride = grad.data_ptr(), grad.stride(0)
    call.params.value = value.data_ptr()
    call.run(BACKWARD, state, device)
    sides = (problem.x, problem.y, direction.a, direction.b)
    results = [
        each if side is None or each is none else each.to(problem.gradient_dtype(side))
        for each, side in zip(sums, sides, strict=True)
    ]
    return results[0], results[1], results[2], results[3]
