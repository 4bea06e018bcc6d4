"""The process that works for one provider: requests come as JSON lines on stdin, answers go to stdout.

It is started by `benchmarks.runner`, never by hand. Whatever it does to itself, a wrong memory access
on the GPU or an exit included, stays with this one provider and case.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from .cases import FORWARD, HESSIAN_PRODUCT, Case
from .providers import Provider, Unsupported, can_be_captured, launches_with_numba, library_version, load

if TYPE_CHECKING:
    from .providers import Loss

MEBIBYTE = 1 << 20
SLOW_S = 1.0
"""Calls longer than this are not repeated for the sake of steadier figures."""
NO_GRAPH = "no CUDA graph"
MOST_SAMPLES = 50
"""Of one round: more only makes the tables slower to make."""


def cpu_name() -> str:
    try:
        match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, bytes (Linux)."""
    match = re.search(field + r":\s*(\d+) kB", Path("/proc/self/status").read_text())
    if match is None:
        raise OSError(f"no {field} in /proc/self/status")
    return int(match.group(1)) * 1024


class Job:
    """One case with its data, ready to be run again and again."""

    def __init__(self, provider: Provider, case: Case, device: str) -> None:
        self.case = case
        self.on_gpu = device == "cuda"
        self.loss: Loss = load(provider, case, device)
        dtype: torch.dtype = getattr(torch, case.dtype)
        backward = case.mode != FORWARD
        generator = torch.Generator(device).manual_seed(0)
        shapes = ((case.batch, case.n, case.d), (case.batch, case.m, case.d))
        self.x, self.y = (
            torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_(backward)
            for shape in shapes
        )
        self.vectors = (
            [torch.randn_like(side) for side in (self.x, self.y)] if case.mode == HESSIAN_PRODUCT else []
        )
        self.x_lengths = self.y_lengths = None
        if case.lengths == "ragged":
            self.x_lengths, self.y_lengths = (
                torch.randint(size // 2, size + 1, (case.batch,), generator=generator, device=device).int()
                for size in (case.n, case.m)
            )
        self.ones: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> tuple[Tensor, ...]:
        """One call: the values, the gradients of both sides, or their Hessian's product with a vector."""
        if self.case.mode == FORWARD:
            with torch.no_grad():
                return (self.loss(self.x, self.y, self.x_lengths, self.y_lengths),)
        value = self.loss(self.x, self.y, self.x_lengths, self.y_lengths)
        if self.ones is None:
            self.ones = torch.ones_like(value)
        if self.case.mode == HESSIAN_PRODUCT:
            slopes = torch.autograd.grad(value, (self.x, self.y), self.ones, create_graph=True)
            return torch.autograd.grad(slopes, (self.x, self.y), self.vectors)
        return torch.autograd.grad(value, (self.x, self.y), self.ones)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def memory(self, numba: bool) -> dict[str, Any]:
        """Peak of one call less inputs and gradients, in MiB, and how it was read."""
        gc.collect()
        if not self.on_gpu:
            return self._resident_growth()
        self.wait()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        free, _ = torch.cuda.mem_get_info()
        results = self.step()
        self.wait()
        peak = torch.cuda.max_memory_allocated() - before - sum(result.nbytes for result in results)
        method = "torch's peak"
        if numba:
            # Torch keeps what it took from the driver, so what else is gone was taken by Numba.
            now_free, _ = torch.cuda.mem_get_info()
            elsewhere = (free - now_free) - (torch.cuda.memory_reserved() - reserved)
            if elsewhere > 0:
                peak += elsewhere
                method = "torch's peak + driver's growth outside torch"
        return {"mib": peak / MEBIBYTE, "method": method}

    def _resident_growth(self) -> dict[str, Any]:
        try:
            ctypes.CDLL(None).malloc_trim(0)  # give back what earlier calls freed
            Path("/proc/self/clear_refs").write_text("5")  # start the peak again from the present size
            before = resident("VmRSS")
            results = self.step()
            grown = resident("VmHWM") - before - sum(result.nbytes for result in results)
        except (OSError, AttributeError) as error:
            return {"mib": None, "method": f"resident size cannot be read here ({error})"}
        return {"mib": max(grown, 0) / MEBIBYTE, "method": "resident growth"}

    def capture(self) -> None:
        """Record the call in a CUDA graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        graph.replay()
        self.wait()
        self.graph = graph

    def event_times(self, call: Callable[[], object], seconds: float) -> list[float]:
        """Milliseconds between CUDA events around each call."""
        times: list[float] = []
        start = time.perf_counter()
        while len(times) < MOST_SAMPLES and (not times or time.perf_counter() - start < seconds):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            call()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after))
        return times

    def wall_times(self, seconds: float) -> list[float]:
        """Milliseconds of each call as the host sees it, work on the GPU not waited for."""
        times: list[float] = []
        start = time.perf_counter()
        while len(times) < MOST_SAMPLES and (not times or time.perf_counter() - start < seconds):
            self.wait()
            before = time.perf_counter()
            self.step()
            times.append((time.perf_counter() - before) * 1e3)
        self.wait()
        return times


class Worker:
    """Answers requests; `job` is the case at hand."""

    def __init__(self) -> None:
        self.provider: Provider | None = None
        self.device = "cpu"
        self.job: Job | None = None
        self.call_seconds = 0.0

    def start(self, provider: dict[str, Any], device: str, threads: int | None) -> dict[str, Any]:
        """Load the provider and run it on something tiny, so that no compiler runs inside a measurement."""
        if threads:
            torch.set_num_threads(threads)
            if importlib.util.find_spec("numba"):
                import numba

                numba.set_num_threads(min(threads, numba.get_num_threads()))
        self.provider = Provider(**provider)
        self.device = device
        Job(self.provider, Case("start", 2, 8, 8, 4), device).step()
        if device == "cuda":
            name = torch.cuda.get_device_name()
        else:
            name = f"{cpu_name()}, {torch.get_num_threads()} threads"
        try:
            numba_version = importlib.metadata.version("numba")
        except ImportError:
            numba_version = ""
        return {
            "device": name,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numba": numba_version,
            "library": library_version(self.provider),
        }

    def prepare(self, case: dict[str, Any], memory: bool, graph: bool) -> dict[str, Any]:
        """Data, a first call, peak memory, and a CUDA graph where that works."""
        assert self.provider is not None
        self.release()
        self.job = job = Job(self.provider, Case(**case), self.device)
        answer: dict[str, Any] = {}
        # The first call may compile or load something; it counts only for the slow GPU paths of peers, some
        # of which take many seconds a call.
        numba = launches_with_numba(self.provider)
        for _ in range(2):
            start = time.perf_counter()
            if memory:
                answer["memory"] = job.memory(numba)
            else:
                job.step()
            job.wait()
            self.call_seconds = answer["seconds"] = time.perf_counter() - start
            if numba and self.device == "cuda" and self.call_seconds > SLOW_S:
                break
        if graph and self.device == "cuda" and can_be_captured(self.provider):
            try:
                job.capture()
            except RuntimeError as error:
                answer["note"] = f"{NO_GRAPH}: {first_line(error)}"
                self._recover(job, answer["note"])
        if self.device == "cuda":
            torch.cuda.empty_cache()  # the next provider gets the whole card
        return answer

    def _recover(self, job: Job, reason: str) -> None:
        try:
            job.step()
            job.wait()
        except RuntimeError as error:
            raise RuntimeError(reason) from error

    def measure(self, seconds: float, host: bool) -> dict[str, Any]:
        """One round of samples in ms, by method."""
        job = self.job
        assert job is not None
        if host or self.device == "cpu":
            return {"times": {"wall clock": job.wall_times(seconds)}}
        times: dict[str, list[float]] = {}
        if self.call_seconds < SLOW_S:
            job.step()  # the caches of the allocator were emptied after the last round
        if job.graph is not None:
            times["CUDA graph"] = job.event_times(job.graph.replay, seconds / 2)
            seconds /= 2
        times["CUDA events"] = job.event_times(job.step, seconds)
        job.wait()
        torch.cuda.empty_cache()
        return {"times": times}

    def release(self) -> dict[str, Any]:
        """Forget the case."""
        self.job = None
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return {}

    def accuracy(self, case: dict[str, Any], truth: str) -> dict[str, Any]:
        """Relative errors of each pair against the float64 truth in a file."""
        assert self.provider is not None
        self.release()
        problem = Case(**case)
        exact = torch.load(truth, map_location=self.device)
        x, y = (side.to(self.device).requires_grad_() for side in random_series(problem))
        value = load(self.provider, problem, self.device)(x, y, None, None)
        gradients = torch.autograd.grad(value, (x, y), torch.ones_like(value))
        errors = [relative(g, exact[side]) for g, side in zip(gradients, ("gx", "gy"), strict=True)]
        return {
            "gradient_error": [worse(a, b) for a, b in zip(*errors, strict=True)],
            "value_error": relative(value.detach().unsqueeze(1), exact["value"].unsqueeze(1)),
        }

    def truth(self, cases: list[dict[str, Any]], files: list[str]) -> dict[str, Any]:
        """float64 values and gradients of cases that differ in gamma alone, one file each.

        Returns the gradient error that comes from rounding the exact costs to float32 and from nothing else.
        """
        from softdtw_cuda import _reference
        from softdtw_cuda._distances import sqeuclidean, sqeuclidean_gradient

        problems = [Case(**case) for case in cases]
        x, y = (side.to(self.device).double() for side in random_series(problems[0]))
        cost = sqeuclidean(x, y)
        # sdtw_gamma(D) = gamma sdtw_1(D / gamma), with the same alignment: one batch for every gamma.
        batches = [torch.cat([c / p.gamma for p in problems]) for c in (cost, cost.float().double())]
        values = _reference.softdtw_from_cost(batches[0], 1.0).split(len(x))
        alignments, rounded = (_reference.alignment_from_cost(b, 1.0).split(len(x)) for b in batches)

        def gradients(e: Tensor) -> tuple[Tensor, Tensor]:
            return sqeuclidean_gradient(e, x, y), sqeuclidean_gradient(e.transpose(1, 2), y, x)

        rounding = []
        for problem, file, value, e, blurred in zip(
            problems, files, values, alignments, rounded, strict=True
        ):
            gx, gy = gradients(e)
            torch.save({"value": value * problem.gamma, "gx": gx, "gy": gy}, file)
            errors = [relative(b, t) for b, t in zip(gradients(blurred), (gx, gy), strict=True)]
            rounding.append([worse(a, b) for a, b in zip(*errors, strict=True)])
        return {"rounding": rounding}


def random_series(case: Case) -> tuple[Tensor, Tensor]:
    """float32 x and y on the CPU, the same for every provider, gamma and machine."""
    seed = zlib.crc32(f"{case.batch} {case.n} {case.m} {case.d}".encode())
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.batch, case.n, case.d, generator=generator)
    return x, torch.randn(case.batch, case.m, case.d, generator=generator)


def relative(measured: Tensor, truth: Tensor) -> list[float]:
    """Norm of the difference over the norm of the truth, for each sample."""
    difference = (measured.double() - truth).flatten(1).norm(dim=1)
    errors: list[float] = (difference / truth.flatten(1).norm(dim=1)).tolist()
    return errors


def worse(a: float, b: float) -> float:
    """The larger one; NaN if either is."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Files of this machine mean nothing to a reader of the table.
    text = re.sub(r"/[^\s:]*/", "", lines[0] if lines else "")
    return f"{type(error).__name__}: {text}"[:160]


def status_of(error: BaseException) -> tuple[str, str]:
    """Status and note of a failed request."""
    if isinstance(error, Unsupported):
        return "unsupported", str(error)
    text = str(error).lower()
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        sign in text for sign in ("out of memory", "out_of_memory", "can't allocate memory")
    )
    return ("oom" if out_of_memory else "error"), first_line(error)


def is_healthy(worker: Worker) -> bool:
    """Whether the GPU still answers; an illegal access is never forgiven by a CUDA context."""
    try:
        worker.release()
        return bool((torch.ones(8, device=worker.device).sum() == 8).item())
    except Exception:
        return False


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer until stdin closes."""
    worker = Worker()
    for line in requests:
        request = json.loads(line)
        operation = request.pop("do")
        try:
            answer = {"status": "ok", **getattr(worker, operation)(**request)}
        except Exception as error:
            status, note = status_of(error)
            answer = {"status": status, "note": note}
        # Only here, since the exception kept the tensors alive that did not fit.
        if answer["status"] != "ok":
            answer["healthy"] = is_healthy(worker)
        print(json.dumps(answer), file=answers, flush=True)
        if not answer.get("healthy", True):
            return


def main() -> None:
    # Libraries print to stdout; the answers go to a copy of it that only this module knows.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
