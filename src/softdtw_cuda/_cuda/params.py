"""Arguments of the kernels, field by field: `Params` of kernels/params.cuh and kernels/params_dual.cuh."""

from __future__ import annotations

import ctypes
import struct

_POINTERS = (
    *("x", "y", "x_lengths", "y_lengths", "pairs", "grad", "value", "grad_x", "grad_y", "sum_x", "sum_y"),
    *("states", "bounds", "scratch", "rows", "more_rows", "tickets", "other_tickets", "range_flags"),
    *("progress", "grad_y_order"),
)
_LONGS = ("x_stride", "y_stride", "pair_bytes", "row_bytes", "more_row_bytes", "scratch_bytes", "grad_stride")
_DOUBLES = ("scale", "unscale")
_INTS = (
    *("batch", "n", "m", "d", "x_count", "y_count", "bandwidth", "strips", "checkpoints", "bound_columns"),
    *("tiles", "start_lag", "rerun", "blocks", "save", "grad_x_wide", "grad_y_wide"),
)


class Params(ctypes.Structure):
    """What a kernel is told; see kernels/params.cuh for the meaning of each field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _LONGS),
        *((name, ctypes.c_double) for name in _DOUBLES),
        *((name, ctypes.c_int32) for name in _INTS),
        ("saved_bytes", ctypes.c_int64),
    )


set_addresses = struct.Struct(f"{len(_POINTERS)}P").pack_into
"""Sets all pointers of Params (first argument) from its start (0) on; quicker than one by one."""

_DUAL_POINTERS = (
    *("x", "y", "a", "b", "x_lengths", "y_lengths", "pairs", "grad", "value", "dot"),
    *("grad_x", "grad_y", "grad_a", "grad_b"),
    *("states", "bounds", "rows", "progress", "tickets", "other_tickets"),
)
_DUAL_LONGS = ("x_stride", "y_stride", "a_stride", "b_stride", "pair_bytes", "row_bytes", "grad_stride")
_DUAL_DOUBLES = ("scale", "unscale", "inverse_gamma")
_DUAL_INTS = (
    *("batch", "n", "m", "d", "f", "x_count", "y_count", "bandwidth", "strips", "checkpoints"),
    *("bound_columns", "blocks", "save", "start_lag", "whole_units"),
)


class DualParams(ctypes.Structure):
    """What a kernel is told; see kernels/params_dual.cuh for the meaning of each field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _DUAL_POINTERS),
        *((name, ctypes.c_int64) for name in _DUAL_LONGS),
        *((name, ctypes.c_double) for name in _DUAL_DOUBLES),
        *((name, ctypes.c_int32) for name in _DUAL_INTS),
    )
