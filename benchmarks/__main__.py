"""The benchmarks: time, memory and accuracy of Soft-DTW libraries side by side.

python -m benchmarks                      every suite on the GPU if there is one, else on the CPU
python -m benchmarks --quick              a minute's look: tables and pictures
python -m benchmarks run --suite paper --peer BGU=../sdtw-cuda-torch --peer Maghoumi=../pytorch-softdtw-cuda
python -m benchmarks release --peer ...   every published figure of a GPU again, before a release
python -m benchmarks plot                 the plots, from the CSV files alone, into output/benchmarks
python -m benchmarks table                the tables as Markdown, from the CSV files alone
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import records, release, tables
from .cases import SUITES, cases_of
from .providers import Provider, from_checkout, installed

ROOT = Path(__file__).resolve().parent.parent
QUICK_RESULTS = ROOT / "output" / "benchmarks"


def parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    main = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=formatter
    )
    commands = main.add_subparsers(dest="command", required=True)

    suites = "\n".join(f"  {name:12s}{text}" for name, text in SUITES.items())
    run = commands.add_parser(
        "run", help="measure (the default)", description=f"Suites:\n{suites}", formatter_class=formatter
    )
    run.add_argument("--suite", nargs="+", choices=SUITES, default=list(SUITES), metavar="SUITE")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run.add_argument("--quick", action="store_true", help="a small grid, written to output/benchmarks")
    run.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="measure a checkout as well: the paper's library, Maghoumi's, pysdtw, tslearn, another version "
        "of this library, or any folder with a benchmark_adapter.py; may be repeated",
    )
    run.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="only providers with TEXT in their name; may be repeated",
    )
    run.add_argument("--seconds", type=float, help="sampling time for each provider and case")
    run.add_argument(
        "--limit", type=float, help="seconds after which a provider's work on a case is given up"
    )
    run.add_argument("--threads", type=int, help="CPU threads")
    run.add_argument("--output", type=Path, help="folder of the CSV files (benchmarks/results)")
    run.add_argument("--no-progress", action="store_true", help="no progress bar")
    run.add_argument("--resume", action="store_true", help="leave out what this command has measured today")

    whole = commands.add_parser(
        "release",
        help="measure every published figure of a device again, part by part",
        description=release.__doc__,
        formatter_class=formatter,
    )
    release.add_arguments(whole)

    plot = commands.add_parser("plot", help="draw PNG and SVG from the CSV files")
    plot.add_argument("--results", type=Path, default=records.RESULTS, help="folder of the CSV files")
    plot.add_argument(
        "--output",
        type=Path,
        default=QUICK_RESULTS,
        help="folder of the plots (output/benchmarks; those of the pages are in docs/assets/benchmarks)",
    )

    table = commands.add_parser(
        "table",
        help="print Markdown tables from the CSV files",
        description=tables.__doc__,
        formatter_class=formatter,
    )
    table.add_argument("--results", type=Path, default=records.RESULTS, help="folder of the CSV files")
    table.add_argument(
        "--write", type=Path, nargs="+", metavar="FILE", help="renew the tables in these documents"
    )
    return main


def command_line(arguments: Sequence[str]) -> str:
    """The command for the table, without the folders of this machine and what changes no figure."""
    shown = []
    for argument, last in zip(arguments, ["", *arguments], strict=False):
        option, separator, value = argument.partition("=")
        if "--output" in (option, last) or option in ("--no-progress", "--resume"):
            continue
        if last == "--peer":
            argument = f"{option}=PATH"
        elif separator and option == "--peer":
            argument = f"--peer={value.split('=')[0]}=PATH"
        shown.append(argument)
    return " ".join(["python -m benchmarks", *shown])


def choose_providers(peers: Sequence[str], only: Sequence[str] | None) -> list[Provider]:
    found, missing = installed()
    for line in missing:
        if not any(peer.startswith(line.split()[0] + "=") for peer in peers):
            print(line)
    for peer in peers:
        found += from_checkout(peer)
    names = [provider.name for provider in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two providers are called {name!r}; give the --peer another name.")
    if only is not None:
        found = [p for p in found if any(text.lower() in p.name.lower() for text in only)]
    if not found:
        raise ValueError(f"--only {' '.join(only or [])} leaves no provider.")
    return found


def run(options: argparse.Namespace, command: str) -> None:
    from .runner import Runner, Settings, unfinished

    device = options.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    usual = {"cuda": (0.15, 10.0), "cpu": (1.0, 60.0)}[device]
    if options.quick:
        usual = (0.1, 15.0)
    settings = Settings(
        device=device,
        seconds=options.seconds or usual[0],
        limit=options.limit or usual[1],
        threads=options.threads,
        command=command,
    )
    folder = options.output or (QUICK_RESULTS if options.quick else records.RESULTS)
    providers = choose_providers(options.peer, options.only)
    cases = [case for suite in options.suite for case in cases_of(suite, device, options.quick)]
    names = ", ".join(provider.name for provider in providers)
    today = {"date": datetime.date.today().isoformat(), "command": command}.items()
    done = [row for row in records.read_folder(folder) if options.resume and row.items() >= today]
    left = unfinished(cases, providers, done)
    print(f"{len(cases)} cases on {device}, {len(cases) - len(left)} of them measured before: {names}")
    start = time.perf_counter()
    rows = []
    if left:
        with Runner(providers, settings) as runner:
            rows = runner.run(cases, folder, progress=not options.no_progress, done=done)
    show(rows)
    if options.quick:
        pictures = [path for path in draw(rows, folder) if path.suffix == ".png"]
        print("pictures:", *pictures, sep="\n  ")
    unable = sum(row["status"] == "unsupported" for row in rows)
    failed = sum(row["status"] != "ok" for row in rows) - unable
    print(f"CSV files: {folder}")
    seconds = time.perf_counter() - start
    print(f"{len(rows)} rows, {failed} failures, {unable} unsupported, in {seconds:.0f} s")


def draw(rows: Sequence[records.Row], folder: Path) -> list[Path]:
    """Every plot that the rows can fill; none, and a line about it, without matplotlib."""
    try:
        from .plots import draw_all

        return draw_all(rows, folder)
    except ModuleNotFoundError as error:
        print(f"no pictures: {error} (pip install matplotlib)")
        return []


def show(rows: Sequence[records.Row]) -> None:
    """Every table that the rows can fill."""
    for suite, device in dict.fromkeys((row["suite"], row["device"]) for row in rows):
        here = [row for row in rows if (row["suite"], row["device"]) == (suite, device)]
        metrics = {row["metric"] for row in here}
        for metric in ("time", "memory", "memory per cell", "host time", "gradient error"):
            if metric in metrics:
                print(
                    f"\n### {suite}: {metric}, {device}\n\n{tables.markdown(here, suite, metric, device)}",
                    end="",
                )
    print()


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and run; 0, or 2 with a line about what is wrong with the arguments."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given.insert(0, "run")
    options = parser().parse_args(given)
    try:
        if options.command == "run":
            run(options, command_line(given))
            return 0
        if options.command == "release":
            return release.main(options)
        rows = records.newest(records.read_folder(options.results))
        if not rows:
            raise ValueError(f"no results in {options.results}; measure first: python -m benchmarks run")
        if options.command == "plot":
            from .plots import draw_all, draw_clustering, draw_cpu_throughput, draw_second_order_errors

            written = draw_all(rows, options.output)
            if (options.results / "cpu.csv").exists():
                written += draw_cpu_throughput(options.results / "cpu.csv", options.output)
            for path in sorted(options.results.glob("error_budget_second_order_*.csv")):
                written += draw_second_order_errors(path, options.output)
            for path in sorted(options.results.glob("clustering-cpu.csv")):
                written += draw_clustering(path, options.output)
            print(*written, sep="\n")
        elif options.write:
            for path in tables.write(options.write, rows):
                print(f"renewed {path}")
        else:
            show(rows)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
