"""Pairs by index: series are read where they are, with the bits that copies of them would give."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from softdtw_cuda._cuda import config, launch
from softdtw_cuda._problem import Problem
from tests.cuda.emulated_gpu import EmulatedGpu, build_all, guarded
from tests.cuda.test_kernels_emulated import assert_one_state

pytestmark = pytest.mark.slow  # building its kernels for the emulator takes minutes

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
K, L, N, M = 4, 3, 70, 83
PAIRS = [[0, 1], [0, 1], [3, 0], [1, 2], [3, 2], [2, 0]]
"""One twice, none in order, and a series of y that comes three times."""


class Case(NamedTuple):
    d: int
    dtype: torch.dtype = F32
    bandwidth: int = -1

    def __str__(self) -> str:
        return f"d{self.d}-{str(self.dtype)[6:]}" + (f"-band{self.bandwidth}" if self.bandwidth >= 0 else "")


CASES = [Case(1), Case(3), Case(20), Case(20, BF16, 40), Case(130, BF16), Case(2, F64)]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    plans = [
        config.choose(False, c.d, c.dtype, c.bandwidth >= 0, False, True, config.Device()) for c in CASES
    ]
    kernels = [kernel for plan in plans for kernel in (plan.main, plan.rerun) if kernel is not None]
    build_all([(kernel, False, config.Device().capability) for kernel in kernels])


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "weakest_device", config.Device)
    monkeypatch.setattr(launch, "gpu", EmulatedGpu(3, resident=3, relaxed=True))


def problem(case: Case, pairs: list[list[int]], lengths: bool = False, scale: float = 1.0) -> Problem:
    generator = torch.Generator().manual_seed(5)
    x, y = (
        torch.randn(count, steps, case.d, generator=generator, dtype=F64).mul(scale).to(case.dtype)
        for count, steps in ((K, N), (L, M))
    )
    own = [torch.tensor([N, 33, 64, 65]), torch.tensor([M, 50, 64])] if lengths else [None, None]
    x_lengths, y_lengths = (None if each is None else guarded(each, "lengths") for each in own)
    listed = guarded(torch.tensor(pairs, dtype=torch.int32), "pairs")
    series = guarded(x, "x"), guarded(y, "y")
    return Problem(*series, x_lengths, y_lengths, 1.0, case.bandwidth, True, True, listed)


def solve(what: Problem) -> list[Tensor]:
    """Value, gradients of x and of y, with weights that round nothing."""
    weights = 2.0 ** (torch.arange(what.batch) % 3 - 1).to(what.value_dtype)
    value, state = launch.forward(what)
    return [value, *launch.backward(what, weights, value, state)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.to(other.dtype), other)


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_copies_to_the_bit(case: Case, lengths: bool) -> None:
    what = problem(case, PAIRS, lengths)
    answer = solve(what)
    assert all(each.isfinite().all() for each in answer)
    assert_same(answer, solve(what.gathered()))


@pytest.mark.parametrize("case", [Case(1), Case(3), Case(20)], ids=str)
def test_reruns_find_their_series(case: Case) -> None:
    """Costs beyond the range of narrow numbers, in all pairs of one series."""
    what = problem(case, PAIRS)
    what.x[3] *= 1e6
    value, _ = answer = solve(what)[:2]
    assert (value[[2, 4]] > 1e9).all()
    assert all(each.isfinite().all() for each in answer)
    assert_same(solve(what), solve(what.gathered()))


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("case", [Case(1), Case(3), Case(20), Case(2, F64)], ids=str)
def test_a_series_that_does_not_exist(case: Case, lengths: bool) -> None:
    """As a length that cannot be: the value is NaN, there is no gradient, and the others do not change."""
    strange = [[-1, 0], [0, L], [K, 0], [2**31 - 1, -(2**31)]]
    bad = solve(problem(case, [PAIRS[0], strange[0], *PAIRS[2:4], *strange[1:]], lengths))
    good = solve(problem(case, PAIRS[:4], lengths))
    wrong, right = [1, 4, 5, 6], [0, 2, 3]
    value, *gradients = bad
    assert value[wrong].isnan().all()
    for gradient in gradients:
        assert (gradient[wrong] == 0).all()
    for ours, theirs in zip(bad, good, strict=True):
        assert torch.equal(ours[right], theirs[right])


def test_state_is_bitwise_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_one_state(problem(Case(3), [*PAIRS, [K, 0]], lengths=True), monkeypatch)


def test_without_a_gradient() -> None:
    what = problem(Case(3), PAIRS)._replace(need_x=False, need_y=False)
    value, state = launch.forward(what)
    assert not state.numel()
    assert torch.equal(value, solve(what._replace(need_x=True))[0])
