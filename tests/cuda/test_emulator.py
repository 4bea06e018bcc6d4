"""The emulator itself: its primitives do what the hardware does, and it detects what it is made to detect."""

from __future__ import annotations

import ctypes
import functools
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.cuda.emulator import EmulatedModule, EmulationError, GuardedBuffer, LaunchStatistics, build

HERE = Path(__file__).resolve().parent
TOYS = HERE / "toys.cu"
PRIMITIVES = HERE.parents[1] / "src" / "softdtw_cuda" / "_cuda" / "kernels" / "primitives.cuh"
SEEDS = range(20)


class Params(ctypes.Structure):
    _fields_ = (
        ("in_", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("wide", ctypes.c_void_p),
        ("n", ctypes.c_uint32),
        ("option", ctypes.c_uint32),
    )


@pytest.fixture(scope="module")
def toys() -> EmulatedModule:
    return build([TOYS])


class Toy:
    """The buffers of one launch of a toy kernel, and what it left in them."""

    def __init__(
        self,
        inputs: npt.NDArray[Any] | None = None,
        out: npt.NDArray[Any] | int = 0,
        counters: int = 1,
        words: int = 0,
        wide: int = 0,
        flush: Any = "end",
    ) -> None:
        out_array = np.zeros(out, np.uint32) if isinstance(out, int) else out
        given = np.zeros(0, np.uint32) if inputs is None else inputs
        self.inputs = GuardedBuffer(given, "inputs", flush=flush, readonly=True)
        self.out = GuardedBuffer(out_array, "out", flush=flush)
        self.counter = GuardedBuffer(np.zeros(counters, np.uint32), "counter", flush=flush)
        self.words = GuardedBuffer(np.zeros((words, 2), np.uint32), "words", flush=flush)
        self.wide = GuardedBuffer(np.zeros((wide, 4), np.uint32), "wide", flush=flush)

    def launch(
        self, module: EmulatedModule, name: str, *, n: int = 0, option: int = 0, **how: Any
    ) -> LaunchStatistics:
        buffers = (self.inputs, self.out, self.counter, self.words, self.wide)
        params = Params(*(buffer.address for buffer in buffers), n % 2**32, option)
        return module.launch(name, params, **{"blocks": 1, "threads": 32, "shared_bytes": 0, **how})


def random_words(count: int, seed: int = 0) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)


# ---- the primitives


def test_host_has_every_name_of_the_device() -> None:
    def names(path: Path) -> set[str]:
        text = path.read_text()
        functions = re.findall(r"^(?:template <class T> )?DEVICE [\w ]+?[ *](\w+)\(", text, re.MULTILINE)
        macros = re.findall(r"^\s*#\s*define (\w+)", text, re.MULTILINE)
        types = re.findall(r"^struct [^{;]*?(\w+) \{|^typedef [\w ]+ (\w+);", text, re.MULTILINE)
        return {*functions, *macros, *(name for pair in types for name in pair if name)}

    device = names(PRIMITIVES) - {"SOFTDTW_STRING"}
    assert {"KERNEL", "from_lane_above", "Word4", "u16", "mma_bf16"} <= device
    assert device - names(HERE / "emulator" / "host_primitives.h") == set()


@pytest.mark.parametrize("kind", range(4), ids=["float", "i32", "double", "i64"])
def test_shuffles(toys: EmulatedModule, kind: int) -> None:
    words = random_words(64)
    values = words[:32].astype(np.uint64) << np.uint64(32) | words[32:]
    if kind < 2:
        values &= np.uint64(0xFFFFFFFF)
    lanes = np.arange(32)
    for option in (0, 1, 5, 16, 31):
        toy = Toy(words, 4 * 32 * 2)
        toy.launch(toys, "shuffles", n=kind, option=option, seed=option)
        sources = [
            np.maximum(lanes - 1, 0),
            np.minimum(lanes + 1, 31),
            (lanes * 7 + option) % 32,
            lanes ^ option,
        ]
        expected = np.stack([values[source] for source in sources])
        np.testing.assert_array_equal(toy.out.array.view(np.uint64).reshape(4, 32), expected)


def arithmetic(module: EmulatedModule, option: int, bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    toy = Toy(bits, bits.size)
    toy.launch(module, "arithmetic", n=bits.size, option=option)
    return toy.out.array.copy()


def float_samples() -> npt.NDArray[np.uint32]:
    """Random bits, every tie of the 16-bit formats' neighbourhood, and the ends of every range."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = ((halves[1:] + halves[:-1]) / 2).view(np.uint32)
    brains = np.arange(0, 0x7F81, 17, dtype=np.uint32) << 16
    edges = np.array(
        [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 1, 0x807FFFFF], np.uint32
    )
    near = [ties - 1, ties, ties + 1, brains | 0x7FFF, brains | 0x8000, brains | 0x8001]
    return np.concatenate([random_words(20000), edges, *near, np.concatenate(near) | np.uint32(0x80000000)])


def test_half_to_float_is_exact(toys: EmulatedModule) -> None:
    halves = np.arange(2**16, dtype=np.uint16)
    expected = halves.view(np.float16).astype(np.float32).view(np.uint32)
    expected[np.isnan(halves.view(np.float16))] = 0x7FFFFFFF
    np.testing.assert_array_equal(arithmetic(toys, 0, halves.astype(np.uint32)), expected)


def test_float_to_half_rounds_to_nearest_even(toys: EmulatedModule) -> None:
    bits = float_samples()
    with np.errstate(over="ignore"):
        expected = bits.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)
    expected[np.isnan(bits.view(np.float32))] = 0x7FFF
    np.testing.assert_array_equal(arithmetic(toys, 1, bits), expected)
    negated = np.where(expected == 0x7FFF, expected, expected ^ 0x8000)
    np.testing.assert_array_equal(arithmetic(toys, 9, bits), negated << 16 | expected)


def test_max_or_nan_and_absolute(toys: EmulatedModule) -> None:
    bits = float_samples()
    values = bits.view(np.float32)
    expected = np.where(values > 0, bits, np.uint32(0))
    expected[np.isnan(values)] = 0x7FFFFFFF
    np.testing.assert_array_equal(arithmetic(toys, 10, bits), expected)
    np.testing.assert_array_equal(arithmetic(toys, 11, bits), bits & np.uint32(0x7FFFFFFF))


def test_pack_bf16_rounds_to_nearest_even(toys: EmulatedModule) -> None:
    bits = float_samples()
    values = torch.from_numpy(bits.view(np.float32))
    low, high = (
        v.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        for v in (values, -values)
    )
    for half in (low, high):
        half[np.isnan(bits.view(np.float32))] = 0x7FFF
    np.testing.assert_array_equal(arithmetic(toys, 2, bits), high << 16 | low)


@pytest.mark.parametrize(
    ("option", "function"), [(3, np.exp2), (4, np.reciprocal)], ids=["exp2", "reciprocal"]
)
def test_approximations_flush_denormals(toys: EmulatedModule, option: int, function: Any) -> None:
    values = np.concatenate(
        [float_samples().view(np.float32), np.linspace(-150, 130, 9999, dtype=np.float32)]
    )
    got = arithmetic(toys, option, values.view(np.uint32)).view(np.float32)
    tiny = np.finfo(np.float32).tiny
    with np.errstate(all="ignore"):
        flushed = np.where(np.abs(values) < tiny, np.copysign(np.float32(0), values), values)
        expected = function(flushed.astype(np.float64)).astype(np.float32)
    expected = np.where(np.abs(expected) < tiny, np.copysign(np.float32(0), expected), expected)
    np.testing.assert_allclose(got, expected, rtol=2e-7, atol=0)
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(expected[expected == 0]))


def test_integer_and_selecting_primitives(toys: EmulatedModule) -> None:
    bits = float_samples()
    values, signed = bits.view(np.float32), bits.view(np.int32)
    np.testing.assert_array_equal(arithmetic(toys, 5, bits).view(np.float32), np.where(values > 1, values, 1))
    np.testing.assert_array_equal(arithmetic(toys, 6, bits).view(np.float32), np.where(values < 1, values, 1))
    small = signed[signed < 2**31 - 6].view(np.uint32)
    expected = np.minimum(small.view(np.int32) + 5, 100)
    np.testing.assert_array_equal(arithmetic(toys, 7, small).view(np.int32), expected)
    np.testing.assert_array_equal(arithmetic(toys, 8, bits).view(np.int32), np.minimum(signed, -3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["product", "product_of_matrices"])
def test_product_of_fragments(toys: EmulatedModule, kernel: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    for case in range(4):
        a, b = (torch.from_numpy(rng.standard_normal(shape)).to(dtype) for shape in ((16, 16), (16, 8)))
        c = rng.standard_normal((16, 8)).astype(np.float32)
        packed = torch.cat([a.flatten(), b.flatten()]).view(torch.int16).numpy().view(np.uint32)
        toy = Toy(packed, c.view(np.uint32))
        is_half = int(dtype is torch.float16)
        toy.launch(toys, kernel, option=is_half, shared_bytes=(256 + 128) * 2, seed=case)
        a32, b32 = a.float().numpy(), b.float().numpy()
        expected = c.copy()
        for k in range(16):  # the products are exact, the sums rounded one by one
            expected += a32[:, k, None] * b32[None, k, :]
        np.testing.assert_array_equal(toy.out.array.view(np.float32), expected)
        np.testing.assert_allclose(expected, c + a32.astype(np.float64) @ b32, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_loads(toys: EmulatedModule, transposed: bool) -> None:
    words = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    toy = Toy(words.view(np.uint32), 32 * 4)
    toy.launch(toys, "matrices", option=int(transposed), shared_bytes=512)
    got = toy.out.array.view(np.uint16).reshape(32, 4, 2)
    for lane in range(32):
        for matrix in range(4):
            row, first = lane // 4, 2 * (lane % 4)
            m = words[matrix].T if transposed else words[matrix]
            assert got[lane, matrix].tolist() == m[row, first : first + 2].tolist()


# ---- barriers and hand-offs


def test_shared_memory_starts_as_garbage(toys: EmulatedModule) -> None:
    toy = Toy(out=64)
    toy.launch(toys, "uninitialised", n=64, threads=128, shared_bytes=256, blocks=3)
    assert (toy.out.array == 0xFFFFFFFF).all()


def rotated(toys: EmulatedModule, seed: int, option: int, flush: str = "end") -> npt.NDArray[np.uint32]:
    toy = Toy(np.arange(128, dtype=np.uint32), 128)
    toy.launch(
        toys, "rotation", n=5, option=option, threads=128, shared_bytes=512, seed=seed, first_flush=flush
    )
    return toy.out.array.copy()


def test_block_barrier(toys: EmulatedModule) -> None:
    expected = (np.arange(128) + 5 * 33) % 128
    for seed in SEEDS:
        np.testing.assert_array_equal(rotated(toys, seed, 0, "start" if seed % 2 else "end"), expected)


def test_missing_barrier_shows_between_seeds(toys: EmulatedModule) -> None:
    results = [rotated(toys, seed, 1) for seed in SEEDS]
    assert any((result != results[0]).any() for result in results)


def test_named_barriers(toys: EmulatedModule) -> None:
    n = 9
    given = random_words(128) % 1000
    rounds = np.arange(n)
    expected = ((given[(np.arange(64) + 5) % 64, None] + rounds) * (rounds + 1)).sum(1)
    moved = np.concatenate(
        [given[(np.arange(64) + 31 * n) % 64] + n, given[64 + (np.arange(64) + 62 * n) % 64] + 2 * n]
    )
    for seed in SEEDS:
        toy = Toy(given, 64)
        toy.launch(toys, "producer_consumer", n=n, threads=128, shared_bytes=256, seed=seed)
        np.testing.assert_array_equal(toy.out.array, expected)
        toy = Toy(given, 128)
        toy.launch(toys, "two_groups", n=n, threads=128, shared_bytes=512, seed=seed)
        np.testing.assert_array_equal(toy.out.array, moved)


def chain_reference(length: int) -> npt.NDArray[np.uint32]:
    words = np.zeros((length, 32, 2), np.uint32)
    b = np.arange(32, dtype=np.uint32)
    for k in range(length):
        b = b * 3 + b[np.minimum(np.arange(32) + 1, 31)] + k
        words[k] = np.stack([np.full(32, k + 2), b], axis=1)
    return words


@pytest.mark.parametrize("relaxed", [False, True])
@pytest.mark.parametrize("resident", [1, 2, 3, 20])
def test_chain_of_blocks(toys: EmulatedModule, resident: int, relaxed: bool) -> None:
    length = 17
    for seed in SEEDS:
        for blocks in (1, 5, length):
            toy = Toy(words=length * 32)
            how: dict[str, Any] = {"blocks": blocks, "resident": resident, "seed": seed, "relaxed": relaxed}
            toy.launch(toys, "chain", n=length, **how)
            np.testing.assert_array_equal(toy.words.array.reshape(length, 32, 2), chain_reference(length))
            assert toy.counter.array[0] == length + blocks


@pytest.mark.parametrize("relaxed", [False, True])
def test_wide_words_and_plain_data_cross_blocks(toys: EmulatedModule, relaxed: bool) -> None:
    blocks = 9
    wide = np.zeros((blocks, 32, 4), np.uint32)
    v = np.stack([np.full(32, 1), np.full(32, 2), np.full(32, 3), np.arange(32)], axis=1).astype(np.uint32)
    data = np.arange(64, dtype=np.float32)
    released = []
    for k in range(blocks):
        v = np.stack([v[:, 0] + 1, v[:, 1] + v[:, 0], v[:, 2] ^ v[:, 1], v[:, 3] + v[:, 2]], axis=1)
        wide[k] = v
        data = (data if k == 0 else np.roll(data, -1)) + 1
        released.append(data)
    for seed in SEEDS:
        how: dict[str, Any] = {"blocks": blocks, "resident": 1 + seed % 4, "seed": seed, "relaxed": relaxed}
        toy = Toy(wide=blocks * 32)
        toy.launch(toys, "wide_chain", n=blocks, **how)
        np.testing.assert_array_equal(toy.wide.array.reshape(blocks, 32, 4), wide)
        toy = Toy(out=blocks * 64, counters=blocks + 1)
        toy.launch(toys, "released_chain", threads=64, shared_bytes=4, **how)
        np.testing.assert_array_equal(toy.out.array.view(np.float32).reshape(blocks, 64), np.stack(released))


def parts_whose_order_matters(count: int) -> npt.NDArray[np.uint32]:
    parts = np.random.default_rng(0).standard_normal(count) * 10.0 ** np.arange(count)
    return parts.astype(np.float32).view(np.uint32)


@pytest.mark.parametrize("relaxed", [False, True])
def test_sums_in_turn(toys: EmulatedModule, relaxed: bool) -> None:
    blocks = 7
    parts = parts_whose_order_matters(blocks)
    total, backwards = (
        functools.reduce(lambda a, b: np.float32(a + b), order)
        for order in (parts.view(np.float32), parts.view(np.float32)[::-1])
    )
    assert total != backwards
    for seed in SEEDS:
        toy = Toy(parts, 3 * 64, counters=blocks + 1)
        how: dict[str, Any] = {"blocks": blocks, "resident": 1 + seed % 4, "seed": seed, "relaxed": relaxed}
        toy.launch(toys, "sums_in_turn", threads=64, shared_bytes=4, **how)
        sums = toy.out.array.view(np.float32)
        np.testing.assert_array_equal(sums[:64], total)
        np.testing.assert_array_equal(sums[64:].reshape(64, 2), np.tile([total, -total], (64, 1)))


def test_clear_bits(toys: EmulatedModule) -> None:
    toy = Toy()
    toy.counter.array[0] = 0xFFFF1234
    toy.launch(toys, "clear", option=0x0F0F0F0F, blocks=3)
    assert toy.counter.array[0] == 0xFFFF1234 & ~0x0F0F0F0F


def messages(toys: EmulatedModule, manner: int, lane: int, relaxed: bool) -> list[int]:
    seen = []
    for seed in range(100):
        toy = Toy(out=1, counters=4, words=1)
        toy.launch(toys, "message", n=manner, option=lane, blocks=2, resident=2, seed=seed, relaxed=relaxed)
        seen.append(int(toy.out.array[0]))
    return seen


def test_relaxed_words_arrive_in_any_order(toys: EmulatedModule) -> None:
    assert 0 in messages(toys, 0, 0, True), "no order between two words"
    assert set(messages(toys, 1, 0, True)) == {7}, "a release orders the thread's own words"
    assert 0 in messages(toys, 1, 4, True), "a release does not order another lane's words"
    assert set(messages(toys, 2, 4, True)) == {7}, "it does once they have met"
    assert set(messages(toys, 0, 0, False)) == {7}, "without relaxed, words arrive as they are stored"


def test_relaxed_words_are_coherent(toys: EmulatedModule) -> None:
    for seed in SEEDS:
        toy = Toy(words=64)
        toy.launch(toys, "coherent", n=10, threads=64, seed=seed, relaxed=True)
        assert toy.counter.array[0] == 0
        assert (toy.words.array[:, 0] == 19).all(), "every word has arrived when the launch ends"


def test_equal_seeds_are_equal_runs(toys: EmulatedModule) -> None:
    def run(seed: int) -> LaunchStatistics:
        return Toy(words=9 * 32).launch(toys, "chain", n=9, blocks=9, seed=seed, relaxed=True)

    assert run(3) == run(3)
    assert len({run(seed) for seed in SEEDS}) > 5


# ---- what it detects


def fails(toy: Toy, toys: EmulatedModule, name: str, **how: Any) -> str:
    with pytest.raises(EmulationError) as caught:
        toy.launch(toys, name, **how)
    return str(caught.value)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (0, r"divergence.*(warp_barrier \(toys.*from_lane_xor|from_lane_xor \(toys.*warp_barrier)"),
        (1, r"divergence.*from_lane_xor \(toys.cu:\d+\) while.*wait in from_lane_xor \(toys.cu:"),
        (2, r"divergence.*(returns from the kernel while|1 lanes of its warp have returned)"),
        (3, r"divergence.*(returns from the kernel while|1 lanes of its warp have returned)"),
        (4, r"divergence.*group_barrier.*arguments"),
    ],
)
def test_divergence_is_detected(toys: EmulatedModule, option: int, expected: str) -> None:
    for seed in range(5):
        assert re.search(expected, fails(Toy(out=32), toys, "diverges", option=option, seed=seed))
    Toy(out=32).launch(toys, "diverges", option=9)


@pytest.mark.parametrize("flush", ["start", "end"])
@pytest.mark.parametrize("option", range(4), ids=["write", "read", "shared write", "shared read"])
def test_out_of_bounds_is_detected(toys: EmulatedModule, option: int, flush: str) -> None:
    toy = Toy(np.arange(8, dtype=np.uint32), 8, flush=flush)
    how: dict[str, Any] = {"option": option, "shared_bytes": 128, "first_flush": flush}
    name = ("buffer 'out'", "buffer 'inputs'", "shared memory of block 0", "shared memory of block 0")[option]
    size = 8 if option < 2 else 32
    toy.launch(toys, "touches", n=0, **how)
    toy.launch(toys, "touches", n=size - 1, **how)
    at, offset = (size, size * 4) if flush == "end" else (-1, -4)
    message = fails(toy, toys, "touches", n=at, **how)
    assert f"{name} {offset:+d}" in message, message
    assert "out of bounds" in message
    assert "lane 3" in message
    if option % 2 == 0 and platform.machine() == "x86_64":
        assert "write" in message
    toy.launch(toys, "touches", n=1, **how)  # the emulator survives


def test_writes_next_to_odd_sizes_are_detected(toys: EmulatedModule) -> None:
    toy = Toy(out=7)
    assert "out of bounds write after buffer 'out', at +28 of 28" in fails(toy, toys, "touches", n=7)
    message = fails(Toy(), toys, "touches", n=5, option=2, shared_bytes=20)
    assert "past the 20 bytes of shared memory" in message


def test_readonly_and_misaligned_and_foreign_addresses_are_detected(toys: EmulatedModule) -> None:
    toy = Toy(np.zeros(4, np.uint32))
    toy.out = toy.inputs
    assert "buffer 'inputs' +4" in fails(toy, toys, "touches", n=1)
    assert "misaligned" in fails(Toy(words=2), toys, "touches", n=1, option=4)
    assert "buffer 'words' +16" in fails(Toy(words=2), toys, "touches", n=4, option=4, relaxed=True)
    Toy(out=32).launch(toys, "loads_matrices_at", n=16, shared_bytes=528)
    for n, size in ((8, 1024), (32, 528), (-16, 1024)):
        message = fails(Toy(out=32), toys, "loads_matrices_at", n=n, shared_bytes=size)
        assert "bad address" in message
        assert "load_matrices (toys.cu" in message


def test_waiting_for_a_block_that_cannot_start_is_detected(toys: EmulatedModule) -> None:
    for seed in range(8):
        Toy().launch(toys, "grid_barrier", n=6, blocks=6, resident=6, seed=seed)
        message = fails(Toy(), toys, "grid_barrier", n=6, blocks=6, resident=5, seed=seed)
        assert "deadlock" in message
        assert "5 of 6 blocks started" in message
        assert re.search(
            r"block 4, warp 0 polls in lane 0 at (wait_a_little|load_acquire) \(toys.cu:\d+\)", message
        )


def test_barrier_mistakes_are_detected(toys: EmulatedModule) -> None:
    message = fails(Toy(), toys, "lonely_barrier", option=0, threads=64)
    assert "deadlock" in message
    assert re.search(
        r"block 0, warp 0 waits at group_barrier \(toys.cu:\d+\) number 3 for 64 threads", message
    )
    assert "barrier mismatch" in fails(Toy(), toys, "lonely_barrier", option=1, threads=96)
    assert "bad barrier" in fails(Toy(), toys, "lonely_barrier", option=2, n=16, threads=64)
    assert "bad barrier" in fails(Toy(), toys, "lonely_barrier", option=2, n=0, threads=64)
    Toy().launch(toys, "lonely_barrier", option=3, threads=64)


@pytest.mark.parametrize(
    ("option", "right", "wrong"),
    [(0, 7, 8), (1, 3, 4), (2, 31, 32), (3, 2, 3), (4, 8, 4), (5, 1, 0)],
    ids=["array in shared memory", "local array", "shift", "float to integer", "misaligned", "division"],
)
def test_undefined_behaviour_is_detected(toys: EmulatedModule, option: int, right: int, wrong: int) -> None:
    toy = Toy(np.arange(8, dtype=np.uint32), 1)
    toy.launch(toys, "undefined", n=right, option=option, shared_bytes=64)
    message = fails(toy, toys, "undefined", n=wrong, option=option, shared_bytes=64)
    assert ("division by zero" if option == 5 else "undefined behaviour") in message


@pytest.mark.parametrize("option", [0, 1])
def test_endless_loop_is_ended(toys: EmulatedModule, option: int) -> None:
    assert "out of time" in fails(Toy(out=1), toys, "endless", option=option, cpu_seconds=0.1)


def test_stack_overflow_is_detected(toys: EmulatedModule) -> None:
    Toy(out=1).launch(toys, "deep", n=10)
    assert "stack overflow" in fails(Toy(out=1), toys, "deep", n=1000)


# ---- races


@pytest.fixture(scope="module")
def watched() -> EmulatedModule:
    return build([TOYS], races=True)


def test_ordered_accesses_are_no_races(watched: EmulatedModule) -> None:
    given = np.arange(128, dtype=np.uint32)
    for seed in range(6):
        how: dict[str, Any] = {"seed": seed, "resident": 1 + seed % 3, "relaxed": seed % 2 == 1}
        for kernel in ("rotation", "producer_consumer", "two_groups"):
            toy = Toy(given, 128)
            toy.launch(watched, kernel, n=4, threads=128, shared_bytes=512, blocks=1, **how)
        toy = Toy(words=9 * 32)
        toy.launch(watched, "chain", n=9, blocks=4, **how)
        np.testing.assert_array_equal(toy.words.array.reshape(9, 32, 2), chain_reference(9))
        Toy(out=9 * 64, counters=10).launch(
            watched, "released_chain", threads=64, shared_bytes=4, blocks=9, **how
        )
        Toy(given, 3 * 64, counters=6).launch(
            watched, "sums_in_turn", threads=64, shared_bytes=4, blocks=5, **how
        )
        Toy(out=32).launch(watched, "neighbours", option=0, shared_bytes=128, **how)
        toy = Toy(out=64)
        toy.launch(watched, "close_together", threads=64, shared_bytes=192, **how)
        np.testing.assert_array_equal(toy.out.array, 2 * np.arange(63, -1, -1))
        toy = Toy(random_words(192), np.zeros((16, 8), np.uint32))
        toy.launch(watched, "product_of_matrices", shared_bytes=768, **how)


@pytest.mark.parametrize(
    ("kernel", "option", "expected"),
    [
        ("rotation", 1, "shared memory of block 0"),
        ("neighbours", 1, "shared memory of block 0"),
        ("neighbours", 2, "shared memory of block 0"),
        ("neighbours", 3, "shared memory of block 0"),
        ("neighbours", 5, "buffer 'out'"),
        ("released_chain", 1, "buffer 'out'"),
        ("released_chain", 2, "buffer 'out'"),
        ("released_chain", 4, "buffer 'out'"),
        ("sums_in_turn", 1, "buffer 'out'"),
        ("plain_word", 0, "buffer 'words'"),
    ],
)
def test_races_are_detected_with_every_seed(
    watched: EmulatedModule, kernel: str, option: int, expected: str
) -> None:
    threads = {"rotation": 128, "released_chain": 64, "sums_in_turn": 64}.get(kernel, 32)
    for seed in range(6):
        toy = Toy(np.arange(128, dtype=np.uint32), 3 * 64, counters=8, words=2)
        how: dict[str, Any] = {
            "threads": threads,
            "shared_bytes": 512,
            "seed": seed,
            "resident": 1 + seed % 3,
        }
        blocks = 1 if threads == 128 or kernel == "neighbours" else 3
        message = fails(toy, watched, kernel, n=3, option=option, blocks=blocks, **how)
        assert re.search(f"race: .* nothing that orders the two, {expected}", message), message
        if shutil.which("addr2line"):
            assert re.search(r"at toys\.cu:\d+, after toys\.cu:\d+$", message), message


def test_a_lane_may_do_as_it_likes_with_its_own_bytes(watched: EmulatedModule) -> None:
    Toy(out=32).launch(watched, "neighbours", option=4, shared_bytes=128)


# ---- the same sources on the device


def device_binary(architecture: str) -> bytes:
    from cuda.core import Program, ProgramOptions

    source = TOYS.read_text().replace('#include "primitives.cuh"', PRIMITIVES.read_text())
    return bytes(Program(source, "c++", ProgramOptions(arch=architecture, std="c++17")).compile("cubin").code)


def test_toys_are_cuda() -> None:
    """What the emulator is tested with is what NVIDIA's compiler understands."""
    assert device_binary("sm_90")


class Device:
    """Launches the toys on the GPU, in the emulator's place."""

    def __init__(self) -> None:
        from cuda.bindings import driver
        from cuda.core import Device as CoreDevice
        from cuda.core import ObjectCode

        torch.cuda.init()
        torch.cuda.current_stream().synchronize()
        CoreDevice(0).set_current()
        properties = torch.cuda.get_device_properties(0)
        self._driver = driver
        self._code = ObjectCode.from_cubin(device_binary(f"sm_{properties.major}{properties.minor}"))

    def launch(self, toy: Toy, name: str, *, n: int = 0, option: int = 0, **how: int) -> None:
        buffers = [toy.inputs, toy.out, toy.counter, toy.words, toy.wide]
        tensors = [torch.from_numpy(b.array.reshape(-1).view(np.uint8).copy()).cuda() for b in buffers]
        params = Params(*(tensor.data_ptr() for tensor in tensors), n, option)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        handle = int(self._code.get_kernel(name).handle)
        grid = (how.get("blocks", 1), 1, 1, how.get("threads", 32), 1, 1)
        (status,) = self._driver.cuLaunchKernel(
            handle, *grid, how.get("shared_bytes", 0), 0, ctypes.addressof(arguments), 0
        )
        assert not status
        torch.cuda.synchronize()
        for buffer, tensor in zip(buffers[1:], tensors[1:], strict=True):
            buffer.array.reshape(-1).view(np.uint8)[:] = tensor.cpu().numpy()


@pytest.fixture(scope="module")
def device_toys() -> Device:
    return Device()


def on_both(toys: EmulatedModule, device: Device, make: Any, name: str, **how: Any) -> tuple[Toy, Toy]:
    emulated, real = make(), make()
    emulated.launch(toys, name, **how)
    device.launch(real, name, **how)
    return emulated, real


@pytest.mark.gpu
def test_primitives_equal_the_hardware(toys: EmulatedModule, device_toys: Device) -> None:
    def check(make: Any, name: str, **how: Any) -> None:
        emulated, real = on_both(toys, device_toys, make, name, **how)
        for mine, theirs in (
            (emulated.out, real.out),
            (emulated.words, real.words),
            (emulated.wide, real.wide),
        ):
            np.testing.assert_array_equal(mine.array, theirs.array, err_msg=f"{name} {how}")

    for kind in range(4):
        check(lambda: Toy(random_words(64), 256), "shuffles", n=kind, option=5)
    bits = np.unique(float_samples())
    bits = bits[~np.isnan(bits.view(np.float32))]  # the bits of a NaN are not part of the promise
    halves = np.arange(2**16, dtype=np.uint32)
    halves = halves[~np.isnan(halves.astype(np.uint16).view(np.float16))]
    check(lambda: Toy(halves, halves.size), "arithmetic", n=halves.size, option=0)
    for option in (1, 2, 5, 6, 7, 8, 9, 10, 11):
        check(lambda: Toy(bits, bits.size), "arithmetic", n=bits.size, option=option)
    for option in (0, 1):
        check(lambda: Toy(random_words(128), 128), "matrices", option=option, shared_bytes=512)
    given = random_words(128) % 1000
    check(lambda: Toy(given, 128), "rotation", n=5, threads=128, shared_bytes=512)
    check(lambda: Toy(given, 64), "producer_consumer", n=9, threads=128, shared_bytes=256)
    check(lambda: Toy(given, 128), "two_groups", n=9, threads=128, shared_bytes=512)
    check(lambda: Toy(words=17 * 32), "chain", n=17, blocks=5)
    check(lambda: Toy(wide=9 * 32), "wide_chain", n=9, blocks=9)
    released = {"threads": 64, "shared_bytes": 4, "blocks": 9}
    check(lambda: Toy(out=9 * 64, counters=10), "released_chain", **released)
    check(lambda: Toy(parts_whose_order_matters(9), 3 * 64, counters=10), "sums_in_turn", **released)


@pytest.mark.gpu
@pytest.mark.parametrize("option", [3, 4], ids=["exp2", "reciprocal"])
def test_approximations_are_near_the_hardware(toys: EmulatedModule, device_toys: Device, option: int) -> None:
    values = np.concatenate(
        [float_samples().view(np.float32), np.linspace(-150, 130, 9999, dtype=np.float32)]
    )
    bits = values.view(np.uint32)
    how = {"n": bits.size, "option": option}
    emulated, real = on_both(toys, device_toys, lambda: Toy(bits, bits.size), "arithmetic", **how)
    mine, theirs = emulated.out.array.view(np.float32), real.out.array.view(np.float32)
    np.testing.assert_allclose(mine, theirs, rtol=5e-7, atol=0)
    np.testing.assert_array_equal(np.signbit(mine[mine == 0]), np.signbit(theirs[theirs == 0]))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["product", "product_of_matrices"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_near_the_hardware(
    toys: EmulatedModule, device_toys: Device, kernel: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    packed = torch.randn(16 * 16 + 16 * 8).to(dtype).view(torch.int16).numpy().view(np.uint32)
    c = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    how = {"option": int(dtype is torch.float16), "shared_bytes": 768}
    emulated, real = on_both(toys, device_toys, lambda: Toy(packed, c.view(np.uint32)), kernel, **how)
    mine, theirs = emulated.out.array.view(np.float32), real.out.array.view(np.float32)
    np.testing.assert_allclose(
        mine, theirs, rtol=0, atol=1e-5
    )  # the hardware sums in another order, truncating


# ---- building


def test_builds_are_cached_and_fail_clearly(tmp_path: Path) -> None:
    assert build([TOYS])._path == build([TOYS], {})._path
    assert build([TOYS], {"UNUSED": 1})._path == build([TOYS])._path
    broken = tmp_path / "broken.cu"
    broken.write_text('#include "primitives.cuh"\nDEVICE u32 f() {\n  return unknown_name;\n}\n')
    with pytest.raises(EmulationError, match=r"broken.cu:3(.|\n)*unknown_name"):
        build([broken])


def test_neighbours_are_included_and_macros_choose_variants(tmp_path: Path) -> None:
    (tmp_path / "shared.cuh").write_text(
        '#pragma once\n#include "primitives.cuh"\n'
        "struct Params { u32* out; };\nDEVICE u32 answer() { return ANSWER; }\n"
    )
    kernel = tmp_path / "kernel.cu"
    kernel.write_text(
        '#include "primitives.cuh"\n#include "shared.cuh"\n#include "shared.cuh"\n#if ANSWER == 42\n'
        "KERNEL THREADS_PER_BLOCK(32 * (1 + 1), 2)\n"
        "  right(GRID_CONSTANT const Params p) { *p.out = answer(); }\n"
        "#else\nKERNEL other(GRID_CONSTANT const Params p) {}\n#endif\n"
    )

    class Small(ctypes.Structure):
        _fields_ = (("out", ctypes.c_void_p),)

    module = build([kernel], {"ANSWER": 42})
    out = GuardedBuffer(np.zeros(1, np.uint32), "out")
    module.launch("right", Small(out.address), blocks=1, threads=64, shared_bytes=0)
    assert out.array[0] == 42
    assert build([kernel], {"ANSWER": 1}).kernels == ("other",)
    with pytest.raises(ValueError, match="no kernel 'other'"):
        module.launch("other", Small(out.address), blocks=1, threads=32, shared_bytes=0)
    with pytest.raises(ValueError, match="params has 48 bytes, the kernel's Params 8"):
        module.launch("right", Params(), blocks=1, threads=32, shared_bytes=0)
    with pytest.raises(ValueError, match="multiple of 32"):
        module.launch("right", Small(out.address), blocks=1, threads=33, shared_bytes=0)


def test_portable_fibers_work_too() -> None:
    module = build([TOYS], flags=["-DEMULATOR_UCONTEXT"])
    toy = Toy(words=5 * 32)
    toy.launch(module, "chain", n=5, blocks=5, resident=2)
    np.testing.assert_array_equal(toy.words.array.reshape(5, 32, 2), chain_reference(5))
    assert "buffer 'out' +16" in fails(Toy(out=4), module, "touches", n=4)


def test_buffers_hold_any_shape_and_outlive_their_owner(toys: EmulatedModule) -> None:
    array = GuardedBuffer(np.arange(12.0).reshape(3, 4), "a").array
    np.testing.assert_array_equal(array, np.arange(12.0).reshape(3, 4))
    params = Params(out=array.ctypes.data, n=24)
    with pytest.raises(EmulationError, match=r"buffer 'a' \+96"):
        toys.launch("touches", params, blocks=1, threads=32, shared_bytes=0)
    raw = GuardedBuffer(10, "raw", align=2)
    assert (raw.array == 0xFF).all()
    assert raw.address % 4096 == 4096 - 10
    assert GuardedBuffer(np.empty((0, 3)), "empty").array.shape == (0, 3)
    with pytest.raises(ValueError, match="flush"):
        GuardedBuffer(4, "x", flush="middle")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="align"):
        GuardedBuffer(4, "x", align=3)
