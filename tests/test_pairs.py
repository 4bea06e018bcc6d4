"""Lists of pairs and all pairs: against single calls, in parts of any size, values and gradients."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from softdtw_cuda import _free_memory, pairs, softdtw, softdtw_cdist, softdtw_pairs
from softdtw_cuda._problem import NO_BAND, Problem
from softdtw_cuda._vmap import fold_problem

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


@pytest.mark.parametrize("kind", ["tensor", "int32", "list", "numpy", "reversed", "device"])
def test_kinds_of_lists(device: str, kind: str) -> None:
    x, y = series(device)
    listed = torch.tensor(PAIRS)
    given = {
        "tensor": listed,
        "int32": listed.int(),
        "list": PAIRS,
        "numpy": listed.numpy(),
        "reversed": listed.numpy()[::-1].copy()[::-1],
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


def test_a_mapped_table() -> None:
    x = torch.randn(2, 5, 7, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of what it maps one by one
        value = torch.vmap(softdtw_cdist)(x)
    assert torch.equal(value, torch.stack([softdtw_cdist(each) for each in x]))


def test_one_set_without_the_other(device: str) -> None:
    x, _ = series(device)
    listed = [[0, 1], [4, 4], [3, 0]]
    for normalize in (False, True):
        value = softdtw_pairs(x, None, listed, normalize=normalize)
        assert torch.equal(value, softdtw_pairs(x, x, listed, normalize=normalize))


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


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Problem, int]]:
    """The problems of all forwards, and the bytes of their states."""
    from softdtw_cuda import _backends

    seen = []
    forward = _backends.forward

    def watch(problem: Problem) -> tuple[Tensor, Tensor]:
        value, state = forward(problem)
        seen.append((problem, state.nbytes))
        return value, state

    monkeypatch.setattr(_backends, "forward", watch)
    return seen


class TestMemory:
    def test_of_states(self, launched: list[tuple[Problem, int]]) -> None:
        """Of a tight limit no part's state is larger than the limit allows."""
        from softdtw_cuda._cpu import launch

        x = torch.randn(20, 300, 1, requires_grad=True)
        limit = 1_000_000
        one = Problem(x[:1], x[:1], None, None, 1.0, NO_BAND, True, True)
        assert 400 * launch.state_bytes(one) > 4 * limit
        softdtw_cdist(x, x.detach(), memory_limit=limit).sum().backward()
        assert 0 < max(size for _, size in launched) <= limit

    @pytest.mark.parametrize("options", [{"dist": "euclidean"}, {"fused": False}], ids=str)
    def test_of_costs(self, launched: list[tuple[Problem, int]], options: dict[str, Any]) -> None:
        """Those of one part are gone when the next one's are computed, without Python's collector."""
        x, y = torch.randn(3, 40, 2, requires_grad=True), torch.randn(4, 40, 2)
        softdtw_cdist(x, y, memory_limit=1, **options)  # imports what checkpoints need
        launched.clear()
        gc.collect()
        gc.disable()
        try:
            softdtw_cdist(x, y, memory_limit=1, **options).sum().backward()
            costs = [weakref.ref(problem.x) for problem, _ in launched]
            launched.clear()
            alive = [cost() is not None for cost in costs]
        finally:
            gc.enable()
        assert len(alive) == 24
        assert not any(alive)

    @pytest.mark.parametrize("options", [{}, {"fused": False}], ids=str)
    def test_of_self_terms(self, launched: list[tuple[Problem, int]], options: dict[str, Any]) -> None:
        """They are computed for the series that are listed, or of which there are fewer, within the limit."""
        x, y = torch.randn(50, 30, 1), torch.randn(3, 30, 1)
        pairs = [[7, 0], [9, 1], [7, 2], [8, 2]]
        softdtw_pairs(x, y, pairs, normalize=True, **options)
        assert [problem.batch for problem, _ in launched] == [4, 4, 3]
        launched.clear()
        softdtw_cdist(x, y, normalize=True, memory_limit=8 * 24 * 30 * 30, **options)
        assert sum(problem.batch for problem, _ in launched) == 150 + 50 + 3
        assert options == {} or max(problem.batch for problem, _ in launched) <= 8

    def test_of_pairs_beyond_the_range_of_float32(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are copied, and computed again in float64."""
        launch = pytest.importorskip("softdtw_cuda._cpu.launch")
        copied = []
        picked = launch.picked

        def watch(problem: Problem, samples: Tensor) -> Problem:
            wide: Problem = picked(problem, samples)
            assert wide.y is not None
            copied.append(wide.x.nbytes + wide.y.nbytes)
            return wide

        monkeypatch.setattr(launch, "picked", watch)
        x, y = torch.randn(6, 30, 16, requires_grad=True), torch.randn(20, 30, 16)
        limit = 200_000
        with torch.no_grad():
            softdtw_cdist(x, y, gamma=1e-6, memory_limit=limit)
        assert len(copied) > 1
        assert limit / 4 < max(copied) < limit / 1.5
        copied.clear()
        softdtw_cdist(x, y, gamma=1e-6, memory_limit=limit).sum().backward()
        assert limit / 10 < max(copied) < limit / 3  # and their gradients


class TestFreeMemory:
    def files(self, folder: Path, contents: dict[str, str]) -> None:
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)

    def test_what_files_take_is_free(self, tmp_path: Path) -> None:
        self.files(tmp_path, {"meminfo": "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:   700 kB\n"})
        assert _free_memory._available_on_host(str(tmp_path / "meminfo")) == 700 * 1024
        assert _free_memory._available_on_host(str(tmp_path / "nothing")) > 0

    def test_limits_of_control_groups(self, tmp_path: Path) -> None:
        self.files(
            tmp_path,
            {
                "groups": "12:cpu,cpuacct:/a\n0::/job/step\n",
                "job/memory.max": "5000\n",
                "job/memory.current": "4000\n",
                "job/memory.stat": "anon 1500\ninactive_file 2500\n",
                "job/step/memory.max": "max\n",
            },
        )
        (group,) = _free_memory._limited_groups(str(tmp_path / "groups"), str(tmp_path))
        assert group.folder == tmp_path / "job"
        assert group.free() == 3500

    def test_limits_of_their_first_version(self, tmp_path: Path) -> None:
        """As a container sees them: its path is that of the host, its files are those of the root."""
        self.files(
            tmp_path,
            {
                "groups": "4:memory:/docker/1234\n3:cpuset:/\n0::/\n",
                "memory/memory.limit_in_bytes": "5000\n",
                "memory/memory.usage_in_bytes": "6000\n",
                "memory/memory.stat": "cache 9\ntotal_inactive_file 0\n",
            },
        )
        (group,) = _free_memory._limited_groups(str(tmp_path / "groups"), str(tmp_path))
        assert group.free() == 0
        self.files(tmp_path, {"memory/memory.limit_in_bytes": "9223372036854771712\n"})
        _free_memory._limited_groups.cache_clear()
        assert _free_memory._limited_groups(str(tmp_path / "groups"), str(tmp_path)) == []
        _free_memory._limited_groups.cache_clear()

    def test_a_limit_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        group = _free_memory._Group(Path(), _free_memory._VERSIONS[""], 0)
        monkeypatch.setattr(_free_memory._Group, "free", lambda self: 4000)
        monkeypatch.setattr(_free_memory, "_limited_groups", lambda: [group])
        assert _free_memory.free_memory(torch.device("cpu")) == 1000


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
            ([[0, 1], [2]], TypeError, ["got list", "length 2"]),
            ([[2**70, 0]], TypeError, ["got list", "Overflow"]),
            ([torch.tensor([0, 1])] * 2, TypeError, ["list of tensors", "torch.stack"]),
            (np.array([["a", "b"]]), TypeError, ["got ndarray", "str_"]),
        ],
    )
    def test_indices(self, pairs: Any, error: type[Exception], words: list[str]) -> None:
        x, y = series()
        with pytest.raises(error) as raised:
            softdtw_pairs(x, y, pairs)
        assert all(word in str(raised.value) for word in words), raised.value

    def test_a_side_without_series(self) -> None:
        x, y = series()
        with pytest.raises(ValueError, match=r"pairs\[0, 1\] is 0, expected no pairs, since y has no series"):
            softdtw_pairs(x, y[:0], [[0, 0]])

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


MAPPED_INDICES: dict[str, Callable[[Tensor, Tensor, dict[str, Any]], Tensor]] = {
    "vmap": lambda x, p, o: torch.vmap(lambda p: softdtw_pairs(x, x, p, **o))(p),
    "vmap of both": lambda x, p, o: torch.vmap(lambda x, p: softdtw_pairs(x, x, p, **o))(
        torch.stack([x, x]), p
    ),
    "nested": lambda x, p, o: torch.vmap(torch.vmap(lambda p: softdtw_pairs(x, x, p, **o)))(p[None]),
    "gradient": lambda x, p, o: torch.func.grad(lambda x, p: softdtw_pairs(x, x, p, **o).sum())(x, p[1]),
    "gradients": lambda x, p, o: torch.vmap(
        lambda p: torch.func.grad(lambda x: softdtw_pairs(x, x, p, **o).sum())(x)
    )(p),
    "tangent": lambda x, p, o: torch.vmap(
        lambda p: torch.func.jvp(lambda x: softdtw_pairs(x, x, p, **o).sum(), (x,), (x,))[1]
    )(p),
}


@pytest.mark.parametrize("options", [{}, {"dist": "euclidean"}], ids=str)
@pytest.mark.parametrize("route", MAPPED_INDICES)
@pytest.mark.parametrize("bad", [5, -1, 2**31 - 2])
def test_indices_out_of_range_inside_transforms(bad: int, route: str, options: dict[str, Any]) -> None:
    """Of which one may be the series of another map, or no memory at all."""
    x, _ = series()
    message = rf"pairs\[\.\.\., 1\] is {bad}, expected an index from 0 to 4 into the 5 series of y"
    with pytest.raises(ValueError, match=message):
        MAPPED_INDICES[route](x, torch.tensor([[[0, 1]], [[0, bad]]]), options)


@pytest.mark.parametrize("bad", [5, -1, 2**31 - 1])
def test_a_folded_index_is_not_that_of_another_map(bad: int) -> None:
    """Nor on a GPU, where nobody checks it before the kernel."""
    x, y = (torch.stack([side, side]) for side in series())
    listed = torch.tensor([[[0, 1]], [[bad, 2]]], dtype=torch.int32)
    problem = Problem(x, y, None, None, 1.0, NO_BAND, pairs=listed)
    dims = problem.with_tensors([0, 0, None, None, 0])
    folded, _ = fold_problem(2, dims, problem)
    assert folded.pairs is not None
    assert folded.pairs.tolist() == [[0, 1], [-1, 5]]
    assert folded.pairs.dtype == torch.int32


@pytest.mark.parametrize("options", [{}, {"dist": "euclidean"}], ids=str)
@pytest.mark.gpu
def test_indices_out_of_range_on_a_gpu(options: dict[str, Any]) -> None:
    x, y = series("cuda", torch.float32, grad=True)
    pairs = torch.tensor([[0, 1], [0, 3], [5, 0], [-1, 0], [1, 2]], device="cuda")
    value = softdtw_pairs(x, y, pairs, **options)
    assert value.isnan().tolist() == [False, True, True, True, False]
    value[[0, 4]].sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
