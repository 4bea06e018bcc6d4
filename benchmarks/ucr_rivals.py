"""The same tasks with the DTW of aeon (1-NN) and of tslearn, each in a process of its own under a time limit.

python -m benchmarks.ucr_rivals aeon GunPoint        a line of JSON a task
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .ucr_data import Split
from .ucr_methods import accuracy, rand_index

Answers = dict[str, Callable[[], Any]]
TASKS = {"aeon": ("1-NN",), "tslearn": ("1-NN", "nearest centroid", "k-means")}


def aeon(train: Split, test: Split, n_init: int, max_iter: int) -> Answers:
    """Predicted labels from aeon's pairwise DTW; its averages alone take over a minute to compile."""
    from aeon.distances import dtw_pairwise_distance

    x, queries = _channels_first(train), _channels_first(test)
    return {"1-NN": lambda: train.labels[dtw_pairwise_distance(queries, x, n_jobs=2).argmin(1)]}


def tslearn(train: Split, test: Split, n_init: int, max_iter: int) -> Answers:
    """Predicted labels by task, from tslearn's cdist_dtw, DBA and k-means."""
    from tslearn.barycenters import dtw_barycenter_averaging
    from tslearn.clustering import TimeSeriesKMeans
    from tslearn.metrics import cdist_dtw
    from tslearn.utils import to_time_series_dataset

    def dataset(split: Split) -> Any:
        return to_time_series_dataset([one.numpy() for one in split.series])

    classes = train.labels.unique()

    def centroid() -> Any:
        centres = [dtw_barycenter_averaging(dataset(train.take(train.labels == k))) for k in classes]
        return classes[cdist_dtw(dataset(test), to_time_series_dataset(centres), n_jobs=2).argmin(1)]

    def k_means() -> Any:
        model = TimeSeriesKMeans(
            len(classes), metric="dtw", n_init=n_init, max_iter=max_iter, max_iter_barycenter=10,
            random_state=0, n_jobs=2,
        )  # fmt: skip
        return model.fit(dataset(train)).labels_

    return {
        "1-NN": lambda: train.labels[cdist_dtw(dataset(test), dataset(train), n_jobs=2).argmin(1)],
        "nearest centroid": centroid,
        "k-means": k_means,
    }


RIVALS = {"aeon": aeon, "tslearn": tslearn}


def measure(rival: str, name: str, limit: float) -> dict[str, dict[str, Any]]:
    """score, seconds and status by task; what is not finished within the limit says so."""
    command = [sys.executable, "-m", "benchmarks.ucr_rivals", rival, name]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, cwd=Path(__file__).resolve().parent.parent
        )
        output, reason = run.stdout, run.stderr.strip().splitlines()[-1:] or ["no answer"]
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
        reason = [f"not within {limit:g} s in all"]
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    answers = {answer.pop("task"): answer for answer in found}
    return {task: answers.get(task, {"status": reason[0]}) for task in TASKS[rival]}


def _channels_first(split: Split) -> Any:
    arrays = [np.ascontiguousarray(one.numpy().T) for one in split.series]
    return np.stack(arrays) if split.lengths is None else arrays


def main() -> None:
    from .ucr import K_MEANS, part_of

    rival, name = sys.argv[1:]
    warnings.simplefilter("ignore")
    data = part_of(name)
    # Both libraries compile what they need on first use: a small problem of the same kind comes first.
    few = torch.cat([(data.train.labels == k).nonzero()[:2, 0] for k in data.train.labels.unique()])
    small = data.train.take(few)
    warm_up = RIVALS[rival](small, small, 1, 1)
    answers = RIVALS[rival](data.train, data.test, **K_MEANS)
    for task, answer in answers.items():
        truth = data.train.labels if task == "k-means" else data.test.labels
        line: dict[str, Any] = {"task": task}
        try:
            warm_up[task]()
            start = time.perf_counter()
            labels = torch.as_tensor(np.asarray(answer()))
            score = (rand_index if task == "k-means" else accuracy)(labels, truth)
            line |= {"score": score, "seconds": time.perf_counter() - start, "status": "ok"}
        except Exception as error:  # a rival's own limits are a result, too
            line["status"] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
