"""Every published figure of a device, measured again in one go: the last thing before a release.

    python -m benchmarks release --device cuda --peer BGU=PATH [--minutes 9] [--parts NAME ...]

The work is a list of parts, each a few commands with a time limit, in processes of their own. Commands
write what they have measured as they go, so a part that fails, or is ended at its limit, costs only itself.
The same command goes on where the last one stopped, on the same day: `--minutes` is how long this one may
take, and a table at the end says what is left and which figures missed their targets.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from . import cases, records
from .providers import OURS_FUSED

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "output" / "release"
LEAST_S = 5.0
"""A command is not started with less time than this: it would be over before it has imported torch."""
OVER_BUDGET = 3
"""Exit status of a command that has measured everything, and found some of it beyond its budget."""


class Step(NamedTuple):
    """A command of a part, as arguments of `python -m`, and the seconds that it may take."""

    part: str
    command: tuple[str, ...]
    limit: float


class Outcome(NamedTuple):
    """`state` is a word or two; `said` the last line that the command printed."""

    step: Step
    state: str
    seconds: float
    said: str

    @property
    def is_finished(self) -> bool:
        return self.state == FINISHED


FINISHED = "finished"


def steps(device: str, peers: Sequence[str], quick: bool, output: Path) -> Iterator[Step]:
    """Every part in order; limits are seconds of an H200, and add up to less than half an hour."""
    from .scale import jobs_of  # imports torch

    common = ("--device", device, "--resume", "--output", str(output), *(("--quick",) if quick else ()))
    libraries = tuple(word for peer in peers for word in ("--peer", peer))

    def suites(part: str, names: Sequence[str], limit: float, *options: str) -> Step:
        options = (
            *options,
            *common,
            "--seconds",
            "0.01" if quick else "0.15",
            "--limit",
            "6",
            "--no-progress",
        )
        return Step(part, ("benchmarks", "run", "--suite", *names, *options), limit)

    yield suites("alone", ("targets", "throughput"), 150, "--only", "this library")
    yield suites("comparison", ("paper", "lengths", "dimensions"), 240, *libraries)
    yield suites("extensions", ("extensions",), 240, *libraries)
    yield suites("accuracy", ("accuracy",), 120, *libraries)
    yield suites("second-order", ("second_order",), 90, "--only", "this library", "--only", "philtorch")
    yield Step("errors", ("benchmarks.error_budget", *common, "--write"), 180)
    yield Step("second-order-errors", ("benchmarks.error_budget", "--second-order", *common, "--write"), 240)
    for job in jobs_of(device, quick):
        yield Step("jobs", ("benchmarks.scale", "--only", job.name, *common, "--write"), 60)
    if device == "cuda":
        yield Step(
            "host", ("benchmarks.host_time", "--device", device, "--output", str(output), "--write"), 40
        )


def perform(step: Step, seconds: float, log: Path) -> Outcome:
    """Run a command for at most so long, all that it prints in a file; it and its children end with it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    start = time.perf_counter()
    with log.open("a+", encoding="utf-8") as file:
        begin = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", *step.command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=seconds)
            state = FINISHED if status in (0, OVER_BUDGET) else f"failed, status {status}"
        except subprocess.TimeoutExpired:
            state = f"out of time ({seconds:.0f} s)"
        finally:
            end(process)
        file.seek(begin)
        lines = [line.strip() for line in file if line.strip()]
    return Outcome(step, state, time.perf_counter() - start, lines[-1] if lines else "")


def end(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started, whether or not it is still there."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def run(todo: Sequence[Step], seconds: float, logs: Path) -> Iterator[Outcome]:
    """All steps, one after the other, within so many seconds together."""
    until = time.perf_counter() + seconds
    for step in todo:
        left = until - time.perf_counter()
        if left < LEAST_S:
            yield Outcome(step, "not started, no time left", 0.0, "")
            continue
        print(f"{step.part}: python -m {' '.join(step.command)}", flush=True)
        outcome = perform(step, min(step.limit, left), logs / f"{step.part}.log")
        print(f"    {outcome.state} after {outcome.seconds:.0f} s: {outcome.said}", flush=True)
        yield outcome


class Verdict(NamedTuple):
    """A figure of today beside its target, in the unit of both."""

    what: str
    measured: float
    target: float

    @property
    def is_met(self) -> bool:
        # Written so that a NaN is not.
        return self.measured <= self.target


def verdicts(folder: Path, day: str) -> Iterator[Verdict]:
    """Every figure of the day that has a target; those of time are a GPU's."""
    for row in records.read_folder(folder):
        if (row["suite"], row["provider"], row["metric"], row["dtype"], row["date"]) == (
            "targets", OURS_FUSED, "time", "float32", day,
        ):  # fmt: skip
            size = (int(row["B"]), int(row["N"]), int(row["D"]))
            if size in cases.TARGETS and row["status"] == "ok" and row["method"].startswith("CUDA"):
                what = "B = {}, L = {}, D = {}, ms".format(*size)
                yield Verdict(what, float(row["p50"]), cases.TARGETS[size][1])
    for path in sorted(folder.glob("scale-*.csv")):
        for row in records.read_any(path):
            if row["date"] == day and row["target"]:
                yield Verdict(f"{row['job']}, {row['route']}, s", float(row["seconds"]), float(row["target"]))
    for path in sorted(folder.glob("error_budget_*.csv")):
        for row in records.read_any(path):
            if row["date"] == day:
                sizes = ", ".join(f"{name} = {row[name]}" for name in ("n", "m", "d", "offset", "gamma"))
                error, budget = (
                    ("gradient_error", "gradient_budget") if "what" not in row else ("error", "budget")
                )
                yield Verdict(
                    f"{row.get('what', 'gradient')}, {sizes}", float(row[error]), float(row[budget])
                )
    for path in sorted(folder.glob("host-time-*.csv")):
        for row in records.read_any(path):
            if row["date"] == day and "--device cuda" in row["command"]:
                yield Verdict(f"host time, {row['call']}", float(row["ratio"]), cases.HOST_RATIO)


def summary(outcomes: Sequence[Outcome], folder: Path) -> str:
    """A line a part, and what missed its target."""
    lines = [f"{'part':20} {'state':28} {'time':>6}  last line"]
    for part in dict.fromkeys(outcome.step.part for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.step.part == part]
        left = [outcome for outcome in mine if not outcome.is_finished]
        state = left[0].state if left else FINISHED
        if left and len(mine) > 1:
            state = f"{len(mine) - len(left)} of {len(mine)}; {state}"
        seconds = sum(outcome.seconds for outcome in mine)
        said = (left or mine)[-1].said
        lines.append(f"{part:20} {state:28} {seconds:4.0f} s  {said[:100]}")
    found = list(verdicts(folder, datetime.date.today().isoformat()))
    missed = [each for each in found if not each.is_met]
    lines.append(f"\n{len(found) - len(missed)} of {len(found)} figures of today meet their target")
    lines += [f"  missed: {each.what}: {each.measured:.3g}, target {each.target:.3g}" for each in missed]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `python -m benchmarks release`."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PATH", help="as of `run`")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these parts")
    parser.add_argument("--minutes", type=float, default=9.0, help="that this command may take (default: 9)")
    parser.add_argument("--quick", action="store_true", help="tiny grids, to see that it runs")
    parser.add_argument("--output", type=Path, default=records.RESULTS, help="folder of the CSV files")
    parser.add_argument("--logs", type=Path, default=LOGS, help="folder of what the commands print")


def main(options: argparse.Namespace) -> int:
    """Run the parts; 0 if all of them are finished.

    Raises:
        ValueError: naming a part that does not exist.
    """
    peers = []
    for peer in options.peer:  # the commands run in another folder
        name, separator, path = peer.partition("=")
        peers.append(f"{name}{separator}{Path(path).expanduser().resolve() if path else ''}")
    todo = list(steps(options.device, peers, options.quick, options.output.resolve()))
    names = list(dict.fromkeys(step.part for step in todo))
    for name in options.parts or []:
        if name not in names:
            raise ValueError(f"--parts has {name!r}, expected some of {', '.join(names)}.")
    todo = [step for step in todo if options.parts is None or step.part in options.parts]
    outcomes = list(run(todo, 60 * options.minutes, options.logs))
    print(f"\n{summary(outcomes, options.output)}")
    if all(outcome.is_finished for outcome in outcomes):
        return 0
    print(f"\nNot everything is measured; the same command goes on. What the parts printed: {options.logs}")
    return 1
