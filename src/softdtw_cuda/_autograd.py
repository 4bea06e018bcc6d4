"""Gradient formulas, once for every route: eager autograd, torch.func and vmap, compiled graphs.

Eager tensors and torch.func go through two Functions, one for values and one for their gradients; compiled
graphs call the operators of `_ops`, which are registered with the same formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _backends, _ops
from ._distances import with_costs, with_embedding
from ._problem import Problem
from ._torch_compat import in_transform, is_grad_batch

PairRange = Callable[[int, int], Tensor]

# Formulas. `ctx` and the arguments of setup are those of torch.autograd.Function and of torch.library alike.


def setup_value(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps what `value_backward` needs; inputs are the fields of a Problem that operators have."""
    x, y, x_lengths, y_lengths, ctx.gamma, ctx.bandwidth, need_x, need_y, pairs = inputs
    ctx.has_state = need_x or need_y
    value, state = output
    ctx.mark_non_differentiable(state)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, y, x_lengths, y_lengths, pairs, value, state)


def value_backward(ctx: Any, grad: Tensor | None, _: object = None) -> tuple[Tensor | None, ...]:
    """Gradients of x and y for the gradient of the values, equation (8)."""
    x, y, x_lengths, y_lengths, pairs, value, state = ctx.saved_tensors
    need_x, need_y = ctx.needs_input_grad[:2]
    grad_x = grad_y = None
    if grad is not None and (need_x or need_y):
        if not ctx.has_state:
            raise RuntimeError(
                "softdtw_cuda: an operator called with need_x=False and need_y=False has no gradient; pass "
                "True for the sides whose gradients are wanted."
            )
        problem = Problem(x, y, x_lengths, y_lengths, ctx.gamma, ctx.bandwidth, need_x, need_y, pairs)
        per_pair_x, per_pair_y = gradients(problem, grad, value, state)
        grad_x = _sum_to(per_pair_x, x, pairs, 0) if need_x else None
        grad_y = _sum_to(per_pair_y, y, pairs, 1) if need_y else None
    return grad_x, grad_y, None, None, None, None, None, None, None


def _sum_to(per_pair: Tensor, side: Tensor, pairs: Tensor | None, column: int) -> Tensor:
    """Gradients, one per pair, summed for each series of a side."""
    if pairs is not None:
        none = per_pair.new_zeros(side.shape)
        return _add_in_order(none, per_pair, pairs[:, column]).to(side.dtype)
    if per_pair.shape[0] == side.shape[0]:
        return per_pair
    return per_pair.sum(0, keepdim=True).to(side.dtype)


def _add_in_order(total: Tensor, per_pair: Tensor, series: Tensor) -> Tensor:
    """total (K, ...) and, one after the other, the rows of per_pair (P, ...) that belong to each series.

    The order is that of the list, wherever it is cut: the sum has the same bits for every size of the parts.
    """
    count = total.shape[0]
    series = series.long().clamp(0, count - 1)  # an index out of range has no gradient
    if in_transform():  # segment_reduce cannot be mapped
        return total.index_put((series,), per_pair, accumulate=True)
    owners = torch.cat([torch.arange(count, device=series.device), series])
    order = torch.argsort(owners, stable=True)
    sizes = torch.ones(count, dtype=torch.int64, device=series.device)
    sizes = sizes.scatter_add(0, series, torch.ones_like(series))
    rows = torch.cat([total, per_pair])[order]
    return torch.segment_reduce(rows, "sum", lengths=sizes, axis=0, unsafe=True)


def setup_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Nothing is kept: a gradient cannot be differentiated."""


def gradient_backward(ctx: Any, *grads: Tensor) -> Any:
    """The gradient of a gradient: refused where it is asked for."""
    raise RuntimeError(
        "softdtw_cuda: second derivatives are not implemented; do not differentiate a gradient of Soft-DTW "
        "(create_graph=True, torch.func.hessian, nested torch.func.grad)."
    )


def _no_jvp(ctx: Any, *tangents: Any) -> Any:
    raise RuntimeError(
        "softdtw_cuda: forward-mode derivatives (torch.func.jvp, jacfwd, hessian) are not implemented; use "
        "backward or torch.func.grad for first derivatives."
    )


# vmap: a mapped dimension of size V becomes part of the batch, V * B pairs in one launch.


def _fold(size: int, dims: tuple[int | None, ...], problem: Problem) -> tuple[Problem, int]:
    """The problem of all V * B pairs, and B."""

    def front(tensor: Tensor | None, dim: int | None) -> Tensor | None:
        """(V or 1, ...)"""
        if tensor is None:
            return None
        return tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)

    x, y, x_lengths, y_lengths, pairs = (
        front(*each) for each in zip(problem.tensors, (*dims[:4], dims[8]), strict=True)
    )
    assert x is not None
    if pairs is not None:
        return _fold_pairs(size, problem, x, y, x_lengths, y_lengths, pairs), pairs.shape[1]
    batch = x.shape[1] if y is None else max(x.shape[1], y.shape[1])

    def folded(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or (tensor.dim() > 2 and tensor.shape[0] == tensor.shape[1] == 1):
            return None if tensor is None else tensor[0]  # one series for all pairs
        return tensor.expand(size, batch, *tensor.shape[2:]).reshape(size * batch, *tensor.shape[2:])

    whole = folded(x)
    assert whole is not None
    return problem._replace(
        x=whole, y=folded(y), x_lengths=folded(x_lengths), y_lengths=folded(y_lengths)
    ), batch


def _fold_pairs(
    size: int,
    problem: Problem,
    x: Tensor,
    y: Tensor | None,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    pairs: Tensor,
) -> Problem:
    """The problem of V lists of pairs, each with series of its own or with those of all."""
    assert y is not None
    map_index = torch.arange(size, dtype=torch.int32, device=pairs.device).view(size, 1)

    def own(side: Tensor, lengths: Tensor | None, column: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Series (V * K, ...) and their lengths, and which of them the pairs have."""
        maps = size if lengths is not None and lengths.shape[0] > side.shape[0] else side.shape[0]
        each = side.expand(maps, *side.shape[1:]).flatten(0, 1)
        each_length = None if lengths is None else lengths.expand(maps, -1).flatten()
        index = pairs[..., column] + (map_index * side.shape[1] if maps > 1 else 0)
        return each, each_length, index.expand(size, -1).flatten()

    first, first_lengths, first_index = own(x, x_lengths, 0)
    second, second_lengths, second_index = own(y, y_lengths, 1)
    return problem._replace(
        x=first,
        y=second,
        x_lengths=first_lengths,
        y_lengths=second_lengths,
        pairs=torch.stack([first_index, second_index], 1),
    )


def _fold_numbers(size: int, dim: int | None, batch: int, numbers: Tensor) -> Tensor:
    """(V, B) or (B,) numbers as (V * B,)."""
    moved = numbers if dim is None else numbers.movedim(dim, 0)
    return moved.expand(size, batch).reshape(size * batch)


def _apply(function: Any, *arguments: Any) -> Any:
    """torch leaves `Function.apply` without annotations."""
    return function.apply(*arguments)


class _Value(torch.autograd.Function):
    """Fields of a Problem to values and state."""

    setup_context = staticmethod(setup_value)
    backward = staticmethod(value_backward)
    jvp = staticmethod(_no_jvp)

    @staticmethod
    def forward(*problem: Any) -> tuple[Tensor, Tensor]:
        return _backends.forward(Problem(*problem))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        problem, batch = _fold(info.batch_size, in_dims, Problem(*inputs))
        value, state = _apply(_Value, *problem.operands)
        # The state belongs to all pairs together: `_Gradient` folds the same dimension again and reads it.
        return (value.view(info.batch_size, batch), state), (0, None)


class _Gradient(torch.autograd.Function):
    """Gradient of the values, values, state and fields of a Problem to gradients, one per pair."""

    setup_context = staticmethod(setup_gradient)
    backward = staticmethod(gradient_backward)
    jvp = staticmethod(_no_jvp)

    @staticmethod
    def forward(grad: Tensor, value: Tensor, state: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
        return _backends.backward(Problem(*problem), grad, value, state)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        size = info.batch_size
        grad_dim, value_dim, _, *problem_dims = in_dims
        grad, value, state, *fields = inputs
        problem = Problem(*fields)
        if all(dim is None for dim in (*problem_dims[:4], problem_dims[8])):
            # Several gradients of the same values: each is a multiple of one.
            per_pair = _apply(_Gradient, torch.ones_like(value), value, state, *problem.operands)
            scaled = _scale_sides(per_pair, grad.movedim(grad_dim, 0))
            return scaled, tuple(None if side.dim() == 1 else 0 for side in per_pair)
        folded, batch = _fold(size, tuple(problem_dims), problem)
        grad = _fold_numbers(size, grad_dim, batch, grad)
        value = _fold_numbers(size, value_dim, batch, value)
        per_pair = _apply(_Gradient, grad, value, state, *folded.operands)
        sides = [side if side.dim() == 1 else side.unflatten(0, (size, batch)) for side in per_pair]
        return tuple(sides), tuple(None if side.dim() == 1 else 0 for side in per_pair)


def _scale_sides(per_pair: tuple[Tensor, Tensor], grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and y for `grad` (..., B), from those for ones."""
    factor = grad[..., None, None]
    x, y = (side if side.dim() == 1 else scale_gradient(side, factor).to(side.dtype) for side in per_pair)
    return x, y


def scale_gradient(gradient: Tensor, factor: Tensor) -> Tensor:
    """The product, in which a zero stays a zero: no factor, infinite or NaN, brings a gradient to padding."""
    return torch.where(gradient == 0, gradient, gradient * factor)


# What to call


def values(problem: Problem) -> Tensor:
    """(B,) Soft-DTW values of a problem, differentiable in x and y."""
    if problem.batch == 0:
        return _no_values(problem.x) if problem.y is None else _no_values(problem.x) + _no_values(problem.y)
    if not problem.fused and problem.y is not None:
        problem = with_costs(problem)
    elif problem.metric.embedding is not None:
        problem = with_embedding(problem)
    return _apply_value(problem)[0]


class _PairValues(torch.autograd.Function):
    """Values of a long list of pairs, part by part. No state is kept: the backward walks forward again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, problem: Problem, count: int, part: int, of: PairRange
    ) -> Tensor:
        ctx.save_for_backward(x, y, problem.x_lengths, problem.y_lengths)
        ctx.options = problem.gamma, problem.bandwidth
        ctx.parts = count, part, of
        values = [
            _backends.forward(problem._replace(pairs=of(start, min(start + part, count))))[0]
            for start in range(0, count, part)
        ]
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, x_lengths, y_lengths = ctx.saved_tensors
        need_x, need_y = ctx.needs_input_grad[:2]
        count, part, of = ctx.parts
        gamma, bandwidth = ctx.options
        problem = Problem(x, y, x_lengths, y_lengths, gamma, bandwidth, need_x, need_y)
        grad_x, grad_y = (x.new_zeros(side.shape, dtype=problem.value_dtype) for side in (x, y))
        for start in range(0, count, part):
            stop = min(start + part, count)
            pairs = of(start, stop)
            listed = problem._replace(pairs=pairs)
            value, state = _backends.forward(listed)
            per_pair_x, per_pair_y = gradients(listed, grad[start:stop], value, state)
            del state
            if need_x:
                grad_x = _add_in_order(grad_x, per_pair_x, pairs[:, 0])
            if need_y:
                grad_y = _add_in_order(grad_y, per_pair_y, pairs[:, 1])
        first = grad_x.to(x.dtype) if need_x else None
        second = grad_y.to(y.dtype) if need_y else None
        return first, second, None, None, None, None


def pair_values(problem: Problem, count: int, part: int, of: PairRange) -> Tensor:
    """(count,) values of a fused problem without `pairs`: those of its series that `of` names.

    Args:
        part: pairs that are computed together. Fewer than `count` of them are computed again for the
            gradient, so that no more than a part's state is ever kept.
        of: gives pairs `start` to `stop` of the list, as (stop - start, 2) int32.
    """
    if part >= count:
        return _apply_value(problem._replace(pairs=of(0, count)))[0]
    result: Tensor = _apply(_PairValues, problem.x, problem.y, problem, count, part, of)
    return result


def alignment(problem: Problem) -> Tensor:
    """(B, N, M) soft alignment E of equation (8); differentiating it raises."""
    if problem.y is not None:
        problem = with_costs(problem)
    if problem.batch == 0:
        return problem.x * 0
    problem = problem._replace(need_x=True)
    value, state = _apply_value(problem)
    return gradients(problem, torch.ones_like(value), value, state)[0]


def _apply_value(problem: Problem) -> tuple[Tensor, Tensor]:
    x, y = problem.x, problem.y
    record = torch.is_grad_enabled()
    need_x = problem.need_x or (record and x.requires_grad)
    need_y = record and y is not None and y.requires_grad
    if torch.compiler.is_compiling():
        result: tuple[Tensor, Tensor] = torch.ops.softdtw_cuda.forward(
            *problem[:6], need_x, need_y, problem.pairs
        )
        return result
    result = _apply(_Value, *problem[:6], need_x, need_y, problem.pairs)
    return result


def gradients(problem: Problem, grad: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and y, one per pair, for the gradient of the values."""
    if is_grad_batch(grad):
        return _scale_sides(_gradients(problem, torch.ones_like(value), value, state), grad)
    return _gradients(problem, grad, value, state)


def _gradients(problem: Problem, grad: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or in_transform()):
        return _backends.backward(problem, grad, value, state)
    result: tuple[Tensor, Tensor] = _apply(_Gradient, grad, value, state, *problem.operands)
    return result


def _no_values(side: Tensor) -> Tensor:
    """(0,) values that still backpropagate to `side`: in an empty batch there is no pair to compute."""
    return (side.sum() * 0).to(torch.promote_types(side.dtype, torch.float32)).expand(0)


if _ops.library is not None:
    torch.library.register_autograd(
        "softdtw_cuda::forward", value_backward, setup_context=setup_value, lib=_ops.library
    )
    torch.library.register_autograd("softdtw_cuda::backward", gradient_backward, lib=_ops.library)
