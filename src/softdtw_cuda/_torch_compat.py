"""Every private name of torch that this package uses, and what differs between its versions.

Names come and go between versions of torch. Each is looked up once, by `_private`, and has a substitute: of
public names, correct, though slower, or an error where there is no public way; never a wrong number.
tests/test_torch_compat.py takes every name away and runs every substitute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

_DYNAMO_TRACES_PROBLEMS = TorchVersion(torch.__version__) >= "2.13"
"""Whether torch.compile can trace the public functions. Older versions (2.10 is one) trace no properties of a
NamedTuple, which Problem is, and get the functions as a whole (see `in_graph`)."""


class _AllowedInGraph(ModuleType):
    """Functions that torch.compile is to put into its graph as a whole, by their names.

    To tell torch so takes importing its compiler, which takes seconds. While it traces, it reads the
    attributes of a module as Python does: then is soon enough.
    """

    functions: dict[str, Callable[..., Any]] = {}  # noqa: RUF012  # of the one instance

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self.functions:
            raise AttributeError(name)
        allowed: Callable[..., Any] = torch.compiler.allow_in_graph(self.functions[name])
        return allowed


ALLOWED_IN_GRAPH = _AllowedInGraph("softdtw_cuda functions that torch.compile takes as a whole")


def in_graph(function: Callable[..., Any]) -> str:
    """The name of a function in ALLOWED_IN_GRAPH, for torch.compile; empty where Dynamo traces the function.

    The next stage of the compiler, AOTAutograd, traces a function put in as a whole, to the same operators.
    Such a function takes tensors, numbers and strings: with a callable `dist` torch.compile raises.
    """
    if _DYNAMO_TRACES_PROBLEMS:
        return ""
    name = f"{function.__module__}.{function.__qualname__}".replace(".", "_")
    ALLOWED_IN_GRAPH.functions[name] = function
    return name


def _private(
    path: str, substitute: Callable[..., Any], use: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The function at `path` below torch, or `use`, which uses what is there; the substitute without it."""
    target: Any = torch
    for name in path.split("."):
        target = getattr(target, name, None)
    return substitute if target is None else use or target


in_transform: Callable[[], bool] = _private("_C._are_functorch_transforms_active", lambda: True)
"""Whether torch.func.grad, vmap and the like are active. There is no public way to ask. Without it every
tensor goes through the dispatcher, which finds out."""


in_forward_mode: Callable[[], bool] = _private(
    "autograd.forward_ad._current_level",
    lambda: True,
    lambda: torch.autograd.forward_ad._current_level >= 0,
)
"""Whether a level of forward-mode AD is open, so that a tensor may have a tangent. There is no public way to
ask. Without it every gradient is recorded, as if one were."""


def _no_forward_mode_in_transforms(enabled: bool) -> contextlib.AbstractContextManager[None]:
    raise RuntimeError(
        "softdtw_cuda: this version of torch does not say how to nest forward-mode derivatives; take "
        "torch.autograd.forward_ad for a tangent, torch.func.grad or jacrev for derivatives of derivatives."
    )


_set_forward_mode: Callable[[bool], contextlib.AbstractContextManager[None]] = _private(
    "autograd.forward_ad._set_fwd_grad_enabled", _no_forward_mode_in_transforms
)
"""Turns forward mode on or off. torch turns it off around a Function's jvp, and with it the outer levels of
nested transforms, whose tangents would be lost without a word. There is no public way to turn it on, nor to
tell whether there are outer levels: without it forward mode raises in every transform."""


def outer_forward_mode() -> contextlib.AbstractContextManager[None]:
    """For the body of a Function's jvp: outer transforms go on to see its operations."""
    return _set_forward_mode(True) if in_transform() else contextlib.nullcontext()


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Saves tensors for a Function's backward, and for its jvp where torch may call it: only right away.

    A node keeps what is saved for its jvp as it is. An output among that refers to its node, and where a
    checkpoint computes it again nothing but Python's collector would free the two.
    """
    ctx.save_for_backward(*tensors)
    if in_transform() or in_forward_mode():
        ctx.save_for_forward(*tensors)


def saved_primals(ctx: Any) -> list[Any]:
    """The tensors that a Function's jvp has saved, without the tangents that it is about to use."""
    unpack: Any = torch.autograd.forward_ad.unpack_dual
    return [None if tensor is None else unpack(tensor).primal for tensor in ctx.saved_tensors]


def is_differentiated() -> bool:
    """Whether what a backward computes may itself be differentiated."""
    return torch.is_grad_enabled() or in_transform() or in_forward_mode()


_dispatch_modes: Callable[[], int] = _private("_C._len_torch_dispatch_stack", lambda: 1)
"""How many dispatch modes (fake tensors, tracing, counters) want to see operators. Without it they always
see them."""

_is_zero_tensor: Callable[[Tensor], bool] = _private("Tensor._is_zerotensor", lambda tensor: True)
"""Whether a tensor is a ZeroTensor, torch's lazy zeros, which have no memory to read. Without it every tensor
is copied first, which materializes them."""

current_device: Callable[[], int] = _private("_C._cuda_getDevice", lambda: torch.cuda.current_device())
set_device: Callable[[int], None] = _private("_C._cuda_setDevice", lambda index: torch.cuda.set_device(index))
current_stream: Callable[[int], int] = _private(
    "_C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
"""The current device, and the handle of its current stream, without the several microseconds that the public
functions take to make objects of them."""

_is_wrapped: Callable[[Tensor], bool] = _private(
    "_C._functorch.is_functorch_wrapped_tensor", lambda tensor: in_transform()
)
"""Whether a transform has wrapped a tensor, so that a mapped dimension may be hidden. Without it every tensor
inside a transform is taken for one."""


def _substitute_cdist_gradient(grad: Tensor, x: Tensor, y: Tensor, p: float, distance: Tensor) -> Tensor:
    batch = grad.shape[0]
    with torch.enable_grad():
        x = x.detach().expand(batch, -1, -1).requires_grad_()
        mode = "donot_use_mm_for_euclid_dist"
        again = torch.cdist(x, y.detach().expand(batch, -1, -1), p, mode)
    return torch.autograd.grad(again, x, grad)[0]


def _operator_cdist_gradient(grad: Tensor, x: Tensor, y: Tensor, p: float, distance: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten._cdist_backward(grad.contiguous(), x, y, p, distance.contiguous())
    return result


cdist_gradient: Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor] = _private(
    "ops.aten._cdist_backward", _substitute_cdist_gradient, _operator_cdist_gradient
)
"""The gradient of torch.cdist(x, y, p) wrt x, one per pair, for that of the distances; cannot be
differentiated. torch has it as an operator only. Without it torch.cdist is computed again."""

is_grad_batch: Callable[[Tensor], bool] = _private(
    "_C._functorch.is_legacy_batchedtensor", lambda tensor: True
)
"""Whether a gradient is a batch of them, by is_grads_batched or jacobian(vectorize=True), which hide the
mapped dimension in a way of their own. Without it every gradient is taken for a batch, which costs a
multiplication."""

_is_mapped_grad: Callable[[Any], bool] = _private(
    "_C._functorch.is_legacy_batchedtensor", lambda tensor: False
)
"""The same, for second derivatives. Without it torch raises that it lacks a batching rule."""


def _no_batches_of_second_derivatives(*arguments: Any) -> Tensor:
    raise RuntimeError(
        "softdtw_cuda: this version of torch does not say how to take batches of second derivatives; leave "
        "is_grads_batched and vectorize out, or take torch.func.vmap."
    )


_remove_batch_dim: Callable[[Tensor, int, int, int], Tensor] = _private(
    "_remove_batch_dim", _no_batches_of_second_derivatives
)
_add_batch_dim: Callable[[Tensor, int, int], Tensor] = _private(
    "_add_batch_dim", _no_batches_of_second_derivatives
)
"""Show and hide the mapped dimension of a batch of gradients. There is no public way."""


def holds_mapped_grad(*arguments: Any) -> bool:
    """Whether a tensor among the arguments is a batch of gradients."""
    return any(isinstance(each, Tensor) and _is_mapped_grad(each) for each in arguments)


def _grad_batch_level(batch: Tensor) -> int:
    """The level of the mapped dimension that a batch of gradients hides.

    The thread that runs a backward on a GPU cannot tell how deep the caller's maps are nested.
    """
    for level in range(1, 65):  # torch allows no more
        if not holds_mapped_grad(_remove_batch_dim(batch, level, 1, 0)):
            return level
    raise RuntimeError("softdtw_cuda: batches of batches of gradients cannot be differentiated.")


def map_over_grads(function: Any, *arguments: Any) -> Any:
    """`function.apply(*arguments)` where some are batches of gradients, by the Function's vmap."""
    level = _grad_batch_level(next(each for each in arguments if holds_mapped_grad(each)))
    dims = tuple(0 if holds_mapped_grad(argument) else None for argument in arguments)
    whole = [
        argument if dim is None else _remove_batch_dim(argument, level, 1, 0)
        for argument, dim in zip(arguments, dims, strict=True)
    ]
    size = next(argument.shape[0] for argument, dim in zip(whole, dims, strict=True) if dim is not None)
    results, out_dims = function.vmap(SimpleNamespace(batch_size=size), dims, *whole)
    return tuple(
        result if dim is None else _add_batch_dim(result, dim, level)
        for result, dim in zip(results, out_dims, strict=True)
    )


_will_execute: Callable[[Any], bool] = _private("_C._will_engine_execute_node", lambda node: True)
"""Whether the backward under way goes on to a node. There is no public way to ask. Without it every gradient
that could be asked for is, and where one is a third derivative, as in torch.autograd.functional.hvp, it
raises."""


def asked_gradients(ctx: Any, tensors: list[bool]) -> list[bool]:
    """Which of a Function's arguments the backward under way asks a gradient of; `tensors` are tensors."""
    if in_transform() or not hasattr(ctx, "next_functions"):
        return list(ctx.needs_input_grad)
    nodes = iter(ctx.next_functions)
    edges = [next(nodes)[0] if is_tensor else None for is_tensor in tensors]

    def is_asked(node: Any) -> bool:
        try:
            return _will_execute(node)
        except RuntimeError:  # torch does not tell of leaves
            return True

    return [node is not None and is_asked(node) for node in edges]


def holds_wrapped(*arguments: Any) -> bool:
    """Whether a transform has wrapped a tensor among the arguments, be it one that has ended."""
    return any(isinstance(each, Tensor) and _is_wrapped(each) for each in arguments)


def plain_apply(function: Any) -> Callable[..., Any]:
    """`function.apply` without what it does for transforms, or `function.apply` itself.

    It looks up the signature of `forward` at every call, which takes longer than small problems do. There is
    no public name for the `apply` that it overrides. Where there is none, it is what is called.
    """
    apply: Callable[..., Any] = getattr(super(torch.autograd.Function, function), "apply", function.apply)
    return apply


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether a kernel may read these tensors' memory: no tracing, fake tensors, transforms, subclasses."""
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_meta):
            return False
    return not (torch.compiler.is_compiling() or _dispatch_modes() or in_transform())


def can_be_read(tensor: Tensor) -> bool:
    """Whether the host has the numbers: not on a GPU, nor while torch traces or maps."""
    return (
        tensor.device.type == "cpu"
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not torch.compiler.is_compiling()
        and not _is_wrapped(tensor)
    )


_unwrapped: Callable[[Tensor], Tensor | None] = _private("_C._functorch.get_unwrapped", lambda tensor: None)
"""What a transform has wrapped. Without it the numbers inside transforms are not checked before they reach a
kernel."""


def host_numbers(tensor: Tensor) -> Tensor | None:
    """The numbers of a tensor, of all maps together, or None on a GPU and while torch traces."""
    if torch.compiler.is_compiling():
        return None
    while _is_wrapped(tensor):
        try:
            inner = _unwrapped(tensor)
        except RuntimeError:  # it has no wrapper: where nobody tells, every tensor may have one
            return None
        if inner is None:
            return None
        tensor = inner
    return tensor if can_be_read(tensor) else None


def materialized(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy where its memory does not hold its numbers.

    torch leaves out work that it can do later: lazy negation keeps a sign for the next reader, and a
    ZeroTensor has no memory at all.
    """
    return tensor.clone() if tensor.is_neg() or _is_zero_tensor(tensor) else tensor


def operator_library(name: str) -> torch.library.Library | None:
    """A new library of operators; None if this process has it already.

    A package that is removed from sys.modules and imported again finds the operators of the first import,
    which a process can define only once. They live as long as their namespace.
    """
    namespace = getattr(torch.ops, name)
    if "library" in vars(namespace):
        return None
    namespace.library = torch.library.Library(name, "DEF")
    library: torch.library.Library = namespace.library
    return library
