"""What an import costs, and which packages a device really needs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"

BLOCKER = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name in BLOCKED or name.startswith(tuple(blocked + "." for blocked in BLOCKED)):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED = {blocked!r}
sys.meta_path.insert(0, Block())
"""


def python(code: str, blocked: tuple[str, ...] = ()) -> str:
    """Output of a fresh interpreter that cannot import `blocked`."""
    result = subprocess.run(
        [sys.executable, "-c", BLOCKER.replace("{blocked!r}", repr(blocked)) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_loads_no_backend() -> None:
    loaded = python("""
        import sys, torch
        before = set(sys.modules)
        import softdtw_cuda
        print(*sorted(set(sys.modules) - before))
    """).split()
    assert "softdtw_cuda" in loaded
    for heavy in ("numba", "llvmlite", "cuda", "cuda.core", "matplotlib", "scipy", "sklearn"):
        assert heavy not in loaded
    assert "softdtw_cuda._cpu.launch" not in loaded
    assert "softdtw_cuda._cuda.launch" not in loaded


def test_import_is_quick() -> None:
    """At most 0.2 s over torch; the least of several, since the machine may be busy."""
    seconds = [
        float(
            python("""
                import time, torch
                start = time.perf_counter()
                import softdtw_cuda
                print(time.perf_counter() - start)
            """)
        )
        for _ in range(3)
    ]
    assert min(seconds) <= 0.2, seconds


@pytest.mark.slow
def test_a_second_import_finds_the_operators_of_the_first() -> None:
    output = python("""
        import sys, torch
        import softdtw_cuda
        x, y = torch.randn(2, 9, 3, requires_grad=True), torch.randn(2, 8, 3)

        def run(package):
            value = package.softdtw(x, y)
            compiled = torch.compile(package.softdtw, fullgraph=True, backend="aot_eager")(x, y)
            assert torch.equal(value, compiled)
            for each in (value, compiled):
                yield each.detach()
                yield torch.autograd.grad(each.sum(), x)[0]

        first = list(run(softdtw_cuda))
        for name in [name for name in sys.modules if name.partition(".")[0] == "softdtw_cuda"]:
            del sys.modules[name]
        import softdtw_cuda as again
        assert again is not softdtw_cuda
        torch._dynamo.reset()
        print(all(map(torch.equal, first, run(again))))
    """)
    assert output.split() == ["True"]


TRAIN = """
    import warnings
    import torch
    from softdtw_cuda import softdtw
    x = torch.ones(1, 3, 1, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            value = softdtw(x, torch.tensor([[[3.0], [4.0], [-3.0]]]))
            value.sum().backward()
    print(value.item())
    print(x.grad.flatten().tolist())
    print(len(caught))
    print(*(warning.message for warning in caught))
"""


def test_without_numba_the_cpu_falls_back_with_one_warning() -> None:
    value, grad, count, message = python(TRAIN, blocked=("numba",)).splitlines()
    expected_value, expected_grad, expected_count, _ = (python(TRAIN) + "\n").splitlines()[:4]
    assert int(count) == 1
    assert int(expected_count) == 0
    assert "numba" in message
    assert float(value) == pytest.approx(float(expected_value), rel=1e-6)
    assert eval(grad) == pytest.approx(eval(expected_grad), rel=1e-5)


def test_without_numba_the_fused_path_cannot_be_demanded() -> None:
    output = python(
        """
        import warnings
        import torch
        from softdtw_cuda import softdtw
        warnings.simplefilter("ignore")
        try:
            softdtw(torch.ones(1, 3, 1), torch.ones(1, 3, 1), fused=True)
        except RuntimeError as error:
            print(error)
        """,
        blocked=("numba",),
    )
    assert "fused=True" in output
    assert "pip install numba" in output


@pytest.mark.slow
def test_without_numba_it_compiles() -> None:
    output = python(
        """
        import warnings
        import torch
        from softdtw_cuda import softdtw
        warnings.simplefilter("ignore")
        x, y = torch.randn(2, 5, 3, requires_grad=True), torch.randn(2, 4, 3)
        value = torch.compile(softdtw, fullgraph=True, backend="aot_eager")(x, y)
        value.sum().backward()
        print(torch.equal(value, softdtw(x, y)), x.grad.isfinite().all().item())
        """,
        blocked=("numba",),
    )
    assert output.split() == ["True", "True"]


def test_without_cuda_core_the_cpu_works() -> None:
    assert python(TRAIN, blocked=("cuda", "cuda.core", "cuda.bindings")) == python(TRAIN)


def test_without_scikit_learn_the_estimators_say_what_is_missing() -> None:
    output = python(
        """
        try:
            import softdtw_cuda.estimators
        except ImportError as error:
            print(error)
        """,
        blocked=("sklearn",),
    )
    assert "pip install 'softdtw-cuda-torch[sklearn]'" in output


@pytest.mark.gpu
def test_without_numba_cuda_works() -> None:
    code = """
        import torch
        from softdtw_cuda import softdtw
        x = torch.ones(1, 3, 1, device="cuda", requires_grad=True)
        value = softdtw(x, torch.zeros(1, 3, 1, device="cuda"))
        value.sum().backward()
        print(value.item())
    """
    assert python(code, blocked=("numba",)) == python(code)


@pytest.mark.gpu
def test_without_cuda_core_cuda_says_what_is_missing() -> None:
    output = python(
        """
        import torch
        from softdtw_cuda import softdtw
        try:
            softdtw(torch.ones(1, 3, 1, device="cuda"), torch.ones(1, 3, 1, device="cuda"))
        except ImportError as error:
            print(error)
        """,
        blocked=("cuda",),
    )
    assert "pip install cuda-core" in output
