"""The CUDA kernels, run on the host against the float64 oracle, in random orders and guarded memory."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from softdtw_cuda import SoftDTW, _backends, _reference
from softdtw_cuda._cuda import config, launch
from softdtw_cuda._cuda.config import Device
from softdtw_cuda._cuda.kernel import BACKWARD, FORWARD, FORWARD_BACKWARD, RERUN, SCALE, Kernel
from softdtw_cuda._problem import Problem
from softdtw_cuda.modules import Reduction
from tests.cuda.emulated_gpu import EmulatedGpu, build_all, guarded
from tests.oracle import (
    assert_gradient_within_budget,
    assert_value_within_budget,
    assert_within_float64,
    relative,
    truth,
)

HOPPER = Device()
AMPERE = Device(shared_bytes=166912, capability=(8, 0), processors=108)
BLACKWELL = Device(shared_bytes=232448, capability=(10, 0), processors=148)
BLACKWELL_DESKTOP = Device(shared_bytes=101376, capability=(12, 0), processors=170)
TURING = Device(shared_bytes=65536, capability=(7, 5), processors=40)
TINY_HOPPER = Device(processors=1)
"""Reruns have less blocks than some batches have pairs."""

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
NARROW_GRADIENT_BUDGET = 4e-3
EDGES = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129)
EDGES_TURNED = (33, 129, 31, 64, 128, 1, 65, 63, 32, 127)


@dataclass(frozen=True)
class Case:
    """Shapes and options of one call; d = 0 is a cost matrix, normal series and uniform costs otherwise."""

    batch: int
    n: int
    m: int
    d: int
    dtype: torch.dtype = F32
    gamma: float = 1.0
    bandwidth: int = -1
    x_lengths: tuple[int, ...] | None = None
    y_lengths: tuple[int, ...] | None = None
    offset: float = 0.0
    scale: float = 1.0
    broadcast: str = ""
    aligned: bool = True
    device: Device = HOPPER
    seed: int = 0
    races: bool = False

    def __str__(self) -> str:
        said = [f"{self.n}x{self.m}", f"d{self.d}" if self.d else "cost", str(self.dtype)[6:]]
        if self.gamma != 1:
            said.append(f"gamma{self.gamma:g}")
        if self.bandwidth >= 0:
            said.append(f"band{self.bandwidth}")
        said += [name for name, on in (("lengths", self.x_lengths), ("unaligned", not self.aligned)) if on]
        if self.offset:
            said.append(f"offset{self.offset:g}")
        if self.scale != 1:
            said.append(f"scale{self.scale:g}")
        if self.broadcast:
            said.append(f"one-{self.broadcast}")
        if self.device is not HOPPER:
            said.append("sm{}{}".format(*self.device.capability))
        return "-".join([*said, *(["races"] if self.races else [])])

    @property
    def plan(self) -> config.Plan:
        if not self.d:
            return config.choose(True, 1, self.dtype, self.bandwidth >= 0, self.n <= 32, True, self.device)
        many = self.batch >= config.PAIRS_PER_PROCESSOR * self.device.processors
        return config.choose(
            False, self.d, self.dtype, self.bandwidth >= 0, self.n <= 32, self.aligned, self.device, many
        )

    def kernels(self) -> Iterator[tuple[Kernel, bool, tuple[int, int]]]:
        for kernel in (self.plan.main, self.plan.rerun):
            if kernel is not None:
                yield kernel, self.races, self.device.capability


class Inputs(NamedTuple):
    """Tensors of a case, for the launcher. Padding is NaN. y is None when x is a cost matrix."""

    x: Tensor
    y: Tensor | None
    x_lengths: Tensor | None
    y_lengths: Tensor | None
    weights: Tensor


def _placed(tensor: Tensor, name: str, aligned: bool) -> Tensor:
    """In guarded memory, at a multiple of 16 bytes or deliberately not."""
    if aligned:
        return guarded(tensor, name)
    flat = torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])
    return guarded(flat, name)[1:].view(tensor.shape)


def inputs_of(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    weights = torch.rand(case.batch, generator=generator, dtype=F64) + 0.5
    lengths = [
        None if given is None else torch.tensor(given, dtype=torch.int64)
        for given in (case.x_lengths, case.y_lengths)
    ]
    if not case.d:
        cost = (torch.rand(case.batch, case.n, case.m, generator=generator, dtype=F64) * case.scale).to(
            case.dtype
        )
        for sample in range(case.batch):
            if case.x_lengths is not None:
                cost[sample, case.x_lengths[sample] :] = math.nan
            if case.y_lengths is not None:
                cost[sample, :, case.y_lengths[sample] :] = math.nan
        return Inputs(_placed(cost, "cost", True), None, *lengths, weights)
    sides = []
    for name, steps, given in (("x", case.n, case.x_lengths), ("y", case.m, case.y_lengths)):
        count = 1 if case.broadcast == name else case.batch
        side = torch.randn(count, steps, case.d, generator=generator, dtype=F64) * case.scale + case.offset
        side = side.to(case.dtype)
        if given is not None and count > 1:
            for sample, length in enumerate(given):
                side[sample, length:] = math.nan
        sides.append(_placed(side, name, case.aligned))
    return Inputs(*sides, *lengths, weights)


class Answer(NamedTuple):
    """Values and per-sample gradients; grad_y is None for a cost matrix."""

    value: Tensor
    grad_x: Tensor
    grad_y: Tensor | None
    state: Tensor

    def equals(self, other: Answer) -> bool:
        pairs = zip(self[:3], other[:3], strict=True)
        return all(
            (a is None and b is None) or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in pairs
        )

    def sample_equals(self, other: Answer, sample: int) -> bool:
        pairs = zip(self[:3], other[:3], strict=True)
        return all((a is None and b is None) or torch.equal(a[sample], b[sample]) for a, b in pairs)


def problem_of(case: Case, given: Inputs, need_x: bool = True, need_y: bool = True) -> Problem:
    options = case.gamma, case.bandwidth, need_x, need_y and given.y is not None
    return Problem(given.x, given.y, given.x_lengths, given.y_lengths, *options)


def forward(case: Case, given: Inputs, save: bool = True) -> tuple[Tensor, Tensor]:
    return launch.forward(problem_of(case, given, save, save))


def backward(
    case: Case, given: Inputs, value: Tensor, state: Tensor, weights: Tensor | None = None
) -> Answer:
    weights = given.weights if weights is None else weights
    grad_x, grad_y = launch.backward(problem_of(case, given), weights, value, state)
    return Answer(value, grad_x, None if given.y is None else grad_y, state)


Compute = Callable[..., Answer]


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compute]:
    """Forward and backward of a case on an emulated GPU."""

    def run(
        case: Case, given: Inputs | None = None, gpu: EmulatedGpu | None = None, small: bool = False
    ) -> Answer:
        monkeypatch.setattr(config, "weakest_device", lambda: case.device)
        monkeypatch.setattr(launch, "gpu", gpu or EmulatedGpu(case.seed, races=case.races))
        given = given or inputs_of(case)
        with monkeypatch.context() as patch:
            patch.setattr(config, "gradient_with_value", lambda *sizes: small)
            return backward(case, given, *forward(case, given))

    yield run
    launch._call.cache_clear()


@pytest.fixture(autouse=True)
def _passes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of these problems are small; the tests of gradients with values say so themselves."""
    monkeypatch.setattr(config, "gradient_with_value", lambda *sizes: False)


def flagged(case: Case, state: Tensor) -> list[bool]:
    """Which samples the narrow kernels flagged as beyond their range."""
    layout = config.layout_of(case.plan, case.batch, case.n, case.m, case.bandwidth, True)
    words = state[layout.range_flags : layout.range_flags + 4 * (case.batch + 1)].view(torch.int32)
    flags = [word & 1 == 0 for word in words.tolist()]
    assert flags[-1] == any(flags[:-1]), "the batch's flag sums up the samples'"
    return flags[:-1]


class CostTruth(NamedTuple):
    value: Tensor
    gradient: Tensor
    rounding: float


def cost_truth(case: Case, given: Inputs) -> CostTruth:
    """Eqs. (1, 8) in float64, and what rounding the quotients by gamma to float32 does to the gradient."""
    cost = given.x.double()
    lengths = given.x_lengths, given.y_lengths
    value = _reference.softdtw_from_cost(cost, case.gamma, case.bandwidth, *lengths)
    scaled = [cost, (cost / case.gamma).float().double() * case.gamma]
    exact, rounded = (
        _reference.backward(
            Problem(c, None, *lengths, case.gamma, case.bandwidth, True), given.weights, value, value
        )[0]
        for c in scaled
    )
    return CostTruth(value, exact, relative(rounded, exact))


def assert_right(case: Case, given: Inputs, answer: Answer) -> None:
    """Within the error budgets, and exactly zero in the padding."""
    steps = case.n + case.m
    if given.y is None:
        expected = cost_truth(case, given)
        value, gradients, rounding = expected.value, [(answer.grad_x, expected.gradient)], expected.rounding
    else:
        reference = truth(
            given.x, given.y, case.gamma, None if case.bandwidth < 0 else case.bandwidth,
            case.x_lengths, case.y_lengths, given.weights,
        )  # fmt: skip
        value, rounding = reference.value, reference.rounding
        assert answer.grad_y is not None
        gradients = []
        for side, measured, exact in (
            (given.x, answer.grad_x, reference.grad_x),
            (given.y, answer.grad_y, reference.grad_y),
        ):
            assert measured.shape == (case.batch, *side.shape[1:])
            if side.shape[0] != case.batch:
                assert measured.dtype == (F64 if case.dtype == F64 else F32)
                measured = measured.sum(0, keepdim=True)
            else:
                assert measured.dtype == case.dtype
            gradients.append((measured, exact))
    if case.dtype == F64:
        assert_within_float64(answer.value, value)
    else:
        assert_value_within_budget(answer.value, value, case.gamma, steps)
    for measured, exact in gradients:
        assert measured.isfinite().all()
        if case.dtype == F64:
            assert_within_float64(measured, exact)
        elif case.dtype == F32:
            assert_gradient_within_budget(measured, exact, rounding)
        else:
            assert relative(measured, exact) <= max(NARROW_GRADIENT_BUDGET, 10 * rounding)
    assert_padding_is_zero(case, answer)


def assert_padding_is_zero(case: Case, answer: Answer) -> None:
    for sample in range(case.batch):
        if case.x_lengths is not None:
            assert (answer.grad_x[sample, case.x_lengths[sample] :] == 0).all()
        if case.y_lengths is not None:
            padding = answer.grad_x[sample].T if answer.grad_y is None else answer.grad_y[sample]
            assert (padding[case.y_lengths[sample] :] == 0).all()


# ---- right answers

EDGE_LENGTHS = {"x_lengths": EDGES, "y_lengths": EDGES_TURNED}
SOME_LENGTHS = {"x_lengths": (70, 33, 1), "y_lengths": (64, 31, 9)}

RIGHT = [
    # Univariate
    Case(10, 129, 129, 1, **EDGE_LENGTHS),
    Case(2, 150, 100, 1, gamma=0.1),
    Case(2, 20, 70, 1),
    Case(2, 70, 70, 1, bandwidth=0),
    Case(3, 70, 64, 1, bandwidth=40, **SOME_LENGTHS),
    Case(2, 200, 190, 1, bandwidth=12, gamma=0.1),
    Case(2, 90, 40, 1, dtype=BF16, broadcast="y"),
    Case(2, 66, 40, 1, offset=1000.0, gamma=0.01),
    # Direct differences
    Case(10, 129, 129, 5, **EDGE_LENGTHS),
    Case(2, 130, 75, 2, gamma=0.1),
    Case(2, 70, 130, 16, broadcast="x"),
    Case(3, 65, 65, 5, bandwidth=0),
    Case(3, 70, 64, 8, bandwidth=40, **SOME_LENGTHS),
    Case(2, 130, 200, 5, bandwidth=75),
    Case(2, 40, 66, 7, offset=1000.0),
    Case(2, 70, 40, 4, dtype=F16),
    # Tensor cores
    Case(10, 129, 129, 64, **EDGE_LENGTHS),
    Case(2, 70, 100, 17, gamma=0.1),
    Case(2, 70, 66, 33),
    Case(2, 66, 70, 64, aligned=False),
    Case(2, 70, 66, 40),
    Case(2, 70, 66, 128),
    Case(10, 129, 129, 80, **EDGE_LENGTHS),
    Case(2, 70, 66, 67, aligned=False),
    Case(2, 70, 66, 100, dtype=BF16, bandwidth=30),
    Case(2, 80, 120, 64, bandwidth=50, broadcast="y"),
    Case(3, 70, 64, 60, bandwidth=40, **SOME_LENGTHS),
    Case(2, 30, 66, 40),
    Case(2, 66, 70, 64, offset=1000.0),
    Case(2, 70, 130, 64, dtype=BF16),
    Case(2, 70, 40, 64, dtype=BF16, offset=200.0, scale=0.25, broadcast="x"),
    Case(2, 66, 70, 40, dtype=F16),
    # Tensor cores, features in slices
    Case(2, 70, 66, 130),
    Case(2, 66, 100, 132, offset=1000.0),
    Case(2, 100, 70, 160, dtype=BF16),
    Case(3, 70, 64, 160, bandwidth=40, **SOME_LENGTHS),
    Case(2, 66, 40, 129, dtype=F16, broadcast="x"),
    Case(1, 40, 40, 1060),
    Case(1, 20, 33, 4096),
    Case(1, 33, 20, 4093, dtype=BF16),
    # A cost matrix
    Case(10, 129, 129, 0, **EDGE_LENGTHS),
    Case(2, 150, 100, 0, bandwidth=55, gamma=0.1),
    Case(2, 65, 65, 0, bandwidth=0),
    Case(2, 70, 66, 0, dtype=BF16),
    # float64
    Case(10, 129, 129, 3, dtype=F64, **EDGE_LENGTHS),
    Case(2, 70, 66, 20, dtype=F64, bandwidth=9, gamma=0.01, broadcast="x"),
    Case(2, 140, 70, 0, dtype=F64, gamma=0.1),
]  # fmt: skip
TINY = [
    Case(2, n, m, d)
    for d in (1, 5, 64, 0)
    for n, m in ((1, 1), (1, 40), (40, 1))
]  # fmt: skip
EXACT_SIZES = [
    Case(1, n, m, d)
    for d in (1, 5, 33)
    for n, m in ((31, 33), (32, 64), (33, 32), (64, 65), (65, 63), (127, 129), (128, 128))
]  # fmt: skip
OTHER_DEVICES = [
    Case(2, 80, 100, 64, device=BLACKWELL, bandwidth=30),
    Case(2, 140, 80, 128, device=BLACKWELL),
    Case(2, 70, 100, 90, device=BLACKWELL, dtype=BF16),
    Case(3, 140, 80, 64, device=BLACKWELL_DESKTOP),
    Case(2, 100, 110, 5, device=BLACKWELL_DESKTOP, bandwidth=20),
    Case(2, 70, 80, 0, device=BLACKWELL_DESKTOP),
    Case(2, 70, 80, 130, device=AMPERE),
    Case(2, 40, 40, 100, device=BLACKWELL_DESKTOP, dtype=BF16),
    Case(3, 140, 80, 64, device=AMPERE),
    Case(2, 100, 40, 5, device=TURING),
    Case(2, 70, 40, 33, device=TURING),
    Case(2, 130, 40, 1, device=TURING),
    Case(2, 70, 60, 16, device=TURING, bandwidth=20),
]


@pytest.fixture(scope="module", autouse=True)
def _ready(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the selected tests need is built on all cores before the first; tensors here are tiny."""
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    cases = [spec.params["case"] for spec in specs if spec is not None and "case" in spec.params]
    build_all(each for case in cases for each in case.kernels())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", [*RIGHT, *TINY, *EXACT_SIZES, *OTHER_DEVICES], ids=str)
def test_right(compute: Compute, case: Case) -> None:
    given = inputs_of(case)
    before = [None if tensor is None else tensor.clone() for tensor in given]
    answer = compute(case, given)
    assert_right(case, given, answer)
    for tensor, copy in zip(given, before, strict=True):
        assert tensor is None or torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8)), (
            "inputs are read only"
        )
    unsaved, nothing = forward(case, given, save=False)
    assert nothing.numel() == 0
    assert torch.equal(unsaved, answer.value), "saving changes nothing"


@pytest.mark.parametrize(
    "case",
    [Case(2, 130, 130, 1, gamma=0.01), Case(2, 130, 130, 5, gamma=0.01), Case(2, 130, 130, 5, bandwidth=40)],
    ids=str,
)
def test_series_that_nearly_agree(compute: Compute, case: Case) -> None:
    """The little weight that rounding puts beside the path meets differences 1000 times as large."""
    given = inputs_of(case)
    assert given.y is not None
    given.y.mul_(0.001).add_(given.x)
    assert_right(case, given, compute(case, given))


@pytest.mark.parametrize(
    "case",
    [Case(2, 70, 66, 1), Case(2, 70, 66, 5), Case(2, 70, 66, 64), Case(2, 70, 66, 3, dtype=F64)],
    ids=str,
)
def test_any_batch_stride_and_rows_that_are_not_dense(compute: Compute, case: Case) -> None:
    given = inputs_of(case)
    expected = compute(case, given)
    assert given.y is not None
    room_x, room_y = (
        torch.full((2, side.shape[1] + 3, case.d), math.nan, dtype=case.dtype) for side in given[:2]
    )
    room_x[:, :70], room_y[:, :66] = given.x, given.y
    assert compute(case, given._replace(x=room_x[:, :70], y=room_y[:, :66])).equals(expected)
    turned = given.x.transpose(1, 2).contiguous().transpose(1, 2)
    assert compute(case, given._replace(x=turned)).equals(expected)


# ---- one gradient, two gradients, twice

FAMILIES = [
    Case(3, 150, 100, 1),
    Case(3, 150, 100, 5),
    Case(3, 150, 100, 64),
    Case(3, 150, 100, 80),
    Case(3, 150, 100, 130),
    Case(3, 150, 100, 0),
    Case(3, 150, 100, 3, dtype=F64),
    Case(3, 150, 100, 64, dtype=BF16),
]
FUSED_FAMILIES = [case for case in FAMILIES if case.d]
FLAGGED = [
    Case(3, 150, 100, 1, gamma=1e-6, scale=1000.0),
    Case(3, 150, 100, 5, gamma=1e-6, scale=1000.0),
    Case(3, 150, 100, 64, gamma=1e-6, scale=1000.0),
    Case(3, 150, 100, 0, gamma=1e-6, scale=1000.0),
    Case(2, 70, 66, 64, dtype=BF16, gamma=1e-6, scale=1000.0),
]


WATCHED = pytest.param(
    Case(2, 70, 70, 130, races=True),
    marks=pytest.mark.skipif(shutil.which("g++") is None, reason="watching for races needs gcc"),
)


@pytest.mark.parametrize("case", [*FUSED_FAMILIES, FLAGGED[0], FLAGGED[2], WATCHED], ids=str)
def test_one_side_alone(compute: Compute, case: Case) -> None:
    given = inputs_of(case)
    both = compute(case, given)
    arguments = given.weights, both.value, both.state
    grad_x, nothing = launch.backward(problem_of(case, given, True, False), *arguments)
    assert nothing.shape == (0,)
    assert torch.equal(grad_x, both.grad_x)
    nothing, grad_y = launch.backward(problem_of(case, given, False, True), *arguments)
    assert nothing.shape == (0,)
    assert torch.equal(grad_y, both.grad_y)


# ---- the state between calls


def assert_scratch_restored(case: Case, state: Tensor) -> None:
    layout = config.layout_of(case.plan, case.batch, case.n, case.m, case.bandwidth, True)
    words = state[: layout.scratch].view(torch.int32)
    assert words[0] == -1, "the next launch would start with somebody's ticket"
    assert (words[layout.progress // 4 :] == -1).all()


@pytest.mark.parametrize("case", [*FAMILIES, *FLAGGED], ids=str)
def test_a_second_backward_from_the_same_state(compute: Compute, case: Case) -> None:
    """As with retain_graph: each backward leaves the scratch, and what it has no business with, as it was."""
    given = inputs_of(case)
    first = compute(case, given)
    assert_scratch_restored(case, first.state)
    before = first.state.clone()
    doubled = backward(case, given, first.value, first.state, 2 * given.weights)
    assert torch.equal(doubled.grad_x, 2 * first.grad_x)
    assert_scratch_restored(case, first.state)
    if not any(flagged(case, first.state)):
        assert torch.equal(before, first.state), "an operator must leave its inputs alone"
    assert backward(case, given, first.value, first.state).equals(first)


def test_a_flagged_sample_among_others(compute: Compute) -> None:
    """Its neighbours' scratch is restored too, and one number for the gradient of all samples will do."""
    case = Case(3, 150, 100, 5)
    given = inputs_of(case)
    given.x[1] *= 1e6
    answer = compute(case, given)
    assert flagged(case, answer.state) == [False, True, False]
    assert_scratch_restored(case, answer.state)
    one = torch.full((1,), 0.75)
    expanded = backward(case, given, answer.value, answer.state, one.expand(3))
    plain = backward(case, given, answer.value, answer.state, one.repeat(3))
    assert torch.equal(expanded.grad_x, plain.grad_x)


def assert_one_state(problem: Problem, monkeypatch: pytest.MonkeyPatch, races: bool = False) -> None:
    """Whatever was in new memory, and in whatever order blocks run: all bytes of a state are written."""
    states = []
    for seed in range(6):  # half of them find zeros in new memory
        monkeypatch.setattr(launch, "gpu", EmulatedGpu(seed, resident=1 + seed, races=races))
        states.append(launch.forward(problem)[1])
    assert states[0].numel() == launch.state_bytes(problem)
    assert all(torch.equal(state, states[0]) for state in states[1:])


ONE_STATE = [
    Case(2, 150, 100, 5),
    Case(2, 100, 101, 5),  # eight bytes are left of a pair's part
    Case(2, 100, 101, 1),
    Case(3, 70, 260, 0),  # a rerun needs 1 KiB more than is saved
    Case(2, 150, 100, 1),
    Case(2, 20, 90, 1),
    Case(2, 150, 101, 64),
    Case(2, 150, 100, 130),
    Case(2, 150, 101, 3, dtype=F64),
    Case(2, 150, 100, 64, dtype=BF16),
    Case(3, 150, 100, 5, gamma=1e-6, scale=1000.0),
    Case(3, 70, 260, 0, gamma=1e-6, scale=1000.0),
    Case(3, 150, 100, 5, x_lengths=(150, 1, 70), y_lengths=(100, 20, 0)),
    Case(2, 150, 140, 5, bandwidth=30),
    Case(2, 150, 140, 1, bandwidth=30),
    Case(3, 150, 100, 0, x_lengths=(150, 151, 70), bandwidth=70),
]


@pytest.mark.parametrize("case", ONE_STATE, ids=str)
@pytest.mark.parametrize("one_flagged", [False, True])
def test_state_is_bitwise_deterministic(
    case: Case, one_flagged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "weakest_device", lambda: case.device)
    given = inputs_of(case)
    if one_flagged:
        given.x[0] *= 1e6
    assert_one_state(problem_of(case, given), monkeypatch)


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)], ids=["both", "x", "y"])
@pytest.mark.parametrize(
    "case",
    [
        Case(3, 61, 50, 5),
        Case(3, 61, 50, 5, x_lengths=(61, 1, 30), y_lengths=(20, 0, 50)),
        Case(3, 150, 100, 5),
        Case(3, 150, 100, 5, x_lengths=(150, 1, 70)),
        Case(3, 61, 50, 1, y_lengths=(20, 0, 50)),
        Case(3, 61, 50, 1, gamma=1e-6, scale=1000.0),
    ],
    ids=str,
)
def test_kept_gradients_are_bitwise_deterministic(
    case: Case, needed: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "weakest_device", lambda: case.device)
    monkeypatch.setattr(config, "gradient_with_value", lambda *sizes: True)
    problem = problem_of(case, inputs_of(case), *needed)
    assert_one_state(problem, monkeypatch)
    sides = [side for side, need in ((problem.x, needed[0]), (problem.y, needed[1])) if need]
    assert launch.state_bytes(problem) == sum(4 * side.numel() for side in sides if side is not None)


# ---- orders

CHAINS = [
    Case(2, 330, 70, 1),
    Case(2, 330, 300, 1, bandwidth=45),
    Case(2, 330, 70, 5),
    Case(2, 330, 300, 5, bandwidth=45),
    Case(2, 330, 70, 64),
    Case(2, 330, 300, 64, bandwidth=45),
    Case(2, 330, 70, 130),
    Case(2, 330, 70, 0),
    Case(2, 330, 70, 3, dtype=F64),
    Case(2, 330, 70, 64, dtype=BF16),
    Case(2, 330, 70, 5, gamma=1e-6, scale=1000.0),
    Case(2, 330, 70, 0, gamma=1e-6, scale=1000.0),
    Case(2, 200, 70, 64, device=BLACKWELL_DESKTOP),
]
"""At least five strips each, so that rows, turns and tickets are handed on several times."""


@pytest.mark.parametrize("case", CHAINS, ids=str)
def test_every_order_gives_the_same_bits(compute: Compute, case: Case) -> None:
    assert case.plan.main.strips(case.n) >= 5
    given = inputs_of(case)
    expected = compute(case, given, EmulatedGpu(0, resident=1))
    assert_right(case, given, expected)
    for gpu in (
        EmulatedGpu(1, resident=2, flush="start"),
        EmulatedGpu(2, resident=8),
        EmulatedGpu(3, resident=8, relaxed=True),
        EmulatedGpu(4, resident=3, relaxed=True, flush="start"),
        EmulatedGpu(5, resident=2, relaxed=True),
    ):
        assert compute(case, given, gpu).equals(expected)


# ---- what may come between


@pytest.mark.parametrize("case", [Case(2, 150, 100, 5), Case(2, 150, 100, 1), Case(2, 100, 70, 0)], ids=str)
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=repr)
def test_another_backward_after_one_that_was_cut_short(
    compute: Compute, case: Case, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd keeps what was saved when a backward raises."""
    given = inputs_of(case)
    expected = compute(case, given)
    gpu = EmulatedGpu(1)
    monkeypatch.setattr(launch, "gpu", gpu)
    value, state = forward(case, given)
    run, seen = gpu.run, []

    def fail_once(kernel: Kernel, part: str, *others: Any) -> None:
        seen.append(part)
        if part == RERUN and seen.count(RERUN) == 1:
            raise error
        run(kernel, part, *others)

    monkeypatch.setattr(gpu, "run", fail_once)
    with pytest.raises(type(error)):
        backward(case, given, value, state)
    assert backward(case, given, value, state).equals(expected)
    assert seen == [BACKWARD, RERUN] * 2


@pytest.mark.parametrize("case", [Case(2, 70, 66, 5), Case(2, 70, 66, 1), Case(2, 70, 66, 0)], ids=str)
def test_lazy_negation_and_zero_tensors(compute: Compute, case: Case) -> None:
    """Memory does not hold the numbers of such tensors."""
    given = inputs_of(case)
    expected = compute(case, given)

    def negated(tensor: Tensor) -> Tensor:
        view = torch._neg_view(-tensor)
        assert view.is_neg()
        assert view.is_contiguous()
        return view

    y = None if given.y is None else negated(given.y)
    assert compute(case, given._replace(x=negated(given.x), y=y)).equals(expected)
    assert compute(case, given._replace(weights=negated(given.weights))).equals(expected)
    zeros = torch._efficientzerotensor((case.batch,), dtype=F32)
    assert not zeros.data_ptr()
    answer = compute(case, given._replace(weights=zeros))
    assert (answer.grad_x == 0).all()
    if given.y is None or y is None:
        return
    nothing, zeros = torch._efficientzerotensor(y.shape, dtype=F32), torch.zeros(y.shape)
    part = torch._efficientzerotensor((5, *y.shape[1:]), dtype=F32)[3:]
    assert part.data_ptr()
    for lazy, plain in ((y, given.y), (nothing, zeros), (part, zeros)):
        for small in (False, True):
            expected = compute(case, given._replace(y=plain), small=small)
            assert compute(case, given._replace(y=lazy), small=small).equals(expected)


# ---- gradients with values


ONE_STRIP = [
    Case(3, 64, 64, 8),
    Case(1, 1, 1, 4),
    Case(2, 20, 1, 16),
    Case(2, 64, 130, 1),
    Case(2, 50, 64, 1, bandwidth=20),
    Case(2, 64, 65, 5, bandwidth=9),
    Case(2, 33, 97, 32),
    Case(2, 64, 31, 64),
    Case(2, 40, 50, 66, aligned=False),
    Case(2, 64, 70, 128),
    Case(2, 30, 70, 20, bandwidth=45),
    Case(2, 32, 70, 12, device=BLACKWELL_DESKTOP),
    Case(2, 50, 70, 1, gamma=1e-6, scale=1000.0),
    Case(2, 64, 70, 5, gamma=1e-6, scale=1000.0),
    Case(2, 64, 70, 130),
    Case(6, 30, 40, 1, device=TINY_HOPPER),
    Case(6, 30, 40, 20, device=TINY_HOPPER, gamma=1e-6, scale=1000.0),
]
"""Up to 32 features in one launch, more in two."""
WIDE_FROM_THE_START = [Case(2, 100, 40, 20, device=TURING), Case(2, 40, 50, 33, device=TURING)]
WITH_LENGTHS = [
    Case(3, 64, 50, 5, x_lengths=(64, 1, 30), y_lengths=(50, 20, 1)),
    Case(3, 150, 100, 1, y_lengths=(100, 20, 1)),
    Case(3, 60, 70, 20, x_lengths=(60, 0, 30), bandwidth=40),
]
SMALL = [
    case
    for case in [*FAMILIES, *CHAINS, *FLAGGED, *ONE_STRIP, *WIDE_FROM_THE_START, *WITH_LENGTHS]
    if case.d and case.dtype == F32
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_gradients_with_values_are_bitwise_the_same(
    compute: Compute, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs_of(case)._replace(weights=torch.ones(case.batch))
    expected = compute(case, given)
    main = case.plan.main
    one_launch = main.strips(case.n) == 1 and FORWARD_BACKWARD in main.parts
    passes = [(main, FORWARD_BACKWARD)] if one_launch else [(main, FORWARD), (main, BACKWARD)]
    last = [] if case.plan.rerun is None else [(case.plan.rerun, RERUN)]
    assert (case.plan.rerun is None) == (case in WIDE_FROM_THE_START)
    for seed, resident, relaxed in ((1, 1, False), (2, 8, True), (3, 3, True)):
        gpu = EmulatedGpu(seed, resident=resident, relaxed=relaxed)
        answer = compute(case, given, gpu, small=True)
        assert answer.equals(expected)
        assert gpu.launched == [*passes, *last, (SCALE, BACKWARD)]
    assert answer.state.numel() == launch_state_bytes(case, given, monkeypatch)
    monkeypatch.setattr(config, "gradient_with_value", lambda *sizes: True)
    for needed in ((True, False), (False, True)):
        problem = problem_of(case, given, *needed)
        value, state = launch.forward(problem)
        assert torch.equal(value.view(torch.int32), expected.value.view(torch.int32))
        for side, right, need in zip(
            launch.backward(problem, given.weights, value, state), expected[1:3], needed, strict=True
        ):
            assert right is not None
            assert (
                torch.equal(side.view(torch.int32), right.view(torch.int32)) if need else side.shape == (0,)
            )


def launch_state_bytes(case: Case, given: Inputs, monkeypatch: pytest.MonkeyPatch) -> int:
    with monkeypatch.context() as patch:
        patch.setattr(config, "gradient_with_value", lambda *sizes: True)
        return launch.state_bytes(problem_of(case, given))


@pytest.mark.parametrize("factor", [math.inf, -math.inf, math.nan])
def test_no_gradient_reaches_the_padding(compute: Compute, factor: float) -> None:
    case = WITH_LENGTHS[0]
    given = inputs_of(case)._replace(weights=torch.tensor([1.0, factor, 1.0]))
    answer = compute(case, given, small=True)
    assert answer.grad_y is not None
    assert (answer.grad_x[1, 1:] == 0).all()
    assert (answer.grad_y[1, 20:] == 0).all()
    assert not torch.isfinite(answer.grad_x[1, :1]).any()


@pytest.mark.parametrize("case", [Case(3, 61, 50, 5), Case(3, 150, 100, 4), Case(3, 40, 36, 1)], ids=str)
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("factor", [2.0, math.inf, math.nan])
def test_no_gradient_where_the_value_is_infinite(
    compute: Compute, case: Case, small: bool, factor: float
) -> None:
    """The derivative of, say, its square is infinite, too: a zero stays a zero whatever the factor."""
    case = replace(case, gamma=1e-3)
    given = inputs_of(case)._replace(weights=torch.tensor([1.0, factor, 1.0]))
    given.x[1] = 1e10
    answer = compute(case, given, small=small)
    assert answer.value.isinf().tolist() == [False, True, False]
    assert answer.grad_y is not None
    for gradient in (answer.grad_x, answer.grad_y):
        assert (gradient[1] == 0).all()
        assert gradient.isfinite().all()
        assert (gradient[[0, 2]] != 0).any(2).all()


@pytest.mark.parametrize("case", [Case(3, 61, 50, 5), Case(2, 60, 52, 3), Case(3, 61, 64, 1)], ids=str)
def test_kept_gradients_times_any_factor(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One side of both that are kept, a factor for all, strides; rows in fours and not."""
    monkeypatch.setattr(config, "weakest_device", lambda: case.device)
    monkeypatch.setattr(config, "gradient_with_value", lambda *sizes: True)
    monkeypatch.setattr(launch, "gpu", EmulatedGpu())
    problem = problem_of(case, inputs_of(case))
    value, state = launch.forward(problem)
    kept = launch.backward(problem, torch.ones(case.batch), value, state)
    for grad in (torch.tensor([0.3]).expand(case.batch), torch.randn(case.batch, 2)[:, 0]):
        expected = [side * grad.view(-1, 1, 1) for side in kept]
        for needed in ((True, True), (True, False), (False, True)):
            asked = problem._replace(need_x=needed[0], need_y=needed[1])
            results = launch.backward(asked, grad, value, state)
            for result, right, need in zip(results, expected, needed, strict=True):
                assert torch.equal(result, right) if need else result.shape == (0,)


def test_one_launch_is_tried_for_every_kernel_that_has_it() -> None:
    assert all(case.plan.main.strips(case.n) == 1 for case in ONE_STRIP)
    mains = [case.plan.main for case in ONE_STRIP if FORWARD_BACKWARD in case.plan.main.parts]
    tried = {(main.source, main.dims) for main in mains}
    assert tried == {("univariate", 1), *(("tiled", dims) for dims in (4, 8, 16, 32))}
    assert {("univariate", 1), ("tiled", 32)} <= {(main.source, main.dims) for main in mains if main.banded}


@pytest.mark.parametrize("case", [Case(5, 40, 50, 5), Case(5, 150, 100, 5)], ids=str)
def test_a_flagged_sample_beside_gradients_with_values(compute: Compute, case: Case) -> None:
    given = inputs_of(case)._replace(weights=torch.ones(5))
    given.x[1] *= 1e6
    expected = compute(case, given)
    assert flagged(case, expected.state) == [False, True, False, False, False]
    for seed, resident in ((1, 1), (2, 8)):
        gpu = EmulatedGpu(seed, resident=resident, relaxed=True)
        assert compute(case, given, gpu, small=True).equals(expected)


def test_the_device_is_restored_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(2, 20, 30, 5)
    monkeypatch.setattr(config, "weakest_device", lambda: case.device)
    gpu = EmulatedGpu()
    monkeypatch.setattr(launch, "gpu", gpu)
    forward(case, inputs_of(case))
    assert gpu.left == 1

    def fail(*arguments: Any) -> None:
        raise RuntimeError("cannot be loaded")

    monkeypatch.setattr(gpu, "run", fail)
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        forward(case, inputs_of(case))
    assert gpu.left == 2


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("small", [False, True])
def test_through_the_module(monkeypatch: pytest.MonkeyPatch, reduction: Reduction, small: bool) -> None:
    case = Case(3, 40, 70, 5, gamma=0.5)
    given = inputs_of(case)
    assert given.y is not None
    monkeypatch.setattr(config, "weakest_device", lambda: case.device)
    monkeypatch.setattr(config, "gradient_with_value", lambda *sizes: small)
    monkeypatch.setattr(launch, "gpu", EmulatedGpu())
    monkeypatch.setattr(_backends, "backend", lambda device_type: launch)
    x, y = given.x.requires_grad_(), given.y.requires_grad_()
    loss = SoftDTW(gamma=case.gamma, reduction=reduction)(x, y)
    weights = torch.tensor([0.5, -2.0, 3.0] if reduction == "none" else 1.5, dtype=F64)
    exact_x, exact_y = (side.detach().double().requires_grad_() for side in (x, y))
    exact = _reference.softdtw(exact_x, exact_y, case.gamma)
    exact = exact if reduction == "none" else exact.mean() if reduction == "mean" else exact.sum()
    assert loss.shape == exact.shape
    assert relative(loss.detach().reshape(-1), exact.detach().reshape(-1)) < 1e-6
    for _ in range(3):  # as often as asked for
        gradients = torch.autograd.grad(loss, (x, y), weights.float(), retain_graph=True)
        for ours, theirs in zip(
            gradients, torch.autograd.grad(exact, (exact_x, exact_y), weights, retain_graph=True), strict=True
        ):
            assert relative(ours, theirs) < 1e-6
    several = torch.stack([weights, -2.0 * weights]).float()
    by_vmap = torch.func.vmap(lambda weight: torch.autograd.grad(loss, (x, y), weight, retain_graph=True))
    for batched in (
        torch.autograd.grad(loss, (x, y), several, is_grads_batched=True, retain_graph=True),
        by_vmap(several),
    ):
        for one, both in zip(gradients, batched, strict=True):
            torch.testing.assert_close(both, torch.stack([one, -2.0 * one]), rtol=3e-7, atol=0)
    second: list[Tensor] = []
    for side, result in ((x, loss), (exact_x, exact)):
        (slope,) = torch.autograd.grad(result.sum(), side, create_graph=True)
        second += torch.autograd.grad(slope.square().sum(), side, retain_graph=True)
    assert relative(*second) < 1e-5
    (alone,) = torch.autograd.grad(SoftDTW(gamma=case.gamma, reduction=reduction)(x.detach(), y).sum(), y)
    (both,) = torch.autograd.grad(loss.sum(), y)
    assert torch.equal(alone, both)


@pytest.mark.parametrize("case", [Case(3, 150, 150, 5)], ids=str)
@pytest.mark.parametrize("option", ["", "broadcast", "lengths"])
@pytest.mark.parametrize("small", [False, True])
def test_the_divergence_of_equals_has_no_gradient(
    monkeypatch: pytest.MonkeyPatch, case: Case, option: str, small: bool
) -> None:
    monkeypatch.setattr(config, "weakest_device", lambda: case.device)
    monkeypatch.setattr(config, "gradient_with_value", lambda *sizes: small)
    monkeypatch.setattr(launch, "gpu", EmulatedGpu())
    monkeypatch.setattr(_backends, "backend", lambda device_type: launch)
    x = inputs_of(case).x
    x = x[:1].expand(3, -1, -1) if option == "broadcast" else x
    y = x.clone().requires_grad_()
    loss = SoftDTW(normalize=True, reduction="mean")
    loss(x[:1] if option == "broadcast" else x, y, [150] * 3 if option == "lengths" else None).backward()
    assert y.grad is not None
    assert (y.grad == 0).all()


@pytest.mark.skipif(shutil.which("g++") is None, reason="watching for races needs gcc")
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 200, 70, 5, races=True),
        Case(2, 200, 70, 5, gamma=1e-6, scale=1000.0, races=True),
        Case(2, 64, 70, 5, races=True),
        Case(2, 64, 70, 5, gamma=1e-6, scale=1000.0, races=True),
        Case(2, 60, 70, 1, races=True),
        Case(2, 64, 70, 20, races=True),
        Case(2, 50, 70, 6, bandwidth=30, races=True),
    ],
    ids=str,
)
def test_no_races_where_gradients_come_with_values(case: Case, compute: Compute) -> None:
    given = inputs_of(case)._replace(weights=torch.ones(case.batch))
    expected = compute(case, given)
    gpu = EmulatedGpu(0, resident=8, relaxed=True, races=True)
    assert compute(case, given, gpu, small=True).equals(expected)


RACES = [
    Case(2, 200, 70, 1, races=True),
    Case(2, 200, 150, 5, bandwidth=70, races=True),
    Case(2, 200, 70, 64, races=True),
    Case(2, 200, 70, 128, races=True),
    Case(2, 30, 70, 65, aligned=False, races=True),
    Case(2, 200, 70, 130, races=True),
    Case(2, 100, 70, 160, dtype=BF16, bandwidth=40, races=True),
    Case(1, 70, 40, 1060, races=True),
    Case(1, 260, 260, 161, bandwidth=10, races=True),  # tiles that only some strips touch
    Case(2, 130, 100, 132, dtype=F16, broadcast="y", races=True),  # the sums are where the gradients will be
    Case(2, 100, 70, 100, bandwidth=31, device=BLACKWELL_DESKTOP, races=True),
    Case(2, 200, 70, 0, races=True),
    Case(2, 200, 70, 3, dtype=F64, races=True),
    Case(2, 200, 70, 5, gamma=1e-6, scale=1000.0, races=True),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="watching for races needs gcc")
@pytest.mark.parametrize("case", RACES, ids=str)
def test_no_races(compute: Compute, case: Case) -> None:
    given = inputs_of(case)
    assert_right(case, given, compute(case, given, EmulatedGpu(0, resident=8, relaxed=True, races=True)))


# ---- beyond the narrow range


@pytest.mark.parametrize("case", FLAGGED, ids=str)
def test_samples_beyond_the_narrow_range_are_walked_again(compute: Compute, case: Case) -> None:
    given, gpu = inputs_of(case), EmulatedGpu()
    answer = compute(case, given, gpu)
    assert flagged(case, answer.state) == [True] * case.batch
    main, rerun = case.plan.main, case.plan.rerun
    assert gpu.launched == [(main, FORWARD), (rerun, FORWARD), (main, BACKWARD), (rerun, RERUN)]
    assert_right(case, given, answer)


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_ordinary_samples_are_not(compute: Compute, case: Case) -> None:
    if case.plan.rerun is not None:
        assert flagged(case, compute(case).state) == [False] * case.batch


def test_rows_that_are_not_there_flag_nothing(compute: Compute) -> None:
    """A strip has one row more than x: its costs are those of the last row, not of one without squares."""
    case = Case(batch=1, n=63, m=40, d=20)
    given = inputs_of(case)
    given.x[:] = 0.0
    given.x[:, -1] = 588.0
    given.y[:] = 294.0  # costs are 0.6 of the range; less the squares of the last row, -1.8 of it
    answer = compute(case, given)
    assert flagged(case, answer.state) == [False]
    assert_right(case, given, answer)


@pytest.mark.parametrize(
    "case", [replace(case, gamma=1e-3) for case in FAMILIES if case.dtype == F32], ids=str
)
def test_one_sample_beyond_the_range_leaves_the_others_alone(compute: Compute, case: Case) -> None:
    given = inputs_of(case)
    expected = compute(case, given)
    assert flagged(case, expected.state) == [False] * 3
    x = given.x.clone()
    x[1] *= 1e5
    stretched = given._replace(x=x)
    answer = compute(case, stretched, EmulatedGpu(1, resident=2))
    assert flagged(case, answer.state) == [False, True, False]
    assert_right(case, stretched, answer)
    for sample in (0, 2):
        assert answer.sample_equals(expected, sample)


@pytest.mark.parametrize(
    "case",
    [
        replace(family, gamma=gamma, scale=scale)
        for family in (Case(2, 70, 66, 1), Case(2, 70, 66, 5), Case(2, 70, 66, 64), Case(2, 70, 66, 0))
        for gamma in (1e-6, 1e-4, 1e-2, 1e2, 1e6)
        for scale in (1e-3, 1.0, 1e3)
    ],
    ids=str,
)
def test_any_gamma_and_any_size_of_costs(compute: Compute, case: Case) -> None:
    given = inputs_of(case)
    assert_right(case, given, compute(case, given))


@pytest.mark.parametrize("case", [Case(2, 100, 90, 64), Case(2, 100, 90, 130)], ids=str)
def test_a_spike_that_the_normalization_did_not_see(compute: Compute, case: Case) -> None:
    """Planes of 16 bits are scaled by a sample of y; one row far outside must not be taken for near."""
    given = inputs_of(case)
    assert given.y is not None
    given.y[0, 44] = 3e5
    answer = compute(case, given)
    assert flagged(case, answer.state) == [True, False]
    assert_right(case, given, answer)


@pytest.mark.parametrize(
    "case", [Case(2, 100, 90, 1), Case(2, 100, 90, 5), Case(2, 100, 90, 64), Case(2, 100, 90, 0)], ids=str
)
def test_one_cost_beyond_the_range_on_a_path_within_it(compute: Compute, case: Case) -> None:
    """The sum of the path would fit the narrow exponent; the rounding of that one cost would not."""
    given = inputs_of(case)
    scaled = 3e7  # between 2^22 and 2^29
    if given.y is None:
        given.x[0, 44] = scaled / math.log2(math.e)
    else:
        given.y[0, 44] = math.sqrt(scaled / math.log2(math.e) / case.d)
    answer = compute(case, given)
    assert flagged(case, answer.state) == [True, False]
    assert_right(case, given, answer)


@pytest.mark.parametrize(
    "case",
    [
        *(Case(2, 150, 130, 1, gamma=gamma) for gamma in (1e-2, 1e-3, 1e-4)),
        Case(4, 256, 256, 1, gamma=1e-4),  # row 0 is 2^23 away from row 1 before its end
    ],
    ids=str,
)
def test_packed_checkpoints_hold_neighbours_far_apart(compute: Compute, case: Case) -> None:
    """At D = 1 exponents are kept as differences, of 17, 23 or 30 bits, and none is too far for that."""
    given = inputs_of(case)
    answer = compute(case, given)
    assert case.plan.main.packed
    assert flagged(case, answer.state) == [False] * case.batch
    assert_right(case, given, answer)
    unsaved, _ = forward(case, given, save=False)
    assert torch.equal(unsaved, answer.value)


@pytest.mark.parametrize("far", [10, 11])
def test_packed_checkpoints_hold_neighbours_very_far_apart(compute: Compute, far: int) -> None:
    """Each of the first steps of y costs 5e5 bits at every step of x, the others nothing; an even and an odd
    number put the border between lanes and into one."""
    case = Case(2, 150, 130, 1, gamma=math.log2(math.e) / 5e5)
    given = inputs_of(case)
    assert given.y is not None
    given.x[0], given.y[0] = 0.0, 0.0
    given.y[0, :far] = 1.0
    given.x[1] *= 1e-3
    given.y[1] *= 1e-3
    answer = compute(case, given)
    assert flagged(case, answer.state) == [False, False]
    assert_right(case, given, answer)


@pytest.mark.parametrize("d", [20, 64, 80, 130, 160])
def test_a_spike_beside_the_band(compute: Compute, d: int) -> None:
    """A row of y, a million times as large as a strip's own x, in its tile but not in its band, is too large
    for the strip's 16-bit planes, and there is no cost to tell by."""
    case = Case(2, 150, 150, d, bandwidth=3, gamma=1e3)
    given = inputs_of(case)
    assert given.y is not None
    for series in given[:2]:
        series[0] *= 1e-3
        series[0, 80] = 1e3
    answer = compute(case, given)
    assert flagged(case, answer.state) == [True, False]
    assert_right(case, given, answer)


# ---- broken and forbidden


@pytest.mark.parametrize(
    ("broken", "side", "case"),
    [
        pytest.param(broken, side, case, id=f"{broken}-{side}-{case}")
        for broken in (math.nan, math.inf, -math.inf)
        for side in ("x", "y")
        for case in FAMILIES
        if case.d or (side == "x" and broken != math.inf)  # +inf in a cost matrix only forbids a cell
    ],
)
def test_a_broken_sample_breaks_itself_alone(compute: Compute, case: Case, side: str, broken: float) -> None:
    given = inputs_of(case)
    expected = compute(case, given)
    tensor = given.x.clone() if side == "x" else given.y.clone()
    tensor[1, 67, -1] = broken
    answer = compute(case, given._replace(**{side: tensor}))
    assert not answer.value[1].isfinite()
    if math.isnan(broken):
        assert answer.value[1].isnan()
    if answer.value[1].isnan():
        assert answer.grad_x[1].isnan().any()
    for sample in (0, 2):
        assert answer.sample_equals(expected, sample)


@pytest.mark.parametrize(
    "case", [Case(6, 70, 66, 0), Case(6, 70, 66, 0, dtype=F64), Case(6, 70, 66, 5, bandwidth=8)], ids=str
)
def test_bad_lengths_give_nan(compute: Compute, case: Case) -> None:
    """They may live on the GPU, where nobody has checked them."""
    given = inputs_of(case)
    x_lengths = torch.tensor([70, 0, 71, 60, -5, 66], dtype=torch.int64)
    y_lengths = torch.tensor([66, 9, 66, 2**32 + 60, 3, 60], dtype=torch.int64)
    answer = compute(case, given._replace(x_lengths=x_lengths, y_lengths=y_lengths))
    assert answer.value.isnan().tolist() == [False, True, True, True, True, False]
    good = replace(case, batch=1)
    for sample in (0, 5):
        n, m = int(x_lengths[sample]), int(y_lengths[sample])
        alone = inputs_of(replace(good, x_lengths=(n,), y_lengths=(m,)))
        x = given.x[sample : sample + 1]
        y = None if given.y is None else given.y[sample : sample + 1]
        answer_alone = compute(good, alone._replace(x=x, y=y, weights=given.weights[sample : sample + 1]))
        assert torch.equal(answer_alone.value[0], answer.value[sample])
        assert torch.equal(answer_alone.grad_x[0], answer.grad_x[sample])


COSTS = [
    Case(4, 150, 100, 0),
    Case(4, 150, 100, 0, dtype=F64),
    Case(4, 150, 100, 0, dtype=F16),
]


@pytest.mark.parametrize("case", COSTS, ids=str)
def test_forbidden_and_negative_costs(compute: Compute, case: Case) -> None:
    given = inputs_of(case)
    cost = given.x.clone()
    cost -= 0.75
    holes = torch.rand(cost.shape, generator=torch.Generator().manual_seed(1)) < 0.15
    holes[:, 0, 0] = holes[:, -1, -1] = False
    holes[1:3] = False
    holes[1, 80] = True
    holes[1, 80, 77] = False  # a wall with one gap
    holes[2, 80] = True  # a wall without
    cost = cost.masked_fill(holes, math.inf)
    answer = compute(case, given._replace(x=cost))
    assert answer.value[2] == math.inf
    assert (answer.grad_x[2] == 0).all()
    assert (answer.grad_x[holes] == 0).all()
    keep = [0, 1, 3]
    some = replace(case, batch=3)
    given = given._replace(x=cost[keep], weights=given.weights[keep])
    assert_right(some, given, Answer(answer.value[keep], answer.grad_x[keep], None, answer.state))


@pytest.mark.parametrize(
    "case", [Case(3, 150, 100, 0), Case(3, 100, 150, 0, bandwidth=60), Case(3, 90, 90, 0, dtype=F64)], ids=str
)
def test_weight_is_conserved(compute: Compute, case: Case) -> None:
    """A path is on each anti-diagonal or jumps it with a diagonal step, and then it is on both neighbours."""
    given = inputs_of(case)
    given = given._replace(weights=torch.ones(case.batch, dtype=F64))
    weight = compute(case, given).grad_x.double()
    sums = torch.stack([weight.flip(2).diagonal(k, 1, 2).sum(1) for k in range(case.m - 1, -case.n, -1)], 1)
    tolerance = 1e-12 if case.dtype == F64 else 1e-5
    assert sums.shape == (case.batch, case.n + case.m - 1)
    assert (sums[:, [0, -1]] - 1).abs().max() <= tolerance
    assert sums.max() <= 1 + tolerance
    assert (sums[:, 1:] + sums[:, :-1]).min() >= 1 - tolerance
    for axis in (1, 2):  # every path visits every row and every column
        assert weight.sum(axis).min() >= 1 - tolerance
