"""Measures the working tree against a git revision, in turns; says where it is slower.

    python tools/compare_speed.py REVISION                              the suite "targets"
    python tools/compare_speed.py REVISION --suite throughput paper    others of `python -m benchmarks run -h`
    python tools/compare_speed.py REVISION --rounds 9 --only "D=64"     more rounds, fewer cases

The revision is checked out as a git worktree in a temporary folder. Each round starts a process for either
side, which measures every case; the sides alternate case by case, and take turns at being first. A round's
two times of a case were taken seconds apart, so what the machine does meanwhile is in both, and their ratio
is the figure: the table has its median over the rounds, with the least and the greatest. Exit status 1 means
that a case is slower by more than the limit, or fails where the revision does not.

Inputs, CUDA graphs and timers are those of `benchmarks` in the working tree, for both sides. A case that one
of them cannot compute has no ratio, and says why.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases import ACCURACY, HOST, SPEED, SUITES, Case, cases_of  # noqa: E402
from benchmarks.providers import Provider  # noqa: E402
from benchmarks.runner import Settings, Worker  # noqa: E402

SIDES = "before", "after"


class Timing(NamedTuple):
    """What one side's process says of a case: the median of its times in ms, or why there is none."""

    milliseconds: float | None
    note: str = ""


class Comparison(NamedTuple):
    """A case with the timings of its rounds, (before, after) each."""

    case: Case
    rounds: list[tuple[Timing, Timing]]

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Of the rounds in which both sides have a time."""
        return [
            (before.milliseconds, after.milliseconds)
            for before, after in self.rounds
            if before.milliseconds is not None and after.milliseconds is not None
        ]

    @property
    def ratios(self) -> list[float]:
        """Time after over time before, round by round."""
        return [after / before for before, after in self.pairs]

    def is_worse(self, limit: float) -> bool:
        """Slower by more than `limit`, in percent, or failing where the revision does not."""
        if self.ratios:
            return statistics.median(self.ratios) > 1 + limit / 100
        return any(before.milliseconds is not None for before, _ in self.rounds)

    def cells(self, limit: float) -> list[str]:
        """The row of the table."""
        name = f"{self.case.suite}: {self.case.label}"
        if not self.ratios:
            notes = [
                f"{side}: {timing.note}"
                for side, timing in zip(SIDES, self.rounds[0], strict=True)
                if timing.milliseconds is None
            ]
            return [name, "", "", "", "", "; ".join(notes)]
        before, after = (statistics.median(times) for times in zip(*self.pairs, strict=True))
        ratios = self.ratios
        verdict = "slower" if self.is_worse(limit) else ""
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        return [name, f"{before:.4g}", f"{after:.4g}", f"{statistics.median(ratios):.3f}", spread, verdict]


def table(comparisons: Sequence[Comparison], limit: float) -> str:
    """In Markdown."""
    head = ["case", "before, ms", "after, ms", "ratio", "rounds", f"by more than {limit:g} %"]
    rows = [head, *(each.cells(limit) for each in comparisons)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    rule = "|-" + "-|-".join("-" * width for width in widths) + "-|"
    return "\n".join([lines[0], rule, *lines[1:]])


@contextlib.contextmanager
def checkout_of(revision: str) -> Iterator[Path]:
    """A worktree of the revision, for as long as it is needed."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "before"
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), revision], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def timing_of(worker: Worker, case: Case) -> Timing:
    """Prepares, measures and releases a case."""
    answer: dict[str, Any] = worker.ask(
        do="prepare", case=asdict(case), memory=False, graph=case.kind == SPEED
    )
    if answer["status"] == "ok":
        answer = worker.ask(do="measure", seconds=worker.settings.seconds, host=case.kind == HOST)
    if answer["status"] != "ok":
        return Timing(None, f"{answer['status']}: {answer['note']}")
    times = next(iter(answer["times"].values()))  # the first method has the least of the host's part
    worker.ask(do="release")
    return Timing(statistics.median(times))


def compare(
    before: Path, after: Path, cases: Sequence[Case], settings: Settings, rounds: int
) -> list[Comparison]:
    """Every case on both sides, whose sources the paths are, in each round by processes of their own."""
    comparisons = [Comparison(case, []) for case in cases]
    for number in range(rounds):
        workers = [
            Worker(Provider(side, "ours", "fused", str(sources)), settings)
            for side, sources in zip(SIDES, (before, after), strict=True)
        ]
        try:
            for position, comparison in enumerate(comparisons):
                print(f"round {number + 1} of {rounds}: {comparison.case.label}", file=sys.stderr)
                order = (0, 1) if (number + position) % 2 == 0 else (1, 0)
                found = {side: timing_of(workers[side], comparison.case) for side in order}
                comparison.rounds.append((found[0], found[1]))
        finally:
            for worker in workers:
                worker.close()
    return comparisons


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    timed = [suite for suite in SUITES if suite != "accuracy"]
    parser.add_argument("revision", help="what to compare the working tree with")
    parser.add_argument("--suite", nargs="+", choices=timed, default=["targets"], metavar="SUITE")
    parser.add_argument("--quick", action="store_true", help="the small grids of the suites")
    parser.add_argument("--only", default="", help="a regular expression of the cases that are measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seconds", type=float, default=0.3, help="sampling time of a side, round and case")
    parser.add_argument("--limit", type=float, default=3.0, help="percent that a case may be slower")
    parser.add_argument("--threads", type=int, help="CPU threads")
    options = parser.parse_args(arguments)
    device = options.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [
        case
        for suite in options.suite
        for case in cases_of(suite, device, options.quick)
        if case.kind != ACCURACY and re.search(options.only, case.label)
    ]
    if not cases:
        parser.error(f"--only {options.only!r} leaves no case.")
    settings = Settings(device=device, seconds=options.seconds, limit=300.0, threads=options.threads)
    with checkout_of(options.revision) as folder:
        comparisons = compare(folder / "src", ROOT / "src", cases, settings, options.rounds)
    print(table(comparisons, options.limit))
    worse = sum(each.is_worse(options.limit) for each in comparisons)
    print(f"\n{worse} of {len(cases)} are slower than {options.revision} by more than {options.limit:g} %")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
