"""Atomic operations on elements of an array, through which threads divide tiles and wait for them."""

# Numba and llvmlite are annotated in parts or not at all, differently from one version to the next.
# mypy: disable-error-code="import-untyped, no-untyped-call, attr-defined, misc"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from .vectors import element_pointer, emit


@emit
def atomic_next(typingctx: Any, array: Any, index: Any) -> Any:
    """Add one to ``array[index]`` atomically; the value before."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(array, types.intp), codegen


@emit
def load_acquire(typingctx: Any, array: Any, index: Any) -> Any:
    """``array[index]``; what its writer wrote before ``store_release`` is visible afterwards."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1])
        return builder.load_atomic(pointer, "acquire", align=array.dtype.bitwidth // 8)

    return array.dtype(array, types.intp), codegen


@emit
def store_release(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """``array[index] = value``, after everything this thread has written so far."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1])
        stored = context.cast(builder, args[2], sig.args[2], array.dtype)
        builder.store_atomic(stored, pointer, "release", align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), codegen
