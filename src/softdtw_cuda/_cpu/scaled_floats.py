"""Vectors of scaled floats: exponentials, and exponents moved between fraction and integer; see `vectors`."""

# Numba and llvmlite are annotated in parts or not at all, differently from one version to the next.
# mypy: disable-error-code="import-untyped, no-untyped-call, attr-defined, misc"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from .vectors import VectorType, constant, emit, float_twin, fmuladd, integer_twin, llvm_vector


class _Format:
    """The bit layout of a float element and the cut-offs of the scaled floats built on it."""

    def __init__(self, vector: VectorType) -> None:
        narrow = vector.element.bitwidth == 32
        self.mantissa = 23 if narrow else 52
        self.bias = 127 if narrow else 1023
        # Adding 1.5 * 2^mantissa rounds to an integer and leaves it in the low bits of the sum.
        self.magic = 1.5 * 2.0**self.mantissa
        self.magic_bits = (self.bias + self.mantissa << self.mantissa) | 1 << self.mantissa - 1
        # A smaller share than this cannot be seen beside 1, and its products would be denormal.
        self.largest_shift = 100 if narrow else 900


# 2^r on [-1/2, 1/2] by least squares at Chebyshev nodes for float32 (3e-9), by Taylor's series for float64
# (1e-17).
_EXP2_NARROW = (
    1.0,
    0.69314720671062,
    0.24022651084149693,
    0.055503272142090505,
    0.009618035958598203,
    0.0013400432165436248,
    0.00015467364973501243,
)
_LN2 = 0.6931471805599453094


def _exp2_wide() -> tuple[float, ...]:
    coefficients, term = [1.0], 1.0
    for k in range(1, 14):
        term *= _LN2 / k
        coefficients.append(term)
    return tuple(coefficients)


_EXP2_WIDE = _exp2_wide()


@emit
def vround(typingctx: Any, s: Any) -> Any:
    """The nearest integer as a float; exact for |s| < 2^22 (float32) or 2^51 (float64)."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        magic = constant(s, _Format(s).magic)
        return builder.fsub(builder.fadd(args[0], magic), magic)

    return s(s), codegen


@emit
def vround_to_int(typingctx: Any, s: Any) -> Any:
    """The nearest integer, same range; anything at all (never a trap) for NaN and infinities."""
    twin = integer_twin(s)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        form = _Format(s)
        shifted = builder.bitcast(builder.fadd(args[0], constant(s, form.magic)), llvm_vector(twin))
        return builder.sub(shifted, constant(twin, form.magic_bits))

    return twin(s), codegen


@emit
def vexp2(typingctx: Any, r: Any) -> Any:
    """2^r for r in [-1/2, 1/2], to about one unit in the last place."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        coefficients = _EXP2_NARROW if r.element.bitwidth == 32 else _EXP2_WIDE
        result: ir.Value = constant(r, coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            result = fmuladd(builder, r, result, args[0], constant(r, coefficient))
        return result

    return r(r), codegen


@emit
def vdown(typingctx: Any, n: Any, m: Any) -> Any:
    """2^(m - n) for integer vectors m <= n, exactly 0 past the largest shift that matters."""
    twin = float_twin(n)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        form = _Format(twin)
        exponent = builder.sub(builder.add(args[1], constant(n, form.bias)), args[0])
        bits = builder.shl(exponent, constant(n, form.mantissa))
        near = builder.icmp_signed(">", exponent, constant(n, form.bias - form.largest_shift))
        return builder.bitcast(builder.select(near, bits, constant(n, 0)), llvm_vector(twin))

    return twin(n, n), codegen


@emit
def zero_exponent(typingctx: Any, array: Any) -> Any:
    """The n that goes with f = 0: above any other n, with room for differences in the same integer."""
    huge = 1 << (array.dtype.bitwidth - 2)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.get_constant(types.int64, huge)

    return types.int64(array), codegen


@emit
def vexponent(typingctx: Any, f: Any) -> Any:
    """floor(log2 f) of a positive normal f."""
    twin = integer_twin(f)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        form = _Format(f)
        bits = builder.bitcast(args[0], llvm_vector(twin))
        return builder.sub(builder.lshr(bits, constant(twin, form.mantissa)), constant(twin, form.bias))

    return twin(f), codegen


@emit
def vdivide_by_power(typingctx: Any, f: Any, e: Any) -> Any:
    """f / 2^e by arithmetic on the exponent bits: the result must be normal."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], llvm_vector(e))
        bits = builder.sub(bits, builder.shl(args[1], constant(e, _Format(f).mantissa)))
        return builder.bitcast(bits, llvm_vector(f))

    return f(f, e), codegen
