"""The operators: schemas, shapes for tracing, gradients, and the choice of a backend by device.

This module imports torch alone. Backends (`_cpu.launch`, `_cuda.launch`) are imported when a tensor of their
device arrives, never import each other, and share one interface, the four functions named like the operators:

    fused_*  x (B or 1, N, D), y (B or 1, M, D), squared Euclidean distance inside the kernel
    cost_*   cost (B, N, M)

`value` is (B,), float32, or float64 for float64 input. `state` is whatever the backward needs besides the
inputs, as bytes; empty when `save` is false. Gradients come per sample; where a side is broadcast they come
in the value's type and are summed here. bandwidth = -1 stands for no band.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _reference
from ._reference import value_dtype
from ._validation import check_band, check_lengths

Reduction = Literal["none", "mean", "sum"]

_LENGTHS = "Tensor? x_lengths, Tensor? y_lengths"
_SCHEMAS = {
    "fused_forward": f"(Tensor x, Tensor y, float gamma, int bandwidth, {_LENGTHS}, bool save)"
    " -> (Tensor, Tensor)",
    "fused_backward": "(Tensor grad, Tensor x, Tensor y, Tensor value, Tensor state,"
    f" float gamma, int bandwidth, {_LENGTHS}, bool need_x, bool need_y) -> (Tensor, Tensor)",
    "cost_forward": f"(Tensor cost, float gamma, int bandwidth, {_LENGTHS}, bool save) -> (Tensor, Tensor)",
    "cost_backward": "(Tensor grad, Tensor cost, Tensor value, Tensor state,"
    f" float gamma, int bandwidth, {_LENGTHS}) -> Tensor",
}

_library = torch.library.Library("softdtw_cuda", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))

_fused_forward = torch.ops.softdtw_cuda.fused_forward.default
_fused_backward = torch.ops.softdtw_cuda.fused_backward.default
_cost_forward = torch.ops.softdtw_cuda.cost_forward.default
_cost_backward = torch.ops.softdtw_cuda.cost_backward.default


# Backends


def _find_backend(device_type: str) -> Any:
    """The module that computes for this kind of device."""
    if device_type == "cpu":
        try:
            from ._cpu import launch as cpu
        except ImportError as error:
            warnings.warn(
                f"softdtw_cuda: the CPU kernels cannot be loaded ({error}); falling back to plain torch, "
                "which is many times slower and keeps N x M tables. `pip install numba` brings the kernels.",
                RuntimeWarning,
                stacklevel=2,
            )
            return _reference
        return cpu
    if device_type == "cuda" and torch.version.hip is None:
        try:
            from ._cuda import launch as cuda
        except ImportError as error:
            raise ImportError(
                f"softdtw_cuda: the CUDA kernels cannot be loaded ({error}). They are compiled at first use "
                "through cuda-core: `pip install cuda-core`, or move the tensors to the CPU."
            ) from error
        return cuda
    return _reference


backend: Callable[[str], Any] = functools.cache(_find_backend)


def kernel_missing(device_type: str) -> str | None:
    """Why tensors of this device have no fused kernel; None where they have one."""
    # torch's compiler traces through a cache and warns that it does.
    find = _find_backend if torch.compiler.is_compiling() else backend
    if device_type == "cpu" and find("cpu") is _reference:
        return "CPU tensors need numba, which is not installed (`pip install numba`)"
    if device_type == "cuda" and torch.version.hip is not None:
        return "there are no kernels for ROCm yet"
    if device_type not in ("cpu", "cuda"):
        return f"there are no kernels for {device_type!r} devices yet"
    return None


def _config(device_type: str) -> Any:
    """The module that knows the size of a backend's state; None for the reference, which saves nothing."""
    if device_type == "cuda" and torch.version.hip is None:
        from ._cuda import config as cuda

        return cuda
    if device_type == "cpu" and backend("cpu") is not _reference:
        from ._cpu import config as cpu

        return cpu
    return None


# Kernels


def _check_host_lengths(
    batch: int,
    n: int,
    m: int,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    device: torch.device,
) -> None:
    """Compiled graphs and direct calls of an operator come here without the public functions' checks."""
    if device.type == "cpu" and (x_lengths is not None or y_lengths is not None):
        _, x_host = check_lengths(x_lengths, "x_lengths", batch, batch, n, device, batched=True)
        _, y_host = check_lengths(y_lengths, "y_lengths", batch, batch, m, device, batched=True)
        check_band(bandwidth, x_host or [n] * batch, y_host or [m] * batch)


def _fused_forward_kernel(
    x: Tensor,
    y: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    _check_host_lengths(batch_size(x, y), x.shape[1], y.shape[1], bandwidth, x_lengths, y_lengths, x.device)
    result: tuple[Tensor, Tensor] = backend(x.device.type).fused_forward(
        x, y, gamma, bandwidth, x_lengths, y_lengths, save
    )
    return result


def _fused_backward_kernel(
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
    grad_x, grad_y = backend(x.device.type).fused_backward(
        grad, x, y, value, state, gamma, bandwidth, x_lengths, y_lengths, need_x, need_y
    )
    return grad_x if need_x else x.new_empty(0), grad_y if need_y else y.new_empty(0)


def _cost_forward_kernel(
    cost: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    batch, n, m = cost.shape
    _check_host_lengths(batch, n, m, bandwidth, x_lengths, y_lengths, cost.device)
    result: tuple[Tensor, Tensor] = backend(cost.device.type).cost_forward(
        cost, gamma, bandwidth, x_lengths, y_lengths, save
    )
    return result


def _cost_backward_kernel(
    grad: Tensor,
    cost: Tensor,
    value: Tensor,
    state: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
) -> Tensor:
    result: Tensor = backend(cost.device.type).cost_backward(
        grad, cost, value, state, gamma, bandwidth, x_lengths, y_lengths
    )
    return result


_library.impl("fused_forward", _fused_forward_kernel, "CompositeExplicitAutograd")
_library.impl("fused_backward", _fused_backward_kernel, "CompositeExplicitAutograd")
_library.impl("cost_forward", _cost_forward_kernel, "CompositeExplicitAutograd")
_library.impl("cost_backward", _cost_backward_kernel, "CompositeExplicitAutograd")


# Shapes for tracing


def batch_size(x: Tensor, y: Tensor) -> int:
    """Number of pairs; one of the two may be broadcast."""
    return y.shape[0] if x.shape[0] == 1 else x.shape[0]


def _fused_forward_fake(
    x: Tensor,
    y: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    batch, config = batch_size(x, y), _config(x.device.type)
    size = 0
    if save and config is not None:
        size = config.fused_state_bytes(batch, x.shape[1], y.shape[1], x.shape[2], x.dtype, bandwidth)
    return x.new_empty(batch, dtype=value_dtype(x.dtype)), x.new_empty(size, dtype=torch.uint8)


def _fused_backward_fake(
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
    def per_sample(series: Tensor, needed: bool) -> Tensor:
        if not needed:
            return series.new_empty(0)
        batch = batch_size(x, y)
        dtype = series.dtype if series.shape[0] == batch else value_dtype(series.dtype)
        return series.new_empty((batch, *series.shape[1:]), dtype=dtype)

    return per_sample(x, need_x), per_sample(y, need_y)


def _cost_forward_fake(
    cost: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    batch, n, m = cost.shape
    config = _config(cost.device.type)
    size = config.cost_state_bytes(batch, n, m, cost.dtype, bandwidth) if save and config is not None else 0
    return cost.new_empty(batch, dtype=value_dtype(cost.dtype)), cost.new_empty(size, dtype=torch.uint8)


def _cost_backward_fake(
    grad: Tensor,
    cost: Tensor,
    value: Tensor,
    state: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
) -> Tensor:
    return cost.new_empty(cost.shape)


torch.library.register_fake("softdtw_cuda::fused_forward", _fused_forward_fake, lib=_library)
torch.library.register_fake("softdtw_cuda::fused_backward", _fused_backward_fake, lib=_library)
torch.library.register_fake("softdtw_cuda::cost_forward", _cost_forward_fake, lib=_library)
torch.library.register_fake("softdtw_cuda::cost_backward", _cost_backward_fake, lib=_library)


# Gradients. The same context and formulas serve the operators (compiled graphs, torch.func) and the short way
# that plain eager tensors take past the dispatcher, which costs less than half as much host time (44 against
# 103 us on the machine where both were measured, forward and backward, kernels left out).


_in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active


def _refuse_second_order() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "softdtw_cuda: second derivatives are not implemented, so backward with create_graph=True is "
            "refused; call it without create_graph."
        )


def _second_order(ctx: Any, *grads: Tensor) -> Any:
    raise RuntimeError(
        "softdtw_cuda: second derivatives are not implemented; do not differentiate a gradient of Soft-DTW "
        "(create_graph=True, torch.func.hessian, nested torch.func.grad)."
    )


def _contract(grad: Tensor, series: Tensor) -> Tensor:
    """Per-sample gradients to the gradient of a side that may be broadcast."""
    if grad.shape[0] == series.shape[0]:
        return grad
    return grad.sum(0, keepdim=True).to(series.dtype)


def _fused_gradients(ctx: Any, grad: Tensor, operator: Any) -> tuple[Tensor | None, Tensor | None]:
    x, y, value, state, x_lengths, y_lengths = ctx.saved_tensors
    need_x, need_y = ctx.needs_input_grad[:2]
    grad_x, grad_y = operator(
        grad, x, y, value, state, ctx.gamma, ctx.bandwidth, x_lengths, y_lengths, need_x, need_y
    )
    return _contract(grad_x, x) if need_x else None, _contract(grad_y, y) if need_y else None


def _cost_gradient(ctx: Any, grad: Tensor, operator: Any) -> Tensor:
    cost, value, state, x_lengths, y_lengths = ctx.saved_tensors
    gradient: Tensor = operator(grad, cost, value, state, ctx.gamma, ctx.bandwidth, x_lengths, y_lengths)
    return gradient


def _require_saved(save: bool) -> None:
    if not save:
        raise RuntimeError(
            "softdtw_cuda: an operator called with save=False has no gradient; call it with save=True."
        )


def _fused_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, y, ctx.gamma, ctx.bandwidth, x_lengths, y_lengths, save = inputs
    _require_saved(save)
    ctx.save_for_backward(x, y, *output, x_lengths, y_lengths)


def _fused_formula(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    _refuse_second_order()
    return *_fused_gradients(ctx, grad, _fused_backward), None, None, None, None, None


def _cost_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    cost, ctx.gamma, ctx.bandwidth, x_lengths, y_lengths, save = inputs
    _require_saved(save)
    ctx.save_for_backward(cost, *output, x_lengths, y_lengths)


def _cost_formula(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    _refuse_second_order()
    return _cost_gradient(ctx, grad, _cost_backward), None, None, None, None, None


torch.library.register_autograd(
    "softdtw_cuda::fused_forward", _fused_formula, setup_context=_fused_setup, lib=_library
)
torch.library.register_autograd(
    "softdtw_cuda::cost_forward", _cost_formula, setup_context=_cost_setup, lib=_library
)
torch.library.register_autograd("softdtw_cuda::fused_backward", _second_order, lib=_library)
torch.library.register_autograd("softdtw_cuda::cost_backward", _second_order, lib=_library)


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
        value, state = kernels.fused_forward(x, y, gamma, bandwidth, x_lengths, y_lengths, True)
        ctx.gamma, ctx.bandwidth, ctx.kernels = gamma, bandwidth, kernels
        ctx.save_for_backward(x, y, value, state, x_lengths, y_lengths)
        return value  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        return *_fused_gradients(ctx, grad, ctx.kernels.fused_backward), None, None, None, None


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
        value, state = kernels.cost_forward(cost, gamma, bandwidth, x_lengths, y_lengths, True)
        ctx.gamma, ctx.bandwidth, ctx.kernels = gamma, bandwidth, kernels
        ctx.save_for_backward(cost, value, state, x_lengths, y_lengths)
        return value  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        return _cost_gradient(ctx, grad, ctx.kernels.cost_backward), None, None, None, None


class _FusedAtOnce(torch.autograd.Function):
    """For pairs so small that the host is busier than the GPU: the gradient is computed with the value.

    What is left for the backward, which runs in a thread of autograd's with cold caches, is one product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, gamma: float, bandwidth: int, reduction: Reduction) -> Tensor:
        need_x, need_y = ctx.needs_input_grad[:2]
        weight = 1.0 / x.shape[0] if reduction == "mean" else 1.0
        value: Tensor
        value, grad_x, grad_y = backend(x.device.type).fused_at_once(
            x, y, gamma, bandwidth, weight, need_x, need_y
        )
        ctx.save_for_backward(x, y, grad_x, grad_y)  # x and y: changing them must be an error as ever
        return reduced(value, reduction)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        if grad.dim():
            grad = grad.view(-1, 1, 1)
        _, _, grad_x, grad_y = ctx.saved_tensors
        x_product = None if grad_x is None else grad_x * grad
        y_product = None if grad_y is None else grad_y * grad
        return x_product, y_product, None, None, None


_MOST_CELLS_AT_ONCE = 2**18
_MOST_NUMBERS_AT_ONCE = 2**16


def is_small(x: Tensor, y: Tensor, x_lengths: Tensor | None, y_lengths: Tensor | None) -> bool:
    """Whether there are few cells, and few numbers, since gradients are kept from the forward on.

    Not with lengths: a gradient that is not finite would reach the padding as NaN.
    """
    return (
        x.device.type == "cuda"
        and x.dtype == torch.float32
        and x_lengths is None
        and y_lengths is None
        and x.shape[0] == y.shape[0]
        and x.shape[0] * x.shape[1] * y.shape[1] <= _MOST_CELLS_AT_ONCE
        and x.numel() + y.numel() <= _MOST_NUMBERS_AT_ONCE
        and torch.version.hip is None
    )


_fused_with_gradient: Callable[..., Tensor] = _Fused.apply
_fused_at_once: Callable[..., Tensor] = _FusedAtOnce.apply
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
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        _no_jvp(None)


class _FusedInTransform(torch.autograd.Function):
    forward = staticmethod(_fused_forward)
    vmap = staticmethod(_no_vmap)
    jvp = staticmethod(_no_jvp)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        _fused_setup(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        return *_fused_gradients(ctx, grad, _FusedBackwardInTransform.apply), None, None, None, None, None


class _FusedBackwardInTransform(torch.autograd.Function):
    forward = staticmethod(_fused_backward)
    vmap = staticmethod(_no_vmap)
    jvp = staticmethod(_no_jvp)
    backward = staticmethod(_second_order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        pass


class _CostInTransform(torch.autograd.Function):
    forward = staticmethod(_cost_forward)
    vmap = staticmethod(_no_vmap)
    jvp = staticmethod(_no_jvp)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        _cost_setup(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        return _cost_gradient(ctx, grad, _CostBackwardInTransform.apply), None, None, None, None, None


class _CostBackwardInTransform(torch.autograd.Function):
    forward = staticmethod(_cost_backward)
    vmap = staticmethod(_no_vmap)
    jvp = staticmethod(_no_jvp)
    backward = staticmethod(_second_order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass


# What the public functions call


_PLAIN = (Tensor, torch.nn.Parameter)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the dispatcher would only call the kernel: no tracing, no fake tensors, no transforms."""
    return (
        type(tensor) in _PLAIN
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not _in_transform()
    )


def reduced(value: Tensor, reduction: Reduction) -> Tensor:
    """The mean or the sum of the values, or themselves."""
    return value if reduction == "none" else value.mean() if reduction == "mean" else value.sum()


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
    _refuse_forward_mode(x, y)
    save = (x.requires_grad or y.requires_grad) and torch.is_grad_enabled()
    value: Tensor
    if not _is_plain(x) or type(y) not in _PLAIN:
        call: Any = _FusedInTransform.apply if save and _in_transform() else _fused_forward
        value, _ = call(x, y, gamma, bandwidth, x_lengths, y_lengths, save)
    elif save and at_once and is_small(x, y, x_lengths, y_lengths):
        return _fused_at_once(x, y, gamma, bandwidth, reduction)
    elif save:
        value = _fused_with_gradient(x, y, gamma, bandwidth, x_lengths, y_lengths)
    else:
        value, _ = backend(x.device.type).fused_forward(x, y, gamma, bandwidth, x_lengths, y_lengths, False)
    return reduced(value, reduction)


def from_cost(
    cost: Tensor, gamma: float, bandwidth: int, x_lengths: Tensor | None, y_lengths: Tensor | None
) -> Tensor:
    """(B,) Soft-DTW values of cost matrices, with gradients."""
    _refuse_forward_mode(cost)
    save = cost.requires_grad and torch.is_grad_enabled()
    value: Tensor
    if not _is_plain(cost):
        call: Any = _CostInTransform.apply if save and _in_transform() else _cost_forward
        value, _ = call(cost, gamma, bandwidth, x_lengths, y_lengths, save)
    elif save:
        value = _cost_with_gradient(cost, gamma, bandwidth, x_lengths, y_lengths)
    else:
        value, _ = backend(cost.device.type).cost_forward(cost, gamma, bandwidth, x_lengths, y_lengths, False)
    return value


def alignment(
    cost: Tensor, gamma: float, bandwidth: int, x_lengths: Tensor | None, y_lengths: Tensor | None
) -> Tensor:
    """(B, N, M) soft alignment E of cost matrices, equation (8); differentiating it raises."""
    _refuse_forward_mode(cost)
    value, state = _cost_forward(cost, gamma, bandwidth, x_lengths, y_lengths, True)
    ones = torch.ones_like(value)
    result: Tensor = _cost_backward(ones, cost, value, state, gamma, bandwidth, x_lengths, y_lengths)
    return result
