"""The tidy CSV: one row a measurement, replaced when the same thing is measured again on the same device."""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

Row = dict[str, str]

KEY = (
    "suite", "device", "provider", "metric", "mode", "normalize", "lengths",
    "B", "N", "M", "D", "gamma", "bandwidth", "dtype",
)  # fmt: skip
VALUES = ("p20", "p50", "p80", "unit", "samples", "status", "method", "note")
ORIGIN = ("date", "python", "torch", "numba", "library", "command")
COLUMNS = (*KEY, *VALUES, *ORIGIN)

RESULTS = Path(__file__).resolve().parent / "results"


def key(row: Row) -> tuple[str, ...]:
    """What two rows must share to be the same measurement."""
    return tuple(row[column] for column in KEY)


def case_key(row: Row) -> tuple[str, ...]:
    """What all metrics of a provider's work on one case share."""
    return tuple(row[column] for column in KEY if column != "metric")


def runs(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Date and command (which has the limits) of each run that the rows come from, the oldest first.

    Only rows of one run may stand beside each other as a comparison.
    """
    return sorted({(row["date"], row["command"]) for row in rows})


def slug(text: str) -> str:
    """A name for files: lower case, hyphens for everything that is not a letter or a digit."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def file_of(folder: Path, suite: str, device: str) -> Path:
    return folder / f"{slug(suite)}-{slug(device)}.csv"


def read(path: Path) -> list[Row]:
    """Rows of a file; none if it is not one of these tables.

    Raises:
        ValueError: when two rows of the file have the same key.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            return []
        rows = list(reader)
    if len({key(row) for row in rows}) != len(rows):
        raise ValueError(f"{path.name} holds two rows with one key; delete the older of them.")
    return rows


def read_folder(folder: Path) -> list[Row]:
    """Rows of every table in a folder."""
    return [row for path in sorted(folder.glob("*.csv")) for row in read(path)]


def newest(rows: Sequence[Row]) -> list[Row]:
    """The rows for readers: of a case that two suites share, the figures of the later day in both."""

    def case(row: Row) -> tuple[str, ...]:
        return tuple(row[column] for column in KEY if column not in ("suite", "metric"))

    days: dict[tuple[str, ...], str] = {}
    for row in rows:
        days[case(row)] = max(row["date"], days.get(case(row), ""))
    latest = {(case(row), row["metric"]): row for row in rows if row["date"] == days[case(row)]}
    return [
        row if row["date"] == days[case(row)] else latest[case(row), row["metric"]] | {"suite": row["suite"]}
        for row in rows
        if (case(row), row["metric"]) in latest
    ]


def upsert(folder: Path, rows: Iterable[Row]) -> list[Path]:
    """Write rows into the files of their suite and device, in place of what is there of their cases.

    A case that fails has fewer metrics than one that does not; older ones must not stay beside the failure.

    Raises:
        ValueError: when a row lacks a column, has one too many, or a file of that name is something else.
    """
    by_file: dict[Path, list[Row]] = {}
    for row in rows:
        if set(row) != set(COLUMNS):
            raise ValueError(
                f"a row must have exactly the columns {', '.join(COLUMNS)}, got {', '.join(row)}."
            )
        by_file.setdefault(file_of(folder, row["suite"], row["device"]), []).append(row)
    for path, new in by_file.items():
        old = read(path) if path.exists() else []
        if path.exists() and not old and path.stat().st_size:
            raise ValueError(f"{path.name} exists with other columns; move it away.")
        cases, keys = {case_key(row) for row in new}, {key(row) for row in new}
        kept = [row for row in old if key(row) in keys or case_key(row) not in cases]
        write(path, list({key(row): row for row in [*kept, *new]}.values()), COLUMNS)
    return list(by_file)


def read_any(path: Path) -> list[Row]:
    """Rows of a file with whatever columns; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def replace(path: Path, rows: Iterable[Row], keys: Sequence[str]) -> None:
    """Write rows into a file with whatever columns, in place of those that agree in the columns `keys`."""
    merged = {tuple(row[column] for column in keys): row for row in [*read_any(path), *rows]}
    if merged:
        write(path, list(merged.values()), list(next(reversed(merged.values()))))


def write(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """A file of rows. A run that is killed while it writes leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """20th, 50th and 80th percentile, with linear interpolation; NaN if a sample is."""
    if any(math.isnan(sample) for sample in samples):
        return math.nan, math.nan, math.nan
    ordered = sorted(samples)

    def at(share: float) -> float:
        position = share * (len(ordered) - 1)
        low = math.floor(position)
        high = min(low + 1, len(ordered) - 1)
        if ordered[low] == ordered[high]:  # infinities included, whose difference is NaN
            return ordered[low]
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    return at(0.2), at(0.5), at(0.8)
