"""The kernels with a warp for every pair, on the emulator: error budgets, pruning, ranges, races."""

from __future__ import annotations

import pytest
import torch

from softdtw_cuda._cuda import config
from tests.cuda.emulated_gpu import EmulatedGpu
from tests.cuda.test_kernels_emulated import (
    BF16,
    F16,
    Case,
    Compute,
    assert_one_state,
    assert_right,
    compute,  # noqa: F401  (a fixture)
    flagged,
    inputs_of,
    problem_of,
)

pytestmark = pytest.mark.slow  # building its kernels for the emulator takes minutes


@pytest.fixture(autouse=True)
def _many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch counts as many pairs; no gradient comes with a value."""
    monkeypatch.setattr(config, "PAIRS_PER_PROCESSOR", 0)
    monkeypatch.setattr(config, "gradient_with_value", lambda *sizes: False)


CASES = [
    Case(2, 1, 1, 2),
    Case(2, 1, 40, 3),
    Case(2, 40, 1, 2),
    Case(3, 31, 33, 2),
    Case(2, 32, 32, 5),
    Case(3, 64, 64, 2),
    Case(2, 65, 63, 4),
    Case(2, 63, 97, 3),
    Case(2, 130, 70, 8),
    Case(2, 70, 150, 16),
    Case(1, 200, 190, 7),
    Case(1, 129, 257, 2, gamma=0.01),
    Case(1, 257, 129, 3, gamma=0.01),
    Case(2, 100, 90, 12, gamma=20.0),
    Case(3, 100, 110, 3, x_lengths=(100, 1, 64), y_lengths=(5, 110, 33)),
    Case(3, 20, 110, 2, x_lengths=(20, 1, 7), y_lengths=(110, 2, 33)),
    Case(2, 80, 70, 6, dtype=BF16),
    Case(2, 80, 70, 2, dtype=F16),
    Case(2, 80, 70, 5, broadcast="x"),
    Case(2, 80, 70, 5, broadcast="y", dtype=BF16),
    Case(2, 70, 66, 4, offset=1000.0),
    Case(2, 70, 66, 16, offset=-300.0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_the_error_budget(case: Case, compute: Compute) -> None:  # noqa: F811
    given = inputs_of(case)
    gpu = EmulatedGpu(case.seed)
    answer = compute(case, given, gpu)
    assert {kernel.source for kernel, _ in gpu.launched} == {"pair", "wide"}
    assert_right(case, given, answer)
    assert not any(flagged(case, answer.state))


@pytest.mark.parametrize("case", [Case(2, 130, 70, 8), Case(3, 65, 63, 4), Case(2, 20, 70, 2)], ids=str)
def test_state_is_bitwise_deterministic(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "weakest_device", lambda: case.device)
    assert_one_state(problem_of(case, inputs_of(case)), monkeypatch)


RACING = [
    Case(2, 130, 100, 3, races=True),
    Case(3, 90, 70, 8, x_lengths=(90, 65, 3), y_lengths=(70, 1, 33), races=True),
]


@pytest.mark.parametrize("case", RACING, ids=str)
def test_no_races_and_one_answer(case: Case, compute: Compute) -> None:  # noqa: F811
    """In any order of lanes and blocks, with stores that become visible late."""
    answers = [
        compute(case, gpu=EmulatedGpu(seed, races=True, relaxed=seed % 2 == 1, resident=1 + seed))
        for seed in range(3)
    ]
    assert all(answer.equals(answers[0]) for answer in answers[1:])


@pytest.mark.parametrize("where", ["x", "y", "path"])
def test_samples_beyond_the_range_are_computed_wide(where: str, compute: Compute) -> None:  # noqa: F811
    case = Case(3, 70, 80, 3, gamma=1e-3)
    given = inputs_of(case)
    if where == "path":
        given.x[1] += 1200.0  # every cost in range, their sum not
    else:
        (given.x if where == "x" else given.y)[1, 7, 2] = 1e6
    answer = compute(case, given)
    assert flagged(case, answer.state) == [False, True, False]
    assert_right(case, given, answer)


def test_nan_stays_in_its_pair(compute: Compute) -> None:  # noqa: F811
    case = Case(3, 70, 80, 2)
    given = inputs_of(case)
    clean = compute(case, given)
    given.y[1, 40] = float("nan")
    answer = compute(case, given)
    assert answer.value.isnan().tolist() == [False, True, False]
    assert answer.sample_equals(clean, 0)
    assert answer.sample_equals(clean, 2)
    assert answer.grad_x[1].isnan().any()


def test_a_lone_path_is_all_that_is_visited(compute: Compute) -> None:  # noqa: F811
    """Series far apart but for a staircase: E is exactly that staircase, across strips and pruned chunks."""
    case = Case(1, 200, 200, 2, gamma=1e-3)
    given = inputs_of(case)
    ramp = torch.arange(200.0).view(1, 200, 1).expand(1, 200, 2) * 3.0
    given.x.copy_(ramp)
    given.y.copy_(ramp + 0.25)
    answer = compute(case, given)
    assert answer.grad_y is not None
    expected = -2 * 0.25 * given.weights.float().view(1, 1, 1).expand(1, 200, 2)
    torch.testing.assert_close(answer.grad_x, expected, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(answer.grad_y, -expected, rtol=1e-6, atol=0.0)
