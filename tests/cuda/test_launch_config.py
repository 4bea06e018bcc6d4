"""Launch choices, which are pure functions: no GPU, no compiler."""

from __future__ import annotations

import ctypes
import itertools
import random
import re
from pathlib import Path

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.torch_version import TorchVersion

import softdtw_cuda._ops  # noqa: F401  (registers the operators)
from softdtw_cuda._cuda import compile as compiling
from softdtw_cuda._cuda import config, launch
from softdtw_cuda._cuda.config import Device, Plan
from softdtw_cuda._cuda.kernel import (
    ANY_ROWS,
    COST,
    DIRECT,
    INPUT_CODES,
    TENSOR,
    TILED,
    UNIVARIATE,
    WHOLE_QUADS,
    WHOLE_SLICES,
    Kernel,
)
from softdtw_cuda._cuda.params import Params
from softdtw_cuda._problem import NO_BAND, Problem

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
HOPPER = Device(232448, (9, 0), 132)
AMPERE = Device(166912, (8, 0), 108)
ADA = Device(101376, (8, 9), 128)
TURING = Device(65536, (7, 5), 40)
DEVICES = {"sm_90": HOPPER, "sm_80": AMPERE, "sm_89": ADA, "sm_75": TURING}
FEATURES = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 40, 64, 65, 80, 128, 130, 4096)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "weakest_device", lambda: HOPPER)


def every_plan() -> list[tuple[Plan, Device]]:
    choices = itertools.product(
        (False, True),
        FEATURES,
        INPUT_CODES,
        (False, True),
        (False, True),
        (False, True),
        DEVICES.values(),
    )
    return list(dict.fromkeys((config.choose(*choice), choice[-1]) for choice in choices))


def plan(d: int, dtype: torch.dtype = F32, *, device: Device = HOPPER, **options: bool) -> Plan:
    flags = {"banded": False, "short": False, "aligned": True, **options}
    return config.choose(False, d, dtype, flags["banded"], flags["short"], flags["aligned"], device)


# ---- choices


class TestChoice:
    def test_features_decide_the_family(self) -> None:
        modes = {d: plan(d).main.mode for d in FEATURES}
        assert modes == {d: UNIVARIATE if d == 1 else DIRECT if d <= 16 else TENSOR for d in FEATURES}

    @pytest.mark.parametrize("d", FEATURES[1:])
    def test_a_kernel_has_room_for_the_features(self, d: int) -> None:
        kernel = plan(d).main
        assert kernel.sliced == (d > 128)
        assert kernel.sliced or kernel.dims >= d
        assert kernel.dims % (16 if kernel.mode == TENSOR else 4) == 0

    @pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
    def test_shared_memory_of_small_cards_holds_sixteen_features(self, device: Device) -> None:
        kernels = [plan(d, device=device, short=short).main for d in (2, 8, 16) for short in (False, True)]
        assert {kernel.source for kernel in kernels} == {TILED}
        assert all(kernel.backward_shared <= device.shared_bytes for kernel in kernels)

    def test_wide_loads_only_where_rows_are_aligned(self) -> None:
        for d in FEATURES:
            kernel = plan(d).main
            if kernel.mode != TENSOR:
                assert kernel.fit == ANY_ROWS
            elif kernel.fit == WHOLE_SLICES:
                assert d % kernel.dims == 0
            else:
                assert (kernel.fit == WHOLE_QUADS) == (d % 4 == 0)
        assert {plan(d).main.fit for d in (32, 64, 128, 4096)} == {WHOLE_SLICES}
        assert not any(plan(d, aligned=False).main.fit for d in FEATURES)

    def test_many_features_are_sliced_only_where_memory_asks_for_it(self) -> None:
        for d in (65, 80, 128):
            for banded in (False, True):
                assert not plan(d, banded=banded).main.sliced
            smaller = Device(shared_bytes=101376, capability=(12, 0), processors=170)
            assert plan(d, device=smaller).main.sliced

    @pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
    def test_float64_is_wide_and_needs_no_second_walk(self, device: Device) -> None:
        for d in FEATURES:
            chosen = plan(d, F64, device=device)
            assert chosen.main.wide
            assert chosen.rerun is None
        assert config.choose(True, 1, F64, False, False, True, device).main.mode == COST

    def test_a_narrow_kernel_has_a_wide_second(self) -> None:
        for chosen, _ in every_plan():
            main, rerun = chosen.main, chosen.rerun
            assert main.wide == (rerun is None)
            if rerun is not None:
                assert rerun.wide
                assert rerun.input_code == main.input_code
                assert (rerun.mode == COST) == (main.mode == COST)

    def test_without_matrix_instructions_nothing_is_sent_to_tensor_cores(self) -> None:
        for chosen, device in every_plan():
            assert chosen.main.mode != TENSOR or device.capability >= (8, 0)

    def test_a_band_or_a_cost_matrix_can_forbid_cells(self) -> None:
        for d in FEATURES:
            assert plan(d, banded=True).main.banded
            assert not plan(d).main.banded
        assert config.choose(True, 1, F32, False, False, True, HOPPER).main.banded

    def test_short_series_have_short_strips(self) -> None:
        for d in FEATURES:
            assert plan(d, short=True).main.strip_rows == 32
            assert plan(d).main.strip_rows == 64
        assert config.fused_plan(32, 8, F32, -1).main.strips(32) == 1
        assert config.fused_plan(33, 8, F32, -1).main.strips(33) == 1

    @pytest.mark.parametrize("aligned", [True, False])
    def test_alignment_does_not_change_the_state(self, aligned: bool) -> None:
        """The size of the state is asked for without knowing addresses."""
        for d, dtype, bandwidth, n in itertools.product(FEATURES, INPUT_CODES, (-1, 7), (20, 500)):
            chosen = config.fused_plan(n, d, dtype, bandwidth, aligned)
            layout = config.layout_of(chosen, 3, n, 400, bandwidth, True)
            assert layout.total == state_bytes(3, n, 400, d, dtype, bandwidth)

    def test_the_same_question_has_the_same_answer(self) -> None:
        assert plan(64) is plan(64)
        assert hash(plan(64).main) == hash(plan(64).main)
        assert plan(64).main != plan(64, banded=True).main


class TestLimits:
    def test_shared_memory_fits_the_device(self) -> None:
        for chosen, device in every_plan():
            for kernel in (chosen.main, chosen.rerun):
                if kernel is not None:
                    assert kernel.forward_shared <= device.shared_bytes, kernel
                    assert kernel.backward_shared <= device.shared_bytes, kernel
                    assert kernel.forward_shared % 16 == kernel.backward_shared % 16 == 0

    def test_the_resident_blocks_of_the_forward_share_a_processor(self) -> None:
        """FORWARD_BLOCKS bounds registers; on a data-centre card shared memory allows as many."""
        for chosen, device in every_plan():
            kernel = chosen.main
            if kernel.source == "tiled" and device is HOPPER:
                # Each block has a kilobyte for the system; a processor has one more than a block can get.
                blocks = (device.shared_bytes + 1024) // (kernel.forward_shared + 1024)
                assert blocks >= kernel.forward_blocks, (kernel, blocks)

    def test_threads_are_whole_warps(self) -> None:
        for chosen, _ in every_plan():
            for threads in map(chosen.main.threads, chosen.main.parts):
                assert threads % 32 == 0
                assert threads <= 1024

    def test_macros_are_integers_that_the_sources_use(self) -> None:
        for source in ("univariate", "tiled"):
            words = set(re.findall(r"\w+", compiling.source_text(f"{source}.cu")))
            for chosen, _ in every_plan():
                if chosen.main.source == source:
                    assert chosen.main.defines().keys() <= words
                    assert all(isinstance(value, int) for value in chosen.main.defines().values())


# ---- geometry: what kernels index must lie inside what was laid out


def strip_extent(kernel: Kernel, index: int, n: int, m: int, bandwidth: int) -> tuple[range, range]:
    """Checkpoints of a strip of a pair, and the columns of its bottom row, as in strip.cuh."""
    radius = bandwidth if bandwidth >= 0 else n + m
    first_row = index * kernel.strip_rows
    last_row = min(n - 1, first_row + kernel.strip_rows - 1)
    first_column = max(0, first_row - 1 - radius)
    last_column = min(m - 1, last_row + radius)
    last_step = last_column + last_row - first_row
    checkpoints = range(first_column // kernel.checkpoint, last_step // kernel.checkpoint + 1)
    bottom = first_row + kernel.strip_rows - 1
    return checkpoints, range(max(0, bottom - radius), min(m, bottom + radius + 1))


def test_states_and_bottom_rows_have_room() -> None:
    kernels = {kernel for chosen, _ in every_plan() for kernel in (chosen.main, chosen.rerun) if kernel}
    shapes = {(k.strip_rows, k.checkpoint): k for k in kernels}
    numbers = random.Random(0)
    for kernel in shapes.values():
        for _ in range(400):
            n, m = numbers.randint(1, 700), numbers.randint(1, 700)
            bandwidth = numbers.choice([-1, abs(n - m), abs(n - m) + numbers.randint(0, 90)])
            # A pair may be shorter than the tensors it lies in.
            tall, broad = n + numbers.choice([0, 40]), m + numbers.choice([0, 40])
            kept = 0
            for index in range(kernel.strips(n)):
                checkpoints, columns = strip_extent(kernel, index, n, m, bandwidth)
                kept += len(checkpoints) - 1  # the first is known
                assert len(checkpoints) - 1 <= kernel.checkpoints(broad, bandwidth)
                end = index * kernel.checkpoints(broad, bandwidth) + len(checkpoints) - 1
                assert end * kernel.checkpoint_bytes <= kernel.states_bytes(tall, broad, bandwidth)
                if (index + 1) * kernel.strip_rows < n:
                    assert len(columns) <= kernel.bound_columns(broad, bandwidth)
            assert kernel.strips(n) <= kernel.strips(tall)
            if bandwidth < 0:
                assert kept * kernel.checkpoint_bytes == kernel.states_bytes(n, m, bandwidth)


# ---- layouts

SHAPES = [(1, 1, 1), (1, 300, 1), (3, 31, 33), (5, 64, 65), (2, 65, 64), (7, 200, 333), (4, 2048, 1000)]


def disjoint(regions: dict[str, tuple[int, int]]) -> None:
    ordered = sorted((start, size, name) for name, (start, size) in regions.items() if size)
    for (start, size, name), (following, _, other) in itertools.pairwise(ordered):
        assert start + size <= following, f"{name} runs into {other}"


@pytest.mark.parametrize(("batch", "n", "m"), SHAPES)
@pytest.mark.parametrize("bandwidth", [-1, 300])
def test_layout(batch: int, n: int, m: int, bandwidth: int) -> None:
    tiles = (m + config.TILE - 1) // config.TILE
    for chosen, _ in every_plan():
        for save in (True, False):
            layout = config.layout_of(chosen, batch, n, m, bandwidth, save)
            rows = batch * layout.row_bytes
            cleared = {
                "counters": (0, 8),
                "progress": (layout.progress, 16 * batch),
                "grad_y_order": (layout.grad_y_order, 4 * batch * tiles if save else 0),
                "rows": (layout.rows, rows),
            }
            others = {
                "range_flags": (layout.range_flags, 4 * (batch + 1)),
                "pairs": (layout.pairs, batch * layout.pair_bytes),
            }
            if chosen.rerun is None:
                cleared["more rows"] = (layout.more_rows, rows)
                assert layout.more_row_bytes == layout.row_bytes
            else:  # a second walk clears its further row itself: behind its states, in the pair's own part
                saved = chosen.rerun.pair_bytes(n, m, bandwidth) if save else 0
                assert layout.more_rows == layout.pairs + saved
                assert saved + layout.row_bytes <= layout.pair_bytes == layout.more_row_bytes
            disjoint(cleared | others)
            for start, size in cleared.values():
                assert start + size <= layout.scratch
            for name, (start, size) in (cleared | others).items():
                assert start % (4 if name in ("grad_y_order", "range_flags") else 16) == 0
                assert start + size <= layout.total
            assert layout.range_flags + 4 * (batch + 1) <= layout.pairs
            assert layout.scratch % 16 == layout.pairs % 128 == 0
            for kernel in (chosen.main, chosen.rerun):
                if kernel is None:
                    continue
                if kernel.strips(n) > 1:
                    assert layout.row_bytes == (m + 2 * chosen.main.strips(n)) * config.ROW_WORD
                if save:
                    assert kernel.pair_bytes(n, m, bandwidth) <= layout.pair_bytes
                    assert layout.pair_bytes % 16 == kernel.states_bytes(n, m, bandwidth) % 16 == 0


# ---- memory


def state_bytes(
    batch: int, n: int, m: int, d: int | None, dtype: torch.dtype, bandwidth: int = NO_BAND
) -> int:
    """Of checkpoints, of d features or, for None, of a cost matrix."""
    plan = config.cost_plan(n, dtype, bandwidth) if d is None else config.fused_plan(n, d, dtype, bandwidth)
    return config.layout_of(plan, batch, n, m, bandwidth, True).total


@pytest.mark.parametrize("d", [None, 1, 64])
@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_state_of_a_problem(d: int | None, dtype: torch.dtype) -> None:
    x = torch.empty(3, 2000, d or 1500, dtype=dtype, device="meta")
    y = None if d is None else torch.empty(3, 1500, d, dtype=dtype, device="meta")
    problem = Problem(x, y, None, None, 1.0, 700, True, d is not None)
    assert launch.state_bytes(problem) == state_bytes(3, 2000, 1500, d, dtype, 700)


@pytest.mark.parametrize(
    ("sizes", "small"),
    [
        ((16, 64, 64, 8), True),
        ((1, 64, 960, 64), True),
        ((32, 128, 128, 8), True),
        ((32, 128, 128, 9), False),
        ((1, 512, 512, 1), True),
        ((1, 512, 513, 1), False),
        ((128, 128, 128, 1), True),
        ((129, 128, 128, 1), False),
        ((16, 64, 64, 512), True),
        ((16, 64, 64, 513), False),
    ],
)
def test_gradients_come_with_the_values_of_small_problems(
    sizes: tuple[int, int, int, int], small: bool
) -> None:
    assert config.gradient_with_value(*sizes) == small
    batch, n, m, d = sizes
    x, y = torch.empty(batch, n, d, device="meta"), torch.empty(batch, m, d, device="meta")
    problem = Problem(x, y, None, None, 1.0, NO_BAND, True, True)
    assert (launch.state_bytes(problem) == 4 * (x.numel() + y.numel())) == small
    for other in (torch.float64, torch.float16):
        assert not launch._has_gradient_with_value(problem._replace(x=x.to(other), y=y.to(other)), sizes)


def bytes_per_cell(batch: int, n: int, m: int, d: int, dtype: torch.dtype) -> float:
    """As documented: of series, or for d = 0 of cost matrices."""
    x = torch.empty(batch, n, d or m, dtype=dtype, device="meta")
    y = torch.empty(batch, m, d, dtype=dtype, device="meta") if d else None
    return launch.state_bytes(Problem(x, y, None, None, 1.0, NO_BAND, True, y is not None)) / (batch * n * m)


def test_bytes_that_the_page_on_memory_names() -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"^On CUDA it is at most .*$", page, re.MULTILINE)
    limits = [float(number) for number in re.findall(r"\d+\.\d+", sentence)]
    ranges = [range(2048, 9000, 61), range(1024, 2048, 7), range(300, 1024), range(65, 300)]
    for limit, lengths in zip(limits, ranges, strict=True):
        taken = [
            bytes_per_cell(batch, length, length, d, dtype)
            for batch, d, dtype, length in itertools.product(
                (1, 32, 4096), (0, 1, 8, 64), (F32, F64), lengths
            )
        ]
        assert limit - 0.01 < max(taken) <= limit
    assert bytes_per_cell(1, 64, 64, 64, F32) == 8
    for batch, n, m, d in itertools.product((1, 7), (65, 100, 300), (65, 128, 700), (1, 2, 5, 8, 16)):
        if config.gradient_with_value(batch, n, m, d):
            assert bytes_per_cell(batch, n, m, d, F32) == 4 * d * (n + m) / (n * m) <= 0.5


@pytest.mark.parametrize("length", [128, 2048, 65536])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("d", [8, 64, 256])
def test_bytes_per_cell_of_few_pairs(length: int, dtype: torch.dtype, d: int) -> None:
    """Pairs of several features, each strip in a block of its own."""
    assert state_bytes(32, length, length, d, dtype) <= 0.45 * 32 * length * length


def test_without_saving_memory_is_linear() -> None:
    for chosen, _ in every_plan():
        layout = config.layout_of(chosen, 1, 10_000, 10_000, -1, False)
        assert layout.total <= 100 * 10_000


@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_band_bounds_the_state(dtype: torch.dtype) -> None:
    narrow, longer = (state_bytes(1, n, n, 8, dtype, 50) for n in (16384, 32768))
    assert 1.9 * narrow <= longer <= 2.01 * narrow
    assert narrow < state_bytes(1, 16384, 16384, 8, dtype) / 25


# ---- tracing


def symbols(*hints: int) -> list[int | torch.SymInt]:
    """Sizes that are symbols, as under torch.compile(dynamic=True)."""
    environment = ShapeEnv()
    made = []
    for number, hint in enumerate(hints):
        source = ConstantSource(f"size{number}")
        symbol = environment.create_symbol(hint, source, DimDynamic.DYNAMIC)
        made.append(environment.create_symintnode(symbol, hint=hint, source=source))
    return made


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.10",
    reason="sym_min and sym_max guard there: other sizes compile again",
)
@pytest.mark.parametrize("bandwidth", [-1, 40])
@pytest.mark.parametrize("dtype", [F32, F64, BF16])
@pytest.mark.parametrize("d", [1, 8, 64])
def test_state_sizes_can_be_traced(d: int, dtype: torch.dtype, bandwidth: int) -> None:
    """The expression found for one shape holds for every shape of the same kind."""
    batch, n, m = symbols(4, 300, 200)
    for features in (d, None):
        size = state_bytes(batch, n, m, features, dtype, bandwidth)
        assert isinstance(size, torch.SymInt)
        assert size.node.expr.free_symbols == {side.node.expr for side in (batch, n, m)}
        for other in ((4, 300, 200), (7, 65, 1000), (2, 2048, 333), (100, 90, 90)):
            values = dict(zip((side.node.expr for side in (batch, n, m)), other, strict=True))
            assert int(size.node.expr.xreplace(values)) == state_bytes(*other, features, dtype, bandwidth)


def test_operators_trace_on_a_gpu_that_is_not_there() -> None:
    with FakeTensorMode():
        x, y = (torch.empty(4, steps, 64, device="cuda") for steps in (300, 200))
        value, state = torch.ops.softdtw_cuda.forward(x, y, None, None, 1.0, -1, True, True)
        assert value.shape == (4,)
        assert value.dtype == torch.float32
        assert state.shape == (state_bytes(4, 300, 200, 64, F32),)
        gradients = torch.ops.softdtw_cuda.backward(
            value, value, state, x, y, None, None, 1.0, -1, True, True
        )
        assert [gradient.shape for gradient in gradients] == [x.shape, y.shape]


# ---- the argument of the kernels


C_TYPES = {"i64": ctypes.c_int64, "double": ctypes.c_double, "i32": ctypes.c_int32}


def test_params_has_the_fields_of_the_source_in_their_order() -> None:
    text = (Path(compiling.__file__).parent / "kernels" / "params.cuh").read_text()
    body = re.search(r"struct Params \{(.*?)\n\};", text, re.DOTALL)
    assert body is not None
    declared = []
    for line in re.sub(r"//[^\n]*", "", body[1]).split(";"):
        words = line.split()
        if not words:
            continue
        pointer = "*" in line
        kind = ctypes.c_void_p if pointer else C_TYPES[words[0]]
        names = re.findall(r"(\w+)\s*(?:,|$)", line.strip())
        declared += [(name, kind) for name in names]
    assert declared == list(Params._fields_)


def test_more_blocks_than_a_launch_has() -> None:
    """ctypes would cut the number to 32 bits without a word."""
    chosen = config.fused_plan(4097, 1, F32, -1)
    with pytest.raises(ValueError, match=r"67108864 pairs of 4097 steps .* several batches"):
        launch._call(chosen, 2**26, 4097, 1, 1, -1, False)


@pytest.mark.parametrize(
    ("n", "m", "d", "message"),
    [
        (2**30, 1, 1, r"N = 1073741824 and M = 1 steps are too long for a GPU, expected N \+ M <= 10737418"),
        (1, 2**32 + 5, 1, r"M = 4294967301 steps are too long"),
        (2, 2, 2**27 + 1, r"D = 134217729 features are too many for a GPU, expected at most 134217728"),
    ],
)
def test_sizes_that_a_kernel_cannot_count(n: int, m: int, d: int, message: str) -> None:
    """Sums of 32 bits would wrap, and a strip that walks nothing would leave the next one waiting."""
    chosen = config.fused_plan(n, d, torch.float64, -1)
    with pytest.raises(ValueError, match=message):
        launch._call(chosen, 1, n, m, d, -1, True)
    launch._call(chosen, 1, min(n, 2**29), min(m, 2**29), min(d, 2**27), -1, True)
