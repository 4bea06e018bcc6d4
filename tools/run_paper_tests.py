"""Runs the tests and the examples of the paper's library against this one.

    python tools/run_paper_tests.py PATH

PATH is a checkout of https://github.com/BGU-CS-VIL/sdtw-cuda-torch. Its tests and examples are copied to a
temporary folder, where `softdtw_cuda` is this library; nothing of them is kept. docs/migrating.md says why
those of `EXPECTED` fail; the exit status is 0 if no other one does. Without a GPU, what needs one is skipped
(some tests of that library return early there and count as passed).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"

EXPECTED = {
    "test_sqeuclidean.py": "imports softdtw_cuda.distances",
    "test_fused_true_on_cpu_raises": "fused=True works on the CPU",
    "test_normalize_unequal_lengths_raises": "normalize=True works for N != M",
    "test_gamma_zero_raises": "the same ValueError in other words",
    "test_gamma_negative_raises": "the same ValueError in other words",
    "test_gamma_inf_raises": "the same ValueError in other words",
    "test_gamma_nan_raises": "the same ValueError in other words",
    "test_empty_sequence_x_raises": "the same ValueError in other words",
    "test_empty_sequence_y_raises": "the same ValueError in other words",
    "test_batch_size_mismatch_raises": "the same ValueError in other words",
    "test_feature_dim_mismatch_raises": "the same ValueError in other words",
}
"""What differs on purpose, by the name of the test or of its file."""


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "MPLBACKEND": "Agg"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def run_tests(folder: Path) -> int:
    """Number of failures that are not expected."""
    options = ["-q", "-rA", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestUnknownMarkWarning"]
    options += ["--continue-on-collection-errors"]
    output = run([sys.executable, "-m", "pytest", *options, "tests"], folder).stdout
    found = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED)\s+(?:\[\d+\] )?(\S+)", output, re.MULTILINE)
    if not found:
        raise SystemExit(f"no tests were run:\n{output}")
    unexpected = 0
    for outcome, name in sorted(found, key=lambda each: each[1]):
        reason = next((why for key, why in EXPECTED.items() if key in name), "")
        failed = outcome in ("FAILED", "ERROR")
        unexpected += failed and not reason
        print(f"{outcome:8} {name}" + (f"  ({reason})" if failed and reason else ""))
    return unexpected


def run_examples(folder: Path) -> int:
    """Number of failures."""
    has_gpu = run([sys.executable, "-c", "import torch; exit(not torch.cuda.is_available())"], folder)
    failures = 0
    for example in sorted((folder / "examples").glob("*.py")):
        if has_gpu.returncode and re.search(r'device="cuda"(?! if)', example.read_text(encoding="utf-8")):
            print(f"SKIPPED  examples/{example.name}  (needs a GPU)")
            continue
        result = run([sys.executable, "-W", "default", str(example)], folder)
        failures += result.returncode != 0
        print(f"{'FAILED' if result.returncode else 'PASSED':8} examples/{example.name}")
        for warning in sorted(set(re.findall(r"DeprecationWarning: (softdtw.*)", result.stderr))):
            print(f"         warns: {warning}")
        if result.returncode:
            print(result.stderr)
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="checkout of the paper's library")
    checkout = parser.parse_args().checkout
    if not (checkout / "softdtw_cuda" / "tests").is_dir():
        parser.error(f"{checkout} has no softdtw_cuda/tests; clone the paper's library there")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Not the package around them, which would be imported instead of this one.
        shutil.copytree(checkout / "softdtw_cuda" / "tests", folder / "tests")
        shutil.copytree(checkout / "examples", folder / "examples")
        failures = run_tests(folder) + run_examples(folder)
    print(f"{failures} failures that docs/migrating.md does not explain")
    raise SystemExit(failures != 0)


if __name__ == "__main__":
    main()
