"""The short way of small pairs on a GPU: who may take it, and that it is left where it does not belong.

What it computes is tested on the emulator (tests/cuda) and on GPUs (tests/gpu).
"""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from softdtw_cuda import _autograd, functional
from softdtw_cuda._cuda.at_once import SmallPairs
from softdtw_cuda._memory import NotInMemory
from softdtw_cuda._reduction import Reduction
from softdtw_cuda.functional import _small_pairs

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


def options_of(pairs: SmallPairs) -> tuple[float, int, Reduction]:
    return pairs._gamma, pairs._bandwidth, pairs._reduction


@pytest.mark.parametrize(("bandwidth", "radius"), [(None, -1), (10, 10), (2**31 - 1, 2**31 - 1)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_right_calls(bandwidth: int | None, radius: int, reduction: Reduction) -> None:
    options = {**RIGHT, "bandwidth": bandwidth, "reduction": reduction}
    pairs = _small_pairs(**options)
    assert pairs is not None
    assert options_of(pairs) == (0.5, radius, reduction)
    assert (pairs._shape, pairs._index) == ((4, 20, 30, 3), 0)
    assert _small_pairs(**options) is pairs  # with the launches that it keeps
    second = torch.device("cuda", 1)
    elsewhere = _small_pairs(**{**options, "x_device": second, "y_device": second})
    assert elsewhere is not None
    assert elsewhere._index == 1


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
    assert _small_pairs(**{**RIGHT, **wrong}) is None


class _OnGpu(Tensor):
    """Says that it is."""

    is_cuda = True  # type: ignore[assignment]  # torch has a property here


LANE: dict[str, Any] = {
    "gamma": 0.5,
    "bandwidth": None,
    "normalize": False,
    "dist": "sqeuclidean",
    "fused": None,
    "x_lengths": None,
    "y_lengths": None,
    "reduction": "none",
}


@pytest.mark.parametrize(
    ("different", "short"),
    [
        ({}, True),
        ({"fused": True}, True),
        ({"bandwidth": 10}, True),
        ({"reduction": "sum"}, True),
        ({"gamma": 1}, False),
        ({"gamma": numpy.float64(0.5)}, False),
        ({"bandwidth": True}, False),
        ({"bandwidth": numpy.int64(10)}, False),
        ({"normalize": True}, False),
        ({"normalize": numpy.bool_(True)}, False),
        ({"dist": "cosine"}, False),
        ({"dist": lambda x, y: torch.cdist(x, y)}, False),
        ({"fused": False}, False),
        ({"fused": 1}, False),
        ({"x_lengths": [3, 4, 5, 6]}, False),
        ({"y_lengths": torch.tensor([3, 4, 5, 6])}, False),
    ],
    ids=str,
)
def test_what_takes_the_short_way(
    different: dict[str, Any], short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def at_once(x: Tensor, y: Tensor, pairs: SmallPairs) -> Tensor:
        taken.append(options_of(pairs))
        raise StopIteration

    monkeypatch.setattr(functional, "PLAIN", frozenset((Tensor, _OnGpu)))
    monkeypatch.setattr(_autograd, "fused_at_once", at_once)
    x, y = (torch.randn(4, steps, 3).as_subclass(_OnGpu).requires_grad_() for steps in (20, 30))
    options = {**LANE, **different}
    with contextlib.suppress(Exception):  # the long way may lead anywhere, with such tensors
        functional.softdtw_reduced(x, y, **options)
    radius = -1 if options["bandwidth"] is None else options["bandwidth"]
    assert taken == ([(0.5, radius, options["reduction"])] if short else [])
    for plain in (x.as_subclass(Tensor), _OnGpu(x.detach())):  # on the CPU; without a gradient
        taken.clear()
        with contextlib.suppress(Exception):
            functional.softdtw_reduced(plain, y.detach(), **options)
        assert not taken


def test_compiled_graphs_go_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(functional, "PLAIN", frozenset((Tensor, _OnGpu)))
    monkeypatch.setattr(_autograd, "fused_at_once", lambda *arguments: taken.append(arguments))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x, y = (torch.randn(4, steps, 3).as_subclass(_OnGpu).requires_grad_() for steps in (20, 30))
    with contextlib.suppress(Exception):
        functional.softdtw_reduced(x, y, **LANE)
    assert not taken


class _SumsOfSquares:
    """Stands in for SmallPairs, to see what becomes of a result."""

    stream = 0

    def __init__(self) -> None:
        self.calls = 0
        self.made: list[int] = []

    def __call__(
        self, x: Tensor, y: Tensor, need_x: bool, need_y: bool
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None], int, bool]:
        try:
            assert x.data_ptr() != y.data_ptr()
        except RuntimeError as error:
            raise NotInMemory from error
        if x.is_neg() or y.is_neg():
            raise NotInMemory
        self.calls += 1
        gradients = x.detach() * 2 if need_x else None, y.detach() * 2 if need_y else None
        self.made += [gradient.data_ptr() for gradient in gradients if gradient is not None]
        value = x.detach().square().sum() + y.detach().square().sum()
        return value, gradients, self.stream, _autograd._in_capture(self.stream)

    def of(self, x: Tensor, y: Tensor) -> Tensor:
        return _autograd.fused_at_once(x, y, self)  # type: ignore[arg-type]  # no SmallPairs


@pytest.fixture
def pairs() -> _SumsOfSquares:
    return _SumsOfSquares()


def test_each_backward_gets_gradients_of_its_own(pairs: _SumsOfSquares) -> None:
    x, y = torch.randn(2, 3, 1, requires_grad=True), torch.randn(2, 4, 1, requires_grad=True)
    value = pairs.of(x, y)
    grads = [torch.autograd.grad(3.0 * value, (x, y), retain_graph=True) for _ in range(3)]
    assert pairs.calls == 3  # the first backward takes what the forward made
    for grad_x, grad_y in grads:
        assert torch.equal(grad_x, 6.0 * x)
        assert torch.equal(grad_y, 6.0 * y)
    assert [grad.data_ptr() for pair in grads for grad in pair] == pairs.made  # in place
    assert len(set(pairs.made)) == 6
    value.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2.0 * x)
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_changed_inputs_are_an_error(pairs: _SumsOfSquares) -> None:
    x, y = torch.randn(2, 3, 1, requires_grad=True), torch.randn(2, 4, 1)
    value = pairs.of(x, y)
    y.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_products_that_are_not_made_in_place(pairs: _SumsOfSquares, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(2, 3, 1, requires_grad=True), torch.randn(2, 4, 1)
    value = pairs.of(x, y)

    def gradient(weight: Tensor) -> Tensor:
        return torch.autograd.grad(value, x, weight, retain_graph=True)[0]

    class Marked(Tensor):
        pass

    three = torch.tensor(3.0)
    marked = gradient(three.as_subclass(Marked))
    assert type(marked) is Marked
    assert marked.data_ptr() not in pairs.made
    assert torch.equal(torch.func.functionalize(gradient)(three), 6.0 * x)
    second_of = torch.func.functionalize(lambda weights: gradient(weights[1]))
    assert torch.equal(second_of(torch.tensor([1.0, 3.0])), 6.0 * x)
    several = torch.tensor([1.0, 3.0])
    expected = torch.stack([2.0 * x, 6.0 * x])
    assert torch.equal(torch.func.vmap(gradient)(several), expected)
    (batched,) = torch.autograd.grad(value, x, several, retain_graph=True, is_grads_batched=True)
    assert torch.equal(batched, expected)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert gradient(three).data_ptr() not in pairs.made
    with torch.inference_mode(), torch.enable_grad():
        of_inference = pairs.of(x, y)
    assert torch.equal(torch.autograd.grad(of_inference, x, three)[0], 6.0 * x)


def test_what_a_capture_reads_stays(pairs: _SumsOfSquares, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds addresses: what it reads must neither change nor be given to somebody else."""
    x, y = torch.randn(2, 3, 1, requires_grad=True), torch.randn(2, 4, 1)

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, x, torch.tensor(3.0), retain_graph=True)[0]

    value = pairs.of(x, y)
    with monkeypatch.context() as patch:
        patch.setattr(_autograd, "_in_capture", lambda stream: True)
        captured = [gradient(value) for _ in range(2)]  # a backward alone
        replayed = pairs.of(x, y)
    given = [*captured, *(gradient(replayed) for _ in range(2))]  # a forward alone, and eager backwards
    assert pairs.calls == 2
    assert all(torch.equal(one, 6.0 * x) for one in given)
    assert len({one.data_ptr() for one in given} | set(pairs.made)) == 6
    assert gradient(value).data_ptr() == pairs.made[0]  # outside of captures, in place again
    assert pairs.calls == 2


def test_only_other_streams_than_the_default_are_asked_about_captures(
    pairs: _SumsOfSquares, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked.append(True))
    x, y = torch.randn(2, 3, 1, requires_grad=True), torch.randn(2, 4, 1)
    pairs.of(x, y).backward()
    assert not asked
    pairs.stream = 7
    pairs.of(x, y).backward()
    assert len(asked) == 2  # in the forward and in the backward


def test_zeros_that_torch_has_put_off(pairs: _SumsOfSquares, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are such zeros themselves could not be added to."""
    x, y = torch.randn(2, 3, 1, requires_grad=True), torch.randn(2, 4, 1)
    for in_capture in (False, True):
        monkeypatch.setattr(_autograd, "_in_capture", lambda stream, answer=in_capture: answer)
        (gradient,) = torch.autograd.grad(pairs.of(x, y).sgn(), x)
        assert not gradient._is_zerotensor()
        assert not gradient.any()


def test_another_backward_of_what_hooks_have_negated(pairs: _SumsOfSquares) -> None:
    x, y = torch.randn(2, 3, 1, requires_grad=True), torch.randn(2, 4, 1)
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: -kept, lambda kept: torch._neg_view(kept)):
        value = pairs.of(x, y)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(value, x, retain_graph=True)[0], 2.0 * x)


def test_a_tensor_kept_beyond_its_transform(pairs: _SumsOfSquares) -> None:
    x, kept = torch.randn(2, 3, 1, requires_grad=True), []

    def keep(given: Tensor) -> Tensor:
        kept.append(given)
        return given.sum()

    torch.func.grad(keep)(torch.randn(2, 4, 1))
    pairs.of(x, kept[0]).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2.0 * x)


def test_who_needs_a_plain_gradient() -> None:
    x, y = torch.randn(2, 3, 1), torch.randn(2, 4, 1)
    assert not _autograd.needs_plain_gradient(x, y)
    x.requires_grad_()
    assert _autograd.needs_plain_gradient(x, y)
    assert _autograd.needs_plain_gradient(y, x)
    with torch.no_grad():
        assert not _autograd.needs_plain_gradient(x, y)
    with torch.inference_mode():
        assert not _autograd.needs_plain_gradient(x, y)

    def inside(given: Tensor) -> Tensor:
        assert not _autograd.needs_plain_gradient(given, y)
        return given.sum()

    torch.func.grad(inside)(x.detach())
    torch.func.vmap(inside)(x.detach().unsqueeze(0).requires_grad_())
    with forward_ad.dual_level():
        assert not _autograd.needs_plain_gradient(x, y)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode():
        assert not _autograd.needs_plain_gradient(x, y)


@pytest.mark.parametrize(
    ("different", "small"),
    [
        ({}, True),
        ({"is_cuda": False}, False),
        ({"dtype": torch.float64}, False),
        ({"shape": torch.Size((1, 20, 3))}, False),
        ({"shape": torch.Size((4, 1020, 3))}, False),
    ],
    ids=str,
)
def test_small_tensors(different: dict[str, Any], small: bool) -> None:
    about = {"is_cuda": True, "dtype": torch.float32}
    x = SimpleNamespace(**{**about, "shape": SHAPE, **different})
    y = SimpleNamespace(**about, shape=RIGHT["y_shape"])
    lengths = torch.ones(4, dtype=torch.int32)
    assert _autograd.is_small(x, y, None, None) == small  # type: ignore[arg-type]  # all that is looked at
    assert not _autograd.is_small(x, y, lengths, None)  # type: ignore[arg-type]  # the same
    assert not _autograd.is_small(x, y, None, lengths)  # type: ignore[arg-type]  # the same
