"""Gradients, one per pair, summed for each series, and the copies of series whose gradients are such sums.

Sums have the order of the pairs and are bitwise deterministic. Of torch's ways to add up rows by an index
index_add is that on the CPU, and indexing (index_put), which sorts, on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._torch_compat import is_differentiated, is_grad_batch, is_plain

if TYPE_CHECKING:
    from ._problem import Problem


class _TracedGather(torch.autograd.Function):
    """`gather` for torch.compile, whose index_add has atomic sums; a jvp or vmap here it would refuse."""

    @staticmethod
    def forward(series: Tensor, index: Tensor) -> Tensor:
        return series.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        series, index = inputs
        ctx.shape = series.shape
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return _in_segments(grad.new_zeros(ctx.shape), grad, index), None


def gather(series: Tensor, index: Tensor) -> Tensor:
    """The series (P, ...) that `index` (P,) names, each a copy."""
    if torch.compiler.is_compiling():
        function: Any = _TracedGather
        found: Tensor = function.apply(series, index)
        return found
    return series.index_select(0, index) if series.device.type == "cpu" else series[index]


def _added(total: Tensor, per_pair: Tensor, series: Tensor) -> Tensor:
    """`add_in_order` of differentiable operations, which leaves `total` as it is."""
    if total.device.type == "cpu":
        return total.index_add(0, series, per_pair)
    return total.index_put((series,), per_pair, accumulate=True)


def add_in_order(total: Tensor, per_pair: Tensor, series: Tensor) -> Tensor:
    """total (K, ...) and, one after the other, the rows of per_pair (P, ...) that belong to each series.

    The order is that of the list, wherever it is cut: parts of any size give bitwise the same sum.
    `total` is the caller's no more, and may be the sum.
    """
    count = total.shape[0]
    series = series.long().clamp(0, count - 1)  # an index out of range has no gradient
    if is_differentiated():  # segment_reduce can neither be mapped nor has it a tangent
        return _added(total, per_pair, series)
    if total.device.type == "cpu" and is_plain(total, per_pair, series) and not is_grad_batch(per_pair):
        # Not by torch, whose threads then wait for more to do, for several ms, on the cores of the next part.
        sums = list(total.numpy())
        for k, row in zip(series.tolist(), per_pair.numpy(), strict=True):
            sums[k] += row
        return total
    return _in_segments(total, per_pair, series)


def _in_segments(total: Tensor, per_pair: Tensor, series: Tensor) -> Tensor:
    """`add_in_order` of operations that neither have a derivative nor can be mapped."""
    count = total.shape[0]
    owners = torch.cat([torch.arange(count, device=series.device), series])
    order = torch.argsort(owners, stable=True)
    sizes = torch.ones(count, dtype=torch.int64, device=series.device)
    sizes = sizes.scatter_add(0, series, torch.ones_like(series))
    rows = torch.cat([total, per_pair]).index_select(0, order)
    return torch.segment_reduce(rows, "sum", lengths=sizes, axis=0, unsafe=True)


def sum_to(per_pair: Tensor, side: Tensor, series: Tensor | None = None) -> Tensor:
    """Gradients, one per pair, summed for each series of a side; `series` (P,) says which one a pair has."""
    if series is not None:
        return add_in_order(per_pair.new_zeros(side.shape), per_pair, series).to(side.dtype)
    if per_pair.shape[0] == side.shape[0]:
        return per_pair
    return per_pair.sum(0, keepdim=True).to(side.dtype)


def sum_sides(
    problem: Problem, per_pair_x: Tensor, per_pair_y: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and y out of those that each pair has, None where they are not needed."""
    x, y, pairs = problem.x, problem.y, problem.pairs
    first, second = (None, None) if pairs is None else pairs.unbind(1)
    grad_x = sum_to(per_pair_x, x, first) if problem.need_x else None
    grad_y = sum_to(per_pair_y, y, second) if problem.need_y and y is not None else None
    return grad_x, grad_y
