"""Who is measured: this library, its peers where they are installed, and checkouts given by a path.

A provider is plain data; `load` turns it into a function inside a worker process. Nothing here imports a
provider at the top: a peer may be a package of the same name as this library.

A checkout is recognised by what lies in its folder:

    benchmark_adapter.py           anything: its make_loss(case, device) returns
                                   loss(x, y, x_lengths, y_lengths) -> (B,) values
    soft_dtw_cuda.py               Maghoumi's pytorch-softdtw-cuda
    softdtw_cuda/autograd_xy.py    the paper's sdtw-cuda-torch, measured fused and unfused
    src/softdtw_cuda/              another version of this library, measured fused and with the cost matrix
    pysdtw/, tslearn/              those packages
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from .cases import EXPECTED_COST, SECOND_ORDER, Case

if TYPE_CHECKING:
    from torch import Tensor

    Loss = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]

SOURCE = Path(__file__).resolve().parent.parent / "src"
OURS_FUSED = "this library (fused)"
OURS_COST = "this library (cost matrix)"
ROUNDING = "limit of float32 costs"
"""An exact recurrence on costs rounded to float32: who stores costs in float32 can hardly do better."""


class Unsupported(Exception):
    """The provider has no way to do this; the reason goes into the table."""


@dataclass(frozen=True)
class Provider:
    """A name for the tables, an adapter with an option, and the folder to import from."""

    name: str
    adapter: str
    option: str = ""
    path: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether `ours_only` cases are for it: this library, this version or another."""
        return self.adapter == "ours"


def installed() -> tuple[list[Provider], list[str]]:
    """Providers that need no path, and a line for each known one that cannot be imported here."""
    found = [
        Provider(OURS_FUSED, "ours", "fused", str(SOURCE)),
        Provider(OURS_COST, "ours", "cost", str(SOURCE)),
    ]
    missing = []
    for package in ("tslearn", "pysdtw", "philtorch"):
        if importlib.util.find_spec(package) is None:
            missing.append(f"{package} is not installed here: not measured (pip install {package})")
        else:
            found.append(Provider(package, package))
    return found, missing


def from_checkout(argument: str) -> list[Provider]:
    """Providers for NAME=PATH.

    Raises:
        ValueError: when it is not NAME=PATH, or when the folder holds nothing that is known.
    """
    name, separator, folder = argument.partition("=")
    root = Path(folder).expanduser().resolve()
    if not separator or not name or not folder:
        raise ValueError(f"--peer is {argument!r}, expected NAME=PATH, for example BGU=../sdtw-cuda-torch.")
    if not root.is_dir():
        raise ValueError(f"--peer {name}: {folder} is not a folder.")
    path = str(root)
    if (root / "benchmark_adapter.py").is_file():
        return [Provider(name, "custom", "", path)]
    if (root / "soft_dtw_cuda.py").is_file():
        return [Provider(name, "maghoumi", "", path)]
    if (root / "softdtw_cuda" / "autograd_xy.py").is_file():
        return [Provider(f"{name} ({option})", "paper", option, path) for option in ("fused", "unfused")]
    if (root / "src" / "softdtw_cuda" / "_ops.py").is_file():
        path = str(root / "src")
        return [
            Provider(f"{name} (fused)", "ours", "fused", path),
            Provider(f"{name} (cost matrix)", "ours", "cost", path),
        ]
    for package in ("pysdtw", "tslearn"):
        if (root / package / "__init__.py").is_file():
            return [Provider(name, package, "", path)]
    raise ValueError(
        f"--peer {name}: nothing known in {folder}; expected soft_dtw_cuda.py, softdtw_cuda/, pysdtw/, "
        "tslearn/, or a benchmark_adapter.py with make_loss(case, device)."
    )


# From here on: inside a worker, which serves one provider.


def can_be_captured(provider: Provider) -> bool:
    """Whether calls may be recorded in a CUDA graph: they follow torch's stream and never wait for the GPU.

    Tried only where it is known to work: a capture that fails can leave the process unusable.
    """
    return provider.adapter == "ours"


def launches_with_numba(provider: Provider) -> bool:
    """Whether GPU memory may be taken behind the back of torch's allocator."""
    return provider.adapter in ("maghoumi", "paper", "pysdtw", "custom")


def library_version(provider: Provider) -> str:
    """Version of the provider's own library; checkouts without one say so."""
    module = {"ours": "softdtw_cuda", "maghoumi": "soft_dtw_cuda", "paper": "softdtw_cuda"}.get(
        provider.adapter, provider.adapter
    )
    version = getattr(sys.modules.get(module), "__version__", None)
    if version is None and provider.path is None:
        version = importlib.metadata.version(provider.adapter)
    return str(version) if version else f"checkout {_commit(provider.path)}".strip()


def _commit(path: str | None) -> str:
    """Of a checkout that is a Git repository."""
    command = ["git", "-C", str(path), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def load(provider: Provider, case: Case, device: str) -> Loss:
    """The provider's loss for a case, x and y both differentiable.

    Raises:
        Unsupported: when the provider has no argument for what the case asks.
    """
    if provider.path is not None and provider.path not in sys.path:
        sys.path.insert(0, provider.path)
    if launches_with_numba(provider) and not hasattr(numpy, "row_stack"):
        # The newest NumPy has dropped a name that Numba's CUDA part still asks for.
        setattr(numpy, "row_stack", numpy.vstack)  # noqa: B010 (another rule knows the plain form)
    if case.mode in SECOND_ORDER and provider.adapter not in ("ours", "philtorch", "custom"):
        raise Unsupported("has no second derivatives")
    loss: Loss = _ADAPTERS[provider.adapter](provider, case, device)
    return loss


def _import(provider: Provider, name: str) -> Any:
    module = importlib.import_module(name)
    if provider.path is not None and not str(module.__file__).startswith(provider.path):
        raise ImportError(f"{name} came from elsewhere than the checkout of {provider.name}")
    return module


def _no_lengths(case: Case) -> None:
    if case.lengths != "full":
        raise Unsupported("has no argument for lengths")


def _ours(provider: Provider, case: Case, device: str) -> Loss:
    library = _import(provider, "softdtw_cuda")
    if case.mode == EXPECTED_COST:
        if provider.option != "fused":
            raise Unsupported("the same as the fused one")
        expected = library.softdtw_expected_cost
        return lambda x, y, x_lengths, y_lengths: expected(
            x,
            y,
            gamma=case.gamma,
            bandwidth=case.bandwidth,
            x_lengths=x_lengths,
            y_lengths=y_lengths,
        )
    softdtw = library.softdtw

    def loss(x: Tensor, y: Tensor, x_lengths: Tensor | None, y_lengths: Tensor | None) -> Tensor:
        value: Tensor = softdtw(
            x,
            y,
            gamma=case.gamma,
            bandwidth=case.bandwidth,
            normalize=case.normalize,
            fused=provider.option == "fused",
            x_lengths=x_lengths,
            y_lengths=y_lengths,
        )
        return value

    return loss


def _paper(provider: Provider, case: Case, device: str) -> Loss:
    _no_lengths(case)
    if device == "cpu" and provider.option == "fused":
        raise Unsupported("is fused on CUDA alone")
    module = _import(provider, "softdtw_cuda").SoftDTW(
        gamma=case.gamma,
        bandwidth=case.bandwidth,
        normalize=case.normalize,
        fused=provider.option == "fused",
    )
    return lambda x, y, x_lengths, y_lengths: module(x, y)


def _maghoumi(provider: Provider, case: Case, device: str) -> Loss:
    _no_lengths(case)
    if device == "cuda" and max(case.n, case.m) > 1024:
        raise Unsupported("computes series over 1024 steps on the CPU")
    module = _import(provider, "soft_dtw_cuda").SoftDTW(
        use_cuda=device == "cuda", gamma=case.gamma, normalize=case.normalize, bandwidth=case.bandwidth
    )
    return lambda x, y, x_lengths, y_lengths: module(x, y)


def _pysdtw(provider: Provider, case: Case, device: str) -> Loss:
    _no_lengths(case)
    if case.normalize:
        raise Unsupported("has no divergence")
    module = _import(provider, "pysdtw").SoftDTW(
        gamma=case.gamma, use_cuda=device == "cuda", bandwidth=case.bandwidth
    )
    return lambda x, y, x_lengths, y_lengths: module(x, y)


def _tslearn(provider: Provider, case: Case, device: str) -> Loss:
    _no_lengths(case)
    band = {} if case.bandwidth is None else {"global_constraint": "sakoe_chiba"}
    module = _import(provider, "tslearn.metrics").SoftDTWLossPyTorch(
        gamma=case.gamma, normalize=case.normalize, sakoe_chiba_radius=case.bandwidth, **band
    )
    return lambda x, y, x_lengths, y_lengths: module(x, y)


def _philtorch(provider: Provider, case: Case, device: str) -> Loss:
    _no_lengths(case)
    if device == "cpu" or case.normalize or case.bandwidth is not None or case.mode == EXPECTED_COST:
        raise Unsupported("computes plain values and their derivatives from a cost matrix, on CUDA alone")
    dtw = _import(provider, "philtorch.align").dtw

    def loss(x: Tensor, y: Tensor, x_lengths: Tensor | None, y_lengths: Tensor | None) -> Tensor:
        squares = x.square().sum(2).unsqueeze(2) + y.square().sum(2).unsqueeze(1)
        value: Tensor = dtw(squares - 2 * x @ y.transpose(1, 2), case.gamma)
        return value

    return loss


def _custom(provider: Provider, case: Case, device: str) -> Loss:
    loss: Loss = _import(provider, "benchmark_adapter").make_loss(case, device)
    return loss


_ADAPTERS: dict[str, Callable[[Provider, Case, str], Any]] = {
    "ours": _ours,
    "paper": _paper,
    "maghoumi": _maghoumi,
    "pysdtw": _pysdtw,
    "tslearn": _tslearn,
    "philtorch": _philtorch,
    "custom": _custom,
}
