"""Gradient formulas, once for every route: eager autograd, torch.func and vmap, compiled graphs.

Eager tensors and torch.func go through a Function for each of the four operators; compiled graphs call those
of `_ops`, which are registered with the same formulas. (A fifth Function walks a long list of pairs part by
part.) With E the alignment and Omega a direction on the costs:

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

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _backends, _ops
from ._distances import Sides, with_costs, with_embedding
from ._problem import (
    BACKWARD,
    EXPECTED,
    EXPECTED_BACKWARD,
    FORWARD,
    Direction,
    Operator,
    Problem,
)
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


def _save(ctx: Any, row: Sequence[Any], *outputs: Tensor) -> None:
    """Keeps an operator's arguments, and what was computed of them, for `_restore`."""
    ctx.set_materialize_grads(False)
    ctx.options = [None if isinstance(argument, Tensor) else argument for argument in row]
    tensors = [*outputs, *(argument if isinstance(argument, Tensor) else None for argument in row)]
    save(ctx, *tensors)


def _restore(ctx: Any, operator: Operator, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Problem, direction, what the forward had saved, and the outputs; `tensors` are those that ctx keeps."""
    count = len(tensors) - len(ctx.options)
    kept = zip(tensors[count:], ctx.options, strict=True)
    row = [option if tensor is None else tensor for tensor, option in kept]
    return *operator.parts(row), tensors[:count]


def setup_value(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps what `value_backward` needs."""
    value, state = output
    ctx.mark_non_differentiable(state)
    _save(ctx, inputs, value, state)


def value_backward(ctx: Any, grad: Tensor | None, _: object = None) -> tuple[Tensor | None, ...]:
    """Gradients of x and y for the gradient of the values, equation (8)."""
    problem, _, _, (value, state) = _restore(ctx, FORWARD, ctx.saved_tensors)
    needs, _, _ = FORWARD.parts(ctx.needs_input_grad)
    if grad is None or not (needs.x or needs.y):
        return FORWARD.in_order()
    if not problem.needs_gradient:
        raise RuntimeError(
            "softdtw_cuda: an operator called with need_x=False and need_y=False has no gradient; pass "
            "True for the sides whose gradients are wanted."
        )
    # A side may need no gradient though it requires one: see `Problem.sides`.
    problem = problem._replace(need_x=needs.x and problem.need_x, need_y=needs.y and problem.need_y)
    grad_x, grad_y = sum_sides(problem, *gradients(problem, grad, value, state))
    return FORWARD.in_order(x=grad_x, y=grad_y)


def value_jvp(ctx: Any, *tangents: Any) -> Any:
    """Tangent of the values: <E, Omega> with the change of the costs."""
    with outer_forward_mode():
        problem, *_ = _restore(ctx, FORWARD, saved_primals(ctx))
        tangent, _, _ = FORWARD.parts(tangents)
        problem = problem._replace(need_x=False, need_y=False)
        return _expected(problem, _change(problem, *_of_pairs(problem, tangent.x, tangent.y)))[0], None


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
    """Keeps what `gradient_backward` needs."""
    _save(ctx, inputs)


def gradient_backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients wrt the gradient of the values, x and y, for those of the gradients: a double backward."""
    problem, _, (grad, _, _), _ = _restore(ctx, BACKWARD, ctx.saved_tensors)
    direction = _change(problem, a if problem.need_x else None, b if problem.need_y else None)
    if direction.a is None and direction.b is None:
        return BACKWARD.in_order()
    needs, _, _ = BACKWARD.parts(ctx.needs_input_grad)
    problem = problem._replace(need_x=needs.x, need_y=needs.y)
    dot, value, state = _expected(problem, direction)
    grad_x = grad_y = None
    if problem.needs_gradient:
        per_pair_x, per_pair_y, _, _ = expected_gradients(problem, direction, grad, value, state)
        grad_x, grad_y = sum_sides(problem, per_pair_x, per_pair_y)
    return BACKWARD.in_order(grad=dot.to(grad.dtype), x=grad_x, y=grad_y)


def gradient_jvp(ctx: Any, *tangents: Any) -> Any:
    """Tangents of the gradients: linear in that of grad; the Hessian's product with those of the series."""
    with outer_forward_mode():
        problem, _, (grad, value, state), _ = _restore(ctx, BACKWARD, saved_primals(ctx))
        tangent, _, (grad_tangent, _, _) = BACKWARD.parts(tangents)
        results: list[Tensor | None] = [None, None]
        if grad_tangent is not None:
            results = list(gradients(problem, grad_tangent, value, state))
        if tangent.x is not None or tangent.y is not None:
            direction = _change(problem, *_of_pairs(problem, tangent.x, tangent.y))
            _, dual_value, dual_state = _expected(problem, direction)
            second = expected_gradients(problem, direction, grad, dual_value, dual_state)[:2]
            results = [
                more if first is None else first + more for first, more in zip(results, second, strict=True)
            ]
        return tuple(results)


def setup_expected(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Keeps what `expected_backward` needs."""
    _, value, state = output
    ctx.mark_non_differentiable(value, state)
    _save(ctx, inputs, value, state)


def expected_backward(ctx: Any, grad: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    """Gradients of x, y and of the direction's tensors for the gradient of <E, Omega>."""
    problem, direction, _, (value, state) = _restore(ctx, EXPECTED, ctx.saved_tensors)
    needs, direction_needs, _ = EXPECTED.parts(ctx.needs_input_grad)
    need_a, need_b = direction_needs.a, direction_needs.b
    grad_x = grad_y = grad_a = grad_b = None
    if grad is not None:
        problem = problem._replace(need_x=needs.x, need_y=needs.y)
        linear = direction.kind == "tangents"
        direction = direction._replace(need_a=need_a and not linear, need_b=need_b and not linear)
        if problem.needs_gradient or direction.needs_gradient:
            sides = expected_gradients(problem, direction, grad, value, state)
            grad_x, grad_y = sum_sides(problem, *sides[:2])
            grad_a = sum_to(sides[2], direction.a) if direction.need_a else None
            grad_b = sum_to(sides[3], direction.b) if direction.need_b else None
        if linear and (need_a or need_b):
            # <E, Omega> is the derivative of the values along the tangents.
            problem = problem._replace(need_x=need_a, need_y=need_b)
            per_pair_a, per_pair_b = gradients(problem, grad, *_apply_value(problem))
            grad_a = sum_to(per_pair_a, direction.a) if need_a else None
            grad_b = sum_to(per_pair_b, direction.b) if need_b else None
    return EXPECTED.in_order(x=grad_x, y=grad_y, a=grad_a, b=grad_b)


def expected_jvp(ctx: Any, *tangents: Any) -> Any:
    """Tangent of <E, Omega>: its gradients along the tangents of the series and of the direction."""
    with outer_forward_mode():
        problem, direction, _, (value, _) = _restore(ctx, EXPECTED, saved_primals(ctx))
        tangent, direction_tangent, _ = EXPECTED.parts(tangents)
        a_tangent, b_tangent = direction_tangent.a, direction_tangent.b
        problem = problem._replace(need_x=tangent.x is not None, need_y=tangent.y is not None)
        total = torch.zeros_like(value)
        if direction.kind == "tangents" and not (a_tangent is None and b_tangent is None):
            total = total + _expected(problem, Direction("tangents", a_tangent, b_tangent))[0]
            a_tangent = b_tangent = None
        direction = direction._replace(need_a=a_tangent is not None, need_b=b_tangent is not None)
        if problem.needs_gradient or direction.needs_gradient:
            _, value, state = _expected(problem, direction)
            sides = expected_gradients(problem, direction, torch.ones_like(value), value, state)
            along = (*_of_pairs(problem, tangent.x, tangent.y), a_tangent, b_tangent)
            for side, side_tangent in zip(sides, along, strict=True):
                if side_tangent is not None:
                    total = total + (side * side_tangent).sum((1, 2)).to(total.dtype)
        return total, None, None


def setup_expected_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps what the derivative wrt a direction needs, in which the results are linear."""
    problem, direction, (grad, _, _) = EXPECTED_BACKWARD.parts(inputs)
    is_change = direction.kind == ("matrix" if problem.y is None else "tangents")
    ctx.linear = is_change and not direction.needs_gradient
    ctx.tensors = [isinstance(argument, Tensor) for argument in inputs]
    _save(ctx, EXPECTED_BACKWARD.row(problem, Direction(direction.kind), (grad, None, None)))


def expected_gradient_backward(ctx: Any, u: Tensor | None, w: Tensor | None, *_none: Any) -> tuple[Any, ...]:
    """The gradient of a Hessian-vector product wrt the vector, which is one, too: the Hessian is symmetric.

    torch.autograd.functional.hvp takes it; everything else would be a third derivative.
    """
    problem, _, (grad, _, _), _ = _restore(ctx, EXPECTED_BACKWARD, ctx.saved_tensors)
    # torch's flags say what could be asked for, its engine what is.
    needs, direction_needs, (need_grad, _, _) = EXPECTED_BACKWARD.parts(asked_gradients(ctx, ctx.tensors))
    if not ctx.linear or need_grad or needs.x or needs.y:
        raise RuntimeError(THIRD_DERIVATIVE)
    direction = _change(problem, u if problem.need_x else None, w if problem.need_y else None)
    if direction.a is None and direction.b is None:
        return EXPECTED_BACKWARD.in_order()
    problem = problem._replace(need_x=direction_needs.a, need_y=direction_needs.b)
    _, value, state = _expected(problem, direction)
    per_pair_a, per_pair_b, _, _ = expected_gradients(problem, direction, grad, value, state)
    return EXPECTED_BACKWARD.in_order(
        a=per_pair_a if problem.need_x else None, b=per_pair_b if problem.need_y else None
    )


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


def _map_values(
    function: Any, operator: Operator, size: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]
) -> Any:
    """vmap of `_Value` or `_Expected`."""
    problem, direction, _ = operator.parts(arguments)
    dims, direction_dims, _ = operator.parts(in_dims)
    problem, batch = fold_problem(size, dims, problem)
    direction = fold_direction(size, direction_dims, batch, direction)
    *numbers, state = _apply(function, *operator.row(problem, direction))
    # The state belongs to all pairs together: the gradients' map folds the same dimension again and reads it.
    return (*(each.view(size, batch) for each in numbers), state), (*(0 for _ in numbers), None)


def _map_gradients(
    function: Any, operator: Operator, size: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]
) -> Any:
    """vmap of `_Gradient` or `_ExpectedGradient`."""
    problem, direction, (grad, value, state) = operator.parts(arguments)
    dims, direction_dims, (grad_dim, value_dim, _) = operator.parts(in_dims)
    if all(dim is None for dim in (*dims.tensors, *(direction_dims or ()))):
        # Several gradients of the same values: each is a multiple of one.
        row = operator.row(problem, direction, (torch.ones_like(value), value, state))
        sides = tuple(_scale(side, grad.movedim(grad_dim, 0)) for side in _apply(function, *row))
        return sides, tuple(None if side.dim() == 1 else 0 for side in sides)
    problem, batch = fold_problem(size, dims, problem)
    direction = fold_direction(size, direction_dims, batch, direction)
    grad = fold_numbers(size, grad_dim, batch, grad)
    value = fold_numbers(size, value_dim, batch, value)
    row = operator.row(problem, direction, (grad, value, state))
    return unfold(size, batch, _apply(function, *row))


def _apply(function: Any, *arguments: Any) -> Any:
    _is_compiling()  # torch.compile enters here, too, where it has given up the caller
    if in_transform() or holds_wrapped(*arguments):
        return function.apply(*arguments)
    return plain_apply(function)(*arguments)


# The arguments of each are those of its operator, in a row: torch looks for tensors in no tuple.


class _Value(torch.autograd.Function):
    """A Problem to values and state."""

    setup_context = staticmethod(setup_value)
    backward = staticmethod(value_backward)
    jvp = staticmethod(value_jvp)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _backends.forward(FORWARD.parts(arguments)[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _map_values(_Value, FORWARD, info.batch_size, in_dims, arguments)


class _Gradient(torch.autograd.Function):
    """Gradient of the values, values, state and a Problem to gradients, one per pair."""

    setup_context = staticmethod(setup_gradient)
    backward = staticmethod(gradient_backward)
    jvp = staticmethod(gradient_jvp)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        problem, _, saved = BACKWARD.parts(arguments)
        return _backends.backward(problem, *saved)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _map_gradients(_Gradient, BACKWARD, info.batch_size, in_dims, arguments)


class _Expected(torch.autograd.Function):
    """A Problem and a Direction to <E, Omega>, values and state."""

    setup_context = staticmethod(setup_expected)
    backward = staticmethod(expected_backward)
    jvp = staticmethod(expected_jvp)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        problem, direction, _ = EXPECTED.parts(arguments)
        return _backends.expected(problem, direction)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _map_values(_Expected, EXPECTED, info.batch_size, in_dims, arguments)


class _ExpectedGradient(torch.autograd.Function):
    """Gradient of <E, Omega>, values, state, a Problem and a Direction to gradients, one per pair."""

    setup_context = staticmethod(setup_expected_gradient)
    backward = staticmethod(expected_gradient_backward)
    jvp = staticmethod(third_derivative)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        problem, direction, saved = EXPECTED_BACKWARD.parts(arguments)
        return _backends.expected_backward(problem, direction, *saved)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _map_gradients(_ExpectedGradient, EXPECTED_BACKWARD, info.batch_size, in_dims, arguments)


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
        _save(ctx, FORWARD.row(problem))
        ctx.parts = count, part, pairs_of
        ctx.sides = problem.sides
        values = [
            _backends.forward(problem._replace(pairs=pairs_of(start, min(start + part, count))))[0]
            for start in range(0, count, part)
        ]
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        problem, *_ = _restore(ctx, FORWARD, ctx.saved_tensors)
        need_x, need_y = _of_sides(ctx.sides, *ctx.needs_input_grad[:2])
        problem = problem._replace(need_x=need_x, need_y=need_y)
        x, y = problem.x, problem.y
        count, part, pairs_of = ctx.parts
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
    problem = problem._replace(need_x=need_x, need_y=need_y)
    if _is_compiling():
        return _backends.forward(problem)
    result: tuple[Tensor, Tensor] = _apply(_Value, *FORWARD.row(problem))
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
    result: tuple[Tensor, Tensor] = _record(_Gradient, *BACKWARD.row(problem, None, (grad, value, state)))
    return result


def _expected(problem: Problem, direction: Direction) -> tuple[Tensor, Tensor, Tensor]:
    """<E, Omega>, values and state."""
    result: tuple[Tensor, Tensor, Tensor]
    if _is_called_directly(direction.a, direction.b):
        return _backends.expected(problem, direction)
    if in_transform() or not (problem.needs_gradient or direction.needs_gradient):
        # A transform further out may ask for gradients of either side, which take the state.
        problem = problem._replace(need_x=True, need_y=problem.y is not None)
    result = _record(_Expected, *EXPECTED.row(problem, direction))
    return result


def expected_gradients(
    problem: Problem, direction: Direction, grad: Tensor, value: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, y and of the direction's tensors, one per pair, for the gradient of <E, Omega>."""
    result: tuple[Tensor, Tensor, Tensor, Tensor]
    if _is_called_directly(grad, direction.a, direction.b):
        return _backends.expected_backward(problem, direction, grad, value, state)
    row = EXPECTED_BACKWARD.row(problem, direction, (grad, value, state))
    # Not leaves: of those the engine does not tell whether their gradient is asked for.
    result = _record(
        _ExpectedGradient,
        *(
            argument.view_as(argument) if isinstance(argument, Tensor) and argument.is_leaf else argument
            for argument in row
        ),
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
    for operator, backward, setup in (
        (FORWARD, value_backward, setup_value),
        (BACKWARD, gradient_backward, setup_gradient),
        (EXPECTED, expected_backward, setup_expected),
        (EXPECTED_BACKWARD, expected_gradient_backward, setup_expected_gradient),
    ):
        torch.library.register_autograd(
            f"softdtw_cuda::{operator.name}", backward, setup_context=setup, lib=_ops.library
        )
