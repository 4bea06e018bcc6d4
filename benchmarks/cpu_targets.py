"""CPU speed beside tslearn and pysdtw, throughput with many pairs beside the limits of the machine, memory at
L = 20,000, and what a band saves.

    python -m benchmarks.cpu_targets [--threads 2] [--only speed throughput memory band] [--write]

Speed, throughput and band are medians of several runs in float32, providers taken in turn so that a busy
moment of the machine hits all of them. The band's figures are CPU time summed over the threads, which other
programs on the machine disturb less than wall time. Peers that are missing (`pip install tslearn pysdtw`)
are reported as such. Memory is the peak resident size over the size before, in a fresh process after a small
call (Linux only). What the machine can do is the best of several runs of simple loops (`cpu_peaks.py`).
--write puts all figures of one run into the file, in the place of whatever is there.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from softdtw_cuda import softdtw

from .worker import cpu_name

RESULTS = Path(__file__).parent / "results" / "cpu.csv"
SPEED_CASES = ((32, 512, 64), (1, 4096, 1))
SPEED_TARGET = 10.0
THROUGHPUT_CASES = tuple(
    (batch, length, d) for batch, length in ((512, 128), (32, 512)) for d in (1, 2, 3, 4, 8, 16, 32, 64)
)
PEER_CASES = tuple((512, 128, d) for d in (1, 3, 8, 64))
"""Those at which pysdtw is measured, too."""
THROUGHPUT_TARGET = 22.0
BAND_CASES = ((8, 2048, 64), (8, 2048, 1), (32, 2048, 64), (32, 2048, 1))
BAND_TARGET = 4.0
MEMORY_LENGTH, MEMORY_DIMENSION, MEMORY_TARGET_MB = 20_000, 8, 400.0

Loss = Callable[[Tensor, Tensor], Tensor]
Clock = Callable[[], float]


class Row(NamedTuple):
    benchmark: str
    provider: str
    metric: str
    value: float
    unit: str


def ours(x: Tensor, y: Tensor) -> Tensor:
    return softdtw(x, y, gamma=1.0)


def providers() -> tuple[dict[str, Loss], list[str]]:
    """The losses that can be imported, and a line for each that cannot."""
    found: dict[str, Loss] = {"softdtw_cuda": ours}
    missing = []
    try:
        from tslearn.metrics import SoftDTWLossPyTorch

        found["tslearn"] = SoftDTWLossPyTorch(gamma=1.0)
    except ImportError as error:
        missing.append(f"tslearn: NOT MEASURED, it cannot be imported here ({error})")
    try:
        import pysdtw

        found["pysdtw"] = pysdtw.SoftDTW(gamma=1.0, use_cuda=False)
    except ImportError as error:
        missing.append(f"pysdtw: NOT MEASURED, it cannot be imported here ({error})")
    return found, missing


def sequences(batch: int, length: int, dimension: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, length, dimension, generator=generator)
    y = torch.randn(batch, length, dimension, generator=generator)
    return x.requires_grad_(), y.requires_grad_()


def seconds(
    loss: Loss, x: Tensor, y: Tensor, backward: bool = True, clock: Clock = time.perf_counter
) -> float:
    x.grad = y.grad = None
    start = clock()
    total = loss(x, y).sum()
    if backward:
        total.backward()
    return clock() - start


def medians(
    losses: dict[str, Loss],
    x: Tensor,
    y: Tensor,
    budget_s: float,
    backward: bool = True,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Median time of each, taken in turn after a warm-up, for about ``budget_s`` of each one's own time."""
    taken: dict[str, list[float]] = {name: [] for name in losses}
    for loss in losses.values():
        seconds(loss, x, y, backward)
    while True:
        waiting = [name for name in losses if sum(taken[name]) < budget_s]
        if not waiting:
            return {name: statistics.median(times) for name, times in taken.items()}
        for name in waiting:
            taken[name].append(seconds(losses[name], x, y, backward, clock))


def speed(budget_s: float) -> Iterable[Row]:
    losses, missing = providers()
    for line in missing:
        print(line)
    for batch, length, dimension in SPEED_CASES:
        case = f"speed B={batch} L={length} D={dimension}"
        times = medians(losses, *sequences(batch, length, dimension), budget_s)
        yield from beside(case, times, SPEED_TARGET)


def beside(case: str, times: dict[str, float], target: float) -> Iterable[Row]:
    """Forward and backward by this library and by others."""
    for name, taken in times.items():
        ratio = taken / times["softdtw_cuda"]
        verdict = f"  ours is {ratio:.1f}x faster ({verdict_of(ratio, target)})"
        print(f"{case:30s} {name:14s} {taken * 1e3:10.2f} ms{'' if name == 'softdtw_cuda' else verdict}")
        yield Row(case, name, "forward+backward", taken * 1e3, "ms")


def throughput(budget_s: float) -> Iterable[Row]:
    losses, _ = providers()
    for batch, length, dimension in THROUGHPUT_CASES:
        case = f"throughput B={batch} L={length} D={dimension}"
        x, y = sequences(batch, length, dimension)
        names = ("softdtw_cuda", "pysdtw") if (batch, length, dimension) in PEER_CASES else ("softdtw_cuda",)
        chosen = {name: losses[name] for name in names if name in losses}
        yield from beside(case, medians(chosen, x, y, budget_s), THROUGHPUT_TARGET)
        with torch.no_grad():
            forward = medians({"softdtw_cuda": ours}, x, y, budget_s / 2, backward=False)["softdtw_cuda"]
        print(f"{case:30s} {'forward alone':14s} {forward * 1e3:10.2f} ms")
        yield Row(case, "softdtw_cuda", "forward", forward * 1e3, "ms")


def machine(threads: int) -> Iterable[Row]:
    """What this machine can do: rates for `benchmarks/bounds.py`."""
    from . import cpu_peaks

    for metric, value, unit in (
        ("multiply-adds", cpu_peaks.multiply_adds(threads), "G/s"),
        ("instructions", cpu_peaks.instructions(threads), "G/s"),
        ("memory", cpu_peaks.copied_bytes(), "GB/s"),
    ):
        print(f"{'machine':30s} {metric:14s} {value / 1e9:10.1f} {unit}")
        yield Row("machine", "", metric, value / 1e9, unit)


def verdict_of(ratio: float, target: float) -> str:
    return f"target {target:g}x {'met' if ratio >= target else 'MISSED'}"


def band(budget_s: float) -> Iterable[Row]:
    for batch, length, dimension in BAND_CASES:
        x, y = sequences(batch, length, dimension)
        losses: dict[str, Loss] = {
            "whole": ours,
            "band": functools.partial(softdtw, gamma=1.0, bandwidth=length // 10),
        }
        case = f"band L/10 B={batch} L={length} D={dimension}"
        for metric, backward in (("forward", False), ("forward+backward", True)):
            times = medians(losses, x, y, budget_s, backward, time.process_time)
            ratio = times["whole"] / times["band"]
            print(
                f"{case:28s} {metric:17s} whole {times['whole'] * 1e3:8.2f} ms, band "
                f"{times['band'] * 1e3:8.2f} ms: {ratio:.2f}x ({verdict_of(ratio, BAND_TARGET)})"
            )
            for name, taken in times.items():
                yield Row(case, f"softdtw_cuda {name}", f"{metric}, CPU time", taken * 1e3, "ms")


MEMORY_PROGRAM = """
import re, torch
from pathlib import Path
from softdtw_cuda import softdtw
torch.set_num_threads({threads})
def run(length):
    x = torch.randn(1, length, {dimension}, requires_grad=True)
    y = torch.randn(1, length, {dimension}, requires_grad=True)
    softdtw(x, y, gamma=1.0).sum().backward()
def resident(field):
    return int(re.search(field + r":\\s*(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024
run(300)
Path("/proc/self/clear_refs").write_text("5")  # start the peak again from the present size
before = resident("VmRSS")
run({length})
print("grown", (resident("VmHWM") - before) / 1e6)
"""


def memory(threads: int) -> Iterable[Row]:
    program = MEMORY_PROGRAM.format(threads=threads, dimension=MEMORY_DIMENSION, length=MEMORY_LENGTH)
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"grown ([\d.]+)", output)
    assert found is not None, output
    grown = float(found.group(1))
    verdict = "met" if grown < MEMORY_TARGET_MB else "MISSED"
    case = f"memory B=1 L={MEMORY_LENGTH} D={MEMORY_DIMENSION}"
    print(f"{case:28s} adds {grown:.1f} MB to the resident size (target < {MEMORY_TARGET_MB:g} MB {verdict})")
    yield Row(case, "softdtw_cuda", "resident growth", grown, "MB")


def write(rows: list[Row], threads: int) -> None:
    versions = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    for module in ("numba", "tslearn", "pysdtw"):
        try:
            from importlib.metadata import version

            versions.append(f"{module} {version(module)}")
        except ImportError:
            continue
    origin = [datetime.date.today().isoformat(), f"{cpu_name()}, {threads} threads", "; ".join(versions)]
    command = " ".join(["python -m benchmarks.cpu_targets", *sys.argv[1:]])
    new = [[*origin, *row[:3], f"{row.value:.4g}", row.unit, command] for row in rows]
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["date", "device", "versions", *Row._fields, "command"])
        writer.writerows(new)
    print(f"{len(rows)} rows written to {RESULTS}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    everything = ("speed", "throughput", "memory", "band")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=everything, default=everything)
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each provider and case")
    parser.add_argument(
        "--write", action="store_true", help=f"put the figures, all of one run, into {RESULTS.name}"
    )
    options = parser.parse_args()
    if options.write and set(options.only) != set(everything):
        parser.error("--write keeps the figures of one run, so it goes without --only")
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    if "speed" in options.only:
        rows += speed(options.seconds)
    if "throughput" in options.only:
        rows += machine(options.threads)
        rows += throughput(options.seconds)
    if "memory" in options.only:
        rows += memory(options.threads)
    if "band" in options.only:
        rows += band(options.seconds)
    if options.write:
        write(rows, options.threads)


if __name__ == "__main__":
    main()
