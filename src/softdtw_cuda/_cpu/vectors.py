"""SIMD vectors, in which the CPU kernels are written.

Numba's own loop vectoriser leaves a scalar tail on every anti-diagonal, which costs more than the diagonal
itself. The kernels therefore spell their vectors out: a ``VectorType`` is an LLVM ``<lanes x element>``, one
register on the machine at hand, and every function here is emitted inline. Vectors are 64 bytes wide with
AVX-512 and 32 otherwise; LLVM splits them where the hardware is narrower, so the code is correct everywhere.

All offsets are in elements of a flat, C-contiguous array and are not checked.
"""

# Numba and llvmlite are annotated in parts or not at all, differently from one version to the next.
# mypy: disable-error-code="import-untyped, no-untyped-call, attr-defined, misc"

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, register_model

VECTOR_BYTES = 64 if llvm.get_host_cpu_features().get("avx512f", False) else 32


class VectorType(types.Type):
    """A SIMD register of ``lanes`` elements; the element is a Numba number type or ``boolean`` for a mask."""

    def __init__(self, element: Any, lanes: int) -> None:
        self.element = element
        self.lanes = lanes
        super().__init__(name=f"vector({element}, {lanes})")


def _llvm_element(element: Any) -> ir.Type:
    if element == types.boolean:
        return ir.IntType(1)
    if isinstance(element, types.Integer):
        return ir.IntType(element.bitwidth)
    return ir.FloatType() if element == types.float32 else ir.DoubleType()


def llvm_vector(vector: VectorType) -> ir.VectorType:
    return ir.VectorType(_llvm_element(vector.element), vector.lanes)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: VectorType) -> None:
        super().__init__(dmm, fe_type, llvm_vector(fe_type))


def _vector_of(element: Any) -> VectorType:
    return VectorType(element, VECTOR_BYTES * 8 // element.bitwidth)


def _is_float(vector: VectorType) -> bool:
    return isinstance(vector.element, types.Float)


def integer_twin(vector: VectorType) -> VectorType:
    return VectorType(types.int32 if vector.element.bitwidth == 32 else types.int64, vector.lanes)


def float_twin(vector: VectorType) -> VectorType:
    return VectorType(types.float32 if vector.element.bitwidth == 32 else types.float64, vector.lanes)


def _mask_twin(vector: VectorType) -> VectorType:
    return VectorType(types.boolean, vector.lanes)


def constant(vector: VectorType, number: float | int) -> ir.Constant:
    return ir.Constant(llvm_vector(vector), [number] * vector.lanes)


def _splat(builder: ir.IRBuilder, vector: VectorType, scalar: ir.Value) -> ir.Value:
    kind = llvm_vector(vector)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.lanes), [0] * vector.lanes)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def _shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def fmuladd(builder: ir.IRBuilder, vector: VectorType, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    kind = llvm_vector(vector)
    name = f"llvm.fmuladd.v{vector.lanes}f{vector.element.bitwidth}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [a, b, c])


def element_pointer(
    context: Any, builder: ir.IRBuilder, array: Any, value: ir.Value, offset: ir.Value
) -> ir.Value:
    struct = context.make_array(array)(context, builder, value)
    return builder.gep(struct.data, [offset])


def _vector_pointer(
    context: Any, builder: ir.IRBuilder, array: Any, value: ir.Value, offset: ir.Value, vector: VectorType
) -> ir.Value:
    pointer = element_pointer(context, builder, array, value, offset)
    return builder.bitcast(pointer, llvm_vector(vector).as_pointer())


def emit(function: Callable[..., Any]) -> Callable[..., Any]:
    """``numba.extending.intrinsic`` with a type that strict checkers accept."""
    return cast(Callable[..., Any], intrinsic(function))


# ------------------------------------------------------------------------------------------------ operators
def _binary(op: Any, float_name: str | None, integer_name: str | None) -> None:
    @infer_global(op)
    class _Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) != 2 or not isinstance(args[0], VectorType) or args[0] != args[1]:
                return None
            name = float_name if _is_float(args[0]) else integer_name
            return None if name is None else signature(args[0], args[0], args[0])

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        name = float_name if _is_float(sig.return_type) else integer_name
        assert name is not None
        return getattr(builder, name)(*args)

    lower_builtin(op, VectorType, VectorType)(lower)


_binary(operator.add, "fadd", "add")
_binary(operator.sub, "fsub", "sub")
_binary(operator.mul, "fmul", None)
_binary(operator.truediv, "fdiv", None)
_binary(operator.or_, None, "or_")


def _comparison(op: Any, symbol: str) -> None:
    @infer_global(op)
    class _Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) == 2 and isinstance(args[0], VectorType) and args[0] == args[1]:
                return signature(_mask_twin(args[0]), args[0], args[0])
            return None

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if _is_float(sig.args[0]):
            return builder.fcmp_ordered(symbol, *args)
        return builder.icmp_signed(symbol, *args)

    lower_builtin(op, VectorType, VectorType)(lower)


_comparison(operator.eq, "==")
_comparison(operator.lt, "<")


# -------------------------------------------------------------------------------------------- loads, stores
@emit
def vload(typingctx: Any, array: Any, offset: Any) -> Any:
    """The vector at ``array[offset:offset + lanes]``."""
    vector = _vector_of(array.dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _vector_pointer(context, builder, sig.args[0], args[0], args[1], vector)
        return builder.load(pointer, align=vector.element.bitwidth // 8)

    return vector(array, types.intp), codegen


@emit
def vstore(typingctx: Any, array: Any, offset: Any, vector: Any) -> Any:
    """``array[offset:offset + lanes] = vector``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _vector_pointer(context, builder, sig.args[0], args[0], args[1], vector)
        builder.store(args[2], pointer, align=vector.element.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


@emit
def vbroadcast(typingctx: Any, array: Any, offset: Any) -> Any:
    """``array[offset]`` in every lane."""
    vector = _vector_of(array.dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1])
        return _splat(builder, vector, builder.load(pointer))

    return vector(array, types.intp), codegen


@emit
def vsplat(typingctx: Any, array: Any, scalar: Any) -> Any:
    """``scalar`` in every lane of a vector whose element is ``array``'s."""
    vector = _vector_of(array.dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, vector, context.cast(builder, args[1], sig.args[1], vector.element))

    return vector(array, scalar), codegen


@emit
def lanes_of(typingctx: Any, array: Any) -> Any:
    """How many elements of ``array`` one vector holds."""
    lanes = _vector_of(array.dtype).lanes

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.get_constant(types.intp, lanes)

    return types.intp(array), codegen


@emit
def vcount(typingctx: Any, array: Any) -> Any:
    """0, 1, 2, ... in the lanes of a vector whose element is the integer ``array``'s."""
    vector = _vector_of(array.dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(llvm_vector(vector), list(range(vector.lanes)))

    return vector(array), codegen


# ----------------------------------------------------------------------------------------------- arithmetic
@emit
def vfma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once where the hardware can."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return fmuladd(builder, a, *args)

    return a(a, a, a), codegen


@emit
def vmin(typingctx: Any, a: Any, b: Any) -> Any:
    """The smaller of two integer vectors, lane by lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.icmp_signed("<", args[0], args[1]), args[0], args[1])

    return a(a, a), codegen


@emit
def vselect(typingctx: Any, mask: Any, a: Any, b: Any) -> Any:
    """``a`` where the mask is set, else ``b``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(*args)

    return a(mask, a, a), codegen


@emit
def vsum(typingctx: Any, vector: Any) -> Any:
    """The sum over the lanes, always in the same pairwise order."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, lanes = args[0], vector.lanes
        while lanes > 1:
            lanes //= 2
            low = _shuffle(builder, value, value, list(range(lanes)))
            high = _shuffle(builder, value, value, list(range(lanes, 2 * lanes)))
            value = builder.fadd(low, high)
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return vector.element(vector), codegen


@emit
def vfrom_below(typingctx: Any, below: Any, here: Any) -> Any:
    """Lane l gets lane l-1 of ``here``; lane 0 gets the last lane of ``below``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _shuffle(builder, args[0], args[1], [here.lanes - 1 + lane for lane in range(here.lanes)])

    return here(here, here), codegen


@emit
def vfrom_above(typingctx: Any, here: Any, above: Any) -> Any:
    """Lane l gets lane l+1 of ``here``; the last lane gets lane 0 of ``above``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _shuffle(builder, args[0], args[1], [1 + lane for lane in range(here.lanes)])

    return here(here, here), codegen


# --------------------------------------------------------------------------------------------------- shears
def _shear(direction: int) -> Callable[..., Any]:
    def typing(
        typingctx: Any, source: Any, start: Any, stride: Any, target: Any, to: Any, to_stride: Any
    ) -> Any:
        vector = _vector_of(source.dtype)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            lanes = vector.lanes
            loaded: dict[tuple[int, int], ir.Value] = {}

            def row(t: int, stage: int) -> ir.Value:
                # After `stage` stages lane l of row t holds source row t + direction * (l mod 2^stage).
                if (t, stage) not in loaded:
                    if stage == 0:
                        distance = ir.Constant(args[2].type, t)
                        offset = builder.add(args[1], builder.mul(args[2], distance))
                        pointer = _vector_pointer(context, builder, sig.args[0], args[0], offset, vector)
                        loaded[t, 0] = builder.load(pointer, align=vector.element.bitwidth // 8)
                    else:
                        half = 1 << stage - 1
                        pick = [lane + (lanes if lane & half else 0) for lane in range(lanes)]
                        other = row(t + direction * half, stage - 1)
                        loaded[t, stage] = _shuffle(builder, row(t, stage - 1), other, pick)
                return loaded[t, stage]

            stages = lanes.bit_length() - 1
            for t in range(lanes):
                value = row(t, stages)
                offset = builder.add(args[4], builder.mul(args[5], ir.Constant(args[5].type, t)))
                pointer = _vector_pointer(context, builder, sig.args[3], args[3], offset, vector)
                builder.store(value, pointer, align=vector.element.bitwidth // 8)
            return context.get_dummy_value()

        index = types.intp
        return types.void(source, index, index, target, index, index), codegen

    return typing


shear_down = emit(_shear(-1))
"""Store ``lanes`` rows; lane l of row t is lane l of source row t - l (rows into anti-diagonals)."""
shear_up = emit(_shear(+1))
"""Store ``lanes`` rows; lane l of row t is lane l of source row t + l (anti-diagonals into rows)."""


@emit
def transpose(
    typingctx: Any, source: Any, start: Any, stride: Any, target: Any, to: Any, to_stride: Any
) -> Any:
    """Store a square block of ``lanes`` x ``lanes`` elements transposed."""
    vector = _vector_of(source.dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = vector.lanes

        def pointer(array: int, first: int, step: int, t: int) -> ir.Value:
            offset = builder.add(args[first], builder.mul(args[step], ir.Constant(args[step].type, t)))
            return _vector_pointer(context, builder, sig.args[array], args[array], offset, vector)

        align = vector.element.bitwidth // 8
        rows = [builder.load(pointer(0, 1, 2, t), align=align) for t in range(lanes)]
        half = lanes // 2
        while half:
            # Swap the off-diagonal blocks of every square of 2 * half.
            for t in range(lanes):
                if not t & half:
                    a, b = rows[t], rows[t + half]
                    low = [k if not k & half else lanes + k - half for k in range(lanes)]
                    high = [k + half if not k & half else lanes + k for k in range(lanes)]
                    rows[t], rows[t + half] = _shuffle(builder, a, b, low), _shuffle(builder, a, b, high)
            half //= 2
        for t in range(lanes):
            builder.store(rows[t], pointer(3, 4, 5, t), align=align)
        return context.get_dummy_value()

    index = types.intp
    return types.void(source, index, index, target, index, index), codegen
