"""CPU speed beside tslearn and pysdtw, memory at L = 20,000, and what a band saves.

    python -m benchmarks.cpu_targets [--threads 2] [--only speed memory band] [--write]

Speed and band are the best of several runs in float32, providers taken in turn so that a busy moment of the
machine hits all of them. The band's figures are CPU time summed over the threads, which other programs on the
machine disturb less than wall time. Peers that are not installed (`pip install tslearn pysdtw`)
are reported as such. Memory is the peak resident size over the size before, in a fresh process after a small
call (Linux only).
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import platform
import re
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


def best(
    losses: dict[str, Loss],
    x: Tensor,
    y: Tensor,
    budget_s: float,
    backward: bool = True,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Fastest run of each, taken in turn after a warm-up, for about ``budget_s`` of each one's own time."""
    fastest: dict[str, float] = {}
    spent = dict.fromkeys(losses, 0.0)
    for loss in losses.values():
        seconds(loss, x, y, backward)
    while True:
        waiting = [name for name in losses if spent[name] < budget_s]
        if not waiting:
            return fastest
        for name in waiting:
            taken = seconds(losses[name], x, y, backward, clock)
            spent[name] += taken
            fastest[name] = min(taken, fastest.get(name, taken))


def speed(budget_s: float) -> Iterable[Row]:
    losses, missing = providers()
    for line in missing:
        print(line)
    for batch, length, dimension in SPEED_CASES:
        case = f"speed B={batch} L={length} D={dimension}"
        fastest = best(losses, *sequences(batch, length, dimension), budget_s)
        for name, taken in fastest.items():
            ratio = taken / fastest["softdtw_cuda"]
            verdict = f"  ours is {ratio:.1f}x faster ({verdict_of(ratio, SPEED_TARGET)})"
            print(f"{case:28s} {name:14s} {taken * 1e3:10.2f} ms{'' if name == 'softdtw_cuda' else verdict}")
            yield Row(case, name, "forward+backward", taken * 1e3, "ms")


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
            fastest = best(losses, x, y, budget_s, backward, time.process_time)
            ratio = fastest["whole"] / fastest["band"]
            print(
                f"{case:28s} {metric:17s} whole {fastest['whole'] * 1e3:8.2f} ms, band "
                f"{fastest['band'] * 1e3:8.2f} ms: {ratio:.2f}x ({verdict_of(ratio, BAND_TARGET)})"
            )
            for name, taken in fastest.items():
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
    old = []
    if RESULTS.exists():
        with RESULTS.open(newline="") as file:
            old = list(csv.reader(file))[1:]
    # Device, benchmark, provider and metric say what a row is of; the same thing measured again replaces it.
    merged = {(row[1], *row[3:6]): row for row in [*old, *new]}
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["date", "device", "versions", *Row._fields, "command"])
        writer.writerows(merged.values())
    print(f"{len(rows)} rows written to {RESULTS}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    everything = ("speed", "memory", "band")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=everything, default=everything)
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each provider and case")
    parser.add_argument("--write", action="store_true", help=f"put the figures into {RESULTS.name}")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    if "speed" in options.only:
        rows += speed(options.seconds)
    if "memory" in options.only:
        rows += memory(options.threads)
    if "band" in options.only:
        rows += band(options.seconds)
    if options.write:
        write(rows, options.threads)


if __name__ == "__main__":
    main()
