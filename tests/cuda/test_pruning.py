"""What the backward leaves out: paths along edges and across, every way to begin a strip, random orders."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from softdtw_cuda import _reference
from softdtw_cuda._cuda import config, launch
from softdtw_cuda._problem import Problem
from tests.cuda.emulated_gpu import EmulatedGpu, build_all
from tests.oracle import relative, truth

pytestmark = pytest.mark.slow  # building its kernels for the emulator takes minutes

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
N, M = 330, 300
START_LAGS = (1, 2, config.NEVER_LATER)

Route = Callable[[int, int], list[tuple[int, int]]]


def along_the_diagonal(n: int, m: int) -> list[tuple[int, int]]:
    return [(i, i * (m - 1) // (n - 1)) for i in range(n)]


def down_then_right(n: int, m: int) -> list[tuple[int, int]]:
    """Every strip but the last has its weight in the first columns."""
    return [(i, 0) for i in range(n - 1)] + [(n - 1, j) for j in range(1, m)]


def right_then_down(n: int, m: int) -> list[tuple[int, int]]:
    """Every strip but the first has its weight in the last columns."""
    return [(0, j) for j in range(m - 1)] + [(i, m - 1) for i in range(1, n)]


def in_stairs(n: int, m: int) -> list[tuple[int, int]]:
    """Long steps, within strips and across their borders."""
    corners = [(0, 0), (40, 0), (40, 130), (192, 130), (192, 200), (255, 200), (256, 290), (n - 1, m - 1)]
    cells = []
    for (i, j), (k, q) in itertools.pairwise(corners):
        count = max(k - i, q - j)
        cells += [(i + (k - i) * t // count, j + (q - j) * t // count) for t in range(count)]
    # Corners are cut, for where the route goes down and right at once rows and columns move on.
    return [cell for cell in cells if cell not in corners[1:]] + corners[-1:]


ROUTES: tuple[Route, ...] = (along_the_diagonal, down_then_right, right_then_down, in_stairs)


def series_along(
    route: Route, n: int, m: int, d: int, size: float, generator: torch.Generator
) -> list[Tensor]:
    """x (1, n, d) and y (1, m, d) that are close where the route goes, and nowhere else."""
    cells = route(n, m)
    moves = [int(i > k and j > q) for (k, q), (i, j) in itertools.pairwise([(0, 0), *cells])]
    places = size * torch.randn(sum(moves) + 1, d, generator=generator, dtype=torch.float64)
    x, y = places[:1].repeat(n, 1), places[:1].repeat(m, 1)
    for (i, j), place in zip(cells, itertools.accumulate(moves), strict=True):
        x[i], y[j] = places[place], places[place]
    noise = [0.3 * torch.randn(side.shape, generator=generator, dtype=torch.float64) for side in (x, y)]
    return [(x + noise[0]).unsqueeze(0), (y + noise[1]).unsqueeze(0)]


class Call(NamedTuple):
    d: int
    dtype: torch.dtype = F32
    bandwidth: int = -1
    gamma: float = 1.0

    def __str__(self) -> str:
        band = f"-band{self.bandwidth}" if self.bandwidth >= 0 else ""
        return f"{f'd{self.d}' if self.d else 'cost'}-{str(self.dtype)[6:]}{band}-gamma{self.gamma:g}"

    @property
    def plan(self) -> config.Plan:
        return config.choose(
            not self.d, self.d or 1, self.dtype, self.bandwidth >= 0, False, True, config.Device()
        )


CALLS = [
    Call(0),
    Call(1),
    Call(1, bandwidth=290),
    Call(1, gamma=100.0),
    Call(1, BF16),
    Call(3),
    Call(8, gamma=1e4),
    Call(20),
    Call(20, F16),
    Call(24, BF16, bandwidth=300),
    Call(140, BF16),
]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    kernels = [kernel for call in CALLS for kernel in (call.plan.main, call.plan.rerun) if kernel is not None]
    build_all([(kernel, False, config.Device().capability) for kernel in kernels])


@pytest.fixture
def start_lag(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets how strips begin."""

    def forget() -> None:
        launch._call.cache_clear()

    def given(value: int) -> None:
        monkeypatch.setattr(config, "weakest_device", config.Device)
        monkeypatch.setattr(config, "start_lag_of", lambda *arguments: value)
        forget()

    yield given
    forget()


def inputs(call: Call, routes: tuple[Route, ...], n: int = N, m: int = M, size: float = 4.0) -> list[Tensor]:
    """x and y, or a cost matrix, a sample for each route and one of plain noise."""
    generator = torch.Generator().manual_seed(1)
    d = call.d or 2
    pairs = [series_along(route, n, m, d, size, generator) for route in routes]
    pairs.append([torch.randn(1, steps, d, generator=generator, dtype=torch.float64) for steps in (n, m)])
    x, y = (torch.cat(side).to(call.dtype) for side in zip(*pairs, strict=True))
    return [x, y] if call.d else [(x.unsqueeze(2) - y.unsqueeze(1)).square().sum(-1).to(call.dtype)]


def use(gpu: EmulatedGpu) -> None:
    launch.gpu = gpu  # type: ignore[assignment]  # it offers what the launcher uses of a Gpu


@pytest.fixture(autouse=True)
def _gpu_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpu", launch.gpu)


def gradients(call: Call, given: list[Tensor], gpu: EmulatedGpu) -> list[Tensor]:
    use(gpu)
    weights = torch.linspace(0.5, 1.5, given[0].shape[0])
    if not call.d:
        value, state = launch.forward(Problem(*given, None, None, None, call.gamma, call.bandwidth, True))
        cost = launch.backward(
            Problem(*given, None, None, None, call.gamma, call.bandwidth, True), weights, value, state
        )[0]
        return [cost]
    value, state = launch.forward(Problem(*given, None, None, call.gamma, call.bandwidth, True, True))
    sides = launch.backward(
        Problem(*given, None, None, call.gamma, call.bandwidth, True, True), weights, value, state
    )
    return [side for side in sides if side is not None]


def assert_right(call: Call, given: list[Tensor], answer: list[Tensor]) -> None:
    """Within the error budget."""
    weights = torch.linspace(0.5, 1.5, given[0].shape[0], dtype=torch.float64)
    if call.d:
        x, y = given
        exact = truth(x, y, call.gamma, None if call.bandwidth < 0 else call.bandwidth, weights=weights)
        expected, rounding = [exact.grad_x, exact.grad_y], exact.rounding
    else:
        cost = given[0].double().requires_grad_()
        value = _reference.softdtw_from_cost(cost, call.gamma, call.bandwidth)
        expected, rounding = list(torch.autograd.grad(value, cost, weights)), 0.0
    for ours, theirs in zip(answer, expected, strict=True):
        assert relative(ours, theirs) <= (max(1e-5, 10 * rounding) if call.dtype == F32 else 4e-3)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_every_route_and_every_begin(call: Call, start_lag: Callable[[int], None]) -> None:
    given = inputs(call, ROUTES)
    start_lag(config.NEVER_LATER)
    expected = gradients(call, given, EmulatedGpu(0, resident=2))
    assert_right(call, given, expected)
    for seed, (begin, resident, relaxed) in enumerate(
        [
            (1, 1, False),
            (1, 8, True),
            (2, 3, True),
            (2, 16, True),
            (3, 16, False),
            (config.NEVER_LATER, 8, True),
        ]
    ):
        start_lag(begin)
        answer = gradients(call, given, EmulatedGpu(seed, resident=resident, relaxed=relaxed))
        for ours, theirs in zip(answer, expected, strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("begin", START_LAGS)
@pytest.mark.parametrize("d", [0, 1, 5, 20])
def test_shapes_around_the_borders_of_strips_and_tiles(
    d: int, begin: int, start_lag: Callable[[int], None]
) -> None:
    start_lag(begin)
    call = Call(d)
    for seed, (n, m) in enumerate([(193, 1), (1, 200), (129, 64), (256, 65), (257, 130)]):
        given = inputs(call, (down_then_right, right_then_down), n, m)
        assert_right(call, given, gradients(call, given, EmulatedGpu(seed, resident=4, relaxed=True)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="watching for races needs gcc")
@pytest.mark.parametrize("begin", [1, 2])
@pytest.mark.parametrize("call", [Call(0), Call(1), Call(5), Call(20), Call(24, BF16)], ids=str)
def test_no_races(call: Call, begin: int, start_lag: Callable[[int], None]) -> None:
    start_lag(begin)
    given = inputs(call, (in_stairs, down_then_right))
    gpu = EmulatedGpu(begin, resident=8, relaxed=True, races=True)
    assert_right(call, given, gradients(call, given, gpu))


@pytest.mark.parametrize("begin", [1, 2])
@pytest.mark.parametrize("call", [Call(1), Call(1, bandwidth=320), Call(5), Call(20), Call(130)], ids=str)
def test_what_has_no_weight_is_never_read(
    call: Call, begin: int, start_lag: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down the first column, then along the last row: strips further up need their first checkpoints."""
    start_lag(begin)
    monkeypatch.setattr(config, "gradient_with_value", lambda *sizes: False)  # the state has checkpoints
    given = inputs(call, (down_then_right,), size=40.0)
    given = [side[:1].contiguous() for side in given]
    use(EmulatedGpu(begin))
    weights = torch.ones(1)
    options = call.gamma, call.bandwidth
    value, state = launch.forward(Problem(*given, None, None, *options, True, True))
    expected = launch.backward(
        Problem(*given, None, None, *options, True, True), weights, value, state.clone()
    )

    main = call.plan.main
    layout = config.layout_of(call.plan, 1, N, M, call.bandwidth, True)
    strips, checkpoints = main.strips(N), main.checkpoints(M, call.bandwidth)
    each = main.states_bytes(N, M, call.bandwidth) // (strips * checkpoints)
    states = state[layout.pairs : layout.pairs + strips * checkpoints * each].view(strips, checkpoints, each)
    kept = 256 // main.checkpoint
    assert kept < checkpoints
    # With 1 a strip begins where the one below sent weight, and so the first above the last row's.
    late = 1 if begin == 1 else 1 + begin
    states[: strips - late, kept:] = 255
    answer = launch.backward(Problem(*given, None, None, *options, True, True), weights, value, state)
    for ours, theirs in zip(answer, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        assert theirs.isfinite().all()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("begin", START_LAGS)
def test_a_pair_without_a_path_beside_others(begin: int, start_lag: Callable[[int], None]) -> None:
    """No weight ever comes to its strips; they must neither wait for it nor leave anything unwritten."""
    start_lag(begin)
    call = Call(0, bandwidth=295)
    (cost,) = inputs(call, (along_the_diagonal, in_stairs))
    cost[1, 150:170, :] = torch.inf
    for seed in range(3):
        gpu = EmulatedGpu(seed, resident=4, relaxed=True)
        (answer,) = gradients(call, [cost], gpu)
        (others,) = gradients(call, [cost[[0, 2]]], gpu)
        assert (answer[1] == 0).all()
        assert torch.equal(answer[[0, 2]], others)  # of three weights the first and the last are those of two
        assert_right(call, [cost[[0, 2]]], [others])


@pytest.mark.parametrize("begin", [1, 2])
def test_bits_do_not_depend_on_when_an_end_is_read(begin: int, start_lag: Callable[[int], None]) -> None:
    """Up one column, with tails of weight that fall by two bits a cell: strips drain just as others end."""
    start_lag(begin)
    call = Call(0)
    cost = torch.full((1, 384, 260), 2.0 * math.log(2.0))
    cost[:, :, [120, 200]] = 0.0
    cost[:, 0, :201] = 0.0
    cost[:, -1, 200:] = 0.0
    (expected,) = gradients(call, [cost], EmulatedGpu(0, resident=1))
    for seed in range(1, 60):
        (answer,) = gradients(call, [cost], EmulatedGpu(seed, resident=(1, 2, 3, 8)[seed % 4]))
        assert torch.equal(answer.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("begin", START_LAGS)
@pytest.mark.parametrize("d", [1, 5, 20])
def test_ragged_lengths(d: int, begin: int, start_lag: Callable[[int], None]) -> None:
    start_lag(begin)
    call = Call(d)
    x, y = inputs(call, (down_then_right, in_stairs))
    x_lengths, y_lengths = (torch.tensor(given, dtype=torch.int64) for given in ([N, 65, 200], [40, M, 129]))
    exact = truth(x, y, 1.0, None, x_lengths.tolist(), y_lengths.tolist())
    use(EmulatedGpu(d, resident=4, relaxed=True))
    value, state = launch.forward(Problem(x, y, x_lengths, y_lengths, 1.0, -1, True, True))
    answer = launch.backward(
        Problem(x, y, x_lengths, y_lengths, 1.0, -1, True, True), torch.ones(3), value, state
    )
    for ours, theirs in zip(answer, (exact.grad_x, exact.grad_y), strict=True):
        assert ours is not None
        assert relative(ours, theirs) <= max(1e-5, 10 * exact.rounding)
