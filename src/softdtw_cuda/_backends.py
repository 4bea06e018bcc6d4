"""The Backend protocol, which backend serves a device, and the call of it.

Backends (`_cpu.launch`, `_cuda.launch`, and `_reference` for everything else) are modules that implement the
protocol in full. They are imported when a tensor of their device arrives, and import none but the reference.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from typing import Protocol, cast

import torch
from torch import Tensor

from . import _reference
from ._fork import wait_before_fork
from ._problem import Direction, Problem
from ._torch_compat import is_plain


class Backend(Protocol):
    """Computes problems whose tensors are on its device. Every sum has a fixed order."""

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Values (B,) in `problem.value_dtype`, and the state that `backward` needs, as bytes.

        The state is empty where no gradient is needed. A pair whose lengths, indices or band make no sense
        has the value NaN; one that no path of finite cost goes through has +inf.
        """

    def backward(self, problem: Problem, grad: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x and y, one per pair, in `problem.gradient_dtype`, or `problem.no_gradient`.

        Exactly zero in the padding, outside the band and where the value is infinite.
        """

    def state_bytes(self, problem: Problem) -> int:
        """Size of the state that `forward` saves; sizes may be symbolic."""


class DualBackend(Protocol):
    """Second order: propagates the derivative of everything along a direction Omega on the costs.

    All else of second order is made of these: see `_autograd`. E is the alignment, and a dot stands for the
    derivative along Omega, equations (12) to (15).
    """

    def expected(self, problem: Problem, direction: Direction) -> tuple[Tensor, Tensor, Tensor]:
        """<E, Omega> (B,), values (B,), both in `problem.value_dtype`, and the state for the gradients.

        The state is empty where neither problem nor direction need a gradient. Where the value is NaN
        <E, Omega> is NaN, where it is +inf, and there is no alignment, zero.
        """

    def expected_backward(
        self, problem: Problem, direction: Direction, grad: Tensor, value: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of sum_b grad_b <E_b, Omega_b> wrt x, y, a and b, one per pair, or `no_gradient`.

        grad E-dot contracted with what the costs are made of, and grad E with what Omega is made of. Types
        and zeros as those of `Backend.backward`.
        """

    def expected_state_bytes(self, problem: Problem, direction: Direction) -> int:
        """Size of the state that `expected` saves; sizes may be symbolic."""


def _find_backends(device_type: str) -> tuple[Backend, DualBackend]:
    """The modules that compute for this kind of device, in first and in second order."""
    if device_type == "cpu":
        try:
            from ._cpu import dual_launch, launch
        except ImportError as error:
            warnings.warn(
                f"softdtw_cuda: the CPU kernels cannot be loaded ({error}); falling back to plain torch, "
                f"which is many times slower and keeps N x M tables. {_remedy()} brings the kernels.",
                RuntimeWarning,
                stacklevel=2,
            )
            return _reference, _reference
        return launch, dual_launch
    if device_type == "cuda" and torch.version.hip is None:
        from ._cuda import dual
        from ._cuda import launch as cuda_launch

        return cuda_launch, dual
    return _reference, _reference


def _remedy() -> str:
    return "Unsetting NUMBA_DISABLE_JIT" if "numba" in sys.modules else "`pip install numba`"


_loading = threading.RLock()
wait_before_fork(_loading)


@functools.cache
def _kept_backends(device_type: str) -> tuple[Backend, DualBackend]:
    with _loading:
        return _find_backends(device_type)


def _backends_of(device_type: str) -> tuple[Backend, DualBackend]:
    """Both backends of a kind of device, found once."""
    # torch's compiler traces through a cache and warns that it does.
    return _find_backends(device_type) if torch.compiler.is_compiling() else _kept_backends(device_type)


def backend(device_type: str) -> Backend:
    """The backend of a kind of device."""
    return _backends_of(device_type)[0]


def dual_backend(device_type: str) -> DualBackend:
    """What computes second order; the reference, which keeps N x M tables, where there are no kernels."""
    return _backends_of(device_type)[1]


def kernel_missing(device_type: str) -> str | None:
    """Why tensors of this device have no fused kernel; None where they have one."""
    if device_type == "cpu" and backend("cpu") is cast(Backend, _reference):
        return f"the CPU kernels cannot be loaded ({_remedy()} brings them)"
    if device_type == "cuda" and torch.version.hip is not None:
        return "there are no kernels for ROCm yet"
    if device_type not in ("cpu", "cuda"):
        return f"there are no kernels for {device_type!r} devices yet"
    return None


# Plain tensors go straight to their backend: torch's dispatcher takes longer than the kernels of small
# problems. Everything else (tracing, fake tensors, dispatch modes, subclasses) goes through the operators.


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Values and state of a problem."""
    if is_plain(*problem.tensors):
        return backend(problem.x.device.type).forward(problem)
    result: tuple[Tensor, Tensor] = torch.ops.softdtw_cuda.forward(*problem.operands)
    return result


def backward(problem: Problem, grad: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients, one per pair, of a problem."""
    if is_plain(grad, *problem.tensors):
        return backend(problem.x.device.type).backward(problem, grad, value, state)
    result: tuple[Tensor, Tensor] = torch.ops.softdtw_cuda.backward(grad, value, state, *problem.operands)
    return result


def expected(problem: Problem, direction: Direction) -> tuple[Tensor, Tensor, Tensor]:
    """<E, Omega>, values and state of a problem and a direction."""
    if is_plain(*problem.tensors, direction.a, direction.b):
        return dual_backend(problem.x.device.type).expected(problem, direction)
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.softdtw_cuda.expected(*problem.operands, *direction)
    return result


def expected_backward(
    problem: Problem, direction: Direction, grad: Tensor, value: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients, one per pair, of <E, Omega>."""
    if is_plain(grad, *problem.tensors, direction.a, direction.b):
        dual = dual_backend(problem.x.device.type)
        expected_bytes = dual.expected_state_bytes(problem, direction)
        if state.numel() != expected_bytes:
            raise RuntimeError(f"softdtw_cuda: a state of {state.numel()} bytes, expected {expected_bytes}")
        return dual.expected_backward(problem, direction, grad, value, state)
    result: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.softdtw_cuda.expected_backward(
        grad, value, state, *problem.operands, *direction
    )
    return result
