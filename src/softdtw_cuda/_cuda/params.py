"""Arguments of the kernels, field by field: `Params` of kernels/params.cuh and kernels/params_dual.cuh."""

from __future__ import annotations

import ctypes
import struct
from typing import Any


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one type."""
    return [(name, kind) for name in names.split()]


_POINTERS = _fields(
    ctypes.c_void_p,
    "x y x_lengths y_lengths pairs grad value grad_x grad_y sum_x sum_y states bounds scratch rows "
    "more_rows tickets other_tickets range_flags progress grad_y_order",
)


class Params(ctypes.Structure):
    """What a kernel is told; see kernels/params.cuh for the meaning of each field."""

    _fields_ = (
        *_POINTERS,
        *_fields(
            ctypes.c_int64,
            "x_stride y_stride pair_bytes row_bytes more_row_bytes scratch_bytes grad_stride",
        ),
        *_fields(ctypes.c_double, "scale unscale"),
        *_fields(
            ctypes.c_int32,
            "batch n m d x_count y_count bandwidth strips checkpoints bound_columns tiles start_lag rerun "
            "blocks save grad_x_wide grad_y_wide",
        ),
        ("saved_bytes", ctypes.c_int64),
    )


set_addresses = struct.Struct(f"{len(_POINTERS)}P").pack_into
"""Sets all pointers of Params (first argument) from its start (0) on; quicker than one by one."""


class DualParams(ctypes.Structure):
    """What a kernel is told; see kernels/params_dual.cuh for the meaning of each field."""

    _fields_ = (
        *_fields(
            ctypes.c_void_p,
            "x y a b x_lengths y_lengths pairs grad value dot grad_x grad_y grad_a grad_b states bounds rows "
            "progress tickets other_tickets",
        ),
        *_fields(
            ctypes.c_int64,
            "x_stride y_stride a_stride b_stride pair_bytes row_bytes grad_stride",
        ),
        *_fields(ctypes.c_double, "scale unscale inverse_gamma"),
        *_fields(
            ctypes.c_int32,
            "batch n m d f x_count y_count bandwidth strips checkpoints bound_columns blocks save start_lag "
            "whole_units",
        ),
    )
