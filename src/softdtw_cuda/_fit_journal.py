"""Where a fit of k-means is, in the journal of its first output: one that was killed goes on from there.

`reached.npz` has the job, by the hash of its series' content, and the last `Progress`. It is written whole or
not at all after each start and each round, and kept after the end: it says that the outputs are finished.
"""

from __future__ import annotations

import errno
import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ._journal import difference, folder_of, lock, write_whole
from ._kmeans import Clusters, Progress
from ._series import Array

FORMAT = 1


class FitJournal:
    """Of one process; the others get what it finds.

    Args:
        outputs: files for the centers and for the labels.
        job: all that the bits of the result depend on, of what JSON has.
        runs: that the fit makes.
    """

    def __init__(self, outputs: Sequence[Path], job: Mapping[str, object], runs: int) -> None:
        self.outputs, self.runs = list(outputs), runs
        self.path = folder_of(self.outputs[0]) / "reached.npz"
        others = [os.path.relpath(each.resolve(), self.path.parent.parent) for each in self.outputs[1:]]
        self.job = json.loads(json.dumps({"format": FORMAT, **job, "other outputs": others}))
        self._lock: BinaryIO | None = None

    def __enter__(self) -> FitJournal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def begin(self, overwrite: bool, restarted: bool) -> Progress | None:
        """What an earlier fit of this job has reached.

        Args:
            overwrite: start again, whatever is there.
            restarted: an earlier start of this run may have overwritten already. What is of this job is kept.

        Raises:
            BlockingIOError: another run is at it.
            FileExistsError: an output exists that this job has not made, or there is progress of another one.
        """
        self._lock = lock(self.outputs[0])
        job, progress = self._read()
        if overwrite and not (restarted and job == self.job):
            for path in (*self.outputs, self.path):
                path.unlink(missing_ok=True)
            return None
        if job is not None and job != self.job:
            raise _exists(f"the output belongs to another job: {difference(job, self.job)}", self.outputs[0])
        made = () if progress is None or not self.is_complete(progress) else results(progress)
        for path, array in zip(self.outputs, made or (None, None), strict=True):
            if path.exists() and not (array is not None and _holds(path, array)):
                raise _exists("the output exists and is not of this job", path)
        return progress

    def is_complete(self, progress: Progress) -> bool:
        return progress.ended and progress.run == self.runs - 1

    def keep(self, progress: Progress) -> None:
        """Write out where the fit is."""
        generator = dict(progress.random)
        generator["state"] = {**generator["state"], "key": generator["state"]["key"].tolist()}
        described: dict[str, Any] = {"job": self.job, "random": generator}
        described |= {"run": progress.run, "ended": progress.ended}
        arrays: dict[str, Any] = {}
        for name, clusters in (("clusters", progress.clusters), ("best", progress.best)):
            if clusters is not None:
                described[name] = {"inertia": clusters.inertia, "rounds": clusters.rounds}
                arrays[f"{name}_centers"] = clusters.centers.numpy(force=True)
                arrays[f"{name}_labels"] = clusters.labels
        file = io.BytesIO()
        np.savez(file, described=np.array(json.dumps(described)), **arrays)
        write_whole(self.path, file.getvalue())

    def _read(self) -> tuple[dict[str, Any] | None, Progress | None]:
        try:
            with np.load(self.path, allow_pickle=False) as file:
                found = dict(file)
        except (FileNotFoundError, ValueError, EOFError, zipfile.BadZipFile):
            return None, None
        described = json.loads(str(found["described"]))
        generator = described["random"]
        generator["state"]["key"] = np.array(generator["state"]["key"], dtype=np.uint32)
        clusters = [
            Clusters(torch.from_numpy(found[f"{name}_centers"]), found[f"{name}_labels"], **described[name])
            if name in described
            else None
            for name in ("clusters", "best")
        ]
        assert clusters[0] is not None
        return described["job"], Progress(
            described["run"], clusters[0], described["ended"], clusters[1], generator
        )


def results(progress: Progress) -> tuple[Array, Array]:
    """Centers and labels of the best run."""
    best, last = progress.best, progress.clusters
    found = last if best is None or last.inertia < best.inertia else best
    return found.centers.numpy(force=True), found.labels


def _holds(path: Path, array: Array) -> bool:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return False
    return bool(found.dtype == array.dtype and np.array_equal(found, array))


def _exists(problem: str, path: Path) -> FileExistsError:
    return FileExistsError(
        errno.EEXIST, f"{problem}; choose another name, or allow to overwrite it", str(path)
    )
