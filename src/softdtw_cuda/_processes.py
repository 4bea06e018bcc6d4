"""Rows divided among the processes of torch.distributed, and gathered again in the same order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist


@dataclass(frozen=True)
class Processes:
    """The default group, or one process without a group. Every process makes the same calls in one order."""

    rank: int = 0
    count: int = 1

    def divide(self, work: Tensor) -> list[slice]:
        """For each process a range of the rows, of about the same work (n,), integers on the host."""
        if self.count == 1:
            return [slice(0, len(work))]
        ends = work.cumsum(0)
        total = int(ends[-1]) if len(work) else 0
        shares = ends.new_tensor([total * k // self.count for k in range(1, self.count)])
        cuts = [0, *torch.searchsorted(ends, shares).tolist(), len(work)]
        return [slice(start, stop) for start, stop in itertools.pairwise(cuts)]

    def gather(self, own: Tensor, shares: list[slice]) -> Tensor:
        """The rows of all processes, in every process, out of this one's share."""
        if self.count == 1:
            return own
        home = own.device if dist.get_backend() == "nccl" else torch.device("cpu")
        sizes = [share.stop - share.start for share in shares]
        padded = own.new_zeros((max(sizes), *own.shape[1:]), device=home)
        padded[: len(own)] = own
        found = [torch.empty_like(padded) for _ in shares]
        dist.all_gather(found, padded)
        rows = torch.cat([each[:size] for each, size in zip(found, sizes, strict=True)])
        return rows.to(own.device)


ALONE = Processes()


def default_group() -> Processes:
    """The processes of torch.distributed's default group; this one alone where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    return Processes(dist.get_rank(), dist.get_world_size())
