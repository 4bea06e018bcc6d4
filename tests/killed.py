"""Runs the command line again and again and kills it with SIGKILL; for test_command_line.py.

    python tests/killed.py PROCESSES KILLS SEED ARGUMENTS...

Every run is forked from here, where everything is imported, so that most kills come while it works. With
several processes one of them is killed once they have met, and the others have to end by themselves. When
it has killed KILLS times, it lets the command finish and prints what it saw, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from softdtw_cuda import _tile_work, distributed
from softdtw_cuda.__main__ import main

LIMIT = 60.0
"""Seconds for a run, or for those whose companion was killed."""


def start(rank: int, processes: int, arguments: list[str], store: str) -> int:
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        torch.set_num_threads(1)
        _tile_work.SECONDS_BETWEEN_FLUSHES = 0.0  # more moments to be killed at
        if processes > 1:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=processes
            )
            Path(f"{store}-{rank}").touch()
        status = main(arguments)
    finally:
        os._exit(status)


def wait(child: int, limit: float) -> int | None:
    """Exit status, or None where it runs longer."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return None


def journal_of(arguments: list[str]) -> Path:
    option = "--centers" if arguments[0] == "kmeans" else "--out"
    return Path(arguments[arguments.index(option) + 1] + ".journal")


def finished(arguments: list[str]) -> int:
    """Tiles, or rounds of all runs of k-means, of which one has fewer than a hundred."""
    folder = journal_of(arguments)
    reached = folder / "reached.npz"
    if reached.exists():
        with np.load(reached) as file:
            described = json.loads(str(file["described"]))
        return int(100 * described["run"] + described["clusters"]["rounds"])
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("finished-*.log"))


def run() -> dict[str, object]:
    processes, kills, seed = map(int, sys.argv[1:4])
    arguments = [*sys.argv[4:], "--no-progress"]
    chance = random.Random(seed)
    seen: dict[str, list[int]] = {"finished": [], "others": []}
    before = 0
    longest = 1.0  # seconds; a run that ends earlier shortens it, kills before any progress lengthen it
    torch.set_num_threads(1)
    distributed.cdist(torch.randn(2, 5, 1))  # loads the kernels
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1000):
            last = len(seen["finished"]) == kills
            begun = time.monotonic()
            store = f"{folder}/{number}"
            children = [start(rank, processes, arguments, store) for rank in range(processes)]
            while processes > 1 and len(list(Path(folder).glob(f"{number}-*"))) < processes:
                assert time.monotonic() - begun < LIMIT
                time.sleep(0.001)
            begun = time.monotonic()
            if last:
                return {**seen, "status": [wait(child, LIMIT) for child in children]}
            victim = chance.randrange(processes)
            status = wait(children[victim], chance.uniform(0.0, longest))
            if status is None:
                os.kill(children[victim], signal.SIGKILL)
                status = wait(children[victim], LIMIT)  # 0 where it ended just before
            others = [wait(child, LIMIT) for child in children if child != children[victim]]
            assert None not in others, "a process waits for one that was killed"
            if status == 0:
                longest = max(0.1, 0.8 * (time.monotonic() - begun))
                forget_half(arguments)
                before = 0
                continue
            assert status == -signal.SIGKILL, status
            now = finished(arguments)
            assert now >= before, "what was finished is lost"
            if now == before:  # a busy machine has not come to anything
                longest *= 1.5
            before = now
            seen["others"] += [each for each in others if each is not None]
            seen["finished"].append(now)
    raise AssertionError("the runs ended before they could be killed")


def forget_half(arguments: list[str]) -> None:
    """Of what the journal lists, or all of what k-means found, so that the next run has something to do."""
    if arguments[0] == "kmeans":
        for option in ("--centers", "--labels"):
            Path(arguments[arguments.index(option) + 1]).unlink()
        (journal_of(arguments) / "reached.npz").unlink()
    for path in journal_of(arguments).glob("finished-*.log"):
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[::2]))


if __name__ == "__main__":
    print(json.dumps(run()))
