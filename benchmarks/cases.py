"""What is measured: the grids of every suite, as plain data that needs neither torch nor a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

FORWARD_BACKWARD = "forward+backward"
FORWARD = "forward"
HESSIAN_PRODUCT = "hessian product"
"""Value, gradient and the Hessian's product with a vector, of both sides."""
EXPECTED_COST = "expected cost"
"""The position's expected cost and its gradient."""
SECOND_ORDER = HESSIAN_PRODUCT, EXPECTED_COST
SPEED, HOST, ACCURACY = "speed", "host", "accuracy"

SUITES = {
    "targets": "the sizes the GPU kernels were designed for, float32 and bfloat16, and host time per call",
    "throughput": "many pairs, by length and number of features, forward and forward + backward",
    "paper": "Tables 1 and 2 of the paper: peak memory and wall-clock over B and L",
    "lengths": "the paper's figure: memory and time against L",
    "dimensions": "the paper's figure: memory and time against D",
    "accuracy": "relative error of value and gradient against float64, over L, D and gamma",
    "second_order": "Hessian-vector products and expected costs: time and memory",
    "extensions": "long, wide, many; bfloat16, bands, lengths, divergence, forward only",
}


@dataclass(frozen=True)
class Case:
    """One problem: x (batch, n, d) against y (batch, m, d), squared Euclidean.

    Args:
        kind: SPEED for time and memory, HOST for the host's time per call, ACCURACY for errors.
        lengths: "full", or "ragged" for true lengths between n // 2 and n.
        ours_only: no provider but this library is asked.
    """

    suite: str
    batch: int
    n: int
    m: int
    d: int
    gamma: float = 1.0
    bandwidth: int | None = None
    dtype: str = "float32"
    mode: str = FORWARD_BACKWARD
    normalize: bool = False
    lengths: str = "full"
    kind: str = SPEED
    ours_only: bool = False

    @property
    def cells(self) -> int:
        """Cells of all pairs that lie inside the band."""
        if self.bandwidth is None:
            return self.batch * self.n * self.m
        return self.batch * min(self.n * self.m, max(self.n, self.m) * (2 * self.bandwidth + 1))

    @property
    def label(self) -> str:
        parts = [f"B={self.batch} L={self.n}" + (f"x{self.m}" if self.m != self.n else "") + f" D={self.d}"]
        if self.gamma != 1.0:
            parts.append(f"gamma={self.gamma:g}")
        if self.bandwidth is not None:
            parts.append(f"band={self.bandwidth}")
        if self.dtype != "float32":
            parts.append(self.dtype)
        if self.normalize:
            parts.append("divergence")
        if self.lengths != "full":
            parts.append(self.lengths)
        if self.mode != FORWARD_BACKWARD:
            parts.append(self.mode)
        if self.kind == HOST:
            parts.append("host time")
        return " ".join(parts)

    @property
    def columns(self) -> dict[str, str]:
        """The case in the columns of the CSV."""
        return {
            "suite": self.suite,
            "mode": self.mode,
            "normalize": "yes" if self.normalize else "no",
            "lengths": self.lengths,
            "B": str(self.batch),
            "N": str(self.n),
            "M": str(self.m),
            "D": str(self.d),
            "gamma": f"{self.gamma:g}",
            "bandwidth": "" if self.bandwidth is None else str(self.bandwidth),
            "dtype": self.dtype,
        }

    def includes(self, other: Case) -> bool:
        """Whether this case is `other` or the same thing at a size that is nowhere smaller."""
        same = (
            self.suite == other.suite
            and self.kind == other.kind
            and self.mode == other.mode
            and self.dtype == other.dtype
            and self.normalize == other.normalize
            and self.lengths == other.lengths
            and self.bandwidth == other.bandwidth
        )
        sizes = zip(
            (self.batch, self.n, self.m, self.d), (other.batch, other.n, other.m, other.d), strict=True
        )
        return same and all(mine >= theirs for mine, theirs in sizes)


def cases_of(suite: str, device_type: str, quick: bool = False) -> list[Case]:
    """The grid of one suite for "cuda" or "cpu".

    Raises:
        ValueError: naming a suite that does not exist.
    """
    if suite not in SUITES:
        raise ValueError(f"suite is {suite!r}, expected one of {', '.join(SUITES)}.")
    if quick:
        return list(_quick(suite, device_type == "cuda"))
    return list({"cuda": _gpu, "cpu": _cpu}[device_type](suite))


def _square(suite: str, batch: int, length: int, d: int, **options: object) -> Case:
    return Case(suite, batch, length, length, d, **options)  # type: ignore[arg-type]


def _host(suite: str) -> Case:
    return _square(suite, 16, 64, 8, kind=HOST)


def _accuracy(lengths: tuple[int, ...], dims: tuple[int, ...], gammas: tuple[float, ...]) -> Iterator[Case]:
    for length, d, gamma in itertools.product(lengths, dims, gammas):
        yield _square("accuracy", 4, length, d, gamma=gamma, kind=ACCURACY)


TARGETS = {
    (32, 128, 64): (0.12, 0.06),
    (32, 512, 64): (0.35, 0.20),
    (32, 1024, 64): (0.9, 0.5),
    (32, 2048, 64): (2.5, 1.2),
    (1, 4096, 64): (2.0, 1.0),
    (512, 1024, 64): (9.0, 5.0),
    (512, 1024, 1): (1.8, 1.3),
}
"""B, L and D of the sizes that the GPU kernels were designed for; milliseconds that a forward and a backward
of float32 are required to take at most on an H200, and their target."""

HOST_RATIO = 3.0
"""How many times as long as torch's own `x.sum().backward()` a small call may keep the host of a GPU busy."""

SECOND_ORDER_SIZES = ((32, 512), (32, 2048), (1, 4096), (512, 1024))
"""B and L, for 64 features, at which second order is timed on a GPU."""


def _second_order(sizes: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    for (batch, length), mode in itertools.product(sizes, (*SECOND_ORDER, FORWARD_BACKWARD)):
        yield _square("second_order", batch, length, 64, mode=mode)


THROUGHPUT_BATCH = {64: 65536, 128: 16384, 512: 2048, 1024: 512}
"""How many pairs of each length fill a GPU."""
THROUGHPUT_DIMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def _throughput(batch_of: dict[int, int], dims: tuple[int, ...]) -> Iterator[Case]:
    for (length, batch), d in itertools.product(batch_of.items(), dims):
        for mode in (FORWARD, FORWARD_BACKWARD):
            yield _square("throughput", batch, length, d, mode=mode, ours_only=True)


def _gpu(suite: str) -> Iterator[Case]:
    if suite == "targets":
        for (batch, length, d), dtype in itertools.product(TARGETS, ("float32", "bfloat16")):
            yield _square(suite, batch, length, d, dtype=dtype, ours_only=True)
        yield _host(suite)
    elif suite == "throughput":
        yield from _throughput(THROUGHPUT_BATCH, THROUGHPUT_DIMS)
    elif suite == "second_order":
        yield from _second_order(SECOND_ORDER_SIZES)
    elif suite == "paper":
        for batch, length in itertools.product((16, 32), (128, 512, 1024, 2048)):
            yield _square(suite, batch, length, 64)
    elif suite == "lengths":
        for length in (64, 128, 256, 512, 1024, 2048):
            yield _square(suite, 32, length, 128)
    elif suite == "dimensions":
        for d in (8, 16, 32, 64, 128, 256):
            yield _square(suite, 32, 256, d)
    elif suite == "extensions":
        for length in (4096, 8192, 16384, 32768, 65536):
            yield _square(suite, 1, length, 8)
        for length in (4096, 65536):
            yield _square(suite, 1, length, 8, mode=FORWARD)
        for d in (128, 256, 512, 1024):
            yield _square(suite, 32, 512, d)
        for batch in (1000, 10_000, 100_000):
            yield _square(suite, batch, 64, 8)
        yield _square(suite, 32, 2048, 64)
        for dtype in ("bfloat16", "float16", "float64"):
            yield _square(suite, 32, 2048, 64, dtype=dtype, ours_only=True)
        for batch, length, d in ((32, 512, 1), (32, 512, 64), (1, 2048, 64)):
            yield _square(suite, batch, length, d, dtype="float64", ours_only=True)
        for bandwidth in (204, 50):
            yield _square(suite, 32, 2048, 64, bandwidth=bandwidth)
        yield _square(suite, 32, 2048, 64, lengths="ragged")
        yield _square(suite, 32, 512, 64, normalize=True)
        yield _square(suite, 32, 2048, 64, mode=FORWARD)
    else:
        yield from _accuracy((128, 512, 1024), (1, 16, 64), (0.01, 0.1, 1.0, 10.0))


def _cpu(suite: str) -> Iterator[Case]:
    if suite == "targets":
        for batch, length, d in ((32, 128, 64), (32, 512, 64), (1, 4096, 64), (1, 4096, 1)):
            yield _square(suite, batch, length, d, ours_only=True)
        yield _square(suite, 32, 512, 64, dtype="bfloat16", ours_only=True)
        yield _host(suite)
    elif suite == "throughput":
        yield from _throughput({128: 512}, (1, 3, 8, 64))
    elif suite == "second_order":
        yield from _second_order(((4, 128), (1, 512)))
    elif suite == "paper":
        for batch, length in itertools.product((4, 8), (64, 128, 256, 512)):
            yield _square(suite, batch, length, 64)
    elif suite == "lengths":
        for length in (64, 128, 256, 512, 1024):
            yield _square(suite, 4, length, 128)
    elif suite == "dimensions":
        for d in (8, 32, 128, 256):
            yield _square(suite, 4, 256, d)
    elif suite == "extensions":
        for length in (1024, 2048, 4096, 8192):
            yield _square(suite, 1, length, 8)
        for d in (256, 1024):
            yield _square(suite, 4, 256, d)
        for batch in (100, 1000):
            yield _square(suite, batch, 64, 8)
        yield _square(suite, 2, 1024, 64)
        yield _square(suite, 2, 1024, 64, dtype="bfloat16", ours_only=True)
        yield _square(suite, 2, 1024, 64, bandwidth=102)
        yield _square(suite, 2, 1024, 64, lengths="ragged")
        yield _square(suite, 2, 256, 64, normalize=True)
        yield _square(suite, 2, 1024, 64, mode=FORWARD)
    else:
        yield from _accuracy((128, 512), (1, 64), (0.01, 0.1, 1.0, 10.0))


def _quick(suite: str, gpu: bool) -> Iterator[Case]:
    batch = 16 if gpu else 2
    if suite == "targets":
        yield (
            _square(suite, 32, 512, 64, ours_only=True) if gpu else _square(suite, 4, 256, 64, ours_only=True)
        )
        yield _host(suite)
    elif suite == "throughput":
        yield from _throughput({64: 4096 if gpu else 64}, (1, 8))
    elif suite == "second_order":
        yield from _second_order(((16, 256) if gpu else (2, 64),))
    elif suite == "paper":
        for length in (128, 512) if gpu else (64, 128):
            yield _square(suite, batch, length, 64)
    elif suite == "lengths":
        for length in (64, 128, 256):
            yield _square(suite, batch, length, 128)
    elif suite == "dimensions":
        for d in (8, 64):
            yield _square(suite, batch, 128, d)
    elif suite == "extensions":
        yield _square(suite, 1, 2048 if gpu else 1024, 8)
        yield _square(suite, batch, 256, 64, bandwidth=25)
    else:
        yield from _accuracy((256,) if gpu else (128,), (16,), (0.01, 0.1, 1.0))
