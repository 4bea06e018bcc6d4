"""NVIDIA's compute-sanitizer over small shapes of every family, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import softdtw_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SOURCE = Path(softdtw_cuda.__file__).resolve().parents[1]
FOUND = 86

ALL = (
    *((1, "float32"), (3, "float64"), (5, "float32"), (33, "float32")),
    *((20, "float32"), (64, "float32"), (130, "float32"), (64, "bfloat16")),
)

# racecheck (2025.3, on an H200) seems to miss a barrier now and then where a warp comes to the next one with
# nothing done in between: it reports stores before the first as unordered with loads after it. Two barriers
# in place of each one, or a pause before it, and it reports none. That hides nothing: accesses with no
# barrier between them still have none.
PROGRAM = """
import sys
import torch
if sys.argv[2] == "racecheck":
    import cuda.core
    plain, block, group = cuda.core.Program, "__syncthreads();", "bar.sync %0,%1;"
    def program(source, *options):
        assert source.count(block) == source.count(group) == 1
        return plain(source.replace(block, block * 2).replace(group, group * 2), *options)
    cuda.core.Program = program
from softdtw_cuda import SoftDTW, softdtw, softdtw_from_cost
torch.manual_seed(0)
for d, name in eval(sys.argv[1]):
    dtype = getattr(torch, name)
    for bandwidth in (None, 40):
        x = torch.randn(2, 130, d, device="cuda", dtype=dtype, requires_grad=True)
        y = torch.randn(2, 97, d, device="cuda", dtype=dtype, requires_grad=True)
        softdtw(x, y, gamma=0.5, bandwidth=bandwidth).sum().backward()
        lengths = torch.tensor([33, 97], device="cuda")
        softdtw(x, y, gamma=1e-6, y_lengths=lengths, x_lengths=lengths).sum().backward()
        for gamma in (0.5, 1e-6):  # one strip: both passes in one launch, if there are few features
            SoftDTW(gamma=gamma, bandwidth=bandwidth, reduction="mean")(x[:, :60], y[:, :50]).backward()
cost = torch.rand(2, 130, 97, device="cuda", requires_grad=True)
softdtw_from_cost(cost, gamma=0.1).sum().backward()
torch.cuda.synchronize()
print("finished")
"""


def sanitizer() -> str | None:
    """The tool on the path, or where the toolkit puts it."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [Path(home) / "bin" / "compute-sanitizer" for home in homes if home]
    return shutil.which("compute-sanitizer") or next((str(c) for c in candidates if c.exists()), None)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool: str, tmp_path: Path) -> None:
    found = sanitizer()
    if found is None:
        pytest.skip("compute-sanitizer is not installed (it comes with the CUDA toolkit)")
    # Without torch's cache of memory every buffer is an allocation of its own, whose ends memcheck watches.
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["SOFTDTW_CUDA_CACHE"] = str(tmp_path)
    options = [f"--tool={tool}", f"--error-exitcode={FOUND}"]
    if tool == "memcheck":
        options.append("--report-api-errors=no")  # torch asks the driver questions whose answer is an error
    done = subprocess.run(
        [found, *options, sys.executable, "-c", PROGRAM, repr(ALL), tool],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "finished" in done.stdout
