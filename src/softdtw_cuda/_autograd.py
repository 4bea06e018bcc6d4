"""Gradient formulas, once for every route: eager autograd, torch.func and vmap, compiled graphs.

Eager tensors and torch.func go through four Functions; compiled graphs call the operators of `_ops`, which
are registered with the same formulas. With E the alignment and Omega a direction on the costs:

    Value              the values; their derivative along Omega is <E, Omega>
    Gradient           grad_b E_b, contracted with what the costs are made of
    Expected           <E, Omega>
    ExpectedGradient   the gradient of sum_b grad_b <E_b, Omega_b>

Value's gradient is Gradient and its tangent Expected. With cotangents A and B of Gradient's results, and with
Omega the change of the costs along them, <A, grad_x> + <B, grad_y> = sum_b grad_b <E_b, Omega_b>: Gradient's
own gradient is Expected (that of grad) and ExpectedGradient (that of the series). The Hessian is symmetric,
so its tangent is ExpectedGradient, too. Third derivatives would be those of ExpectedGradient, which raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _backends, _ops
from ._distances import Sides, with_costs, with_embedding
from ._problem import OPERANDS, Direction, Problem, problem_and_direction
from ._sums import add_in_order, gather, sum_sides, sum_to
from ._torch_compat import (
    asked_gradients,
    holds_mapped_grad,
    holds_wrapped,
    in_forward_mode,
    in_transform,
    is_differentiated,
    is_grad_batch,
    map_over_grads,
    outer_forward_mode,
    plain_apply,
    save,
    saved_primals,
)
from ._vmap import fold_direction, fold_numbers, fold_problem, unfold

PairRange = Callable[[int, int], Tensor]

# Formulas. `ctx` and the arguments of setup are those of torch.autograd.Function and of torch.library alike.


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.set_materialize_grads(False)
    save(ctx, *tensors)


def _keep_problem(ctx: Any, fields: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """Keeps the options of a problem; its tensors are for the caller to save."""
    x, y, x_lengths, y_lengths, gamma, bandwidth, need_x, need_y, pairs = fields
    ctx.options = gamma, bandwidth
    ctx.need = need_x, need_y
    return x, y, x_lengths, y_lengths, pairs


def _kept_problem(ctx: Any, tensors: list[Any], need_x: bool, need_y: bool) -> Problem:
    x, y, x_lengths, y_lengths, pairs = tensors
    gamma, bandwidth = ctx.options
    return Problem(x, y, x_lengths, y_lengths, gamma, bandwidth, need_x, need_y, pairs)


def setup_value(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps what `value_backward` needs; inputs are the fields of a Problem that operators have."""
    value, state = output
    ctx.mark_non_differentiable(state)
    _save(ctx, value, state, *_keep_problem(ctx, inputs))


def value_backward(ctx: Any, grad: Tensor | None, _: object = None) -> tuple[Tensor | None, ...]:
    """Gradients of x and y for the gradient of the values, equation (8)."""
    value, state, *tensors = ctx.saved_tensors
    grad_x = grad_y = None
    if grad is not None and any(ctx.needs_input_grad[:2]):
        if not any(ctx.need):
            raise RuntimeError(
                "softdtw_cuda: an operator called with need_x=False and need_y=False has no gradient; pass "
                "True for the sides whose gradients are wanted."
            )
        # A side may need no gradient though it requires one: see `Problem.sides`.
        need_x = ctx.needs_input_grad[0] and ctx.need[0]
        need_y = ctx.needs_input_grad[1] and ctx.need[1]
        problem = _kept_problem(ctx, tensors, need_x, need_y)
        per_pair = gradients(problem, grad, value, state)
        grad_x, grad_y = sum_sides(problem, *per_pair)
    return grad_x, grad_y, None, None, None, None, None, None, None


def value_jvp(ctx: Any, x_tangent: Tensor | None, y_tangent: Tensor | None, *_: object) -> Any:
    """Tangent of the values: <E, Omega> with the change of the costs."""
    with outer_forward_mode():
        _, _, *tensors = saved_primals(ctx)
        problem = _kept_problem(ctx, tensors, False, False)
        tangents = _of_pairs(problem, x_tangent, y_tangent)
        return _expected(problem, _change(problem, *tangents))[0], None


def _change(problem: Problem, x_tangent: Tensor | None, y_tangent: Tensor | None) -> Direction:
    """The direction in which the costs change with what they are made of."""
    if problem.y is None:
        return Direction("matrix", x_tangent)
    return Direction("tangents", x_tangent, y_tangent)


def _of_pairs(problem: Problem, x_tangent: Tensor | None, y_tangent: Tensor | None) -> list[Tensor | None]:
    """The tangents of each pair's own series."""
    if problem.pairs is None:
        return [x_tangent, y_tangent]
    return [
        None if tangent is None else gather(tangent, index.long().clamp(0, tangent.shape[0] - 1))
        for tangent, index in zip((x_tangent, y_tangent), problem.pairs.unbind(1), strict=True)
    ]


def setup_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps what `gradient_backward` needs; inputs are the gradient, values, state and a Problem's fields."""
    grad, value, state, *fields = inputs
    _save(ctx, grad, value, state, *_keep_problem(ctx, tuple(fields)))


def gradient_backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients wrt the gradient of the values, x and y, for those of the gradients: a double backward."""
    grad, _, _, *tensors = ctx.saved_tensors
    need_x, need_y = ctx.needs_input_grad[3:5]
    a, b = a if ctx.need[0] else None, b if ctx.need[1] else None
    nothing = (None,) * (len(ctx.needs_input_grad) - 5)
    if a is None and b is None:
        return None, None, None, None, None, *nothing
    problem = _kept_problem(ctx, tensors, need_x, need_y)
    direction = _change(problem, a, b)
    dot, value, state = _expected(problem, direction)
    grad_x = grad_y = None
    if need_x or need_y:
        per_pair_x, per_pair_y, _, _ = expected_gradients(problem, direction, grad, value, state)
        grad_x, grad_y = sum_sides(problem, per_pair_x, per_pair_y)
    return dot.to(grad.dtype), None, None, grad_x, grad_y, *nothing


def gradient_jvp(ctx: Any, grad_tangent: Tensor | None, *tangents: Any) -> Any:
    """Tangents of the gradients: linear in that of grad; the Hessian's product with those of the series."""
    with outer_forward_mode():
        grad, value, state, *tensors = saved_primals(ctx)
        problem = _kept_problem(ctx, tensors, *ctx.need)
        x_tangent, y_tangent = tangents[2:4]
        results: list[Tensor | None] = [None, None]
        if grad_tangent is not None:
            results = list(gradients(problem, grad_tangent, value, state))
        if x_tangent is not None or y_tangent is not None:
            direction = _change(problem, *_of_pairs(problem, x_tangent, y_tangent))
            _, dual_value, dual_state = _expected(problem, direction)
            second = expected_gradients(problem, direction, grad, dual_value, dual_state)[:2]
            results = [
                more if first is None else first + more for first, more in zip(results, second, strict=True)
            ]
        return tuple(results)


def setup_expected(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Keeps what `expected_backward` needs; inputs are the fields of a Problem and of a Direction."""
    _, value, state = output
    ctx.mark_non_differentiable(value, state)
    *fields, ctx.kind, a, b, need_a, need_b = inputs
    ctx.need_direction = need_a, need_b
    _save(ctx, value, state, a, b, *_keep_problem(ctx, tuple(fields)))


def expected_backward(ctx: Any, grad: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    """Gradients of x, y and of the direction's tensors for the gradient of <E, Omega>."""
    value, state, a, b, *tensors = ctx.saved_tensors
    count = len(ctx.needs_input_grad)
    nothing = (None,) * (count - 7)
    need_a, need_b = ctx.needs_input_grad[count - 4 : count - 2]
    grad_x = grad_y = grad_a = grad_b = None
    if grad is not None:
        problem = _kept_problem(ctx, tensors, *ctx.needs_input_grad[:2])
        linear = ctx.kind == "tangents"
        direction = Direction(ctx.kind, a, b, need_a and not linear, need_b and not linear)
        if problem.needs_gradient or direction.need_a or direction.need_b:
            sides = expected_gradients(problem, direction, grad, value, state)
            grad_x, grad_y = sum_sides(problem, *sides[:2])
            grad_a = sum_to(sides[2], a) if direction.need_a else None
            grad_b = sum_to(sides[3], b) if direction.need_b else None
        if linear and (need_a or need_b):
            # <E, Omega> is the derivative of the values along the tangents.
            problem = problem._replace(need_x=need_a, need_y=need_b)
            per_pair_a, per_pair_b = gradients(problem, grad, *_apply_value(problem))
            grad_a = sum_to(per_pair_a, a) if need_a else None
            grad_b = sum_to(per_pair_b, b) if need_b else None
    return grad_x, grad_y, *nothing, None, grad_a, grad_b, None, None


def expected_jvp(ctx: Any, *tangents: Any) -> Any:
    """Tangent of <E, Omega>: its gradients along the tangents of the series and of the direction."""
    with outer_forward_mode():
        value, state, a, b, *tensors = saved_primals(ctx)
        along = [*tangents[:2], *tangents[-4:-2]]
        problem = _kept_problem(ctx, tensors, along[0] is not None, along[1] is not None)
        total = torch.zeros_like(value)
        if ctx.kind == "tangents" and not (along[2] is None and along[3] is None):
            total = total + _expected(problem, Direction("tangents", along[2], along[3]))[0]
            along[2:] = None, None
        direction = Direction(ctx.kind, a, b, along[2] is not None, along[3] is not None)
        if any(tangent is not None for tangent in along):
            _, value, state = _expected(problem, direction)
            sides = expected_gradients(problem, direction, torch.ones_like(value), value, state)
            along[:2] = _of_pairs(problem, *along[:2])
            for side, tangent in zip(sides, along, strict=True):
                if tangent is not None:
                    total = total + (side * tangent).sum((1, 2)).to(total.dtype)
        return total, None, None


def setup_expected_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps what the derivative wrt a direction needs, in which the results are linear."""
    problem, direction = problem_and_direction(inputs[3:])
    is_change = direction.kind == ("matrix" if problem.y is None else "tangents")
    ctx.linear = is_change and not (direction.need_a or direction.need_b)
    ctx.tensors = [isinstance(each, Tensor) for each in inputs]
    _save(ctx, inputs[0], *_keep_problem(ctx, inputs[3:-5]))


def expected_gradient_backward(ctx: Any, u: Tensor | None, w: Tensor | None, *_none: Any) -> tuple[Any, ...]:
    """The gradient of a Hessian-vector product wrt the vector, which is one, too: the Hessian is symmetric.

    torch.autograd.functional.hvp takes it; everything else would be a third derivative.
    """
    grad, *tensors = ctx.saved_tensors
    count = len(ctx.needs_input_grad)
    # torch's flags say what could be asked for, its engine what is.
    asked = asked_gradients(ctx, ctx.tensors)
    if not ctx.linear or any(asked[k] for k in (0, 3, 4)):
        raise RuntimeError(THIRD_DERIVATIVE)
    problem = _kept_problem(ctx, tensors, asked[count - 4], asked[count - 3])
    direction = _change(problem, u if ctx.need[0] else None, w if ctx.need[1] else None)
    if direction.a is None and direction.b is None:
        return (None,) * count
    _, value, state = _expected(problem, direction)
    per_pair = expected_gradients(problem, direction, grad, value, state)
    grad_a = per_pair[0] if asked[count - 4] else None
    grad_b = per_pair[1] if asked[count - 3] else None
    return *(None,) * (count - 4), grad_a, grad_b, None, None


THIRD_DERIVATIVE = (
    "softdtw_cuda: third derivatives are not implemented, nor derivatives of a gradient wrt omega; do not "
    "differentiate a second derivative of Soft-DTW, nor a gradient of the expected cost, sharp Soft-DTW or "
    "entropy (leave create_graph=True out of the last backward, detach what it returns)."
)


def third_derivative(ctx: Any, *_: Any) -> NoReturn:
    """Refused where it is asked for, so that it is never a wrong number."""
    raise RuntimeError(THIRD_DERIVATIVE)


def _scale(per_pair: Tensor, grad: Tensor) -> Tensor:
    """Gradients, one per pair, for `grad` (..., B), from those for ones.

    A zero stays a zero: no factor, infinite or NaN, brings a gradient to the padding.
    """
    if per_pair.dim() == 1:
        return per_pair
    return torch.where(per_pair == 0, per_pair, per_pair * grad[..., None, None]).to(per_pair.dtype)


def _map_gradients(function: Any, size: int, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> Any:
    """vmap of `_Gradient`, or of `_ExpectedGradient`, whose inputs end with a Direction."""
    grad_dim, value_dim, _, *dims = in_dims
    grad, value, state, *fields = inputs
    if all(dim is None for dim in dims):  # several gradients of the same values: each is a multiple of one
        per_pair = _apply(function, torch.ones_like(value), value, state, *fields)
        sides = tuple(_scale(side, grad.movedim(grad_dim, 0)) for side in per_pair)
        return sides, tuple(None if side.dim() == 1 else 0 for side in per_pair)
    folded, batch = fold_problem(size, tuple(dims[:OPERANDS]), Problem(*fields[:OPERANDS]))
    operands = folded.operands
    if len(fields) > OPERANDS:
        direction = Direction(*fields[OPERANDS:])
        operands += fold_direction(size, tuple(dims[-4:-2]), batch, direction)
    grad = fold_numbers(size, grad_dim, batch, grad)
    value = fold_numbers(size, value_dim, batch, value)
    return unfold(size, batch, _apply(function, grad, value, state, *operands))


def _apply(function: Any, *arguments: Any) -> Any:
    _is_compiling()  # torch.compile enters here, too, where it has given up the caller
    if in_transform() or holds_wrapped(*arguments):
        return function.apply(*arguments)
    return plain_apply(function)(*arguments)


class _Value(torch.autograd.Function):
    """Fields of a Problem to values and state."""

    setup_context = staticmethod(setup_value)
    backward = staticmethod(value_backward)
    jvp = staticmethod(value_jvp)

    @staticmethod
    def forward(*problem: Any) -> tuple[Tensor, Tensor]:
        return _backends.forward(Problem(*problem))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        problem, batch = fold_problem(info.batch_size, in_dims, Problem(*inputs))
        value, state = _apply(_Value, *problem.operands)
        # The state belongs to all pairs together: `_Gradient` folds the same dimension again and reads it.
        return (value.view(info.batch_size, batch), state), (0, None)


class _Gradient(torch.autograd.Function):
    """Gradient of the values, values, state and fields of a Problem to gradients, one per pair."""

    setup_context = staticmethod(setup_gradient)
    backward = staticmethod(gradient_backward)
    jvp = staticmethod(gradient_jvp)

    @staticmethod
    def forward(grad: Tensor, value: Tensor, state: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
        return _backends.backward(Problem(*problem), grad, value, state)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _map_gradients(_Gradient, info.batch_size, in_dims, inputs)


class _Expected(torch.autograd.Function):
    """Fields of a Problem and of a Direction to <E, Omega>, values and state."""

    setup_context = staticmethod(setup_expected)
    backward = staticmethod(expected_backward)
    jvp = staticmethod(expected_jvp)

    @staticmethod
    def forward(*fields: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _backends.expected(*problem_and_direction(fields))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        size = info.batch_size
        problem, direction = problem_and_direction(inputs)
        problem, batch = fold_problem(size, in_dims[:OPERANDS], problem)
        direction = fold_direction(size, in_dims[-4:-2], batch, direction)
        dot, value, state = _apply(_Expected, *problem.operands, *direction)
        return (dot.view(size, batch), value.view(size, batch), state), (0, 0, None)


class _ExpectedGradient(torch.autograd.Function):
    """Gradient of <E, Omega>, values, state, a Problem and a Direction to gradients, one per pair."""

    setup_context = staticmethod(setup_expected_gradient)
    backward = staticmethod(expected_gradient_backward)
    jvp = staticmethod(third_derivative)

    @staticmethod
    def forward(
        grad: Tensor, value: Tensor, state: Tensor, *fields: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _backends.expected_backward(*problem_and_direction(fields), grad, value, state)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _map_gradients(_ExpectedGradient, info.batch_size, in_dims, inputs)


# What to call


def values(problem: Problem) -> Tensor:
    """(B,) Soft-DTW values of a problem, differentiable in x and y."""
    if problem.batch == 0:
        return _no_values(problem.x) if problem.y is None else _no_values(problem.x) + _no_values(problem.y)
    return _apply_value(with_source(problem))[0]


class _PairValues(torch.autograd.Function):
    """Values of a long list of pairs, part by part. No state is kept: the backward walks forward again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, problem: Problem, count: int, part: int, pairs_of: PairRange
    ) -> Tensor:
        values = [
            _backends.forward(problem._replace(pairs=pairs_of(start, min(start + part, count))))[0]
            for start in range(0, count, part)
        ]
        ctx.save_for_backward(x, y, problem.x_lengths, problem.y_lengths)
        ctx.options = problem.gamma, problem.bandwidth, problem.sides
        ctx.parts = count, part, pairs_of
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, x_lengths, y_lengths = ctx.saved_tensors
        count, part, pairs_of = ctx.parts
        gamma, bandwidth, sides = ctx.options
        need_x, need_y = _of_sides(sides, *ctx.needs_input_grad[:2])
        problem = Problem(x, y, x_lengths, y_lengths, gamma, bandwidth, need_x, need_y)
        grad_x, grad_y = (x.new_zeros(side.shape, dtype=problem.value_dtype) for side in (x, y))
        for start in range(0, count, part):
            stop = min(start + part, count)
            pairs = pairs_of(start, stop)
            listed = problem._replace(pairs=pairs)
            value, state = _backends.forward(listed)
            per_pair_x, per_pair_y = gradients(listed, grad[start:stop], value, state)
            del state
            if need_x:
                grad_x = add_in_order(grad_x, per_pair_x, pairs[:, 0])
            if need_y:
                grad_y = add_in_order(grad_y, per_pair_y, pairs[:, 1])
        first = grad_x.to(x.dtype) if need_x else None
        second = grad_y.to(y.dtype) if need_y else None
        return first, second, None, None, None, None


def values_in_parts(problem: Problem, count: int, part: int, pairs_of: PairRange) -> Tensor:
    """(count,) values of a fused problem without `pairs`: those of its series that `pairs_of` names.

    Args:
        part: pairs that are computed together. Fewer than `count` of them are computed again for the
            gradient, so that no more than a part's state is ever kept.
        pairs_of: gives pairs `start` to `stop` of the list, as (stop - start, 2) int32.
    """
    if part >= count or in_transform() or in_forward_mode():  # they hide sizes, or take tangents
        return _apply_value(problem._replace(pairs=pairs_of(0, count)))[0]
    result: Tensor = _apply(_PairValues, problem.x, problem.y, problem, count, part, pairs_of)
    return result


def with_source(problem: Problem) -> Problem:
    """The problem with its costs, or with series whose squared Euclidean distances are the costs."""
    if not problem.fused and problem.y is not None:
        return with_costs(problem)
    return problem if problem.metric.embedding is None else with_embedding(problem)


def alignment(problem: Problem) -> Tensor:
    """(B, N, M) soft alignment E of equation (8), differentiable."""
    if problem.y is not None:
        problem = with_costs(problem)
    if problem.batch == 0:
        return problem.x * 0
    problem = problem._replace(need_x=True)
    value, state = _apply_value(problem)
    return gradients(problem, torch.ones_like(value), value, state)[0]


def expected(problem: Problem, direction: Direction) -> tuple[Tensor, Tensor]:
    """(B,) expected costs <E, Omega> of a problem `with_source`, differentiable in both's tensors, and (B,)
    values, which are not."""
    if problem.batch == 0:
        sides = (problem.x, problem.y, direction.a, direction.b)
        total = _no_values(problem.x)
        total = sum((_no_values(side).to(total.dtype) for side in sides[1:] if side is not None), total)
        return total, total.detach()
    problem = problem._replace(need_x=_may_need(problem.x), need_y=_may_need(problem.y))
    direction = direction._replace(need_a=_may_need(direction.a), need_b=_may_need(direction.b))
    return _expected(problem, direction)[:2]


def _may_need(side: Tensor | None) -> bool:
    """Whether a gradient of this side may be asked for. Transforms hide it from a tensor that they wrap."""
    if side is None or not torch.is_grad_enabled():
        return False
    return side.requires_grad or in_transform()


def _is_compiling() -> bool:
    """Whether torch.compile is tracing, so that operators are called; refused in forward mode.

    torch has no way to give an operator a tangent, and takes a missing one for zero.
    """
    if not torch.compiler.is_compiling():
        return False
    if in_forward_mode():
        raise RuntimeError(COMPILED_FORWARD_MODE)
    return True


COMPILED_FORWARD_MODE = (
    "softdtw_cuda: no forward mode inside a compiled graph, where operators have no tangents; leave out "
    "fullgraph=True, so that this part runs uncompiled, or take reverse mode."
)


def _of_sides(sides: Sides, need_x: bool, need_y: bool) -> tuple[bool, bool]:
    """The gradients that are needed where the values are differentiated by these sides alone."""
    return need_x and sides != "y", need_y and sides != "x"


def _apply_value(problem: Problem) -> tuple[Tensor, Tensor]:
    need_x = problem.need_x or _may_need(problem.x)
    need_y = problem.need_y or _may_need(problem.y)
    need_x, need_y = _of_sides(problem.sides, need_x, need_y)
    operands = (*problem[:6], need_x, need_y, problem.pairs)  # quicker than a new problem
    result: tuple[Tensor, Tensor]
    result = torch.ops.softdtw_cuda.forward(*operands) if _is_compiling() else _apply(_Value, *operands)
    return result


def gradients(problem: Problem, grad: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and y, one per pair, for the gradient of the values."""
    if not _is_compiling() and is_grad_batch(grad):
        per_pair_x, per_pair_y = _gradients(problem, torch.ones_like(value), value, state)
        return _scale(per_pair_x, grad), _scale(per_pair_y, grad)
    return _gradients(problem, grad, value, state)


def _gradients(problem: Problem, grad: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    if _is_compiling() or not is_differentiated():
        return _backends.backward(problem, grad, value, state)
    result: tuple[Tensor, Tensor] = _record(_Gradient, grad, value, state, *problem.operands)
    return result


def _expected(problem: Problem, direction: Direction) -> tuple[Tensor, Tensor, Tensor]:
    """<E, Omega>, values and state."""
    result: tuple[Tensor, Tensor, Tensor]
    if _is_called_directly(direction.a, direction.b):
        return _backends.expected(problem, direction)
    if in_transform() or not (problem.needs_gradient or direction.need_a or direction.need_b):
        # A transform further out may ask for gradients of either side, which take the state.
        problem = problem._replace(need_x=True, need_y=problem.y is not None)
    result = _record(_Expected, *problem.operands, *direction)
    return result


def expected_gradients(
    problem: Problem, direction: Direction, grad: Tensor, value: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, y and of the direction's tensors, one per pair, for the gradient of <E, Omega>."""
    result: tuple[Tensor, Tensor, Tensor, Tensor]
    if _is_called_directly(grad, direction.a, direction.b):
        return _backends.expected_backward(problem, direction, grad, value, state)
    arguments = (grad, value, state, *problem.operands, *direction)
    # Not leaves: of those the engine does not tell whether their gradient is asked for.
    result = _record(
        _ExpectedGradient,
        *(each.view_as(each) if isinstance(each, Tensor) and each.is_leaf else each for each in arguments),
    )
    return result


def _is_called_directly(*cotangents: Tensor | None) -> bool:
    """Whether nobody needs to see a Function between the caller and the backend."""
    if _is_compiling():
        return True
    return not (is_differentiated() or holds_mapped_grad(*cotangents))


def _record(function: Any, *arguments: Any) -> Any:
    if holds_mapped_grad(*arguments):
        return map_over_grads(function, *arguments)
    return _apply(function, *arguments)


def _no_values(side: Tensor) -> Tensor:
    """(0,) values that still backpropagate to `side`: in an empty batch there is no pair to compute."""
    return (side.sum() * 0).to(torch.promote_types(side.dtype, torch.float32)).expand(0)


if _ops.library is not None:
    for name, backward, setup in (
        ("forward", value_backward, setup_value),
        ("backward", gradient_backward, setup_gradient),
        ("expected", expected_backward, setup_expected),
        ("expected_backward", expected_gradient_backward, setup_expected_gradient),
    ):
        torch.library.register_autograd(
            f"softdtw_cuda::{name}", backward, setup_context=setup, lib=_ops.library
        )
