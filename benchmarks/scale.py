"""Whole jobs, from series on the host to results on the host: all pairs, neighbours, k-means.

    python -m benchmarks.scale [--device cuda] [--only 10,000] [--share 0.1] [--quick] [--write] [--resume]
    python -m benchmarks.scale --device cpu --processes 1 2 3 4 [--write]

On a CPU the sizes are smaller, and no target is set. `--share` is the part of the queries of the largest
search that is computed; its time is then divided by that part, and marked. `--resume` leaves out what the
same command has written today. With `--processes` all pairs of
one size are computed by so many processes of one thread each (gloo), in place of the other jobs, and then as
many pairs of two steps each, for what is not cells; the time is the CPU time of the busiest of them, which
depends little on what else the cores do.
"""

# ruff: noqa: RUF001 (names of jobs have multiplication signs)

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from softdtw_cuda import distributed, softdtw_cdist, softdtw_knn

from . import records
from .worker import cpu_name

RESULTS = Path(__file__).resolve().parent / "results"
ENOUGH_SECONDS = 4.0
"""Of a job that takes less, up to three runs are made."""
RUNS_OF_PROCESSES = 3


class Job(NamedTuple):
    """What is computed. `required` and `target` are seconds of one H200, for the full size."""

    name: str
    kind: str
    rows: int
    columns: int
    steps: int
    features: int = 1
    required: float | None = None
    target: float | None = None
    clusters: int = 0


CUDA = (
    Job("all pairs of 10,000", "cdist", 10_000, 0, 100, required=2.5, target=1.2),
    Job("all pairs of 25,000", "cdist", 25_000, 0, 60, required=6, target=3),
    Job("1000 × 8236", "cdist", 1000, 8236, 1024, required=14, target=10),
    Job("10 nearest, 100,000 × 100,000", "knn", 100_000, 100_000, 128, required=320, target=160),
    Job("10 nearest, 20,000 × 20,000", "knn", 20_000, 20_000, 128, 8, required=25, target=12),
    Job(
        "k-means of 300,000, k = 10, 10 rounds", "k-means", 300_000, 0, 48, required=30, target=8, clusters=10
    ),
    Job("k-means of 115, k = 20, 10 rounds", "k-means", 115, 0, 4000, required=10, target=4, clusters=20),
)
CPU = (
    Job("all pairs of 1000", "cdist", 1000, 0, 100),
    Job("all pairs of 2500", "cdist", 2500, 0, 60),
    Job("20 × 160", "cdist", 20, 160, 1024),
    Job("10 nearest, 1000 × 1000", "knn", 1000, 1000, 128),
    Job("10 nearest, 300 × 300", "knn", 300, 300, 128, 8),
    Job("k-means of 300, k = 10, 10 rounds", "k-means", 300, 0, 48, clusters=10),
)
QUICK = (
    Job("all pairs of 30", "cdist", 30, 0, 20),
    Job("10 × 20", "cdist", 10, 20, 30),
    Job("10 nearest, 40 × 30", "knn", 40, 30, 16),
    Job("k-means of 30, k = 3, 10 rounds", "k-means", 30, 0, 12, clusters=3),
)
SHARED = Job("all pairs of 1600", "cdist", 1600, 0, 128)
"""The job that processes share: some 25 s of one core, so that what others do on the machine averages out."""
WITHOUT_CELLS = SHARED._replace(steps=2)
"""As many pairs with hardly a cell: to begin, to list pairs, to bring all values to every process."""


class Row(NamedTuple):
    """A measured job. `share` is the part that was computed; `seconds` are for the whole."""

    job: str
    rows: int
    columns: int
    steps: int
    features: int
    route: str
    processes: int
    cells: int
    seconds: str
    runs: int
    share: str
    required: str
    target: str


def series(count: int, job: Job, seed: int) -> np.ndarray:
    """Random walks of unit variance."""
    generator = np.random.default_rng(seed)
    walks = generator.standard_normal((count, job.steps, job.features), dtype=np.float32).cumsum(1)
    return np.ascontiguousarray(walks / walks.std(axis=(1, 2), keepdims=True))


def cells(job: Job) -> int:
    """Of the pairs that are computed; none for k-means, where they depend on the data."""
    pairs = job.rows * job.columns or job.rows * (job.rows + 1) // 2
    return 0 if job.kind == "k-means" else pairs * job.steps**2


def routes(job: Job, device: str, share: float) -> Iterator[tuple[str, Callable[[int | None], object]]]:
    """The ways to do a job. Each takes how many series to use, for a warm-up; None: all."""
    x = series(job.rows, job, 0)
    y = series(job.columns, job, 1) if job.columns else None

    if job.kind == "cdist":

        def whole(few: int | None) -> object:
            first = torch.from_numpy(x[:few]).to(device)
            second = None if y is None else torch.from_numpy(y[:few]).to(device)
            with torch.no_grad():
                return softdtw_cdist(first, second).cpu()

        def tiles(few: int | None) -> object:
            return distributed.cdist(x[:few], None if y is None else y[:few], device=device)

        yield "softdtw_cdist", whole
        yield "distributed.cdist", tiles
    elif job.kind == "knn":
        assert y is not None
        queries, database = torch.from_numpy(x[: round(share * len(x))]), torch.from_numpy(y)
        yield "softdtw_knn", lambda few: softdtw_knn(queries[:few], database[:few], 10, device=device)
    else:
        from softdtw_cuda.estimators import SoftDTWKMeans  # needs scikit-learn

        def fit(few: int | None) -> object:
            model = SoftDTWKMeans(
                n_clusters=min(job.clusters, few or job.clusters),
                max_iter=1 if few else 10,
                tol=0.0,
                random_state=0,
                device=device,
            )
            model.fit(x[:few])
            if few is None and model.n_iter_ < 10:
                raise RuntimeError(f"{job.name}: k-means stopped after {model.n_iter_} rounds, expected 10.")
            return model.labels_

        yield "SoftDTWKMeans", fit


def measure(call: Callable[[int | None], object]) -> list[float]:
    """Seconds of a few runs, or of one that is long."""
    call(16)  # kernels are compiled, or loaded, on first use
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < ENOUGH_SECONDS:
        start = time.perf_counter()
        call(None)
        taken.append(time.perf_counter() - start)
    return taken


def run(
    jobs: Sequence[Job], device: str, share: float, done: Collection[tuple[str, str]] = ()
) -> Iterator[Row]:
    """Every job by every route, but for the jobs and routes that are done."""
    for job in jobs:
        # The search that would take minutes; the others are computed whole.
        part = share if job.kind == "knn" and cells(job) > 1e14 else 1.0
        try:
            for route, call in routes(job, device, part):
                if (job.name, route) not in done:
                    taken = measure(call)
                    yield row_of(job, route, 1, statistics.median(taken), len(taken), part)
        except ImportError as error:
            print(f"{job.name}: left out, {error}", flush=True)


def row_of(job: Job, route: str, processes: int, taken: float, runs: int, part: float = 1.0) -> Row:
    """A row for what took so long, printed."""
    seconds = taken / part
    targets = ["" if each is None else f"{each:g}" for each in (job.required, job.target)]
    row = Row(
        job.name, job.rows, job.columns, job.steps, job.features, route, processes, cells(job),
        f"{seconds:.4g}", runs, f"{part:g}", *targets,
    )  # fmt: skip
    speed = f"{row.cells / seconds / 1e9:7.3g} Gcells/s" if row.cells else ""
    note = f" (from {part:.0%} of the queries)" if part < 1 else ""
    print(
        f"{job.name:38} {route:18} {processes} process{'es' if processes > 1 else '':2} {seconds:9.3g} s "
        f"{speed}  required {row.required or '-':>4} target {row.target or '-':>4}{note}",
        flush=True,
    )
    return row


def share_work(rank: int, processes: int, folder: str) -> None:
    """One of the processes; the first writes down how long the busiest worked."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting-{processes}", rank=rank, world_size=processes
    )
    lines = []
    for job in (SHARED, WITHOUT_CELLS):
        x = series(job.rows, job, 0)
        distributed.cdist(x[:16], device="cpu")
        taken = []
        for _ in range(RUNS_OF_PROCESSES):
            start = time.process_time()
            distributed.cdist(x, device="cpu")
            busiest = torch.tensor(time.process_time() - start)
            torch.distributed.all_reduce(busiest, torch.distributed.ReduceOp.MAX)
            taken.append(busiest.item())
        lines.append(" ".join(map(str, taken)))
    if rank == 0:
        Path(f"{folder}/{processes}").write_text("\n".join(lines))
    torch.distributed.destroy_process_group()


def run_processes(counts: Sequence[int]) -> Iterator[Row]:
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]  # not annotated
                share_work, (count, folder), count
            )
            lines = Path(f"{folder}/{count}").read_text().splitlines()
        for job, line in zip((SHARED, WITHOUT_CELLS), lines, strict=True):
            taken = [float(each) for each in line.split()]
            yield row_of(job, "distributed.cdist", count, min(taken), len(taken))


def origin(device: str, command: str) -> records.Row:
    """Where and when rows of this run come from."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "versions": f"python {platform.python_version()}; torch {torch.__version__}",
        "command": command,
    }


def write(rows: Sequence[Row], about: records.Row, folder: Path) -> Path:
    """Into scale-DEVICE.csv, in place of what is there of the same jobs, routes and numbers of processes."""
    path = folder / f"scale-{records.slug(about['device'])}.csv"
    new = [{**{name: str(value) for name, value in row._asdict().items()}, **about} for row in rows]
    records.replace(path, new, ("job", "steps", "route", "processes"))
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--share", type=float, default=0.1, help="part of the largest search (default: 0.1)")
    parser.add_argument("--processes", type=int, nargs="+", metavar="N", help="numbers of CPU processes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--write", action="store_true", help="put the figures into results/scale-DEVICE.csv")
    parser.add_argument("--output", type=Path, default=RESULTS, help="another folder for --write")
    parser.add_argument("--only", metavar="TEXT", help="jobs with TEXT in their name")
    parser.add_argument("--resume", action="store_true", help="leave out what this command has written today")
    options = parser.parse_args(arguments)
    if not 0.0 < options.share <= 1.0:
        parser.error(f"--share must be above 0 and at most 1, got {options.share}.")
    name = f"{cpu_name()}, {os.cpu_count()} cores"
    if options.device == "cuda" and not options.processes:
        name = torch.cuda.get_device_name()
    about = origin(name, _command(options))
    jobs = jobs_of(options.device, options.quick)
    jobs = tuple(job for job in jobs if options.only is None or options.only in job.name)
    done = set()
    if options.resume:
        old = records.read_any(options.output / f"scale-{records.slug(name)}.csv")
        done = {(row["job"], row["route"]) for row in old if row.items() >= about.items()}
    rows = (
        run_processes(options.processes)
        if options.processes
        else run(jobs, options.device, options.share, done)
    )
    for row in rows:  # each is written when it is measured: a run that is stopped keeps what it has
        if options.write:
            write([row], about, options.output)
    return 0


def jobs_of(device: str, quick: bool) -> tuple[Job, ...]:
    return QUICK if quick else {"cuda": CUDA, "cpu": CPU}[device]


def _command(options: Any) -> str:
    if options.processes:
        return f"python -m benchmarks.scale --processes {' '.join(map(str, options.processes))} --write"
    quick = " --quick" if options.quick else ""
    return f"python -m benchmarks.scale --device {options.device} --share {options.share:g}{quick} --write"


if __name__ == "__main__":
    raise SystemExit(main())
