"""Interrupts, exceptions and dying threads in CPU calls: they end soon, and the next call is right."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("numba")
from softdtw_cuda._cpu import dual_launch, launch, scratch
from softdtw_cuda._cpu import threads as cpu_threads
from softdtw_cuda._problem import Direction, Problem

needs_signals = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX signals")

COMMON = """
import os, random, signal, sys, threading, time, torch
from softdtw_cuda._cpu import launch
from softdtw_cuda._problem import Problem

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
torch.manual_seed(0)
random.seed(0)

def call(problem):
    value, state = launch.forward(problem)
    gradients = launch.backward(problem, torch.ones_like(value), value, state)
    return value, *gradients

def series(batch, length, dimensions):
    return torch.randn(batch, length, dimensions)

# Of the sizes whose scratch memory the long calls share.
OTHERS = [
    Problem(series(2, 300, 1), series(2, 300, 1), None, None, 1.0, -1, True, True),
    Problem(series(8, 150, 1), series(8, 150, 1), None, None, 1.0, -1, True, True),
    Problem(series(40, 128, 64), series(40, 128, 64), None, None, 1.0, -1, True, True),
]

def wrong_calls(repetitions):
    return sum(
        not torch.equal(found, wanted)
        for _ in range(repetitions)
        for problem, expected in zip(OTHERS, EXPECTED)
        for found, wanted in zip(call(problem), expected)
    )
"""


def program_output(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMMON + program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


RANDOM_INTERRUPTS = """
torch.set_num_threads(2)
EXPECTED = [call(problem) for problem in OTHERS]
lengths = torch.tensor([8000, 40000] + [10] * 6, dtype=torch.int64)
x, y = series(8, 40000, 1), series(8, 40000, 1)
uneven = Problem(x, y, lengths, lengths, 1.0, -1)
single = Problem(x[:1, :12000], y[:1, :12000], None, None, 1.0, -1, True, True)

interrupts = 0
wrong = 0
for trial in range(8):
    try:
        threading.Timer(random.uniform(0.0, 0.3), os.kill, (os.getpid(), signal.SIGINT)).start()
        call(single) if trial % 2 else launch.forward(uneven)
        time.sleep(1)
    except KeyboardInterrupt:
        interrupts += 1
    wrong += wrong_calls(10)
print(interrupts, wrong)
"""


@pytest.mark.slow
@needs_signals
def test_calls_after_an_interrupt_at_a_random_moment_are_right() -> None:
    assert program_output(RANDOM_INTERRUPTS) == ["8", "0"]


REPEATED_TIMEOUTS = """
torch.set_num_threads(2)
EXPECTED = [call(problem) for problem in OTHERS]
x, y = series(8, 12000, 1), series(8, 12000, 1)
lengths = torch.tensor([8000, 12000] + [10] * 6, dtype=torch.int64)

def raise_inside_run(number, frame):
    global interrupts
    while frame is not None and frame.f_code.co_name != "run":
        frame = frame.f_back
    if frame is not None and interrupts < limit:
        interrupts += 1
        raise TimeoutError

signal.signal(signal.SIGALRM, raise_inside_run)
wrong = 0
for limit in range(1, 7):
    interrupts = 0
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.1), 0.001)
    try:
        while True:  # until the timer has met a call
            launch.forward(Problem(x, y, lengths, lengths, 1.0, -1))
    except TimeoutError:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    interrupts = limit
    wrong += wrong_calls(10)
print(wrong)
"""


@pytest.mark.slow
@needs_signals
def test_timeouts_that_keep_coming_do_no_harm_either() -> None:
    assert program_output(REPEATED_TIMEOUTS) == ["0"]


LATENCY = """
EXPECTED = [call(problem) for problem in OTHERS]

def interrupt():
    global sent
    sent = time.perf_counter()
    os.kill(os.getpid(), signal.SIGINT)

def latency(batch, length, dimensions, threads, backward):
    torch.set_num_threads(threads)
    x, y = series(1, length, dimensions), series(1, length, dimensions)
    problem = Problem(x.expand(batch, -1, -1), y.expand(batch, -1, -1), None, None, 1.0, -1, True, True)
    value = torch.ones(batch)
    state = torch.zeros(launch.state_bytes(problem), dtype=torch.uint8) if backward else None
    threading.Timer(0.1, interrupt).start()
    try:
        launch.backward(problem, value, value, state) if backward else launch.forward(problem)
        time.sleep(1)
        sys.exit("not interrupted")
    except KeyboardInterrupt:
        return time.perf_counter() - sent

# By pairs, by tiles, and in the middle of a pair. The least of a few: the machine may be busy.
for case in [
    (600, 2000, 64, 2, False), (1, 20000, 64, 2, False), (1, 20000, 64, 1, False),
    (600, 2000, 1, 2, True), (1, 20000, 64, 2, True), (1, 20000, 1, 1, True),
]:
    print(min(latency(*case) for _ in range(3)))
    torch.set_num_threads(2)
    print(wrong_calls(3))
"""


@pytest.mark.slow
@needs_signals
def test_a_long_call_ends_soon_after_an_interrupt() -> None:
    output = program_output(LATENCY)
    assert all(float(seconds) < 0.5 for seconds in output[::2]), output
    assert output[1::2] == ["0"] * 6


# -------------------------------------------------------------------------------------------------- workers
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("failing", [0, 1])
def test_memory_of_a_call_that_failed_is_not_used_again(
    failing: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_scratch", {})
    monkeypatch.setattr(launch, "threads_for", lambda work: 2)
    begun = threading.Barrier(2, timeout=30)
    finished: list[int] = []

    def work(*arguments: Any) -> bool:
        worker = arguments[-1]
        begun.wait()
        if worker == failing:
            raise error("from a worker")
        time.sleep(0.2)
        finished.append(worker)
        return True

    problem = Problem(torch.ones(4, 3, 1), torch.ones(4, 3, 1), None, None, 1.0, -1)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "compile_for", lambda *about: work)
        with pytest.raises(error, match="from a worker"):
            launch.forward(problem)
    assert finished == [1 - failing], "the other worker's slice is over when the error arrives"
    assert not any(scratch._scratch.values())
    launch.forward(problem)
    assert len([store for store in scratch._scratch.values() if store]) == 2, "success gives memory back"


def test_second_order_ends_and_gives_back_as_first_order_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_scratch", {})
    monkeypatch.setattr(launch, "threads_for", lambda work: 2)
    one_tile, problem = (
        Problem(torch.ones(4, length, 1), torch.ones(4, 3, 1), None, None, 1.0, -1, True)
        for length in (3, 300)
    )
    direction = Direction("position")
    _, value, state = dual_launch.expected(problem, direction)

    def interrupted(*arguments: Any) -> bool:
        raise KeyboardInterrupt

    for call in (
        lambda: dual_launch.expected(one_tile, direction),
        lambda: dual_launch.expected(problem, direction),
        lambda: dual_launch.expected_backward(problem, direction, torch.ones(4), value, state),
    ):
        scratch._scratch.clear()
        with monkeypatch.context() as patch:
            patch.setattr(launch, "compile_for", lambda *about: interrupted)
            with pytest.raises(KeyboardInterrupt):
                call()
        assert not any(scratch._scratch.values()), "memory of a call that failed is not used again"
        call()
        assert any(scratch._scratch.values())


class _NoThreads:
    """A pool at the interpreter's exit, or one whose thread could not be started after the job was queued."""

    def __init__(self, queued: bool) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._queued = queued

    def submit(self, job: Callable[[], None]) -> None:
        if self._queued:
            self.jobs.put(job)
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("queued", [False, True])
def test_without_threads_the_caller_works_alone(queued: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = _NoThreads(queued)
    monkeypatch.setattr(cpu_threads, "_executor", lambda: pool)
    workers: list[int] = []

    def work(worker: int) -> bool:
        workers.append(worker)
        return len(workers) < 5

    cpu_threads.run(3, work)
    while not pool.jobs.empty():
        pool.jobs.get()()  # a thread comes free when the call is over
    assert workers == [0] * 5


def test_a_job_taken_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was queued, its thread could not be started, and a thread that came free took it after all."""
    pool = _NoThreads(True)
    monkeypatch.setattr(cpu_threads, "_executor", lambda: pool)
    entered = threading.Event()
    finished: list[int] = []

    def work(worker: int) -> bool:
        if worker == 0:
            threading.Thread(target=pool.jobs.get()).start()
            entered.wait(30)
        else:
            entered.set()
            time.sleep(0.3)
            finished.append(worker)
        return False

    cpu_threads.run(2, work)
    assert finished == [1]


def test_every_slice_size_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 400, 3, generator=generator)
    y = torch.randn(3, 390, 3, generator=generator)
    cost = torch.rand(3, 400, 390, generator=generator)
    lengths = torch.tensor([400, 260, 1], dtype=torch.int64), torch.tensor([390, 300, 2], dtype=torch.int32)
    problems = [Problem(x, y, *lengths, 1.0, bandwidth, True, True) for bandwidth in (-1, 150)] + [
        Problem(cost, None, *lengths, 1.0, -1, True)
    ]
    results = []
    directions = [Direction("tangents", x.flip(0), y.flip(1)), Direction("position")]
    before = torch.get_num_threads()
    try:
        for size in (1 << 60, 1, 500_000):
            monkeypatch.setattr(launch, "SLICE", size)
            monkeypatch.setattr(launch, "BACKWARD_SLICE", size)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                monkeypatch.setattr(cpu_threads, "SMALLEST_SHARE", 1)
                found = []
                for problem in problems:
                    value, state = launch.forward(problem)
                    unsaved, _ = launch.forward(problem._replace(need_x=False, need_y=False))
                    gradients = launch.backward(problem, torch.ones(3), value, state)
                    found += [value, unsaved, *gradients]
                for problem, direction in zip(problems[:2], directions, strict=True):
                    dot, value, state = dual_launch.expected(problem, direction)
                    second = dual_launch.expected_backward(problem, direction, torch.ones(3), value, state)
                    found += [dot, value, *second]
                results.append(found)
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(found, wanted) for found, wanted in zip(result, results[0], strict=True))


class _Locked:
    """A pool whose lock is held while it takes work, as that of concurrent.futures; a signal arrives then."""

    def __init__(self, handler: Callable[[], None]) -> None:
        self.handler = handler
        self.entered = False

    def submit(self, helper: Callable[[], None]) -> None:
        assert not self.entered, "a real pool would wait for ever"
        self.entered = True
        self.handler()
        self.entered = False
        threading.Thread(target=helper).start()


def test_a_signal_handler_may_call_while_threads_are_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def work_of(name: str) -> Callable[[int], bool]:
        def work(worker: int) -> bool:
            done.append(f"{name} {worker}")
            return False

        return work

    pool = _Locked(lambda: cpu_threads.run(2, work_of("handler")))
    monkeypatch.setattr(cpu_threads, "_executor", lambda: pool)
    cpu_threads.run(2, work_of("call"))
    assert "handler 0" in done
    assert "call 0" in done
    assert done.count("handler 0") == 1
