"""The short way of small pairs on a GPU: who may take it, and that it is left where it does not belong.

What it computes is tested on the emulator (tests/cuda) and on GPUs (tests/gpu).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from softdtw_cuda import _autograd
from softdtw_cuda._reduction import Reduction
from softdtw_cuda.functional import _options_at_once

GPU = torch.device("cuda", 0)
SHAPE = torch.Size((4, 20, 3))
RIGHT: dict[str, Any] = {
    "x_shape": SHAPE,
    "y_shape": torch.Size((4, 30, 3)),
    "x_dtype": torch.float32,
    "y_dtype": torch.float32,
    "x_device": GPU,
    "y_device": GPU,
    "gamma": 0.5,
    "bandwidth": None,
    "dist": "sqeuclidean",
    "reduction": "mean",
}


@pytest.mark.parametrize(("bandwidth", "radius"), [(None, -1), (10, 10), (2**31 - 1, 2**31 - 1)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_right_calls(bandwidth: int | None, radius: int, reduction: Reduction) -> None:
    options = _options_at_once(**{**RIGHT, "bandwidth": bandwidth, "reduction": reduction})
    assert options == (0.5, radius, reduction)


@pytest.mark.parametrize(
    "wrong",
    [
        {"x_shape": torch.Size((20, 3)), "y_shape": torch.Size((30, 3))},
        {"x_shape": torch.Size((4, 20))},
        {"x_shape": torch.Size((1, 20, 3))},  # broadcast: right, but longer
        {"y_shape": torch.Size((5, 30, 3))},
        {"y_shape": torch.Size((4, 30, 2))},
        {"x_shape": torch.Size((0, 20, 3)), "y_shape": torch.Size((0, 30, 3))},
        {"x_shape": torch.Size((4, 0, 3))},
        {"y_shape": torch.Size((4, 0, 3))},
        {"x_shape": torch.Size((4, 20, 0)), "y_shape": torch.Size((4, 30, 0))},
        {"x_dtype": torch.float64},
        {"y_dtype": torch.float16},
        {"x_dtype": torch.float64, "y_dtype": torch.float64},
        {"x_dtype": torch.bfloat16, "y_dtype": torch.bfloat16},
        {"y_device": torch.device("cpu")},
        {"y_device": torch.device("cuda", 1)},
        {"gamma": 0.0},
        {"gamma": -1.0},
        {"gamma": math.inf},
        {"gamma": math.nan},
        {"bandwidth": 9},  # 30 - 20 = 10
        {"bandwidth": -1},
        {"bandwidth": 2**31},
        {"dist": "cosine"},
        {"dist": "nonsense"},
        {"reduction": "median"},
        {"x_shape": torch.Size((4, 1000, 3))},  # steps
        {"x_shape": torch.Size((10000, 20, 3)), "y_shape": torch.Size((10000, 30, 3))},  # cells
        {"x_shape": torch.Size((4, 20, 9999)), "y_shape": torch.Size((4, 30, 9999))},  # numbers
    ],
    ids=str,
)
def test_others_go_the_long_way(wrong: dict[str, Any]) -> None:
    assert _options_at_once(**{**RIGHT, **wrong}) is None


class _Backend:
    def __init__(self) -> None:
        self.calls = 0

    def fused_at_once(
        self, x: Tensor, y: Tensor, gamma: float, bandwidth: int, reduction: Reduction, *needed: bool
    ) -> tuple[Tensor | None, ...]:
        self.calls += 1
        gradients = [side.detach() * 2 if need else None for side, need in zip((x, y), needed, strict=True)]
        return (x.detach().square().sum() + y.detach().square().sum(), *gradients)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> _Backend:
    """Sums of squares, to see what becomes of a result."""
    made = _Backend()
    monkeypatch.setattr(_autograd, "backend", lambda device_type: made)
    return made


def call(x: Tensor, y: Tensor) -> Tensor | None:
    return _autograd.at_once(x, y, (0.5, -1, "mean"))


def test_each_backward_gets_gradients_of_its_own(backend: _Backend) -> None:
    x, y = torch.randn(2, 3, 1, requires_grad=True), torch.randn(2, 4, 1, requires_grad=True)
    value = call(x, y)
    assert value is not None
    grads = [torch.autograd.grad(3.0 * value, (x, y), retain_graph=True) for _ in range(3)]
    assert backend.calls == 3  # the first backward takes what the forward made
    for grad_x, grad_y in grads:
        assert torch.equal(grad_x, 6.0 * x)
        assert torch.equal(grad_y, 6.0 * y)
    assert len({grad.data_ptr() for pair in grads for grad in pair}) == 6
    value.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2.0 * x)
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_changed_inputs_are_an_error(backend: _Backend) -> None:
    x, y = torch.randn(2, 3, 1, requires_grad=True), torch.randn(2, 4, 1)
    value = call(x, y)
    assert value is not None
    y.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_without_a_gradient_to_compute(backend: _Backend) -> None:
    x, y = torch.randn(2, 3, 1), torch.randn(2, 4, 1)
    assert call(x, y) is None
    x.requires_grad_()
    with torch.no_grad():
        assert call(x, y) is None
    with torch.inference_mode():
        assert call(x, y) is None
    assert backend.calls == 0
    assert call(x, y) is not None
    assert call(y, x) is not None


def test_under_transforms_and_modes(backend: _Backend) -> None:
    x, y = torch.randn(2, 3, 1, requires_grad=True), torch.randn(2, 4, 1)

    def inside(given: Tensor) -> Tensor:
        assert call(given, y) is None
        return given.sum()

    torch.func.grad(inside)(x.detach())
    torch.func.vmap(inside)(x.detach().unsqueeze(0).requires_grad_())
    with forward_ad.dual_level():
        assert call(x, y) is None

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode():
        assert call(x, y) is None
    assert backend.calls == 0
