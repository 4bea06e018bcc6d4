"""What the public functions call: the operators with gradients, by the shortest way for the tensors at hand.

Plain eager tensors go past torch's dispatcher, which costs less than half as much host time (44 against 103
us on the machine where both were measured, forward and backward, kernels left out); small ones on a GPU get
their gradients along with their values. Compiled graphs call the operators; torch.func has Functions of its
own. All of them share the formulas of `_ops`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._backends import backend
from ._memory import NotInMemory, in_memory
from ._ops import (
    cost_backward,
    cost_forward,
    cost_gradient,
    cost_setup,
    fused_backward,
    fused_forward,
    fused_gradients,
    fused_setup,
    refuse_second_order,
    second_order,
)
from ._reduction import Reduction, reduced

if TYPE_CHECKING:
    from ._cuda.at_once import SmallPairs

_in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
_without_dead_wrapper: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
"""The tensor inside, if this is one that was kept beyond its transform."""


def _in_capture(stream: int) -> bool:
    """Whether a graph is being recorded on the current stream, which is `stream`; on 0 none ever is."""
    return stream != 0 and torch.cuda.is_current_stream_capturing()


def _may_multiply_by(grad: Tensor) -> bool:
    """Whether kept gradients may be multiplied by `grad` in place: where nobody can tell.

    That is for plain numbers (no subclass, transform, or several gradients of is_grads_batched).
    """
    if type(grad) is not Tensor or torch.compiler.is_compiling() or _in_transform():
        return False
    try:
        grad.data_ptr()
    except RuntimeError:  # it stands for several
        return False
    return True


# Plain eager tensors


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        gamma: float,
        bandwidth: int,
        x_lengths: Tensor | None,
        y_lengths: Tensor | None,
    ) -> Tensor:
        kernels = backend(x.device.type)
        value: Tensor
        value, state = kernels.fused_forward(x, y, gamma, bandwidth, x_lengths, y_lengths, True)
        ctx.gamma, ctx.bandwidth, ctx.kernels = gamma, bandwidth, kernels
        ctx.save_for_backward(x, y, value, state, x_lengths, y_lengths)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        return *fused_gradients(ctx, grad, ctx.kernels.fused_backward), None, None, None, None


class _Cost(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        cost: Tensor,
        gamma: float,
        bandwidth: int,
        x_lengths: Tensor | None,
        y_lengths: Tensor | None,
    ) -> Tensor:
        kernels = backend(cost.device.type)
        value: Tensor
        value, state = kernels.cost_forward(cost, gamma, bandwidth, x_lengths, y_lengths, True)
        ctx.gamma, ctx.bandwidth, ctx.kernels = gamma, bandwidth, kernels
        ctx.save_for_backward(cost, value, state, x_lengths, y_lengths)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        return cost_gradient(ctx, grad, ctx.kernels.cost_backward), None, None, None, None


class _FusedAtOnce(torch.autograd.Function):
    """For problems so small that the host is busier than the GPU: the gradient is computed with the value.

    What is left for the backward, which runs in a thread of autograd's with cold caches, is one product. The
    first backward makes it in place, so that there is never a second copy; another one, of a graph that was
    retained, computes the gradients anew. What a CUDA graph writes or reads at every replay stays as it is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, pairs: SmallPairs) -> Tensor:
        need_x, need_y, _ = ctx.needs_input_grad
        result, gradients, ctx.stream, ctx.captured = pairs(x, y, need_x, need_y)
        ctx.pairs, ctx.kept = pairs, [gradients]
        ctx.save_for_backward(x, y)  # changing them must be an error as ever
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        x, y = ctx.saved_tensors
        try:
            gradients = kept = ctx.kept.pop()  # by one of several threads
        except IndexError:
            kept = None
        if kept is None:
            need_x, need_y, _ = ctx.needs_input_grad
            _, gradients, *_ = ctx.pairs(in_memory(x), in_memory(y), need_x, need_y)
        grad_x, grad_y = gradients
        # Autograd is on the forward's stream. A graph may be replayed without the forward of what is kept.
        in_place = not ctx.captured and _may_multiply_by(grad) and not _in_capture(ctx.stream)
        if not in_place:
            grad = in_memory(grad)  # a product with zeros that torch has put off would be put off, too
        if grad.dim():
            grad = grad.view(-1, 1, 1)
        if grad_x is not None:
            grad_x = grad_x.mul_(grad) if in_place and not grad_x.is_inference() else grad_x * grad
        if grad_y is not None:
            grad_y = grad_y.mul_(grad) if in_place and not grad_y.is_inference() else grad_y * grad
        if kept is not None and not in_place:
            ctx.kept.append(kept)
        return grad_x, grad_y, None


_MOST_CELLS_AT_ONCE = 2**21
_MOST_STEPS_AT_ONCE = 2**10
_MOST_NUMBERS_AT_ONCE = 2**20


def are_small(batch: int, n: int, m: int, d: int) -> bool:
    """Whether pairs have few cells, few steps to take one after the other, and few numbers to keep."""
    return (
        n + m <= _MOST_STEPS_AT_ONCE
        and batch * n * m <= _MOST_CELLS_AT_ONCE
        and batch * (n + m) * d <= _MOST_NUMBERS_AT_ONCE
        and torch.version.hip is None
    )


def is_small(x: Tensor, y: Tensor, x_lengths: Tensor | None, y_lengths: Tensor | None) -> bool:
    """Whether x and y can go at once.

    Not with lengths: a gradient that is not finite would reach the padding as NaN.
    """
    if not (x.is_cuda and x.dtype == torch.float32 and x_lengths is None and y_lengths is None):
        return False
    (batch, n, d), (y_batch, m, _) = x.shape, y.shape
    return batch == y_batch and are_small(batch, n, m, d)


@functools.lru_cache(maxsize=256)
def small_pairs(
    x_shape: torch.Size,
    y_shape: torch.Size,
    device: torch.device,
    gamma: float,
    bandwidth: int,
    reduction: Reduction,
) -> SmallPairs:
    """What computes for small pairs like these; made once."""
    from ._cuda.at_once import SmallPairs

    return SmallPairs(x_shape, y_shape, device.index, gamma, bandwidth, reduction)


_fused_with_gradient: Callable[..., Tensor] = _Fused.apply
# What _FusedAtOnce.apply calls in the end; a third of its time goes before, on what its callers know.
_apply_at_once: Callable[..., Tensor] = super(torch.autograd.Function, _FusedAtOnce).apply
_cost_with_gradient: Callable[..., Tensor] = _Cost.apply


# torch.func differentiates a Function with a setup_context, but not (in torch 2.13) an operator. It always
# asks for a graph of the gradient, so the refusal has to wait until something differentiates that.


def _no_vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
    raise RuntimeError(
        "softdtw_cuda: gradients of Soft-DTW inside torch.func.vmap are not supported; pass all samples as "
        "one batch (B, N, D)."
    )


def _no_jvp(ctx: Any, *tangents: Any) -> Any:
    raise RuntimeError(
        "softdtw_cuda: forward-mode derivatives (torch.func.jvp, jacfwd, hessian) are not implemented; use "
        "backward or torch.func.grad for first derivatives."
    )


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """In forward mode no input requires a gradient, and an operator without a rule would pass on zeros."""
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        _no_jvp(None)


class _InTransform(torch.autograd.Function):
    vmap = staticmethod(_no_vmap)
    jvp = staticmethod(_no_jvp)


class _BackwardInTransform(_InTransform):
    backward = staticmethod(second_order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass


class _FusedBackwardInTransform(_BackwardInTransform):
    forward = staticmethod(fused_backward)


class _CostBackwardInTransform(_BackwardInTransform):
    forward = staticmethod(cost_backward)


class _FusedInTransform(_InTransform):
    forward = staticmethod(fused_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        fused_setup(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        return *fused_gradients(ctx, grad, _FusedBackwardInTransform.apply), None, None, None, None, None


class _CostInTransform(_InTransform):
    forward = staticmethod(cost_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        cost_setup(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        return cost_gradient(ctx, grad, _CostBackwardInTransform.apply), None, None, None, None, None


# What to call


PLAIN = frozenset((Tensor, torch.nn.Parameter))


def _is_plain(tensor: Tensor) -> bool:
    """Whether the dispatcher would only call the kernel: no tracing, no fake tensors, no transforms."""
    return (
        type(tensor) in PLAIN
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not _in_transform()
    )


def _are_plain(*lengths: Tensor | None) -> bool:
    """Whether a kernel can read them; others have their numbers somewhere else."""
    return all(given is None or type(given) is Tensor for given in lengths)


def needs_plain_gradient(x: Tensor, y: Tensor) -> bool:
    """Whether a gradient by an eager backward is needed, and nothing else, of x and y of types in `PLAIN`."""
    return (
        (x.requires_grad or y.requires_grad)
        and torch.is_grad_enabled()
        and forward_ad._current_level < 0
        and not torch._C._len_torch_dispatch_stack()
        and not _in_transform()
    )


def fused_at_once(x: Tensor, y: Tensor, pairs: SmallPairs) -> Tensor:
    """The values of small pairs that need a plain gradient, or one number, with gradients."""
    try:
        return _apply_at_once(x, y, pairs)
    except NotInMemory:  # rare, and looking for it first would take time
        x, y = _without_dead_wrapper(x), _without_dead_wrapper(y)
    return _apply_at_once(in_memory(x), in_memory(y), pairs)


def fused(
    x: Tensor,
    y: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    reduction: Reduction = "none",
    at_once: bool = True,
) -> Tensor:
    """(B,) Soft-DTW values of x and y under the squared Euclidean distance, or one number, with gradients.

    `at_once` allows for gradients along with the values of small pairs, which rounds them differently.
    """
    if forward_ad._current_level >= 0:
        _refuse_forward_mode(x, y)
    save = (x.requires_grad or y.requires_grad) and torch.is_grad_enabled()
    value: Tensor
    if not _is_plain(x) or type(y) not in PLAIN or not _are_plain(x_lengths, y_lengths):
        call: Any = _FusedInTransform.apply if save and _in_transform() else fused_forward
        value, _ = call(x, y, gamma, bandwidth, x_lengths, y_lengths, save)
        return reduced(value, reduction)
    x, y = _without_dead_wrapper(x), _without_dead_wrapper(y)
    if save and at_once and is_small(x, y, x_lengths, y_lengths):
        return fused_at_once(x, y, small_pairs(x.shape, y.shape, x.device, gamma, bandwidth, reduction))
    if save:
        value = _fused_with_gradient(x, y, gamma, bandwidth, x_lengths, y_lengths)
    else:
        value, _ = backend(x.device.type).fused_forward(x, y, gamma, bandwidth, x_lengths, y_lengths, False)
    return reduced(value, reduction)


def from_cost(
    cost: Tensor, gamma: float, bandwidth: int, x_lengths: Tensor | None, y_lengths: Tensor | None
) -> Tensor:
    """(B,) Soft-DTW values of cost matrices, with gradients."""
    if forward_ad._current_level >= 0:
        _refuse_forward_mode(cost)
    save = cost.requires_grad and torch.is_grad_enabled()
    value: Tensor
    if not _is_plain(cost) or not _are_plain(x_lengths, y_lengths):
        call: Any = _CostInTransform.apply if save and _in_transform() else cost_forward
        value, _ = call(cost, gamma, bandwidth, x_lengths, y_lengths, save)
        return value
    cost = _without_dead_wrapper(cost)
    if save:
        value = _cost_with_gradient(cost, gamma, bandwidth, x_lengths, y_lengths)
    else:
        value, _ = backend(cost.device.type).cost_forward(cost, gamma, bandwidth, x_lengths, y_lengths, False)
    return value


def alignment(
    cost: Tensor, gamma: float, bandwidth: int, x_lengths: Tensor | None, y_lengths: Tensor | None
) -> Tensor:
    """(B, N, M) soft alignment E of cost matrices, equation (8); differentiating it raises."""
    if forward_ad._current_level >= 0:
        _refuse_forward_mode(cost)
    value, state = cost_forward(cost, gamma, bandwidth, x_lengths, y_lengths, True)
    ones = torch.ones_like(value)
    result: Tensor = cost_backward(ones, cost, value, state, gamma, bandwidth, x_lengths, y_lengths)
    return result
