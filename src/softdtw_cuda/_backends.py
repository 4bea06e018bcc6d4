"""The Backend protocol, which backend serves a device, and the call of it.

Backends (`_cpu.launch`, `_cuda.launch`, and `_reference` for everything else) are modules that implement the
protocol in full. They are imported when a tensor of their device arrives, and import none but the reference.
"""

from __future__ import annotations

import sys
import threading
import warnings
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from . import _reference
from ._fork import wait_before_fork
from ._problem import BACKWARD, EXPECTED, EXPECTED_BACKWARD, FORWARD, Direction, Operator, Problem
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


_found: dict[str, tuple[Backend, DualBackend]] = {}


def _backends_of(device_type: str) -> tuple[Backend, DualBackend]:
    """Both backends of a kind of device, found once."""
    if device_type not in _found:
        with _loading:
            _found[device_type] = _find_backends(device_type)
    return _found[device_type]


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


def state_bytes(problem: Problem, direction: Direction | None = None) -> int:
    """Size of the state that the forward of this problem, or of both, saves where it saves one."""
    device_type = problem.x.device.type
    if direction is None:
        return backend(device_type).state_bytes(problem)
    return dual_backend(device_type).expected_state_bytes(problem, direction)


def _check_state(problem: Problem, direction: Direction | None, state: Tensor) -> None:
    """Raise for a state of another size than the backward reads: it would read what lies behind."""
    size = state_bytes(problem, direction)
    if state.numel() == size:
        return
    # The forward may have needed both gradients where the backward needs one.
    if state.numel() != state_bytes(problem._replace(need_x=True, need_y=problem.y is not None), direction):
        raise RuntimeError(
            f"softdtw_cuda: the state has {state.numel()} bytes, expected {size}; pass the one that the "
            "forward of the same problem has returned."
        )


def compute(
    operator: Operator, problem: Problem, direction: Direction | None, saved: tuple[Tensor, ...]
) -> Any:
    """What an operator returns, by the backend of the tensors' device."""
    if saved:
        _check_state(problem, direction, saved[2])
    device_type = problem.x.device.type
    if direction is None:
        return getattr(backend(device_type), operator.name)(problem, *saved)
    return getattr(dual_backend(device_type), operator.name)(problem, direction, *saved)


def _dispatch(
    operator: Operator, problem: Problem, direction: Direction | None = None, saved: tuple[Tensor, ...] = ()
) -> Any:
    """Straight to the backend for plain tensors: torch's dispatcher takes longer than the kernels of small
    problems. Everything else (tracing, fake tensors, dispatch modes, subclasses) by the registered operator.
    """
    directions = () if direction is None else (direction.a, direction.b)
    if is_plain(*problem.tensors, *directions, *saved[:1]):
        return compute(operator, problem, direction, saved)
    return getattr(torch.ops.softdtw_cuda, operator.name)(*operator.row(problem, direction, saved))


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Values and state of a problem."""
    result: tuple[Tensor, Tensor] = _dispatch(FORWARD, problem)
    return result


def backward(problem: Problem, grad: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients, one per pair, of a problem."""
    result: tuple[Tensor, Tensor] = _dispatch(BACKWARD, problem, None, (grad, value, state))
    return result


def expected(problem: Problem, direction: Direction) -> tuple[Tensor, Tensor, Tensor]:
    """<E, Omega>, values and state of a problem and a direction."""
    result: tuple[Tensor, Tensor, Tensor] = _dispatch(EXPECTED, problem, direction)
    return result


def expected_backward(
    problem: Problem, direction: Direction, grad: Tensor, value: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients, one per pair, of <E, Omega>."""
    result: tuple[Tensor, Tensor, Tensor, Tensor]
    result = _dispatch(EXPECTED_BACKWARD, problem, direction, (grad, value, state))
    return result
