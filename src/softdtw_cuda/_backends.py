"""Which module computes for a kind of device.

Backends (`_cpu.launch`, `_cuda.launch`, and `_reference` for everything else) are imported when a tensor of
their device arrives, never import each other, and share one interface, functions named like the operators:

    fused_*  x (B or 1, N, D), y (B or 1, M, D), squared Euclidean distance inside the kernel
    cost_*   cost (B, N, M)

`value` is (B,), float32, or float64 for float64 input. `state` is whatever the backward needs besides the
inputs, as bytes; empty when `save` is false. Gradients come per sample; where a side is broadcast they come
in the value's type and are summed by the caller. bandwidth = -1 stands for no band. Small pairs on
CUDA go another way, `_cuda.at_once`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import _reference


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


def state_config(device_type: str) -> Any:
    """The module that knows the size of a backend's state; None for the reference, which saves nothing."""
    if device_type == "cuda" and torch.version.hip is None:
        from ._cuda import config as cuda

        return cuda
    if device_type == "cpu" and backend("cpu") is not _reference:
        from ._cpu import config as cpu

        return cpu
    return None
