"""DistributedDataParallel: two processes, each with half of the batch, get the gradient of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from softdtw_cuda import SoftDTW

PROCESSES = 2
STEPS = 2


def batch(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, steps, 3, generator=generator).to(device) for steps in (40, 50))
    return x, y


def model(device: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 3).to(device)


def train(given: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Parameters after some steps."""
    loss = SoftDTW(gamma=0.5, reduction="mean")
    optimizer = torch.optim.SGD(given.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(given(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in given.parameters()]


def work(rank: int, device: str, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=PROCESSES
    )
    try:
        shared = nn.parallel.DistributedDataParallel(model(device))
        x, y = (side.chunk(PROCESSES)[rank] for side in batch(device))
        torch.save(train(shared, x, y), f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_learn_what_one_would(device: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]  # documented, not annotated
        work, (device, str(tmp_path)), PROCESSES
    )
    expected = train(model(device), *batch(device))
    for rank in range(PROCESSES):
        learnt = torch.load(tmp_path / f"{rank}.pt")
        for ours, theirs, start in zip(learnt, expected, model(device).parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            assert not torch.allclose(theirs, start, rtol=1e-3)
