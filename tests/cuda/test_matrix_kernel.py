"""The kernels with a warp for every cost matrix, on the emulator: budgets, forbidden cells, ranges, races."""

from __future__ import annotations

import math

import pytest
import torch

from softdtw_cuda._cuda import config
from tests.cuda.emulated_gpu import EmulatedGpu
from tests.cuda.test_kernels_emulated import (
    BF16,
    Case,
    Compute,
    assert_one_state,
    assert_right,
    compute,  # noqa: F401  (a fixture)
    inputs_of,
    problem_of,
)

pytestmark = pytest.mark.slow  # building its kernels for the emulator takes a minute


@pytest.fixture(autouse=True)
def _many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch counts as many matrices."""
    monkeypatch.setattr(config, "MATRICES_PER_PROCESSOR", 0)


CASES = [
    Case(2, 1, 1, 0),
    Case(2, 1, 40, 0),
    Case(2, 40, 1, 0),
    Case(3, 31, 33, 0),
    Case(3, 64, 64, 0),
    Case(2, 65, 63, 0),
    Case(2, 63, 97, 0),
    Case(2, 130, 70, 0),
    Case(1, 129, 257, 0, gamma=0.01),
    Case(1, 257, 129, 0, gamma=0.001),
    Case(2, 100, 90, 0, gamma=20.0),
    Case(2, 100, 90, 0, scale=-1.0),
    Case(3, 100, 110, 0, x_lengths=(100, 1, 64), y_lengths=(5, 110, 33)),
    Case(3, 20, 110, 0, x_lengths=(20, 1, 7), y_lengths=(110, 2, 33)),
    Case(2, 80, 70, 0, dtype=BF16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_the_error_budget(case: Case, compute: Compute) -> None:  # noqa: F811
    given = inputs_of(case)
    gpu = EmulatedGpu(case.seed)
    answer = compute(case, given, gpu)
    assert {kernel.source for kernel, _ in gpu.launched} == {"matrix", "wide"}
    assert_right(case, given, answer)


@pytest.mark.parametrize("case", [Case(2, 130, 70, 0), Case(3, 65, 63, 0), Case(2, 20, 70, 0)], ids=str)
def test_state_is_bitwise_deterministic(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "weakest_device", lambda: case.device)
    given = inputs_of(case)
    given.x[0, 3, 5:9] = math.inf
    assert_one_state(problem_of(case, given), monkeypatch)


@pytest.mark.parametrize("lengths", [None, (90, 65, 3)], ids=["full", "lengths"])
def test_no_races_and_one_answer(lengths: tuple[int, ...] | None, compute: Compute) -> None:  # noqa: F811
    """In any order of lanes and blocks, with stores that become visible late."""
    case = Case(3, 130 if lengths is None else 90, 100, 0, x_lengths=lengths, races=True)
    answers = [
        compute(case, gpu=EmulatedGpu(seed, races=True, relaxed=seed % 2 == 1, resident=1 + seed))
        for seed in range(3)
    ]
    assert all(answer.equals(answers[0]) for answer in answers[1:])


def test_infinite_costs_forbid_cells(compute: Compute) -> None:  # noqa: F811
    """A staircase between forbidden cells, one matrix without a path, and random holes."""
    case = Case(3, 140, 150, 0)
    given = inputs_of(case)
    rows, columns = torch.arange(140).view(-1, 1), torch.arange(150).view(1, -1)
    generator = torch.Generator().manual_seed(1)
    holes = torch.rand(140, 150, generator=generator) < 0.2
    near = (rows - columns).abs() <= 10
    given.x[0].masked_fill_(~near, math.inf)
    given.x[1, 70] = math.inf
    given.x[2].masked_fill_(holes & ~near, math.inf)
    answer = compute(case, given)
    assert math.isinf(answer.value[1])
    assert not answer.grad_x[1].any()
    assert not answer.grad_x[0][~near].any()
    assert not answer.grad_x[2][holes & ~near].any()
    # The matrix without a path is right by the assertions above; the budget is of the others.
    kept = [0, 2]
    rest = Case(2, 140, 150, 0)
    given_rest = given._replace(x=given.x[kept], weights=given.weights[kept])
    answer_rest = answer._replace(value=answer.value[kept], grad_x=answer.grad_x[kept])
    assert_right(rest, given_rest, answer_rest)


@pytest.mark.parametrize("bad", [1e9, math.nan, -1e9], ids=str)
def test_samples_beyond_the_range_are_computed_wide(bad: float, compute: Compute) -> None:  # noqa: F811
    case = Case(3, 70, 80, 0, gamma=1e-3)
    given = inputs_of(case)
    clean = compute(case, given)
    given.x[1, 30, 40] = bad
    answer = compute(case, given)
    assert answer.sample_equals(clean, 0)
    assert answer.sample_equals(clean, 2)
    if math.isnan(bad):
        assert answer.value[1].isnan()
    else:
        assert_right(case, given, answer)
