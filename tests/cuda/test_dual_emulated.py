"""The kernels of second order on the emulator: error budgets against the reference, ranges, races."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.error_budget import ROUNDING_FACTOR, SECOND_ORDER_BUDGET, to_nearest
from softdtw_cuda import _backends, _reference
from softdtw_cuda._cuda import config, dual, launch
from softdtw_cuda._cuda.config_dual import dual_kernel, layout_of
from softdtw_cuda._problem import Direction, Problem
from tests.cuda.emulated_gpu import EmulatedGpu, guarded
from tests.oracle import relative
from tests.test_alignment_losses import bumps, jumps

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Case(NamedTuple):
    """A problem and a direction; d = 0 is a cost matrix."""

    kind: str
    batch: int
    n: int
    m: int
    d: int = 3
    f: int = 2
    gamma: float = 1.0
    bandwidth: int = -1
    dtype: torch.dtype = F32
    x_lengths: tuple[int, ...] | None = None
    y_lengths: tuple[int, ...] | None = None
    offset: float = 0.0
    broadcast: str = ""
    pairs: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        changed = [f"{k}={v}" for k, v in self._asdict().items() if v != self._field_defaults.get(k)]
        return "-".join(changed).replace("torch.", "")


def given(case: Case) -> tuple[Problem, Direction, Tensor]:
    generator = torch.Generator().manual_seed(case.n * 31 + case.m)

    def normal(*shape: int, offset: float = 0.0) -> Tensor:
        made = torch.randn(*shape, generator=generator, dtype=F64) + offset
        return guarded(made.to(case.dtype), "input")

    def lengths(of: tuple[int, ...] | None) -> Tensor | None:
        return None if of is None else guarded(torch.tensor(of, dtype=torch.int64), "lengths")

    batch, counts = case.batch, [case.batch, case.batch]
    if case.pairs:
        batch, counts = len(case.pairs), [1 + max(side) for side in zip(*case.pairs, strict=True)]
    elif case.broadcast:
        counts["xy".index(case.broadcast)] = 1
    if case.d:
        x = normal(counts[0], case.n, case.d, offset=case.offset)
        y: Tensor | None = normal(counts[1], case.m, case.d, offset=case.offset)
    else:
        x, y = normal(case.batch, case.n, case.m, offset=2.0), None
    pairs = guarded(torch.tensor(case.pairs, dtype=torch.int32), "pairs") if case.pairs else None
    options = case.gamma, case.bandwidth, True, y is not None, pairs
    problem = Problem(x, y, lengths(case.x_lengths), lengths(case.y_lengths), *options)
    a = b = None
    if case.kind == "tangents":
        a, b = normal(batch, case.n, case.d), normal(batch, case.m, case.d)
    elif case.kind == "features":
        a, b = normal(batch, case.n, case.f), normal(1 if case.broadcast else batch, case.m, case.f)
    elif case.kind == "matrix":
        a = normal(1 if case.broadcast else batch, case.n, case.m)
    needed = case.kind in ("matrix", "features"), case.kind == "features"
    grad = guarded(2.0 ** (torch.arange(batch) % 3 - 1).to(problem.value_dtype), "grad")
    return problem, Direction(case.kind, a, b, *needed), grad


def solve(backend: Any, problem: Problem, direction: Direction, grad: Tensor) -> list[Tensor]:
    """<E, Omega>, values and the four gradients."""
    dot, value, state = backend.expected(problem, direction)
    return [dot, value, *backend.expected_backward(problem, direction, grad, value, state)]


class _Blurred:
    """The reference with costs, Omega and shares rounded to float32: what nobody can avoid."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def solve(self, *arguments: Any) -> list[Tensor]:
        exact = _reference.dual_from_cost

        def rounded(cost: Tensor, omega: Tensor, *options: Any) -> Any:
            return exact(to_nearest(cost), to_nearest(omega), *options, to_nearest)

        with self._patch.context() as patch:
            patch.setattr(_reference, "dual_from_cost", rounded)
            return solve(_reference, *arguments)


def assert_within_budget(
    case: Case, measured: list[Tensor], arguments: tuple[Problem, Direction, Tensor], blurred: _Blurred
) -> None:
    wide = arguments[0]._replace(x=arguments[0].x.double())
    wide = wide._replace(y=None if wide.y is None else wide.y.double())
    sides = (None if side is None else side.double() for side in arguments[1][1:3])
    widened = wide, Direction(arguments[1].kind, *sides, *arguments[1][3:]), arguments[2].double()
    truth, floor = solve(_reference, *widened), blurred.solve(*widened)
    for k, (ours, exact, near) in enumerate(zip(measured, truth, floor, strict=True)):
        assert ours.shape == exact.shape
        if not exact.numel():
            continue
        assert torch.equal(ours.isfinite(), exact.isfinite())
        finite = exact.isfinite()
        error = relative(ours[finite], exact[finite])
        budget = max(SECOND_ORDER_BUDGET, ROUNDING_FACTOR * relative(near[finite], exact[finite]))
        if case.dtype in (F16, BF16) and k >= 2:
            budget = 4e-3
        if case.dtype == F64:
            budget = 1e-10
        assert error <= budget, (k, error, budget)
        if k >= 2:  # padding and cells outside the band have no gradient at all
            assert not ours[exact == 0].any()


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "weakest_device", config.Device)
    monkeypatch.setattr(launch, "gpu", EmulatedGpu(3, resident=3, relaxed=True))


QUICK = [
    Case("tangents", 2, 70, 90, 5),
    Case("tangents", 1, 1, 1),
    Case("tangents", 2, 33, 200, 2, gamma=0.05),
    Case("tangents", 3, 70, 110, 3, x_lengths=(70, 1, 64), y_lengths=(5, 110, 33)),
    Case("tangents", 2, 150, 140, 1, bandwidth=12),
    Case("tangents", 2, 65, 63, 37),
    Case("tangents", 1, 40, 50, 3, pairs=((0, 1), (2, 0), (0, 1))),
    Case("tangents", 2, 40, 70, 4, broadcast="x"),
    Case("tangents", 2, 70, 66, 4, offset=1000.0),
    Case("tangents", 2, 60, 70, 3, gamma=1e-8),
    Case("tangents", 2, 60, 70, 3, gamma=100.0),
    Case("tangents", 2, 80, 70, 6, dtype=BF16),
    Case("tangents", 2, 80, 70, 6, dtype=F16),
    Case("matrix", 2, 70, 66, 0),
    Case("matrix", 2, 100, 90, 0, bandwidth=17, broadcast="x"),
]
MORE = [
    Case("position", 2, 100, 140),
    Case("position", 3, 100, 140, 0, x_lengths=(100, 1, 64), y_lengths=(5, 140, 33)),
    Case("features", 2, 70, 66, 40, f=7),
    Case("features", 2, 70, 66, 0, f=33, bandwidth=30),
    Case("features", 2, 70, 66, 2, broadcast="y", gamma=0.1),
    Case("matrix", 2, 70, 66, 33),
    Case("tangents", 1, 300, 310, 2, gamma=0.1),
    Case("tangents", 2, 70, 90, 19, dtype=F64, gamma=0.1),
    Case("features", 2, 70, 90, 0, dtype=F64, bandwidth=40),
]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in MORE)], ids=str)
def test_within_the_error_budget(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = given(case)
    measured = solve(dual, *arguments)
    assert_within_budget(case, measured, arguments, _Blurred(monkeypatch))


@pytest.mark.parametrize(("series", "height", "gamma"), [(jumps, 100.0, 0.1), (bumps, 10.0, 0.01)])
def test_paths_far_from_the_diagonal(
    series: Any, height: float, gamma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = (
        guarded(side.float() + shift, "input")
        for side, shift in zip(series(100, height), (0.0, 0.01), strict=True)
    )
    problem = Problem(x, y, None, None, gamma, -1, True, True)
    arguments = problem, Direction("features", x, y, True, True), guarded(torch.ones(1), "grad")
    case = Case("features", 1, 100, 100)
    assert_within_budget(case, solve(dual, *arguments), arguments, _Blurred(monkeypatch))


@pytest.mark.parametrize(
    "case",
    [
        Case("tangents", 2, 70, 91, 5),
        Case("tangents", 3, 70, 110, 3, x_lengths=(70, 1, 64), y_lengths=(5, 110, 0)),
        Case("matrix", 2, 100, 90, 0, bandwidth=17),
        pytest.param(Case("tangents", 2, 70, 91, 19, dtype=F64), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_state_is_bitwise_deterministic(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was in new memory."""
    problem, direction, _ = given(case)
    states = []
    for seed in range(4):
        monkeypatch.setattr(launch, "gpu", EmulatedGpu(seed, resident=1 + seed))
        states.append(dual.expected(problem, direction)[2])
    assert states[0].numel() == dual.expected_state_bytes(problem, direction) > 0
    assert all(torch.equal(state, states[0]) for state in states[1:])


@pytest.mark.slow
def test_a_small_card_has_shorter_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    small = config.Device(shared_bytes=65536, capability=(7, 5), processors=40)
    monkeypatch.setattr(config, "weakest_device", lambda: small)
    case = Case("tangents", 2, 100, 90, 5)
    kernel = dual_kernel(False, "tangents", F32)
    assert kernel is not None
    assert kernel.checkpoint == 32
    assert max(kernel.shared(part) for part in kernel.parts) <= small.shared_bytes
    arguments = given(case)
    assert_within_budget(case, solve(dual, *arguments), arguments, _Blurred(monkeypatch))


@pytest.mark.slow
def test_a_card_without_room_for_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """All warps do one thing after the other there."""
    card = config.Device(shared_bytes=166912, capability=(8, 0), processors=108)
    monkeypatch.setattr(config, "weakest_device", lambda: card)
    kernel = dual_kernel(False, "tangents", F32)
    assert kernel is not None
    assert not kernel.pipelined
    assert kernel.checkpoint == 64
    case = Case("tangents", 2, 100, 190, 5)
    arguments = given(case)
    assert_within_budget(case, solve(dual, *arguments), arguments, _Blurred(monkeypatch))


RACES = [
    Case("tangents", 2, 100, 90, 5),
    Case("features", 2, 70, 150, 0, bandwidth=90),
    Case("tangents", 1, 170, 330, 2, gamma=0.1),  # strips that begin late and end early
]


@pytest.mark.slow
@pytest.mark.parametrize("case", RACES, ids=str)
def test_no_races_and_one_answer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order of lanes and blocks, with stores that become visible late, wherever a strip begins."""
    answers = []
    for seed in range(3):
        monkeypatch.setattr(dual, "start_lag_of", lambda _, lag=1 + seed: lag)
        gpu = EmulatedGpu(seed, races=True, relaxed=seed % 2 == 1, resident=1 + seed)
        monkeypatch.setattr(launch, "gpu", gpu)
        answers.append(solve(dual, *given(case)))
    for answer in answers[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(answer, answers[0], strict=True))


def test_invalid_pairs_and_pairs_without_a_path() -> None:
    problem, direction, grad = given(Case("matrix", 4, 40, 50, 0, bandwidth=10))
    problem.x[1, :, 20] = math.inf  # no path
    problem.x[2, 5, 7] = math.nan
    rows, columns = (torch.tensor(each, dtype=torch.int64) for each in ([40, 40, 40, 0], [50, 50, 50, 50]))
    problem = problem._replace(x_lengths=rows, y_lengths=columns)
    dot, value, grad_x, _, grad_a, _ = solve(dual, problem, direction, grad)
    assert value.isfinite().tolist() == dot.isfinite().tolist()[:1] + [False] * 3
    assert value[1] == math.inf
    assert dot[1] == 0
    assert value.isnan().tolist() == dot.isnan().tolist() == [False, False, True, True]
    assert not grad_x[1].any()
    assert not grad_a[1].any()
    assert grad_x[2].isnan().any()
    assert not grad_x[3].any()


def test_what_omega_is_where_no_path_goes_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holes of forbidden cells, with NaN and infinite Omega in them."""
    case = Case("matrix", 2, 70, 60, 0)
    problem, direction, grad = given(case)
    assert direction.a is not None
    problem.x[:, 10:50, 5:30] = math.inf
    problem.x[1, 60, 20:60] = math.inf
    clean = solve(dual, problem, direction, grad)
    direction.a[:, 10:50, 5:30] = math.nan
    direction.a[1, 60, 20:60] = math.inf
    answer = solve(dual, problem, direction, grad)
    assert all(torch.equal(ours, before) for ours, before in zip(answer, clean, strict=True))
    direction.a.nan_to_num_(0.0, 0.0, 0.0)
    assert_within_budget(case, answer, (problem, direction, grad), _Blurred(monkeypatch))


def test_only_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, direction, grad = given(Case("tangents", 2, 70, 66, 4))
    everything = solve(dual, problem, direction, grad)
    for need_x, need_y in ((True, False), (False, True)):
        some = solve(dual, problem._replace(need_x=need_x, need_y=need_y), direction, grad)
        assert some[2].numel() == need_x * everything[2].numel()
        assert some[3].numel() == need_y * everything[3].numel()
        assert all(torch.equal(o, e) for o, e in zip(some, everything, strict=True) if o.numel())
    free = problem._replace(need_x=False, need_y=False)
    dot, value, state = dual.expected(free, direction)
    assert not state.numel()
    assert torch.equal(dot, everything[0])
    assert torch.equal(value, everything[1])


def test_tangents_of_one_side_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, direction, grad = given(Case("tangents", 2, 40, 50, 4))
    assert direction.a is not None
    zeros = direction._replace(a=torch.zeros_like(direction.a))
    without, with_zeros = (solve(dual, problem, each, grad) for each in (direction._replace(a=None), zeros))
    assert all(torch.equal(o, e) for o, e in zip(without, with_zeros, strict=True))


def test_the_state_is_as_large_as_was_said() -> None:
    for case in (Case("tangents", 2, 70, 66), Case("position", 2, 70, 66, 0, bandwidth=9)):
        problem, direction, _ = given(case)
        _, _, state = dual.expected(problem, direction)
        assert state.numel() == dual.expected_state_bytes(problem, direction)


def test_scratch_a_cell() -> None:
    """At most 1.2 bytes for float32."""
    kernel = dual_kernel(False, "tangents", F32)
    assert kernel is not None
    assert layout_of(kernel, 512, 1024, 1024, -1, True).total <= 1.2 * 512 * 1024 * 1024


def test_cuda_has_kernels_of_second_order() -> None:
    assert _backends.dual_backend("cuda") is dual
