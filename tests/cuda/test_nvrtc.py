"""NVRTC, which needs no GPU, compiles the kernels for every architecture, and says what they take.

The ordinary suite compiles everything that can run on a data-centre card of compute capability 9.0 and, for
the other architectures, one kernel of each kind. SOFTDTW_CUDA_ALL_KERNELS=1 compiles all, in minutes.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator

import pytest
import torch

from softdtw_cuda._cuda import config, config_dual
from softdtw_cuda._cuda.compile import compile_source
from softdtw_cuda._cuda.config import Device
from softdtw_cuda._cuda.kernel import (
    BACKWARD,
    COST,
    DIRECT,
    FORWARD,
    FORWARD_BACKWARD,
    INPUT_CODES,
    MATRIX,
    PAIR,
    RERUN,
    SCALE,
    TENSOR,
    TILED,
    UNIVARIATE,
    Kernel,
    ScaleKernel,
)
from tests.cuda.nvrtc_usage import Compilations, Usage, usage_of

pytest.importorskip("cuda.core")
pytestmark = pytest.mark.slow

ARCHITECTURES = {
    "sm_75": Device(shared_bytes=65536, capability=(7, 5), processors=40),
    "sm_80": Device(shared_bytes=166912, capability=(8, 0), processors=108),
    "sm_90": Device(shared_bytes=232448, capability=(9, 0), processors=132),
    "sm_100": Device(shared_bytes=232448, capability=(10, 0), processors=148),
    "sm_120": Device(shared_bytes=101376, capability=(12, 0), processors=170),
}
FEATURES = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 40, 64, 65, 80, 128, 130, 132, 4096)
ALL = os.environ.get("SOFTDTW_CUDA_ALL_KERNELS") == "1"

REGISTERS_OF_A_PROCESSOR = 65536


@functools.cache
def kernels_for(device: Device) -> tuple[Kernel, ...]:
    """Every kernel that a call on this device can ask for."""
    flags = (False, True)
    choices = itertools.product(flags, FEATURES, INPUT_CODES, flags, flags, flags)
    plans = [config.choose(*choice, device, many) for choice in choices for many in flags]
    return tuple(dict.fromkeys(kernel for plan in plans for kernel in (plan.main, plan.rerun) if kernel))


def one_of_each_kind(kernels: tuple[Kernel, ...]) -> list[Kernel]:
    """Of each kind the float32 kernel with most in it: a band, features that do not fill a row."""
    kinds: dict[tuple[object, ...], Kernel] = {}
    for kernel in kernels:
        many = kernel.dims > config.FEATURES_AT_A_TIME
        kind = (kernel.source, kernel.mode, kernel.wide, kernel.lane_rows, kernel.sliced, kernel.packed, many)
        best = kinds.get(kind)
        if best is None or _weight(kernel) > _weight(best):
            kinds[kind] = kernel
    return list(kinds.values())


def _weight(kernel: Kernel) -> tuple[object, ...]:
    return kernel.input_code == 0, kernel.dims, kernel.banded, -kernel.fit


def wanted() -> Iterator[tuple[str, Kernel]]:
    for architecture, device in ARCHITECTURES.items():
        kernels = kernels_for(device)
        if not ALL:
            # Every float32 kernel for one architecture, and one of each kind of the rest.
            first = [k for k in kernels if architecture == "sm_90" and k.input_code == 0]
            rest = tuple(k for k in kernels if k not in first)
            kernels = (*first, *one_of_each_kind(rest))
        for kernel in kernels:
            yield architecture, kernel


def name_of(value: object) -> str:
    if not isinstance(value, Kernel):
        return str(value)
    mode = {COST: "cost", DIRECT: "direct", UNIVARIATE: "univariate", TENSOR: "tensor"}[value.mode]
    dtype = {code: str(dtype)[6:] for dtype, code in INPUT_CODES.items()}[value.input_code]
    flags = [name for name in ("wide", "banded", "sliced") if getattr(value, name)]
    return "-".join(
        [value.source, mode, dtype, f"dims{value.dims}", f"rows{value.lane_rows}", f"fit{value.fit}", *flags]
    )


def blocks_per_processor(kernel: Kernel, part: str, device: Device) -> int:
    """The second argument of the kernels' THREADS_PER_BLOCK, which the launch functions count on."""
    if kernel.source != TILED:
        forward = 8 if kernel.wide else 16 if device.capability >= (10, 0) else 20
        if kernel.source == MATRIX:
            return 12 if device.capability >= (9, 0) else 8
        if kernel.source == PAIR:
            return 16 if part == FORWARD else 8
        return {FORWARD: forward, BACKWARD: 4, RERUN: 2, FORWARD_BACKWARD: 4}[part]
    return kernel.forward_blocks if part == FORWARD else 1


@pytest.mark.parametrize(("architecture", "kernel"), list(wanted()), ids=name_of)
def test_it_compiles_within_limits(compilations: Compilations, architecture: str, kernel: Kernel) -> None:
    device = ARCHITECTURES[architecture]
    for part in kernel.parts:
        binary, usage = compilations[architecture, kernel, part].result()
        usage = dict(usage)
        assert binary[:4] == b"\x7fELF"
        used = usage.pop(kernel.name(part))
        assert used.registers
        assert all(called == Usage(0, 0, 0, 0) for called in usage.values()), usage
        # Registers are handed out to warps in units of 256.
        registers = (used.registers + 7) // 8 * 8
        threads = kernel.threads(part) * blocks_per_processor(kernel, part, device)
        assert registers * threads <= REGISTERS_OF_A_PROCESSOR, used
        assert used.spilled == 0, used
        assert used.stack == 0, used
        assert used.shared + kernel.shared(part) <= device.shared_bytes, used


def dual_wanted() -> Iterator[tuple[str, config_dual.DualKernel]]:
    """Second order: every kernel for one architecture, those with most registers for the rest."""
    for architecture, device in ARCHITECTURES.items():
        for kind, mode, double in itertools.product(config_dual.KINDS, (DIRECT, COST), (False, True)):
            if kind == "tangents" and mode == COST:
                continue
            if architecture == "sm_90" or kind == "tangents" or ALL:
                kernel = config_dual.choose(mode, kind, double, device)
                if kernel is not None:
                    yield architecture, kernel


@pytest.mark.parametrize(("architecture", "kernel"), list(dual_wanted()), ids=str)
def test_second_order_compiles_within_limits(
    compilations: Compilations, architecture: str, kernel: config_dual.DualKernel
) -> None:
    device = ARCHITECTURES[architecture]
    for part, blocks in zip(kernel.parts, kernel.blocks, strict=True):
        _, usage = compilations[architecture, kernel, part].result()
        used = usage[kernel.name(part)]
        registers = (used.registers + 7) // 8 * 8
        assert 0 < registers * kernel.threads(part) * blocks <= REGISTERS_OF_A_PROCESSOR, used
        assert used.spilled == used.stack == 0, used
        assert used.shared + kernel.shared(part) <= device.shared_bytes, used


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", [SCALE], ids=["scale"])
def test_scaling_compiles_within_limits(
    compilations: Compilations, architecture: str, kernel: ScaleKernel
) -> None:
    _, usage = compilations[architecture, kernel, BACKWARD].result()
    used = usage[kernel.name(BACKWARD)]
    # All threads of a processor at a time: 2048, half of them on some cards.
    assert 0 < used.registers <= REGISTERS_OF_A_PROCESSOR // 2048
    assert used.spilled == used.stack == used.shared == 0, used


def test_the_log_is_understood() -> None:
    log = """
ptxas info    : Compiling entry function 'a_backward' for 'sm_90'
ptxas info    : Function properties for a_backward
ptxas         .     24 bytes stack frame, 64 bytes spill stores, 52 bytes spill loads
ptxas info    : Used 128 registers, used 3 barriers, 1024 bytes smem
ptxas info    : Compiling entry function 'a_forward' for 'sm_90'
ptxas info    : Function properties for a_forward
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 2 barriers
"""
    assert usage_of(log) == {"a_backward": Usage(128, 24, 64, 1024), "a_forward": Usage(96, 0, 0, 0)}


def test_the_kinds_cover_every_source_and_mode() -> None:
    for architecture, device in ARCHITECTURES.items():
        everything = kernels_for(device)
        some = one_of_each_kind(everything)
        assert {(k.source, k.mode, k.wide) for k in some} == {(k.source, k.mode, k.wide) for k in everything}
        assert len(some) < len(everything) / 2, architecture


def test_the_sources_compare_shared_memory_with_what_is_asked_for() -> None:
    """Static assertions compare the structures with what `config` computes, to the byte."""
    kernel = config.choose(False, 5, torch.float32, False, True, True, ARCHITECTURES["sm_90"]).main

    class Generous(Kernel):
        def defines(self) -> dict[str, int]:
            return {**super().defines(), self.macro: 64 + getattr(self, self.macro.lower())}

        macro = ""

    fields = {name: getattr(kernel, name) for name in kernel.__dataclass_fields__}
    for macro in ("FORWARD_SHARED", "BACKWARD_SHARED"):
        generous = Generous(**fields)
        object.__setattr__(generous, "macro", macro)
        with pytest.raises(Exception, match="another size of shared memory"):
            compile_source(generous, FORWARD, "sm_90")
