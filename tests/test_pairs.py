"""Lists of pairs and all pairs: against single calls, in parts of any size, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softdtw_cuda import pairs, softdtw, softdtw_cdist, softdtw_pairs
from softdtw_cuda._problem import NO_BAND, Problem

METRICS = ["sqeuclidean", "cosine", "euclidean", "cityblock"]
PAIRS = [[0, 1], [3, 0], [0, 1], [2, 2], [1, 0], [0, 0]]
"""Repeated, reversed, and with series that are in several pairs; x[4] is in none."""


def series(
    device: str = "cpu", dtype: torch.dtype = torch.float64, features: int = 2, grad: bool = False
) -> tuple[Tensor, Tensor]:
    x = torch.randn(5, 7, features, dtype=torch.float64).to(device, dtype).requires_grad_(grad)
    y = torch.randn(3, 6, features, dtype=torch.float64).to(device, dtype).requires_grad_(grad)
    return x, y


def one_by_one(x: Tensor, y: Tensor, pairs: list[list[int]], **options: Any) -> Tensor:
    """The same values by single calls."""
    x_lengths, y_lengths = options.pop("x_lengths", None), options.pop("y_lengths", None)

    def cut(side: Tensor, lengths: list[int] | None, index: int) -> Tensor:
        return side[index] if lengths is None else side[index, : lengths[index]]

    values = [softdtw(cut(x, x_lengths, i), cut(y, y_lengths, j), **options) for i, j in pairs]
    return torch.stack(values)


@pytest.mark.parametrize("limit", [None, 1], ids=["whole", "parts"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["tensor", "numpy"])
def test_a_list_that_changes_before_the_backward(
    device: str, kind: str, fused: bool, limit: int | None
) -> None:
    """One array of indices may be filled again for every step of a training."""
    x, y = series(device, grad=True)
    listed = torch.tensor(PAIRS, dtype=torch.int32, device="cpu" if kind == "numpy" else device)
    given: Any = listed.numpy() if kind == "numpy" else listed
    expected = torch.autograd.grad(softdtw_pairs(x, y, PAIRS, fused=fused).sum(), (x, y))
    value = softdtw_pairs(x, y, given, fused=fused, memory_limit=limit)
    listed.zero_()
    for ours, theirs in zip(torch.autograd.grad(value.sum(), (x, y)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_parts_of_which_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take no checkpoint, for which torch imports its compiler."""
    x, y = series()
    expected = softdtw_cdist(x, y, dist="euclidean")
    monkeypatch.setattr(pairs, "checkpoint", None)
    with torch.no_grad():
        assert torch.equal(softdtw_cdist(x, y, dist="euclidean", memory_limit=1), expected)


LENGTHS = {"x_lengths": [7, 3, 5, 1, 2], "y_lengths": [2, 6, 4]}


@pytest.mark.parametrize("lengths", [{}, LENGTHS], ids=["full", "lengths"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dist", METRICS)
def test_pairs_are_those_of_single_calls(
    device: str, dist: str, normalize: bool, lengths: dict[str, list[int]]
) -> None:
    x, y = series(device)
    options: dict[str, Any] = {"gamma": 0.5, "dist": dist, "normalize": normalize, **lengths}
    torch.testing.assert_close(
        softdtw_pairs(x, y, PAIRS, **options), one_by_one(x, y, PAIRS, **options), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("kind", ["tensor", "int32", "list", "numpy", "device"])
def test_kinds_of_lists(device: str, kind: str) -> None:
    x, y = series(device)
    listed = torch.tensor(PAIRS)
    given = {
        "tensor": listed,
        "int32": listed.int(),
        "list": PAIRS,
        "numpy": listed.numpy(),
        "device": listed.to(device),
    }[kind]
    assert torch.equal(softdtw_pairs(x, y, given), softdtw_pairs(x, y, listed))


@pytest.mark.parametrize("dist", METRICS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("memory_limit", [None, 1])
def test_gradients_of_shared_series(
    device: str, dist: str, normalize: bool, memory_limit: int | None
) -> None:
    x, y = series(device, grad=True)
    weights = torch.randn(len(PAIRS), dtype=torch.float64, device=device)
    options: dict[str, Any] = {"gamma": 0.5, "bandwidth": 4, "normalize": normalize, "dist": dist}
    value = softdtw_pairs(x, y, PAIRS, memory_limit=memory_limit, **options)
    gradients = torch.autograd.grad(value @ weights, (x, y))
    expected = torch.autograd.grad(one_by_one(x, y, PAIRS, **options) @ weights, (x, y))
    torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-11)
    assert not gradients[0][4].any()


@pytest.mark.parametrize("features", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_any_size_give_the_same_bits(device: str, features: int, dtype: torch.dtype) -> None:
    x, y = torch.randn(6, 70, features), torch.randn(9, 40, features)
    x, y = (side.to(device, dtype).requires_grad_() for side in (x, y))
    weights = torch.randn(6, 9, device=device)
    bytes_of_a_pair = 40_000
    answers = []
    for limit in (None, 1, 3 * bytes_of_a_pair, 20 * bytes_of_a_pair):
        value = softdtw_cdist(x, y, gamma=0.7, memory_limit=limit)
        answers.append((value, *torch.autograd.grad((value * weights).sum(), (x, y))))
    for answer in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answers[0], answer, strict=True))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("grad", [False, True])
def test_progress(
    grad: bool, fused: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar that moves part by part; nothing else changes, nothing is counted twice."""
    monkeypatch.setitem(pairs.CELLS_OF_A_STEP, "cpu", 2 * 7 * 6)  # two pairs
    moves: list[int] = []

    def update(bar: Any, pairs: int) -> None:
        moves.append(pairs)
        bar.n += pairs

    monkeypatch.setattr("softdtw_cuda.pairs.tqdm.update", update)
    x, y = series(grad=grad)
    limit = 1 if grad else None  # with gradients it is the limit that makes parts, here of one pair
    expected = [softdtw_cdist(x, y, fused=fused, memory_limit=limit)]
    measured = [softdtw_cdist(x, y, fused=fused, memory_limit=limit, progress=True)]
    assert moves == ([1] * 15 if grad else [2] * 7 + [1])
    if grad:
        for found in (expected, measured):
            found += torch.autograd.grad(found[0].sum(), (x, y))
        assert sum(moves) == 15
    assert all(map(torch.equal, measured, expected))
    assert "pairs:" in capsys.readouterr().err
    moves.clear()
    softdtw_pairs(x, y, PAIRS, fused=fused, memory_limit=limit, progress=True)
    softdtw_cdist(x, fused=fused, memory_limit=limit, progress=True)  # each unordered pair
    assert sum(moves) == len(PAIRS) + 15
    assert torch.func.vmap(lambda x: softdtw_cdist(x, y, fused=fused, progress=True))(x[None]).shape == (
        1,
        5,
        3,
    )


def test_sums_have_the_order_of_the_list() -> None:
    """Sequential, as a loop over the pairs would add them up, and not as halves or tiles of it."""
    x, y = torch.randn(1, 20, 1, requires_grad=True), torch.randn(50, 20, 1)
    total = torch.zeros_like(x[0])
    pairs = [[0, j] for j in range(50)]
    for _, j in pairs:
        (one,) = torch.autograd.grad(softdtw(x[0], y[j]), x)
        total = total + one[0]
    (gradient,) = torch.autograd.grad(softdtw_pairs(x, y, pairs, memory_limit=1).sum(), x)
    assert torch.equal(gradient[0], total)


@pytest.mark.parametrize("dist", [*METRICS, lambda x, y: torch.cdist(x, 0.5 * y)])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("memory_limit", [None, 1])
def test_one_set_with_itself(device: str, dist: Any, normalize: bool, memory_limit: int | None) -> None:
    x, _ = series(device, grad=True)
    other = x.detach().clone().requires_grad_()
    options: dict[str, Any] = {"gamma": 0.5, "dist": dist, "normalize": normalize}
    value = softdtw_cdist(x, memory_limit=memory_limit, x_lengths=[7, 3, 5, 1, 2], **options)
    expected = softdtw_cdist(other, other, x_lengths=[7, 3, 5, 1, 2], y_lengths=[7, 3, 5, 1, 2], **options)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    if isinstance(dist, str):
        assert torch.equal(value, value.mT)
        assert not normalize or not value.diagonal().any()
    weights = torch.randn(5, 5, dtype=torch.float64, device=device)
    torch.testing.assert_close(
        torch.autograd.grad((value * weights).sum(), x),
        torch.autograd.grad((expected * weights).sum(), other),
        rtol=1e-11,
        atol=1e-11,
    )


def test_each_unordered_pair_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from softdtw_cuda import _backends

    counted = []
    forward = _backends.forward

    def count(problem: Problem) -> tuple[Tensor, Tensor]:
        counted.append(problem.batch)
        return forward(problem)

    monkeypatch.setattr(_backends, "forward", count)
    softdtw_cdist(torch.randn(10, 8, 1))
    assert counted == [55]


def test_no_pairs(device: str) -> None:
    x, y = series(device, grad=True)
    empty: tuple[Any, ...] = ([], torch.empty(0, 2, dtype=torch.int64))
    for nothing in empty:
        value = softdtw_pairs(x, y, nothing, normalize=True)
        assert value.shape == (0,)
        value.sum().backward()
        assert x.grad is not None
        assert not x.grad.any()
    assert softdtw_cdist(x[:0]).shape == (0, 0)


def test_a_parameterised_distance_learns(device: str) -> None:
    """Also where the pairs are computed in parts, for which the cost matrices are made again."""
    x, y = series(device)
    scale = torch.tensor(0.7, dtype=torch.float64, device=device, requires_grad=True)
    gradients = [
        torch.autograd.grad(
            softdtw_pairs(x, y, PAIRS, dist=lambda a, b: scale * torch.cdist(a, b), memory_limit=limit).sum(),
            scale,
        )
        for limit in (None, 1)
    ]
    assert gradients[0][0] != 0
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0.0)


def test_compiled(device: str) -> None:
    x, y = series(device, torch.float32, grad=True)
    pairs = torch.tensor(PAIRS, device=device)
    compiled = torch.compile(softdtw_pairs, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(softdtw_pairs(x, y, pairs, gamma=0.5).sum(), (x, y))
    value = compiled(x, y, pairs, gamma=0.5)
    assert torch.equal(value, softdtw_pairs(x, y, pairs, gamma=0.5))
    torch.testing.assert_close(torch.autograd.grad(value.sum(), (x, y)), expected, rtol=0, atol=0)
    table = torch.compile(softdtw_cdist, backend="aot_eager", fullgraph=True)
    assert torch.equal(table(x), softdtw_cdist(x))


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("lengths", [{}, LENGTHS], ids=["full", "lengths"])
def test_mapped(device: str, in_dims: tuple[int | None, int | None], lengths: dict[str, list[int]]) -> None:
    first, second = series(device), series(device)
    x = torch.stack([first[0], second[0]]) if in_dims[0] == 0 else first[0]
    y = torch.stack([first[1], second[1]]) if in_dims[1] == 0 else first[1]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return softdtw_pairs(x, y, PAIRS, gamma=0.5, **lengths)

    def pick(side: Tensor, dim: int | None, k: int) -> Tensor:
        return side if dim is None else side[k]

    each = [(pick(x, in_dims[0], k), pick(y, in_dims[1], k)) for k in range(2)]
    value = torch.vmap(loss, in_dims)(x, y)
    torch.testing.assert_close(value, torch.stack([loss(*one) for one in each]), rtol=1e-12, atol=1e-12)
    gradient = torch.vmap(torch.func.grad(lambda x, y: loss(x, y).sum()), in_dims)(x, y)
    expected = [torch.func.grad(lambda x, y: loss(x, y).sum())(*one) for one in each]
    torch.testing.assert_close(gradient, torch.stack(expected), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("side", ["x", "y"])
def test_pairs_beyond_the_range_of_narrow_arithmetic(device: str, side: str) -> None:
    """One series with costs that 32-bit exponents cannot hold, in some of the pairs."""
    x, y = series(device, torch.float32, grad=True)
    with torch.no_grad():
        (x if side == "x" else y)[0, 3, 1] = 3e4
    options: dict[str, Any] = {"gamma": 1e-4}
    value = softdtw_pairs(x, y, PAIRS, **options)
    expected = one_by_one(x.double(), y.double(), PAIRS, **options)
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0.0)
    gradients = torch.autograd.grad(value.sum(), (x, y))
    exact = torch.autograd.grad(expected.sum(), (x, y))
    for measured, right in zip(gradients, exact, strict=True):
        torch.testing.assert_close(measured, right, rtol=1e-5, atol=1e-3)


def test_memory_does_not_grow_with_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tight limit no part's state is larger than the limit allows."""
    from softdtw_cuda import _backends
    from softdtw_cuda._cpu import launch

    kept = []
    forward = _backends.forward

    def watch(problem: Problem) -> tuple[Tensor, Tensor]:
        value, state = forward(problem)
        kept.append(state.nbytes)
        return value, state

    monkeypatch.setattr(_backends, "forward", watch)
    x = torch.randn(20, 300, 1, requires_grad=True)
    limit = 1_000_000
    one = Problem(x[:1], x[:1], None, None, 1.0, NO_BAND, True, True)
    assert 400 * launch.state_bytes(one) > 4 * limit
    softdtw_cdist(x, x.detach(), memory_limit=limit).sum().backward()
    assert 0 < max(kept) <= limit


class TestErrors:
    @pytest.mark.parametrize(
        ("pairs", "error", "words"),
        [
            ([[0, 3]], ValueError, ["pairs[0, 1] is 3", "0 to 2", "3 series of y"]),
            ([[0, 0], [5, 0]], ValueError, ["pairs[1, 0] is 5", "0 to 4", "5 series of x"]),
            ([[-1, 0]], ValueError, ["pairs[0, 0] is -1"]),
            ([0, 1], ValueError, ["shape (2,)", "(P, 2)", "torch.stack"]),
            ([[0, 1, 2]], ValueError, ["shape (1, 3)"]),
            ([[0.0, 1.0]], TypeError, ["torch.float32", "pairs.long()"]),
            ([[True, False]], TypeError, ["torch.bool"]),
            ("all", TypeError, ["got str", "[[0, 3], [1, 2]]"]),
        ],
    )
    def test_indices(self, pairs: Any, error: type[Exception], words: list[str]) -> None:
        x, y = series()
        with pytest.raises(error) as raised:
            softdtw_pairs(x, y, pairs)
        assert all(word in str(raised.value) for word in words), raised.value

    def test_a_band_without_a_path(self) -> None:
        x, y = series()
        assert softdtw_pairs(x, y, [[0, 1]], bandwidth=1, **LENGTHS).isfinite().all()
        with pytest.raises(ValueError, match=r"bandwidth=1 leaves sample 1 without a path.*7 and 2"):
            softdtw_pairs(x, y, [[0, 1], [0, 0]], bandwidth=1, **LENGTHS)

    def test_lengths_of_a_side_that_is_not_there(self) -> None:
        with pytest.raises(ValueError, match="y_lengths is given but y is not"):
            softdtw_cdist(series()[0], y_lengths=[1, 2, 3, 4, 5])

    @pytest.mark.parametrize("limit", [0, -1, 1.5, "1 GB", True])
    def test_memory_limit(self, limit: Any) -> None:
        x, y = series()
        with pytest.raises((TypeError, ValueError), match="memory_limit"):
            softdtw_cdist(x, y, memory_limit=limit)

    def test_indices_of_a_compiled_call(self) -> None:
        x, y = series()
        compiled = torch.compile(softdtw_pairs, backend="aot_eager", fullgraph=True)
        with pytest.raises(ValueError, match=r"pairs\[0, 1\] is 3"):
            compiled(x, y, torch.tensor([[0, 3]]))


@pytest.mark.gpu
def test_indices_out_of_range_on_a_gpu() -> None:
    x, y = series("cuda", torch.float32, grad=True)
    pairs = torch.tensor([[0, 1], [0, 3], [5, 0], [-1, 0], [1, 2]], device="cuda")
    value = softdtw_pairs(x, y, pairs)
    assert value.isnan().tolist() == [False, True, True, True, False]
    value[[0, 4]].sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
