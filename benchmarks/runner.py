"""Runs the grids: one worker process a provider, taken in turn, every failure a row."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import records
from .cases import ACCURACY, HOST, SPEED, Case
from .providers import OURS_FUSED, ROUNDING, SOURCE, Provider
from .worker import NO_GRAPH, SLOW_S

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 300.0
"""For imports and, on a fresh machine, the compilation of the kernels."""
ROUNDS = 3
MEBIBYTE = 1 << 20
LARGE_CELLS = 1 << 28


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Args:
        seconds: sampling time for each provider and case.
        limit: seconds after which a provider's work on a case is given up.
        threads: of the CPU, None for what torch takes.
        command: for the table.
    """

    device: str = "cpu"
    seconds: float = 0.5
    limit: float = 30.0
    threads: int | None = None
    command: str = ""


class Worker:
    """A provider's process, started when it is needed and again after it died."""

    def __init__(self, provider: Provider, settings: Settings) -> None:
        self.provider = provider
        self.settings = settings
        self.about: dict[str, str] = {}
        self.process: subprocess.Popen[str] | None = None
        self.answers: queue.Queue[str | None] = queue.Queue()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the worker)
        self.started = False
        self.broken: dict[str, Any] | None = None

    def launch(self) -> None:
        """Start the process and ask it to load the provider, without waiting for that."""
        if self.process is not None or self.broken is not None:
            return
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # Torch's CPU threads would go on spinning for a while after their work, in the way of Numba's.
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "benchmarks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self.answers = queue.Queue()
        threading.Thread(target=_pump, args=(self.process.stdout, self.answers), daemon=True).start()
        self.started = False
        self._send(
            {
                "do": "start",
                "provider": asdict(self.provider),
                "device": self.settings.device,
                "threads": self.settings.threads,
            }
        )

    def ask(self, limit: float | None = None, **request: Any) -> dict[str, Any]:
        """The answer to a request; a crash or a lapse of time is one too, with a status other than "ok"."""
        self.launch()
        if not self.started and self.broken is None:
            answer = self._receive(START_LIMIT_S)
            if answer["status"] == "ok":
                self.started = True
                self.about = answer
            else:
                # What cannot start will not start at the next case either.
                self.broken = {**answer, "note": f"could not start: {answer['note']}"}
                self.stop()
        if self.broken is not None:
            return self.broken
        self._send(request)
        answer = self._receive(self.settings.limit if limit is None else limit)
        if not answer.get("healthy", True):
            self.stop()
        return answer

    def _send(self, request: dict[str, Any]) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it died: the answers say so
            print(json.dumps(request), file=self.process.stdin, flush=True)

    def _receive(self, limit: float) -> dict[str, Any]:
        assert self.process is not None
        try:
            line = self.answers.get(timeout=limit)
        except queue.Empty:
            self.stop()
            return {"status": "timeout", "note": f"over {limit:g} s"}
        if line is not None:
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self.process.wait()
        self.stop()
        return {"status": "crash", "note": f"killed by signal {-code}" if code < 0 else f"exit status {code}"}

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a request that it never read
                    pipe.close()
        self.process = None
        self.started = False

    def close(self) -> None:
        """Stop, and forget the log."""
        self.stop()
        self.log.close()

    def log_tail(self) -> str:
        """The last lines that the process wrote to stderr."""
        self.log.seek(0)
        return "".join(self.log.readlines()[-20:])


def _pump(pipe: Any, answers: queue.Queue[str | None]) -> None:
    try:
        for line in pipe:
            answers.put(line)
    except ValueError:
        pass  # closed while it was read, by stop
    answers.put(None)


def is_asked(provider: Provider, case: Case) -> bool:
    return provider.is_ours or not case.ours_only


def rows_of(case: Case, provider: Provider, rows: Iterable[records.Row]) -> list[records.Row]:
    """What the rows have of a provider's work on a case."""
    wanted = {**case.columns, "provider": provider.name}.items()
    return [row for row in rows if row.items() >= wanted]


def unfinished(
    cases: Iterable[Case], providers: Sequence[Provider], done: Sequence[records.Row]
) -> list[Case]:
    """The cases of which a provider that is to be asked has no row yet."""
    return [
        case
        for case in cases
        if not all(rows_of(case, each, done) for each in providers if is_asked(each, case))
    ]


class Runner:
    """Measures cases with every provider and hands out rows."""

    def __init__(self, providers: Sequence[Provider], settings: Settings) -> None:
        self.settings = settings
        self.workers = [Worker(provider, settings) for provider in providers]
        self.failures: dict[str, list[tuple[Case, str]]] = {}
        self.truths = tempfile.TemporaryDirectory()
        self.rounding: dict[Case, list[float]] = {}
        self.reference = Worker(Provider(OURS_FUSED, "ours", "fused", str(SOURCE)), settings)
        self.today = datetime.date.today().isoformat()

    def __enter__(self) -> Runner:
        # On a GPU the workers load side by side, and all are loaded before the first looks at how much memory
        # is free; on a CPU the first fills the compiler's cache for the rest.
        if self.settings.device == "cuda":
            for worker in self.workers:
                worker.launch()
            for worker in self.workers:
                worker.ask(do="release")
        return self

    def __exit__(self, *_: object) -> None:
        for worker in [*self.workers, self.reference]:
            worker.close()
        self.truths.cleanup()

    def run(
        self,
        cases: Iterable[Case],
        folder: Path | None,
        progress: bool = True,
        done: Sequence[records.Row] = (),
    ) -> list[records.Row]:
        """Rows of the cases that are not done, each written to its table in `folder` when it is measured.

        Rows that are done also say at which sizes a provider failed; it is not asked for larger ones.
        """
        cases = list(cases)
        for case, worker in itertools.product(cases, self.workers):
            for row in rows_of(case, worker.provider, done)[:1]:
                self._remember(worker, case, row["status"])
        cases = unfinished(cases, [worker.provider for worker in self.workers], done)
        rows: list[records.Row] = []
        efforts = [self._effort(case) for case in cases]
        shape = "{l_bar}{bar}| {elapsed} elapsed, {remaining} left{postfix}"
        with tqdm(total=sum(efforts), bar_format=shape, disable=None if progress else True) as bar:
            for position, (case, effort) in enumerate(zip(cases, efforts, strict=True)):
                bar.set_postfix_str(f"{case.suite}: {case.label}")
                if case.kind == ACCURACY:
                    new = self._accuracy(case, cases[position:])
                else:
                    new = self._speed(case, bar)
                if folder is not None:
                    records.upsert(folder, new)
                rows += new
                bar.update(effort)
        return rows

    def _effort(self, case: Case) -> float:
        """Seconds that a case may take, for the estimate of the time left."""
        per_cell = (2e-9 if self.settings.device == "cuda" else 2e-7) * (1 + case.d / 64)
        fixed = 0.2 if case.kind == ACCURACY else 0.2 + self.settings.seconds
        return len(self._asked(case)) * (fixed + per_cell * case.cells)

    def _asked(self, case: Case) -> list[Worker]:
        return [worker for worker in self.workers if is_asked(worker.provider, case)]

    def _speed(self, case: Case, bar: Any) -> list[records.Row]:
        asked = self._asked(case)
        # In turns, all of them hold their data at once. Where that is much, each has the machine to itself,
        # lest one runs out of memory for what another holds.
        groups = [asked] if case.cells < LARGE_CELLS else [[worker] for worker in asked]
        return [row for group in groups for row in self._in_turns(group, case, bar)]

    def _in_turns(self, group: Sequence[Worker], case: Case, bar: Any) -> list[records.Row]:
        outcomes: dict[str, dict[str, Any]] = {}
        samples: dict[str, dict[str, list[float]]] = {}
        rounds: dict[str, int] = {}
        ready: list[Worker] = []
        for worker in group:
            name = worker.provider.name
            bar.set_postfix_str(f"{case.suite}: {case.label}, {name}")
            outcomes[name] = self._skip(worker, case) or self._prepare(worker, case)
            if outcomes[name]["status"] == "ok":
                ready.append(worker)
                rounds[name] = 1 if outcomes[name]["seconds"] > SLOW_S else ROUNDS
                samples[name] = {}
        for turn in range(ROUNDS):
            for worker in list(ready):
                name = worker.provider.name
                if turn >= rounds[name]:
                    continue
                answer = worker.ask(
                    do="measure", seconds=self.settings.seconds / rounds[name], host=case.kind == HOST
                )
                if answer["status"] != "ok":
                    ready.remove(worker)
                    outcomes[name] = answer
                    continue
                for method, times in answer["times"].items():
                    samples[name].setdefault(method, []).extend(times)
        for worker in group:
            if worker in ready or outcomes[worker.provider.name]["status"] == "oom":
                worker.ask(do="release")
        rows: list[records.Row] = []
        for worker in group:
            name = worker.provider.name
            if outcomes[name]["status"] == "oom" and len(group) > 1:
                rows += self._in_turns([worker], case, bar)  # the others have let go of what they held
                continue
            self._remember(worker, case, outcomes[name]["status"])
            rows += self._speed_rows(worker, case, outcomes[name], samples.get(name, {}))
        return rows

    def _prepare(self, worker: Worker, case: Case) -> dict[str, Any]:
        speed = case.kind == SPEED
        answer = worker.ask(do="prepare", case=asdict(case), memory=speed, graph=speed)
        if answer["status"] == "error" and answer["note"].startswith(f"RuntimeError: {NO_GRAPH}"):
            # The attempt to capture a graph broke the process; a fresh one measures without.
            answer = worker.ask(do="prepare", case=asdict(case), memory=speed, graph=False)
        return answer

    def _speed_rows(
        self, worker: Worker, case: Case, outcome: dict[str, Any], samples: dict[str, list[float]]
    ) -> list[records.Row]:
        metric = "host time" if case.kind == HOST else "time"
        if outcome["status"] != "ok":
            metrics = [(metric, "ms")] + ([("memory", "MiB")] if case.kind == SPEED else [])
            return [self._row(worker, case, name, unit, outcome, []) for name, unit in metrics]
        rows = []
        methods = list(samples)  # the first is the one without the host's part, where there are two
        rows.append(self._row(worker, case, metric, "ms", outcome, samples[methods[0]], methods[0]))
        for method in methods[1:]:
            rows.append(self._row(worker, case, "time, eager", "ms", outcome, samples[method], method))
        if case.kind == SPEED:
            memory = outcome["memory"]
            if memory["mib"] is None:
                missing = {"status": "unsupported", "note": memory["method"]}
                rows.append(self._row(worker, case, "memory", "MiB", missing, []))
            else:
                rows.append(
                    self._row(worker, case, "memory", "MiB", outcome, [memory["mib"]], memory["method"])
                )
                per_cell = memory["mib"] * MEBIBYTE / case.cells
                if case.suite == "targets":
                    rows.append(
                        self._row(
                            worker, case, "memory per cell", "byte", outcome, [per_cell], memory["method"]
                        )
                    )
        return rows

    def _accuracy(self, case: Case, coming: Sequence[Case]) -> list[records.Row]:
        metrics = ("gradient_error", "value_error")
        names = {"gradient_error": "gradient error", "value_error": "value error"}
        method = "norm of the difference over norm of the float64 truth, for each pair"
        file = self._truth_file(case)
        if case not in self.rounding:
            # Gammas of one shape share a batch.
            group = [
                c
                for c in coming
                if c.kind == ACCURACY and (c.batch, c.n, c.m, c.d) == (case.batch, case.n, case.m, case.d)
            ]
            answer = self.reference.ask(
                do="truth",
                cases=[asdict(c) for c in group],
                files=[str(self._truth_file(c)) for c in group],
                limit=10 * self.settings.limit,
            )
            if answer["status"] != "ok":
                raise RuntimeError(f"no float64 truth for {case.label}: {answer['note']}")
            self.rounding.update(zip(group, answer["rounding"], strict=True))
        rows = []
        for worker in self._asked(case):
            answer = self._skip(worker, case) or worker.ask(do="accuracy", case=asdict(case), truth=str(file))
            self._remember(worker, case, answer["status"])
            for metric in metrics:
                rows.append(
                    self._row(worker, case, names[metric], "", answer, answer.get(metric, []), method)
                )
        floor = self._row(
            self.reference, case, "gradient error", "", {"status": "ok"}, self.rounding[case], method
        )
        rows.append({**floor, "provider": ROUNDING})
        file.unlink(missing_ok=True)
        return rows

    def _truth_file(self, case: Case) -> Path:
        return Path(self.truths.name) / f"{case.batch}-{case.n}-{case.m}-{case.d}-{case.gamma!r}.pt"

    def _skip(self, worker: Worker, case: Case) -> dict[str, Any] | None:
        """An outcome for what is no smaller than something that took too long or did not fit."""
        for failed, status in self.failures.get(worker.provider.name, []):
            if case.includes(failed):
                return {"status": "skipped", "note": f"{status} at {failed.label}"}
        return None

    def _remember(self, worker: Worker, case: Case, status: str) -> None:
        if status in ("timeout", "oom"):
            self.failures.setdefault(worker.provider.name, []).append((case, status))

    def _row(
        self,
        worker: Worker,
        case: Case,
        metric: str,
        unit: str,
        outcome: dict[str, Any],
        samples: Sequence[float],
        method: str = "",
    ) -> records.Row:
        about = worker.about or {**self._machine(), "library": ""}
        status = outcome["status"]
        values = ["", "", ""]
        if status == "ok" and samples:
            values = [f"{value:.4g}" for value in records.quantiles(samples)]
            if metric.endswith("error") and not all(float(v) < float("inf") for v in values):
                status = "not finite"
        return {
            **case.columns,
            "device": about["device"],
            "provider": worker.provider.name,
            "metric": metric,
            "p20": values[0],
            "p50": values[1],
            "p80": values[2],
            "unit": unit,
            "samples": str(len(samples)),
            "status": status,
            "method": method if status in ("ok", "not finite") else "",
            "note": outcome.get("note", ""),
            "date": self.today,
            "python": about["python"],
            "torch": about["torch"],
            "numba": about["numba"],
            "library": about["library"],
            "command": self.settings.command,
        }

    def _machine(self) -> dict[str, str]:
        """What any worker that did start said about this machine."""
        for worker in [*self.workers, self.reference]:
            if worker.about:
                return worker.about
        self.reference.ask(do="release")
        if not self.reference.about:
            raise RuntimeError(f"this library itself does not start:\n{self.reference.log_tail()}")
        return self.reference.about
