"""torch's private names: the loss works without any of them, and no other file uses one."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from softdtw_cuda import softdtw

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = SOURCE / "softdtw_cuda"
COMPAT = PACKAGE / "_torch_compat.py"
NAMES = sorted(set(re.findall(r'_private\(\s*"([\w.]+)"', COMPAT.read_text())))

# The names are None while _torch_compat looks for them, and torch's own again afterwards. Then every way that
# needs one of them: eager, transforms, batches of gradients, compiled graphs, lazy signs and zeros, lengths,
# second derivatives. Each substitute has to run.
PROGRAM = r"""
import functools, importlib.util, re, sys
import torch
from torch.autograd import forward_ad

compat, device, *names = sys.argv[1:]
taken = []
for name in names:
    *parts, last = name.split(".")
    owner = torch
    for part in parts:
        owner = getattr(owner, part)
    taken.append((owner, last, getattr(owner, last, None)))  # torch for the CPU has no names of CUDA
    setattr(owner, last, None)
called = set()

def record(private):
    def recording(path, substitute, *use):
        def recorded(*arguments):
            called.add(path)
            return substitute(*arguments)
        return private(path, recorded, *use)
    return recording

spec = importlib.util.spec_from_file_location("softdtw_cuda._torch_compat", compat)
module = importlib.util.module_from_spec(spec)
module.record = record
source = spec.loader.get_source(spec.name).replace("def _private(", "@record\ndef _private(")
exec(compile(source, compat, "exec"), module.__dict__)
sys.modules[spec.name] = module
for owner, last, original in taken:
    setattr(owner, last, original)

from softdtw_cuda import SoftDTW, _reference, softdtw, softdtw_pairs
assert sys.modules["softdtw_cuda._autograd"].in_transform is module.in_transform

torch.manual_seed(0)
x = torch.randn(3, 20, 4, dtype=torch.float64, device=device, requires_grad=True)
y = torch.randn(3, 17, 4, dtype=torch.float64, device=device, requires_grad=True)
lengths = torch.tensor([20, 3, 9], device=device)
weights = torch.randn(2, 3, dtype=torch.float64, device=device)

def check(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)

def gradients(value, grad):
    return torch.autograd.grad(value, (x, y), grad, retain_graph=True)

for given in (None, lengths):
    expected = _reference.softdtw(x, y, 0.5, -1, given, None)
    value = softdtw(x, y, gamma=0.5, x_lengths=given)
    compiled = torch.compile(lambda x, y: softdtw(x, y, gamma=0.5, x_lengths=given), backend="aot_eager")
    for each in (value, compiled(x, y)):
        check(each, expected)
        for ours, theirs in zip(gradients(each, weights[0]), gradients(expected, weights[0])):
            check(ours, theirs)
    batched = torch.autograd.grad(value, (x, y), weights, retain_graph=True, is_grads_batched=True)
    for k in range(2):
        for ours, theirs in zip(batched, gradients(expected, weights[k])):
            check(ours[k], theirs)
    of_x = torch.func.grad(lambda x: softdtw(x, y.detach(), gamma=0.5, x_lengths=given).sum())
    check(of_x(x.detach()), gradients(expected, torch.ones_like(expected))[0])

each = torch.func.vmap(lambda x, y: softdtw(x, y, gamma=0.5))(x.detach(), y.detach())
check(each, _reference.softdtw(x, y, 0.5).detach())
listed = torch.tensor([[[0, 1]], [[2, 0]]], device=device)
each = torch.func.vmap(lambda pairs: softdtw_pairs(x.detach(), y.detach(), pairs, gamma=0.5))(listed)
check(each[:, 0], _reference.softdtw(x[[0, 2]], y[[1, 0]], 0.5).detach())
lazy = torch._neg_view(x.detach())
check(softdtw(lazy, y.detach(), gamma=0.5), _reference.softdtw(-x.detach(), y.detach(), 0.5))
zero = torch._efficientzerotensor(3, 20, 4, dtype=torch.float64, device=device)
check(softdtw(zero, y.detach(), gamma=0.5), _reference.softdtw(torch.zeros_like(x), y, 0.5).detach())

for p, dist in ((1.0, "cityblock"), (2.0, "euclidean")):
    value = softdtw(x, y, gamma=0.5, dist=dist)
    expected = _reference.softdtw_from_cost(torch.cdist(x, y, p), 0.5)
    check(value, expected)
    for ours, theirs in zip(gradients(value, weights[0]), gradients(expected, weights[0])):
        check(ours, theirs)

def check_or_raise(compute, expected, message, *needed):
    # The numbers; where a name is missing that there is no public way around, an error.
    if set(needed) & set(names):
        try:
            compute()
        except RuntimeError as error:
            assert re.search(message, str(error)), error
            return
        raise AssertionError(f"no error without {needed}")
    check(compute(), expected)

loss = functools.partial(softdtw, y=y.detach(), gamma=0.5)
total = lambda x: loss(x).sum()
exact = _reference.softdtw(x, y.detach(), 0.5)
slopes = torch.autograd.grad(exact.sum(), x, create_graph=True)[0]
along = torch.randn(2, *x.shape, dtype=torch.float64, device=device)
tangent = (slopes * along[0]).sum((1, 2)).detach()
products = torch.stack([torch.autograd.grad(slopes, x, each, retain_graph=True)[0] for each in along])
at = x.detach()

def dual_tangent():
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(loss(forward_ad.make_dual(at, along[0]))).tangent

in_transforms = "nest forward-mode", "autograd.forward_ad._set_fwd_grad_enabled"
# Where nobody tells whether there is a transform, there may be one, and operators go through the dispatcher.
untold = "_C._are_functorch_transforms_active" in names
check_or_raise(dual_tangent, tangent, *(in_transforms if untold else [""]))
check_or_raise(lambda: torch.func.jvp(loss, (at,), (along[0],))[1], tangent, *in_transforms)
product = lambda along: torch.func.jvp(torch.func.grad(total), (at,), (along,))[1]
check_or_raise(lambda: product(along[0]), products[0], *in_transforms)
check(torch.func.vjp(torch.func.grad(total), at)[1](along[0])[0], products[0])

ours = torch.autograd.grad(total(x), x, create_graph=True)[0]
for each, expected in zip(along, products):
    check(torch.autograd.grad(ours, x, each, retain_graph=True)[0], expected)
check_or_raise(
    lambda: torch.autograd.grad(ours, x, along, retain_graph=True, is_grads_batched=True)[0],
    products,
    "[Bb]atch",
    *([] if untold else ["_C._functorch.is_legacy_batchedtensor", "_remove_batch_dim", "_add_batch_dim"]),
)
check_or_raise(
    lambda: torch.autograd.functional.hvp(total, at, along[0])[1],
    products[0],
    "third derivatives",
    "_C._will_engine_execute_node",
    "_C._are_functorch_transforms_active",
)
# One substitute may take the way of another; those of CUDA are not called on the CPU.
if len(names) == 1 and (device == "cuda" or not names[0].startswith("_C._cuda")):
    assert called == set(names)
print("done")
"""


def run_without(names: list[str], device: str) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(COMPAT), device, *names],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["done"]


@pytest.mark.slow
def test_without_all_names(device: str) -> None:
    assert len(NAMES) >= 14
    run_without(NAMES, device)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_without_one_name(device: str, name: str) -> None:
    run_without([name], device)


# An older torch gets the functions as a whole: they are what its graph calls.
WHOLE_PROGRAM = """
import sys
import torch
from torch.torch_version import TorchVersion

version, torch.__version__ = torch.__version__, TorchVersion("2.6.0")
from softdtw_cuda import DilateLoss, SoftDTW, softdtw
torch.__version__ = version
assert "torch._dynamo" not in sys.modules  # its import takes seconds

torch.manual_seed(0)
x, y = torch.randn(3, 20, 4, requires_grad=True), torch.randn(3, 17, 4)
calls = []

def backend(graph, inputs):
    calls.extend(node.target.__name__ for node in graph.graph.nodes if node.op == "call_function")
    return graph

for function in (
    softdtw,
    lambda x, y: softdtw(x, y, gamma=0.5, normalize=True, x_lengths=[20, 3, 9]),
    SoftDTW(gamma=0.5, dist="euclidean"),
    DilateLoss(gamma=0.5, reduction="none"),
):
    compiled = torch.compile(function, fullgraph=True, backend=backend)(x, y)
    expected = function(x, y)
    assert torch.equal(compiled, expected)
    ours, theirs = (torch.autograd.grad(value.sum(), x)[0] for value in (compiled, expected))
    assert torch.equal(ours, theirs)
print(*calls)
"""


@pytest.mark.slow
def test_functions_as_a_whole_for_an_older_compiler() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WHOLE_PROGRAM],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["softdtw", "softdtw", "softdtw", "_dilate"]


def private_names(source: str) -> list[str]:
    """Private names of torch in a Python file, however they are spelled."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if re.match(r"torch\..*\b_(?!_)", each.name)]
        elif isinstance(node, ast.ImportFrom) and re.match(r"torch\b", node.module or ""):
            names = [f"{node.module}.{each.name}" for each in node.names]
            found += [name for name in names if re.search(r"\._(?!_)", name)]
        elif isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
            of_torch = re.match(r"(torch|Tensor|F)\b", ast.unparse(node.value))
            if of_torch or hasattr(torch.Tensor, node.attr):
                found.append(ast.unparse(node))
    return found


def test_functions_without_an_apply_below_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(2, 9, 1, requires_grad=True), torch.randn(2, 7, 1)
    (expected,) = torch.autograd.grad(softdtw(x, y).sum(), x)
    base = torch.autograd.Function.__mro__[-2]
    monkeypatch.setattr(torch.autograd, "Function", base)  # which has no apply below it
    assert not hasattr(super(base, torch.autograd.function.Function), "apply")
    (measured,) = torch.autograd.grad(softdtw(x, y).sum(), x)
    assert torch.equal(measured, expected)


def test_no_other_file_uses_a_private_name() -> None:
    used = {
        str(path.relative_to(PACKAGE)): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != COMPAT and (names := private_names(path.read_text()))
    }
    assert used == {}


@pytest.mark.parametrize(
    "line",
    [
        "import torch._C",
        "import torch._dynamo as dynamo",
        "from torch._C import _cuda_getDevice",
        "from torch import _C",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "torch._C._cuda_getDevice()",
        "torch.Tensor._is_zerotensor(x)",
        "Tensor._make_subclass(a, b)",
        "x.detach()._is_zerotensor()",
    ],
)
def test_a_private_name_would_be_found(line: str) -> None:
    assert private_names(line)


def test_public_names_are_left_alone() -> None:
    assert private_names("problem._replace(x=x).x.__class__; from torch import Tensor; torch.empty(3)") == []
