"""What the host does for a small call, beside what it does for torch's own `x.sum().backward()`.

    python -m benchmarks.host_time [--device cuda] [--write]

A call and its `backward()` and torch's own follow each other in one loop, so that what else the machine does
hits both; the figure is the median of their ratios. Work on the GPU is not waited for. B = 16, L = 64, D = 8,
with fixed arguments, with a gamma that changes at every step, and with new lengths on the device.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from softdtw_cuda import SoftDTW

from . import records
from .worker import cpu_name

BATCH, STEPS, FEATURES = 16, 64, 8
CALLS, WARM_UP = 400, 50


class Ratio(NamedTuple):
    """One way to call: the median of the ratios, and the medians of both times in microseconds."""

    call: str
    ratio: float
    microseconds: float
    torch_microseconds: float


def measure(device: str, calls: int = CALLS) -> Iterator[Ratio]:
    """Each way to call, in a loop of its own."""
    x = torch.randn(BATCH, STEPS, FEATURES, device=device, requires_grad=True)
    y = torch.randn(BATCH, STEPS, FEATURES, device=device)
    lengths = [torch.randint(1, STEPS + 1, (BATCH,), device=device) for _ in range(calls)]
    loss = SoftDTW(gamma=1.0, reduction="mean")

    def fixed(step: int) -> Tensor:
        value: Tensor = loss(x, y)
        return value

    def changing_gamma(step: int) -> Tensor:
        loss.gamma = 1.0 / (1 + step)
        return fixed(step)

    def changing_lengths(step: int) -> Tensor:
        value: Tensor = loss(x, y, lengths[step], lengths[-step])
        return value

    def torchs(step: int) -> Tensor:
        return x.sum()

    def seconds(function: Callable[[int], Tensor], step: int) -> float:
        x.grad = None
        start = time.perf_counter()
        torch.autograd.backward(function(step))
        taken = time.perf_counter() - start
        if device == "cuda":
            torch.cuda.synchronize()
        return taken

    for function in (fixed, changing_gamma, changing_lengths):
        loss.gamma = 1.0
        pairs = [(seconds(function, k), seconds(torchs, k)) for k in range(calls)][min(WARM_UP, calls // 2) :]
        ours, theirs = (statistics.median(times) * 1e6 for times in zip(*pairs, strict=True))
        yield Ratio(function.__name__, statistics.median(a / b for a, b in pairs), ours, theirs)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--calls", type=int, default=CALLS, help="steps of each loop")
    parser.add_argument("--write", action="store_true", help="put the figures into a CSV file")
    parser.add_argument("--output", type=Path, default=records.RESULTS, help="another folder for --write")
    options = parser.parse_args(arguments)
    device = torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()
    about = {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "versions": f"python {platform.python_version()}; torch {torch.__version__}",
        "command": f"python -m benchmarks.host_time --device {options.device} --write",
    }
    rows = []
    for each in measure(options.device, options.calls):
        print(
            f"{each.call} {each.ratio:.2f} times x.sum().backward() "
            f"({each.microseconds:.0f} / {each.torch_microseconds:.0f} us)",
            flush=True,
        )
        row = {
            name: f"{value:.4g}" if isinstance(value, float) else value
            for name, value in each._asdict().items()
        }
        rows.append({**row, **about})
    if options.write:
        records.replace(options.output / f"host-time-{records.slug(device)}.csv", rows, ("call",))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
