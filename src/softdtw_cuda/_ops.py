"""The operators: schemas, kernels by device, shapes for tracing, gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._backends import backend, state_config
from ._reference import value_dtype
from ._validation import check_band, check_lengths

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

fused_forward = torch.ops.softdtw_cuda.fused_forward.default
fused_backward = torch.ops.softdtw_cuda.fused_backward.default
cost_forward = torch.ops.softdtw_cuda.cost_forward.default
cost_backward = torch.ops.softdtw_cuda.cost_backward.default


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
    batch, config = batch_size(x, y), state_config(x.device.type)
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
    config = state_config(cost.device.type)
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


# Gradients


def refuse_second_order() -> None:
    """Raises in a backward that is itself to be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "softdtw_cuda: second derivatives are not implemented, so backward with create_graph=True is "
            "refused; call it without create_graph."
        )


def second_order(ctx: Any, *grads: Tensor) -> Any:
    """The gradient of a gradient: refused where it is asked for."""
    raise RuntimeError(
        "softdtw_cuda: second derivatives are not implemented; do not differentiate a gradient of Soft-DTW "
        "(create_graph=True, torch.func.hessian, nested torch.func.grad)."
    )


def _contract(grad: Tensor, series: Tensor) -> Tensor:
    """Per-sample gradients to the gradient of a side that may be broadcast."""
    if grad.shape[0] == series.shape[0]:
        return grad
    return grad.sum(0, keepdim=True).to(series.dtype)


def fused_gradients(ctx: Any, grad: Tensor, operator: Any) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and y by `operator`, which is `fused_backward` or computes the same."""
    x, y, value, state, x_lengths, y_lengths = ctx.saved_tensors
    need_x, need_y = ctx.needs_input_grad[:2]
    grad_x, grad_y = operator(
        grad, x, y, value, state, ctx.gamma, ctx.bandwidth, x_lengths, y_lengths, need_x, need_y
    )
    return _contract(grad_x, x) if need_x else None, _contract(grad_y, y) if need_y else None


def cost_gradient(ctx: Any, grad: Tensor, operator: Any) -> Tensor:
    """Gradient of a cost matrix by `operator`, which is `cost_backward` or computes the same."""
    cost, value, state, x_lengths, y_lengths = ctx.saved_tensors
    gradient: Tensor = operator(grad, cost, value, state, ctx.gamma, ctx.bandwidth, x_lengths, y_lengths)
    return gradient


def _require_saved(save: bool) -> None:
    if not save:
        raise RuntimeError(
            "softdtw_cuda: an operator called with save=False has no gradient; call it with save=True."
        )


def fused_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps what `fused_gradients` needs of a forward."""
    x, y, ctx.gamma, ctx.bandwidth, x_lengths, y_lengths, save = inputs
    _require_saved(save)
    ctx.save_for_backward(x, y, *output, x_lengths, y_lengths)


def _fused_formula(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    refuse_second_order()
    return *fused_gradients(ctx, grad, fused_backward), None, None, None, None, None


def cost_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps what `cost_gradient` needs of a forward."""
    cost, ctx.gamma, ctx.bandwidth, x_lengths, y_lengths, save = inputs
    _require_saved(save)
    ctx.save_for_backward(cost, *output, x_lengths, y_lengths)


def _cost_formula(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    refuse_second_order()
    return cost_gradient(ctx, grad, cost_backward), None, None, None, None, None


torch.library.register_autograd(
    "softdtw_cuda::fused_forward", _fused_formula, setup_context=fused_setup, lib=_library
)
torch.library.register_autograd(
    "softdtw_cuda::cost_forward", _cost_formula, setup_context=cost_setup, lib=_library
)
torch.library.register_autograd("softdtw_cuda::fused_backward", second_order, lib=_library)
torch.library.register_autograd("softdtw_cuda::cost_backward", second_order, lib=_library)
